"""Prompt statistics of any sources, beside the paper's Table 17 where it has them."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ssd_research import paper
from ssd_research.metrics import prompt_statistics as metric
from ssd_research.metrics.prompt_statistics import WordLists
from ssd_research.paths import resolve_path
from ssd_research.prompts import Selection, load_prompts
from ssd_research.prompts.selection import plain
from ssd_research.prompts.sources import GENERATED, read_source
from ssd_research.reporting.tables import Column, Table
from ssd_research.runs import open_run, run_id, write_atomic

log = logging.getLogger(__name__)

COLUMNS = (
    Column("corpus", "Prompts"),
    Column("words", "Word lists"),
    Column("prompts", "Number"),
    Column("median_words", "Median words", digits=1),
    Column("exact_prompt_overlap", "Also in training"),
    Column("word_types_unseen_percent", "Word types unseen", digits=1, suffix=" %"),
    Column("shared_5grams_percent", "5-grams shared", suffix=" %"),
    Column("style_modifiers_percent", "Style", digits=1, suffix=" %"),
    Column("spatial_relations_percent", "Spatial", digits=1, suffix=" %"),
    Column("color_binding_percent", "Colour binding", digits=1, suffix=" %"),
    Column("counting_percent", "Counting", digits=1, suffix=" %"),
)


def run(cfg: DictConfig) -> Path:
    """Describe `eval.corpora`, or the prompts of `prompts=` (`eval=prompt_statistics`)."""
    corpora = read_corpora(cfg)
    lists = read_words(cfg)
    source = plain(cfg.eval.training)
    training = None if source is None else read_texts(source, cfg)
    identity = {
        "metric": ["prompt_statistics", metric.VERSION],
        "corpora": {name: run_id({"texts": texts}) for name, texts in corpora.items()},
        "training": None if training is None else run_id({"texts": training}),
        "words": {name: asdict(words) for name, words in lists.items()},
    }
    stage = open_run(cfg, "evaluate", identity)
    if stage.done:
        return stage.folder
    rows = measure(corpora, lists, training)
    table = Table.of("What prompts are like.", COLUMNS, [*rows, *of_the_paper(corpora)])
    scores = {
        "benchmark": cfg.eval.name,
        "version": metric.VERSION,
        "n_expected": sum(map(len, corpora.values())),
        "n_scored": sum(map(len, corpora.values())),
        "coverage": 1.0,
        "missing": [],
        "higher_is_better": None,
        "seed": cfg.seed,
        "corpora": rows,
        "table": asdict(table),
    }
    write_atomic(stage.folder / "scores.json", json.dumps(scores, indent=2) + "\n")
    write_atomic(stage.folder / "table.md", table.markdown())
    log.info(table.markdown())
    return stage.finish({"corpora": {name: len(texts) for name, texts in corpora.items()}})


def read_corpora(cfg: DictConfig) -> dict[str, list[str]]:
    """Return the texts of every corpus by name; ValueError for one without prompts."""
    if cfg.eval.corpora is None:
        return {"prompts": [prompt.text for prompt in load_prompts(cfg.prompts, cfg.selection)]}
    corpora = plain(cfg.eval.corpora)
    if not isinstance(corpora, Mapping) or not corpora:
        raise ValueError(f"eval.corpora={corpora} must name sources: {{geneval: file.jsonl}}")
    return {str(name): read_texts(source, cfg) for name, source in corpora.items()}


def read_texts(source: Any, cfg: DictConfig) -> list[str]:
    """Return every prompt of a source, neither cleaned nor selected, which would change counts.

    Blank lines are no prompts; ValueError where there is nothing else.
    """
    if source in GENERATED:
        return [prompt.text for prompt in load_prompts(source, cfg.selection)]
    rows, _ = read_source(source, Selection.of(cfg.selection))
    texts = [row.text for row in rows if row.text.strip()]
    if not texts:
        raise ValueError(f"{source} holds no prompts")
    return texts


def read_words(cfg: DictConfig) -> dict[str, WordLists]:
    """Return the word lists of `eval.words` or the shipped ones."""
    if cfg.eval.words is None:
        return metric.shipped_words()
    path = resolve_path(str(cfg.eval.words))
    try:
        return metric.parse_words(path.read_text(encoding="utf-8-sig"))
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise ValueError(f"eval.words={path} is no text file: {error}") from error


def measure(
    corpora: Mapping[str, Sequence[str]],
    lists: Mapping[str, WordLists],
    training: Sequence[str] | None,
) -> list[dict[str, Any]]:
    """Return a row for every corpus under every set of word lists."""
    rows = []
    for name, texts in corpora.items():
        shared = {} if training is None else metric.overlap(texts, training)
        for title, words in lists.items():
            described = metric.describe(texts, words)
            rows.append({"corpus": name, "words": title, **described, **shared})
    return rows


def of_the_paper(corpora: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return Table 17's rows of those corpora that it has, under the same keys."""
    return [
        {**row, "corpus": row["prompts"], "words": "paper", "prompts": row["count_max"]}
        for row in paper.table(17)
        if row["prompts"] in corpora
    ]
