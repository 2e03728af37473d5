"""The report as text: Markdown, LaTeX and one HTML page without other files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from ssd_research import paper
from ssd_research.reporting import measures
from ssd_research.reporting.cells import Cell
from ssd_research.reporting.pictures import PictureRow, shown_width, side_by_side
from ssd_research.reporting.qualities import QUALITIES, judge_of
from ssd_research.reporting.tables import Column, Row, Table, filled, latex

TEMPLATES = Path(__file__).parents[1] / "templates"
PAPER = (
    Column("method", "Method"),
    Column("steps", "Steps"),
    Column("step_acceleration", "Step acceleration", suffix="×"),
    Column("latency_s", "Latency (s/image)"),
    Column("latency_acceleration", "Latency speedup", suffix="×"),
    Column("dpg", "DPG-Bench"),
)
PAPER_NOTE = "SSD paper, Table 7: DPG-Bench prompts on an RTX Blackwell 6000 Pro."
NOTES = (
    "Steps (NFE) are backbone forwards per image; conditional and unconditional streams share one.",
    "Latency is the median over full batches of seconds / batch size, without image decoding.",
    "The acceptance rate is accepted / drafted tokens over all rounds of the rows after the first; "
    "it is undefined at r=0, which verifies none of them.",
    "Brackets are 95 % intervals over prompts.",
    "NLL is that of the codes under the backbone's own guided p: a lossless decoder has AR's, "
    "one that seeks modes a lower and one whose codes do not fit together a higher value.",
    "FID is biased upwards the more the fewer the images, and has no interval of its own: small "
    "differences need several seeds (eval=compare_seeds).",
)


THEIRS = "paper_"  # before the key of a column, the paper's numbers for it


@dataclass(frozen=True)
class Section:
    """One group of comparable cells: title, tables, warnings, how it was made, and pictures.

    `evaluations` are the ids of the runs whose scores are printed.
    """

    title: str
    cells: Sequence[Cell]
    rows: list[dict[str, Any]]
    tables: list[Table]
    warnings: list[str]
    facts: list[tuple[str, str]]
    pictures: list[PictureRow]
    width: int
    evaluations: list[str]


def section(cells: Sequence[Cell], *, pictures: int) -> Section:
    """Measure one group of comparable cells and lay it out."""
    rows = measures.measure(cells)
    shown = side_by_side(cells, pictures)
    return Section(
        title=title(cells[0]),
        cells=cells,
        rows=rows,
        tables=layout(cells, rows),
        warnings=warnings(cells, rows),
        facts=facts(cells),
        pictures=shown,
        width=shown_width(cells[0].image_width) if shown else 0,
        evaluations=[scores["run_id"] for cell in cells for scores in cell.scores.values()],
    )


def title(cell: Cell) -> str:
    """Return the model, the prompts' source and the number of images."""
    prompts = len({row["prompt_id"] for row in cell.images})
    each = len(cell.images) // prompts
    count = f"{prompts} prompt{'s' * (prompts > 1)} × {each} image{'s' * (each > 1)}"
    return f"{cell.config.model.name} · {cell.source} · {count} · seed {cell.config.seed}"


def layout(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Table]:
    """Return the tables of speed and quality, and the paper's own where it has the model."""
    setting = measures.column_setting(cells)
    tables = [Table.of(f"Speed. Latency on {setting}.", measures.SPEED, rows)]
    for quality in QUALITIES:
        shown = filled(quality.columns, rows)
        if shown:
            judge = judge_of(quality, [cell.scores for cell in cells])
            tables.append(Table(f"{quality.title} {judge}.", [measures.DECODER, *shown], rows))
    for cell in cells:
        for scores in cell.scores.values():
            if "table" in scores:
                own = Table.from_data(scores["table"])
                tables.append(replace(own, caption=f"{cell.title}: {own.caption}"))
    return [*tables, *printed(cells[0].config.model.name)]


def printed(model: str) -> list[Table]:
    """Return the paper's own speeds and qualities of a model, if it has it."""
    rows = [{**row, "method": paper_method(row)} for row in paper.sweep(model)]
    return [Table.of(PAPER_NOTE, PAPER, rows)] if rows else []


