"""The numbers of a report: one row per cell, compared with AR where that is fair.

Latencies of different devices, dtypes or batch sizes are never put in one column: the column keeps
AR's setting, and a cell measured elsewhere prints `n/a` and why.
"""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ssd_research.image_rows import acceptance_rate
from ssd_research.reporting.cells import Cell
from ssd_research.reporting.qualities import QUALITIES, judge_of, worth
from ssd_research.reporting.tables import Column

DECODER = Column("decoder", "Decoder")
SPEED = (
    DECODER,
    Column("law", "Output law"),
    Column("images", "Images"),
    Column("steps", "Steps (NFE) per image", digits=1),
    Column("step_acceleration", "Step acceleration", suffix="×"),
    Column("seconds_per_image", "Latency (s/image)", digits=3),
    Column("speedup", "Latency speedup", suffix="×"),
    Column("acceptance_rate", "Acceptance rate", digits=3),
)


def reference(cells: Sequence[Cell]) -> Cell | None:
    """Return the AR cell that the others are compared with, or None.

    Of two, the one that spends a step on every end-of-row token, as the paper's AR does.
    """
    found = [cell for cell in cells if cell.decoder.name == "ar"]
    return max(found, key=steps, default=None)


def column_setting(cells: Sequence[Cell]) -> str:
    """Return the setting of the latency column: AR's, else the most frequent one."""
    ar = reference(cells)
    return ar.setting if ar else Counter(cell.setting for cell in cells).most_common(1)[0][0]


def measure(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return one row per cell; what needs AR is None where there is no AR cell."""
    ar = reference(cells)
    setting = column_setting(cells)
    judges = {q.title: judge_of(q, [cell.scores for cell in cells]) for q in QUALITIES}
    rows = [_own(cell, setting) for cell in cells]
    for row, cell in zip(rows, cells, strict=True):
        for quality in QUALITIES:
            row |= worth(quality, cell.scores, judge=judges[quality.title])
    base = rows[cells.index(ar)] if ar else {}
    for row in rows:
        row["step_acceleration"] = _ratio(base.get("steps"), row["steps"])
        row["speedup"] = _ratio(base.get("seconds_per_image"), row["seconds_per_image"])
        if row["seconds_per_image_note"] and ar:
            row["speedup_note"] = "n/a"
        if None not in (row.get("nll"), base.get("nll")):
            row["nll_minus_ar"] = row["nll"] - base["nll"]
    return rows


def _own(cell: Cell, setting: str) -> dict[str, Any]:
    """Return what one cell says of itself."""
    same = cell.setting == setting
    return {
        "decoder": cell.title,
        "law": "lossless" if cell.decoder.lossless else "lossy",
        "images": len(cell.images),
        "steps": steps(cell),
        "step_acceleration": None,
        "seconds_per_image": seconds_per_image(cell) if same else None,
        "seconds_per_image_note": None if same else f"n/a ({cell.setting})",
        "speedup": None,
        "speedup_note": None,
        "setting": cell.setting,
        "acceptance_rate": acceptance_rate(r for i in cell.images for r in json.loads(i["rounds"])),
        "generate_run": cell.folder.name,
    }


def steps(cell: Cell) -> float:
    """Return the mean backbone forwards per image, an int where all images take the same."""
    found = {row["nfe"] for row in cell.images}
    return found.pop() if len(found) == 1 else statistics.fmean(r["nfe"] for r in cell.images)


def seconds_per_image(cell: Cell) -> float:
    """Return the median over full batches of the batch's seconds divided by its size.

    The median passes over the first batch's warm-up; a last, smaller batch does not count.
    """
    full = [row for row in cell.images if row["batch_size"] == cell.batch_size]
    return statistics.median(row["seconds_total"] / row["batch_size"] for row in full)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None
