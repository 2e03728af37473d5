"""The measured numbers of a table of the paper beside the printed ones, row by row."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ssd_research.reporting.cells import Cell, find_imageless, groups, read_cell, read_json
from ssd_research.reporting.experiment import Wanted, common, models, suite, wanted
from ssd_research.reporting.measures import DECODER
from ssd_research.reporting.overrides import command, composed, key_of, quoted
from ssd_research.reporting.page import PAPER_NOTE, Section, imageless, section
from ssd_research.reporting.qualities import COMPUTE
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
    (Column("mean", "FID, mean over seeds", digits=3), "clean_fid_mean"),
    (Column("sd", "FID, s.d.", digits=3), "clean_fid_sd"),
    (Column("location", "Centre shift (AR's s.d.)"), "location"),
    (Column("spread", "Spread − AR's", digits=1, suffix=" %", signed=True), "scale"),
    (Column("win_rate", "Preferred by people (%)", digits=1), "win_rate_percent_mean"),
    (Column("win_rate_sd", "s.d. over people", digits=1), "win_rate_percent_sd"),
    (Column("training_images", "Training images"), "training_samples"),
    *((column, column.key) for column in COMPUTE),
)


MODELS = {"janus_pro": "Janus-Pro-7B", "lumina_mgpt": "Lumina-mGPT", "emu3": "Emu3"}


def table_sections(cfg: DictConfig, given: Sequence[str]) -> list[Section]:
    """Return the sections of the table that `cfg` chooses, model by model.

    Raises ValueError where nothing of it is finished yet.
    """
    cells = {one: one.find() for one in wanted(cfg, given)}
    found = {one: None if run is None else read_cell(run) for one, run in cells.items()}
    sections = []
    for model in models(cfg, given):
        own = {one: cell for one, cell in found.items() if one.model == model}
        sections += model_sections(cfg, given, own, model=model)
    if not any(one.tables for one in sections):
        again = " ".join(one for one in given if key_of(one).partition(".")[0] != "report")
        raise ValueError(
            f"nothing of {cfg.name} is finished; make it: python -m ssd_research.reproduce {again}"
        )
    return sections


def model_sections(
    cfg: DictConfig, given: Sequence[str], cells: Mapping[Wanted, Cell | None], *, model: str
) -> list[Section]:
    """Return the sections of one model: what needs no images, then every group of its cells."""
    root = Path(str(cfg.output_dir)).expanduser()
    shared = composed(common(cfg, given, model=model))
    made = [cell for cell in cells.values() if cell is not None]
    timing = read_timing(root / "benchmark" / model / str(cfg.name), made)
    people = read_preference(root, made)
    sections = imageless(find_imageless(root, model, str(shared.name)))
    if "seeds" in cfg.table:
        sections = [over_seeds(cfg, one, cells, timing) for one in sections]
    missing = [f"Missing: {one.command}" for one, cell in cells.items() if cell is None]
    missing += unscored(cfg, cells) + untimed(cfg, made, timing)
    if cfg.table.get("study") and made and not people:
        missing.append("Not asked: no analysis of people's answers; the study's page is for them.")
    for group in groups(made):
        own = {one: cell for one, cell in cells.items() if one.seed == group[0].config.seed}
        one = section(group, pictures=cfg.report.images)
        sections.append(with_paper(cfg, one, own, timing=timing, people=people))
    if missing:
        sections.append(Section(f"{model}: not there yet", [], [], [], missing, [], [], 0, []))
    return sections


def with_paper(
    cfg: DictConfig,
    one: Section,
    cells: Mapping[Wanted, Cell | None],
    *,
    timing: "Timing | None",
    people: Mapping[str, Mapping[str, Any]],
) -> Section:
    """Return a section that begins with the paper's table beside ours.

    Cells of another group, which do not compare with this one, have no numbers in it.
    """
    here = {wish: cell if cell in one.cells else None for wish, cell in cells.items()}
    rows = {row["generate_run"]: row for row in one.rows}
    for wish, cell in here.items():
        if cell is not None:
            rows[cell.folder.name]["decoder"] = ", ".join([cell.title, *wish.train])
    elsewhere = [
        f"{cell.title} ({cell.folder.name}) is of another backbone, law or prompts and stands in a "
        "section of its own; make the older of them again."
        for cell in cells.values()
        if cell is not None and cell not in one.cells
    ]
    tables = [table for table in one.tables if table.caption != PAPER_NOTE]
    shown = [] if "seeds" in cfg.table else columns(list(cells))
    if shown:
        numbers = beside(here, rows, timing, people)
        lead = Table.of(caption(cfg, cells, timing), [DECODER, *shown], numbers)
        tables.insert(0, lead)
    return replace(one, tables=tables, warnings=[*elsewhere, *one.warnings])


def over_seeds(
    cfg: DictConfig, one: Section, cells: Mapping[Wanted, Any], timing: "Timing | None"
) -> Section:
    """Return the section of a comparison over seeds with the paper's numbers in its table."""
    wishes = {cell.title: wish for wish, cell in cells.items() if cell is not None}
    shown = columns(list(cells))
    tables = []
    for table in one.tables:
        rows = [
            {**row, **_timed(timing, row["decoder"]), **_printed(wishes.get(row["decoder"]))}
            for row in table.rows
        ]
        keys = {column.key for column in table.columns}
        theirs = {column.key: column for column in shown if column.key[6:] in keys}
        own = [[c, theirs.get(f"paper_{c.key}")] for c in table.columns]
        rest = [c for c in shown if c.key.removeprefix("paper_") not in keys]
        both = [*(c for pair in own for c in pair if c is not None), *rest]
        tables.append(Table.of(f"{caption(cfg, cells, timing)} {table.caption}", both, rows))
    return replace(one, tables=tables)


