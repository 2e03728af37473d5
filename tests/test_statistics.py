"""Comparisons over seeds: the paper's Table 9, and every test against SciPy's own."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from scipy import stats

from ssd_research import evaluate, paper
from ssd_research.metrics.statistics import Difference, Summary, paired, welch
from ssd_research.paths import conf_dir

relaxed = settings(deadline=None, max_examples=50)  # machines under load are slow, not wrong
VALUES = st.lists(st.floats(-50, 50).map(lambda x: round(x, 3)), min_size=2, max_size=8)

# What meta.json of every run says of how it was made.
MADE = {"device": "cpu", "versions": {}, "git_sha": None, "started": "2026-11-30"}


def test_table_9_is_welchs_test_on_sample_deviations() -> None:
    ar, ssd = paper.table(9)
    # The printed means differ by 0.24; the text gives the unrounded difference, 0.25.
    a = Summary(ssd["clean_fid_mean"] + 0.25, ar["clean_fid_sd"], 5)
    found = welch(a, Summary(ssd["clean_fid_mean"], ssd["clean_fid_sd"], 5))
    assert round(found.t, 3) == 2.210
    assert round(found.df, 3) == 4.878
    assert round(found.p, 2) == 0.08
    assert [round(end, 2) for end in found.interval] == [-0.04, 0.54]


def test_table_9_does_not_show_equivalence_at_its_own_effect() -> None:
    found = welch(Summary(29.14, 0.08, 5), Summary(28.89, 0.24, 5))
    assert found.equivalence(0.25) == pytest.approx(0.5)
    assert found.equivalence(0.3) > 0.05
    assert found.equivalence(0.6) < 0.05


@relaxed
@given(VALUES, VALUES)
def test_welch_equals_scipys(a, b) -> None:
    one, other = Summary.of(a), Summary.of(b)
    if one.sd + other.sd < 1e-3:
        return
    found = welch(one, other)
    expected = stats.ttest_ind(a, b, equal_var=False)
    assert found.t == pytest.approx(expected.statistic, rel=1e-6, abs=1e-9)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    interval = expected.confidence_interval(0.95)
    assert found.interval == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-9)


def test_the_paired_test_equals_scipys_and_sees_what_welch_cannot() -> None:
    a, b = [29.0, 29.4, 28.7, 29.9, 29.2], [28.9, 29.25, 28.55, 29.8, 29.05]
    found, expected = paired(a, b), stats.ttest_rel(a, b)
    assert (found.t, found.p) == pytest.approx((expected.statistic, expected.pvalue))
    assert found.p < 0.001 < 0.5 < welch(Summary.of(a), Summary.of(b)).p


@relaxed
@given(st.floats(-1, 1), st.floats(0.05, 1), st.floats(0.1, 2), st.integers(3, 30))
def test_equivalence_is_the_ninety_percent_interval_within_the_margin(d, stderr, margin, df):
    found = Difference(d, stderr, float(df), confidence=0.9)
    low, high = found.interval
    if min(abs(low + margin), abs(high - margin)) > 1e-9:
        assert (found.equivalence(margin) < 0.05) == (-margin < low and high < margin)


def test_equivalence_against_two_one_sided_tests_of_scipy() -> None:
    a, b, margin = [1.0, 1.2, 0.9, 1.1], [1.05, 1.0, 1.15, 0.95], 0.3
    sides = [
        stats.ttest_ind([x + margin for x in a], b, equal_var=False, alternative="greater").pvalue,
        stats.ttest_ind([x - margin for x in a], b, equal_var=False, alternative="less").pvalue,
    ]
    assert welch(Summary.of(a), Summary.of(b)).equivalence(margin) == pytest.approx(max(sides))


def test_no_spread_at_all() -> None:
    same = Summary(1.0, 0.0, 3)
    assert (welch(same, same).t, welch(same, same).p) == (0.0, 1.0)
    found = welch(Summary(2.0, 0.0, 3), same)
    assert (found.t, found.p) == (math.inf, 0.0)
    assert (found.equivalence(2.0), found.equivalence(0.5)) == (0.0, 1.0)


def test_too_few_seeds_and_margins_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 seeds, not 1"):
        Summary.of([1.0])
    with pytest.raises(ValueError, match="the same seeds of both: 2 and 3"):
        paired([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"eval.margin=0 must be above 0"):
        welch(Summary(1, 1, 2), Summary(1, 1, 2)).equivalence(0)


# --- the evaluation over seeds ----------------------------------------------------------------


def composed(root: Path, *overrides: str):
    with initialize_config_dir(str(conf_dir()), version_base=None):
        return compose("config", [f"output_dir={root}", "runtime=cpu", *overrides])


@cache
def written(decoder: str) -> str:
    """Return the configuration that a run of a decoder leaves."""
    return OmegaConf.to_yaml(composed(Path("outputs"), f"decoder={decoder}"), resolve=True)


def write_run(root: Path, decoder: str, seed: int, score: float, **other: Any) -> None:
    """Write what a generate run and its FID evaluation leave."""
    made = root / "generate" / "tiny" / "default" / f"{decoder}{seed}"
    judged = root / "evaluate" / "tiny" / "default" / f"of-{decoder}{seed}"
    for folder in (made, judged):
        folder.mkdir(parents=True)
    (made / "config.yaml").write_text(written(decoder))
    identity = {"backbone": "b", "sampling": {}, "seed": seed, "prompts": "p"}
    identity |= {"images_per_prompt": 1, "decoder": {}}
    (made / "meta.json").write_text(json.dumps({"identity": identity, **MADE}))
    pq.write_table(pa.table({"nfe": [1], "codes": [[0]]}), made / "images.parquet")
    scores = {"benchmark": "coco_fid", "fid": score, "higher_is_better": False}
    scores |= {"judge": "j", "n_scored": 9, "images": str(made / "images"), **other}
    (judged / "scores.json").write_text(json.dumps(scores))
    (judged / "meta.json").write_text('{"started": "now"}')
    for folder in (made, judged):
        (folder / "DONE").write_text("")


AR, SSD = [29.0, 29.2, 29.1, 29.15], [28.8, 29.1, 28.7, 29.0]


@pytest.fixture
def seeds(tmp_path) -> Path:
    for seed, (ar, ssd) in enumerate(zip(AR, SSD, strict=True)):
        write_run(tmp_path, "ar", seed, ar)
        write_run(tmp_path, "ssd", seed, ssd)
    return tmp_path


def test_seeds_are_found_and_compared(seeds) -> None:
    folder = evaluate.run(composed(seeds, "eval=compare_seeds", "eval.margin=0.5"))
    scores = json.loads((folder / "scores.json").read_text())
    ar, ssd = scores["methods"]
    assert (ar["decoder"], ar["values"], ar["n"]) == ("AR", AR, 4)
    assert ssd["sd"] == pytest.approx(Summary.of(SSD).sd)
    expected = welch(Summary.of(AR), Summary.of(SSD))
    assert ssd["difference"] == pytest.approx(expected.difference)  # lower is better
    assert ssd["difference_ci"] == pytest.approx(list(expected.interval))
    assert ssd["welch_p"] == pytest.approx(expected.p)
    assert ssd["paired_p"] == pytest.approx(paired(AR, SSD).p)
    assert ssd["equivalence_p"] == pytest.approx(expected.equivalence(0.5))
    assert (scores["of"], scores["n_scored"], scores["missing"]) == ("coco_fid", 8, [])
    assert "+0.213" in (folder / "table.md").read_text()
    assert evaluate.run(composed(seeds, "eval=compare_seeds", "eval.margin=0.5")) == folder


def test_without_margin_or_shared_seeds_there_are_fewer_tests(seeds) -> None:
    write_run(seeds, "ar", 9, 29.3)
    folder = evaluate.run(composed(seeds, "eval=compare_seeds"))
    row = json.loads((folder / "scores.json").read_text())["methods"][1]
    assert "welch_p" in row
    assert "paired_p" not in row
    assert row["equivalence_p"] is None


def test_what_cannot_be_compared_over_seeds(seeds) -> None:
    ask = ("eval=compare_seeds",)
    with pytest.raises(ValueError, match=r"measure=overall is no finite number .*; there are: fid"):
        evaluate.run(composed(seeds, *ask, "eval.measure=overall"))
    with pytest.raises(ValueError, match="has scores of shapes_fid; first run"):
        evaluate.run(composed(seeds, *ask, "eval.benchmark=shapes_fid"))
    with pytest.raises(ValueError, match=r"eval.confidence=95 must lie between"):
        evaluate.run(composed(seeds, *ask, "eval.confidence=95"))
    with pytest.raises(ValueError, match=r"evaluate.images does nothing with eval=compare_seeds"):
        evaluate.run(composed(seeds, *ask, "evaluate.images=x"))
    for odd in ("x", "null", "nan", "true", "0"):
        with pytest.raises(ValueError, match=r"eval.confidence=.* must lie between"):
            evaluate.run(composed(seeds, *ask, f"eval.confidence={odd}"))
    for odd in ("x", "nan", "inf", "true", "0", "-1"):
        with pytest.raises(ValueError, match=r"eval.margin=.* must be a number above 0, or null"):
            evaluate.run(composed(seeds, *ask, f"eval.margin={odd}"))
    write_run(seeds, "mtp", 0, 30.0)
    with pytest.raises(ValueError, match="MTP has 1 seed"):
        evaluate.run(composed(seeds, *ask))
    write_run(seeds, "mtp", 1, 30.0, n_scored=8)
    with pytest.raises(ValueError, match="that differ in n_scored cannot be compared: 8 and 9"):
        evaluate.run(composed(seeds, *ask))


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_one_line(seeds, score) -> None:
    write_run(seeds, "ar", 9, score)
    with pytest.raises(ValueError, match=r"fid is no finite number in the scores of .*/ar9/images"):
        evaluate.run(composed(seeds, "eval=compare_seeds"))


def test_scores_over_other_images_are_not_compared(seeds) -> None:
    write_run(seeds, "mtp", 0, 30.0, missing=["p1"])
    with pytest.raises(ValueError, match="differ in missing cannot be compared"):
        evaluate.run(composed(seeds, "eval=compare_seeds"))


def test_a_run_without_a_score_is_not_left_out_silently(seeds) -> None:
    (seeds / "evaluate" / "tiny" / "default" / "of-ssd3" / "DONE").unlink()
    with pytest.raises(ValueError, match="1 runs have no scores of coco_fid, the first ssd3; eval"):
        evaluate.run(composed(seeds, "eval=compare_seeds"))
    folder = evaluate.run(composed(seeds, "eval=compare_seeds", "evaluate.allow_missing=true"))
    scores = json.loads((folder / "scores.json").read_text())
    assert (scores["n_expected"], scores["n_scored"], scores["missing"]) == (8, 7, ["ssd3"])
    meta = seeds / "generate" / "tiny" / "default" / "ssd3" / "meta.json"
    meta.write_text(meta.read_text().replace('"prompts": "p"', '"prompts": "others"'))
    scores = json.loads(
        (evaluate.run(composed(seeds, "eval=compare_seeds")) / "scores.json").read_text()
    )
    assert (scores["n_expected"], scores["missing"]) == (7, [])
