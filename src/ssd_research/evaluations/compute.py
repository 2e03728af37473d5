"""Compute and memory per image of a generate run, from what it counted (paper Table 12)."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig

from ssd_research.backbones.dimensions import Dimensions
from ssd_research.evaluations.images import image_root, write_rows
from ssd_research.metrics import compute
from ssd_research.metrics.compute import COUNTED, HeadSizes
from ssd_research.reporting.tables import Column, Table
from ssd_research.runs import open_run, run_id, whole_number, write_atomic

log = logging.getLogger(__name__)

OLDER = ": an older version made this run; move it away and repeat its generate command"
NAMED = ("prompt_id", "image_index", "batch_size", "peak_memory_bytes")
COLUMNS = (
    Column("part", "Per image"),
    Column("tflops", "TFLOPs", significant=3),
    Column("share", "Share", digits=1, suffix=" %"),
    Column("gb", "GB", significant=4),
)
LABELS = {
    "backbone": ("Backbone, all forwards", "weights_gb"),
    "attention": ("Attention; keys and values", "kv_gb"),
    "horizontal_heads": ("Draft heads, horizontal", None),
    "vertical_heads": ("Draft heads, vertical", None),
    "eagle": ("EAGLE drafter", None),
}


def run(cfg: DictConfig, images: str) -> Path:
    """Turn the counts of a generate run into FLOPs and bytes (`eval=compute`).

    Raises ValueError for what is no generate run, and for one that counted less.
    """
    root = image_root(images)
    made = root.parent if root.name == "images" else root
    meta, rows = read_meta(made), read_rows(made)
    if meta["images"] != len(rows):
        raise ValueError(f"{made}/images.parquet lists {len(rows)} of {meta['images']} images")
    samples = whole_number(cfg, "evaluate.bootstrap", minimum=1)
    identity = {
        "metric": ["compute", compute.VERSION],
        "images": made.name,
        "counts": run_id({"sizes": meta["sizes"], "rows": rows}),
        "bootstrap": [samples, cfg.seed],
    }
    stage = open_run(cfg, "evaluate", identity)
    if stage.done:
        return stage.folder
    sizes, heads = Dimensions(**meta["sizes"]["backbone"]), HeadSizes(**meta["sizes"]["heads"])
    found = [
        {**{key: row[key] for key in NAMED}, **compute.per_image(sizes, heads, row)} for row in rows
    ]
    write_rows(found, path=stage.folder / "per_image.parquet")
    dtype = meta["identity"]["dtype"]
    scores = {
        "benchmark": cfg.eval.name,
        "version": compute.VERSION,
        "judge": f"backbone {meta['identity']['backbone']} in {dtype}",
        "images": str(made),
        "n_expected": meta["images"],
        "n_scored": len(rows),
        "coverage": 1.0,
        "missing": [],
        "higher_is_better": False,
        "seed": cfg.seed,
        "dtype": dtype,
        "sizes": meta["sizes"],
        **compute.aggregate(sizes, heads, found, samples=samples, seed=cfg.seed),
    }
    table = by_part(scores)
    scores["table"] = asdict(table)
    write_atomic(stage.folder / "scores.json", json.dumps(scores, indent=2) + "\n")
    write_atomic(stage.folder / "table.md", table.markdown())
    log.info(table.markdown())
    return stage.finish({"total_tflops": scores["total_tflops"]})


def read_meta(made: Path) -> dict[str, Any]:
    """Return the facts of a finished generate run; ValueError if it is none, or an older one."""
    if not (made / "meta.json").is_file() or not (made / "images.parquet").is_file():
        raise ValueError(
            f"{made} is not a finished generate run, whose counts this evaluation reads: "
            "evaluate.images=<run folder>"
        )
    meta = json.loads((made / "meta.json").read_text(encoding="utf-8"))
    if "sizes" not in meta:
        raise ValueError(f"{made}/meta.json lacks the backbone's sizes{OLDER}")
    return meta


def read_rows(made: Path) -> list[dict[str, Any]]:
    """Return the counts of every image; ValueError where an older version counted less."""
    table = made / "images.parquet"
    try:
        names = pq.read_schema(table).names
        columns = [*NAMED, *COUNTED]
        rows = pq.read_table(table, columns=[c for c in columns if c in names]).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{table} is not the table of a generate run: {error}") from error
    if not rows:
        raise ValueError(f"{table} lists no images")
    lacking = [c for c in columns if any(row.get(c) is None for row in rows)]
    if lacking:
        raise ValueError(f"{table} lacks {', '.join(lacking)}{OLDER}")
    return rows


def by_part(scores: Mapping[str, Any]) -> Table:
    """Return the table of what was spent on what, without parts that a decoder does not have."""
    rows = [
        {
            "part": label,
            "tflops": scores[f"{part}_tflops"],
            "share": 100 * scores[f"{part}_tflops"] / scores["total_tflops"],
            "gb": scores[memory] if memory else None,
        }
        for part, (label, memory) in LABELS.items()
        if scores[f"{part}_tflops"]
    ]
    total = {"part": "All; peak memory", "tflops": scores["total_tflops"], "share": 100.0}
    rows.append({**total, "gb": scores["peak_gb"]})
    caption = (
        f"Compute and memory per image, means over {scores['n_scored']} images, {scores['dtype']}, "
        f"batch {scores['batch_size']}. Weights include {scores['heads_gb']:.3g} GB of draft heads."
    )
    return Table(caption, COLUMNS, rows)
