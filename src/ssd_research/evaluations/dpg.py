"""DPG-Bench: ask a VQA judge about the images of a folder, and score its answers.

Answers are stored before anything is scored. An evaluation asks only what no evaluation of this
model and name has asked the same judge about the same pixels: a resumed one repeats nothing, and
another protocol costs nothing. `eval/judge=recorded` scores stored answers without any model.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from ssd_research.evaluations.dpg_answers import STORE, Exam, Said, ask, read_rival, texts
from ssd_research.evaluations.images import (
    allows_missing,
    image_root,
    refuse_short_run,
    run_of,
    write_rows,
)
from ssd_research.metrics import dpg
from ssd_research.metrics.dpg import PROTOCOLS, Answers, listed
from ssd_research.metrics.dpg_folder import (
    complete_items,
    differing_prompts,
    read_tiles,
    write_images,
)
from ssd_research.metrics.dpg_questions import QuestionTable, read_questions
from ssd_research.paths import resolve_path
from ssd_research.runs import open_run, run_id, whole_number, write_atomic
from ssd_research.shapes import benchmark

log = logging.getLogger(__name__)

SHAPES, SHAPES_ITEMS = "shapes_dpg", 60


def run(cfg: DictConfig, images: str) -> Path:
    """Ask and score a folder of images (`eval=dpg_bench`, `eval=shapes_dpg`)."""
    if cfg.eval.protocol not in PROTOCOLS:
        accepted = ", ".join(PROTOCOLS)
        raise ValueError(f"eval.protocol={cfg.eval.protocol} is not known; accepted: {accepted}")
    exam = prepare(cfg, images)
    rival = None if cfg.eval.against is None else read_rival(str(cfg.eval.against), exam)
    stage = open_run(cfg, "evaluate", _identity(cfg, exam, rival))
    if stage.done:
        return stage.folder
    said = ask(exam, store=stage.folder / STORE)
    write_rows(per_image(exam, said), path=stage.folder / "per_image.parquet")
    scores = score(cfg, exam, said, rival)
    write_atomic(stage.folder / "scores.json", json.dumps(scores, indent=2) + "\n")
    _say(scores)
    return stage.finish({"n_scored": scores["n_scored"], "average": scores["average"]})


def export(cfg: DictConfig, images: str) -> Path:
    """Write the images of a run as the official script expects them (`eval=dpg_export`)."""
    root, count = image_root(images), whole_number(cfg, "eval.tiles", minimum=1)
    found = read_tiles(root, tiles=count)
    refuse_short_run(root, len(found))
    known = {t.item_id: t.prompt or "" for t in found}
    complete_items(found, known, tiles=count, allow_missing=False)
    if not cfg.eval.folder:
        raise ValueError(f"eval.folder={cfg.eval.folder} must name a folder to write")
    folder = Path(str(cfg.eval.folder)).expanduser()
    side = write_images(root, found, folder, layout=cfg.eval.layout, tiles=count)
    log.info(
        "wrote %d images to %s (--resolution %d, --pic-num %d)", len(found), folder, side, count
    )
    return folder


def prepare(cfg: DictConfig, images: str) -> Exam:
    """Return the exam of a folder; ValueError or FileNotFoundError for what is missing or odd."""
    count = whole_number(cfg, "eval.tiles", minimum=1)
    whole_number(cfg, "evaluate.bootstrap", minimum=1)
    table = load_questions(cfg)
    root = image_root(images)
    found = read_tiles(root, tiles=count)
    sides = found[0].size
    if cfg.eval.resolution is not None and sides != (cfg.eval.resolution,) * 2:
        raise ValueError(
            f"the images are {sides[0]}x{sides[1]} pixels, "
            f"not eval.resolution={cfg.eval.resolution}"
        )
    if any(t.quarter is not None for t in found):
        log.info("files at the root are grids of four images of %dx%d pixels", *sides)
    allowed = allows_missing(cfg)
    tiles = complete_items(found, table.texts, tiles=count, allow_missing=allowed)
    if not tiles:
        raise FileNotFoundError(f"{root}: no prompt has all of its eval.tiles={count} images")
    judge = hydra.utils.instantiate(cfg.eval.judge, _convert_="all")
    return Exam(root, tiles, table, judge)


def load_questions(cfg: DictConfig) -> QuestionTable:
    """Return the questions that `eval.questions` names: a CSV file, or the shapes world's."""
    source = str(cfg.eval.questions)
    if source == SHAPES:
        every = cfg.eval.get("items") is None
        items = SHAPES_ITEMS if every else whole_number(cfg, "eval.items", minimum=1)
        return QuestionTable.of(benchmark.dpg_rows(prompts=items), source=source)
    try:
        return read_questions(resolve_path(source))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"eval.questions={source} is not there; fetch dpg_bench/dpg_bench.csv from "
            "github.com/TencentQQGYLab/ELLA and name it"
        ) from error


