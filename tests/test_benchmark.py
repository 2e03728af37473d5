"""The benchmark stage: it counts what the schedule says, interleaves, and divides exactly."""

import json
import math
from pathlib import Path

import hydra
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ssd_research import benchmark
from ssd_research.backbones.meter import Generation, Work
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.paths import conf_dir
from ssd_research.prompts import Prompt
from ssd_research.sampling import Sampling
from ssd_research.schedule import SpatialSchedule

PROMPTS = [Prompt("a", "a red circle"), Prompt("b", "two blue squares")]


def generation(seconds: float, *, nfe: int = 4, batch: int = 2, rounds=()) -> Generation:
    codes = torch.zeros(batch, 9, dtype=torch.long)
    return Generation(
        codes,
        [nfe] * batch,
        [9] * batch,
        {"prefill": 0.25, "total": seconds},
        list(rounds),
        Work(2, [4] * batch, [0] * batch, {}, [0] * batch),
        0,
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


def test_sides_are_interleaved_after_a_warm_up(random_backbone) -> None:
    calls = []

    class Recorder(benchmark.Bench):
        def decode(self, decoder, prompts):
            calls.append((decoder.title, prompts))
            return generation(1.0)

    bench = Recorder(random_backbone, {}, Sampling(3.0), seed=0)
    decoders = [Autoregressive(), SpatiallySpeculative(r=0), SpatiallySpeculative(r=1)]
    first, second = ([prompt] for prompt in PROMPTS)
    rows = benchmark.measure(bench, decoders, [first, second])
    titles = ["AR", "SSD r=0", "SSD r=1"]
    batches = [first, first, second]
    assert calls == [(title, batch) for batch in batches for title in titles]
    assert [row["decoder"] for row in rows] == titles
    assert [row["law"] for row in rows] == ["lossless", "lossy", "lossy"]


def test_steps_and_tokens_are_those_of_the_schedule(random_backbone, random_heads) -> None:
    decoders = [Autoregressive(), SpatiallySpeculative(r=0), SpatiallySpeculative(r=2)]
    heads = {decoder.title: random_heads for decoder in decoders}
    bench = benchmark.Bench(random_backbone, heads, Sampling(3.0), seed=0)
    ar, *ssd = benchmark.measure(bench, decoders, [PROMPTS])
    assert (ar["steps"], ar["acceptance_rate"]) == (36, None)
    for row, r in zip(ssd, (0, 2), strict=True):
        schedule = SpatialSchedule(6, 6, v=1, b=r)
        assert row["steps"] == schedule.nfe()
        assert row["tokens"] == sum(one.stop - one.start for one in schedule.passes())
        assert row["step_acceleration"] == 36 / schedule.nfe()
        assert row["batch_size"] == 2


def test_quality_is_that_of_the_parser_and_of_ar(tmp_path, random_backbone, monkeypatch) -> None:
    """A random model paints nothing, but the NLL of AR's own samples is its entropy."""
    monkeypatch.setattr(benchmark, "load_backbone", lambda cfg: random_backbone)
    cfg = configured(
        tmp_path,
        "prompts=[a red circle]",
        "benchmark.decoders=[ar]",
        "benchmark.batch_sizes=[1]",
        "benchmark.repeats=1",
        "benchmark.quality_prompts=1",
    )
    folder = benchmark.run(cfg)
    (row,) = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert row["quality_images"] == 7
    assert row["geneval"] == 0
    assert 0 <= row["accuracy"] <= 1
    assert 0 < row["nll"] < math.log(random_backbone.codebook_size)
    assert "Dense captions" in (folder / "benchmark.md").read_text()


def test_the_stage_writes_lines_and_a_table_and_is_reused(
    tmp_path, random_backbone, random_heads, monkeypatch
) -> None:
    monkeypatch.setattr(benchmark, "load_backbone", lambda cfg: random_backbone)
    monkeypatch.setattr(benchmark, "load_heads", lambda cfg, backbone, **reach: random_heads)
    cfg = configured(
        tmp_path,
        "prompts=[a red circle]",
        "benchmark.batch_sizes=[1,2]",
        "benchmark.decoders=[ar,'ssd r=0']",
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
        ({"decoders": []}, "decoders"),
        ({"repeats": 0}, "repeats"),
    ],
)
def test_settings_that_measure_nothing_are_named(override: dict, message: str) -> None:
    settings = {"batch_sizes": [1], "decoders": ["ar"], "repeats": 1, **override}
    with pytest.raises(ValueError, match=f"benchmark.{message}="):
        benchmark.check(OmegaConf.create(settings))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic", "magic is not known; accepted: ar, "),
        ("ssd q=1", "ssd has no option q=1; it accepts .*accept"),
    ],
)
def test_an_unknown_decoder_or_option_is_named(tmp_path, text, message) -> None:
    with pytest.raises(ValueError, match=f"benchmark.decoders: {message}"):
        benchmark.configured(configured(tmp_path), text)


def test_a_decoder_of_the_list_has_its_options_and_the_models_own(tmp_path) -> None:
    cfg = configured(tmp_path, "model=lumina_mgpt", "decoder=ar")
    plain = hydra.utils.instantiate(benchmark.configured(cfg, "ssd").decoder, _convert_="all")
    assert plain.budget == {"v": 2, "b": 5, "i": 4}
    chosen = benchmark.configured(cfg, "ssd r=3 accept=sample").decoder
    made = hydra.utils.instantiate(chosen, _convert_="all")
    assert made.title == "SSD r=3, accept=sample"
