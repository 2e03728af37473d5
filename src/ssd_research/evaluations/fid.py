"""FID of generated images against reference images (paper Tables 8 and 9).

Features are stored before anything is scored, so a killed evaluation repeats none of them. FID has
no interval of its own: that comes from seeds (`eval=compare_seeds`).
"""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from ssd_research.evaluations.fid_reference import load_reference
from ssd_research.evaluations.images import image_root, refuse_short_run, write_rows
from ssd_research.metrics import fid
from ssd_research.metrics.fid import Reference
from ssd_research.metrics.frechet import fit, frechet_distance
from ssd_research.metrics.judges.features import FeatureExtractor
from ssd_research.metrics.picture_folder import Picture, export_by_image_id, read_pictures
from ssd_research.paths import resolve_path
from ssd_research.prompts.coco import Caption, read_captions
from ssd_research.runs import open_run, resolve_device, run_id, whole_number, write_atomic

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Coverage:
    """How many images a benchmark has, how many are there, and the prompts that lack some.

    Only prompts whose ids are known can be named.
    """

    n_expected: int
    n_scored: int
    missing: list[str]


def run(cfg: DictConfig, images: str) -> Path:
    """Score a folder of images by FID (`eval=coco_fid`, `eval=shapes_fid`)."""
    size = whole_number(cfg, "eval.batch_size", minimum=1)
    root = image_root(images)
    pictures = read_pictures(root)
    refuse_short_run(root, len(pictures))
    covered = coverage(cfg, pictures)
    refuse_missing(root, covered, allowed=cfg.evaluate.allow_missing)
    if cfg.eval.export is not None:
        export_by_image_id(pictures, Path(str(cfg.eval.export)).expanduser())
    extractor: FeatureExtractor = hydra.utils.instantiate(
        cfg.eval.extractor, device=resolve_device(cfg.runtime.device)
    )
    reference = load_reference(cfg, extractor)
    stage = open_run(cfg, "evaluate", identity(cfg, pictures, covered, reference))
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
        "expected": covered.n_expected,
    }


def coverage(cfg: DictConfig, pictures: Sequence[Picture]) -> Coverage:
    """Return which images the benchmark has.

    Its prompts are those of `eval.captions`, else as many as `eval.expected` says, else six kinds
    of `eval.per_kind`; each should have as many images as the best of them. Raises ValueError if
    an image was made for another prompt, or there are too many prompts.
    """
    have = Counter(picture.prompt_id for picture in pictures)
    each, wanted = max(have.values()), sorted(have)
    if cfg.eval.captions is not None:
        file, seed = resolve_path(str(cfg.eval.captions)), cfg.selection.caption_seed
        captions = read_captions(file, seed=seed)
        _refuse_strangers(captions, pictures)
        wanted = [caption.id for caption in captions]
        prompts = len(wanted)
    else:
        prompts = 6 * cfg.eval.per_kind if cfg.eval.expected is None else cfg.eval.expected
    if len(have) > prompts:
        raise ValueError(f"there are images of {len(have)} prompts, {cfg.eval.name} has {prompts}")
    missing = [prompt_id for prompt_id in wanted if have[prompt_id] < each]
    return Coverage(each * prompts, len(pictures), missing)


def _refuse_strangers(captions: Sequence[Caption], pictures: Sequence[Picture]) -> None:
    """Raise ValueError for a picture of no listed image, or of another caption of it."""
    known = {caption.id: caption.caption for caption in captions}
    for picture in pictures:
        if picture.prompt_id not in known:
            raise ValueError(
                f"{picture.name} is named {picture.prompt_id}, which is no image of eval.captions; "
                "names are <image id, 12 digits>.png"
            )
        if picture.prompt not in (None, known[picture.prompt_id]):
            raise ValueError(
                f"{picture.name} was made for {picture.prompt!r}, but eval.captions with this "
                f"selection.caption_seed has {known[picture.prompt_id]!r}"
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
