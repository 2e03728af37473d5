"""Stage `report`: what finished runs of one model and name say, as HTML, Markdown, CSV and LaTeX.

Nothing is measured here: numbers come from `generate` and `evaluate` runs, found by their ids.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table as RichTable

from ssd_research.reporting.beside import table_sections
from ssd_research.reporting.cells import find_cells, find_imageless, groups
from ssd_research.reporting.experiment import chosen
from ssd_research.reporting.page import (
    Section,
    imageless,
    no_reference,
    section,
    to_html,
    to_latex,
    to_markdown,
)
from ssd_research.reporting.readme import publish
from ssd_research.reporting.tables import Column, csv_text, filled
from ssd_research.runs import open_run, stage_main, write_atomic

BRIEF = (
    Column("decoder", "Decoder"),
    Column("steps", "Steps"),
    Column("step_acceleration", "Step acceleration", suffix="×"),
    Column("speedup", "Latency speedup", suffix="×"),
    Column("geneval", "GenEval", digits=3),
    Column("dpg", "DPG-Bench"),
    Column("nll", "NLL", digits=3),
    Column("fid", "FID", digits=3),
)


def run(cfg: DictConfig) -> Path:
    """Write `report.html`, `report.md`, `table.csv` and `table.tex`, and return the run folder.

    With `experiment=` naming a table of the paper, exactly its cells are read.

    Raises:
        ValueError: if there is no finished run, or README.md lacks the results markers.
        FileNotFoundError: if `report.readme` is true and there is no README.md.
    """
    if cfg.report.images < 0:
        raise ValueError(f"report.images={cfg.report.images} must be at least 0")
    if cfg.table is None:
        if cfg.get("scale") is not None:
            raise ValueError("scale= does nothing without experiment=, which names a table")
        sections = found_sections(cfg)
    else:
        cfg, given = chosen(cfg)
        sections = table_sections(cfg, given)
    cells = [cell for one in sections for cell in one.cells]
    identity = {
        "generate": [cell.folder.name for cell in cells],
        "evaluate": sorted(run for one in sections for run in one.evaluations),
        "images": cfg.report.images,
        "table": None if cfg.table is None else str(cfg.table.number),
    }
    stage = open_run(cfg, "report", identity)
    for name, text in pages(sections).items():
        write_atomic(stage.folder / name, text)
    if cfg.report.readme:
        write_readme(sections, name=f"{cfg.model.name}_{cfg.name}")
    stage.finish({"cells": len(cells)})
    say(sections, (stage.folder / "report.html").resolve())
    return stage.folder


def found_sections(cfg: DictConfig) -> list[Section]:
    """Return a section for every group of comparable runs of this model and name.

    Raises ValueError if there is no finished generate run.
    """
    root, model, name = Path(str(cfg.output_dir)).expanduser(), cfg.model.name, str(cfg.name)
    cells = find_cells(root, model, name, folders=cfg.report.generate)
    sections = []
    for group in groups(cells):
        one = section(group, pictures=cfg.report.images)
        sections.append(replace(one, warnings=[*no_reference(group), *one.warnings]))
    return sections + imageless(find_imageless(root, model, name))


def say(sections: Sequence[Section], page: Path) -> None:
    """Print what matters most of every section's first table, and where the page is."""
    console = Console()
    for one in sections:
        rows = one.tables[0].rows if one.tables else []
        columns = filled(BRIEF, rows)
        if not columns:
            continue
        table = RichTable(title=one.title, title_justify="left")
        for n, column in enumerate(columns):
            table.add_column(column.title, justify="right" if n else "left")
        for row in rows:
            table.add_row(*(column.text({**row, f"{column.key}_ci": None}) for column in columns))
        console.print(table)
    console.print(f"open {page}", soft_wrap=True, highlight=False)


def pages(sections: Sequence[Section]) -> dict[str, str]:
    """Return the report's files by name."""
    rows = [{"group": one.title, **row} for one in sections for row in one.rows]
    return {
        "report.html": to_html(sections),
        "report.md": to_markdown(sections),
        "table.csv": csv_text(rows),
        "table.tex": to_latex(sections),
    }


def write_readme(sections: Sequence[Section], *, name: str) -> None:
    """Put the tables into README.md and the whole report into `results/`."""
    tables = [table.markdown() for one in sections for table in one.tables]
    publish("results", "\n".join(tables), file=f"{name}.md", whole=to_markdown(sections))


def main() -> None:
    """Command line: `python -m ssd_research.report model=tiny`."""
    stage_main("config", run)


if __name__ == "__main__":
    main()
