"""DPG-Bench: published scores from real answers, and every quirk of the official script."""

import csv
import json
import shutil
from collections import Counter, defaultdict
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy import stats

from dpg_folders import ITEMS, TILES, configure, dense_specs, scores_of, write_run
from ssd_research import evaluate
from ssd_research.metrics import dpg
from ssd_research.metrics.dpg import PROTOCOLS, Scoring
from ssd_research.metrics.dpg_questions import BROAD, COLUMNS, QuestionTable, read_questions
from ssd_research.metrics.judges.shapes_vqa import ShapesVQA
from ssd_research.prompts import select_prompts

DATA = Path(__file__).parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(
    not (DATA / "dsg").is_dir(), reason="the recorded answers of DSG-1k are not beside the repo"
)
JUDGES = ("mplug", "instructblip", "pali17b")
# The nine published groups by the prefix of the item id.
GROUPS = {
    "tifa160": "tifa",
    "stanford_paragraph": "paragraph",
    "localized_narratives": "paragraph",
    "vrd": "relation",
    "countbench": "count",
    "diffusiondb": "real_user",
    "midjourney": "real_user",
    "posescript": "pose",
    "whoops": "defying",
    "drawtext": "text",
}


# Real answers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected() -> dict:
    return json.loads((DATA / "expected.json").read_text())


@pytest.fixture(scope="module")
def dsg() -> QuestionTable:
    return read_questions(DATA / "dsg" / "dsg-1k-anns.csv")


