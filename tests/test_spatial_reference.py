"""SSD against an uncached reference of its own, which knows no schedule, no cache and no state."""

import pytest
import torch

from conftest import both_streams, make_heads
from ssd_research.backbones.janus import JanusBackbone
from ssd_research.backbones.tiny import random_model
from ssd_research.decoders import spatial
from ssd_research.decoders.noise import KeyedNoise
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling

PROMPTS = ["a red circle", "a large pink square left of a small black circle"]
SEED, KEYS = 11, [101, 202]
K_H = 3  # several cycles in row 0, the last one shorter
BUDGETS = [(1, 0, 0), (1, 2, 0), (2, 3, 2), (3, 2, 1), (3, 1, 0)]


def law(backbone, sampling, h):
    """Return the guided, filtered distribution of pre-norm states [2B, L, D]."""
    cond, uncond = backbone.image_head(backbone.decoder.norm.forward(h)).chunk(2)
    logits = (uncond + sampling.guidance * (cond - uncond)) / sampling.temperature
    if sampling.top_k is not None:
        ranked = logits.sort(-1, descending=True).values
        logits = logits.masked_fill(logits < ranked[..., sampling.top_k - 1, None], -torch.inf)
    return logits.softmax(-1)


def reference(backbone, heads, *, budget, accept, sampling):
    """Decode from the paper's text: every pass recomputes every state from the codes in place.

    Returns the codes and the rounds. Codes not yet known are junk, which causality must hide.
    """
    (v, b, i), (height, width) = budget, (backbone.grid.rows, backbone.grid.cols)
    noise, every = KeyedNoise(SEED, KEYS), torch.arange(height * width)
    junk = torch.Generator().manual_seed(1)
    codes = torch.randint(backbone.codebook_size, (len(PROMPTS), len(every)), generator=junk)
    q = torch.zeros(*codes.shape, backbone.codebook_size, dtype=torch.float64)
    rounds = {}

    def row(first, count=1):
        return slice(first * width, (first + count) * width)

    def uniform(span, number, purpose):
        positions = every[span].expand(len(PROMPTS), -1)
        return noise.uniform(positions, round=number, purpose=purpose)

    def inverted(mass, u):
        cumulative = mass.cumsum(-1)
        return (cumulative <= u[..., None] * cumulative[..., -1:]).sum(-1)

    def draft(axis, source, targets):
        h = both_streams(backbone, PROMPTS, codes)[:, source]
        e = backbone.code_embeddings[codes[:, source]].repeat(2, 1, 1)
        for offset, target in enumerate(targets, 1):
            q[:, target] = law(backbone, sampling, heads.head(axis, offset)(h, e))
            codes[:, target] = q[:, target].argmax(-1)

    def correct(span, stage, number, key):
        p = law(backbone, sampling, both_streams(backbone, PROMPTS, codes)[:, span])
        old, at = q[:, span].clone(), codes[:, span, None].clone()
        if accept == "reject":
            kept = uniform(span, key, "accept") < (p.gather(-1, at) / old.gather(-1, at))[..., 0]
            corrected = inverted((p - old).clamp_min(0), uniform(span, key, "residual"))
            new = torch.where(kept, at[..., 0], corrected)
        else:
            sampled = inverted(p, uniform(span, key, "sample"))
            new = p.argmax(-1) if accept == "argmax" else sampled
            kept = new == at[..., 0]
        codes[:, span], q[:, span] = new, torch.where(kept[..., None], old, p)
        drafted, accepted = rounds.get((stage, number), (0, 0))
        rounds[stage, number] = (drafted + kept.shape[1], accepted + kept.sum(1))

    p = law(backbone, sampling, both_streams(backbone, PROMPTS, codes)[:, :1])
    codes[:, :1] = inverted(p, uniform(slice(0, 1), 0, "sample"))
    x = 0
    while x < width - 1:
        g = min(K_H, width - 1 - x)
        draft("horizontal", slice(x, x + 1), [slice(x + k, x + k + 1) for k in range(1, g + 1)])
        correct(slice(x + 1, x + g + 1), "horizontal", 1, key=1)
        x += g
    y = 0
    while y < height - 1:
        m = min(v, height - 1 - y)
        draft("vertical", row(y), [row(y + d) for d in range(1, m + 1)])
        for n in range(1, b + 1):
            correct(row(y + 1, m), "base", n, key=n)
        for d in range(2, m + 1):
            for n in range(1, i + 1):
                correct(row(y + d), "incremental", n, key=b + n)
        y += m
    return codes, [
        {
            "stage": stage,
            "round": n,
            "drafted": [drafted] * len(PROMPTS),
            "accepted": accepted.tolist(),
        }
        for (stage, n), (drafted, accepted) in rounds.items()
    ]


def decode(backbone, heads, *, budget, accept, sampling):
    v, b, i = budget
    decoder = SpatiallySpeculative(v=v, b=b, i=i, k_h=K_H, accept=accept)
    return decoder.decode(
        backbone, PROMPTS, sampling=sampling, seed=SEED, sample_keys=KEYS, heads=heads
    )


