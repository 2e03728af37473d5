"""Prompt sources, cleaning and selection, and the line that every bad input gives."""

import json
import logging
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_research.prompts import cleaned, load_prompts, select_prompts
from ssd_research.prompts.files import Row
from ssd_research.prompts.selection import Selection, clean
from ssd_research.prompts.sources import _commit, shapes_captions
from ssd_research.shapes import benchmark
from ssd_research.shapes.scenes import SHAPES

OFFICIAL = Path(__file__).parents[2] / "shared" / "data"
relaxed = settings(deadline=None, max_examples=60)  # machines under load are slow, not wrong
TEXTS = st.lists(st.text("abc de", min_size=1, max_size=8), min_size=1, max_size=30)


def texts(source, **selection):
    return [prompt.text for prompt in load_prompts(source, selection)]


# Reading


@pytest.fixture
def tables(tmp_path):
    """Write the same two prompts in every accepted form."""
    rows = [{"prompt": "a red circle", "key": "x"}, {"prompt": "two, blue\nstars", "key": "y"}]
    (tmp_path / "p.csv").write_text('prompt,key\na red circle,x\n"two, blue\nstars",y\n')
    (tmp_path / "p.json").write_text(json.dumps(rows))
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    (tmp_path / "p.txt").write_text("a red circle\ntwo, blue stars\n\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.txt").write_text("a red circle")
    (tmp_path / "folder" / "y.txt").write_text("two, blue\nstars")
    (tmp_path / "shards").mkdir()
    for k, row in enumerate(rows):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "shards" / f"{k}.parquet")
    return tmp_path


FORMS = ["p.csv", "p.json", "p.jsonl", "p.parquet", "p.txt", "folder", "shards"]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_reads_the_same(tables, name):
    assert texts(str(tables / name)) == ["a red circle", "two, blue stars"]


@pytest.mark.parametrize("name", ["p.csv", "p.json", "p.jsonl", "p.parquet", "folder", "shards"])
def test_ids_come_from_the_source(tables, name):
    column = {} if name == "folder" else {"id_column": "key"}
    assert [p.id for p in load_prompts(str(tables / name), column)] == ["x", "y"]


def test_ids_without_a_column_follow_the_text_not_the_place():
    a, b = load_prompts(["a red circle", "a blue star"], {})
    assert [p.id for p in load_prompts(["a blue star", "a red circle"], {})] == [b.id, a.id]


def test_plain_json_strings(tmp_path):
    (tmp_path / "p.json").write_text('["a", "b"]')
    (tmp_path / "p.jsonl").write_text('"a"\n"b\\u2028c"\n')
    assert texts(str(tmp_path / "p.json")) == ["a", "b"]
    assert texts(str(tmp_path / "p.jsonl")) == ["a", "b c"]


