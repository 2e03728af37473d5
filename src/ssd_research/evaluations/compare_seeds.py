"""One score over several seeds: mean and deviation of each decoder, and its difference from AR.

A seed is one generate run with its evaluation. Differences are positive where the decoder is better
than AR, as the paper states them (Table 9).
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ssd_research.metrics.statistics import Difference, Summary, paired, welch
from ssd_research.reporting.cells import Cell, find_cells
from ssd_research.reporting.tables import Column, filled, markdown
from ssd_research.runs import open_run, write_atomic

log = logging.getLogger(__name__)

VERSION = 1
MUST_AGREE = (
    "version",
    "protocol",
    "judge",
    "resize",
    "reference",
    "n_scored",
    "images_per_prompt",
)
COLUMNS = (
    Column("decoder", "Decoder"),
    Column("n", "Seeds"),
    Column("mean", "Mean", digits=3),
    Column("sd", "s.d.", digits=3),
    Column("difference", "Better than AR by", digits=3, signed=True),
    Column("welch_p", "p (Welch)", digits=3),
    Column("paired_p", "p (paired)", digits=3),
    Column("equivalence_p", "p (equivalence)", digits=3),
)


@dataclass(frozen=True)
class Method:
    """One decoder's values, by seed."""

    title: str
    values: dict[int, float]

    @property
    def summary(self) -> Summary:
        """Mean and sample standard deviation over the seeds."""
        return Summary.of(list(self.values.values()))


def run(cfg: DictConfig) -> Path:
    """Compare every decoder of this model and name with AR over seeds (`eval=compare_seeds`)."""
    options = cfg.eval
    if not 0 < options.confidence < 1:
        raise ValueError(f"eval.confidence={options.confidence} must lie between 0 and 1")
    root = Path(str(cfg.output_dir)).expanduser()
    cells = find_cells(root, cfg.model.name, str(cfg.name), folders=None)
    scored = [cell for cell in cells if options.benchmark in cell.scores]
    if not scored:
        raise ValueError(
            f"no generate run of name={cfg.name} has scores of {options.benchmark}; "
            f"first run python -m ssd_research.evaluate name={cfg.name} eval={options.benchmark}"
        )
    refuse_mixture(scored, options.benchmark)
    methods = gather(scored, options.benchmark, str(options.measure))
    known = scored[0].scores[options.benchmark]
    rows = [
        row_of(
            method,
            methods[0],
            better=known.get("higher_is_better"),
            margin=options.margin,
            confidence=options.confidence,
        )
        for method in methods
    ]
    facts = {
        "of": options.benchmark,
        "measure": options.measure,
        "margin": options.margin,
        "confidence": options.confidence,
        **{key: known[key] for key in MUST_AGREE if key in known and key != "version"},
    }
    stage = open_run(cfg, "evaluate", {"metric": ["compare_seeds", VERSION], **facts, "rows": rows})
    if stage.done:
        return stage.folder
    missing = [cell.folder.name for cell in cells if cell not in scored]
    write(stage.folder, rows, {**facts, **counts(len(cells), missing), **about(cfg, known)})
    return stage.finish({"methods": [method.title for method in methods]})


def counts(runs: int, missing: Sequence[str]) -> dict[str, Any]:
    """Return how many runs there are and have scores, and which have none."""
    scored = runs - len(missing)
    return {
        "n_expected": runs,
        "n_scored": scored,
        "coverage": scored / runs,
        "missing": list(missing),
    }


