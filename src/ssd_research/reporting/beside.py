"""The measured numbers of a table of the paper beside the printed ones, row by row."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ssd_research.reporting.cells import Cell, find_imageless, groups, read_cell
from ssd_research.reporting.experiment import Wanted, models, wanted
from ssd_research.reporting.measures import DECODER
from ssd_research.reporting.page import Section, imageless, section
from ssd_research.reporting.tables import Column, Table

# Our columns, and the keys of the paper's tables for them.
PAIRS = (
    (Column("steps", "Steps", digits=1), "steps"),
    (Column("step_acceleration", "Step acceleration", suffix="×"), "step_acceleration"),
    (Column("seconds_per_image", "Latency (s/image)", digits=3), "latency_s"),
    (Column("speedup", "Latency speedup", suffix="×"), "latency_acceleration"),
    (Column("acceptance_rate", "Acceptance rate", digits=3), "accept_rate"),
    *(
        (Column(f"dpg_{key}", key.capitalize()), key)
        for key in ("global", "entity", "attribute", "relation", "other")
    ),
    (Column("dpg", "DPG-Bench"), "dpg"),
    (Column("geneval_single_object", "Single object"), "single"),
    (Column("geneval_two_object", "Two objects"), "two"),
    (Column("geneval_counting", "Counting"), "counting"),
    (Column("geneval_colors", "Colors"), "colors"),
    (Column("geneval_position", "Position"), "position"),
    (Column("geneval_color_attr", "Color attribution"), "color_attribution"),
    (Column("geneval", "GenEval"), "geneval"),
    (Column("fid", "FID", digits=3), "fid"),
)


def table_sections(cfg: DictConfig, given: Sequence[str]) -> list[Section]:
    """Return the sections of the table that `cfg` chooses, model by model.

    Raises ValueError where nothing of it is finished yet.
    """
    root, name = Path(str(cfg.output_dir)).expanduser(), str(cfg.name)
    cells = {one: one.find() for one in wanted(cfg, given)}
    found = {one: read_cell(run) for one, run in cells.items() if run is not None}
    sections = [
        with_paper(
            cfg,
            section(group, pictures=cfg.report.images),
            {one: found.get(one) for one in cells if one.belongs_to(group[0].config)},
            timing=read_timing(root, group[0].config.model.name, name),
        )
        for group in groups(found.values())
    ]
    for model in models(cfg, given):
        sections += imageless(find_imageless(root, model, name))
    if not sections:
        again = " ".join(override for override in given if not override.startswith("report."))
        raise ValueError(
            f"nothing of {name} is finished; make it: python -m ssd_research.reproduce {again}"
        )
    return sections


def with_paper(
    cfg: DictConfig,
    one: Section,
    cells: Mapping[Wanted, Cell | None],
    *,
    timing: "Timing | None",
) -> Section:
    """Return a section that begins with the paper's table beside ours and names missing cells."""
    shown, rows = columns(list(cells)), beside(cells, one.rows, timing)
    caption = f"Table {cfg.table.number} of the paper ({next(iter(cells)).original}) beside ours."
    if timing is not None:
        caption += f" Seconds: {timing.where}."
    lead = [Table.of(caption, [DECODER, *shown], rows)] if shown else []
    missing = [f"Missing: {cell.command}" for cell, run in cells.items() if run is None]
    return replace(one, tables=[*lead, *one.tables], warnings=[*missing, *one.warnings])


@dataclass(frozen=True)
class Timing:
    """What a benchmark run measured: where, and the row of every decoder, one image at a time."""

    where: str
    rows: Mapping[str, Mapping[str, Any]]


def read_timing(root: Path, model: str, name: str) -> Timing | None:
    """Return the newest finished benchmark run of a model and name, or None."""
    runs = (root / "benchmark" / model / name).glob("*/DONE")
    newest = max(runs, key=lambda done: done.stat().st_mtime, default=None)
    if newest is None:
        return None
    lines = (newest.parent / "results.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["decoder"]: row for row in map(json.loads, lines) if row["batch_size"] == 1}
    repeats = len(next(iter(rows.values()))["seconds_total"])
    device = next(iter(rows.values()))["device"]
    where = f"{device}, batch 1, median of {repeats} interleaved repeats"
    return Timing(where, rows)


def beside(
    cells: Mapping[Wanted, Cell | None],
    rows: Sequence[Mapping[str, Any]],
    timing: Timing | None,
) -> list[dict[str, Any]]:
    """Return a row for each wanted cell: what `rows` measured of it, and `paper_...` as printed.

    A cell that is not there yet has its decoder's words and the paper's numbers only. Seconds are
    those of `timing` where there is one: only decoders timed in turns, in one process, compare.
    """
    measured = {row["generate_run"]: row for row in rows}
    printed = []
    for one, cell in cells.items():
        row: dict[str, Any] = {"decoder": f"{one.label} (missing)"}
        if cell is not None:
            row = dict(measured[cell.folder.name])
            row["decoder"] = ", ".join([cell.title, *one.train])
            if timing is not None:
                row |= _seconds(timing.rows.get(cell.title, {}))
        printed.append({**row, **{f"paper_{key}": value for key, value in one.printed.items()}})
    return printed


def _seconds(timed: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("seconds_per_image", "speedup")
    return {key: timed.get(key) for key in keys} | {f"{key}_note": None for key in keys}


def columns(cells: Sequence[Wanted]) -> list[Column]:
    """Return the columns that the paper's table has: ours, and behind each the paper's."""
    keys = {key for one in cells for key, value in one.printed.items() if value is not None}
    found = []
    for column, key in PAIRS:
        if key in keys:
            theirs = Column(f"paper_{key}", f"{column.title}, paper", column.digits, column.suffix)
            found += [column, theirs]
    return found
