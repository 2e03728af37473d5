"""The train stage: what it leaves behind, how it resumes, and on how many processes."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from safetensors.torch import load_file

from analytic import distilled
from ssd_research import train
from ssd_research.paths import conf_dir


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distilled(tmp_path_factory.mktemp("distill") / "run", images=44, size=36, codes=32)


def overrides(out: Path, data: Path | None, checkpoint: str, *more: str) -> list[str]:
    return [
        "model=tiny",
        f"model.backbone.path={checkpoint}",
        f"output_dir={out}",
        f"train.data={data or 'null'}",
        "train.batch_size=8",
        "train.warmup_steps=2",
        "train.lr=3e-3",
        "heads.horizontal=2",
        "heads.vertical=2",
        "runtime=cpu",
        *more,
    ]


def config(*options: str) -> DictConfig:
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(options))


def metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as lines:
        return list(csv.DictReader(lines))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path, random_checkpoint: str) -> Path:
    out = tmp_path_factory.mktemp("straight")
    return train.run(config(*overrides(out, data, random_checkpoint)))


def test_the_stage_leaves_heads_metrics_and_done(finished: Path):
    assert {"heads", "metrics.csv", "meta.json", "DONE", "config.yaml", "checkpoints"} <= {
        p.name for p in finished.iterdir()
    }
    rows = metrics(finished)
    assert [int(r["step"]) for r in rows] == list(range(15))  # 3 epochs of 40 // 8
    losses = [float(r["train/loss"]) for r in rows]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    validation = [float(r["val/loss"]) for r in rows if r["val/loss"]]
    assert len(validation) == 3
    assert validation == sorted(validation, reverse=True)
    record = json.loads((finished / "heads" / "heads.json").read_text())
    assert record["training"]["effective_batch"] == 8
    assert 0 <= record["validation"]["val/vertical_1/code_agreement"] <= 1
    checkpoint = torch.load(finished / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(name.startswith("heads.") for name in checkpoint["state_dict"])


def test_a_finished_run_is_reused(finished: Path, data: Path, random_checkpoint: str):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    out = finished.parents[3]
    again = train.run(config(*overrides(out, data, random_checkpoint)))
    assert again == finished
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*")} == before


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("place", "killed_at"),
    [("batch", 2), ("batch", 6), ("validation", 5), ("validation", 15), ("end", 15)],
)
def test_a_killed_run_resumes_without_repeating_or_skipping(
    place: str,
    killed_at: int,
    tmp_path: Path,
    data: Path,
    random_checkpoint: str,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    options = overrides(tmp_path, data, random_checkpoint, "train.checkpoint_every=1")
    callbacks = train._callbacks

    class Kill(L.Callback):
        """Runs before the checkpoint is written, so that the work since the last one is lost."""

        def stop(self, trainer: L.Trainer, here: str) -> None:
            if (here, trainer.global_step) == (place, killed_at):
                raise Killed

        def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
            self.stop(trainer, "batch")

        def on_validation_start(self, trainer: L.Trainer, *args: object) -> None:
            self.stop(trainer, "validation")

        def on_fit_end(self, trainer: L.Trainer, *args: object) -> None:
            self.stop(trainer, "end")

    monkeypatch.setattr(train, "_callbacks", lambda *args: [Kill(), *callbacks(*args)])
    with pytest.raises(Killed):
        train.run(config(*options))
    monkeypatch.setattr(train, "_callbacks", callbacks)
    resumed = train.run(config(*options))
    assert resumed.name == finished.name
    assert metrics(resumed) == metrics(finished)
    mine, straight = (load_file(run / "heads" / "heads.safetensors") for run in (resumed, finished))
    assert all(torch.equal(mine[name], straight[name]) for name in straight)
    record, other = (
        json.loads((run / "heads" / "heads.json").read_text()) for run in (resumed, finished)
    )
    assert record["validation"] == other["validation"]


def test_the_newest_distill_run_is_the_default(tmp_path: Path, random_checkpoint: str):
    options = overrides(tmp_path, None, random_checkpoint)
    with pytest.raises(ValueError, match=r"no finished distill run.*distill model=tiny"):
        train.run(config(*options))
    root = tmp_path / "distill" / "tiny" / "default"
    for n, name in enumerate(("old", "new")):
        distilled(root / name, images=10, size=36, codes=32)
        os.utime(root / name / "DONE", (n, n))
    assert train._data_folder(config(*options)) == root / "new"


def test_too_few_images_name_the_option(tmp_path: Path, data: Path, random_checkpoint: str):
    options = overrides(tmp_path, data, random_checkpoint, "train.batch_size=64")
    with pytest.raises(ValueError, match=r"40 training images are fewer than .*train\.batch_size"):
        train.run(config(*options))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("train.epochs=0", r"train\.epochs=0 must be a whole number of at least 1"),
        ("train.checkpoint_every=0", r"train\.checkpoint_every=0"),
        ("train.storage_dtype=int8", r"train\.storage_dtype=int8; accepted: float32, bfloat16"),
        ("trainer=gpu", r"no CUDA device; use trainer=cpu"),
    ],
)
def test_a_wrong_option_is_named_at_once(
    option: str, message: str, tmp_path: Path, data: Path, random_checkpoint: str
):
    if option == "trainer=gpu" and torch.cuda.is_available():
        pytest.skip("a CUDA device is present")
    with pytest.raises(ValueError, match=message):
        train.run(config(*overrides(tmp_path, data, random_checkpoint, option)))


def test_janus_pro_trains_as_in_table_6():
    cfg = config("model=janus_pro", "trainer=ddp")
    assert (cfg.train.batch_size, cfg.train.epochs, cfg.train.accumulate) == (128, 3, 1)
    assert (cfg.trainer.devices, cfg.trainer.strategy) == (4, "ddp")
    assert cfg.distill.limit == 60_000
    assert (cfg.train.lr, cfg.train.min_lr, cfg.train.warmup_steps) == (1e-4, 1e-5, 20)
    assert (list(cfg.train.betas), cfg.train.weight_decay) == ([0.9, 0.95], 0.01)
    assert cfg.train.condition_drop == 0.1


@pytest.mark.slow
def test_two_processes_train_like_one(
    tmp_path: Path, data: Path, random_checkpoint: str, finished: Path
):
    options = overrides(tmp_path, data, random_checkpoint, "trainer=ddp", "train.batch_size=4")
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ssd_research.train"]
    for _ in range(2):  # the second finds the finished run and must not wait for anything
        subprocess.run(
            [sys.executable, *command, *options],
            check=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    runs = list((tmp_path / "train" / "tiny" / "default").iterdir())
    assert [run.name for run in runs] == [finished.name]
    for two, one in zip(metrics(runs[0]), metrics(finished), strict=True):
        assert two.keys() == one.keys()
        for key, value in one.items():
            if value:
                assert float(two[key]) == pytest.approx(float(value), rel=2e-3, abs=1e-6), key
