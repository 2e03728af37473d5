"""What the images of a cell are worth: the kinds of benchmark a report prints, a table for each.

Scores of different judges are never put in one column: a table keeps AR's judge, and a cell that
another one scored prints `n/a` and who it was.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssd_research.metrics.dpg import BROAD
from ssd_research.metrics.geneval import TASKS
from ssd_research.reporting.tables import Column

Scores = Mapping[str, Any]
_TASK_TITLES = (
    "Single object",
    "Two objects",
    "Counting",
    "Colors",
    "Position",
    "Color attribution",
)

COMPUTE = (
    Column("backbone_tflops", "Backbone (TFLOPs)", significant=3),
    Column("attention_tflops", "Attention (TFLOPs)", significant=3),
    Column("horizontal_heads_tflops", "Horizontal heads (TFLOPs)", significant=3),
    Column("vertical_heads_tflops", "Vertical heads (TFLOPs)", significant=3),
    Column("eagle_tflops", "EAGLE drafter (TFLOPs)", significant=3),
    Column("total_tflops", "All (TFLOPs)", significant=3),
    Column("weights_gb", "Weights (GB)", significant=4),
    Column("heads_gb", "Of these draft heads (GB)", significant=4),
    Column("kv_gb", "Keys and values (GB)", significant=4),
    Column("activations_kv_gb", "Activations and KV (GB)", significant=4),
    Column("peak_gb", "Peak memory (GB)", significant=4),
)


@dataclass(frozen=True)
class Quality:
    """A kind of benchmark: its title, the key of scores.json that tells it, and what it prints.

    `read` returns numbers by column; `judge` what must agree within the table, in words.
    """

    title: str
    key: str
    columns: tuple[Column, ...]
    read: Callable[[Scores], dict[str, Any]]
    judge: Callable[[Scores], str]

    def find(self, scores: Mapping[str, Scores]) -> Scores | None:
        """Return the newest of a cell's scores that are of this kind, or None."""
        return next((s for s in reversed(list(scores.values())) if self.key in s), None)


def _geneval(scores: Scores) -> dict[str, Any]:
    found = {"geneval": scores["overall"], "geneval_ci": scores["overall_ci95"]}
    for task, values in scores["tasks"].items():
        found |= {f"geneval_{task}": values["score"], f"geneval_{task}_ci": values["ci95"]}
    return {**found, "geneval_coverage": scores["coverage"], "geneval_run": scores["run_id"]}


def _dpg(scores: Scores) -> dict[str, Any]:
    """Return DPG-Bench's scores in percent, as papers print them."""
    found = {"dpg": _percent(scores["average"]), "dpg_ci": _percent(scores["average_ci95"])}
    for name, values in scores["categories"].items():
        found[f"dpg_{name}"] = _percent(values["score"])
        found[f"dpg_{name}_ci"] = _percent(values["ci95"])
    return {**found, "dpg_coverage": scores["coverage"], "dpg_run": scores["run_id"]}


def _likelihood(scores: Scores) -> dict[str, Any]:
    return {"nll": scores["nll"], "nll_outside": scores["outside"], "nll_run": scores["run_id"]}


def _fid(scores: Scores) -> dict[str, Any]:
    return {"fid": scores["fid"], "fid_coverage": scores["coverage"], "fid_run": scores["run_id"]}


def _deviation(scores: Scores) -> dict[str, Any]:
    null = scores["split_half_null"]
    return {
        "location": scores["location"],
        "location_ci": scores.get("location_ci95"),
        "location_debiased": scores["location_debiased"],
        "location_null": null and math.sqrt(max(null["shift_debiased"], 0) / scores["trace_ar"]),
        "spread": _percent(scores["scale"]),
        "deviation_run": scores["run_id"],
    }


def _compute(scores: Scores) -> dict[str, Any]:
    found = {column.key: scores[column.key] for column in COMPUTE}
    interval = scores["total_tflops_ci95"]
    return {**found, "total_tflops_ci": interval, "compute_run": scores["run_id"]}


def _percent(value: Any) -> Any:
    """Return a number, or each of a pair, times 100; None stays None."""
    if isinstance(value, Sequence):
        return [100 * one for one in value]
    return None if value is None else 100 * value


QUALITIES = (
    Quality(
        "GenEval's rules",
        "tasks",
        (
            Column("geneval", "Overall", digits=3),
            *(Column(f"geneval_{t}", name) for t, name in zip(TASKS, _TASK_TITLES, strict=True)),
        ),
        _geneval,
        lambda s: f"with {s['judge']}",
    ),
    Quality(
        "DPG-Bench in percent",
        "protocols",
        (
            Column("dpg", "Average"),
            *(Column(f"dpg_{category}", category.capitalize()) for category in BROAD),
        ),
        _dpg,
        lambda s: f"with {s['judge']}, {s['protocol']} protocol",
    ),
    Quality(
        "Likelihood",
        "nll",
        (
            Column("nll", "NLL (nats per code)", digits=3),
            Column("nll_minus_ar", "NLL − AR's", digits=3, signed=True),
        ),
        _likelihood,
        lambda s: "under the backbone's own p",
    ),
    Quality(
        "FID",
        "fid",
        (Column("fid", "FID", digits=3),),
        _fid,
        lambda s: (
            f"by {s['judge']} on {s['n_scored']} images, against {s['reference']['n']} reference "
            f"images ({s['reference']['images'][:8]}, preprocess {s['reference']['preprocess']})"
        ),
    ),
    Quality(
        "Deviation from AR's images of the same prompts",
        "location",
        (
            Column("location", "Centre shift (AR's s.d.)"),
            Column("location_debiased", "Debiased"),
            Column("location_null", "AR against itself, debiased"),
            Column("spread", "Spread − AR's", digits=1, suffix=" %", signed=True),
        ),
        _deviation,
        lambda s: f"by {s['judge']}, {s['images_per_prompt']} images of {s['prompts']} prompts",
    ),
    Quality(
        "Compute and memory per image",
        "total_tflops",
        COMPUTE,
        _compute,
        lambda s: f"in {s['dtype']}, batch {s['batch_size']}",
    ),
)


def judge_of(quality: Quality, cells: Iterable[Mapping[str, Scores]]) -> str | None:
    """Return the judge of the first cell that has scores of this kind (AR comes first), or None."""
    found = (quality.judge(s) for s in map(quality.find, cells) if s is not None)
    return next(found, None)


def worth(quality: Quality, scores: Mapping[str, Scores], *, judge: str | None) -> dict[str, Any]:
    """Return one cell's numbers of a kind: none without scores, notes under another judge."""
    found = quality.find(scores)
    if found is None:
        return {}
    own = quality.judge(found)
    if own == judge:
        return quality.read(found)
    return {f"{column.key}_note": f"n/a ({own})" for column in quality.columns}
