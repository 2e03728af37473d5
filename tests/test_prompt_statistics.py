"""Prompt statistics: what each pattern means, and Table 17 on the public benchmark files."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from ssd_research import evaluate, paper
from ssd_research.metrics.prompt_statistics import (
    WordLists,
    describe,
    ngrams,
    overlap,
    parse_words,
    shipped_words,
    types,
)
from ssd_research.paths import conf_dir

OFFICIAL = Path(__file__).parents[2] / "shared" / "data"
needs_files = pytest.mark.skipif(
    not OFFICIAL.exists(), reason="the public benchmark files are not beside the repo"
)
WORDS = shipped_words()["default"]


def counts(name: str, *prompts: str) -> int:
    return describe(prompts, WORDS)[name]


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("a photo of three clocks", 1),
        ("A photo of THREE  clocks", 1),
        ("12 monkeys", 1),
        ("a photo of three traffic lights", 0),
        ("one clocks", 0),
        ("three sheep", 0),
        ("freetwo clocks", 0),
    ],
)
def test_counting_is_a_number_and_one_word_in_s(prompt, found) -> None:
    assert counts("counting", prompt) == found


@pytest.mark.parametrize(
    ("prompt", "found"),
    [("a red bench", 1), ("a bench, red", 0), ("a RED\nbench", 1), ("a scarred bench", 0)],
)
def test_binding_is_a_colour_before_a_word(prompt, found) -> None:
    assert counts("color_binding", prompt) == found


@pytest.mark.parametrize(
    ("prompt", "found"),
    [("a dog left of a cat", 1), ("a dog left  of a cat", 1), ("above", 1), ("he left off", 0)],
)
def test_relations_are_whole_phrases(prompt, found) -> None:
    assert counts("spatial_relations", prompt) == found


def test_shares_and_medians() -> None:
    found = describe(["two dogs", "a cat, octane render, 8K"], WORDS)
    assert (found["prompts"], found["median_words"], found["word_types"]) == (2, 3.5, 7)
    assert (found["style_modifiers_percent"], found["counting_percent"]) == (50, 50)
    with pytest.raises(ValueError, match="no prompts to describe"):
        describe([], WORDS)


def test_overlap_with_training() -> None:
    prompts = ["A cat on  a red mat", "one two three four five six"]
    training = iter(["a CAT on a red mat", "zero two three four five six"])
    found = overlap(prompts, training)
    assert found["training_prompts"] == 2
    assert found["exact_prompt_overlap"] == 1
    assert (found["word_types_unseen"], found["word_types_unseen_percent"]) == (1, 100 / 11)
    assert (found["shared_5grams"], found["shared_5grams_percent"]) == (3, 75)
    assert types("Don't stop, it's 4 cats") == {"don't", "stop", "it's", "cats"}
    assert list(ngrams("a b c d e f")) == [tuple("abcde"), tuple("bcdef")]
    assert overlap(["cat"], [])["shared_5grams_percent"] is None


def test_word_lists_are_checked() -> None:
    with pytest.raises(ValueError, match="needs the lists numbers, colours, spatial, style"):
        WordLists.of({"numbers": ["two"]})
    for text in ("- two", "", "{}", "[", "a: 3"):
        with pytest.raises(ValueError, match=r"eval\.words must be a YAML mapping"):
            parse_words(text)
    good = {"numbers": ["two"], "colours": ["red"], "spatial": ["left of"], "style": ["8k"]}
    WordLists.of(good)
    for odd in ("two", [], None, [""], [" "], [2], [None]):  # an empty word is found everywhere
        with pytest.raises(ValueError, match=r"eval\.words needs .* texts; see numbers"):
            WordLists.of({**good, "numbers": odd})


# --- the public files -------------------------------------------------------------------------


def geneval() -> list[str]:
    lines = (OFFICIAL / "geneval" / "evaluation_metadata.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def dpg() -> list[str]:
    return [p.read_text("utf-8") for p in sorted((OFFICIAL / "dpg_bench/prompts").glob("*.txt"))]


@needs_files
def test_table_17_geneval_is_exact() -> None:
    row = next(row for row in paper.table(17) if row["prompts"] == "geneval")
    for words in shipped_words().values():
        found = describe(geneval(), words)
        assert (found["prompts"], found["median_words"]) == (553, 8)
        assert (found["counting"], found["color_binding"]) == (63, 194)
        assert (found["spatial_relations"], found["style_modifiers"]) == (100, 0)
        for name in ("counting", "color_binding", "spatial_relations", "style_modifiers"):
            assert round(found[f"{name}_percent"], 1) == row[f"{name}_percent"]
    assert found["word_types"] == 174
    assert round(100 * 51 / 174, 1) == row["word_types_unseen_percent"]


@needs_files
def test_table_17_dpg_bench_where_it_is_determined() -> None:
    row = next(row for row in paper.table(17) if row["prompts"] == "dpg_bench")
    found, wide = (describe(dpg(), words) for words in shipped_words().values())
    assert (found["prompts"], found["median_words"]) == (1065, 65)
    assert found["counting"] == 60
    assert round(found["counting_percent"], 1) == row["counting_percent"]
    assert (found["spatial_relations"], round(found["spatial_relations_percent"], 1)) == (181, 17.0)
    assert round(found["color_binding_percent"], 1) == 69.9
    assert (wide["color_binding"], wide["word_types"]) == (768, 7203)
    assert wide["color_binding_percent"] == pytest.approx(row["color_binding_percent"], abs=0.15)
    assert wide["spatial_relations_percent"] == pytest.approx(39.6, abs=0.5)


@needs_files
def test_the_expected_figures_beside_the_files() -> None:
    expected = json.loads((OFFICIAL / "expected.json").read_text())["table17"]
    found = describe(geneval(), WORDS)
    assert found["counting"] == expected["geneval"]["counting"]
    assert found["color_binding"] == expected["geneval"]["colour_binding"]
    assert describe(dpg(), WORDS)["counting"] == expected["dpg"]["counting"]


# --- the stage --------------------------------------------------------------------------------


def measure(out: Path, *overrides: str) -> tuple[list[dict], str]:
    with initialize_config_dir(str(conf_dir()), version_base=None):
        options = ["eval=prompt_statistics", f"output_dir={out}", "runtime=cpu", *overrides]
        folder = evaluate.run(compose("config", options))
    scores = json.loads((folder / "scores.json").read_text())
    return scores["corpora"], (folder / "table.md").read_text()


def test_the_prompts_at_hand_from_a_fresh_clone(tmp_path) -> None:
    rows, _ = measure(tmp_path, "prompts=[two cats, a red mat]")
    assert [row["words"] for row in rows] == ["default", "wide"]
    assert (rows[0]["corpus"], rows[0]["prompts"], rows[0]["counting"]) == ("prompts", 2, 1)
    assert "training_prompts" not in rows[0]


def test_named_corpora_beside_the_paper_and_the_training_prompts(tmp_path) -> None:
    (tmp_path / "g.txt").write_text("two cats\ntwo cats\na red mat left of it\n")
    (tmp_path / "t.txt").write_text("two cats\n")
    rows, table = measure(
        tmp_path,
        f"eval.corpora={{geneval: {tmp_path}/g.txt}}",
        f"eval.training={tmp_path}/t.txt",
    )
    assert (rows[0]["prompts"], rows[0]["exact_prompt_overlap"]) == (3, 2)
    assert "| geneval | paper | 553 |" in table
    with pytest.raises(FileNotFoundError, match=r"none\.txt does not exist"):
        measure(tmp_path, f"eval.training={tmp_path}/none.txt")
    with pytest.raises(ValueError, match=r"eval.corpora=x must name sources"):
        measure(tmp_path, "eval.corpora=x")


def test_blank_lines_are_no_prompts_and_windows_lines_are_lines(tmp_path) -> None:
    (tmp_path / "g.txt").write_bytes(b"two cats\r\n\r\na red mat\r\n \r\n")
    rows, _ = measure(tmp_path, f"eval.corpora={{a: {tmp_path}/g.txt}}")
    assert (rows[0]["prompts"], rows[0]["median_words"], rows[0]["color_binding"]) == (2, 2.5, 1)
    (tmp_path / "g.txt").write_bytes(b"\n \n")
    with pytest.raises(ValueError, match=r"g\.txt holds no prompts"):
        measure(tmp_path, f"eval.corpora={{a: {tmp_path}/g.txt}}")


def test_the_record_holds_the_word_lists_and_nothing_else(tmp_path) -> None:
    measure(tmp_path, "prompts=[two cats]")
    meta = json.loads(next(tmp_path.glob("evaluate/*/*/*/meta.json")).read_text())
    assert set(meta["identity"]["words"]["wide"]) == {"numbers", "colours", "spatial", "style"}


def test_word_files_that_are_no_text(tmp_path) -> None:
    (tmp_path / "words.yaml").write_bytes(b"\xff")
    for path in (tmp_path / "words.yaml", tmp_path):
        with pytest.raises(ValueError, match=r"eval\.words=.* is no text file"):
            measure(tmp_path / "out", "prompts=[two cats]", f"eval.words={path}")