def about(cfg: DictConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what names the result."""
    return {
        "benchmark": cfg.eval.name,
        "version": VERSION,
        "higher_is_better": known.get("higher_is_better"),
        "seed": cfg.seed,
    }


def write(folder: Path, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write scores.json and table.md, and log the table."""
    text = markdown(filled(COLUMNS, rows), rows)
    scores = json.dumps({**facts, "methods": list(rows)}, indent=2)
    write_atomic(folder / "scores.json", scores + "\n")
    write_atomic(folder / "table.md", text)
    log.info("%s %s over seeds\n%s", facts["of"], facts["measure"], text)


def refuse_mixture(cells: Sequence[Cell], benchmark: str) -> None:
    """Raise ValueError unless the scores were made alike and the images from the same prompts."""
    for key in MUST_AGREE:
        found = {json.dumps(cell.scores[benchmark].get(key), sort_keys=True) for cell in cells}
        if len(found) > 1:
            raise ValueError(
                f"scores of {benchmark} that differ in {key} cannot be compared: "
                f"{' and '.join(sorted(found)[:2])}; give the runs another name="
            )
    for key in ("backbone", "sampling", "prompts", "images_per_prompt"):
        found = {json.dumps(cell.meta["identity"].get(key), sort_keys=True) for cell in cells}
        if len(found) > 1:
            raise ValueError(
                f"runs that differ in {key} cannot be compared over seeds; give them another name="
            )


def gather(cells: Sequence[Cell], benchmark: str, measure: str) -> list[Method]:
    """Return the decoders with their values, AR first.

    Raises ValueError where there is no AR, a decoder has one seed only, or one seed twice.
    """
    methods: dict[str, Method] = {}
    for cell in cells:
        method = methods.setdefault(cell.title, Method(cell.title, {}))
        seed = int(cell.meta["identity"]["seed"])
        if seed in method.values:
            raise ValueError(
                f"{cell.title} has two runs of seed {seed} ({cell.folder.name} is one); "
                "give one of them another name="
            )
        method.values[seed] = pick(cell.scores[benchmark], measure)
    if not any(cell.decoder.name == "ar" for cell in cells):
        raise ValueError("there is no run of decoder=ar to compare with, under the same name=")
    for method in methods.values():
        if len(method.values) < 2:
            raise ValueError(f"{method.title} has 1 seed; a comparison needs at least 2, better 5")
    first = next(cell.title for cell in cells if cell.decoder.name == "ar")
    return [methods[first], *(m for title, m in methods.items() if title != first)]


def pick(scores: Mapping[str, Any], measure: str) -> float:
    """Return the number under a dotted key; ValueError lists what there is instead."""
    value: Any = scores
    for key in measure.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        numbers = [k for k, v in scores.items() if type(v) in (int, float)]
        raise ValueError(f"eval.measure={measure} is no number; there are: {', '.join(numbers)}")
    return float(value)


def row_of(
    method: Method,
    baseline: Method,
    *,
    better: bool | None,
    margin: float | None,
    confidence: float,
) -> dict[str, Any]:
    """Return a method's summary, and unless it is the baseline its tests against that."""
    summary = method.summary
    row = {
        "decoder": method.title,
        "seeds": list(method.values),
        "values": list(method.values.values()),
        **vars(summary),
    }
    if method is baseline:
        return row
    sign = -1 if better is False else 1
    found = welch(signed(summary, sign), signed(baseline.summary, sign), confidence=confidence)
    row |= {"difference": found.difference, "difference_ci": list(found.interval)}
    row |= facts_of("welch", found, margin)
    row["equivalence_p"] = row.pop("welch_equivalence_p", None)
    shared = sorted(set(method.values) & set(baseline.values))
    if len(shared) == len(method.values) == len(baseline.values):
        ours, theirs = ([sign * m.values[s] for s in shared] for m in (method, baseline))
        row |= facts_of("paired", paired(ours, theirs, confidence=confidence), margin)
    return row


def signed(summary: Summary, sign: int) -> Summary:
    """Return a summary of values multiplied by `sign`."""
    return Summary(sign * summary.mean, summary.sd, summary.n)


def facts_of(name: str, found: Difference, margin: float | None) -> dict[str, Any]:
    """Return t, df, p and interval of a test under its name, and its equivalence p."""
    facts: dict[str, Any] = {
        f"{name}_t": found.t if math.isfinite(found.t) else None,
        f"{name}_df": found.df,
        f"{name}_p": found.p,
        f"{name}_ci": list(found.interval),
    }
    if margin is not None:
        facts[f"{name}_equivalence_p"] = found.equivalence(margin)
    return facts
