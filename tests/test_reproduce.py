"""Tables of the paper as runs: the right cells, found by what was configured, beside the paper."""

import json
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hydra
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from ssd_research import benchmark, paper, reproduce
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.grid import TokenGrid
from ssd_research.paths import conf_dir
from ssd_research.reporting import beside as reporting
from ssd_research.reporting import experiment
from ssd_research.reporting.cells import Cell
from ssd_research.reporting.experiment import Wanted, chosen, composed, tables, wanted

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
        found = [(name, c) for name in tables() for c in cells(f"experiment={name}", "scale=paper")]
    HydraConfig.instance().cfg = None
    return found


PAPER_CELLS = at_paper_scale()


@cache
def of_model(model: str) -> DictConfig:
    return compose("config", overrides=[f"model={model}"])


def test_every_table_of_methods_has_its_config() -> None:
    """All tables of decoders but 6 (settings), 10 (people), 12 (memory) and 19 (other heads)."""
    names = {f"table{n}" for n in paper.TABLES} - {f"table{n}" for n in (6, 10, 12, 19)}
    assert set(tables()) == names | {"figure1"}


@pytest.mark.parametrize("name", [n for n in tables() if n not in ("figure1", "table11")])
def test_every_row_of_the_paper_has_its_cell(name: str) -> None:
    number = int(name.removeprefix("table"))
    printed = [row for row in paper.table(number) if {"method", "accept", "v"} & set(row)]
    seeds = 5 if number == 9 else 1
    rows = [c.printed for n, c in PAPER_CELLS if n == name and c.printed]
    assert sorted(map(str, rows)) == sorted(map(str, printed * seeds)) or number in (5, 18)


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
    cfg = compose("config", overrides=words[3:])
    assert experiment.result_settings(cfg) == experiment.result_settings(cell.config())
    assert cfg.name == name


def test_each_backbone_takes_its_own_heads() -> None:
    found = {c.model: c.config().heads.path for n, c in PAPER_CELLS if n == "table2"}
    assert found == {model: f"outputs/train/{model}/paper" for model in GRIDS}


@pytest.mark.parametrize("scale", ["tiny", "paper"])
@pytest.mark.parametrize("name", tables())
def test_whatever_a_table_runs_composes(name: str, scale: str) -> None:
    cfg, given = chosen(command(f"experiment={name}", f"scale={scale}"))
    suite = experiment.suite(cfg)
    for model in experiment.models(cfg, given):
        shared = experiment.common(cfg, given, model=model)
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
        (["experiment=table4", "scale=tiny", "model=emu3"], "accepted: tiny"),
        (["experiment=table4", "scale=paper", "model=tiny"], "accepted: janus_pro"),
    ],
)
def test_what_the_table_says_itself_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(command(*overrides))


def finished(cell: Wanted, run: str, **changes) -> Path:
    """Write what `find` looks at of a finished generate run."""
    cfg = cell.config()
    place = Path(cfg.output_dir) / "generate" / cell.model / cfg.name / run
    place.mkdir(parents=True)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    (place / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
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
        ("heads__path", "elsewhere"),
        ("prompts", "shapes"),
    ],
)
def test_a_run_with_another_option_is_another_cell(tmp_path: Path, key: str, value) -> None:
    cell = cells("experiment=table4", "scale=tiny", f"output_dir={tmp_path}")[1]
    finished(cell, "a", **{key: value})
    assert cell.find() is None


