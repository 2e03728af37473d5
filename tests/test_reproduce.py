"""Tables of the paper as runs: the right cells, found by what was configured, beside the paper."""

import hashlib
import json
import os
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hydra
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict

from ssd_research import benchmark, paper, reproduce
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.grid import TokenGrid
from ssd_research.paths import conf_dir
from ssd_research.reporting import beside as reporting
from ssd_research.reporting import experiment, made_runs, overrides
from ssd_research.reporting.cells import Cell
from ssd_research.reporting.experiment import Wanted, chosen, tables, wanted
from ssd_research.reporting.overrides import composed
from ssd_research.reporting.page import Section

GRIDS = {
    "janus_pro": TokenGrid(24, 24),
    "lumina_mgpt": TokenGrid(48, 48, end_of_row=True),
    "emu3": TokenGrid(90, 90, end_of_row=True),
}


@pytest.fixture(autouse=True)
def hydra_context() -> Iterator[None]:
    """Compose as a command does, and forget its overrides afterwards."""
    with initialize_config_dir(str(conf_dir()), version_base=None):
        yield
    HydraConfig.instance().cfg = None


def command(*overrides: str) -> DictConfig:
    """Return the configuration of a command line, as Hydra hands it to a stage."""
    cfg = compose("config", overrides=list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def cells(*overrides: str) -> list[Wanted]:
    cfg, given = chosen(command(*overrides))
    return wanted(cfg, given)


def at_paper_scale() -> list[tuple[str, Wanted]]:
    with initialize_config_dir(str(conf_dir()), version_base=None):
        return [
            (name, cell)
            for name in tables()
            for given in [[f"experiment={name}", "scale=paper"]]
            for cell in wanted(composed(given), given)
        ]


def of_every_suite() -> list[str]:
    """Return one table for each suite, and every table whose cells train heads of their own."""
    with initialize_config_dir(str(conf_dir()), version_base=None):
        found = {name: composed([f"experiment={name}"]).table for name in tables()}
    return sorted({str(t.get("train", t.suite)): name for name, t in found.items()}.values())


PAPER_CELLS = at_paper_scale()
FOR_ALL_SUITES = of_every_suite()


@cache
def of_model(model: str) -> DictConfig:
    return compose("config", overrides=[f"model={model}"])


def test_every_table_but_the_settings_has_its_config() -> None:
    names = {f"table{n}" for n in paper.TABLES} - {"table6"}
    assert set(tables()) == names | {"figure1"}


@pytest.mark.parametrize("name", [n for n in tables() if n not in ("figure1", "table11")])
def test_every_row_of_the_paper_has_its_cell(name: str) -> None:
    number = int(name.removeprefix("table"))
    printed = [row for row in paper.table(number) if {"method", "accept", "v"} & set(row)]
    seeds = 5 if number == 9 else 1
    rows = [c.printed for n, c in PAPER_CELLS if n == name and c.printed]
    assert sorted(map(str, rows)) == sorted(map(str, printed * seeds)) or number in (5, 18, 19)


def test_numbers_that_the_paper_prints_otherwise_stand_beside_their_cells() -> None:
    assert [c.printed for n, c in PAPER_CELLS if n == "table11"] == [
        {},
        {"location": 0.7, "scale": 25},
    ]
    ar, ssd = [c.printed for n, c in PAPER_CELLS if n == "table18" and c.model == "emu3"]
    assert (ar["dpg"], ssd["dpg"], ssd["latency_acceleration"]) == (78.69, 76.03, 11.03)


@pytest.mark.parametrize(
    ("name", "cell"), [(n, c) for n, c in PAPER_CELLS if "method" in c.printed or "v" in c.printed]
)
def test_a_cell_is_decoded_as_its_row_says(name: str, cell: Wanted) -> None:
    row, cfg = cell.printed, benchmark.configured(of_model(cell.model), cell.decoder)
    assert cell.model == row.get("model", cell.original)
    assert cfg.decoder.name == row.get("method", "ssd")
    decoder = hydra.utils.instantiate(cfg.decoder, _convert_="all")
    grid = GRIDS[cell.original]
    if isinstance(decoder, SpatiallySpeculative):
        settings = decoder.settings(grid)
        for key in {"v", "b", "i", "accept"} & set(row):
            assert settings[key] == row[key]
        if row.get("steps"):
            assert decoder.schedule(grid).nfe() == row["steps"]
    if row.get("w") is not None:
        assert decoder.window == row["w"]


@pytest.mark.parametrize(("name", "cell"), dict(PAPER_CELLS).items())
def test_the_command_of_a_cell_makes_it(name: str, cell: Wanted) -> None:
    words = shlex.split(cell.command)
    assert words[:3] == ["python", "-m", "ssd_research.generate"]
    assert tuple(words[3:]) == overrides.last_of_each(cell.overrides)
    assert len(set(map(overrides.key_of, words))) == len(words)  # Hydra takes no option twice
    assert {f"experiment={name}", f"model={cell.model}"} < set(words)


@pytest.mark.parametrize("folder", ["a b, c=(1)", "it's", 'x"y\\', "${HOME}"])
def test_paths_of_any_characters_reach_the_stages(folder: str) -> None:
    assert composed([overrides.quoted("train.data", folder.replace("$", ""))]).train.data == (
        folder.replace("$", "")
    )
    line = overrides.command("generate", [f"output_dir={folder}"])
    assert shlex.split(line)[3] == f"output_dir={folder}"


def test_tables_of_one_suite_share_their_cells() -> None:
    first = {n: c for n, c in reversed(PAPER_CELLS) if c.model == "janus_pro"}
    four, eighteen = first["table4"].config(), first["table18"].config()
    assert four.name == eighteen.name == "dpg"
    assert made_runs.result_settings(four) == made_runs.result_settings(eighteen)
    default, named = (
        next(c for n, c in PAPER_CELLS if n == table and c.decoder == decoder)
        for table, decoder in (("table18", "ssd"), ("table4", "ssd r=2"))
    )
    assert made_runs.result_settings(default.config()) == made_runs.result_settings(named.config())


def test_each_backbone_takes_its_own_heads() -> None:
    found = {c.model: c.config().heads.path for n, c in PAPER_CELLS if n == "table2"}
    assert found == {model: f"outputs/train/{model}/paper" for model in GRIDS}


@pytest.mark.parametrize("scale", ["tiny", "paper"])
@pytest.mark.parametrize("name", FOR_ALL_SUITES)
def test_whatever_a_table_runs_composes(name: str, scale: str) -> None:
    cfg, given = chosen(command(f"experiment={name}", f"scale={scale}"))
    suite = experiment.suite(cfg)
    shared = experiment.common(cfg, given, model=next(iter(experiment.models(cfg, given))))
    lists = [*suite.get("scores", []), *suite.get("once", []), *suite.get("against_ar", [])]
    lists += [suite.get("distill", []), *cfg.table.get("train", [])]
    for options in lists:
        found = composed([*shared, *options])
        assert OmegaConf.to_container(found, resolve=True, throw_on_missing=True)


def test_the_tiny_model_stands_in_for_the_first_backbone() -> None:
    found = cells("experiment=table7", "scale=tiny")
    assert {(c.model, c.original) for c in found} == {("tiny", "janus_pro")}
    assert found[1].decoder == "zipar window=8"
    assert found[1].printed["w"] == 8


def test_seeds_make_cells_of_their_own() -> None:
    found = cells("experiment=table9", "scale=tiny")
    assert [(c.decoder, c.config().seed) for c in found[:3]] == [
        ("ar", 0),
        ("ssd r=2", 0),
        ("ar", 1),
    ]
    assert len(found) == 10


def test_options_of_the_command_line_hold_for_every_cell() -> None:
    found = cells("experiment=table4", "scale=tiny", "selection.limit=3", "report.images=1")
    assert {c.config().selection.limit for c in found} == {3}
    assert "report.images" not in found[0].command


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=tiny"], "experiment= must name a table; accepted: table1, "),
        (["experiment=decoders"], "experiment= must name a table"),
        (["experiment=table4", "decoder=ar"], "decoder= does nothing here"),
        (
            ["experiment=table4", "decoder.end_of_row=folded"],
            r"decoder\.end_of_row= does nothing here",
        ),
        (["experiment=table5", "train.share=0.5"], r"train\.share= does nothing here"),
        (["experiment=table5", "train.data=elsewhere"], r"train\.data= does nothing here"),
        (["experiment=table5", "heads.path=elsewhere"], r"heads\.path= does nothing here"),
        (["experiment=table19", "heads.target=e"], r"heads\.target= does nothing here"),
        (["experiment=table4", "scale=tiny", "model=emu3"], "accepted: tiny"),
        (["experiment=table4", "scale=paper", "model=tiny"], "accepted: janus_pro"),
        (["experiment=table9", "seed=3"], "seed= does nothing here: the cells of table9"),
        (["experiment=table4", "benchmark.decoders=[ar]"], "benchmark.decoders= does nothing"),
        (["experiment=table4", "report.generate=[x]"], "report.generate= does nothing here"),
        (["experiment=table4", "train.lr=1"], "table4 has no use for it"),
        (["experiment=table4", "study.pairs=3"], "table4 has no use for it"),
        (["experiment=table3", "benchmark.repeats=3"], "table3 has no use for it"),
        # Another number of training prompts would make those set aside others.
        (["experiment=table4", "report.readme=true"], r"report\.readme= does nothing here"),
        (["experiment=table14", "selection.seed=3"], "selection.seed= does nothing here"),
    ],
)
def test_an_option_that_would_be_lost_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(command(*overrides))


