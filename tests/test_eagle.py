"""The EAGLE drafter: its layer, its files, its training, and how it drafts with a cache."""

import csv
import json
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from analytic import AnalyticBackbone, distilled
from ssd_research import generate, train
from ssd_research.backbones.attention import RasterPass
from ssd_research.eagle import EagleDrafter
from ssd_research.heads import DraftHeads
from ssd_research.paths import conf_dir
from ssd_research.training import eagle as eagle_training
from ssd_research.training.data import Batch
from ssd_research.training.eagle import EagleTraining
from ssd_research.training.losses import overlap, soft_cross_entropy
from ssd_research.training.module import Recipe

PROVENANCE = {"backbone": "analytic", "fingerprint": "analytic-4x5", "training": {"lr": 1e-4}}
SIZES = {"heads": 4, "kv_heads": 2, "intermediate_size": 12}


@pytest.fixture
def drafter() -> EagleDrafter:
    torch.manual_seed(0)
    return EagleDrafter(8, **SIZES, initialisation="torch")


# ------------------------------------------------------------------------------------------- layer
def test_at_width_4096_it_has_eagles_parameters():
    """0.24 B for a backbone of 7 B, as the EAGLE paper says of LLaMA2-Chat 7B."""
    with torch.device("meta"):
        drafter = EagleDrafter(4096, heads=32, kv_heads=32, intermediate_size=11008)
    count = 2 * 4096**2 + 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert sum(p.numel() for p in drafter.parameters()) == count == 235_937_792


def test_its_layer_is_llamas(drafter: EagleDrafter):
    """Transformers' own layer with these weights gives the same, at places with a gap."""
    drafter = drafter.double()
    config = LlamaConfig(
        hidden_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=12,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(config, 0).double()
    names = {
        "self_attn.q_proj": "query",
        "self_attn.k_proj": "key",
        "self_attn.v_proj": "value",
        "self_attn.o_proj": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "norm",
        "mlp.gate_proj": "gate",
        "mlp.up_proj": "up",
        "mlp.down_proj": "down",
    }
    own = drafter.state_dict()
    weights = {f"{theirs}.weight": own[f"{mine}.weight"] for theirs, mine in names.items()}
    layer.load_state_dict(weights)
    h, e = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    places = torch.tensor([[0, 1, 2, 7, 8, 40]]).expand(3, -1)
    u = torch.cat([h, e], -1) @ own["project.weight"].T
    mask = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    turns = LlamaRotaryEmbedding(config)(u, places)
    want = layer(u, attention_mask=mask, position_embeddings=turns)
    want = want[0] if isinstance(want, tuple) else want
    # transformers computes the angles in float32
    torch.testing.assert_close(drafter(h, e, places), want, atol=1e-5, rtol=0)


def test_initialisations():
    h, e = torch.randn(2, 1, 4, 8)
    places = torch.arange(4)[None]
    linear = EagleDrafter(8, **SIZES)
    torch.testing.assert_close(linear(h, e, places), linear.project(torch.cat([h, e], -1)))
    identity = EagleDrafter(8, **SIZES, initialisation="identity")
    torch.testing.assert_close(identity(h, e, places), h)
    with pytest.raises(ValueError, match=r"train\.initialisation .*linear, identity, torch"):
        EagleDrafter(8, **SIZES, initialisation="zeros")


def test_pieces_through_the_cache_equal_one_pass(drafter: EagleDrafter):
    """Pairs are read in pieces; one piece is wrong at first and overwritten."""
    drafter = drafter.double()
    h, e, junk = torch.randn(3, 2, 7, 8, dtype=torch.float64)
    places = torch.arange(7).expand(2, -1)
    want, kv = drafter(h, e, places), drafter.new_cache(2, 9)
    for start, stop, states in ((0, 3, h), (3, 6, junk), (3, 4, h), (4, 7, h)):
        part = places[:, start:stop]
        plan = RasterPass.plan(kv, part, shared=None)
        got = drafter(states[:, start:stop], e[:, start:stop], part, plan)
    torch.testing.assert_close(got, want[:, 4:], atol=1e-12, rtol=0)


# ------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load(drafter: EagleDrafter, tmp_path: Path, dtype: str):
    drafter.save(tmp_path, PROVENANCE, dtype=dtype)
    loaded = EagleDrafter.load(tmp_path, AnalyticBackbone())
    for name, tensor in drafter.state_dict().items():
        stored = tensor.to(getattr(torch, dtype)).float()
        torch.testing.assert_close(loaded.state_dict()[name], stored, rtol=0, atol=0)
    assert not any(p.requires_grad for p in loaded.parameters())
    record = json.loads((tmp_path / "heads.json").read_text())
    assert record == {**PROVENANCE, "kind": "eagle", "hidden_size": 8, **SIZES, "dtype": dtype}


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ({"fingerprint": "other"}, r"trained for backbone analytic \(analytic-4x5\), not .*other"),
        ({"hidden_size": 16}, r"have width 8 .* has width 16"),
    ],
)
def test_load_refuses_another_backbone(
    drafter: EagleDrafter, tmp_path: Path, backbone: dict, message: str
):
    drafter.save(tmp_path, PROVENANCE)
    with pytest.raises(ValueError, match=message):
        EagleDrafter.load(tmp_path, AnalyticBackbone(**backbone))