@cache
def recorded(judge: str) -> dict[str, dict[str, dict[int, str]]]:
    """Return the recorded answers by image model, item and question."""
    found: dict = defaultdict(lambda: defaultdict(dict))
    with (DATA / "dsg" / f"vqa_{judge}_dsg.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            answers = found[row["t2i_model"]][row["item_id"]]
            answers[int(row["question_id"])] = row["answer"]
    return found


def percents(table: QuestionTable, answers: dict, scoring: Scoring) -> dict[str, float]:
    """Return the mean of all prompts and of each group; a prompt without answers scores 0."""
    scores, _ = dpg.score_prompts(table, {k: [v] for k, v in answers.items()}, scoring)
    groups = defaultdict(list)
    for item_id in table.items:
        value = 100 * scores[item_id].score if item_id in scores else 0.0
        for group in ("all", GROUPS[item_id.rstrip("0123456789").rstrip("_")]):
            groups[group].append(value)
    return {name: fmean(values) for name, values in groups.items()}


@needs_data
@pytest.mark.parametrize("judge", JUDGES)
def test_real_answers_give_the_known_scores(judge, dsg, expected):
    answers = recorded(judge)["sd2dot1"]
    tables = {
        "dsg1k_sd21": dsg,
        "dsg1k_sd21_malformed_item_without_graph": dsg.without_graphs_of_malformed(),
    }
    for key, table in tables.items():
        for mode in dpg.DEPENDENCIES if table is dsg else ("single", "cascade"):
            found = percents(table, answers, Scoring(dependencies=mode))
            assert found == pytest.approx(expected[key][judge][mode], abs=6e-5), (key, mode)
    said = {k: [v] for k, v in answers.items()}
    raw = dpg.score(dsg, said, Scoring(raw_categories=True), samples=0)["categories"]
    assert list(raw) == list(BROAD)
    for name, (percent, count) in expected["dsg1k_sd21"][judge]["l1_raw"].items():
        assert raw[name]["questions"] == count
        assert 100 * raw[name]["score"] == pytest.approx(percent, abs=6e-5)


@needs_data
def test_pali_gives_the_published_list_and_mplug_its_three_averages(dsg, expected):
    pali = percents(
        dsg.without_graphs_of_malformed(),
        recorded("pali17b")["sd2dot1"],
        Scoring(dependencies="single"),
    )
    published = expected["dsg1k_published_pali_single"]
    assert {name: round(value, 1) for name, value in pali.items()} == published
    answers = recorded("mplug")["sd2dot1"]
    averages = [percents(dsg, answers, Scoring(dependencies=m))["all"] for m in dpg.DEPENDENCIES]
    assert averages == pytest.approx([82.890, 83.041, 87.562], abs=6e-4)


@needs_data
@pytest.mark.parametrize("judge", JUDGES)
def test_correlation_with_human_ratings_is_as_published(judge, dsg, expected):
    ratings = defaultdict(list)
    with (DATA / "dsg" / "tifa160-likert-anns.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            ratings[row["t2i_model"], row["item_id"]].append(int(row["answer"]))
    answers = recorded(judge)
    for name, mode in (("dep", "single"), ("nodep", "none")):
        scores = {}
        for model, items in answers.items():
            tifa = {k: [v] for k, v in items.items() if k.startswith("tifa160")}
            found, _ = dpg.score_prompts(dsg, tifa, Scoring(dependencies=mode))
            scores |= {(model, item_id): prompt.score for item_id, prompt in found.items()}
        keys = sorted(ratings)
        ours = [scores.get(key, 0.0) for key in keys]
        people = [fmean(ratings[key]) for key in keys]
        assert len(keys) == expected["tifa160_correlation_published"]["n"]
        pair = [stats.spearmanr(ours, people)[0], stats.kendalltau(ours, people)[0]]
        assert pair == pytest.approx(
            expected["tifa160_correlation_published"][judge][name], abs=1e-3
        )


@needs_data
def test_irregularities_of_the_real_file_are_counted(dsg):
    assert len(dsg.items) == 1060
    assert sum(map(len, dsg.items.values())) == 8182
    assert dict(dsg.oddities) == {
        "malformed_dependencies": 10,
        "self_parents": 44,
        "later_parents": 48,
        "unknown_parents": 8,
        "duplicate_questions": 0,
        "blank_questions": 0,
        "split_items": 0,
        "unknown_categories": 0,
    }
    assert sum(any(q.malformed for q in group) for group in dsg.items.values()) == 8
    small = read_questions(DATA / "dsg" / "tifa160-dev-anns.csv")
    assert (len(small.items), small.oddities["duplicate_questions"]) == (160, 3)
    assert small.oddities["blank_questions"] > 0


@needs_data
def test_recorded_answers_that_are_neither_yes_nor_no_are_counted(dsg):
    counts = {}
    for judge in JUDGES:
        answers = {k: [v] for k, v in recorded(judge)["sd2dot1"].items()}
        counts[judge] = dpg.count_unparsable(dsg, answers)
    assert all(count["answers"] == 8174 for count in counts.values())
    assert all(0.001 < count["share"] < 0.009 for count in counts.values())


@needs_data
def test_official_protocol_loses_the_first_prompt_of_the_real_file(dsg):
    """The first data row is skipped, so the first prompt's questions name an unknown parent."""
    answers = {k: [v] for k, v in recorded("mplug")["sd2dot1"].items()}
    fixed = dpg.score(dsg, answers, PROTOCOLS["fixed"], samples=0)
    official = dpg.score(dsg, answers, PROTOCOLS["official"], samples=0)
    assert (fixed["n_scored"], fixed["missing"]) == (1059, ["tifa160_134"])
    assert (official["n_scored"], official["dropped"]) == (1058, ["whoops_5"])


@needs_data
@pytest.mark.slow
def test_the_stage_replays_real_answers(tmp_path, dsg, expected):
    """All of DSG-1k through `evaluate`, with blank pictures that nobody looks at."""
    images = tmp_path / "blank"
    for item_id in dsg.items:
        if item_id != "tifa160_134":  # it has no recorded answers
            save((8, 8), images / f"{item_id}.png")
    options = [
        f"eval.questions={DATA}/dsg/dsg-1k-anns.csv",
        "eval/judge=recorded",
        f"eval.judge.path={DATA}/dsg/vqa_mplug_dsg.csv",
        "eval.judge.name=mplug",
        "eval.judge.where={t2i_model: sd2dot1}",
        "images_per_prompt=1",
    ]
    with pytest.raises(FileNotFoundError, match="1 of 1060 images are missing, of items tifa160"):
        evaluate.run(configure(images, *options))
    scores = scores_of(evaluate.run(configure(images, *options, "evaluate.allow_missing=true")))
    whole = expected["dsg1k_sd21"]["mplug"]["cascade"]["all"]
    assert 100 * scores["average"] * scores["coverage"] == pytest.approx(whole, abs=6e-5)
    assert scores["protocols"]["official"]["n_scored"] == 1058
    assert scores["oddities"]["later_parents"] == 48
    assert scores["judge"].startswith("mplug recorded ")
    assert scores["unparsable"] == {"answers": 8174, "unparsable": 12, "share": 12 / 8174}


@needs_data
def test_there_are_1065_prompts():
    folder = DATA / "dpg_bench" / "prompts"
    chosen = select_prompts(str(folder), {})
    assert chosen.manifest["counts"]["selected"] == 1065
    assert {p.id for p in chosen.prompts} == {path.stem for path in folder.glob("*.txt")}
    kinds = Counter(p.id.rstrip("0123456789") for p in chosen.prompts)
    assert kinds[""] == 299
    assert kinds["partiprompts"] == 324


# Rules -------------------------------------------------------------------------------------------

ROWS = """\
item_id,text,proposition_id,dependency,tuple,question_natural_language
a,A red cup on a table,1,0,entity - whole (cup),Is there a cup?
a,A red cup on a table,2,1,"attribute - color (cup, red)",Is the cup red?
a,A red cup on a table,3,"1,4","relation - spatial (cup, table, on)",Is the cup on the table?
a,A red cup on a table,4,0,entity - whole (table),Is there a table?
b,Two dogs,1,0,entity - whole (dogs),Are there dogs?
b,Two dogs,2,1,"other - count (dogs, ==2)",Are there two dogs?
b,Two dogs,3,2,global - (cartoon),Is it a cartoon?
"""


def table(text: str = ROWS) -> QuestionTable:
    return QuestionTable.of(csv.DictReader(text.splitlines()))


def answers(a: str, b: str, *more: str) -> dict[str, list[dict[int, str]]]:
    """Return answers from letters, one per question; each further pair is another tile."""
    words = {"y": "yes", "n": "no", "Y": "Yes.", "?": "perhaps"}
    tiles = [(a, b), *zip(more[::2], more[1::2], strict=True)]
    return {
        item: [{n: words[c] for n, c in enumerate(pair[k], 1)} for pair in tiles]
        for k, item in enumerate("ab")
    }


def average(found: dict) -> float:
    return found["average"]


def scored(said: dict, **changes: object) -> dict:
    return dpg.score(table(), said, replace(Scoring(), **changes), samples=10)


def test_a_no_cascades_to_grandchildren_only_in_dpg():
    said = answers("yyyy", "nyy")
    assert average(scored(said)) == (1 + 0) / 2
    assert average(scored(said, dependencies="single")) == pytest.approx((1 + 1 / 3) / 2)
    assert average(scored(said, dependencies="none")) == pytest.approx((1 + 2 / 3) / 2)


def test_a_later_parent_counts_by_its_own_answer():
    assert average(scored(answers("yyyn", "yyy"))) == (2 / 4 + 1) / 2
    assert average(scored(answers("nyyy", "yyy"))) == (1 / 4 + 1) / 2


def test_prompt_score_is_the_mean_over_tiles():
    found = scored(answers("yyyy", "yyy", "nyyy", "nnn"))
    assert average(found) == pytest.approx(((1 + 1 / 4) / 2 + (1 + 0) / 2) / 2)


def test_categories_pool_questions_of_all_tiles_with_dependencies():
    found = scored(answers("yyyy", "yyy", "nyyy", "nyy"))["categories"]
    assert list(found) == list(BROAD)
    assert {k: v["questions"] for k, v in found.items()} == {
        "global": 2, "entity": 6, "attribute": 2, "relation": 2, "other": 2,
    }  # fmt: skip
    assert found["entity"]["score"] == pytest.approx(4 / 6)
    assert all(found[k]["score"] == 0.5 for k in ("global", "attribute", "relation", "other"))


def test_quirk_categories_of_the_last_tile_without_dependencies():
    said = answers("yyyy", "yyy", "nyyy", "nyy")
    last = scored(said, last_tile_categories=True)["categories"]
    assert {k: v["questions"] for k, v in last.items()}["entity"] == 3
    assert last["attribute"]["score"] == 0
    raw = scored(said, last_tile_categories=True, raw_categories=True)["categories"]
    assert raw["attribute"]["score"] == raw["global"]["score"] == 1
    assert raw["entity"]["score"] == pytest.approx(1 / 3)
    average_is_untouched = average(scored(said)) == average(scored(said, raw_categories=True))
    assert average_is_untouched


def test_quirk_only_a_bare_yes_is_yes():
    assert average(scored(answers("YYYY", "yyy"))) == 1
    assert average(scored(answers("YYYY", "yyy"), exact_yes=True)) == 0.5
    assert [dpg.reading(t) for t in (" YES ", "no.", "no bus", "", "yes 1000")] == [
        True, False, None, None, None,
    ]  # fmt: skip


def test_quirk_the_first_row_is_skipped_and_its_children_cost_the_prompt():
    said = answers("nyyy", "yyy")
    assert average(scored(said)) == (1 / 4 + 1) / 2
    alone = scored(said, official_rows=True)
    assert average(alone) == 1  # nothing says any more that there is no cup
    assert alone["n_scored"] == 2
    both = scored(said, official_rows=True, drop_unknown_parents=True)
    assert (both["dropped"], both["n_scored"], both["coverage"]) == (["a"], 1, 0.5)
    childless = table(ROWS.replace(",2,1,", ",2,0,").replace('"1,4"', "4"))
    kept = dpg.score(childless, said, PROTOCOLS["official"], samples=0)
    assert kept["dropped"] == []


def test_quirk_an_unknown_parent_costs_the_prompt_only_once_it_is_looked_up():
    late = table(ROWS.replace(",3,2,", ',3,"2,9",'))
    official = PROTOCOLS["official"]
    for b, dropped in (("yyy", ["b"]), ("yny", []), ("nyy", [])):
        said = {"b": answers("yyyy", b)["b"]}
        assert dpg.score_prompts(late, said, official)[1] == dropped
    second = answers("yyyy", "yny", "yyyy", "yyy")["b"]  # one tile is enough
    assert dpg.score_prompts(late, {"b": second}, official)[1] == ["b"]


def test_quirk_of_an_item_in_two_places_the_last_one_counts():
    split = ROWS + "a,A red cup on a table,5,0,entity - whole (saucer),Is there a saucer?\n"
    said = {"a": [{1: "no", 2: "no", 3: "no", 4: "no", 5: "yes"}]}
    assert dpg.score(table(split), said, Scoring())["average"] == 1 / 5
    assert dpg.score(table(split), said, PROTOCOLS["official"])["average"] == 1


def plainly(rows: list[dict], said: dict) -> tuple[dict, dict]:
    """Return prompt scores and L1 categories as the official script gets them, step by step."""
    known: dict = {}
    for before, row in pairwise(rows):
        if row["item_id"] != before["item_id"] or row["item_id"] not in known:
            known[row["item_id"]] = {}
        parents = [int(p) for p in row["dependency"].split(",")]
        known[row["item_id"]][int(row["proposition_id"])] = (parents, row["tuple"])
    scores, categories = {}, defaultdict(list)
    for item_id in (name for name in said if name in known):
        try:
            tiles = []
            for tile in said[item_id]:
                raw = {n: float(tile[n] == "yes") for n in known[item_id]}
                marks = dict(raw)
                for n, (parents, _) in known[item_id].items():
                    for parent in parents:
                        if parent and marks[parent] == 0:
                            marks[n] = 0.0
                            break
                tiles.append(fmean(marks.values()))
        except KeyError:
            continue
        scores[item_id] = fmean(tiles)
        for n, (_, what) in known[item_id].items():
            categories[what.split("(")[0].split("-")[0].strip()].append(raw[n])
    return scores, {name: (fmean(marks), len(marks)) for name, marks in categories.items()}


def test_official_protocol_equals_the_script_on_random_tables():
    draws = np.random.default_rng(0)
    dropped = 0
    for count in range(300):
        rows = []
        for _ in range(draws.integers(1, 14)):
            what = draws.choice(["global", "entity - whole", "entity - part", "other - count"])
            parents = ",".join(map(str, draws.integers(0, 6, draws.integers(1, 4))))
            cells = f"i{draws.integers(3) if count % 3 else len(rows) // 5}", "text"
            number = str(draws.integers(1, 6)) if count % 3 else str(len(rows) % 5 + 1)
            cells = (*cells, number, parents, f"{what} (x)", "?")
            rows.append(dict(zip(COLUMNS, cells, strict=True)))
        found = QuestionTable.of(rows)
        said = {
            name: [
                {q.number: str(draws.choice(["yes", "yes", "yes", "no", "Yes"])) for q in group}
                for _ in range(draws.choice([1, 4]))
            ]
            for name, group in found.items.items()
        }
        scores, categories = plainly(rows, said)
        ours = dpg.score(found, said, PROTOCOLS["official"], samples=0)
        prompts, _ = dpg.score_prompts(found, said, PROTOCOLS["official"])
        assert {name: p.score for name, p in prompts.items()} == pytest.approx(scores)
        assert {k: v["questions"] for k, v in ours["categories"].items()} == {
            k: n for k, (_, n) in categories.items()
        }
        for name, (mean, _) in categories.items():
            assert ours["categories"][name]["score"] == pytest.approx(mean)
        dropped += len(ours["dropped"])
    assert 30 < dropped < 600


def test_official_protocol_has_every_quirk():
    official, fixed = PROTOCOLS["official"], PROTOCOLS["fixed"]
    assert official.dependencies == fixed.dependencies == "cascade"
    quirks = [f.name for f in fields(Scoring) if f.name != "dependencies"]
    assert all(getattr(official, name) and not getattr(fixed, name) for name in quirks)


def test_unparsable_answers_score_zero_and_are_counted():
    said = answers("?yyy", "yY?")
    assert dpg.count_unparsable(table(), said) == {
        "answers": 7, "unparsable": 2, "share": pytest.approx(2 / 7),
    }  # fmt: skip
    assert average(scored(said)) == pytest.approx((1 / 4 + 2 / 3) / 2)


def test_missing_items_are_named_and_unknown_ones_refused():
    said = answers("yyyy", "yyy")
    found = dpg.score(table(), {"b": said["b"]}, Scoring(), samples=0)
    assert (found["missing"], found["n_expected"], found["coverage"]) == (["a"], 2, 0.5)
    with pytest.raises(ValueError, match="1 answered items have no questions: zebra"):
        dpg.score(table(), {**said, "zebra": said["b"]}, Scoring())
    nothing = dpg.score(table(), {}, Scoring(), samples=5)
    assert (nothing["average"], nothing["n_scored"], nothing["categories"]) == (None, 0, {})
    with pytest.raises(ValueError, match="item b: question 3 has no answer"):
        dpg.score(table(), {"b": [{1: "yes", 2: "no"}]}, Scoring())


def test_unknown_dependencies_are_refused():
    with pytest.raises(ValueError, match="accepted: cascade, single, none"):
        Scoring(dependencies="twice")


def many(count: int = 40) -> tuple[QuestionTable, dict, dict]:
    """Return one-question items, all-yes answers, and answers of which every second is no."""
    head = ",".join(COLUMNS)
    rows = [f"i{n},text,1,0,entity - whole (x),Is there x?" for n in range(count)]
    yes = {f"i{n}": [{1: "yes"}] for n in range(count)}
    half = {f"i{n}": [{1: "yes" if n % 2 else "no"}] for n in range(count)}
    return table("\n".join([head, *rows])), yes, half


def test_intervals_redraw_prompts():
    questions, yes, half = many()
    assert dpg.score(questions, yes, Scoring())["average_ci95"] == [1, 1]
    found = dpg.score(questions, half, Scoring(), seed=3)
    low, high = found["average_ci95"]
    assert (low, high) == (pytest.approx(0.345, abs=0.03), pytest.approx(0.655, abs=0.03))
    assert found["categories"]["entity"]["ci95"] == found["average_ci95"]
    assert found == dpg.score(questions, half, Scoring(), seed=3)


def test_comparison_is_over_common_prompts_in_pairs():
    questions, yes, half = many()
    del yes["i0"]
    del half["i1"], half["i3"]
    found = dpg.compare(questions, yes, half, Scoring())
    assert (found["n_common"], found["only_first"], found["only_second"]) == (
        37,
        ["i1", "i3"],
        ["i0"],
    )
    assert found["first"] == 1
    assert found["second"] == pytest.approx(18 / 37)
    assert found["difference"] == pytest.approx(19 / 37)
    assert 0.3 < found["difference_ci95"][0] < found["difference_ci95"][1] < 0.7
    assert found["categories"]["entity"] == {"first": 1, "second": pytest.approx(18 / 37)}
    same = dpg.compare(questions, half, half, Scoring())
    assert same["difference_ci95"] == [0, 0]
    with pytest.raises(ValueError, match="no prompt in common"):
        dpg.compare(questions, {"i0": yes["i1"]}, {"i1": yes["i1"]}, Scoring())


# The loader --------------------------------------------------------------------------------------


def test_odd_rows_are_read_and_counted():
    odd = ROWS + (
        'c,Cats,1,"2, right",entity - whole (cats),Are there cats?\n'
        "c,Cats,2,2,entity - whole (mat),Is there a mat?\n"
        'c,Cats,3,"0,9",thing (odd),Is it odd?\n'
        "a,A red cup on a table,4,0,entity - whole (table),Is there really a table?\n"
    )
    found = table(odd)
    assert dict(found.oddities) == {
        "malformed_dependencies": 1,
        "self_parents": 1,
        "later_parents": 2,  # of "3: 1,4" too
        "unknown_parents": 1,
        "duplicate_questions": 1,
        "blank_questions": 0,
        "split_items": 1,
        "unknown_categories": 1,
    }
    assert [q.parents for q in found.items["c"]] == [(2,), (2,), (9,)]
    assert [q.text for q in found.items["a"]][
        3
    ] == "Is there really a table?"  # the last one counts
    assert [q.parents for q in found.without_graphs_of_malformed().items["c"]] == [(), (), ()]
    said = {"c": [{1: "yes", 2: "no", 3: "yes"}]}
    assert dpg.score(found, said, Scoring(), samples=0)["average"] == pytest.approx(1 / 3)
    assert "thing" in dpg.score(found, said, Scoring(), samples=0)["categories"]
    assert dpg.score_prompts(found, said, PROTOCOLS["official"]) == ({}, ["c"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "without item_id, text"),
        ("item_id,text\na,b\n", "without proposition_id, dependency"),
        (ROWS.splitlines()[0] + "\n", "holds no questions"),
        (ROWS + "c,Cats,one,0,entity (x),Is it?\n", "row 9: proposition_id 'one'"),
        (ROWS + "c,Cats,1,0\n", "row 9 has no tuple"),
        (ROWS + 'c,Cats,1,0,"entity', "not a CSV file"),
        (ROWS + "c,Cats,1,0,entity (x),Are there cats, or dogs?\n", "row 9 has more cells"),
        (ROWS + " ,Cats,1,0,entity (x),Are there cats?\n", "row 9: item_id is blank"),
    ],
)
def test_broken_tables_are_one_clear_line(tmp_path, content, words):
    path = tmp_path / "questions.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        read_questions(path)


def test_windows_tables_are_the_same_table(tmp_path):
    plain, windows = tmp_path / "plain.csv", tmp_path / "windows.csv"
    text = ROWS.replace("cup?", "caf\u00e9\u2028cup?")
    plain.write_bytes(text.encode())
    windows.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert read_questions(windows) == read_questions(plain)
    assert read_questions(plain).items["a"][0].text == "Is there a caf\u00e9\u2028cup?"


def test_an_absent_table_says_where_to_get_it(tmp_path):
    images = write_run(tmp_path / "made", tiles=1)
    with pytest.raises(FileNotFoundError, match=r"github\.com/TencentQQGYLab/ELLA"):
        evaluate.run(configure(images, "eval.questions=nowhere.csv"))


# The evaluation, in the shapes world -------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_run(tmp_path / "made")


def test_right_pictures_score_one(images):
    folder = evaluate.run(configure(images))
    scores = scores_of(folder)
    assert scores["average"] == 1
    assert scores["average_ci95"] == [1, 1]
    assert {c["score"] for c in scores["categories"].values()} == {1}
    assert set(scores["categories"]) == set(BROAD)
    assert (scores["n_scored"], scores["n_expected"], scores["coverage"]) == (ITEMS, ITEMS, 1)
    assert scores["judge"] == "shapes-parser 1.1"
    assert scores["protocol"] == "fixed"
    assert scores["higher_is_better"] is True
    assert scores["resolution"] == [48, 48]
    assert scores["unparsable"]["unparsable"] == 0
    # The official script skips the first row, and with it the first prompt.
    assert scores["protocols"]["official"]["n_scored"] == ITEMS - 1
    rows = pq.read_table(folder / "per_image.parquet").to_pylist()
    assert len(rows) == ITEMS * TILES
    assert all(r["score"] == 1 and r["yes"] == r["questions"] for r in rows)
    assert (folder / "DONE").exists()


def test_wrong_pictures_cost_what_they_should(images):
    blank = Image.new("RGB", (48, 48), (210, 210, 220))
    for k in range(TILES):
        blank.save(images / "00001" / "samples" / f"{k:04d}.png")
    folder = evaluate.run(configure(images))
    scores = scores_of(folder)
    questions = len(list(rows_of("shapes0001")))
    assert scores["average"] == pytest.approx((2 + 1 / questions) / 3)  # its background is plain
    assert scores["categories"]["global"]["score"] == 1
    worst = min(pq.read_table(folder / "per_image.parquet").to_pylist(), key=lambda r: r["score"])
    assert worst["item_id"] == "shapes0001"


def rows_of(item_id: str) -> list[dict[str, str]]:
    from ssd_research.shapes import benchmark

    return [r for r in benchmark.dpg_rows(prompts=ITEMS) if r["item_id"] == item_id]


def test_grids_tiles_and_runs_are_one_evaluation(images, tmp_path):
    folder = evaluate.run(configure(images))
    for layout in ("grids", "tiles"):
        target = tmp_path / layout
        exported = evaluate.run(
            configure(images, "eval=dpg_export", f"eval.folder={target}", f"eval.layout={layout}")
        )
        assert exported == target
        assert evaluate.run(configure(target)) == folder
    grid = np.asarray(Image.open(tmp_path / "grids" / "shapes0001.png"))
    assert grid.shape == (96, 96, 3)
    for k, (row, column) in enumerate([(0, 0), (0, 48), (48, 0), (48, 48)]):
        tile = np.asarray(Image.open(images / "00001" / "samples" / f"{k:04d}.png"))
        assert np.array_equal(grid[row : row + 48, column : column + 48], tile)
    assert (tmp_path / "tiles" / "shapes0002" / "0003.png").is_file()
    (tmp_path / "grids" / "dpg-bench_20250101_results.txt").write_text("of the official script")
    assert evaluate.run(configure(tmp_path / "grids")) == folder


def test_every_run_has_scores_of_its_own_though_its_images_are_anothers(tmp_path):
    """Lossless decoders at top-k 1 draw the same images; each must have scores to compare."""
    folders = []
    for name in ("a1", "b2"):
        write_run(tmp_path / name / "images")
        (tmp_path / name / "DONE").touch()
        folders.append(evaluate.run(configure(tmp_path / name, f"output_dir={tmp_path}/out")))
    found = [json.loads((folder / "scores.json").read_text()) for folder in folders]
    assert [Path(scores["images"]).parent.name for scores in found] == ["a1", "b2"]
    assert found[0]["average"] == found[1]["average"]


def test_one_image_per_prompt(tmp_path):
    images = write_run(tmp_path / "made", tiles=1, key="prompt_id")
    assert scores_of(evaluate.run(configure(images, "images_per_prompt=1")))["average"] == 1
    flat = tmp_path / "flat"
    one = ["images_per_prompt=1", "eval=dpg_export", "eval.tiles=1", f"eval.folder={flat}"]
    evaluate.run(configure(images, *one))
    assert Image.open(flat / "shapes0000.png").size == (48, 48)
    assert scores_of(evaluate.run(configure(flat, "images_per_prompt=1")))["average"] == 1


def test_exports_are_refused_where_they_would_mislead(images, tmp_path):
    target = tmp_path / "grids"
    export = ["eval=dpg_export", f"eval.folder={target}"]
    with pytest.raises(ValueError, match="accepted: grids, tiles"):
        evaluate.run(configure(images, *export, "eval.layout=mosaic"))
    target.mkdir()
    Image.new("RGB", (8, 8)).save(target / "another.png")
    with pytest.raises(ValueError, match=r"holds other images already: another\.png"):
        evaluate.run(configure(images, *export))
    (target / "another.png").unlink()
    (images / "00002" / "samples" / "0003.png").unlink()
    with pytest.raises(FileNotFoundError, match="1 of 12 images are missing"):
        evaluate.run(configure(images, *export))
    assert not list(target.iterdir())


def test_an_export_never_overwrites_another(images, tmp_path):
    target = tmp_path / "grids"
    export = ["eval=dpg_export", f"eval.folder={target}"]
    evaluate.run(configure(images, *export))
    first = {path.name: path.read_bytes() for path in target.iterdir()}
    (target / "shapes0001.png").unlink()
    evaluate.run(configure(images, *export))  # the rest of an interrupted one
    assert {path.name: path.read_bytes() for path in target.iterdir()} == first
    (target / "shapes0000.png").unlink()
    (images / "00002" / "samples" / "0003.png").write_bytes(
        (images / "00000" / "samples" / "0003.png").read_bytes()
    )
    with pytest.raises(ValueError, match=r"other images already: shapes0002\.png; choose another"):
        evaluate.run(configure(images, *export))
    assert not (target / "shapes0000.png").exists()


def test_an_export_needs_a_folder_and_ids_that_name_files(images, tmp_path):
    (tmp_path / "file").write_text("")
    for folder, words in (("null", "must name a folder"), (tmp_path / "file", "is a file")):
        with pytest.raises(ValueError, match=words):
            evaluate.run(configure(images, "eval=dpg_export", f"eval.folder={folder}"))
    (images / "00001" / "metadata.jsonl").write_text('{"item_id": "../v1.5", "prompt": "x"}')
    with pytest.raises(ValueError, match=r"'\.\./v1\.5' cannot name a file"):
        evaluate.run(configure(images, "eval=dpg_export", f"eval.folder={tmp_path}/grids"))


def test_missing_images_are_refused_unless_allowed(images):
    (images / "00001" / "samples" / "0002.png").unlink()
    (images / "00002" / "samples" / "0003.png").unlink()
    with pytest.raises(FileNotFoundError, match="2 of 12 images are missing, of items shapes0001"):
        evaluate.run(configure(images))
    scores = scores_of(evaluate.run(configure(images, "evaluate.allow_missing=true")))
    assert (scores["n_scored"], scores["n_expected"]) == (1, 3)
    assert scores["missing"] == ["shapes0001", "shapes0002"]
    shutil.rmtree(images / "00001" / "samples")
    with pytest.raises(FileNotFoundError, match="5 of 12 images are missing, of items shapes0001"):
        evaluate.run(configure(images))
    shutil.rmtree(images / "00000")
    with pytest.raises(FileNotFoundError, match=r"no prompt has all of its eval\.tiles=4 images"):
        evaluate.run(configure(images, "evaluate.allow_missing=true"))


def save(size: tuple[int, int], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def deepen(path: Path) -> None:
    Image.fromarray(np.full((48, 48), 40000, np.uint16)).save(path)


BROKEN = {
    "truncated": (lambda r: truncate(r / "00001/samples/0001.png"), "0001.png is .*truncated"),
    "no image": (lambda r: (r / "00001/samples/0001.png").write_text("x"), "not a readable image"),
    "empty": (lambda r: (r / "00001/samples/0001.png").write_text(""), "not a readable image"),
    "16 bits": (lambda r: deepen(r / "00001/samples/0001.png"), "more than 8 bits a channel"),
    "size": (lambda r: save((40, 40), r / "00001/samples/0001.png"), "0001.png is 40x40"),
    "extra image": (lambda r: save((48, 48), r / "00001/samples/0004.png"), "beyond eval.tiles=4"),
    "extra file": (lambda r: (r / "00001/samples/notes").write_text(""), "notes does not belong"),
    "extra at root": (lambda r: (r / "notes.md").write_text(""), "notes.md does not belong here"),
    "unknown id": (
        lambda r: (r / "00001/metadata.jsonl").write_text('{"item_id": "zebra", "prompt": "x"}'),
        "1 items among the images are not in the questions: zebra",
    ),
    "no id": (lambda r: (r / "00001/metadata.jsonl").write_text("{}"), "names no item"),
    "no json": (lambda r: (r / "00001/metadata.jsonl").write_text("{"), "not one line of JSON"),
    "no keys": (lambda r: (r / "00001/metadata.jsonl").write_text("3"), "not one line of JSON"),
    "odd prompt": (
        lambda r: (r / "00001/metadata.jsonl").write_text('{"item_id": "a", "prompt": 3}'),
        "its prompt is no text",
    ),
    "other prompt": (
        lambda r: (r / "00001/metadata.jsonl").write_text(
            '{"item_id": "shapes0001", "prompt": "a red circle"}'
        ),
        "1 items were made from other prompts than the questions ask about: shapes0001",
    ),
    "twice": (
        lambda r: shutil.copytree(r / "00001", r / "00003"),
        "item shapes0001 has 2 images number 0",
    ),
}


@pytest.mark.parametrize(("spoil", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_folders_are_one_clear_line(images, spoil, words):
    spoil(images)
    with pytest.raises(ValueError, match=words) as caught:
        evaluate.run(configure(images, "evaluate.allow_missing=true"))
    assert "\n" not in str(caught.value)
    assert not (images.parent / "outputs").exists()


def test_a_prompt_folder_without_its_metadata_is_named(images):
    (images / "00001" / "metadata.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"00001/metadata\.jsonl"):
        evaluate.run(configure(images, "evaluate.allow_missing=true"))


@pytest.mark.parametrize(
    "option",
    ["evaluate.bootstrap=-1", "evaluate.bootstrap=1.5", "evaluate.bootstrap=0", "eval.items=0"],
)
def test_options_out_of_range_are_named(images, option):
    name, _, value = option.partition("=")
    with pytest.raises(ValueError, match=f"{name}={value} must be a whole number of at least 1"):
        evaluate.run(configure(images, option))


def test_grids_of_a_wrong_size_are_refused(tmp_path):
    grids = tmp_path / "grids"
    for item_id in dense_specs():
        save((96, 96), grids / f"{item_id}.png")
    save((96, 90), grids / "shapes0001.png")
    with pytest.raises(ValueError, match=r"shapes0001.png is 96x90 pixels, no 2x2 grid"):
        evaluate.run(configure(grids))
    save((97, 97), grids / "shapes0001.png")
    with pytest.raises(ValueError, match="97x97 pixels, no 2x2 grid"):
        evaluate.run(configure(grids))
    save((128, 128), grids / "shapes0001.png")
    with pytest.raises(
        ValueError, match=r"4 of 12 images are not 48x48 .* shapes0001.png is 64x64"
    ):
        evaluate.run(configure(grids))
    save((96, 96), grids / "shapes0001.png")
    with pytest.raises(ValueError, match=r"48x48 pixels, not eval\.resolution=384"):
        evaluate.run(configure(grids, "eval.resolution=384"))
    with pytest.raises(ValueError, match="every item needs a folder of its own"):
        evaluate.run(configure(grids, "eval.tiles=3"))


def test_another_protocol_asks_nothing_again(images, monkeypatch):
    calls = []
    answer = ShapesVQA.answer

    def counted(self, image, questions):
        calls.append(1)
        return answer(self, image, questions)

    monkeypatch.setattr(ShapesVQA, "answer", counted)
    fixed = evaluate.run(configure(images))
    assert len(calls) == ITEMS * TILES
    official = evaluate.run(configure(images, "eval.protocol=official"))
    assert len(calls) == ITEMS * TILES
    assert official != fixed
    assert scores_of(official)["dropped"] == ["shapes0000"]
    assert scores_of(official)["protocols"] == scores_of(fixed)["protocols"]
    assert (official / "answers.jsonl").read_text() == (fixed / "answers.jsonl").read_text()
    with pytest.raises(ValueError, match="accepted: fixed, official"):
        evaluate.run(configure(images, "eval.protocol=mine"))


def test_two_methods_compare_over_common_prompts(images, tmp_path):
    first = evaluate.run(configure(images))
    other = write_run(tmp_path / "other")
    shutil.rmtree(other / "00002")
    blank = Image.new("RGB", (48, 48), (210, 210, 220))
    for k in range(TILES):
        blank.save(other / "00001" / "samples" / f"{k:04d}.png")
    options = ["evaluate.allow_missing=true", f"eval.against={first}"]
    found = scores_of(evaluate.run(configure(other, *options)))["against"]
    assert found["n_common"] == 2
    assert (found["only_first"], found["only_second"]) == ([], ["shapes0002"])
    assert found["second"] == 1
    assert found["difference"] == pytest.approx(found["first"] - 1)
    with pytest.raises(ValueError, match="is no finished evaluation"):
        evaluate.run(configure(images, f"eval.against={tmp_path}"))


def test_answers_to_other_questions_do_not_compare(images, tmp_path):
    first = evaluate.run(configure(images))
    store = first / "answers.jsonl"
    store.write_text(store.read_text().replace("Are there exactly", "Are there about"))
    with pytest.raises(ValueError, match=r"other questions than eval\.questions holds: num"):
        evaluate.run(configure(write_run(tmp_path / "other"), f"eval.against={first}"))


def test_scores_of_different_judges_do_not_compare(images, tmp_path):
    first = evaluate.run(configure(images))
    store = first / "answers.jsonl"
    store.write_text(store.read_text().replace("shapes-parser 1.1", "someone else"))
    with pytest.raises(ValueError, match="scores of different judges do not compare"):
        evaluate.run(configure(write_run(tmp_path / "other"), f"eval.against={first}"))