def finished(cell: Wanted, run: str, *, heads: str | None = None, **changes) -> Path:
    """Write what `find` looks at of a finished generate run, drafted with heads of this digest."""
    cfg = cell.config()
    place = Path(cfg.output_dir) / "generate" / cell.model / cfg.name / run
    place.mkdir(parents=True)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    (place / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    identity = {"heads": heads, "device": "cpu", "dtype": "float32"}
    (place / "meta.json").write_text(json.dumps({"identity": identity}))
    (place / "DONE").touch()
    return place


def test_a_run_is_found_by_what_changes_its_images(tmp_path: Path) -> None:
    one, two = cells("experiment=table4", "scale=tiny", f"output_dir={tmp_path}")[1:3]
    assert one.find() is None
    place = finished(one, "a", batch_size=3, runtime__threads=1)
    assert (one.find(), two.find()) == (place, None)
    (place / "DONE").unlink()
    assert one.find() is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1),
        ("decoder__k_h", 4),
        ("decoder__accept", "sample"),
        ("sampling__top_k", 5),
        ("selection__limit", 59),
        ("images_per_prompt", 2),
        ("model__backbone__path", "elsewhere"),
        ("prompts", "shapes"),
    ],
)
def test_a_run_with_another_option_is_another_cell(tmp_path: Path, key: str, value) -> None:
    cell = cells("experiment=table4", "scale=tiny", f"output_dir={tmp_path}")[1]
    finished(cell, "a", **{key: value})
    assert cell.find() is None