def test_spatial_heads_and_drafters_are_not_mistaken_for_each_other(
    drafter: EagleDrafter, tmp_path: Path
):
    backbone = AnalyticBackbone()
    drafter.save(tmp_path / "eagle", PROVENANCE)
    DraftHeads(8, horizontal=1, vertical=0).save(tmp_path / "spatial", PROVENANCE)
    with pytest.raises(
        ValueError,
        match=r"heads\.path=.*/eagle holds an EAGLE drafter, but this decoder drafts with spatial "
        r"draft heads: train with heads=spatial",
    ):
        DraftHeads.load(tmp_path / "eagle", backbone)
    with pytest.raises(
        ValueError,
        match=r"heads\.path=.*/spatial holds spatial draft heads, but this decoder drafts with an "
        r"EAGLE drafter: train with heads=eagle",
    ):
        EagleDrafter.load(tmp_path / "spatial", backbone)
    with pytest.raises(ValueError, match=r"no draft heads at .*nowhere"):
        EagleDrafter.load(tmp_path / "nowhere", backbone)
    path = tmp_path / "eagle" / "heads.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"cannot read draft heads .*truncated"):
        EagleDrafter.load(tmp_path / "eagle", backbone)


# ---------------------------------------------------------------------------------------- training
def batch(images: int = 3) -> Batch:
    codes = torch.arange(20).expand(images, -1)
    return Batch(["a ring"] * images, [str(i) for i in range(images)], codes)


def training(drafter: EagleDrafter, **options: float) -> EagleTraining:
    module = EagleTraining(drafter, AnalyticBackbone(), Recipe(10), **options)
    module.log = module.log_dict = lambda *args, **kwargs: None
    return module


class Oracle(EagleDrafter):
    """Knows that the next state lies one place on and has seen the pair's code."""

    def forward(self, h, e, places, raster=None):
        place = places + 1
        ahead = h.clone()
        ahead[..., 0], ahead[..., 1], ahead[..., 3] = place // 5, place % 5, e[..., 0]
        return ahead


def test_a_pair_goes_with_the_state_after_its_code():
    module = training(Oracle(8, **SIZES))
    h, e = module.teacher(batch(), torch.tensor([True, False, False]))
    losses = module.losses(module.predict(h, e), h)
    assert losses["smooth_l1"].item() == 0
    entropy = soft_cross_entropy(*[module.backbone.logits(h[:, 1:], 1.0)] * 2).mean()
    torch.testing.assert_close(losses["cross_entropy"], entropy)
    torch.testing.assert_close(losses["loss"], 0.1 * entropy)
    late = module.losses(module.predict(h, e).roll(1, 1), h)
    assert late["smooth_l1"].item() > 0.1


def test_losses_are_the_stated_formulae():
    logits = torch.tensor([[0.0, torch.log(torch.tensor(3.0))]])
    flat = torch.zeros(1, 2)
    assert soft_cross_entropy(flat, logits).item() == pytest.approx(0.6931, abs=1e-4)
    entropy = -(0.25 * torch.tensor(0.25).log() + 0.75 * torch.tensor(0.75).log())
    assert soft_cross_entropy(logits, logits).item() == pytest.approx(entropy.item())
    assert overlap(flat, logits).item() == pytest.approx(0.75)
    assert overlap(logits, logits).item() == pytest.approx(1)


def test_noise_is_each_images_own(drafter: EagleDrafter):
    module, like = training(drafter, feature_noise=0.4), torch.zeros(3, 20, 8)
    noise = module.noise(["a", "b", "c"], like)
    assert torch.equal(module.noise(["c", "a"], like[:2]), noise[[2, 0]])
    assert noise.abs().max() <= 0.2
    assert noise.std().item() == pytest.approx(0.4 / 12**0.5, rel=0.1)
    assert not torch.equal(noise[0], noise[1])
    assert training(drafter, feature_noise=0).noise(["a"], like[:1]).abs().max() == 0