def caption(cfg: DictConfig, cells: Mapping[Wanted, Cell | None], timing: "Timing | None") -> str:
    """Return which table of the paper stands beside ours, and where the seconds were measured."""
    original = next(iter(cells)).original
    text = f"Table {cfg.table.number} of the paper ({MODELS.get(original, original)}) beside ours."
    return text if timing is None else f"{text} Seconds: {timing.where}."


def unscored(cfg: DictConfig, cells: Mapping[Wanted, Cell | None]) -> list[str]:
    """Return a note with the command for every score that a finished cell lacks."""
    scores = suite(cfg).get("scores", [])
    return [
        f"Not scored: {evaluation(wish, options, cell.folder)}"
        for wish, cell in cells.items()
        if cell is not None
        for options in scores
        if options[0].removeprefix("eval=") not in cell.scores
    ]


def evaluation(wish: Wanted, options: Sequence[str], folder: Path) -> str:
    """Return the command that scores the images of a cell."""
    return command("evaluate", [*wish.overrides, *options, quoted("evaluate.images", folder)])


def untimed(cfg: DictConfig, cells: Sequence[Cell], timing: "Timing | None") -> list[str]:
    """Return a note where the decoders of finished cells have not been timed in turns."""
    if not cfg.table.get("timed") or not cells or timing is not None:
        return []
    return ["Not timed: no benchmark has all of these decoders; python -m ssd_research.reproduce"]


@dataclass(frozen=True)
class Timing:
    """What a benchmark run measured: where, and the row of every decoder, one image at a time."""

    where: str
    rows: Mapping[str, Mapping[str, Any]]


def read_timing(folder: Path, cells: Sequence[Cell]) -> Timing | None:
    """Return the newest finished benchmark run in `folder` that timed these cells, or None.

    It has all of their decoders, and their backbone, law and precision.
    """
    for done in sorted(folder.glob("*/DONE"), key=_changed, reverse=True):
        identity = read_json(done.parent / "meta.json", "identity")["identity"]
        rows = _benchmark_rows(done.parent / "results.jsonl")
        if all(cell.title in rows and _alike(cell, identity) for cell in cells) and rows:
            first = next(iter(rows.values()))
            where = f"{first['device']}, {identity['dtype']}, batch 1, "
            where += f"median of {len(first['seconds_total'])} interleaved repeats"
            return Timing(where, rows)
    return None


def _changed(done: Path) -> float:
    return done.stat().st_mtime


def _benchmark_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Return what a benchmark measured of single images, by decoder; ValueError names the file."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); make this run again") from error
    return {row["decoder"]: row for row in rows if row["batch_size"] == 1}


def _alike(cell: Cell, identity: Mapping[str, Any]) -> bool:
    own = cell.meta["identity"]
    return all(own.get(key) == identity.get(key) for key in ("backbone", "sampling", "dtype"))


def read_preference(root: Path, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Return what people preferred, by generate run, in the newest analysis of two of the cells."""
    runs = {cell.folder.name for cell in cells}
    for done in sorted(root.glob("study_analysis/*/*/*/DONE"), key=_changed, reverse=True):
        scores = read_json(done.parent / "scores.json", "generate", "win_rate", "sd")
        asked = {side: Path(run).name for side, run in scores["generate"].items()}
        if set(asked.values()) <= runs:
            sd = scores["sd"] and 100 * scores["sd"]
            return {
                run: {"win_rate": 100 * scores["win_rate"][side], "win_rate_sd": sd}
                for side, run in asked.items()
            }
    return {}


def beside(
    cells: Mapping[Wanted, Cell | None],
    measured: Mapping[str, Mapping[str, Any]],
    timing: Timing | None,
    people: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return a row for each wanted cell: what was `measured` of its run, `paper_...` as printed.

    A cell that is not there yet has its decoder's words and the paper's numbers only. Seconds are
    those of `timing` or none: only decoders timed in turns, in one process, compare.
    """
    found = []
    for wish, cell in cells.items():
        row: dict[str, Any] = {"decoder": f"{wish.label} (missing)"}
        if cell is not None:
            run = cell.folder.name
            row = {**measured[run], **_timed(timing, cell.title), **people.get(run, {})}
        found.append({**row, **_printed(wish)})
    return found


def _timed(timing: Timing | None, title: str) -> dict[str, Any]:
    timed = timing.rows.get(title, {}) if timing else {}
    keys = ("seconds_per_image", "speedup")
    return {key: timed.get(key) for key in keys} | {f"{key}_note": None for key in keys}


def _printed(wish: Wanted | None) -> dict[str, Any]:
    """Return what the paper prints of a cell, under our keys with `paper_` before them."""
    printed = wish.printed if wish else {}
    return {f"paper_{ours.key}": printed.get(key) for ours, key in PAIRS if key in printed}


def columns(cells: Sequence[Wanted]) -> list[Column]:
    """Return the columns that the paper's table has: ours, and behind each the paper's."""
    found = []
    for column, key in PAIRS:
        values = [one.printed[key] for one in cells if one.printed.get(key) is not None]
        if values:
            printed = [len(str(value).partition(".")[2]) for value in values]
            digits = max(*printed, min(column.digits, 2))
            title = f"{column.title}, paper"
            theirs = Column(f"paper_{column.key}", title, digits, column.suffix, column.signed)
            found += [column, theirs]
    return found
