"""Every family from its published layout through every stage, and AR's two ways to count."""

import json
import re

import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image

from published_emu3 import write_emu3
from published_janus import write_janus
from published_lumina import write_lumina
from ssd_research import distill, generate, train
from ssd_research.backbones.emu3 import Emu3Backbone
from ssd_research.backbones.lumina import LuminaBackbone
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.paths import conf_dir

PROMPTS = 'prompts=["a cat","two dogs at a lake","a house by the sea","3 red boats","snow"]'
HEIGHT, WIDTH = 64, 96  # a grid that is not square, where the family knows one


def janus(folder):
    return ["model=janus_pro", f"model.backbone.path={write_janus(folder / 'janus')}"]


def lumina(folder):
    write_lumina(folder)
    return [
        "model=lumina_mgpt",
        f"model.backbone.path={folder}",
        f"model.backbone.image_decoder={folder}",
        f"model.backbone.image_size=[{HEIGHT},{WIDTH}]",
    ]


def emu3(folder, *, layout="hf"):
    write_emu3(folder, layout=layout, image_size=(HEIGHT, WIDTH))
    size = f"model.backbone.image_size=[{HEIGHT},{WIDTH}]"
    return ["model=emu3", f"model.backbone.path={folder}", size]


def emu3_official(folder):
    vision = f"model.backbone.image_decoder={folder / 'VisionTokenizer'}"
    return [*emu3(folder, layout="official"), vision]


def configured(own, tmp_path, *options):
    with initialize_config_dir(str(conf_dir()), version_base=None):
        return compose(
            "config", [*own, f"output_dir={tmp_path}", "runtime=cpu", "batch_size=2", *options]
        )


@pytest.mark.parametrize("family", [janus, lumina, emu3, emu3_official])
def test_distill_train_and_generate_run_from_the_published_layout(family, tmp_path):
    """The same configuration as for the real weights; only the paths are other ones."""
    own = [*family(tmp_path / "weights"), PROMPTS]
    made = distill.run(configured(own, tmp_path, "distill.limit=4", "distill.holdout=1"))
    table = pq.read_table(next((made / "data").glob("*.parquet")))
    assert len(table) == 4
    # Janus's grid follows from its weights and is too small here for five horizontal heads.
    few = ["heads.horizontal=3"] if family is janus else []
    heads = train.run(configured(own, tmp_path, "train.epochs=1", "train.batch_size=2", *few))
    facts = {}
    for name, options in (("ar", []), ("ar", ["decoder.end_of_row=folded"]), ("ssd", [])):
        if family is janus and options:
            continue
        chosen = [f"decoder={name}", f"heads.path={heads}", "selection.limit=2", *options]
        chosen += ["decoder.k_h=3"] if few and name == "ssd" else []
        run = generate.run(configured(own, tmp_path, *chosen))
        pictures = sorted(run.glob("images/*/samples/*.png"))
        sizes = [Image.open(file).size for file in pictures]
        assert sizes == [(16, 16) if family is janus else (WIDTH, HEIGHT)] * 2
        meta = json.loads((run / "meta.json").read_text())
        facts[name, *options] = meta
        assert meta["seed"] == 0
    if family is janus:
        assert facts["ssd",]["step_acceleration"] > 1
        assert "ar_steps_folded" not in facts["ssd",]
        return
    rows, cols = (HEIGHT // 16, WIDTH // 16) if family is lumina else (HEIGHT // 8, WIDTH // 8)
    own_pass, folded = facts["ar",], facts["ar", "decoder.end_of_row=folded"]
    assert own_pass["steps"] == rows * (cols + 1)
    assert folded["steps"] == rows * cols
    assert own_pass["identity"]["decoder"]["end_of_row"] == "own_pass"
    assert folded["identity"]["decoder"]["end_of_row"] == "folded"
    for meta in facts.values():
        assert (meta["ar_steps"], meta["ar_steps_folded"]) == (rows * (cols + 1), rows * cols)
        assert meta["step_acceleration"] == round(rows * (cols + 1) / meta["steps"], 3)


def test_a_run_is_not_taken_for_one_of_another_size_or_tokenizer(tmp_path):
    """The weights are the same, so the fingerprint of the backbone cannot tell them apart."""
    own = [*emu3(tmp_path / "weights"), PROMPTS, "selection.limit=1"]
    runs = [
        generate.run(configured(own, tmp_path, *options)).name
        for options in ([], [f"model.backbone.image_size=[{HEIGHT},{HEIGHT}]"])
    ]
    assert runs[0] != runs[1]


def real_grid(family, folder):
    """Return a tiny model of a family on its real grid."""
    if family == "lumina_mgpt":
        write_lumina(folder, layers=1)
        return LuminaBackbone.load(
            str(folder), name=family, guidance=1.0, image_size=(768, 768), image_decoder=None
        )
    write_emu3(folder, layers=1, hidden_size=32, heads=4, codebook_size=8, positions=9216)
    return Emu3Backbone.load(str(folder), name=family, guidance=1.0, image_size=(720, 720))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "end_of_row", "nfe"),
    [
        ("lumina_mgpt", "own_pass", 2352),
        ("lumina_mgpt", "folded", 2304),
        ("emu3", "own_pass", 8190),
        ("emu3", "folded", 8100),
    ],
)
def test_ar_takes_the_papers_steps_or_fewer_with_end_of_row_folded(
    tmp_path, family, end_of_row, nfe
):
    backbone = real_grid(family, tmp_path / "weights")
    with torch.inference_mode():
        made = Autoregressive(end_of_row=end_of_row).decode(
            backbone, ["a cat"], sampling=backbone.defaults, seed=0, sample_keys=[0]
        )
    assert made.nfe == [nfe]


@pytest.mark.parametrize("model", ["janus_pro", "janus_pro_1b", "lumina_mgpt", "emu3"])
def test_absent_weights_give_one_line_that_says_what_to_run(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    cfg = configured([f"model={model}", PROMPTS], tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        generate.run(cfg)
    line = str(caught.value)
    assert "\n" not in line
    assert re.search(rf"scripts/download_weights\.sh {model} ", line)
    assert "model.backbone.path=" in line
