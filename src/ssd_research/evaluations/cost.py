"""Draft and verify cost in autoregressive steps, beside the paper's Table 13."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from ssd_research import paper
from ssd_research.backbones.base import Backbone
from ssd_research.metrics import cost
from ssd_research.metrics.cost import Bench
from ssd_research.prompts import load_prompts
from ssd_research.provenance import device_name, git_sha
from ssd_research.reporting.tables import Column, Table
from ssd_research.runs import (
    load_backbone,
    numeric_identity,
    open_run,
    resolve_sampling,
    whole_number,
    write_atomic,
)

log = logging.getLogger(__name__)

COLUMNS = (
    Column("source", "Source"),
    Column("tokens", "Tokens"),
    Column("drafting_ar_steps", "Drafting (AR steps)", digits=3),
    Column("verification_ar_steps", "Verification (AR steps)", digits=3),
    Column("tokens_per_step", "Tokens per AR step of time"),
)


def run(cfg: DictConfig) -> Path:
    """Time drafts and verifications of 1 to `eval.rows` rows (`eval=cost`)."""
    backbone = load_backbone(cfg)
    sampling = resolve_sampling(cfg, backbone)
    prompt = load_prompts(cfg.prompts, {**cfg.selection, "limit": 1})[0].text
    facts = settings(cfg, backbone)
    identity = {
        **numeric_identity(backbone),
        **facts,
        "metric": ["cost", cost.VERSION],
        "prompt": prompt,
        "sampling": asdict(sampling),
        "git_sha": git_sha(),
    }
    stage = open_run(cfg, "evaluate", identity)
    if stage.done:
        return stage.folder
    rows, repeats = facts["rows"], facts["repeats"]
    prompts = [prompt] * facts["batch_size"]
    bench = Bench.start(backbone, prompts, sampling=sampling, rows=rows, repeats=repeats)
    found = cost.measure(bench, rows=rows, positions=facts["positions"])
    table = costs(found, facts, model=cfg.model.name)
    scores = {
        "benchmark": cfg.eval.name,
        "version": cost.VERSION,
        "judge": f"{backbone.name} {backbone.fingerprint}",
        **facts,
        "n_expected": rows,
        "n_scored": len(found),
        "coverage": 1.0,
        "missing": [],
        "higher_is_better": False,
        "seed": cfg.seed,
        "blocks": found,
        "table": asdict(table),
    }
    write_atomic(stage.folder / "scores.json", json.dumps(scores, indent=2) + "\n")
    write_atomic(stage.folder / "table.md", table.markdown())
    log.info(table.markdown())
    return stage.finish({"blocks": found})


def settings(cfg: DictConfig, backbone: Backbone) -> dict[str, Any]:
    """Return what is measured and on what; ValueError for more rows than the grid has."""
    rows = whole_number(cfg, "eval.rows", minimum=1)
    most = backbone.grid.rows - 1
    if rows > most:
        raise ValueError(f"eval.rows={rows} must lie between 1 and {most} on this grid")
    positions = whole_number(cfg, "eval.positions", minimum=1)
    return {
        "device": device_name(torch.device(backbone.device).type),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "rows": rows,
        "positions": len(cost.places(backbone.grid.rows, rows, positions)),
        "repeats": whole_number(cfg, "eval.repeats", minimum=1),
        "batch_size": whole_number(cfg, "eval.batch_size", minimum=1),
    }


def costs(found: Sequence[dict[str, Any]], facts: dict[str, Any], *, model: str) -> Table:
    """Return our costs, then the paper's of the same model."""
    printed = [{"source": "here", **row} for row in found]
    printed += [{"source": "paper", **row} for row in paper.table(13) if row["model"] == model]
    caption = (
        f"Draft and verify cost on {facts['device']}, {facts['dtype']}, batch "
        f"{facts['batch_size']}: medians of {facts['repeats']} repetitions, means over "
        f"{facts['positions']} places in the image."
    )
    return Table(caption, COLUMNS, printed)
