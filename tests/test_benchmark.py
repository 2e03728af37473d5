"""The benchmark stage: it counts what the schedule says, interleaves, and divides exactly."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ssd_research import benchmark
from ssd_research.backbones.state import Generation
from ssd_research.paths import conf_dir
from ssd_research.prompts import Prompt
from ssd_research.sampling import Sampling
from ssd_research.schedule import SpatialSchedule

PROMPTS = [Prompt("a", "a red circle"), Prompt("b", "two blue squares")]


def generation(seconds: float, *, nfe: int = 4, batch: int = 2, rounds=()) -> Generation:
    codes = torch.zeros(batch, 9, dtype=torch.long)
    return Generation(
        codes, [nfe] * batch, [9] * batch, {"prefill": 0.25, "total": seconds}, list(rounds), 0
    )


def configured(folder: Path, *overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base=None):
        return compose("config", overrides=[f"output_dir={folder}", *overrides])


def test_summary_takes_the_median_and_every_round_of_the_later_rows() -> None:
    rounds = [
        {"stage": "horizontal", "round": 1, "drafted": [2, 2], "accepted": [0, 0]},
        {"stage": "base", "round": 1, "drafted": [10, 10], "accepted": [5, 3]},
        {"stage": "incremental", "round": 2, "drafted": [10, 10], "accepted": [9, 7]},
    ]
    row = benchmark.summary([generation(s, rounds=rounds) for s in (9.0, 1.0, 2.0)])
    assert row["seconds_per_image"] == 1.0  # median 2 s for a batch of two
    assert row["acceptance_rate"] == 24 / 40
    assert row["seconds_per_phase"] == {"prefill": 0.25}
    assert row["peak_memory_gb"] is None


def test_ratios_are_of_steps_and_of_seconds() -> None:
    ar, ssd = ({"steps": 36, "seconds_per_image": 3.0}, {"steps": 9, "seconds_per_image": 2.0})
    row = benchmark.compared(ssd, ar)
    assert (row["step_acceleration"], row["speedup"]) == (4.0, 1.5)


def test_sides_are_interleaved_after_a_warm_up(random_backbone, random_heads) -> None:
    calls = []

    class Recorder(benchmark.Bench):
        def decode(self, decoder, prompts):
            calls.append(getattr(decoder, "r", None))
            return generation(1.0)

    bench = Recorder(random_backbone, random_heads, Sampling(3.0), seed=0)
    rows = benchmark.measure(bench, PROMPTS, rounds=[0, 1], repeats=2)
    assert calls == [None, 0, 1] * 3
    assert [row["decoder"] for row in rows] == ["AR", "SSD r=0", "SSD r=1"]


def test_steps_and_tokens_are_those_of_the_schedule(random_backbone, random_heads) -> None:
    bench = benchmark.Bench(random_backbone, random_heads, Sampling(3.0), seed=0)
    ar, *ssd = benchmark.measure(bench, PROMPTS, rounds=[0, 2], repeats=1)
    assert (ar["steps"], ar["acceptance_rate"]) == (36, None)
    for row, r in zip(ssd, (0, 2), strict=True):
        schedule = SpatialSchedule(6, 6, v=1, b=r)
        assert row["steps"] == schedule.nfe()
        assert row["tokens"] == sum(one.stop - one.start for one in schedule.passes())
        assert row["step_acceleration"] == 36 / schedule.nfe()
        assert row["batch_size"] == 2


def test_the_stage_writes_lines_and_a_table_and_is_reused(
    tmp_path, random_backbone, random_heads, monkeypatch
) -> None:
    monkeypatch.setattr(benchmark, "load_backbone", lambda cfg: random_backbone)
    monkeypatch.setattr(benchmark, "load_heads", lambda cfg, backbone: random_heads)
    cfg = configured(
        tmp_path,
        "prompts=[a red circle]",
        "benchmark.batch_sizes=[1,2]",
        "benchmark.rounds=[0]",
        "benchmark.repeats=1",
    )
    folder = benchmark.run(cfg)
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [(row["decoder"], row["batch_size"]) for row in rows] == [
        ("AR", 1),
        ("SSD r=0", 1),
        ("AR", 2),
        ("SSD r=0", 2),
    ]
    text = (folder / "benchmark.md").read_text()
    assert "Step acceleration" in text
    assert rows[0]["device"] in text
    assert (folder / "DONE").exists()
    monkeypatch.setattr(benchmark, "measure", None)
    assert benchmark.run(cfg) == folder


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"batch_sizes": []}, "batch_sizes"),
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"rounds": [-1]}, "rounds"),
        ({"repeats": 0}, "repeats"),
    ],
)
def test_settings_that_measure_nothing_are_named(override: dict, message: str) -> None:
    settings = {"batch_sizes": [1], "rounds": [0], "repeats": 1, **override}
    with pytest.raises(ValueError, match=f"benchmark.{message}="):
        benchmark.check(OmegaConf.create(settings))
