"""The preference study: its numbers, its page driven in a real browser, and what is refused."""

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from PIL import Image, PngImagePlugin
from scipy import stats

import chromium
from ssd_research import paper, study
from ssd_research.metrics import preference
from ssd_research.metrics.preference import Vote
from ssd_research.paths import conf_dir
from ssd_research.reporting import study_page
from ssd_research.reporting.cells import read_cell

DATA = Path(__file__).parents[2] / "shared" / "data"
PROMPTS = [f"{number} <b>red</b> circles & a 'cross'" for number in range(6)]
TABLE_10 = (23, 24, 26, 27, 29, 30, 33)  # of 50 pairs each: 192 of 350, sd 7.0
needs_browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="chromium is not installed")

# What meta.json of every run says of how it was made.
MADE = {"device": "cpu", "versions": {}, "git_sha": None, "started": "2026-11-30"}


@cache
def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base=None):
        return compose("config", overrides=["name=fake", "runtime=cpu", *overrides])


def configured(folder: Path, *overrides: str, **options) -> DictConfig:
    cfg = composed(*overrides).copy()
    cfg.output_dir = str(folder)
    cfg.study.update(options)
    return cfg


def picture(method: int, index: int) -> np.ndarray:
    """Return noise with the prompt's grey and, in one channel, the method."""
    noise = np.random.default_rng([method, index]).integers(0, 40, (48, 48, 3), np.uint8)
    noise[..., 0] = 200 * method
    return noise + np.uint8(20)


