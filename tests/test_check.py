"""The check command, and each check against a model that is wrong in just that respect."""

import json
import os
import subprocess
import sys

import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image
from tokenizers import pre_tokenizers

from conftest import make_backbone
from published_emu3 import write_emu3
from published_janus import write_janus
from published_lumina import write_lumina
from ssd_research.backbones import check, pass_checks, weight_checks
from ssd_research.backbones.emu3 import Emu3Backbone
from ssd_research.backbones.janus import JanusBackbone
from ssd_research.backbones.lumina import LuminaBackbone
from ssd_research.backbones.pass_checks import Witness, sample_rows
from ssd_research.paths import conf_dir

PROMPT = "a red circle above a blue square"
LAWS = ("block pass = token pass", "in a batch = alone", "teacher-forced = decoded")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return write_janus(tmp_path_factory.mktemp("published") / "janus")


@pytest.fixture
def configure(published, tmp_path):
    def call(*overrides):
        own = ["model=janus_pro", f"model.backbone.path={published}", "runtime=cpu"]
        with initialize_config_dir(str(conf_dir()), version_base=None):
            return compose("config", [*own, f"output_dir={tmp_path}", *overrides])

    return call


def witness_of(backbone, rows=2):
    state = backbone.start([PROMPT], sampling=backbone.defaults)
    sample_rows(state, rows, seed=0)
    return Witness.of(state, PROMPT, rows)


def by_name(folder):
    found = json.loads((folder / "check.json").read_text())
    return found, {one["name"]: one for one in found["checks"]}


def test_the_command_writes_an_image_and_its_findings(configure, capsys):
    folder = check.run(configure())
    found, checks = by_name(folder)
    assert all(checks[name]["passed"] for name in (*LAWS, "KV cache", "prompt tokens", "image"))
    assert checks["code order"]["passed"] is None
    assert checks["tokenizer round trip"]["numbers"]["texts"] == 5
    assert Image.open(folder / "image.png").size == (16, 16)
    assert found["decoding"]["codes"] == 16
    assert found["parts"]["text embeddings"] == {"parameters": 330 * 32, "bytes": 4 * 330 * 32}
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["passed"] is True
    assert (folder / "DONE").exists()
    shown = capsys.readouterr().out
    assert all(name in shown for name in checks)
    assert str(folder / "image.png") in shown


def test_a_check_looks_again(configure):
    folder = check.run(configure("check.rows=1"))
    (folder / "check.json").write_text("{}")
    assert check.run(configure("check.rows=1")) == folder
    assert by_name(folder)[1]


def test_some_rows_make_a_strip(configure):
    found, checks = by_name(folder := check.run(configure("check.rows=3")))
    assert Image.open(folder / "image.png").size == (16, 12)
    assert found["decoding"]["codes"] == checks[LAWS[0]]["numbers"]["positions"] == 12


def test_bfloat16_is_reported_not_judged(configure, capsys):
    _, checks = by_name(check.run(configure("runtime.dtype=bfloat16", "check.rows=2")))
    for name in LAWS:
        assert checks[name]["passed"] is None
        assert checks[name]["numbers"]["total_variation_mean"] < 0.2
    assert "runtime.dtype=float32 decides" in " ".join(capsys.readouterr().out.split())


