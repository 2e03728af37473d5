"""Run folders: identity, reuse, resumption, atomic files; and the one line of a failed command."""

import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from ssd_research import runs
from ssd_research.command import out_of_memory
from ssd_research.paths import conf_dir
from ssd_research.sampling import Sampling

relaxed = settings(deadline=None, max_examples=60)  # machines under load are slow, not wrong
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def configure(folder: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(conf_dir()), version_base=None):
        return compose("config", [f"output_dir={folder}", *overrides])


@given(st.dictionaries(st.text(), JSON, max_size=4))
@relaxed
def test_run_id_ignores_the_order_of_keys(identity):
    assert runs.run_id(identity) == runs.run_id(dict(reversed(identity.items())))
    assert len(runs.run_id(identity)) == 12


@given(st.dictionaries(st.text(), JSON, max_size=3), JSON)
@relaxed
def test_run_id_changes_with_every_value(identity, value):
    changed = {**identity, "extra": value}
    if json.dumps(changed, sort_keys=True) != json.dumps(identity, sort_keys=True):
        assert runs.run_id(changed) != runs.run_id(identity)


def test_a_finished_run_is_found_and_an_unfinished_one_resumed(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cfg = configure(tmp_path)
    run = runs.open_run(cfg, "distill", {"a": 1})
    assert run.folder.parent == tmp_path / "distill" / "tiny" / "default"
    assert not run.done
    runs.open_run(cfg, "distill", {"a": 1})
    run.finish({"images": 3})
    caplog.clear()
    again = runs.open_run(cfg, "distill", {"a": 1})
    assert again.done
    assert again.folder == run.folder
    assert "reusing the finished run" in caplog.text
    assert not runs.open_run(cfg, "distill", {"a": 2}).done


def test_resuming_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cfg = configure(tmp_path)
    runs.open_run(cfg, "train", {})
    assert "writing to" in caplog.text
    runs.open_run(cfg, "train", {})
    assert "resuming" in caplog.text


def test_meta_holds_what_produced_the_run(tmp_path):
    run = runs.open_run(configure(tmp_path, "seed=7"), "train", {"a": [1, 2]})
    run.finish({"images": 3})
    meta = json.loads((run.folder / "meta.json").read_text())
    assert meta["identity"] == {"a": [1, 2]}
    assert (meta["seed"], meta["images"], meta["stage"]) == (7, 3, "train")
    assert {"python", "torch", "transformers", "ssd_research"} <= set(meta["versions"])
    assert {"command", "git_sha", "device", "seconds", "started"} <= set(meta)


def test_done_is_written_last(tmp_path, monkeypatch):
    run = runs.open_run(configure(tmp_path), "train", {})
    written = []
    monkeypatch.setattr(runs, "write_atomic", lambda path, _: written.append(path.name))
    run.finish()
    assert written == ["meta.json", "DONE"]


def test_config_is_resolved(tmp_path):
    run = runs.open_run(configure(tmp_path), "train", {})
    text = (run.folder / "config.yaml").read_text()
    assert "prompts: shapes" in text
    assert "${" not in text


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    runs.write_atomic(path, "old")

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        runs.write_atomic(path, b"new")
    assert path.read_text() == "old"


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match=r"output_dir=.*file.* cannot be written") as error:
        runs.open_run(configure(tmp_path / "file"), "train", {})
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none():
    with pytest.raises(ValueError, match="finds no CUDA device; use runtime=cpu"):
        runs.resolve_device("cuda")
    assert runs.resolve_device("auto") == "cpu"


def test_unknown_device_and_dtype():
    with pytest.raises(ValueError, match="accepted: auto, cpu, cuda"):
        runs.resolve_device("tpu")
    with pytest.raises(ValueError, match="accepted: auto, float32"):
        runs.resolve_dtype("int8", "cpu")
    assert runs.resolve_dtype("auto", "cpu") == torch.float32
    assert runs.resolve_dtype("auto", "cuda") == torch.bfloat16
    assert runs.resolve_dtype("float16", "cpu") == torch.float16


@pytest.mark.parametrize("value", ["abc", "1.5", "-1", "null", "true"])
def test_whole_numbers_are_checked_by_name(tmp_path, value):
    with pytest.raises(ValueError, match=r"seed=.* must be a whole number of at least 0"):
        runs.whole_number(configure(tmp_path, f"seed={value}"), "seed")


def test_sampling_falls_back_on_the_model(tmp_path, random_backbone):
    cfg = configure(tmp_path, "sampling.top_k=5", "sampling.temperature=0.5")
    assert runs.resolve_sampling(cfg, random_backbone) == Sampling(3.0, 0.5, 5, None)
    assert runs.resolve_sampling(configure(tmp_path), random_backbone) == random_backbone.defaults


