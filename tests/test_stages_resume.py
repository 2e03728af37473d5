"""`distill` and `generate`: what they write, and that no interruption or batch size changes it.

Across batch sizes results are the same up to rounding; in float64, which these tests use, exactly.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from PIL import Image

from conftest import make_backbone, make_heads
from ssd_research import distill, generate
from ssd_research.backbones.janus import JanusBackbone
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.metrics.geneval_folder import read_samples
from ssd_research.paths import conf_dir
from ssd_research.prompts import load_prompts

PROMPTS = 'prompts=["a red circle","a photo of two stars","a cross above a ring","a blue square"]'
DISTILL = ["distill.limit=10", "distill.holdout=3", "distill.shard_size=4", "batch_size=2"]
GENERATE = [PROMPTS, "images_per_prompt=2", "batch_size=2"]


@pytest.fixture
def configure(random_checkpoint, tmp_path):
    """Return a function from a sub-folder and overrides to a configuration of the random model."""

    def call(folder: str, *overrides: str) -> DictConfig:
        own = [f"output_dir={tmp_path / folder}", f"model.backbone.path={random_checkpoint}"]
        with initialize_config_dir(str(conf_dir()), version_base=None):
            return compose("config", [*own, "runtime=cpu", "runtime.dtype=float64", *overrides])

    return call


@pytest.fixture
def stop_after(monkeypatch):
    """Let the decoder work `calls` times and then interrupt; returns the list of batch sizes."""
    original = Autoregressive.decode

    def arrange(calls: int | None) -> list[int]:
        seen: list[int] = []

        def decode(self, backbone, prompts, **options):
            if len(seen) == calls:
                raise KeyboardInterrupt
            seen.append(len(prompts))
            return original(self, backbone, prompts, **options)

        monkeypatch.setattr(Autoregressive, "decode", decode)
        return seen

    return arrange


def load(checkpoint: str) -> JanusBackbone:
    return JanusBackbone.load(checkpoint, name="tiny", guidance=2.0, dtype=torch.float64)


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "data").iterdir())}


def images(folder: Path) -> dict[str, bytes]:
    files = sorted((folder / "images").rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if p.is_file()}


def results(folder: Path) -> list[dict]:
    """Return the rows of a generate run without what may differ: time, memory and batch size."""
    rows = pq.read_table(folder / "images.parquet").to_pylist()
    varying = ("seconds", "peak", "batch_size")
    return [{k: v for k, v in row.items() if not k.startswith(varying)} for row in rows]


# distill


def test_distill_writes_one_image_per_prompt(configure):
    cfg = configure("out", *DISTILL)
    folder = distill.run(cfg)
    table = pq.read_table(folder / "data")
    expected = load_prompts("shapes", {"limit": 10, "holdout": 3})
    assert table["prompt_id"].to_pylist() == [p.id for p in expected]
    assert table["prompt"].to_pylist() == [p.text for p in expected]
    codes = np.array(table["codes"].to_pylist())
    assert codes.shape == (10, 36)
    assert codes.min() >= 0
    assert codes.max() < 32
    assert len(shard_bytes(folder)) == 3
    manifest = json.loads((folder / "manifest.json").read_text())
    aside = {entry["prompt"] for entry in manifest["set_aside"]}
    assert len(aside) == 3
    assert not aside & set(table["prompt"].to_pylist())
    assert (folder / "DONE").exists()


def test_distill_is_autoregressive_sampling_under_the_image_s_key(configure, random_checkpoint):
    row = pq.read_table(distill.run(configure("out", *DISTILL)) / "data").to_pylist()[5]
    backbone = load(random_checkpoint)
    alone = Autoregressive().decode(
        backbone,
        [row["prompt"]],
        sampling=backbone.defaults,
        seed=0,
        sample_keys=[int(row["sample_key"])],
    )
    assert alone.codes[0].tolist() == row["codes"]


def test_distill_resumes_at_the_shard_under_way(configure, stop_after):
    whole = shard_bytes(distill.run(configure("whole", *DISTILL)))
    stop_after(3)
    with pytest.raises(KeyboardInterrupt):
        distill.run(configure("cut", *DISTILL))
    seen = stop_after(None)
    folder = distill.run(configure("cut", *DISTILL))
    assert sum(seen) == 6
    assert shard_bytes(folder) == whole
    seen.clear()
    assert distill.run(configure("cut", *DISTILL)) == folder
    assert not seen


def test_distill_ignores_the_batch_size(configure):
    one = distill.run(configure("one", *DISTILL, "batch_size=1"))
    four = distill.run(configure("four", *DISTILL, "batch_size=4"))
    assert one.name == four.name
    assert shard_bytes(one) == shard_bytes(four)


def test_distill_never_takes_held_out_prompts(configure):
    with pytest.raises(ValueError, match="held-out prompts are never distilled"):
        distill.run(configure("out", *DISTILL, "selection.held_out=true", "selection.holdout=2"))


def test_selection_goes_before_the_stage_s_defaults(configure):
    chosen = distill.selection(configure("out", "selection.limit=7", "selection.holdout=2"))
    assert (chosen.limit, chosen.holdout) == (7, 2)
    chosen = distill.selection(configure("out"))
    assert (chosen.limit, chosen.holdout) == (4096, 100)


@pytest.mark.parametrize("option", ["batch_size", "distill.shard_size", "images_per_prompt"])
@pytest.mark.parametrize("value", ["0", "x", "1.5"])
def test_sizes_are_checked(configure, option, value):
    with pytest.raises(ValueError, match=f"{option}={value} must be a whole number"):
        distill.run(configure("out", *DISTILL, f"{option}={value}"))


# generate


def test_generate_writes_the_official_layout(configure, capsys):
    cfg = configure("out", "prompts=shapes_geneval", "selection.per_kind=1", "images_per_prompt=2")
    folder = generate.run(cfg)
    samples = read_samples(folder / "images")
    prompts = load_prompts("shapes_geneval", {"per_kind": 1})
    assert [s.metadata for s in samples[::2]] == [p.metadata for p in prompts]
    rows = pq.read_table(folder / "images.parquet").to_pylist()
    assert [row["path"] for row in rows] == [s.path for s in samples]
    assert {row["nfe"] for row in rows} == {36}
    shown = capsys.readouterr().out
    assert str(folder) in shown.replace("\n", "")
    assert "36.0" in shown


def test_generated_pictures_are_their_codes(configure, random_checkpoint):
    folder = generate.run(configure("out", *GENERATE))
    backbone = load(random_checkpoint)
    table = pq.read_table(folder / "images.parquet")
    codes = np.array(table["codes"].to_pylist())
    pictures = backbone.decode_images(torch.from_numpy(codes))
    for path, picture in zip(table["path"].to_pylist(), pictures, strict=True):
        with Image.open(folder / "images" / path) as image:
            assert np.abs(np.asarray(image).astype(int) - picture).max() <= 1


@pytest.mark.parametrize("batch_size", [2, 3])
def test_generate_resumes_after_the_last_whole_batch(configure, stop_after, batch_size):
    whole = generate.run(configure("whole", *GENERATE))
    stop_after(2)
    with pytest.raises(KeyboardInterrupt):
        generate.run(configure("cut", *GENERATE))
    seen = stop_after(None)
    folder = generate.run(configure("cut", *GENERATE, f"batch_size={batch_size}"))
    assert sum(seen) == 4
    assert folder.name == whole.name
    assert results(folder) == results(whole)
    assert images(folder) == images(whole)
    assert not (folder / "parts").exists()
    seen.clear()
    assert generate.run(configure("cut", *GENERATE)) == folder
    assert not seen


def test_generate_survives_a_kill_while_merging(configure, monkeypatch):
    whole = generate.run(configure("whole", *GENERATE))

    def unlink(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            generate.run(configure("cut", *GENERATE))
    folder = generate.run(configure("cut", *GENERATE))
    assert results(folder) == results(whole)


def test_an_image_is_the_same_in_any_company(configure):
    rows = results(generate.run(configure("all", *GENERATE, "batch_size=8")))
    alone = results(generate.run(configure("alone", 'prompts=["a cross above a ring"]')))
    same = [row for row in rows if row["prompt"] == "a cross above a ring"]
    assert alone[0]["codes"] == same[0]["codes"]
    assert same[0]["codes"] != same[1]["codes"]


def test_the_run_id_follows_results_only(configure):
    def name(*overrides: str) -> str:
        return generate.run(configure("ids", 'prompts=["a star"]', *overrides)).name

    base = name()
    assert name("batch_size=3", "name=other", "runtime.threads=1", "decoder.name=label") == base
    changes = [
        ["seed=1"],
        ["sampling.temperature=0.5"],
        ["sampling.guidance=1"],
        ["images_per_prompt=2"],
        ['prompts=["a ring"]'],
        ["runtime.dtype=bfloat16"],
    ]
    names = {name(*change) for change in changes}
    assert len(names | {base}) == 1 + len(changes)


def test_a_decoder_with_heads(configure, tmp_path, random_checkpoint):
    backbone = load(random_checkpoint)
    record = {"backbone": "tiny", "fingerprint": backbone.fingerprint}
    make_heads(backbone).save(tmp_path / "heads", record)
    overrides = [*GENERATE, "decoder=ssd", f"heads.path={tmp_path / 'heads'}"]
    folder = generate.run(configure("out", *overrides))
    rows = results(folder)
    assert all(0 < row["nfe"] < 36 for row in rows)
    for row in rows:
        rounds = json.loads(row["rounds"])
        assert row["drafted"] == sum(r[2] for r in rounds)
        assert row["accepted"] == sum(r[3] for r in rounds)
        assert row["accepted"] <= row["drafted"]
    make_heads(make_backbone(seed=3)).save(tmp_path / "heads", record)
    assert generate.run(configure("out", *overrides)).name == folder.name
    make_heads(backbone, vertical=2).save(tmp_path / "heads", record)
    assert generate.run(configure("out", *overrides)).name != folder.name


def test_a_decoder_that_needs_heads_says_how_to_get_them(configure):
    with pytest.raises(ValueError, match=r"heads.path is null; train them with python -m"):
        generate.run(configure("out", *GENERATE, "decoder=ssd", "heads.path=null"))


def test_unknown_words_stop_before_anything_is_written(configure, tmp_path):
    with pytest.raises(ValueError, match="'elephant'"):
        generate.run(configure("out", 'prompts=["an elephant"]'))
    with pytest.raises(ValueError, match="'elephant'"):
        distill.run(configure("out", 'prompts=["an elephant"]', "distill.holdout=0"))
    assert not (tmp_path / "out").exists()


# kill -9


def kill_when(found: Path, pattern: str, command: list[str]) -> None:
    """Start a command and kill it -9 as soon as a file matching `pattern` is there."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 300
        try:
            while not list(found.glob(pattern)):
                assert process.poll() is None, process.stderr.read().decode()
                assert time.monotonic() < deadline, "the stage wrote nothing in five minutes"
                time.sleep(0.002)
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "overrides", "pattern"),
    [
        ("distill", ["distill.limit=60", *DISTILL[1:]], "data/shard-00002.parquet"),
        ("generate", [*GENERATE, "images_per_prompt=30"], "parts/00000-0004.parquet"),
    ],
)
def test_a_killed_stage_ends_as_an_uninterrupted_one(
    configure, tmp_path, random_checkpoint, stage, overrides, pattern
):
    command = [sys.executable, "-m", f"ssd_research.{stage}", f"output_dir={tmp_path / 'cut'}"]
    command += [f"model.backbone.path={random_checkpoint}", "runtime=cpu"]
    command += ["runtime.dtype=float64", *overrides]
    kill_when(tmp_path / "cut", f"{stage}/tiny/default/*/{pattern}", command)
    assert not list((tmp_path / "cut").rglob("DONE"))
    run = {"distill": distill.run, "generate": generate.run}[stage]
    folder, whole = run(configure("cut", *overrides)), run(configure("whole", *overrides))
    if stage == "distill":
        assert shard_bytes(folder) == shard_bytes(whole)
    else:
        assert results(folder) == results(whole)
        assert images(folder) == images(whole)
    assert not list(folder.rglob(".*.tmp"))