def imageless(found: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    """Return a section for scores, by run id, of evaluations that need no images, if any."""
    if not found:
        return []
    tables = [Table.from_data(scores["table"]) for scores in found.values()]
    facts = [("Runs", "; ".join(f"{s['benchmark']}: {run}" for run, s in found.items()))]
    return [Section("Evaluations without images", [], [], tables, [], facts, [], 0, list(found))]


def paper_method(row: Row) -> str:
    """Return the name of a method with its parameters, as the paper prints it."""
    given = {key: row[key] for key in ("w", "v", "b", "i") if row[key] is not None}
    if given.get("v") == 1:
        given = {"r": given["b"]}
    return " ".join([str(row["method"]).upper(), *[f"{k}={v}" for k, v in given.items()]])


def warnings(cells: Sequence[Cell], rows: Sequence[Row]) -> list[str]:
    """Return what a reader must know before comparing: odd settings, missing scores."""
    found = []
    if any(row["seconds_per_image_note"] for row in rows):
        found.append(
            "Latencies of another device, dtype or batch size are not shown in one column."
        )
    for cell, row in zip(cells, rows, strict=True):
        for key, name in (("geneval", "GenEval"), ("dpg", "DPG-Bench"), ("fid", "FID")):
            share = row.get(f"{key}_coverage", 1)
            if share != 1:
                found.append(f"{cell.title}: {name} covers {share:.0%} of its images.")
        if row.get("nll_outside"):
            share = f"{row['nll_outside']:.2%}"
            found.append(f"{cell.title}: p excludes {share} of the codes; NLL leaves them out.")
    return found


def no_reference(cells: Sequence[Cell]) -> list[str]:
    """Return what to do where there is no AR run to compare with."""
    if measures.reference(cells) is not None:
        return []
    model, name = cells[0].config.model.name, cells[0].config.name
    return [
        "There is no AR run to compare with; make it with the same prompts and seed: "
        f"python -m ssd_research.generate model={model} name={name} decoder=ar"
    ]


def facts(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Return how the cells were made, label and text; what differs between them is all listed."""
    identities = [cell.meta["identity"] for cell in cells]
    labels = {
        "Model": [
            f"{c.config.model.name}, backbone {i['backbone']}"
            for c, i in zip(cells, identities, strict=True)
        ],
        "Sampling": [_pairs(i["sampling"]) for i in identities],
        "Seed": [i["seed"] for i in identities],
        "Device": [c.meta["device"] for c in cells],
        "Precision": [i["dtype"] for i in identities],
        "Versions": [_pairs(c.meta["versions"], sign=" ") for c in cells],
        "Commit": [c.meta["git_sha"] for c in cells],
        "Made": [c.meta["started"] for c in cells],
        "Runs": [f"{c.title}: {c.folder.name}" for c in cells],
    }
    return [(label, _distinct(values)) for label, values in labels.items()]


def _pairs(values: dict[str, Any], *, sign: str = "=") -> str:
    return ", ".join(f"{key}{sign}{value}" for key, value in values.items() if value is not None)


def _distinct(values: Iterable[Any]) -> str:
    return "; ".join(dict.fromkeys("unknown" if v is None else str(v) for v in values))


def to_markdown(sections: Sequence[Section]) -> str:
    """Return the whole report without pictures as Markdown."""
    parts = ["# Results\n"]
    for one in sections:
        parts += [f"## {one.title}\n", *[f"**Note.** {text}\n" for text in one.warnings]]
        parts += [table.markdown() for table in one.tables]
        parts.append("".join(f"- {label}: {text}\n" for label, text in one.facts))
    return "\n".join([*parts, " ".join(NOTES), ""])


def to_latex(sections: Sequence[Section]) -> str:
    """Return every table as a LaTeX tabular under a comment with its caption."""
    return "\n".join(
        f"% {one.title}: {table.caption}\n{latex(table.columns, table.rows)}"
        for one in sections
        for table in one.tables
    )


def to_html(sections: Sequence[Section]) -> str:
    """Return one HTML page that holds everything, pictures included."""
    template = environment().get_template("report.html.j2")
    return template.render(sections=sections, notes=NOTES, stacked=stacked)


def stacked(columns: Sequence[Column]) -> list[tuple[Column, Column | None]]:
    """Return the columns, each with the paper's for it, which a page shows below it."""
    theirs = {column.key: column for column in columns if column.key.startswith(THEIRS)}
    ours = [column for column in columns if not column.key.startswith(THEIRS)]
    pairs = [(column, theirs.pop(THEIRS + column.key, None)) for column in ours]
    return [*pairs, *((column, None) for column in theirs.values())]


def environment() -> jinja2.Environment:
    """Return what renders the templates: everything put into a page is escaped."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