def test_byte_order_mark_and_windows_lines(tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufeffa red circle\r\na star\r\n".encode())
    (tmp_path / "p.csv").write_bytes("\ufeffprompt\r\na red circle\r\n".encode())
    assert texts(str(tmp_path / "p.txt")) == ["a red circle", "a star"]
    assert texts(str(tmp_path / "p.csv")) == ["a red circle"]


def test_geneval_metadata_is_carried_whole_and_never_dropped(tmp_path):
    lines = benchmark.geneval_metadata(per_kind=40)
    path = tmp_path / "evaluation_metadata.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    prompts = load_prompts(str(path), {})
    assert [p.metadata for p in prompts] == lines
    assert len({p.text for p in prompts}) < len(prompts)
    assert prompts[3].id == "00003"


@pytest.mark.skipif(not OFFICIAL.is_dir(), reason="the official files are not beside the repo")
def test_official_files():
    geneval = load_prompts(str(OFFICIAL / "geneval" / "evaluation_metadata.jsonl"), {})
    assert len(geneval) == 553
    assert geneval[0].metadata["tag"] == "single_object"
    assert len(load_prompts(str(OFFICIAL / "dpg_bench" / "prompts"), {})) == 1065


def test_the_commit_of_a_hub_data_set():
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert _commit({f"hf://datasets/a/b@{commit}/data/0.parquet": {}}) == commit
    assert _commit(None) is None
    assert _commit({"https://example.org/x": {}}) is None


# Bad input: (file name, content, words of the message)
BAD = [
    ("p.txt", b"", ["p.txt", "holds no prompts"]),
    ("p.txt", b" \n\n", ["holds no prompts", "2 empty"]),
    ("p.txt", b"a\nb\xff", ["p.txt line 2", "UTF-8"]),
    ("p.csv", b"", ["p.csv is empty", "columns"]),
    ("p.csv", b"text\na\n", ["p.csv line 1", "'prompt'", "it has text", "selection.column"]),
    ("p.csv", b"prompt,key\na\n", ["p.csv line 2", "1 cells", "header 2"]),
    ("p.csv", b'prompt\n"a\n', ["p.csv line 2"]),
    ("p.csv", b"prompt\n", ["holds no prompts"]),
    ("p.json", b"{", ["p.json line 1", "not JSON"]),
    ("p.json", b'{"prompt": "a"}', ["p.json", "must be a list"]),
    ("p.json", b"[1]", ["p.json entry 1", "neither a text"]),
    ("p.json", b"", ["p.json line 1", "not JSON"]),
    ("p.jsonl", b'"a"\n{oops\n', ["p.jsonl line 2", "not JSON"]),
    ("p.jsonl", b'{"text": "a"}', ["p.jsonl line 1", "'prompt'", "it has text"]),
    ("p.jsonl", b'{"prompt": 3}', ["p.jsonl line 1", "is 3, not a text"]),
    ("p.jsonl", b"{}", ["it has nothing"]),
    ("p.parquet", b"PAR1", ["p.parquet", "not a Parquet file"]),
    ("p.parquet", b"", ["p.parquet", "not a Parquet file"]),
    ("p.png", b"", [".png", ".txt .csv .json .jsonl .parquet"]),
    ("noending", b"", ["no ending", ".parquet"]),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD)
def test_a_bad_file_is_one_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"\A[^\n]*\Z") as error:
        load_prompts(str(tmp_path / name), {})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_parquet_with_other_content(tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'prompt' \(it has text\); set selection.column"):
        load_prompts(str(tmp_path / "a.parquet"), {})
    pq.write_table(pa.table({"prompt": ["a", None]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="row 2: 'prompt' is None, not a text"):
        load_prompts(str(tmp_path / "b.parquet"), {})
    assert texts(str(tmp_path / "a.parquet"), column="text") == ["a"]


def test_a_folder_without_prompts(tmp_path):
    with pytest.raises(ValueError, match=r"without \.txt or \.parquet"):
        load_prompts(str(tmp_path), {})


@pytest.mark.parametrize("source", ["nowhere/prompts.csv", "./nowhere", "/nowhere/at/all", "x.txt"])
def test_a_missing_path_is_named(source):
    with pytest.raises(FileNotFoundError, match=f"prompts={source} does not exist; accepted: a li"):
        load_prompts(source, {})


@pytest.mark.parametrize("source", [None, 3, "", " ", "a red circle", "shape", {"a": 1}])
def test_what_is_no_source(source):
    with pytest.raises(ValueError, match=r"a list of texts, a file .*shapes_dpg, or a hub data se"):
        load_prompts(source, {})


def test_a_list_of_something_else():
    with pytest.raises(ValueError, match=r"prompts\[1\]=3 is not a text"):
        load_prompts(["a", 3], {})
    with pytest.raises(ValueError, match="holds no prompts"):
        load_prompts([], {})


def test_an_unreachable_hub_data_set():
    with pytest.raises(ValueError, match=r"prompts=no/such is no local path, and the hub data set"):
        load_prompts("no/such", {})


def test_repeated_ids(tmp_path):
    (tmp_path / "p.csv").write_text("prompt,key\na,x\nb,x\n")
    with pytest.raises(ValueError, match="the id 'x' names two prompts"):
        load_prompts(str(tmp_path / "p.csv"), {"id_column": "key"})


# Cleaning


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("  a   red\tcircle \n", "a red circle"),
        ("a cat --ar 16:9 --v 4", "a cat"),
        ("a cat --no text, watermark --q 2", "a cat"),
        ("a cat —ar 3:2", "a cat"),
        ("a cat — in a hat", "a cat — in a hat"),
        ("a well--known cat", "a well--known cat"),
        ("cat -- dog", "cat -- dog"),
        ("https://s.mj.run/x a cat", "a cat"),
        ("<https://s.mj.run/x> <https://s.mj.run/y> a cat --v 5", "a cat"),
        ("a cat at https://example.org", "a cat at https://example.org"),
        ("--ar 16:9", ""),
        ("https://s.mj.run/x", ""),
        ("a \ud800 cat", "a ? cat"),
    ],
)
def test_cleaning(raw, expected):
    assert clean(raw) == expected


@given(st.text())
@relaxed
def test_cleaning_twice_changes_nothing(text):
    once = clean(text)
    assert clean(once) == once
    assert once == once.strip()
    assert "  " not in once


@given(st.text())
@relaxed
def test_without_flags_only_white_space_changes(text):
    printable = text.encode("utf-8", "replace").decode()
    assert clean(text, strip_flags=False).split() == printable.split()


@given(TEXTS, st.integers(1, 3), st.integers(3, 5))
@relaxed
def test_every_row_is_counted_once(rows, low, high):
    counts: Counter[str] = Counter()
    selection = Selection(min_words=low, max_words=high)
    kept = list(cleaned(map(Row, rows), selection, counts))
    assert counts["read"] == len(rows)
    assert counts["kept"] == len(kept)
    assert counts.total() == 2 * len(rows)
    assert all(low <= len(p.text.split()) <= high for p in kept)
    assert len({p.text.casefold() for p in kept}) == len(kept)


def test_word_limits_are_inclusive():
    rows = ["one", "one two", "one two three"]
    assert texts(rows, min_words=2) == rows[1:]
    assert texts(rows, max_words=2) == rows[:2]
    with pytest.raises(ValueError, match="dropped: 3 too_short"):
        load_prompts(rows, {"min_words": 4})


# Selection


@given(TEXTS, st.integers(1, 10), st.integers(0, 10), st.integers(0, 3), st.randoms())
@relaxed
def test_a_subset_does_not_depend_on_the_order(rows, limit, holdout, seed, rng):
    rows = [row for row in rows if row.strip()] + [f"prompt {n}" for n in range(12)]
    shuffled = rng.sample(rows, len(rows))
    options = {"limit": limit, "holdout": holdout, "seed": seed}
    one, two = select_prompts(rows, options), select_prompts(shuffled, options)
    assert one.prompts == two.prompts
    assert one.set_aside == two.set_aside
    assert one.fingerprint == two.fingerprint


@given(st.integers(1, 20), st.integers(0, 8), st.booleans())
@relaxed
def test_held_out_prompts_are_disjoint_and_the_same_for_every_limit(limit, holdout, limited):
    rows = [f"prompt {n}" for n in range(30)]
    whole = select_prompts(rows, {"limit": limit if limited else None, "holdout": holdout})
    assert len(whole.set_aside) == holdout
    assert not {p.text for p in whole.set_aside} & {p.text for p in whole.prompts}
    assert whole.set_aside == select_prompts(rows, {"limit": 5, "holdout": holdout}).set_aside
    if holdout:
        asked = load_prompts(rows, {"limit": limit, "holdout": holdout, "held_out": True})
        assert tuple(asked) == whole.set_aside[:limit]


def test_without_a_limit_the_order_is_the_source_s():
    rows = [f"prompt {n}" for n in random.Random(0).sample(range(50), 50)]
    assert texts(rows) == rows
    aside = select_prompts(rows, {"holdout": 5})
    left = [p.text for p in aside.prompts]
    assert left == [row for row in rows if row in left]
    assert len(left) == 45


def test_seeds_choose_differently():
    rows = [f"prompt {n}" for n in range(50)]
    assert texts(rows, limit=5, seed=0) != texts(rows, limit=5, seed=1)


def test_spellings_that_differ_in_case_are_one_prompt():
    assert texts(["A Red Circle", "a red circle"]) == ["A Red Circle"]


def test_too_few_prompts_are_a_warning_and_none_an_error(caplog):
    caplog.set_level(logging.WARNING)
    assert len(texts(["a", "b"], limit=5)) == 2
    assert "2 prompts to select, not limit=5" in caplog.text
    with pytest.raises(ValueError, match="holdout=2 sets aside all 2 prompts"):
        load_prompts(["a", "b"], {"holdout": 2})


def test_the_manifest_records_every_step(tmp_path):
    (tmp_path / "p.txt").write_text("a cat --v 4\na cat\n\nb c d e\nf g\nh i\n")
    chosen = select_prompts(str(tmp_path / "p.txt"), {"max_words": 3, "holdout": 1})
    counts = {"read": 6, "kept": 3, "duplicate": 1, "empty": 1, "too_long": 1}
    assert chosen.manifest["counts"] == {**counts, "held_out": 1, "selected": 2}
    assert chosen.manifest["source"].endswith("p.txt")
    assert len(chosen.fingerprint) == 64


def test_the_fingerprint_follows_ids_texts_and_order():
    prints = {
        select_prompts(rows, {}).fingerprint for rows in (["a", "b"], ["b", "a"], ["a"], ["a", "c"])
    }
    assert len(prints) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 0},
        {"limit": "x"},
        {"holdout": -1},
        {"holdout": None},
        {"seed": 1.5},
        {"min_words": True},
        {"max_words": 0},
        {"min_words": 3, "max_words": 2},
        {"held_out": True},
        {"limt": 3},
        {"column": None},
        {"revision": 3},
        {"strip_flags": "maybe"},
    ],
)
def test_bad_options_are_named(options):
    with pytest.raises(ValueError, match=rf"selection\.{list(options)[-1]}"):
        load_prompts(["a"], options)


