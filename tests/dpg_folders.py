"""Folders of images for DPG-Bench's tests: dense scenes of the shapes world in every layout."""

import json
from functools import cache
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from PIL import Image

from ssd_research.paths import conf_dir
from ssd_research.shapes import benchmark
from ssd_research.shapes.captions import caption
from ssd_research.shapes.render import render
from ssd_research.shapes.scenes import Spec, sample_scene, sample_spec

ITEMS, TILES = 3, 4


@cache
def dense_specs(count: int = ITEMS) -> dict[str, Spec]:
    """Return the specs behind `benchmark.dpg_rows` by item id."""
    draws = np.random.default_rng([0, len(benchmark.GENEVAL_KINDS)])
    found: dict[str, Spec] = {}
    while len(found) < count:
        spec = sample_spec("dense", draws)
        if caption(spec) not in map(caption, found.values()):
            found[f"shapes{len(found):04d}"] = spec
    return found


def picture(spec: Spec, seed: int) -> Image.Image:
    return Image.fromarray(render(sample_scene(spec, np.random.default_rng(seed))))


def write_run(root: Path, *, tiles: int = TILES, key: str = "item_id") -> Path:
    """Write right pictures of the dense captions in the layout of a generate run."""
    for index, (item_id, spec) in enumerate(dense_specs().items()):
        samples = root / f"{index:05d}" / "samples"
        samples.mkdir(parents=True)
        line = {key: item_id, "prompt": caption(spec)}
        (samples.parent / "metadata.jsonl").write_text(json.dumps(line) + "\n")
        for k in range(tiles):
            picture(spec, 10 * index + k).save(samples / f"{k:04d}.png")
    return root


def configure(images: Path, *overrides: str) -> DictConfig:
    """Return the configuration of an evaluation of `images` in the shapes world."""
    base = [
        "eval=shapes_dpg",
        f"evaluate.images={images}",
        f"output_dir={images.parent}/outputs",
        f"selection.limit={ITEMS}",
        f"images_per_prompt={TILES}",
        "evaluate.bootstrap=20",
        "runtime=cpu",
    ]
    with initialize_config_dir(str(conf_dir()), version_base=None):
        return compose("config", [*base, *overrides])


def scores_of(folder: Path) -> dict:
    return json.loads((folder / "scores.json").read_text())
