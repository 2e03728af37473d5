"""The reference statistics of an FID evaluation: found, checked, or made from reference images."""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from PIL import Image

from ssd_research.metrics import fid
from ssd_research.metrics.fid import Provenance, Reference
from ssd_research.metrics.frechet import Moments
from ssd_research.metrics.judges.features import FeatureExtractor
from ssd_research.metrics.picture_folder import Picture, list_hash, read_pictures
from ssd_research.paths import resolve_path
from ssd_research.runs import run_id, whole_number
from ssd_research.shapes import benchmark
from ssd_research.shapes.render import render
from ssd_research.shapes.scenes import sample_scene

log = logging.getLogger(__name__)


def load_reference(cfg: DictConfig, extractor: FeatureExtractor) -> Reference:
    """Return the reference statistics that `eval.reference` names, made from its images if need be.

    Without `statistics` they lie under `output_dir/reference`, named by what they are made of.

    Raises:
        ValueError: if the statistics were made differently, or nothing or too much names any.
        FileNotFoundError: if they are absent and so are the images.
    """
    options = cfg.eval.reference
    if options.render is not None and options.images is not None:
        raise ValueError(
            "eval.reference.images and eval.reference.render both say what the reference images "
            "are; with a folder of them add eval.reference.render=null"
        )
    place = Path(str(cfg.output_dir)).expanduser() / "reference"
    path = None if options.statistics is None else Path(str(options.statistics)).expanduser()
    if options.render is None and options.images is None:
        if path is None:
            raise ValueError(
                f"eval={cfg.eval.name} needs reference images or their statistics: "
                "eval.reference.images=<folder> or eval.reference.statistics=<file.npz>"
            )
        wanted = Provenance.of(extractor, preprocess=options.preprocess)
        return fid.read_reference(resolve_path(path), wanted)
    folder = resolve_path(str(options.images)) if options.images else scenes(cfg, place)
    pictures = read_pictures(folder)
    wanted = Provenance.of(extractor, preprocess=options.preprocess, images=list_hash(pictures))
    path = path or place / f"{cfg.eval.name}-{run_id(asdict(wanted))}.npz"
    if not path.exists():
        log.info("making reference statistics of %d images: %s", len(pictures), path)
        size = whole_number(cfg, "eval.batch_size", minimum=1)
        fid.write_reference(path, make(pictures, extractor, wanted, path=path, batch_size=size))
    return fid.read_reference(path, wanted)


def make(
    pictures: Sequence[Picture],
    extractor: FeatureExtractor,
    wanted: Provenance,
    *,
    path: Path,
    batch_size: int,
) -> Reference:
    """Return the statistics of pictures; features under way are kept beside `path`."""
    store = path.with_name(f".{path.stem}-{run_id(asdict(wanted))}")
    moments = Moments(extractor.num_features)
    batches = fid.extract(
        pictures, extractor, store=store, batch_size=batch_size, preprocess=wanted.preprocess
    )
    for features in batches:
        moments.add(features)
    shutil.rmtree(store)
    return Reference(moments.gaussian(), wanted)


def scenes(cfg: DictConfig, place: Path) -> Path:
    """Return a folder with `eval.reference.render` rendered scenes of every shapes prompt.

    They are what the prompts ask for, drawn by the world's own renderer, and made once.
    """
    each = whole_number(cfg, "eval.reference.render", minimum=1)
    per_kind = whole_number(cfg, "eval.per_kind", minimum=1)
    folder = place / f"shapes-{benchmark.VERSION}-{per_kind}x6x{each}"
    if not folder.is_dir():
        part = folder.with_name(f".{folder.name}.part")
        part.mkdir(parents=True, exist_ok=True)
        for index, spec in enumerate(benchmark.geneval_specs(per_kind=per_kind)):
            for k in range(each):
                scene = sample_scene(spec, np.random.default_rng([index, k]))
                Image.fromarray(render(scene)).save(part / f"{index:05d}-{k:04d}.png")
        part.replace(folder)
    return folder