# The shapes world


def test_captions_are_distinct_and_a_longer_list_begins_with_the_shorter():
    long = load_prompts("shapes", {"limit": 150, "holdout": 10})
    assert len({p.text for p in long}) == 150
    assert load_prompts("shapes", {"limit": 50, "holdout": 10}) == long[:50]
    assert load_prompts("shapes", {"limit": 50, "holdout": 10, "seed": 1}) != long[:50]


def test_captions_without_a_limit_end():
    assert len(load_prompts("shapes", {})) == 60


def test_captions_end_when_nothing_new_comes(monkeypatch):
    monkeypatch.setattr("ssd_research.prompts.sources.SHAPES_KINDS", {"single_object": 1.0})
    monkeypatch.setattr("ssd_research.prompts.sources.SHAPES_NAMED", 0.0)
    monkeypatch.setattr("ssd_research.prompts.sources.SHAPES_PATIENCE", 200)
    found = [row.text for row in shapes_captions(0)]
    assert len(found) == len(set(found))
    shapes = {text.split()[-1] for text in found}
    assert shapes == set(SHAPES)
    assert {"a circle", "a photo of a circle"} <= set(found)


def test_benchmarks_of_the_shapes_world():
    geneval = load_prompts("shapes_geneval", {"per_kind": 2})
    assert [p.id for p in geneval] == [f"{n:05d}" for n in range(12)]
    assert all({"tag", "include", "prompt"} <= set(p.metadata) for p in geneval)
    dpg = load_prompts("shapes_dpg", {"limit": 4})
    assert {p.id for p in dpg} == {f"shapes{n:04d}" for n in range(4)}


def test_a_hub_data_set_is_read_by_column(monkeypatch):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"prompt": ["a cat --v 4", "a dog"], "version": [4, 5]})
    asked = {}

    def load_dataset(name, **options):
        asked.update(options, name=name)
        return data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    chosen = select_prompts("owner/name", {"split": "validation", "revision": "v1"})
    assert [p.text for p in chosen.prompts] == ["a cat", "a dog"]
    assert asked == {"name": "owner/name", "split": "validation", "revision": "v1"}
    with pytest.raises(ValueError, match=r"owner/name has no 'text' \(it has prompt, version\)"):
        load_prompts("owner/name", {"column": "text"})
