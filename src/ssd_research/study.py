"""Stage `study`: which of two decoders' images do people prefer (paper, Table 10 and Figure 9)?

`build` makes a blind page from two finished generate runs; evaluators open it from a folder, no
server needed, and send back what they download. `analyse` reads that with the key.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from ssd_research.metrics import preference
from ssd_research.reporting import study_page, study_report
from ssd_research.reporting.cells import Cell, read_cell
from ssd_research.reporting.study_responses import Key, read_key, read_responses
from ssd_research.reporting.tables import csv_text
from ssd_research.runs import open_run, run_id, stage_main, whole_number, write_atomic

log = logging.getLogger(__name__)

ELSEWHERE = {"build": ("key", "responses"), "analyse": ("a", "b", "pairs")}  # options without use


def run(cfg: DictConfig) -> Path:
    """Build a study or analyse its responses, as `study.action` says, and return the run folder."""
    actions = {"build": build, "analyse": analyse}
    action = cfg.study.action
    if action not in actions:
        raise ValueError(
            f"study.action={'null' if action is None else action} is not known; say "
            "python -m ssd_research.study build, or python -m ssd_research.study analyse"
        )
    for option in ELSEWHERE[action]:
        if cfg.study[option] is not None:
            raise ValueError(f"study.{option} does nothing in study {action}; leave it out")
    return actions[action](cfg)


def build(cfg: DictConfig) -> Path:
    """Write `page/`, which goes to the evaluators, and `key.json`, which does not.

    Raises:
        ValueError: if `study.a` and `study.b` are no two finished generate runs of the same
            prompts and seed, or have too few pairs that differ.
        FileNotFoundError: if an image is missing.
    """
    cells = [finished(cfg, "study.a"), finished(cfg, "study.b")]
    seed, title = whole_number(cfg, "study.seed"), str(cfg.study.title or "").strip()
    if not title:
        raise ValueError("study.title is empty; it is the headline of the page")
    count = None if cfg.study.pairs is None else whole_number(cfg, "study.pairs", minimum=1)
    pairs, equal = study_page.choose_pairs(*cells, count=count, seed=seed)
    facts = {
        "a": cells[0].folder.name,
        "b": cells[1].folder.name,
        "pairs": run_id({pair.id: pair.names for pair in pairs}),
        "seed": seed,
        "title": title,
        "page": study_page.VERSION,
    }
    stage = open_run(cfg, "study", facts)
    name, page = stage.folder.name, stage.folder / "page"
    if not stage.done or not page.is_dir():
        key = study_page.key(name, cells, pairs, equal=equal, title=title, seed=seed)
        write_atomic(stage.folder / "key.json", json.dumps(key, indent=2) + "\n")
        secret = f"{facts['a']} {facts['b']}"
        html = study_page.to_html(name, pairs, secret=secret, title=title, seed=seed)
        study_page.write_page(page, html, pairs=pairs)
        (stage.folder / "responses").mkdir(exist_ok=True)
        stage.finish({"pairs": len(pairs), "equal_pairs_passed_over": equal})
    if equal:
        log.warning("%d pairs of equal pictures were passed over", equal)
    console = Console()
    console.print(f"{len(pairs)} pairs; send this folder to the evaluators, and never key.json:")
    console.print(str(page.resolve()), soft_wrap=True, highlight=False)
    return stage.folder


def finished(cfg: DictConfig, option: str) -> Cell:
    """Return the finished generate run that an option names; ValueError if it is none."""
    value = OmegaConf.select(cfg, option)
    if value is None:
        raise ValueError(
            f"{option} is null; a study needs two finished generate runs, study.a=<run folder> "
            "and study.b=<run folder>"
        )
    folder = Path(str(value)).expanduser().resolve()
    if not (folder / "DONE").exists() or not (folder / "images.parquet").exists():
        raise ValueError(f"{option}={value} is not a finished generate run")
    return read_cell(folder)


def analyse(cfg: DictConfig) -> Path:
    """Write `report.md`, `scores.json`, `table.csv`, `table.tex` and `votes.csv` of the responses.

    Raises:
        ValueError: if there is no built study, or a response does not belong to it.
    """
    samples = whole_number(cfg, "study.bootstrap", minimum=1)
    path = key_file(cfg)
    key, files = read_key(path), response_files(cfg, path.parent)
    answers = read_responses(files, key)
    facts = {
        "study": key.study,
        "responses": sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files),
        "bootstrap": [samples, key.seed],
        "metric": ["preference", preference.VERSION],
    }
    found = study_report.scores(key, answers, samples=samples, seed=key.seed)
    stage = open_run(cfg, "study_analysis", facts)
    rows = study_report.evaluator_rows(key, answers)
    pages = {
        "scores.json": json.dumps(found, indent=2) + "\n",
        "report.md": study_report.to_markdown(key, found, rows=rows),
        "table.csv": csv_text(rows),
        "table.tex": study_report.to_latex(key, found),
        "votes.csv": csv_text([vars(vote) for one in answers for vote in one.votes]),
    }
    for name, text in pages.items():
        write_atomic(stage.folder / name, text)
    stage.finish({"n_scored": found["n_scored"], "evaluators": found["evaluators"]})
    say(key, found, stage.folder)
    return stage.folder


def key_file(cfg: DictConfig) -> Path:
    """Return `study.key`, or the key of the newest study of this model and name."""
    if cfg.study.key is not None:
        path = Path(str(cfg.study.key)).expanduser().resolve()
        path = path / "key.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"study.key={cfg.study.key} does not exist")
        return path
    root = Path(str(cfg.output_dir)).expanduser() / "study" / cfg.model.name / str(cfg.name)
    built = sorted(root.glob("*/DONE"), key=lambda done: done.stat().st_mtime)
    if not built:
        raise ValueError(f"{root} holds no study; build one first, or pass study.key=<key.json>")
    return built[-1].parent / "key.json"


def response_files(cfg: DictConfig, study: Path) -> list[Path]:
    """Return the files of `study.responses`: a folder, files, or `responses/` of the study."""
    given = cfg.study.responses
    if given is None:
        given = study / "responses"
    listed = list(given) if OmegaConf.is_list(given) else [given]
    places = [Path(str(place)).expanduser() for place in listed]
    for place in places:
        if not place.exists():
            raise ValueError(f"study.responses: {place} does not exist")
    files = {
        file.resolve(): None  # in this order, each once
        for place in places
        for file in (downloads(place) if place.is_dir() else [place])
    }
    if not files:
        raise ValueError(f"{places[0]} holds no responses; put the downloaded .json files there")
    return list(files)


def downloads(folder: Path) -> list[Path]:
    """Return the files in a folder; ValueError if one is no download, as it would go unnoticed."""
    files = [f for f in sorted(folder.iterdir()) if f.is_file() and not f.name.startswith(".")]
    for file in files:
        if file.suffix != ".json":
            raise ValueError(f"{file} does not end in .json; rename it, or take it away")
    return files


def say(key: Key, found: Mapping[str, Any], folder: Path) -> None:
    """Print Table 10 of this study, its tests, and where the report is."""
    title = f"study {key.study}: {found['judge']}, {len(key.pairs)} pairs"
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(study_report.METHODS):
        table.add_column(column.title, justify="right" if number else "left")
    for row in study_report.method_rows(key, found):
        table.add_row(*(column.text(row) for column in study_report.METHODS))
    console = Console()
    console.print(table)
    for line in [*study_report.warnings(key, found), *study_report.tests(key, found)]:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    console.print(str((folder / "report.md").resolve()), soft_wrap=True, highlight=False)


def main() -> None:
    """Command line: `python -m ssd_research.study build study.a=<run> study.b=<run>`."""
    # Hydra takes options only: the first word is the option study.action.
    if len(sys.argv) > 1 and sys.argv[1].isidentifier():
        sys.argv[1] = f"study.action={sys.argv[1]}"
    stage_main("config", run)


if __name__ == "__main__":
    main()
