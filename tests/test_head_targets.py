"""Heads that read and predict other representations than the paper's default (paper Table 19)."""

import csv
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from analytic import AnalyticBackbone, distilled
from conftest import both_streams, make_backbone
from ssd_research import evaluate, generate, paper, train
from ssd_research.backbones.base import Backbone
from ssd_research.backbones.janus import JanusBackbone
from ssd_research.decoders.drafting import draft_law
from ssd_research.decoders.multi_token import MultiToken
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.heads import PAPERS, DraftHeads, write_heads
from ssd_research.metrics.acceptance import by_offset
from ssd_research.paths import conf_dir
from ssd_research.runs import load_heads
from ssd_research.sampling import Sampling
from ssd_research.training.data import Batch
from ssd_research.training.module import HeadTraining, Recipe

PAIRS = [(row["input"], row["target"]) for row in paper.table(19)]
SAMPLING = Sampling(3.0, 1.3, top_k=9)
PROMPT = ["a red circle"]
PROVENANCE = {"backbone": "analytic", "fingerprint": "analytic-4x5"}
every_pair = pytest.mark.parametrize(("reads", "target"), PAIRS)


def heads_of(
    backbone: Backbone, reads: str, target: str, *, horizontal: int = 2, vertical: int = 2
) -> DraftHeads:
    """Return untrained heads for a backbone, in its dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        heads = DraftHeads(
            backbone.hidden_size,
            horizontal=horizontal,
            vertical=vertical,
            input=reads,
            target=target,
            initialisation="torch",
        )
    return heads.to(backbone.dtype).eval().requires_grad_(False)


# ------------------------------------------------------------------------------ shapes and options
@every_pair
def test_the_width_follows_the_input(reads: str, target: str) -> None:
    with torch.device("meta"):
        heads = DraftHeads(4096, horizontal=1, vertical=0, input=reads, target=target)
    head = heads.head("horizontal", 1)
    assert head.project.weight.shape == (4096, 8192 if "+" in reads else 4096)
    parameters = sum(p.numel() for p in heads.parameters())
    assert parameters == (134_221_824 if "+" in reads else 117_444_608)


@every_pair
def test_initialisations(reads: str, target: str) -> None:
    h, e = torch.randn(2, 4, 8)
    for start in ("identity", "linear"):
        heads = DraftHeads(8, input=reads, target=target, initialisation=start)
        head, parts = (
            heads.head("vertical", 1),
            [h, e] if "+" in reads else [e if reads == "e" else h],
        )
        want = parts[0] if start == "identity" else head.project(torch.cat(parts, -1))
        torch.testing.assert_close(heads.predict("vertical", 1, h, e), want)


def test_the_default_is_the_papers() -> None:
    assert DraftHeads(8).representation == PAPERS == {"input": "h_pre+e", "target": "h_pre"}
    cfg = compose_config()
    assert {key: cfg.heads[key] for key in PAPERS} == PAPERS


def test_heads_predict_what_they_read() -> None:
    """All else that could be asked for is one line that names what is accepted."""
    cfg = compose_config()
    inputs = ["h_pre+e", "h_pre", "h_post+e", "h_post", "e", "e+h_pre", ["h_pre", "e"], None]
    for pair in itertools.product(inputs, ["h_pre", "h_post", "e", "h", "", None]):
        cfg.heads.input, cfg.heads.target = pair
        if pair in PAIRS:
            train._check(cfg)
            continue
        with pytest.raises(ValueError, match=r"^heads\.target=.* from heads\.input=") as found:
            train._check(cfg)
        assert str(found.value).endswith(
            "h_pre from h_pre+e or h_pre; h_post from h_post+e or h_post; e from e"
        )
        assert "\n" not in str(found.value)


# ---------------------------------------------------------------------------------------- pairing
class Still(AnalyticBackbone):
    """The analytic backbone without the component that depends on the last code."""

    def hidden_states(self, *args: object, **kwargs: object) -> Tensor:
        h = super().hidden_states(*args, **kwargs)
        h[..., 3] = 0
        return h


def moving_heads(reads: str, target: str, *, beyond: int = 0) -> DraftHeads:
    """Return linear heads that move what they read by their own offset, and `beyond`."""
    grid = AnalyticBackbone().grid
    heads = DraftHeads(8, horizontal=2, vertical=2, input=reads, target=target)
    for axis, offset in heads.offsets():
        weight = torch.zeros_like(heads.head(axis, offset).project.weight)
        weight[:, :8] = torch.eye(8)
        down = axis == "vertical"
        if target == "e":  # [code, 1, ...]
            weight[0, 1] = (offset + beyond) * (grid.cols if down else 1)
        else:  # [y, x, ., ., 1, ...], all doubled behind the norm
            weight[0 if down else 1, 4] = offset + beyond
        heads.head(axis, offset).project.weight.data = weight
    return heads


def batch(images: int = 2) -> Batch:
    codes = torch.arange(AnalyticBackbone().grid.size).expand(images, -1)
    return Batch(["a ring"] * images, [str(n) for n in range(images)], codes)


@every_pair
def test_what_is_read_predicts_the_same_further_on(reads: str, target: str) -> None:
    backbone = Still()
    right = HeadTraining(moving_heads(reads, target), backbone, Recipe(10))
    wrong = HeadTraining(moving_heads(reads, target, beyond=1), backbone, Recipe(10))
    h, e = right.teacher(batch(), None)
    codes = batch().codes
    assert torch.equal(right.best_codes(h, right.heads.state_kind), codes)
    for axis, offset in right.heads.offsets():
        assert right.loss(axis, offset, h, e).item() == 0
        assert wrong.loss(axis, offset, h, e).item() >= 0.5 / 8
        loss, agreement = right.judge(axis, offset, h=h, e=e, choices=(codes,))
        assert (loss.item(), agreement[0].item()) == (0, 1)
        _, agreement = wrong.judge(axis, offset, h=h, e=e, choices=(codes,))
        assert agreement[0].item() < 0.15  # the last code stands for every place after it


@every_pair
def test_training_reads_states_of_the_right_side_of_the_norm(reads: str, target: str) -> None:
    backbone = AnalyticBackbone()
    module = HeadTraining(moving_heads(reads, target), backbone, Recipe(10))
    h, e = module.teacher(batch(), torch.tensor([True, False]))
    after = "h_post" in reads
    assert h[0, :3, 4].tolist() == [2 if after else 1] * 3
    assert h[:, 0, 2].tolist() == [2 if after else 1, 0]
    assert e[0, :, 0].tolist() == list(range(20))
    truth = module.truth("vertical", 1, h, e)
    assert torch.equal(truth, (e if target == "e" else h)[:, 5:])


# ------------------------------------------------------------------------------------------- files
@every_pair
def test_files_say_what_their_heads_read_and_predict(
    reads: str, target: str, tmp_path: Path
) -> None:
    backbone = AnalyticBackbone()
    heads = heads_of(backbone, reads, target)
    heads.save(tmp_path, PROVENANCE)
    loaded = DraftHeads.load(tmp_path, backbone)
    assert loaded.representation == {"input": reads, "target": target}
    assert (loaded.input, loaded.target) == (reads, target)
    record = json.loads((tmp_path / "heads.json").read_text())
    assert (record["input"], record["target"]) == (reads, target)
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def saved(folder: Path, **facts: object) -> Path:
    heads = DraftHeads(8, horizontal=1, vertical=1)
    sizes = {"hidden_size": 8, "horizontal": 1, "vertical": 1}
    weights = heads.heads.state_dict()
    write_heads(folder, weights, {**PROVENANCE, **sizes, **facts}, dtype="float32")
    return folder


def test_files_that_do_not_say_it_hold_the_papers_heads(tmp_path: Path) -> None:
    assert DraftHeads.load(saved(tmp_path), AnalyticBackbone()).representation == PAPERS


def test_the_shipped_heads_are_the_papers() -> None:
    shipped = Path(__file__).parents[1] / "checkpoints" / "tiny" / "heads"
    record = json.loads((shipped / "heads.json").read_text())
    assert not {"input", "target"} & set(record)
    backbone = AnalyticBackbone(
        hidden_size=record["hidden_size"], fingerprint=record["fingerprint"]
    )
    assert DraftHeads.load(shipped, backbone).representation == PAPERS


def test_files_of_heads_unknown_here_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, input="h_pre", target="e")
    with pytest.raises(
        ValueError, match=r"draft heads .*: heads\.target=e from heads\.input=h_pre"
    ):
        DraftHeads.load(folder, AnalyticBackbone())


def test_options_that_say_otherwise_than_the_file_are_refused(tmp_path: Path) -> None:
    backbone = AnalyticBackbone()
    heads_of(backbone, "h_post", "h_post").save(tmp_path / "post", PROVENANCE)
    saved(tmp_path / "papers")
    post = [f"heads.path={tmp_path / 'post'}"]
    both = ["heads.input=h_post", "heads.target=h_post"]
    for options in (post, [*post, *both]):
        heads = load_heads(compose_config(*options), backbone)
        assert heads.representation == {"input": "h_post", "target": "h_post"}
    for options, found in (
        ([*post, "heads.input=e", "heads.target=e"], "h_post from h_post, not e from e"),
        ([*post, "heads.input=h_post"], "h_post from h_post, not h_pre from h_post"),
        ([f"heads.path={tmp_path / 'papers'}", *both], "h_pre from h_pre+e, not h_post from h_"),
    ):
        with pytest.raises(
            ValueError, match=f"heads.path=.* holds heads that predict {re.escape(found)}"
        ):
            load_heads(compose_config(*options), backbone)


# ---------------------------------------------------------------------------------------- decoding
@pytest.fixture(scope="module")
def backbone() -> JanusBackbone:
    """Return a random backbone whose final norm, with weights other than 1, shows if run twice."""
    backbone = make_backbone()
    weight = backbone.decoder.norm.weight
    weight.copy_(torch.linspace(0.5, 2.0, len(weight)))
    return backbone


def normed(backbone: Backbone, h: Tensor) -> Tensor:
    """Return RMSNorm by its formula."""
    norm = backbone.decoder.norm
    return h / (h.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


def q_by_hand(
    backbone: Backbone, head: nn.Module, reads: str, target: str, *, h: Tensor, e: Tensor
) -> Tensor:
    """Return q [L, K] from pre-norm states [2, L, D] and embeddings [L, D], formula by formula."""
    state = normed(backbone, h) if "h_post" in reads else h
    parts = {"h_pre": state, "h_post": state, "e": e.expand_as(h)}
    u = torch.cat([parts[one] for one in reads.split("+")], -1) @ head.project.weight.T
    z = u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt() * head.norm.weight
    gated = F.silu(z @ head.gate.weight.T) * (z @ head.up.weight.T)
    cond, uncond = u + gated @ head.down.weight.T
    if target == "e":
        guided = uncond + SAMPLING.guidance * (cond - uncond)
        logits = -torch.cdist(guided, backbone.code_embeddings).square() / 2
    else:
        after = (normed(backbone, x) if target == "h_pre" else x for x in (cond, uncond))
        cond, uncond = (backbone.image_head(x) for x in after)
        logits = uncond + SAMPLING.guidance * (cond - uncond)
    p = (logits / SAMPLING.temperature).softmax(-1)
    p = p * (p >= p.sort(-1, descending=True).values[:, SAMPLING.top_k - 1, None])
    return p / p.sum(-1, keepdim=True)


@every_pair
def test_ssd_without_verification_is_the_heads_own_choice(
    backbone: Backbone, reads: str, target: str
) -> None:
    """As Table 19 measures them: every row from the states and codes of the row above."""
    heads = heads_of(backbone, reads, target, horizontal=5)
    made = SpatiallySpeculative(r=0).decode(
        backbone, PROMPT, sampling=SAMPLING, seed=3, sample_keys=[7], heads=heads
    )
    codes, w = made.codes, backbone.grid.cols
    h = both_streams(backbone, PROMPT, codes)
    e = backbone.code_embeddings[codes[0]]
    head = heads.head("vertical", 1)
    for start in range(0, len(e) - w, w):
        above = slice(start, start + w)
        q = q_by_hand(backbone, head, reads, target, h=h[:, above], e=e[above])
        assert torch.equal(q.argmax(-1), codes[0, start + w : start + 2 * w])


@every_pair
def test_every_path_to_q_is_the_same(backbone: Backbone, reads: str, target: str) -> None:
    """Chains and blocks of positions draft from the law that rows do, and that is measured."""
    heads = heads_of(backbone, reads, target, horizontal=3)
    state = backbone.start(PROMPT, sampling=SAMPLING)
    codes = torch.randint(32, (1, 36), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        state.codes.copy_(codes)
    state.forward(codes[:, :35], range(35), phase="commit")
    h, e = both_streams(backbone, PROMPT, codes), backbone.code_embeddings[codes[0]]
    positions, offsets = torch.tensor([[7, 9, 15]]), torch.tensor([[1, 3, 0]])
    q = draft_law(state, heads, "horizontal", positions=positions, offsets=offsets)
    for n, (source, offset) in enumerate(((6, 1), (6, 3))):
        one = slice(source, source + 1)
        head = heads.head("horizontal", offset)
        want = q_by_hand(backbone, head, reads, target, h=h[:, one], e=e[one])
        torch.testing.assert_close(q[:, n], want)
    assert not q[:, 2].any()
    p = state.distribution(range(1, 36))[0]
    found = next(by_offset(backbone, heads, PROMPT, codes, SAMPLING))
    sources = [n for n in range(36) if n % 6 < 5]
    head = heads.head("horizontal", 1)
    q = q_by_hand(backbone, head, reads, target, h=h[:, sources], e=e[sources])
    kept = torch.minimum(p[sources], q).sum(-1).mean()  # p[n] is of position n + 1
    torch.testing.assert_close(found.sampled[0], kept.item())


def test_guidance_moves_a_predicted_embedding(backbone: Backbone) -> None:
    """The code is the one nearest to the guided embedding; streams that agree are left alone."""
    every = backbone.code_embeddings
    uncond, cond = every[:4], every[:4] + (every[4:8] - every[:4]) / 3
    logits = backbone.logits_of(torch.stack([cond, uncond]), "e", 3.0)
    assert logits.argmax(-1).tolist() == [[4, 5, 6, 7]]
    same = torch.stack([cond, cond])
    torch.testing.assert_close(
        backbone.logits_of(same, "e", 3.0), backbone.logits_of(same[:1], "e", 1.0)
    )


def test_embeddings_in_half_precision_are_scored_in_float32() -> None:
    backbone = make_backbone(dtype=torch.bfloat16)
    every = backbone.code_embeddings
    logits = backbone.logits_of(every[None], "e", 1.0)
    assert logits.dtype == torch.float32
    exact = every.double() @ every.double().T - every.double().square().sum(-1) / 2
    torch.testing.assert_close(logits[0].double(), exact, atol=1e-5, rtol=1e-5)
    assert logits[0].argmax(-1).tolist() == list(range(32))


@pytest.mark.parametrize(("reads", "target"), [PAIRS[0], PAIRS[4]])
def test_an_image_alone_is_an_image_in_a_batch(backbone: Backbone, reads: str, target: str) -> None:
    heads = heads_of(backbone, reads, target, horizontal=5)
    for decoder in (SpatiallySpeculative(v=2, b=1, i=1), MultiToken()):
        one, two = (
            decoder.decode(
                backbone,
                [*PROMPT, "two blue squares"][:count],
                sampling=SAMPLING,
                seed=1,
                sample_keys=[1, 2][:count],
                heads=heads,
            ).codes
            for count in (1, 2)
        )
        assert torch.equal(one[0], two[0])


# ------------------------------------------------------------------------------------------ stages
def compose_config(*options: str) -> DictConfig:
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(options))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distilled(tmp_path_factory.mktemp("distill") / "run", images=22, size=36, codes=32)


@pytest.mark.parametrize(("reads", "target"), [PAIRS[0], PAIRS[3], PAIRS[4]])
def test_heads_are_trained_and_decode(
    reads: str, target: str, data: Path, random_checkpoint: str, tmp_path: Path
) -> None:
    shared = [f"model.backbone.path={random_checkpoint}", f"output_dir={tmp_path}", "runtime=cpu"]
    trained = train.run(
        compose_config(
            *shared,
            f"train.data={data}",
            "train.batch_size=4",
            "train.epochs=2",
            "train.lr=1e-2",
            "train.warmup_steps=1",
            "heads.vertical=1",
            f"heads.input={reads}",
            f"heads.target={target}",
        )
    )
    identity = json.loads((trained / "meta.json").read_text())["identity"]
    named = {} if (reads, target) == tuple(PAPERS.values()) else {"input": reads, "target": target}
    assert {key: identity[key] for key in PAPERS if key in identity} == named
    record = json.loads((trained / "heads" / "heads.json").read_text())
    assert (record["input"], record["target"]) == (reads, target)
    assert 0 <= record["validation"]["val/vertical_1/code_agreement"] <= 1
    with (trained / "metrics.csv").open() as lines:
        losses = [float(row["train/loss"]) for row in csv.DictReader(lines)]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    weights = load_file(trained / "heads" / "heads.safetensors")
    assert weights["vertical_1.project.weight"].shape == (32, 64 if "+" in reads else 32)
    made = generate.run(
        compose_config(
            *shared,
            f"heads.path={trained.parent}",
            "decoder=ssd",
            "decoder.r=0",
            f"prompts=[{PROMPT[0]}]",
        )
    )
    assert len(list(made.rglob("*.png"))) == 1
    measured = evaluate.run(
        compose_config(
            *shared,
            f"heads.path={trained}",
            "eval=acceptance",
            "eval.limit=null",
            f"evaluate.images={made}",
        )
    )
    assert json.loads((measured / "scores.json").read_text())["n_scored"] == 1
