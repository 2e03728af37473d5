"""Acceptance by offset: how often each draft head's drafts would be accepted (paper Figure 1)."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from omegaconf import DictConfig

from ssd_research.backbones.base import Backbone
from ssd_research.evaluations.images import image_root, run_of, write_rows
from ssd_research.heads import DraftHeads
from ssd_research.metrics import acceptance
from ssd_research.metrics.acceptance import MEASURES, Offset
from ssd_research.metrics.likelihood import sampling_of
from ssd_research.prompts.selection import text_hash
from ssd_research.reporting.tables import Column, Table
from ssd_research.runs import (
    heads_digest,
    heads_folder,
    load_backbone,
    load_heads,
    numeric_identity,
    open_run,
    run_id,
    whole_number,
    write_atomic,
)
from ssd_research.sampling import Sampling
from ssd_research.workload import batches, progress

log = logging.getLogger(__name__)

COLUMNS = (
    Column("axis", "Axis"),
    Column("offset", "Offset"),
    Column("sampled", "Sampled draft", digits=3),
    Column("argmax", "Most likely draft", digits=3),
    Column("match", "p of the most likely", digits=3),
)


def run(cfg: DictConfig, images: str) -> Path:
    """Measure the heads on the codes of a generate run, AR's by rights (`eval=acceptance`)."""
    root = image_root(images)
    made = root.parent
    backbone, heads, digest = load(cfg)
    sampling = sampling_of(made, backbone)
    rows = chosen(made / "images.parquet", cfg, backbone)
    samples = whole_number(cfg, "evaluate.bootstrap", minimum=1)
    identity = {
        **numeric_identity(backbone),
        "metric": ["acceptance", acceptance.VERSION],
        "images": run_id({"prompts_and_codes": [[row["prompt"], row["codes"]] for row in rows]}),
        "of": run_of(root),
        "heads": digest,
        "sampling": asdict(sampling),
        "bootstrap": [samples, cfg.seed],
    }
    stage = open_run(cfg, "evaluate", identity)
    if stage.done:
        return stage.folder
    size = whole_number(cfg, "batch_size", minimum=1)
    found = measure(backbone, heads, rows, sampling=sampling, batch_size=size)
    write_rows(per_image(rows, found), path=stage.folder / "per_image.parquet")
    offsets = acceptance.summarise(found, samples=samples, seed=cfg.seed)
    table = Table(f"Acceptance by offset, {len(rows)} images.", COLUMNS, offsets)
    scores = {
        "benchmark": cfg.eval.name,
        "version": acceptance.VERSION,
        "judge": f"{backbone.name} {backbone.fingerprint}",
        "heads": digest,
        "images": str(made),
        "n_expected": len(rows),
        "n_scored": len(rows),
        "coverage": 1.0,
        "missing": [],
        "higher_is_better": True,
        "seed": cfg.seed,
        "offsets": offsets,
        "table": asdict(table),
    }
    write_atomic(stage.folder / "scores.json", json.dumps(scores, indent=2) + "\n")
    write_atomic(stage.folder / "table.md", table.markdown())
    log.info(table.markdown())
    return stage.finish({"images": len(rows)})


def load(cfg: DictConfig) -> tuple[Backbone, DraftHeads, str]:
    """Return the backbone, its draft heads and the sha256 of their file.

    Raises ValueError where heads are missing or of another kind.
    """
    if cfg.heads.path is None:
        raise ValueError(
            f"eval={cfg.eval.name} measures draft heads and heads.path is null; "
            "set it to the heads of a train run"
        )
    folder = heads_folder(cfg)  # a missing folder shows before a large backbone is loaded
    backbone = load_backbone(cfg)
    heads = load_heads(cfg, backbone)
    if not isinstance(heads, DraftHeads):
        raise ValueError(f"heads.path={folder} holds no spatial draft heads")
    return backbone, heads, heads_digest(cfg)


def measure(
    backbone: Backbone,
    heads: DraftHeads,
    rows: Sequence[dict[str, Any]],
    *,
    sampling: Sampling,
    batch_size: int,
) -> list[Offset]:
    """Return the acceptance at every offset, batch by batch."""
    found: list[Offset] = []
    with progress("acceptance", total=len(rows), done=0) as bar:
        for batch in batches(rows, batch_size):
            codes = torch.tensor([row["codes"] for row in batch])
            prompts = [row["prompt"] for row in batch]
            found += acceptance.by_offset(backbone, heads, prompts, codes, sampling)
            bar.update(len(batch))
    return found


def chosen(table: Path, cfg: DictConfig, backbone: Backbone) -> list[dict[str, Any]]:
    """Return the images to measure on: `eval.limit` of them by a seeded hash, or all.

    Raises ValueError if there are none, one twice, or one whose codes are none of the backbone's.
    """
    columns = ["prompt_id", "prompt", "image_index", "codes"]
    try:
        rows = pq.read_table(table, columns=columns).to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{table} is not the table of a generate run: {error}") from error
    size, most = backbone.grid.size, backbone.codebook_size
    if not rows:
        raise ValueError(f"{table} lists no images")
    for row in rows:
        codes = row["codes"]
        if len(codes) != size or not 0 <= min(codes) <= max(codes) < most:
            raise ValueError(
                f"{table}: an image of prompt {row['prompt_id']} is not {size} codes below {most}; "
                "use the model= that made it"
            )
    if len({(row["prompt_id"], row["image_index"]) for row in rows}) < len(rows):
        raise ValueError(f"{table} lists an image twice")
    if cfg.eval.limit is None:
        return rows
    limit = whole_number(cfg, "eval.limit", minimum=1)

    def rank(row: dict[str, Any]) -> tuple[int, int]:
        return text_hash(row["prompt_id"], seed=cfg.seed), row["image_index"]

    return sorted(rows, key=rank)[:limit]


def per_image(rows: Sequence[dict[str, Any]], found: Sequence[Offset]) -> list[dict[str, Any]]:
    """Return one row per image: its acceptance at every offset."""
    columns: dict[str, list[float]] = {}
    for one in found:
        for name in MEASURES:
            column = columns.setdefault(f"{one.axis}_{one.offset}_{name}", [])
            column += [float(value) for value in getattr(one, name)]
    return [
        {
            "prompt_id": row["prompt_id"],
            "image_index": row["image_index"],
            **{name: values[n] for name, values in columns.items()},
        }
        for n, row in enumerate(rows)
    ]
