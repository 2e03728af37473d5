"""GenEval's own files and the paper's figures: counts, words, prompt ids and overalls."""

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ssd_research import paper
from ssd_research.metrics.geneval import TASKS, aggregate
from ssd_research.metrics.geneval_metadata import check_metadata
from ssd_research.metrics.geneval_words import COLOURS, OBJECTS
from ssd_research.prompts import load_prompts

OFFICIAL = Path(__file__).parents[2] / "shared" / "data" / "geneval"
needs_files = pytest.mark.skipif(
    not OFFICIAL.is_dir(), reason="GenEval's files are not beside this repository"
)
PROMPTS = {
    "single_object": 80,
    "two_object": 99,
    "counting": 80,
    "colors": 94,
    "position": 100,
    "color_attr": 100,
}
COLUMNS = ("single", "two", "counting", "colors", "position", "color_attribution")


@needs_files
def test_official_prompts_have_their_index_as_id_and_their_line_as_metadata():
    path = OFFICIAL / "evaluation_metadata.jsonl"
    prompts = load_prompts(str(path), {})
    assert [p.id for p in prompts] == [f"{n:05d}" for n in range(553)]
    assert [p.metadata for p in prompts] == [json.loads(t) for t in path.read_text().splitlines()]
    assert [p.text for p in prompts] == (OFFICIAL / "generation_prompts.txt").read_text().split(
        "\n"
    )[:553]
    assert len({p.text for p in prompts}) == 553
    assert Counter(p.metadata["tag"] for p in prompts) == PROMPTS


@needs_files
def test_official_lines_are_as_the_rules_expect():
    lines = [p.metadata for p in load_prompts(str(OFFICIAL / "evaluation_metadata.jsonl"), {})]
    for line in lines:
        check_metadata(line)
    needs = [need for line in lines for need in line["include"]]
    assert {need["class"] for need in needs} <= set(OBJECTS)
    assert {need["color"] for need in needs if "color" in need} == set(COLOURS)
    counts = Counter(line["include"][0]["count"] for line in lines if line["tag"] == "counting")
    assert counts == {2: 26, 3: 28, 4: 26}
    for line in lines:
        (need, *_), bans = line["include"], line.get("exclude", [])
        assert bool(bans) == (line["tag"] == "counting")
        assert bans in ([], [{"class": need["class"], "count": need["count"] + 1}])
    relations = Counter(need["position"][0] for need in needs if "position" in need)
    assert relations == {"left of": 19, "right of": 27, "above": 26, "below": 28}
    assert {need["position"][1] for need in needs if "position" in need} == {0}


@needs_files
def test_words_are_the_official_ones():
    assert list(OBJECTS) == (OFFICIAL / "object_names.txt").read_text().split("\n")[: len(OBJECTS)]
    assert (len(OBJECTS), len(COLOURS)) == (80, 10)


@needs_files
@pytest.mark.parametrize("model", ["clip", "if-xl", "sdv2"])
def test_ids_are_those_of_the_human_annotations(model):
    """5 answers each to 400 images, whose prompt ids are the lines of the metadata file."""
    texts = {p.id: p.text for p in load_prompts(str(OFFICIAL / "evaluation_metadata.jsonl"), {})}
    with (OFFICIAL / "annotations" / f"annotations_{model}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # A line break within an answer makes two halves of four rows of if-xl.
    rows = [row for row in rows if row["Input.prompt_id"].isdigit()]
    assert len(rows) == 2000
    for row in rows:
        assert texts[f"{int(row['Input.prompt_id']):05d}"] == row["Input.caption"]


@pytest.mark.parametrize("row", paper.table(2), ids=lambda row: f"{row['model']} {row['method']}")
def test_overalls_of_the_papers_table_2_are_the_mean_of_its_tasks(row):
    """Task by task, so many of 100 images right; both sides are rounded to two decimals."""
    right = {task: round(100 * row[column]) for task, column in zip(TASKS, COLUMNS, strict=True)}
    correct = [image < right[task] for task in TASKS for image in range(100)]
    tags = [task for task in TASKS for _ in range(100)]
    scores = aggregate(correct, tags, [str(n) for n in range(600)], samples=10)
    assert [scores["tasks"][task]["score"] for task in TASKS] == pytest.approx(
        [row[column] for column in COLUMNS]
    )
    assert scores["overall"] == pytest.approx(np.mean([row[column] for column in COLUMNS]))
    assert abs(scores["overall"] - row["geneval"]) <= 0.01 + 1e-9