def test_images_are_as_old_as_the_heads_they_were_drafted_with(tmp_path: Path) -> None:
    """Heads count by content: trained anew at one path they are others, moved they are the same."""
    heads = tmp_path / "new" / "heads.safetensors"
    heads.parent.mkdir()
    options = ("experiment=table4", "scale=tiny", f"output_dir={tmp_path}")
    ar, ssd = cells(*options, f"heads.path={heads.parent}")[:2]
    old, new = (hashlib.sha256(content).hexdigest() for content in (b"old", b"new"))
    made = [
        finished(ar, "ar", heads__path="elsewhere"),
        finished(ssd, "old", heads=old),
        finished(ssd, "new", heads=new, heads__path="elsewhere"),
    ]
    assert (ar.find(), ssd.find()) == (made[0], made[1])  # where no heads are, by path
    heads.write_bytes(b"new")
    assert (ar.find(), ssd.find()) == (made[0], made[2])
    heads.write_bytes(b"newest")
    assert (ar.find(), ssd.find()) == (made[0], None)


def test_a_named_precision_is_that_of_the_run(tmp_path: Path) -> None:
    options = ("experiment=table4", "scale=tiny", f"output_dir={tmp_path}")
    place = finished(cells(*options)[0], "a")
    assert cells(*options, "runtime.dtype=float32")[0].find() == place
    assert cells(*options, "runtime.dtype=bfloat16")[0].find() is None