def test_heads_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"heads.path is null; train them with python -m"):
        runs.heads_folder(configure(tmp_path, "heads.path=null"))
    with pytest.raises(ValueError, match=r"heads.path=nowhere does not exist; train"):
        runs.heads_folder(configure(tmp_path, "heads.path=nowhere"))


def finishing(cfg):
    return runs.open_run(cfg, "fake", {"seed": cfg.seed}).finish()


def raising(error):
    def run(cfg):
        raise error

    return run


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run a stage as a command line and return (exit status, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")

    def call(run, *overrides):
        monkeypatch.setattr(sys, "argv", ["stage", *overrides])
        try:
            runs.stage_main("config", run)
        except SystemExit as stop:
            return stop.code, capsys.readouterr().err
        return 0, capsys.readouterr().err

    return call


def test_a_command_writes_its_run_and_nothing_else(command, tmp_path):
    assert command(finishing, "seed=3")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    assert len(list(tmp_path.glob("outputs/fake/tiny/default/*/DONE"))) == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model=nope", ["model=nope", "accepted:", "janus_pro", "tiny"]),
        ("decoder=nope", ["decoder=nope", "accepted:", "ar", "ssd"]),
        ("experiment=nope", ["experiment=nope", "accepted:"]),
        ("selection.limt=3", ["selection.limt", "did you mean limit?", "holdout"]),
        ("sede=3", ["sede", "did you mean seed?", "batch_size"]),
        ("no/such=3", ["no/such", "accepted:"]),
        ("prompts=a,b", ["prompts=a,b", "Ambiguous"]),
        ("prompts=[a", ["[a"]),
        ("seed=abc", ["seed=abc", "whole number"]),
        ("output_dir=/dev/null", ["output_dir=/dev/null", "cannot be written"]),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(command, override, words):
    code, err = command(finishing, override)
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert all(word in err for word in words)


@pytest.mark.parametrize(
    "error", [ValueError, FileNotFoundError, PermissionError, NotADirectoryError]
)
def test_what_the_user_can_mend_is_one_line(command, error):
    code, err = command(raising(error("first\nsecond")))
    assert (code, err) == (2, "error: first; second\n")


def test_a_file_error_names_the_file(command, tmp_path):
    code, err = command(lambda cfg: (tmp_path / "gone").read_text())
    assert code == 2
    assert err == f"error: {tmp_path / 'gone'}: No such file or directory\n"


def test_a_defect_keeps_its_traceback(command):
    with pytest.raises(KeyError):
        command(raising(KeyError("defect")))


def test_an_interrupt_says_how_to_go_on(command):
    code, err = command(raising(KeyboardInterrupt()))
    assert code == 130
    assert "the same command resumes" in err


def test_one_bad_cell_does_not_stop_a_sweep(command, tmp_path):
    def run(cfg):
        if cfg.seed == 1:
            raise ValueError("seed 1 is bad")
        finishing(cfg)

    code, err = command(run, "-m", "seed=0,1,2")
    assert code == 2
    assert err.count("error: seed 1 is bad") == 1
    assert len(list(tmp_path.glob("outputs/fake/tiny/default/*/DONE"))) == 2


@pytest.mark.parametrize(
    ("stage", "overrides", "line"),
    [
        ("generate", ["batch_size=32"], "out of GPU memory with batch_size=32; lower batch_size"),
        (
            "train",
            ["train.batch_size=64"],
            "out of GPU memory with train.batch_size=64; lower train.batch_size",
        ),
        (
            "benchmark",
            ["benchmark.batch_sizes=[1,8]"],
            "out of GPU memory with benchmark.batch_sizes=[1, 8]; lower benchmark.batch_sizes",
        ),
        (
            "generate",
            ["batch_size=1"],
            "out of GPU memory with batch_size=1; one image at a time does not fit: "
            "try runtime.dtype=bfloat16, or another device",
        ),
    ],
)
def test_out_of_memory_names_the_batch_and_its_option(tmp_path, stage, overrides, line):
    cfg = configure(tmp_path, *overrides)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"), stage, cfg) == line


def test_only_a_failed_allocation_is_out_of_memory(tmp_path):
    cfg = configure(tmp_path, "batch_size=2")
    allocator = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you ...")
    found = out_of_memory(allocator, "generate", cfg)
    assert found == "out of memory with batch_size=2; lower batch_size"
    assert out_of_memory(RuntimeError("shapes do not match"), "generate", cfg) is None
