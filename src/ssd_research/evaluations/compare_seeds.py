"""One score over several seeds: mean and deviation of each decoder, and its difference from AR.

A seed is one generate run with its evaluation. Differences are positive where the decoder is better
than AR, as the paper states them (Table 9).
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ssd_research.evaluations.images import allows_missing
from ssd_research.metrics.statistics import Difference, Summary, paired, welch
from ssd_research.reporting.cells import Cell, find_cells
from ssd_research.reporting.tables import Column, Table
from ssd_research.runs import open_run, write_atomic

log = logging.getLogger(__name__)

VERSION = 2
MUST_AGREE = (
    "version",
    "protocol",
    "judge",
    "resize",
    "reference",
    "n_scored",
    "missing",
    "images_per_prompt",
)
SAME_LAW = ("backbone", "sampling", "prompts", "images_per_prompt")  # of a generate run's identity
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
    check(options)
    root = Path(str(cfg.output_dir)).expanduser()
    cells = find_cells(root, cfg.model.name, str(cfg.name), folders=None)
    scored = [cell for cell in cells if options.benchmark in cell.scores]
    if not scored:
        raise ValueError(
            f"no generate run of name={cfg.name} has scores of {options.benchmark}; "
            f"first run python -m ssd_research.evaluate name={cfg.name} eval={options.benchmark}"
        )
    refuse_mixture(scored, options.benchmark)
    missing = unscored(cells, scored)
    refuse_missing(missing, options.benchmark, allowed=allows_missing(cfg))
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
        **counts(len(scored), missing),
    }
    stage = open_run(cfg, "evaluate", {"metric": ["compare_seeds", VERSION], **facts, "rows": rows})
    if stage.done:
        return stage.folder
    write(stage.folder, rows, {**facts, **about(cfg, known)})
    return stage.finish({"methods": [method.title for method in methods]})


def check(options: DictConfig) -> None:
    """Raise ValueError unless the confidence and the margin are numbers in their range."""
    confidence, margin = options.confidence, options.margin
    if not is_number(confidence) or not 0 < confidence < 1:
        raise ValueError(f"eval.confidence={confidence} must lie between 0 and 1")
    if margin is not None and not (is_number(margin) and margin > 0):
        raise ValueError(f"eval.margin={margin} must be a number above 0, or null")


def is_number(value: Any) -> bool:
    """Say whether a value is a finite number; true and false are none."""
    return type(value) in (int, float) and math.isfinite(value)


def unscored(cells: Sequence[Cell], scored: Sequence[Cell]) -> list[str]:
    """Return the runs without scores that sample the same law for the same prompts as the others.

    Runs of other prompts may share the name: their scores are of other benchmarks.
    """

    def law(cell: Cell) -> list[Any]:
        return [cell.meta["identity"].get(key) for key in SAME_LAW]

    rest = [cell for cell in cells if cell not in scored]
    return [cell.folder.name for cell in rest if law(cell) == law(scored[0])]


def refuse_missing(runs: Sequence[str], benchmark: str, *, allowed: bool) -> None:
    """Raise ValueError where runs lack scores and `evaluate.allow_missing` is false."""
    if runs and not allowed:
        raise ValueError(
            f"{len(runs)} runs have no scores of {benchmark}, the first {runs[0]}; "
            "evaluate them, or compare what is there with evaluate.allow_missing=true"
        )


def counts(scored: int, missing: Sequence[str]) -> dict[str, Any]:
    """Return how many runs have scores and how many should, and which have none."""
    runs = scored + len(missing)
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
    caption = f"{facts['measure']} of {facts['of']} over seeds."
    table = Table.of(caption, COLUMNS, rows)
    scores = json.dumps({**facts, "methods": list(rows), "table": asdict(table)}, indent=2)
    write_atomic(folder / "scores.json", scores + "\n")
    write_atomic(folder / "table.md", table.markdown())
    log.info(table.markdown())


def refuse_mixture(cells: Sequence[Cell], benchmark: str) -> None:
    """Raise ValueError unless the scores were made alike and the images from the same prompts."""
    for key in MUST_AGREE:
        found = {json.dumps(cell.scores[benchmark].get(key), sort_keys=True) for cell in cells}
        if len(found) > 1:
            raise ValueError(
                f"scores of {benchmark} that differ in {key} cannot be compared: "
                f"{' and '.join(sorted(found)[:2])}; give the runs another name="
            )
    for key in SAME_LAW:
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
    if not is_number(value):
        numbers = [key for key, number in scores.items() if is_number(number)]
        raise ValueError(
            f"eval.measure={measure} is no finite number in the scores of {scores.get('images')}; "
            f"there are: {', '.join(numbers)}"
        )
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