class Notes:
    """The stages, which only note the configurations they are called with, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, DictConfig]] = []
        for stage in ("distill", "train", "generate", "evaluate", "benchmark", "report"):
            monkeypatch.setattr(getattr(reproduce, stage), "run", self.noting(stage))
        monkeypatch.setattr(reproduce.study, "build", self.noting("study"))

    def noting(self, stage: str):
        def run(cfg: DictConfig) -> Path:
            self.calls.append((stage, cfg))
            return Path(f"the {stage} run of {cfg.decoder.name}")

        return run

    def of(self, stage: str) -> list[DictConfig]:
        return [cfg for name, cfg in self.calls if name == stage]

    @property
    def stages(self) -> list[str]:
        return [stage for stage, _ in self.calls]


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    return Notes(monkeypatch)


def test_every_cell_is_generated_and_scored(notes: Notes) -> None:
    reproduce.run(command("experiment=table18", "scale=tiny", "benchmark.repeats=2"))
    one = ["generate", "evaluate", "evaluate"]
    assert notes.stages == [*one, *one, "benchmark", "report"]
    assert [cfg.decoder.name for cfg in notes.of("generate")] == ["ar", "ssd"]
    assert [(cfg.eval.name, cfg.evaluate.images) for cfg in notes.of("evaluate")] == [
        (name, f"the generate run of {decoder}")
        for decoder in ("ar", "ssd")
        for name in ("shapes_dpg", "likelihood")
    ]
    (timed,) = notes.of("benchmark")
    assert (timed.name, timed.benchmark.repeats) == ("table18", 2)
    assert list(timed.benchmark.decoders) == ["ar", "ssd"]


def test_what_compares_with_ar_is_told_which_run_it_is(notes: Notes) -> None:
    reproduce.run(command("experiment=table11", "scale=tiny"))
    assert notes.stages == ["generate", "generate", "evaluate", "report"]
    assert notes.of("evaluate")[0].eval.baseline == "the generate run of ar"


def test_a_table_may_need_no_images(notes: Notes) -> None:
    reproduce.run(command("experiment=table13", "scale=tiny", "++eval.repeats=3"))
    assert notes.stages == ["evaluate", "report"]
    assert notes.of("evaluate")[0].eval.repeats == 3


def test_people_are_asked_about_the_two_cells(notes: Notes, capsys) -> None:
    reproduce.run(command("experiment=table10", "scale=tiny"))
    assert notes.stages == ["generate", "generate", "benchmark", "study", "report"]
    (asked,) = notes.of("study")
    assert (asked.study.a, asked.study.b) == ("the generate run of ar", "the generate run of ssd")
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("python -m"))
    words = shlex.split(line)
    assert words[2:4] == ["ssd_research.study", "analyse"]
    assert composed(words[4:]).study.key.endswith("key.json")


def test_heads_are_trained_for_the_cells_that_have_their_own(notes: Notes) -> None:
    """On their own images: options of the table's images are none of training."""
    reproduce.run(command("experiment=table5", "scale=tiny", "selection.limit=3", "batch_size=2"))
    (distilled,) = notes.of("distill")
    assert (distilled.distill.limit, distilled.selection.limit) == (1024, None)
    assert distilled.batch_size == 16
    trained = notes.of("train")
    assert [cfg.name for cfg in trained] == [f"table5_{n}" for n in range(5)]
    assert [cfg.train.share for cfg in trained] == [0.08333, 0.16667, 0.33333, 0.5, 1.0]
    assert {cfg.train.data for cfg in trained} == {"the distill run of ar"}
    generated = notes.of("generate")
    assert [cfg.heads.path for cfg in generated] == [
        f"outputs/train/tiny/table5_{n}" for n in range(5)
    ]
    assert {(cfg.selection.limit, cfg.batch_size) for cfg in generated} == {(3, 2)}