def test_another_tokenizer_of_the_model_has_to_agree(configure, published):
    _, checks = by_name(check.run(configure(f"check.tokenizer={published}", "check.rows=1")))
    assert checks["tokenizers agree"]["passed"] is True
    tiny = "check.tokenizer=checkpoints/tiny"
    with pytest.raises(ValueError, match="1 of 11 checks failed: tokenizers agree"):
        check.run(configure(tiny, "check.rows=1"))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("check.rows=5", "check.rows=5, but janus_pro has 4 rows"),
        ("check.rows=0", "check.rows=0 must be a whole number of at least 1"),
        ("check.tokenizer=no/such/folder", "check.tokenizer=no/such/folder does not exist"),
    ],
)
def test_bad_options_are_named(configure, option, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        check.run(configure(option))


@pytest.mark.parametrize("guidance", [3.0, 1.0])
def test_passes_agree_on_a_sound_backbone(guidance):
    witness = witness_of(make_backbone(dtype=torch.float32, guidance=guidance), rows=6)
    assert len(witness.h_pre) == (1 if guidance == 1 else 2)
    assert len(witness.codes.unique()) > 4
    for found in (witness.blocks(), witness.batch(), witness.teacher_forced()):
        assert found.passed is True, found


def test_drafts_that_stay_are_found(random_backbone, monkeypatch):
    """Blocks whose wrong drafts are not overwritten by the codes."""
    witness = witness_of(random_backbone)

    def keep_drafts(state, codes, rows):
        wrong = (codes + 1) % state.backbone.codebook_size
        for y in range(rows):
            span = state.backbone.grid.row(y)
            state.forward(wrong[:, span.start : span.stop], span, phase="verify")

    monkeypatch.setattr(pass_checks, "feed_rows", keep_drafts)
    assert witness.blocks().passed is False
    assert witness.batch().passed is False
    assert witness.teacher_forced().passed is True


def test_a_wrong_unconditional_prompt_is_found(random_backbone, monkeypatch):
    witness = witness_of(random_backbone)
    monkeypatch.setattr(type(random_backbone), "unconditional_ids", lambda _, ids: ids)
    assert witness.teacher_forced().passed is False


def test_limits_and_nan(random_backbone):
    witness = witness_of(random_backbone)
    scale = float(witness.h_pre.abs().max())
    near, far = witness.h_pre + 1e-6 * scale, witness.h_pre + 3e-4 * scale
    assert witness.compare("x", near).passed is True
    assert witness.compare("x", far).passed is False
    half = witness_of(make_backbone(dtype=torch.bfloat16))
    assert half.compare("x", half.h_pre * 1.1).passed is None
    assert half.compare("x", half.h_pre * torch.nan).passed is False


def test_a_distribution_that_is_not_finite_is_one_line():
    backbone = make_backbone()
    backbone.decoder.norm.weight.data.fill_(torch.nan)
    with pytest.raises(
        ValueError, match=r"random in torch\.float64: .* at position 0 is not finite"
    ):
        witness_of(backbone)


def test_code_order_of_a_map_and_of_an_offset(tmp_path):
    write_lumina(tmp_path / "lumina")
    lumina = LuminaBackbone.load(
        str(tmp_path / "lumina"),
        name="lumina_mgpt",
        guidance=4.0,
        image_size=[64, 64],
        image_decoder=None,
    )
    found = weight_checks.code_order(lumina)
    assert found.passed is True
    assert found.numbers["moved"] > 0
    assert "the checkpoint's own map is used" in found.found
    write_emu3(tmp_path / "emu3")
    emu3 = Emu3Backbone.load(str(tmp_path / "emu3"), name="emu3", guidance=3.0, image_size=[48, 64])
    found = weight_checks.code_order(emu3)
    assert (found.passed, found.numbers["moved"]) == (True, 0)
    assert f"code = id - {found.numbers['first_id']} for all 48 codes" in found.found
    emu3.code_ids = emu3.code_ids.clone()
    emu3.code_ids[3] = emu3.code_ids[4]
    assert weight_checks.code_order(emu3).passed is False
    emu3.code_ids += 10_000
    assert weight_checks.code_order(emu3).passed is False


def test_codebook_norms_name_what_they_mean_for_encoding():
    backbone = make_backbone(codebook_size=32)
    table = backbone.image_decoder.quantize.embedding.weight
    with torch.no_grad():
        table.copy_(torch.nn.functional.normalize(torch.randn(table.shape, dtype=table.dtype)))
        unit = weight_checks.codebook_norms(backbone)
        table.mul_(2)
        longer = weight_checks.codebook_norms(backbone)
    assert unit.numbers["unit"] is True
    assert "JanusVQVAE" not in unit.found
    assert longer.numbers["unit"] is False
    assert longer.numbers["mean"] == pytest.approx(2, abs=1e-3)
    assert "do not encode images with transformers' JanusVQVAE" in longer.found
    assert (unit.passed, longer.passed) == (None, None)


def test_a_shuffled_code_order_shows():
    backbone = make_backbone(codebook_size=64)
    vectors = weight_checks.codebook(backbone)
    generator = torch.Generator().manual_seed(0)
    embeddings = vectors @ torch.randn(vectors.shape[1], 32, generator=generator)
    backbone.code_embeddings = embeddings
    right = weight_checks.code_neighbours(backbone).numbers
    assert right["correlation"] > 0.8 > 2 * right["shuffled"]
    backbone.code_embeddings = embeddings[torch.randperm(64, generator=generator)]
    wrong = weight_checks.code_neighbours(backbone).numbers
    assert abs(wrong["correlation"]) < 2 * wrong["shuffled"]


def test_a_tokenizer_that_loses_spaces_is_found(published):
    """As transformers before 5.24 load DeepSeek's tokenizers."""
    backbone = JanusBackbone.load(str(published), name="janus_pro", guidance=5.0)
    assert weight_checks.round_trip(backbone, PROMPT).passed is True
    backbone.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    found = weight_checks.round_trip(backbone, PROMPT)
    assert found.passed is False
    assert repr(PROMPT) in found.found


def test_prompt_tokens_name_what_is_wrong(random_backbone, monkeypatch):
    assert weight_checks.prompt_tokens(random_backbone, PROMPT).passed is True
    ids = random_backbone.prompt_ids(PROMPT)
    for wrong, words in (
        ([ids[0], *ids], "not once in front"),
        (ids[1:], "not once in front"),
        ([*ids, 10_000], "beyond the embedding table"),
    ):
        monkeypatch.setattr(type(random_backbone), "prompt_ids", lambda _, text, w=wrong: w)
        found = weight_checks.prompt_tokens(random_backbone, PROMPT)
        assert found.passed is False
        assert words in found.found


def test_parts_count_every_parameter_once(random_backbone):
    found = weight_checks.parts(random_backbone)
    every = {id(p): p for p in random_backbone.model.parameters()}
    assert sum(n for n, _ in found.values()) == sum(p.numel() for p in every.values())
    assert all(size == 8 * n for n, size in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_command_line_says_by_its_status_whether_checks_failed(tmp_path, published, fails):
    options = ["model=tiny", "check.rows=2", f"output_dir={tmp_path}"]
    options += [f"check.tokenizer={published}"] if fails else []
    found = subprocess.run(
        [sys.executable, "-m", "ssd_research.backbones.check", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
    )
    assert found.returncode == (2 if fails else 0), found.stderr
    assert ("error: 1 of 11 checks failed: tokenizers agree" in found.stderr) == fails
    assert "block pass = token pass" in found.stdout
    assert len(list(tmp_path.rglob("image.png"))) == 1