def generate(
    folder: Path,
    run: str,
    *overrides: str,
    method: int = 0,
    seed: int = 0,
    prompts: str = "def",
    draw: Callable[[int, int], np.ndarray] = picture,
) -> Path:
    """Write a finished generate run of one image per prompt."""
    cfg = configured(folder, f"seed={seed}", *overrides)
    place = folder / "generate" / cfg.model.name / "fake" / run
    rows = []
    for n, prompt in enumerate(PROMPTS):
        path = f"{n:05d}/samples/0000.png"
        row = {"prompt_id": f"p{n}", "prompt": prompt, "prompt_index": n, "image_index": 0}
        rows.append({**row, "path": path, "batch_size": 1, "nfe": 1, "rounds": "[]", "codes": [0]})
        (place / "images" / path).parent.mkdir(parents=True)
        text = PngImagePlugin.PngInfo()
        text.add_text("decoder", run)
        Image.fromarray(draw(method, n)).save(place / "images" / path, pnginfo=text)
    pq.write_table(pa.Table.from_pylist(rows), place / "images.parquet")
    (place / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    identity = {"seed": seed, "prompts": prompts, "images_per_prompt": 1}
    (place / "meta.json").write_text(json.dumps({"identity": identity, **MADE}))
    (place / "DONE").touch()
    return place


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an output folder with a finished AR run, one of SSD, and a study of both."""
    folder = tmp_path_factory.mktemp("made")
    a = generate(folder, "aaa", "decoder=ar")
    b = generate(folder, "bbb", "decoder=ssd", "decoder.r=2", method=1)
    study.run(configured(folder, action="build", a=str(a), b=str(b)))
    return folder


@pytest.fixture
def runs(tmp_path: Path, made: Path) -> dict[str, str]:
    """Return the two runs as study.a and study.b."""
    shutil.copytree(made / "generate", tmp_path / "generate")
    place = tmp_path / "generate" / "tiny" / "fake"
    return {"a": str(place / "aaa"), "b": str(place / "bbb")}


@pytest.fixture
def built(tmp_path: Path, made: Path) -> Path:
    """Return the folder of the study."""
    shutil.copytree(made / "study", tmp_path / "study")
    return next((tmp_path / "study" / "tiny" / "fake").iterdir())


def key_of(built: Path) -> dict:
    return json.loads((built / "key.json").read_text())


def answered(
    built: Path, evaluator: str, *, wins: int, left: int = 3, of: int | None = None
) -> Path:
    """Write the answers of one who prefers a in the first `wins` pairs and chooses left `left`."""
    key = key_of(built)
    answers = []
    for n, (pair, names) in enumerate(list(key["pairs"].items())[:of]):
        winner, loser = (names["a"], names["b"]) if n < wins else (names["b"], names["a"])
        sides = (winner, loser) if n < left else (loser, winner)
        answer = {"pair": pair, "left": sides[0], "right": sides[1], "seconds": 1.5}
        answers.append({**answer, "choice": "left" if n < left else "right"})
    content = {"format": "blind-study-responses 1", "study": key["study"]}
    path = built / "responses" / f"responses-{evaluator}.json"
    path.write_text(json.dumps({**content, "evaluator": evaluator, "answers": answers}))
    return path


def changed(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# The statistics


def votes(wins: tuple[int, ...], *, of: int) -> list[Vote]:
    """Return evaluators' votes; a stands left in every other pair."""
    return [
        Vote(f"e{k}", f"pair{n}", f"prompt{n}", n < won, n % 2 == 0, 1.0)
        for k, won in enumerate(wins)
        for n in range(of)
    ]


def test_table_10_is_192_to_158() -> None:
    found = preference.aggregate(votes(TABLE_10, of=50), samples=2000, seed=0)
    printed = {str(row["method"]): row["win_rate_percent_mean"] for row in paper.table(10)}
    assert 100 * found["win_rate"]["a"] == pytest.approx(printed["ar"], abs=0.05)
    assert 100 * found["win_rate"]["b"] == pytest.approx(printed["ssd"], abs=0.05)
    assert 100 * found["sd"] == pytest.approx(7.0, abs=0.05)
    assert (found["answers"]["hits"], found["answers"]["total"]) == (192, 350)
    assert found["answers"]["p"] == pytest.approx(0.078, abs=0.0005)
    assert found["t_test"]["df"] == 6


def test_the_t_test_of_table_10_as_printed() -> None:
    found = preference.from_summary(0.549, 0.070, n=7)
    assert [round(100 * end, 1) for end in found.ci95] == [48.4, 61.4]
    assert round(found.p, 2) == 0.11


def test_estimates_equal_scipy_on_the_rates() -> None:
    rates = [won / 50 for won in TABLE_10]
    found, scipys = preference.over_evaluators(rates), stats.ttest_1samp(rates, 0.5)
    assert (found.t, found.p) == pytest.approx((scipys.statistic, scipys.pvalue))
    assert found.ci95 == pytest.approx(tuple(scipys.confidence_interval(0.95)))


def test_one_evaluator_has_no_spread_and_no_test() -> None:
    found = preference.aggregate(votes((3,), of=4), samples=10, seed=0)
    assert (found["sd"], found["ci95"], found["t_test"]["p"]) == (None, None, None)
    assert found["win_rate"] == {"a": 0.75, "b": 0.25}


def test_equal_evaluators_have_no_test() -> None:
    found = preference.aggregate(votes((3, 3), of=4), samples=10, seed=0)
    assert (found["sd"], found["ci95"], found["t_test"]["p"]) == (0, None, None)


def test_the_bias_to_a_side_is_separate_from_the_preference() -> None:
    always_left = [
        Vote("e", f"pair{n}", f"prompt{n}", n % 2 == 0, n % 2 == 0, 1.0) for n in range(20)
    ]
    found = preference.aggregate(always_left, samples=10, seed=0)
    assert (found["left"]["share"], found["win_rate"]["a"]) == (1.0, 0.5)
    assert found["left"]["p"] < 1e-5
    assert found["answers"]["p"] == 1.0


def test_prompts_are_redrawn_whole() -> None:
    """Ten evaluators who agree on every prompt are worth no more than one."""
    one = preference.bootstrap_prompts(votes((12,), of=20), samples=4000, seed=0)
    ten = preference.bootstrap_prompts(votes((12,) * 10, of=20), samples=4000, seed=0)
    assert ten == one
    assert one == pytest.approx((0.6 - 0.215, 0.6 + 0.215), abs=0.04)


def test_one_prompt_cannot_be_redrawn() -> None:
    assert preference.bootstrap_prompts(votes((1, 0), of=1), samples=10, seed=0) is None


needs_data = pytest.mark.skipif(not DATA.exists(), reason="the evaluation data is not beside us")


def rows_of(*parts: str) -> list[dict[str, str]]:
    with DATA.joinpath(*parts).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def check_by_hand(found: dict, ballots: list[Vote]) -> None:
    """Compare with the same numbers by matrix and scipy's own tests."""
    who, prompt, won = (
        np.array([getattr(vote, field) for vote in ballots])
        for field in ("evaluator", "prompt", "prefers_a")
    )
    rates = np.array([won[who == one].mean() for one in np.unique(who)])
    test = stats.ttest_1samp(rates, 0.5)
    assert found["evaluators"] == len(rates) == 5
    assert found["win_rate"]["a"] == pytest.approx(rates.mean())
    assert found["sd"] == pytest.approx(rates.std(ddof=1))
    assert found["ci95"] == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert (found["t_test"]["t"], found["t_test"]["p"]) == pytest.approx(tuple(test))
    hits, total = int(won.sum()), len(won)
    assert (found["answers"]["hits"], found["answers"]["total"]) == (hits, total)
    assert found["answers"]["p"] == pytest.approx(
        2 * min(stats.binom.cdf([hits, total - hits], total, 0.5))
    )
    residuals = [(won - won.mean())[prompt == one].sum() for one in np.unique(prompt)]
    half = 1.96 * np.linalg.norm(residuals) / total  # of a ratio, by the delta method
    expected = (hits / total - half, hits / total + half)
    assert found["prompts_ci95"] == pytest.approx(expected, abs=half / 8)


@needs_data
def test_real_ratings_of_tifa_as_votes() -> None:
    """Raters of two models' images of one prompt prefer the one they rated higher; no ties."""
    ratings: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for row in rows_of("dsg", "tifa160-likert-anns.csv"):
        ratings[row["worker_id"], row["item_id"]][row["t2i_model"]] = int(row["answer"])
    ballots = [
        Vote(who, item, item, given["sd2dot1"] > given["mini-dalle"], bool(n % 2), 1.0)
        for n, ((who, item), given) in enumerate(ratings.items())
        if len({given.get("sd2dot1"), given.get("mini-dalle"), None}) == 3
    ]
    found = preference.aggregate(ballots, samples=2000, seed=0)
    check_by_hand(found, ballots)
    assert (found["answers"]["hits"], found["answers"]["total"]) == (292, 438)


@needs_data
def test_real_annotations_of_geneval_as_votes() -> None:
    """The k-th raters of two models' images of one prompt prefer the better rated one."""
    quality: dict[str, dict[str, list[float]]] = {}
    for model in ("if-xl", "sdv2"):
        quality[model] = defaultdict(list)
        for row in rows_of("geneval", "annotations", f"annotations_{model}.csv"):
            quality[model][row["Input.index"]].append(float(row["Answer.task-quality"] or "nan"))
    ballots = [
        Vote(f"rater {k}", image, image.partition("_")[0], one > two, bool(k % 2), 1.0)
        for image in sorted(set(quality["if-xl"]) & set(quality["sdv2"]))
        for k, (one, two) in enumerate(
            zip(quality["if-xl"][image], quality["sdv2"][image], strict=False)
        )
        if one > two or two > one
    ]
    found = preference.aggregate(ballots, samples=2000, seed=0)
    check_by_hand(found, ballots)
    assert (found["answers"]["hits"], found["answers"]["total"]) == (661, 1041)


def test_no_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one answer"):
        preference.aggregate([], samples=10, seed=0)


# Building


def test_a_study_is_a_page_and_a_key_beside_it(built: Path) -> None:
    assert sorted(path.name for path in built.iterdir()) == [
        "DONE",
        "config.yaml",
        "key.json",
        "meta.json",
        "page",
        "responses",
    ]
    assert sorted(path.name for path in (built / "page").iterdir()) == ["images", "index.html"]
    key = key_of(built)
    assert [key["methods"][side]["label"] for side in "ab"] == ["AR", "SSD r=2"]
    assert len(key["pairs"]) == len(PROMPTS)


def test_the_key_knows_whose_picture_is_whose(built: Path) -> None:
    for pair in key_of(built)["pairs"].values():
        for method, side in enumerate("ab"):
            file = built / "page" / "images" / f"{pair[side]}.png"
            index = PROMPTS.index(pair["prompt"])
            assert np.array_equal(np.asarray(Image.open(file)), picture(method, index))


def test_the_page_does_not_tell_the_methods_apart(built: Path) -> None:
    page, key = built / "page", key_of(built)
    html = (page / "index.html").read_text()
    for word in ("AR", "SSD", "r=2", "aaa", "bbb", "generate", "decoder", "key.json"):
        assert not re.search(rf"\b{re.escape(word)}\b", html, re.IGNORECASE), word
    content = json.loads(re.search(r'application/json">(.*?)</script>', html, re.DOTALL)[1])
    first = [key["pairs"][pair["pair"]]["a"] == pair["images"][0] for pair in content["pairs"]]
    assert sum(first) == len(first) / 2
    for file in (page / "images").iterdir():
        assert Image.open(file).info == {}
        assert re.fullmatch(r"[0-9a-f]{16}\.png", file.name)
    written = sorted((page / "images").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    assert all(one.name < two.name for one, two in pairwise(written))


def test_the_page_needs_no_other_file(built: Path) -> None:
    html = (built / "page" / "index.html").read_text()
    assert "http" not in html
    assert "src=" not in html
    assert "href=" not in html


def test_markup_in_prompts_and_title_is_text(tmp_path: Path, runs: dict[str, str]) -> None:
    folder = study.run(configured(tmp_path, action="build", title="<i>Which?</i>", **runs))
    html = (folder / "page" / "index.html").read_text()
    assert "&lt;i&gt;Which?&lt;/i&gt;" in html
    assert "<b>red" not in html


def test_the_seed_chooses_the_pairs(runs: dict[str, str]) -> None:
    cells = [read_cell(Path(runs[side])) for side in "ab"]

    def chosen(seed: int) -> list[str]:
        return [p.prompt_id for p in study_page.choose_pairs(*cells, count=3, seed=seed)[0]]

    draws = [chosen(seed) for seed in range(4)]
    assert chosen(0) == draws[0]
    assert all(len(set(draw)) == 3 for draw in draws)
    assert len({tuple(sorted(draw)) for draw in draws}) > 1


def test_a_study_is_built_once(tmp_path: Path, runs: dict[str, str]) -> None:
    cfg = configured(tmp_path, action="build", **runs)
    folder = study.run(cfg)
    before = (folder / "page" / "index.html").stat().st_mtime_ns
    assert study.run(cfg) == folder
    (folder / "DONE").unlink()  # killed before its last line: a page that is there is whole
    assert study.run(cfg) == folder
    assert (folder / "page" / "index.html").stat().st_mtime_ns == before


def test_a_lost_page_is_written_again_and_answers_stay(
    tmp_path: Path, built: Path, runs: dict[str, str]
) -> None:
    ann = answered(built, "ann", wins=3)
    kept = {name: (built / name).read_bytes() for name in ("key.json", "page/index.html")}
    shutil.rmtree(built / "page")
    assert study.run(configured(tmp_path, action="build", **runs)).name == built.name
    key = json.loads(kept["key.json"]) | {"methods": key_of(built)["methods"]}
    assert key == key_of(built)
    assert (built / "page" / "index.html").read_bytes() == kept["page/index.html"]
    assert ann.exists()
    assert len(list((built / "page" / "images").iterdir())) == 2 * len(PROMPTS)


def test_a_killed_build_leaves_no_page_and_is_built_again(
    tmp_path: Path, runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = configured(tmp_path, action="build", **runs)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            study.run(cfg)
    assert not list(tmp_path.glob("study/**/page"))
    folder = study.run(cfg)
    assert len(list((folder / "page" / "images").iterdir())) == 2 * len(PROMPTS)
    assert not list(folder.glob(".*"))


def test_pairs_of_equal_pictures_are_passed_over(tmp_path: Path, runs: dict[str, str]) -> None:
    twin = generate(
        tmp_path, "twin", "decoder=ssd", draw=lambda _, index: picture(int(index > 1), index)
    )
    cfg = configured(tmp_path, action="build", a=runs["a"], b=str(twin))
    folder = study.run(cfg)
    assert sorted(p["prompt_id"] for p in key_of(folder)["pairs"].values()) == [
        f"p{n}" for n in (2, 3, 4, 5)
    ]
    assert json.loads((folder / "meta.json").read_text())["equal_pairs_passed_over"] == 2
    with pytest.raises(ValueError, match=r"study\.pairs=5 .* have 4 that differ"):
        study.run(configured(tmp_path, action="build", a=runs["a"], b=str(twin), pairs=5))


def test_two_runs_of_one_method_are_told_apart(tmp_path: Path) -> None:
    runs = [generate(tmp_path, name, method=n) for n, name in enumerate(("aaa", "bbb"))]
    folder = study.run(configured(tmp_path, action="build", a=str(runs[0]), b=str(runs[1])))
    assert labels_of(folder) == ["AR (aaa)", "AR (bbb)"]


def labels_of(folder: Path) -> list[str]:
    return [method["label"] for method in key_of(folder)["methods"].values()]


def test_two_models_are_told_apart(tmp_path: Path) -> None:
    a = generate(tmp_path, "aaa", "model=janus_pro", "decoder=ar")
    b = generate(tmp_path, "bbb", "model=janus_pro_1b", "decoder=ar", method=1)
    folder = study.run(configured(tmp_path, action="build", a=str(a), b=str(b)))
    assert labels_of(folder) == ["janus_pro AR", "janus_pro_1b AR"]
    assert key_of(folder)["model"] == "janus_pro and janus_pro_1b"


@pytest.mark.parametrize("count", [1, 2, 9, 10, 27, 50])
def test_each_method_comes_first_in_half_of_every_group(runs: dict[str, str], count: int) -> None:
    cells = [read_cell(Path(runs[side])) for side in "ab"]
    (one,), _ = study_page.choose_pairs(*cells, count=1, seed=0)
    pairs = [replace(one, id=f"{n:04d}", names=(f"a{n}", f"b{n}")) for n in range(count)]
    listed = study_page.sides(pairs[::-1], secret="x")
    assert list(listed) == sorted(listed)
    assert all(sorted(names) == [f"a{int(n)}", f"b{int(n)}"] for n, names in listed.items())
    first = [names[0][0] == "a" for names in listed.values()]
    groups = [first[start : start + 10] for start in range(0, count, 10)]
    assert [sum(group) for group in groups] == [len(group) // 2 for group in groups]
    if count == 50:
        assert len(set(map(tuple, groups))) > 1
        assert listed != study_page.sides(pairs, secret="y")


REFUSED = {
    "no run": ({"b": None}, "study.b is null; a study needs two finished generate runs"),
    "the same run": ({"b": "aaa"}, "are the same run"),
    "nowhere": ({"b": "nowhere"}, "study.b=.*nowhere is not a finished generate run"),
    "other seed": ({"b": "seed"}, "differ in their seed"),
    "other prompts": ({"b": "prompts"}, "differ in their prompts"),
    "other size": ({"b": "size"}, "differ in size"),
    "no pairs": ({"pairs": 0}, "study.pairs=0 must be a whole number of at least 1"),
    "too many pairs": ({"pairs": 7}, "study.pairs=7 is needed, but the runs have 6"),
    "other action": ({"action": "publish"}, "study.action=publish is not known"),
    "no action": ({"action": None}, "study.action=null is not known"),
    "no title": ({"title": " "}, "study.title is empty; it is the headline"),
    "a key": ({"key": "key.json"}, "study.key does nothing in study build"),
    "responses": ({"responses": "here"}, "study.responses does nothing in study build"),
    "analysed pairs": (
        {"action": "analyse", "a": None, "b": None, "pairs": 3},
        "study.pairs does nothing in study analyse",
    ),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_study_is_refused(
    tmp_path: Path, runs: dict[str, str], options: dict, words: str
) -> None:
    generate(tmp_path, "seed", method=1, seed=1)
    generate(tmp_path, "prompts", method=1, prompts="other")
    generate(tmp_path, "size", draw=lambda *_: np.zeros((24, 24, 3), np.uint8))
    if options.get("b"):
        options = {"b": str(Path(runs["a"]).with_name(options["b"]))}
    with pytest.raises(ValueError, match=words):
        study.run(configured(tmp_path, **{"action": "build", **runs, **options}))
    assert not list(tmp_path.glob("study/**/page"))


def test_missing_and_damaged_pictures_are_named(tmp_path: Path, runs: dict[str, str]) -> None:
    file = Path(runs["b"]) / "images" / "00003" / "samples" / "0000.png"
    file.write_bytes(file.read_bytes()[:200])
    cfg = configured(tmp_path, action="build", **runs)
    with pytest.raises(ValueError, match=r"00003/samples/0000\.png is no whole image"):
        study.run(cfg)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"00003/samples/0000\.png is missing"):
        study.run(cfg)


def test_an_unfinished_run_is_refused(tmp_path: Path, runs: dict[str, str]) -> None:
    (Path(runs["a"]) / "DONE").unlink()
    with pytest.raises(ValueError, match="is not a finished generate run"):
        study.run(configured(tmp_path, action="build", **runs))


def test_large_pictures_are_not_enlarged(tmp_path: Path, runs: dict[str, str]) -> None:
    pairs, _ = study_page.choose_pairs(
        *(read_cell(Path(runs[side])) for side in "ab"), count=1, seed=0
    )
    shown = {"secret": "x", "title": "t", "seed": 0}
    small = study_page.to_html("s", pairs, **shown)
    large = study_page.to_html("s", [replace(pairs[0], size=(768, 512))], **shown)
    assert "--width: 384px; --ratio: 48 / 48; --rendering: pixelated" in small
    assert "--width: 768px; --ratio: 768 / 512; --rendering: auto" in large


# Analysing


def scores_of(folder: Path) -> dict:
    return json.loads((folder / "scores.json").read_text())


def test_answers_become_the_paper_s_table(tmp_path: Path, built: Path) -> None:
    answered(built, "ann", wins=4)
    answered(built, "bob", wins=2, left=6)
    folder = study.run(configured(tmp_path, action="analyse"))
    found = scores_of(folder)
    assert found["win_rate"] == {"a": 0.5, "b": 0.5}
    assert found["sd"] == pytest.approx(np.std([4 / 6, 2 / 6], ddof=1))
    assert (found["answers"]["hits"], found["left"]["hits"]) == (6, 9)
    assert (found["n_expected"], found["n_scored"], found["coverage"]) == (12, 12, 1.0)
    assert (found["missing"], found["complete_only"]) == ({}, None)
    assert found["methods"] == {"a": "AR", "b": "SSD r=2"}
    report = (folder / "report.md").read_text()
    assert "| AR | 50.0 ± 23.6 % | 6 of 12 |" in report
    assert "| ann | 6 of 6 | 66.7 | 50.0 | 1.5 |" in report
    assert "Note" not in report
    assert r"AR & 50.0 ± 23.6 \% & 6 of 12" in (folder / "table.tex").read_text()
    with (folder / "table.csv").open() as file:
        rows = {row["evaluator"]: row for row in csv.DictReader(file)}
    assert (rows["bob"]["wins_a"], rows["bob"]["left_share"]) == ("2", "1.0")
    assert len((folder / "votes.csv").read_text().splitlines()) == 13


def test_sides_do_not_matter_for_who_wins(tmp_path: Path, built: Path) -> None:
    for left in (0, 6):
        answered(built, "ann", wins=5, left=left)
        found = scores_of(study.run(configured(tmp_path, action="analyse")))
        assert (found["answers"]["hits"], found["left"]["hits"]) == (5, left)


def test_incomplete_evaluators_are_named_and_the_rest_counted_apart(
    tmp_path: Path, built: Path
) -> None:
    answered(built, "ann", wins=3)
    answered(built, "bob", wins=2, of=4)
    answered(built, "eve", wins=0, of=0)
    folder = study.run(configured(tmp_path, action="analyse"))
    found, report = scores_of(folder), (folder / "report.md").read_text()
    assert {who: len(pairs) for who, pairs in found["missing"].items()} == {"bob": 2, "eve": 6}
    assert (found["n_expected"], found["n_scored"], found["evaluators"]) == (18, 10, 2)
    assert found["complete_only"]["win_rate"]["a"] == 0.5
    assert "Incomplete: bob (2 pairs left), eve (6 pairs left)." in report
    assert "without them AR has 50.0" in report
    assert "| eve | 0 of 6 | – | – | – |" in report
    assert "2 human evaluators, 10 of 18 answers" in report


def test_no_answer_at_all_is_refused(tmp_path: Path, built: Path) -> None:
    with pytest.raises(ValueError, match="holds no responses"):
        study.run(configured(tmp_path, action="analyse"))
    answered(built, "eve", wins=0, of=0)
    with pytest.raises(ValueError, match="hold no answer"):
        study.run(configured(tmp_path, action="analyse"))
    assert not (tmp_path / "study_analysis").exists()


DEFECTS: dict[str, tuple[Callable[[dict], object], str]] = {
    "other study": (lambda c: c.update(study="xyz"), "answers study xyz, not"),
    "other format": (lambda c: c.update(format="x"), "holds no answers to a study"),
    "nobody": (lambda c: c.update(evaluator=""), "lacks its evaluator or answers"),
    "unknown pair": (lambda c: c["answers"][1].update(pair="zz"), "answer 2 is to pair zz, which"),
    "twice": (lambda c: c["answers"].append(c["answers"][0]), "is answered twice"),
    "other pictures": (lambda c: c["answers"][0].update(left="q"), "names other pictures"),
    "one picture": (
        lambda c: c["answers"][0].update(left=c["answers"][0]["right"]),
        "names other pictures",
    ),
    "no choice": (lambda c: c["answers"][0].update(choice="both"), "chooses both, not left or"),
    "no time": (lambda c: c["answers"][0].pop("seconds"), "does not say how many seconds"),
    **{
        f"{time!r} seconds": (
            lambda c, time=time: c["answers"][2].update(seconds=time),
            "answer 3 does not say how many seconds",
        )
        for time in (math.nan, math.inf, -1, True, "2", 10**400)
    },
    "no answer": (lambda c: c["answers"].append([]), "answer 7 is to pair None"),
}


@pytest.mark.parametrize(("change", "words"), DEFECTS.values(), ids=DEFECTS)
def test_a_defect_is_one_line_with_the_file(
    tmp_path: Path, built: Path, change: Callable[[dict], object], words: str
) -> None:
    answered(built, "ann", wins=3)
    changed(answered(built, "bob", wins=3), change)
    with pytest.raises(ValueError, match=words) as caught:
        study.run(configured(tmp_path, action="analyse"))
    assert str(caught.value).startswith("responses-bob.json")
    assert "\n" not in str(caught.value)


def test_every_defect_has_its_line(tmp_path: Path, built: Path) -> None:
    ann = answered(built, "ann", wins=3)
    ann.with_name("again.json").write_bytes(ann.read_bytes())
    ann.with_name("cut.json").write_bytes(ann.read_bytes()[:50])
    changed(answered(built, "bob", wins=3), lambda c: c.update(study="xyz"))
    with pytest.raises(ValueError, match=r"ann has answered in again\.json too") as caught:
        study.run(configured(tmp_path, action="analyse"))
    assert [line.split(" ")[0].strip(":") for line in str(caught.value).splitlines()] == [
        "cut.json",
        "responses-ann.json",
        "responses-bob.json",
    ]


def test_files_that_are_no_downloads_are_named(tmp_path: Path, built: Path) -> None:
    """What is passed over must not be an evaluator's answers under another name."""
    ann = answered(built, "ann", wins=3)
    (ann.parent / "superseded.json").mkdir()
    (ann.parent / ".DS_Store").touch()
    assert scores_of(study.run(configured(tmp_path, action="analyse")))["n_scored"] == 6
    ann.with_name("responses-bob.json.txt").write_bytes(ann.read_bytes())
    with pytest.raises(ValueError, match=r"responses-bob\.json\.txt does not end in \.json"):
        study.run(configured(tmp_path, action="analyse"))


@pytest.mark.parametrize("content", [b"", b"null", b"[" * 100_000, b"\xff\xfe{", b"{}"])
def test_a_file_of_something_else_is_one_line(tmp_path: Path, built: Path, content: bytes) -> None:
    answered(built, "ann", wins=3).with_name("x.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^x\.json (is no whole JSON|holds no answers).*$"):
        study.run(configured(tmp_path, action="analyse"))


def test_a_file_saved_by_an_editor_is_read(tmp_path: Path, built: Path) -> None:
    path = answered(built, "ann", wins=3)
    text = json.dumps(json.loads(path.read_text()), indent=2)
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert scores_of(study.run(configured(tmp_path, action="analyse")))["n_scored"] == 6


def test_seven_files_of_fifty_answers_are_table_10(tmp_path: Path, built: Path) -> None:
    pairs = {
        f"pair {n}": {"prompt_id": f"p{n}", "prompt": "", "a": f"a{n}", "b": f"b{n}"}
        for n in range(50)
    }
    changed(built / "key.json", lambda key: key.update(pairs=pairs, equal_pairs_passed_over=3))
    for n, wins in enumerate(TABLE_10):
        answered(built, f"e{n}", wins=wins, left=25)
    folder = study.run(configured(tmp_path, action="analyse"))
    report = (folder / "report.md").read_text()
    assert "| AR | 54.9 ± 7.0 % | 192 of 350 |" in report
    assert "| SSD r=2 | 45.1 ± 7.0 % | 158 of 350 |" in report
    assert "t interval [48.4, 61.3] %, t test against 50 %: p = .116 (df 6)" in report
    assert "binomial test p = .078" in report
    assert "3 pairs of equal pictures were passed over" in report


def test_files_and_key_can_be_named(tmp_path: Path, built: Path) -> None:
    ann, _ = answered(built, "ann", wins=3), answered(built, "bob", wins=6)
    options = {"action": "analyse", "key": str(built)}
    found = scores_of(study.run(configured(tmp_path, responses=str(ann), **options)))
    assert found["answers"]["total"] == 6
    both = [str(ann), str(built / "responses")]  # the same file twice is one file
    found = scores_of(study.run(configured(tmp_path, responses=both, **options)))
    assert found["answers"]["total"] == 12
    with pytest.raises(ValueError, match="gone does not exist"):
        study.run(configured(tmp_path, responses="gone", **options))
    with pytest.raises(ValueError, match=r"study\.key=gone does not exist"):
        study.run(configured(tmp_path, action="analyse", key="gone"))


def test_without_a_study_there_is_nothing_to_analyse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no study; build one first"):
        study.run(configured(tmp_path, action="analyse"))


def test_a_key_that_is_none_is_refused(tmp_path: Path, built: Path) -> None:
    answered(built, "ann", wins=3)
    whole = key_of(built)
    for pairs in ([], {"x": {}}, {"x": []}):
        (built / "key.json").write_text(json.dumps(whole | {"pairs": pairs}))
        with pytest.raises(ValueError, match=r"key\.json is no key of a study"):
            study.run(configured(tmp_path, action="analyse"))
    (built / "key.json").write_text("{}")
    with pytest.raises(ValueError, match=r"key\.json is no key of a study"):
        study.run(configured(tmp_path, action="analyse"))


def test_the_paper_s_backbone_is_shown_beside_the_paper(tmp_path: Path) -> None:
    overrides = "model=janus_pro", "decoder=ar"
    a = generate(tmp_path, "aaa", *overrides)
    b = generate(tmp_path, "bbb", "model=janus_pro", "decoder=ssd", method=1)
    options = {"a": str(a), "b": str(b)}
    built = study.run(configured(tmp_path, *overrides, action="build", **options))
    answered(built, "ann", wins=3)
    folder = study.run(configured(tmp_path, *overrides, action="analyse"))
    assert (
        "Table 10 (AR against SSD r=2, 7 evaluators): AR 54.9 ± 7.0 %; SSD 45.1 ± 7.0 %"
        in (folder / "report.md").read_text()
    )


# The command line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["build", "seed=1"], ["study.action=build", "seed=1"]),
        (["--cfg", "job"], ["--cfg", "job"]),
        (["study.action=analyse"], ["study.action=analyse"]),
        ([], []),
    ],
)
def test_the_first_word_is_the_action(
    monkeypatch: pytest.MonkeyPatch, words: list[str], expected: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["study.py", *words])
    monkeypatch.setattr(study, "stage_main", lambda *_: None)
    study.main()
    assert sys.argv[1:] == expected


@pytest.mark.slow
def test_both_commands(tmp_path: Path, runs: dict[str, str]) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        options = ["name=fake", f"output_dir={tmp_path}"]
        return subprocess.run(
            [sys.executable, "-m", "ssd_research.study", *words, *options],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    done = command("build", f"study.a={runs['a']}", f"study.b={runs['b']}", "study.pairs=4")
    assert done.returncode == 0, done.stderr
    built = next(tmp_path.glob("study/tiny/fake/*"))
    assert str(built / "page") in done.stdout
    answered(built, "ann", wins=3)
    done = command("analyse")
    assert done.returncode == 0, done.stderr
    assert "75.0 ± – %" in done.stdout
    done = command("publish")
    assert done.returncode == 2
    assert done.stderr.startswith("error: study.action=publish is not known; say python -m")


# The page in a browser


class Evaluator:
    """Somebody who prefers a for the prompts in `likes_a`, and remembers what was shown."""

    def __init__(self, browser: chromium.Browser, key: dict, *, likes_a: set[int]):
        self.browser, self.key, self.likes_a = browser, key, likes_a
        self.answers: list[tuple[str, str, str, bool]] = []  # prompt, left, right, chose left

    def shown(self) -> tuple[str, str, str]:
        """Return prompt, left and right picture, once both are there."""
        self.browser.wait("ready()")
        names = [
            self.browser.run(
                f"document.querySelector('#{side} img').src.match(/images.(.*).png/)[1]"
            )
            for side in ("left", "right")
        ]
        return self.browser.run("document.getElementById('prompt').textContent"), *names

    def answer(self, keys: tuple[str, str] = ("ArrowLeft", "ArrowRight")) -> None:
        prompt, left, right = self.shown()
        index = PROMPTS.index(prompt)
        pair = next(p for p in self.key["pairs"].values() if p["prompt"] == prompt)
        assert {left, right} == {pair["a"], pair["b"]}
        choice = left == pair["a" if index in self.likes_a else "b"]
        self.answers.append((prompt, left, right, choice))
        count = self.browser.run("answers.length")
        self.browser.press(keys[0] if choice else keys[1])
        self.browser.wait(f"answers.length === {count + 1}")


def downloaded(browser: chromium.Browser, file: Path) -> dict:
    browser.press("Enter")  # the button for it has the focus
    browser.wait("!document.querySelector('#saved span').hidden")
    deadline = time.monotonic() + chromium.PATIENCE
    while not file.exists():  # it has its name only once it is whole
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return json.loads(file.read_text())


def lefts_of_a(file: dict, key: dict) -> int:
    return sum(a["left"] == key["pairs"][a["pair"]]["a"] for a in file["answers"])


def visible(browser: chromium.Browser) -> list[str]:
    return browser.run("screens.filter((one) => one.offsetParent !== null).map((one) => one.id)")


def boxes(browser: chromium.Browser) -> list[dict]:
    script = "['left', 'right'].map((side) => pictures[side].getBoundingClientRect().toJSON())"
    return browser.run(script)


@needs_browser
def test_two_evaluators_answer_and_one_comes_back(tmp_path: Path, built: Path) -> None:
    page, key, files = built / "page" / "index.html", key_of(built), built / "responses"
    with chromium.Browser(tmp_path / "profile", files) as browser:
        browser.open(page)
        browser.screenshot(tmp_path / "start.png")
        assert visible(browser) == ["start"]
        browser.type("Ann Lee")
        browser.press("Enter")
        ann = Evaluator(browser, key, likes_a={0, 1, 2, 3})
        for _ in range(3):
            ann.answer()
        browser.press("Backspace")
        assert ann.shown() == ann.answers.pop()[:3]
        browser.screenshot(tmp_path / "trial.png")
        for box in boxes(browser):
            assert box["width"] == box["height"] == 384
            assert box["bottom"] < 800
        ann.answer(("1", "2"))
    with chromium.Browser(tmp_path / "profile", files) as browser:
        browser.open(page)
        assert browser.run("field.value") == "ann-lee"
        assert "3 of 6 answered" in browser.run("document.getElementById('found').innerText")
        browser.press("Enter")
        ann.browser = browser
        assert "Pair 4 of 6" in browser.run("document.querySelector('header').innerText")
        for _ in range(3):
            ann.answer()
        assert visible(browser) == ["end"]
        browser.screenshot(tmp_path / "end.png")
        file = downloaded(browser, files / "responses-ann-lee.json")
        assert file["complete"]
        assert [(a["left"], a["right"]) for a in file["answers"]] == [a[1:3] for a in ann.answers]
        assert all(a["seconds"] >= 0.3 for a in file["answers"])
        assert lefts_of_a(file, key) == 3

        browser.open(page)
        browser.run("field.value = ''")
        browser.type("bob")
        browser.press("Enter")
        bob = Evaluator(browser, key, likes_a={0, 5})
        bob.shown()
        browser.press("ArrowLeft", repeat=True)  # a key still held down is no answer
        assert browser.run("answers.length") == 0
        for _ in range(6):
            bob.answer()
        assert lefts_of_a(downloaded(browser, files / "responses-bob.json"), key) == 3
        there = ((built / "page").as_uri(), "blob:", "data:")
        assert len(browser.requests) >= 2 * len(PROMPTS)
        assert all(url.startswith(there) for url in browser.requests)
    orders = [[answer[0] for answer in one.answers] for one in (ann, bob)]
    assert sorted(orders[0]) == sorted(orders[1]) == PROMPTS
    assert orders[0] != orders[1]
    found = scores_of(study.run(configured(tmp_path, action="analyse")))
    assert found["win_rate"] == {"a": 0.5, "b": 0.5}
    assert found["sd"] == pytest.approx(np.std([4 / 6, 2 / 6], ddof=1))
    assert found["missing"] == {}
    assert found["left"]["hits"] == sum(answer[3] for answer in ann.answers + bob.answers)


@needs_browser
def test_a_narrow_window_turns_back_to_the_prompt(tmp_path: Path, built: Path) -> None:
    with chromium.Browser(tmp_path / "profile", tmp_path, width=320, height=300) as browser:
        browser.open(built / "page" / "index.html")
        browser.type("ann")
        browser.press("Enter")
        browser.wait("ready()")
        assert browser.run("document.documentElement.scrollWidth") <= 320
        browser.run("scrollTo(0, 100)")
        assert browser.run("scrollY") > 0
        browser.run("pictures.right.click()")
        browser.wait("ready()")
        assert browser.run("[answers.length, scrollY]") == [1, 0]


@needs_browser
def test_pressing_twice_answers_one_pair(tmp_path: Path, built: Path) -> None:
    with chromium.Browser(tmp_path / "profile", tmp_path) as browser:
        browser.open(built / "page" / "index.html")
        browser.type("ann")
        browser.press("Enter")
        browser.wait("ready()")
        browser.run("choose('left')")
        browser.wait("shown !== null")
        browser.run("shown.since = performance.now(); choose('left'); pictures.left.click()")
        assert browser.run("answers.length") == 1
        browser.wait("ready()")
        browser.run("pictures.left.click()")
        assert browser.run("answers.length") == 2


@needs_browser
def test_sides_are_fair_and_a_lost_picture_stops_the_page(tmp_path: Path, built: Path) -> None:
    for file in (built / "page" / "images").iterdir():
        file.unlink()
    with chromium.Browser(tmp_path / "profile", tmp_path) as browser:
        browser.open(built / "page" / "index.html")
        browser.type("?!")
        browser.press("Enter")
        assert visible(browser) == ["start"]
        assert browser.run("document.getElementById('unfit').offsetParent !== null")
        browser.type("Ann")
        browser.press("Enter")
        browser.wait("document.getElementById('broken').offsetParent !== null")
        browser.press("1")
        assert browser.run("answers.length") == 0
        shown = browser.run(
            "[...Array(400).keys()].map((n) => trialsOf(`name ${n}`).map((t) => [t.pair, t.left]))"
        )
    lefts, firsts = (
        Counter(t[1] for trials in shown for t in trials),
        Counter(t[0][0] for t in shown),
    )
    assert len(lefts) == 2 * len(firsts) == 2 * len(PROMPTS)
    assert all(abs(count - 200) < 50 for count in lefts.values())  # 5 sd
    assert all(abs(count - 400 / 6) < 38 for count in firsts.values())