def test_what_is_missing_shows_before_hours_of_work(notes: Notes, tmp_path: Path) -> None:
    """All of it at once, for every backbone."""
    with pytest.raises(ValueError, match="holds no draft heads of janus_pro") as error:
        reproduce.run(command("experiment=table2", "scale=paper", f"output_dir={tmp_path}"))
    text = str(error.value)
    for model in GRIDS:
        assert f"heads.path={tmp_path}/train/{model}/paper holds no draft heads of {model}" in text
        assert f"ssd_research.train model={model} name=paper" in text
    line = "evaluation_metadata.jsonl does not exist; name yours with scale.files.geneval="
    assert text.count(line) == 1
    assert notes.calls == []


def test_an_option_that_no_evaluation_has_shows_before_the_work(notes: Notes) -> None:
    with pytest.raises(ConfigCompositionException, match="per_kind"):
        reproduce.run(command("experiment=table2", "scale=tiny", "eval.per_kind=3"))
    assert notes.calls == []


def test_heads_of_table_19_read_and_predict_what_their_rows_say(monkeypatch) -> None:
    """Both in training and in decoding, where they are checked against the files."""
    calls: list[tuple] = []
    for stage in ("distill", "train", "generate", "evaluate", "report"):

        def run(cfg: DictConfig, stage: str = stage) -> Path:
            calls.append((stage, cfg.heads.input, cfg.heads.target))
            return Path(f"the {stage} run")

        monkeypatch.setattr(getattr(reproduce, stage), "run", run)
    reproduce.run(command("experiment=table19", "scale=tiny"))
    printed = [(row["input"], row["target"]) for row in paper.table(19)]
    assert len(printed) == 5
    for stage in ("train", "generate"):
        assert [call[1:] for call in calls if call[0] == stage] == printed
    found = cells("experiment=table19", "scale=paper")
    assert [c.printed["dpg"] for c in found] == [5.52, 69.07, 45.26, 71.65, 41.57]
    assert {c.config().decoder.r for c in found} == {0}
    assert len({c.config().heads.path for c in found}) == 5


def test_a_run_from_before_heads_had_an_input_is_found(tmp_path: Path) -> None:
    cell = cells("experiment=table4", "scale=tiny", f"output_dir={tmp_path}")[1]
    place = finished(cell, "a")
    cfg = OmegaConf.load(place / "config.yaml")
    del cfg.heads["input"], cfg.heads["target"]
    (place / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    assert cell.find() == place


def test_commands_are_listed_and_nothing_is_run(capsys) -> None:
    assert reproduce.run(command("experiment=table4", "reproduce.commands=true")) is None
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("python -m ssd_research.generate ") for line in lines)


LAW = {"backbone": "abc", "sampling": {"guidance": 2.0}, "dtype": "float32"}


def made(cell: Wanted, run: str) -> Cell:
    """Return a finished cell of which only the folder, the decoder and the law are read."""
    return Cell(Path(run), cell.config(), {"identity": LAW}, [], {})


def timed(folder: Path, run: str, *decoders: str, **identity) -> Path:
    """Write a finished benchmark run in which every decoder takes half the first one's seconds."""
    place = folder / run
    place.mkdir(parents=True)
    shared = {"device": "cpu", "seconds_total": [1, 1, 1]}
    rows = [
        {
            **shared,
            "decoder": decoder,
            "batch_size": size,
            "seconds_per_image": 1.0 / (1 + bool(n)) / size,
            "speedup": 1.0 + bool(n),
        }
        for size in (1, 8)
        for n, decoder in enumerate(decoders)
    ]
    (place / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "meta.json").write_text(json.dumps({"identity": {**LAW, **identity}}))
    (place / "DONE").touch()
    return place


def test_seconds_are_of_the_newest_benchmark_of_these_decoders_and_this_law(tmp_path: Path) -> None:
    ar, zero = (
        made(c, run)
        for c, run in zip(cells("experiment=table4", "scale=tiny")[:2], "ab", strict=True)
    )
    right = timed(tmp_path, "right", "AR", "SSD r=0")
    for n, (run, decoders, identity) in enumerate(
        [
            ("fewer", ["AR"], {}),
            ("law", ["AR", "SSD r=0"], {"sampling": {"guidance": 3.0}}),
            ("backbone", ["AR", "SSD r=0"], {"backbone": "other"}),
            ("dtype", ["AR", "SSD r=0"], {"dtype": "bfloat16"}),
        ]
    ):
        done = timed(tmp_path, run, *decoders, **identity) / "DONE"
        os.utime(done, (2e9 + n, 2e9 + n))
    found = reporting.read_timing(tmp_path, [ar, zero])
    assert found.where == "cpu, float32, batch 1, median of 3 interleaved repeats"
    assert found.rows["SSD r=0"]["speedup"] == 2.0
    (right / "DONE").unlink()
    assert reporting.read_timing(tmp_path, [ar, zero]) is None


