"""FID of generated images against reference images (paper Tables 8 and 9).

Features are stored before anything is scored, so a killed evaluation repeats none of them. FID has
no interval of its own: that comes from seeds (`eval=compare_seeds`).
"""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from ssd_research.evaluations.fid_reference import load_reference
from ssd_research.evaluations.images import allows_missing, image_root, run_of, write_rows
from ssd_research.metrics import fid
from ssd_research.metrics.fid import Reference
from ssd_research.metrics.frechet import fit, frechet_distance
from ssd_research.metrics.judges.features import FeatureExtractor
from ssd_research.metrics.picture_folder import (
    Picture,
    export_by_image_id,
    read_pictures,
    refuse_odd_sizes,
)
from ssd_research.paths import resolve_path
from ssd_research.prompts import load_prompts
from ssd_research.prompts.coco import read_captions
from ssd_research.runs import open_run, resolve_device, run_id, whole_number, write_atomic

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Coverage:
    """How many images a benchmark has, how many are there, and the prompts that lack some.

    With `eval.expected` alone the ids of prompts without any image are unknown and not among them.
    """

    n_expected: int
    n_scored: int
    missing: list[str]


def run(cfg: DictConfig, images: str) -> Path:
    """Score a folder of images by FID (`eval=coco_fid`, `eval=shapes_fid`)."""
    size = whole_number(cfg, "eval.batch_size", minimum=1)
    root, allowed = image_root(images), allows_missing(cfg)
    pictures = read_pictures(root)
    covered = coverage(cfg, pictures)
    refuse_missing(root, covered, allowed=allowed)
    refuse_odd_sizes(pictures)
    if cfg.eval.export is not None:
        export_by_image_id(pictures, Path(str(cfg.eval.export)).expanduser())
    extractor: FeatureExtractor = hydra.utils.instantiate(
        cfg.eval.extractor, device=resolve_device(cfg.runtime.device)
    )
    reference = load_reference(cfg, extractor)
    facts = identity(cfg, pictures, covered, reference)
    stage = open_run(cfg, "evaluate", {**facts, "of": run_of(root)})
    if stage.done:
        return stage.folder
    store = stage.folder / "features"
    features = torch.cat(list(fid.extract(pictures, extractor, store=store, batch_size=size)))
    write_per_image(pictures, features, path=stage.folder / "per_image.parquet")
    distance = frechet_distance(fit(features), reference.gaussian)
    scores = {
        "benchmark": cfg.eval.name,
        "version": fid.VERSION,
        "judge": f"{extractor.name} {extractor.revision}",
        "resize": extractor.resize,
        "num_features": extractor.num_features,
        "reference": {**asdict(reference.provenance), "n": reference.gaussian.count},
        "images": str(root),
        **asdict(covered),
        "coverage": covered.n_scored / covered.n_expected,
        "higher_is_better": False,
        "seed": cfg.seed,
        "fid": distance,
        "fid_ci95": None,
    }
    write_atomic(stage.folder / "scores.json", json.dumps(scores, indent=2) + "\n")
    shutil.rmtree(store)
    _say(scores)
    return stage.finish({"fid": distance, "n_scored": covered.n_scored})


def identity(
    cfg: DictConfig, pictures: Sequence[Picture], covered: Coverage, reference: Reference
) -> dict[str, Any]:
    """Return what can change the score: both sets of images, the extractor, what is due."""
    return {
        "benchmark": cfg.eval.name,
        "metric": ["fid", fid.VERSION],
        "images": run_id({f"{p.prompt_id} {p.image_index}": p.sha256 for p in pictures}),
        "reference": {**asdict(reference.provenance), "n": reference.gaussian.count},
        "due": asdict(covered),
    }


def coverage(cfg: DictConfig, pictures: Sequence[Picture]) -> Coverage:
    """Return which images the benchmark has; each prompt should have as many as the best of them.

    Raises ValueError if an image was made for another prompt, or there are too many prompts.
    """
    have = Counter(picture.prompt_id for picture in pictures)
    each, known = max(have.values()), known_prompts(cfg)
    if known is None:
        expected = whole_number(cfg, "eval.expected", minimum=1)
        if len(have) > expected:
            raise ValueError(f"there are images of {len(have)} prompts, eval.expected={expected}")
    else:
        expected = len(known)
        _refuse_strangers(known, pictures, benchmark=cfg.eval.name)
    missing = [prompt_id for prompt_id in known or sorted(have) if have[prompt_id] < each]
    return Coverage(each * expected, len(pictures), missing)


def known_prompts(cfg: DictConfig) -> dict[str, str] | None:
    """Return the benchmark's prompts by id, None where `eval.expected` only counts them.

    They are those of `eval.captions`, else six kinds of `eval.per_kind` in the shapes world.
    """
    seed = cfg.selection.caption_seed
    if cfg.eval.captions is not None:
        path = resolve_path(str(cfg.eval.captions))
        return {caption.id: caption.caption for caption in read_captions(path, seed=seed)}
    if seed is not None:
        raise ValueError(f"selection.caption_seed={seed} does nothing without eval.captions")
    if "per_kind" not in cfg.eval or cfg.eval.expected is not None:
        return None
    per_kind = whole_number(cfg, "eval.per_kind", minimum=1)
    prompts = load_prompts("shapes_geneval", {"per_kind": per_kind})
    return {prompt.id: prompt.text for prompt in prompts}


def _refuse_strangers(
    known: Mapping[str, str], pictures: Sequence[Picture], *, benchmark: str
) -> None:
    """Raise ValueError for a picture of no prompt of the benchmark, or made for other words."""
    for picture in pictures:
        if picture.prompt_id not in known:
            raise ValueError(
                f"{picture.file} is of prompt {picture.prompt_id}, which {benchmark} does not "
                f"have; its own are {next(iter(known))}, ..."
            )
        if picture.prompt not in (None, known[picture.prompt_id]):
            raise ValueError(
                f"{picture.file} was made for {picture.prompt!r}, but prompt {picture.prompt_id} "
                f"of {benchmark} is {known[picture.prompt_id]!r}"
            )


def refuse_missing(root: Path, covered: Coverage, *, allowed: bool) -> None:
    """Raise FileNotFoundError where images are missing and `evaluate.allow_missing` is false."""
    lacking = covered.n_expected - covered.n_scored
    if lacking and not allowed:
        listed = ", ".join(covered.missing[:3]) + (", ..." if len(covered.missing) > 3 else "")
        named = f" (of prompts {listed})" if listed else ""
        raise FileNotFoundError(
            f"{root}: {lacking} of {covered.n_expected} images are missing{named}; "
            "score what is there with evaluate.allow_missing=true"
        )


def write_per_image(pictures: Sequence[Picture], features: torch.Tensor, *, path: Path) -> None:
    """Write one row per image with its features, from which the score can be computed again."""
    rows = [
        {
            "prompt_id": picture.prompt_id,
            "image_index": picture.image_index,
            "filename": picture.name,
            "sha256": picture.sha256,
            "features": values,
        }
        for picture, values in zip(pictures, features.numpy(), strict=True)
    ]
    write_rows(rows, path=path)


def _say(scores: dict[str, Any]) -> None:
    """Log the distance in one line, and what keeps it from being the benchmark's."""
    log.info(
        "%s: FID %.3f over %d images, against %d reference images",
        scores["benchmark"],
        scores["fid"],
        scores["n_scored"],
        scores["reference"]["n"],
    )
    if scores["coverage"] != 1:
        log.warning("%(n_scored)d images scored, the benchmark has %(n_expected)d", scores)