def _identity(cfg: DictConfig, exam: Exam, rival: Answers | None) -> dict[str, Any]:
    """Return what can change the scores: pixels, questions, judge, protocol, draws, the rival."""
    return {
        "images": run_id({f"{t.item_id}/{t.number}": t.sha256 for t in exam.tiles}),
        "of": run_of(exam.root),
        "questions": exam.table.fingerprint,
        "judge": exam.examiner,
        "metric": ["dpg", dpg.VERSION, cfg.eval.protocol],
        "benchmark": cfg.eval.name,
        "bootstrap": [cfg.evaluate.bootstrap, cfg.seed],
        "against": None if rival is None else run_id({"answers": rival}),
    }


def per_image(exam: Exam, said: Said) -> list[dict[str, Any]]:
    """Return one row per image: its score with dependencies, and how it was answered."""
    prompts, _ = dpg.score_prompts(exam.table, texts(said), PROTOCOLS["fixed"])
    rows = []
    for tile in exam.tiles:
        read = [dpg.reading(a.answer) for a in said[tile.item_id, tile.number].values()]
        rows.append(
            {
                "item_id": tile.item_id,
                "image_index": tile.number,
                "filename": tile.path,
                "prompt": exam.table.texts[tile.item_id],
                "score": prompts[tile.item_id].tiles[tile.number],
                "questions": len(read),
                "yes": read.count(True),
                "unparsable": read.count(None),
                "sha256": tile.sha256,
            }
        )
    return rows


def score(cfg: DictConfig, exam: Exam, said: Said, rival: Answers | None) -> dict[str, Any]:
    """Return the content of `scores.json`: the chosen protocol's scores, then both protocols'."""
    answers = texts(said)
    draws = {"samples": cfg.evaluate.bootstrap, "seed": cfg.seed}
    both = {
        name: dpg.score(exam.table, answers, scoring, **draws)
        for name, scoring in PROTOCOLS.items()
    }
    scores = {
        "benchmark": cfg.eval.name,
        "version": dpg.VERSION,
        "protocol": cfg.eval.protocol,
        "judge": exam.examiner,
        "questions": str(cfg.eval.questions),
        "questions_sha256": exam.table.fingerprint,
        "oddities": dict(exam.table.oddities),
        "images": str(exam.root),
        "images_per_prompt": cfg.eval.tiles,
        "resolution": list(exam.tiles[0].size),
        "other_prompts": differing_prompts(exam.tiles, exam.table.texts),
        "higher_is_better": True,
        "seed": cfg.seed,
        "bootstrap": cfg.evaluate.bootstrap,
        **both[cfg.eval.protocol],
        "unparsable": dpg.count_unparsable(exam.table, answers),
        "protocols": {name: _brief(found) for name, found in both.items()},
    }
    if rival is not None:
        compared = dpg.compare(exam.table, answers, rival, PROTOCOLS[cfg.eval.protocol], **draws)
        scores["against"] = {"evaluation": str(cfg.eval.against), **compared}
    return scores


def _brief(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that a table needs of one protocol."""
    categories = {name: c["score"] for name, c in found["categories"].items()}
    return {"average": found["average"], "categories": categories, "n_scored": found["n_scored"]}


def _say(scores: Mapping[str, Any]) -> None:
    """Log the scores in one line, and say what keeps them from being the benchmark's."""
    parts = ", ".join(f"{name} {c['score']:.3f}" for name, c in scores["categories"].items())
    log.info(
        "%s (%s): average %s (%s)",
        scores["benchmark"],
        scores["protocol"],
        "-" if scores["average"] is None else f"{scores['average']:.3f}",
        parts,
    )
    if scores["coverage"] != 1:
        log.warning("%(n_scored)d of %(n_expected)d prompts are scored", scores)
    if scores["dropped"]:
        log.warning("left out by the official protocol: %s", listed(scores["dropped"]))
    if scores["unparsable"]["unparsable"]:
        log.warning(
            "%(unparsable)d of %(answers)d answers are neither yes nor no", scores["unparsable"]
        )