def assert_equal_to_the_reference(backbone, heads, **options):
    made = decode(backbone, heads, **options)
    codes, rounds = reference(backbone, heads, **options)
    assert made.codes.tolist() == codes.tolist()
    assert made.rounds == rounds
    return made


@pytest.mark.parametrize("accept", ["reject", "sample", "argmax"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_ssd_equals_the_uncached_reference(random_backbone, random_heads, budget, accept):
    assert_equal_to_the_reference(
        random_backbone,
        random_heads,
        budget=budget,
        accept=accept,
        sampling=random_backbone.defaults,
    )


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(2.0, temperature=0.8, top_k=4)])
def test_filters_and_guidance_serve_p_and_q_alike(random_backbone, random_heads, sampling):
    assert_equal_to_the_reference(
        random_backbone, random_heads, budget=(2, 2, 1), accept="reject", sampling=sampling
    )


class LuminaLike(JanusBackbone):
    """Janus's classes with Lumina's habits: end-of-row tokens and a short unconditional prompt."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.grid = TokenGrid(5, 7, end_of_row=True)

    def end_of_row_embedding(self):
        return self.decoder.get_input_embeddings().weight[-1][None, None]

    def unconditional_ids(self, ids):
        return [ids[0], self.tokenizer.pad_token_id, ids[-1]]


@pytest.mark.parametrize("budget", [(2, 2, 1), (3, 1, 1)])
def test_ssd_on_a_grid_with_end_of_row_tokens(budget):
    model, tokenizer = random_model()
    backbone = LuminaLike(model.double(), tokenizer, name="lumina", defaults=Sampling(3.0))
    state = backbone.start(PROMPTS, sampling=backbone.defaults)
    assert state.lengths.unique().numel() == 3
    assert state.lengths[2:].tolist() == [3, 3]
    made = assert_equal_to_the_reference(
        backbone, make_heads(backbone), budget=budget, accept="reject", sampling=backbone.defaults
    )
    v, b, i = budget
    blocks = [2, 2] if v == 2 else [3, 1]
    row_passes = sum(m * (b + 1) + (m - 1) * i for m in blocks)
    tokens = 2 * (7 - 1) + row_passes * (7 + 1)  # row + newline, paper Table 12
    assert made.tokens == [tokens] * len(PROMPTS)


VERIFY, COMMIT, PREDICT = spatial._Work.verify, spatial._Work.commit, DraftHeads.predict


def always_p(work, span, q, **options):
    VERIFY(work, span, q, **options)
    return work.state.distribution(span)


def always_q(work, span, q, **options):
    VERIFY(work, span, q, **options)
    return q


def swapped(work, span, q, **options):
    kept, p = VERIFY(work, span, q, **options), work.state.distribution(span)
    return torch.where((kept == p).all(-1, keepdim=True), q, p)


def first_rows_q(work, span, q, *, stage, number, **options):
    if stage == "incremental" and number == 1:
        q = work.state.joint[:, : q.shape[1]]
    work.state.joint = VERIFY(work, span, q, stage=stage, number=number, **options)
    return work.state.joint


def base_noise_again(work, span, q, **options):
    return VERIFY(work, span, q, **(options | {"after": 0}))


def no_commit_before_incremental(work, span, *, needed):
    """Skip the first row of each block, which is an odd one at v = 2."""
    if span.start // work.state.backbone.grid.cols % 2 == 0:
        COMMIT(work, span, needed=needed)


def no_commit_before_drafting(work, span, *, needed):
    """Skip the last row of each block, an even one at v = 2; row 0 has cycles instead."""
    y = span.start // work.state.backbone.grid.cols
    if y == 0 or y % 2 == 1:
        COMMIT(work, span, needed=needed)


def one_vertical_head(heads, axis, offset, h, e):
    return PREDICT(heads, axis, 1 if axis == "vertical" else offset, h, e)


@pytest.fixture(scope="module")
def expected(random_backbone, random_heads):
    codes, rounds = reference(
        random_backbone,
        random_heads,
        budget=(2, 3, 2),
        accept="reject",
        sampling=random_backbone.defaults,
    )
    return codes.tolist(), rounds


@pytest.mark.parametrize(
    ("owner", "method", "mutant"),
    [
        (spatial._Work, "verify", always_p),
        (spatial._Work, "verify", always_q),
        (spatial._Work, "verify", swapped),
        (spatial._Work, "verify", first_rows_q),
        (spatial._Work, "verify", base_noise_again),
        (spatial._Work, "commit", no_commit_before_incremental),
        (spatial._Work, "commit", no_commit_before_drafting),
        (DraftHeads, "predict", one_vertical_head),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_mutants_are_caught(
    random_backbone, random_heads, expected, monkeypatch, owner, method, mutant
):
    """The comparison above has teeth: each plausible mistake changes codes, not only counts."""
    monkeypatch.setattr(owner, method, mutant)
    made = decode(
        random_backbone,
        random_heads,
        budget=(2, 3, 2),
        accept="reject",
        sampling=random_backbone.defaults,
    )
    assert made.codes.tolist() != expected[0]
