"""Draft and verify cost: which forwards are timed, where, and how they become AR steps."""

import json
from itertools import count

import pytest
import torch
from hydra import compose, initialize_config_dir

from ssd_research import evaluate
from ssd_research.evaluations import cost as stage
from ssd_research.metrics.cost import WARM_UP, Bench, measure, places
from ssd_research.paths import conf_dir
from ssd_research.sampling import Sampling

PROMPTS = ["a red circle"]


def bench(backbone, rows: int = 3, repeats: int = 2) -> Bench:
    return Bench.start(backbone, PROMPTS, sampling=Sampling(2.0), rows=rows, repeats=repeats)


def test_places_are_spread_and_leave_room_for_the_rows() -> None:
    assert places(24, 5, 4) == [1, 7, 13, 19]
    assert places(6, 5, 4) == [1]
    assert places(6, 3, 4) == [1, 2, 3]
    assert places(24, 5, 1) == [1]


def test_a_verification_feeds_all_codes_of_the_rows_at_once(random_backbone) -> None:
    work = bench(random_backbone)
    work.fill(2)
    before = work.state.meter.passes, work.state.meter.tokens[0]
    work.verify(2, 3)
    assert (work.state.meter.passes, work.state.meter.tokens[0]) == (before[0] + 1, before[1] + 18)
    work.ar_step(2)
    assert (work.state.meter.passes, work.state.meter.tokens[0]) == (before[0] + 2, before[1] + 19)
    work.draft(2, 3)
    assert work.state.meter.passes == before[0] + 2


def test_the_context_is_the_rows_above(random_backbone) -> None:
    """Timing must see the cache that decoding would, or attention costs too little."""
    work = bench(random_backbone)
    work.fill(3)
    codes = work.state.codes
    h = random_backbone.hidden_states(PROMPTS, codes)
    torch.testing.assert_close(work.state.h_pre[:1, 1:18], h[:, 1:18])


def test_costs_are_ratios_of_medians(random_backbone, monkeypatch) -> None:
    work, ticks = bench(random_backbone, rows=2, repeats=4), count(1)
    lengths = {"ar_step": 2.0, "draft": 1.0, "verify": 3.0}
    clock = [0.0]

    def spend(name):
        def pretend(self, row, rows=1):
            noise = 100.0 if next(ticks) % (WARM_UP + 4) == 0 else 0.0  # one slow repetition each
            clock[0] += lengths[name] * rows + noise

        return pretend

    for name in lengths:
        monkeypatch.setattr(Bench, name, spend(name))
    monkeypatch.setattr(type(work.state), "_now", lambda self: clock[0])
    first, second = measure(work, rows=2, positions=2)
    assert (first["tokens"], second["tokens"]) == (6, 12)
    assert (first["drafting_ar_steps"], first["verification_ar_steps"]) == (0.5, 1.5)
    assert (second["drafting_ar_steps"], second["verification_ar_steps"]) == (1, 3)
    assert (first["tokens_per_step"], first["ar_step_seconds"]) == (3, 2)


def test_the_stage(random_backbone, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(stage, "load_backbone", lambda cfg: random_backbone)
    options = [
        "eval=cost",
        "eval.rows=2",
        "eval.positions=2",
        "eval.repeats=1",
        "eval.batch_size=2",
    ]
    options += [f"output_dir={tmp_path}", "prompts=[a red circle]", "runtime=cpu"]
    with initialize_config_dir(str(conf_dir()), version_base=None):
        folder = evaluate.run(compose("config", options))
        too_many = compose("config", [*options, "eval.rows=6"])
        paper = compose("config", [*options, "model=janus_pro"])
    scores = json.loads((folder / "scores.json").read_text())
    assert [block["tokens"] for block in scores["blocks"]] == [6, 12]
    assert all(block["verification_ar_steps"] > 0 for block in scores["blocks"])
    assert (scores["batch_size"], scores["repeats"]) == (2, 1)
    with pytest.raises(ValueError, match=r"eval.rows=6 must lie between 1 and 5"):
        evaluate.run(too_many)
    table = (evaluate.run(paper) / "table.md").read_text()
    assert "| paper | 120 | 0.174 | 1.433 |" in table
