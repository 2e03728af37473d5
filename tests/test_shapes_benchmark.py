"""The shapes world's benchmark files follow the official formats and are true of their scenes."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_research.metrics.geneval import TASKS
from ssd_research.shapes import benchmark
from ssd_research.shapes.captions import vocabulary
from ssd_research.shapes.parser import Detection, parse
from ssd_research.shapes.render import render
from ssd_research.shapes.scenes import SHAPES, Item, Spec, sample_scene, sample_spec


def test_geneval_metadata_follows_the_official_format():
    lines = benchmark.geneval_metadata(per_kind=60)
    assert lines == benchmark.geneval_metadata(per_kind=60)
    assert Counter(line["tag"] for line in lines) == dict.fromkeys(TASKS, 60)
    distinct = {tag: {ln["prompt"] for ln in lines if ln["tag"] == tag} for tag in TASKS}
    assert {tag: len(p) for tag, p in distinct.items()} == {
        **dict.fromkeys(TASKS, 60),
        "single_object": 36,
    }
    for line in lines:
        assert set(line["prompt"].split()) <= set(vocabulary())
        if line["tag"] == "counting":
            (need,), (ban,) = line["include"], line["exclude"]
            assert ban == {"class": need["class"], "count": need["count"] + 1}
    spec = Spec("position", (Item("star"), Item("circle")), ((0, "left of", 1),))
    assert benchmark.metadata(spec) == {
        "tag": "position",
        "include": [
            {"class": "circle", "count": 1},
            {"class": "star", "count": 1, "position": ["left of", 0]},
        ],
        "prompt": "a photo of a star left of a circle",
    }


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_dpg_questions_are_true_of_their_scene(seed):
    rng = np.random.default_rng(seed)
    spec = sample_spec("dense", rng)
    scene = sample_scene(spec, rng)
    rows = benchmark.questions(spec, item_id="x")
    found = parse(render(scene))
    assert all(benchmark.answer(row, found, canvas=48) for row in rows)
    # A picture without its first object fails what depends on it, and the count.
    rest = [d for d in found if d.shape != spec.items[0].shape]
    failed = {r["proposition_id"] for r in rows if not benchmark.answer(r, rest, canvas=48)}
    assert {"1", "2", "3", str(len(rows) - 1)} <= failed


def test_dpg_rows_have_dependencies_that_exist():
    rows = benchmark.dpg_rows(prompts=20)
    assert tuple(rows[0]) == benchmark.DPG_COLUMNS
    assert len({r["text"] for r in rows}) == 20
    by_id = {(r["item_id"], r["proposition_id"]): r for r in rows}
    for row in rows:
        parents = [] if row["dependency"] == "0" else row["dependency"].split(",")
        assert len(parents) == {"attribute": 1, "relation": 2}.get(row["category_broad"], 0)
        for parent in parents:
            assert by_id[row["item_id"], parent]["category_broad"] == "entity"
    tuples = {r["tuple"].partition(" (")[0] for r in rows}
    assert tuples == {
        "entity - whole",
        "attribute - color",
        "attribute - size",
        "relation - spatial",
        "other - count",
        "global",
    }


def test_judge_reads_relations_and_refuses_unknown_tuples():
    mask = np.zeros((48, 48), bool)
    at = [(4.0, 20.0, 14.0, 30.0), (30.0, 22.0, 40.0, 32.0)]
    found = [Detection(s, "red", b, 1.0, 10.0, mask) for s, b in zip(SHAPES, at, strict=False)]
    row = {"tuple": "relation - spatial (circle, square, left of)"}
    assert benchmark.answer(row, found, canvas=48)
    assert not benchmark.answer({"tuple": row["tuple"].replace("left", "right")}, found, canvas=48)
    assert not benchmark.answer(
        {"tuple": "global (plain background)"}, [replace(found[0], score=0.5)], canvas=48
    )
    with pytest.raises(ValueError, match="cannot read"):
        benchmark.answer({"tuple": "entity - mood (circle)"}, found, canvas=48)


def test_benchmark_refuses_an_empty_size():
    with pytest.raises(ValueError, match=r"eval\.per_kind=0"):
        benchmark.geneval_metadata(per_kind=0)