def test_every_cell_is_generated_and_scored(tmp_path: Path, monkeypatch) -> None:
    """The stages get the right configurations in order: here they only note them."""
    calls: list[str] = []

    def note(stage: str):
        def run(cfg: DictConfig) -> Path:
            calls.append(
                {
                    "generate": lambda: f"generate {cfg.decoder.name} {cfg.seed}",
                    "evaluate": lambda: f"evaluate {cfg.eval.name} {cfg.evaluate.images}",
                    "benchmark": lambda: f"benchmark {list(cfg.benchmark.decoders)}",
                    "report": lambda: "report",
                }[stage]()
            )
            return Path(f"run of {cfg.decoder.name}")

        return run

    for stage in ("generate", "evaluate", "benchmark", "report"):
        monkeypatch.setattr(getattr(reproduce, stage), "run", note(stage))
    reproduce.run(command("experiment=table18", "scale=tiny"))
    assert calls == [
        "generate ar 0",
        "evaluate shapes_dpg run of ar",
        "evaluate likelihood run of ar",
        "generate ssd 0",
        "evaluate shapes_dpg run of ssd",
        "evaluate likelihood run of ssd",
        "benchmark ['ar', 'ssd']",
        "report",
    ]
    calls.clear()
    reproduce.run(command("experiment=table11", "scale=tiny"))
    assert calls == ["generate ar 0", "generate ssd 0", "evaluate deviation run of ssd", "report"]
    calls.clear()
    reproduce.run(command("experiment=table13", "scale=tiny"))
    assert calls == ["evaluate cost None", "report"]


def test_heads_are_trained_for_the_cells_that_have_their_own(monkeypatch) -> None:
    calls: list[tuple] = []
    for stage in ("distill", "train", "generate", "evaluate", "report"):

        def run(cfg: DictConfig, stage: str = stage) -> Path:
            calls.append((stage, str(cfg.name), cfg.train.share, cfg.train.data, cfg.heads.path))
            return Path(f"the {stage} run")

        monkeypatch.setattr(getattr(reproduce, stage), "run", run)
    reproduce.run(command("experiment=table5", "scale=tiny"))
    assert [c[0] for c in calls].count("distill") == 1
    trained = [c for c in calls if c[0] == "train"]
    assert [c[1] for c in trained] == [f"table5_{n}" for n in range(5)]
    assert [c[2] for c in trained] == [0.08333, 0.16667, 0.33333, 0.5, 1.0]
    assert {c[3] for c in trained} == {"the distill run"}
    generated = [c[4] for c in calls if c[0] == "generate"]
    assert generated == [f"outputs/train/tiny/table5_{n}" for n in range(5)]


def test_commands_are_listed_and_nothing_is_run(capsys) -> None:
    assert reproduce.run(command("experiment=table4", "reproduce.commands=true")) is None
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("python -m ssd_research.generate ") for line in lines)


def made(cell: Wanted, run: str) -> Cell:
    """Return a finished cell of which only the folder and the decoder are read."""
    return Cell(Path(run), cell.config(), {"identity": {}}, [], {})


def test_measured_and_printed_numbers_stand_side_by_side(tmp_path: Path) -> None:
    ar, zero, one, _ = cells("experiment=table4", "scale=tiny")
    rows = [
        {"generate_run": "a", "decoder": "AR", "steps": 144, "seconds_per_image": 9.0},
        {"generate_run": "b", "decoder": "SSD r=0", "steps": 18, "seconds_per_image": 9.0},
    ]
    place = tmp_path / "benchmark" / "tiny" / "table4" / "c"
    place.mkdir(parents=True)
    timed = {"device": "cpu", "batch_size": 1, "seconds_total": [1, 1, 1]}
    lines = [
        {**timed, "decoder": "AR", "seconds_per_image": 2.0, "speedup": 1.0},
        {**timed, "decoder": "SSD r=0", "seconds_per_image": 0.5, "speedup": 4.0},
        {**timed, "decoder": "SSD r=0", "batch_size": 8, "speedup": 1.5},
    ]
    (place / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert reporting.read_timing(tmp_path, "tiny", "table4") is None
    (place / "DONE").touch()
    timing = reporting.read_timing(tmp_path, "tiny", "table4")
    assert timing.where == "cpu, batch 1, median of 3 interleaved repeats"
    found = {ar: made(ar, "a"), zero: made(zero, "b"), one: None}
    printed = reporting.beside(found, rows, timing)
    assert [row["decoder"] for row in printed] == ["AR", "SSD r=0", "ssd r=1 (missing)"]
    assert [row.get("speedup") for row in printed] == [1.0, 4.0, None]
    assert [row["paper_latency_acceleration"] for row in printed] == [1.0, 12.5, 7.6]
    shown = [column.key for column in reporting.columns(list(found))]
    assert shown[:4] == ["steps", "paper_steps", "step_acceleration", "paper_step_acceleration"]
    assert "fid" not in shown
