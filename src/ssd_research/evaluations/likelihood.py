"""Likelihood: how likely the backbone finds the codes of a generate run."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig

from ssd_research.evaluations.images import image_root, write_rows
from ssd_research.metrics import likelihood
from ssd_research.runs import load_backbone, numeric_identity, open_run, write_atomic

log = logging.getLogger(__name__)


def run(cfg: DictConfig, images: str) -> Path:
    """Score the codes of a generate run under the law it sampled from (`eval=likelihood`)."""
    made = image_root(images).parent
    backbone = load_backbone(cfg)
    sampling = likelihood.sampling_of(made, backbone)
    identity = {
        **numeric_identity(backbone),
        "images": made.name,
        "sampling": asdict(sampling),
        "metric": ["likelihood", likelihood.VERSION],
    }
    stage = open_run(cfg, "evaluate", identity)
    if stage.done:
        return stage.folder
    rows = likelihood.score_images(
        backbone, made / "images.parquet", sampling=sampling, batch_size=cfg.batch_size
    )
    write_rows(rows, path=stage.folder / "per_image.parquet")
    scores = {**likelihood.aggregate(rows), "images": str(made)}
    write_atomic(stage.folder / "scores.json", json.dumps(scores, indent=2) + "\n")
    log.info("likelihood: %(nll).3f %(unit)s over %(n_scored)d images", scores)
    return stage.finish({"nll": scores["nll"]})
