"""Deviation: how far a decoder's images lie from AR's for the same prompts (paper Table 11)."""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from omegaconf import DictConfig

from ssd_research.evaluations.images import image_root, run_of, write_rows
from ssd_research.metrics import deviation, fid
from ssd_research.metrics.judges.features import FeatureExtractor
from ssd_research.metrics.picture_folder import Picture, list_hash, read_pictures, refuse_odd_sizes
from ssd_research.runs import open_run, resolve_device, whole_number, write_atomic

log = logging.getLogger(__name__)


def run(cfg: DictConfig, images: str) -> Path:
    """Compare the images of a generate run with those of `eval.baseline` (`eval=deviation`)."""
    if cfg.eval.baseline is None:
        raise ValueError(
            "eval.baseline is null; name AR's generate run of the same prompts and "
            "images_per_prompt: eval.baseline=<run folder> evaluate.images=<run folder>"
        )
    roots = [image_root(str(cfg.eval.baseline), option="eval.baseline"), image_root(images)]
    sides = aligned([read_pictures(root) for root in roots])
    refuse_odd_sizes([picture for side in sides for picture in side])
    extractor: FeatureExtractor = hydra.utils.instantiate(
        cfg.eval.extractor, device=resolve_device(cfg.runtime.device)
    )
    facts = settings(cfg, extractor, shared=shared_seeds(cfg, roots))
    hashes = [list_hash(side) for side in sides]
    of = [run_of(root) for root in roots]
    identity = {"metric": ["deviation", deviation.VERSION], "images": hashes, "of": of, **facts}
    stage = open_run(cfg, "evaluate", identity)
    if stage.done:
        return stage.folder
    stores = [stage.folder / f"features-{name}" for name in ("ar", "decoder")]
    ar, decoder = (
        features_of(side, extractor, store=store, cfg=cfg)
        for side, store in zip(sides, stores, strict=True)
    )
    rows = deviation.per_prompt(ar, decoder, shared_seeds=facts["shared_seeds"])
    write_per_prompt(sides[0], rows, path=stage.folder / "per_image.parquet")
    scores = {
        "benchmark": cfg.eval.name,
        "version": deviation.VERSION,
        **facts,
        "images": str(roots[1]),
        "baseline": str(roots[0]),
        "n_expected": len(sides[1]),
        "n_scored": len(sides[1]),
        "coverage": 1.0,
        "missing": [],
        "higher_is_better": None,
        **summary(ar, rows, splits=facts["splits"], samples=facts["bootstrap"], seed=facts["seed"]),
    }
    write_atomic(stage.folder / "scores.json", json.dumps(scores, indent=2) + "\n")
    for store in stores:
        shutil.rmtree(store)
    _say(scores)
    return stage.finish({key: scores[key] for key in ("location", "location_debiased", "scale")})


def settings(cfg: DictConfig, extractor: FeatureExtractor, *, shared: bool) -> dict[str, Any]:
    """Return what besides the images can change the figures."""
    if not isinstance(cfg.eval.normalize, bool):
        raise ValueError(f"eval.normalize={cfg.eval.normalize} must be true or false")
    return {
        "judge": f"{extractor.name} {extractor.revision}",
        "resize": extractor.resize,
        "normalize": cfg.eval.normalize,
        "shared_seeds": shared,
        "splits": whole_number(cfg, "eval.splits", minimum=1),
        "bootstrap": whole_number(cfg, "evaluate.bootstrap", minimum=1),
        "seed": whole_number(cfg, "seed"),
    }


def aligned(sides: Sequence[Sequence[Picture]]) -> list[list[Picture]]:
    """Return both sides in the same order of prompt and index.

    Raises ValueError unless they have the same prompts, as many images of each, and at least two.
    """
    tables = [{(p.prompt_id, p.image_index): p for p in side} for side in sides]
    if tables[0].keys() != tables[1].keys():
        odd = sorted(tables[0].keys() ^ tables[1].keys())[0]
        raise ValueError(
            f"eval.baseline and evaluate.images must hold the same prompts and images: image "
            f"{odd[1]} of prompt {odd[0]} is in one of them only"
        )
    keys = sorted(tables[0])
    each = Counter(prompt_id for prompt_id, _ in keys)
    if len(set(each.values())) > 1 or len(keys) == len(each):
        raise ValueError(
            f"{len(keys)} images of {len(each)} prompts: every prompt needs the same number, "
            "at least 2; generate with images_per_prompt=10"
        )
    ordered = [[table[key] for key in keys] for table in tables]
    for one, other in zip(*ordered, strict=True):
        if None not in (one.prompt, other.prompt) and one.prompt != other.prompt:
            raise ValueError(
                f"eval.baseline and evaluate.images must be of the same prompts: {one.prompt_id} "
                f"is {one.prompt!r} in one and {other.prompt!r} in the other"
            )
    return ordered


def shared_seeds(cfg: DictConfig, roots: Sequence[Path]) -> bool:
    """Return whether image n of both sides met the same noise; null reads the runs' own seeds."""
    given = cfg.eval.shared_seeds
    if given is not None:
        if not isinstance(given, bool):
            raise ValueError(f"eval.shared_seeds={given} must be true, false or null")
        return given
    seeds = []
    for root in roots:
        try:
            meta = json.loads((root.parent / "meta.json").read_text(encoding="utf-8"))
            seeds.append(meta["identity"]["seed"])
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise ValueError(
                f"{root} does not say its seed; set eval.shared_seeds=true or false"
            ) from error
    return seeds[0] == seeds[1]


def features_of(
    pictures: Sequence[Picture], extractor: FeatureExtractor, *, store: Path, cfg: DictConfig
) -> np.ndarray:
    """Return features [K, N, d] of K prompts with N images each, of unit length if asked."""
    size = whole_number(cfg, "eval.batch_size", minimum=1)
    batches = fid.extract(pictures, extractor, store=store, batch_size=size)
    features = torch.cat(list(batches)).numpy()
    prompts = len({picture.prompt_id for picture in pictures})
    features = features.reshape(prompts, -1, features.shape[-1])
    return deviation.normalise(features) if cfg.eval.normalize else features


def summary(
    ar: np.ndarray, rows: np.ndarray, *, splits: int, samples: int, seed: int
) -> dict[str, Any]:
    """Return the figures of Table 11, debiased too, with intervals and AR's own null."""
    found = deviation.pool(rows)
    null = None
    if ar.shape[1] >= 4:
        null = deviation.split_half_null(ar, splits=splits, seed=seed)
    return {
        "prompts": len(ar),
        "images_per_prompt": ar.shape[1],
        **asdict(found),
        "location": found.location,
        "scale": found.scale,
        "shift_debiased": found.shift_debiased,
        "location_debiased": found.location_debiased,
        **deviation.intervals(rows, samples=samples, seed=seed),
        "split_half_null": null,
    }


def write_per_prompt(pictures: Sequence[Picture], rows: np.ndarray, *, path: Path) -> None:
    """Write the figures of every prompt."""
    ids = list(dict.fromkeys(picture.prompt_id for picture in pictures))
    names = ("shift", "trace_ar", "trace_decoder", "noise")
    write_rows(
        [
            {"prompt_id": prompt_id, **dict(zip(names, map(float, row), strict=True))}
            for prompt_id, row in zip(ids, rows, strict=True)
        ],
        path=path,
    )


def _say(scores: dict[str, Any]) -> None:
    log.info(
        "deviation: centre shift %(location).2f AR s.d. (debiased %(location_debiased).2f), "
        "spread %(scale)+.0f %%",
        {**scores, "scale": 100 * scores["scale"]},
    )