def test_logits_in_parts_and_recomputed_activations_give_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch,
):
    gradients = []
    for recompute, logits in ((False, 2**26), (True, 2**26), (False, 20 * 7)):
        monkeypatch.setattr(eagle_training, "LOGITS", logits)
        torch.manual_seed(0)
        drafter = EagleDrafter(8, **SIZES, initialisation="torch")
        module = training(drafter)
        module.recipe = Recipe(10, recompute_activations=recompute)
        module.training_step(batch(), 0).backward()
        gradients.append([p.grad.clone() for p in drafter.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


@pytest.mark.parametrize("option", ["ce_weight", "feature_noise"])
@pytest.mark.parametrize("value", [-1.0, "much", None])
def test_a_wrong_weight_is_named(option: str, value: object):
    with pytest.raises(ValueError, match=rf"heads\.{option}={value} must be a number"):
        eagle_training.check_options(**{option: value})


# ------------------------------------------------------------------------------------------- stages
@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distilled(tmp_path_factory.mktemp("distill") / "run", images=22, size=36, codes=32)


def config(out: Path, data: Path, checkpoint: str, *more: str) -> DictConfig:
    options = [
        f"model.backbone.path={checkpoint}",
        f"output_dir={out}",
        f"train.data={data}",
        "train.batch_size=4",
        "train.warmup_steps=2",
        "train.lr=3e-3",
        "train.epochs=2",
        "heads=eagle",
        "runtime=cpu",
        *more,
    ]
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path, random_checkpoint: str) -> Path:
    return train.run(config(tmp_path_factory.mktemp("straight"), data, random_checkpoint))


def metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as lines:
        return list(csv.DictReader(lines))


def test_the_train_stage_trains_a_drafter(finished: Path):
    rows = metrics(finished)
    assert [int(r["step"]) for r in rows] == list(range(10))  # 2 epochs of 20 // 4
    for name in ("smooth_l1", "cross_entropy", "loss"):
        losses = [float(r[f"train/{name}"]) for r in rows]
        assert sum(losses[-3:]) < 0.97 * sum(losses[:3]), name
    record = json.loads((finished / "heads" / "heads.json").read_text())
    assert record["kind"] == "eagle"
    assert record["training"]["feature_noise"] == 0.2
    assert "horizontal" not in record["training"]
    assert 0 <= record["validation"]["val/eagle/overlap"] <= 1
    assert 0 <= record["validation"]["val/eagle/code_agreement"] <= 1
    checkpoint = torch.load(finished / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(name.startswith("heads.") for name in checkpoint["state_dict"])


class Killed(Exception):
    pass


def test_a_killed_training_resumes_where_it_was(
    finished: Path,
    data: Path,
    random_checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    cfg = config(tmp_path, data, random_checkpoint, "train.checkpoint_every=1")
    callbacks = train._callbacks

    class Kill(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
            if trainer.global_step == 3:
                raise Killed

    monkeypatch.setattr(train, "_callbacks", lambda *args: [Kill(), *callbacks(*args)])
    with pytest.raises(Killed):
        train.run(cfg)
    monkeypatch.setattr(train, "_callbacks", callbacks)
    resumed = train.run(cfg)
    assert resumed.name == finished.name
    assert metrics(resumed) == metrics(finished)
    mine, straight = (load_file(run / "heads" / "heads.safetensors") for run in (resumed, finished))
    assert all(torch.equal(mine[name], straight[name]) for name in straight)


def test_another_noise_is_another_run(finished: Path, data: Path, random_checkpoint: str):
    out = finished.parents[3]
    cfg = config(out, data, random_checkpoint, "heads.feature_noise=0.3", "train.epochs=1")
    assert train.run(cfg).name != finished.name


def test_the_trained_drafter_serves_lantern(finished: Path, data: Path, random_checkpoint: str):
    options = (
        "decoder=lantern",
        "decoder.drafter=eagle",
        "decoder.tree=[2,1]",
        'prompts=["a red circle","two blue squares"]',
        "sampling.guidance=1.5",
        "decoder.k=4",
    )
    out = finished.parents[3]
    folder = config(out, data, random_checkpoint, *options, f"heads.path={finished}")
    made = json.loads((generate.run(folder) / "meta.json").read_text())
    assert made["identity"]["decoder"]["tree"] == [[0], [1], [0, 0], [1, 0]]
    assert made["identity"]["heads"]
    nowhere = config(out, data, random_checkpoint, *options)
    with pytest.raises(ValueError, match=r"train them with .*train model=tiny heads=eagle"):
        generate.run(nowhere)
    ssd = config(out, data, random_checkpoint, "decoder=ssd", f"heads.path={finished}")
    with pytest.raises(ValueError, match=r"holds an EAGLE drafter, but this decoder drafts with"):
        generate.run(ssd)


def test_unknown_kinds_of_heads_are_refused(tmp_path: Path, data: Path, random_checkpoint: str):
    cfg = config(tmp_path, data, random_checkpoint, "heads.name=medusa")
    with pytest.raises(ValueError, match=r"heads\.name=medusa; accepted: spatial, eagle"):
        train.run(cfg)