def test_measured_and_printed_numbers_stand_side_by_side(tmp_path: Path) -> None:
    ar, zero, one, _ = cells("experiment=table4", "scale=tiny")
    found = {ar: made(ar, "a"), zero: made(zero, "b"), one: None}
    rows = {
        "a": {"decoder": "AR", "steps": 144, "seconds_per_image": 9.0},
        "b": {"decoder": "SSD r=0", "steps": 18, "seconds_per_image": 9.0},
    }
    timed(tmp_path, "c", "AR", "SSD r=0")
    timing = reporting.read_timing(tmp_path, [found[ar], found[zero]])
    printed = reporting.beside(found, rows, timing, {"b": {"win_rate": 40.0}})
    assert [row["decoder"] for row in printed] == ["AR", "SSD r=0", "ssd r=1 (missing)"]
    assert [row.get("speedup") for row in printed] == [1.0, 2.0, None]
    assert [row.get("win_rate") for row in printed] == [None, 40.0, None]
    assert [row["paper_speedup"] for row in printed] == [1.0, 12.5, 7.6]
    # Seconds of generate runs, made one after another, do not stand in for a benchmark's.
    assert reporting.beside(found, rows, None, {})[0]["seconds_per_image"] is None
    shown = reporting.columns(list(found))
    assert [column.key for column in shown][:4] == [
        "steps",
        "paper_steps",
        "step_acceleration",
        "paper_step_acceleration",
    ]
    latency = next(column for column in shown if column.key == "paper_seconds_per_image")
    assert latency.number(7.87) == "7.87"  # with the paper's decimals


def test_cells_that_do_not_compare_or_lack_scores_are_named() -> None:
    cfg, given = chosen(command("experiment=table4", "scale=tiny"))
    ar, zero, one, _ = wanted(cfg, given)
    found = {ar: made(ar, "a"), zero: made(zero, "b"), one: None}
    rows = [{"generate_run": "a", "decoder": "AR", "steps": 144}]
    group = Section("AR alone", [found[ar]], rows, [], [], [], [], 0, [])
    shown = reporting.with_paper(cfg, group, found, timing=None, people={})
    assert [row["decoder"] for row in shown.tables[0].rows] == [
        "AR",
        "ssd r=0 (missing)",
        "ssd r=1 (missing)",
    ]
    assert [text[:11] for text in shown.warnings] == ["SSD r=0 (b)"]
    notes = reporting.unscored(cfg, found)
    assert len(notes) == 4
    assert "eval=likelihood evaluate.images=b" in notes[3]


def test_win_rates_are_those_of_the_newest_analysis_of_these_runs(tmp_path: Path) -> None:
    ar, ssd = (
        made(c, run) for c, run in zip(cells("experiment=table10", "scale=tiny"), "ab", strict=True)
    )
    for n, (runs, rate) in enumerate([("ab", 0.5), ("ba", 0.625), ("xb", 0.9)]):
        place = tmp_path / "study_analysis" / "tiny" / "people" / str(n)
        place.mkdir(parents=True)
        scores = {
            "generate": {side: f"/elsewhere/{run}" for side, run in zip("ab", runs, strict=True)},
            "win_rate": {"a": rate, "b": 1 - rate},
            "sd": 0.07,
        }
        (place / "scores.json").write_text(json.dumps(scores))
        (place / "DONE").touch()
        os.utime(place / "DONE", (2e9 + n, 2e9 + n))
    found = reporting.read_preference(tmp_path, [ar, ssd])
    assert {run: row["win_rate"] for run, row in found.items()} == {"b": 62.5, "a": 37.5}
    assert found["a"]["win_rate_sd"] == pytest.approx(7)
    assert reporting.read_preference(tmp_path, [ar]) == {}
