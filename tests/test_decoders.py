"""Decoders on a random backbone of the real classes: counts, batches and corner cases."""

import gc
import itertools
import weakref
from collections import Counter

import pytest
import torch

from conftest import both_streams, make_backbone, make_heads
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.noise import KeyedNoise, sample_key
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling

PROMPTS = [
    "a red circle",
    "a photo of three blue stars",
    "a large pink square left of a small black circle",
    "a ring and a cross",
    "four triangles",
    "a photo of a ring",
    "an orange star above a red star",
    "a green cross",
]
KEYS = [sample_key(str(n), 0) for n in range(len(PROMPTS))]
GRID = TokenGrid(6, 6)
BUDGETS = [(1, 0, 0), (1, 2, 0), (2, 3, 2), (3, 2, 1), (3, 1, 0)]


@pytest.fixture(scope="module")
def sampling(random_backbone):
    return random_backbone.defaults


@pytest.mark.parametrize(("r", "nfe"), list(enumerate([34, 57, 80, 103, 126])))
def test_engine_nfe_on_the_janus_grid(r, nfe):
    backbone = make_backbone(dtype=torch.float32, grid=24, hidden_size=16, layers=1)
    heads = make_heads(backbone)
    made = SpatiallySpeculative(r=r).decode(
        backbone, ["a ring"], sampling=backbone.defaults, seed=0, sample_keys=[0], heads=heads
    )
    assert made.nfe == [nfe]


def test_autoregressive_takes_one_forward_per_code(random_backbone, sampling):
    made = Autoregressive().decode(
        random_backbone, PROMPTS[:2], sampling=sampling, seed=0, sample_keys=KEYS[:2]
    )
    assert made.nfe == [random_backbone.grid.size] * 2
    assert made.codes.shape == (2, random_backbone.grid.size)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("final", [True, False])
def test_engine_costs_what_the_schedule_says(
    random_backbone, random_heads, sampling, budget, final
):
    v, b, i = budget
    decoder = SpatiallySpeculative(v=v, b=b, i=i, final_commit=final)
    made = decoder.decode(
        random_backbone, PROMPTS[:1], sampling=sampling, seed=0, sample_keys=[1], heads=random_heads
    )
    schedule = decoder.schedule(random_backbone.grid)
    assert made.nfe == [schedule.nfe()]
    assert made.tokens == [sum(p.stop - p.start for p in schedule.passes())]
    drafted = Counter()
    for p in schedule.passes():
        if p.phase == "verify":
            drafted[p.stage, p.round] += p.stop - p.start
    rounds = [(entry["stage"], entry["round"], entry["drafted"]) for entry in made.rounds]
    assert rounds == [(*key, [count]) for key, count in drafted.items()]


@pytest.mark.parametrize(
    "decoder",
    [
        Autoregressive(),
        SpatiallySpeculative(r=2),
        SpatiallySpeculative(v=3, b=2, i=1),
        SpatiallySpeculative(r=1, accept="sample"),
    ],
    ids=["ar", "r2", "v3b2i1", "sample"],
)
def test_a_batch_of_eight_equals_each_alone(random_backbone, random_heads, sampling, decoder):
    options = {"sampling": sampling, "seed": 5, "heads": random_heads}
    together = decoder.decode(random_backbone, PROMPTS, sample_keys=KEYS, **options)
    for n, prompt in enumerate(PROMPTS):
        alone = decoder.decode(random_backbone, [prompt], sample_keys=[KEYS[n]], **options)
        assert torch.equal(alone.codes[0], together.codes[n])


@pytest.mark.parametrize("decoder", [Autoregressive(), SpatiallySpeculative(r=1)])
def test_the_cache_is_gone_when_images_are_decoded(random_backbone, random_heads, decoder):
    """Memory of the decoding must not be held while the image decoder works."""
    made = []
    new_cache = random_backbone.new_cache

    def watched(*args, **options):
        made.append(weakref.ref(cache := new_cache(*args, **options)))
        return cache

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(random_backbone, "new_cache", watched)
            decoder.decode(
                random_backbone,
                PROMPTS[:1],
                sampling=random_backbone.defaults,
                seed=0,
                sample_keys=[1],
                heads=random_heads if decoder.needs_heads else None,
            )
        assert [ref() for ref in made] == [None]
    finally:
        gc.enable()


def test_last_commit_is_read_by_nothing(random_backbone, random_heads, sampling):
    options = {"sampling": sampling, "seed": 5, "heads": random_heads, "sample_keys": KEYS[:2]}
    full = SpatiallySpeculative(r=2).decode(random_backbone, PROMPTS[:2], **options)
    less = SpatiallySpeculative(r=2, final_commit=False).decode(
        random_backbone, PROMPTS[:2], **options
    )
    assert torch.equal(full.codes, less.codes)
    assert full.nfe == [n + 1 for n in less.nfe]


def test_draft_without_verification_is_the_heads_argmax(random_backbone, random_heads, sampling):
    """Replays r = 0 from teacher-forced states, an independent path through the model."""
    made = SpatiallySpeculative(r=0).decode(
        random_backbone, PROMPTS[:1], sampling=sampling, seed=3, sample_keys=[7], heads=random_heads
    )
    codes, w = made.codes, random_backbone.grid.cols
    h = both_streams(random_backbone, PROMPTS[:1], codes)
    e = random_backbone.embed(codes).repeat(2, 1, 1)
    for y in range(1, random_backbone.grid.rows):
        above = slice((y - 1) * w, y * w)
        h_hat = random_heads.predict("vertical", 1, h[:, above], e[:, above])
        want = random_backbone.logits(h_hat, sampling.guidance).argmax(-1)
        assert torch.equal(want[0], codes[0, y * w : (y + 1) * w])


def test_one_round_of_the_first_row_by_hand(random_backbone, random_heads, sampling):
    """Recomputes draft, p and the published accept rule of the first cycle from scratch."""
    seed, key = 9, 123
    made = SpatiallySpeculative(r=0).decode(
        random_backbone,
        PROMPTS[:1],
        sampling=sampling,
        seed=seed,
        sample_keys=[key],
        heads=random_heads,
    )
    noise, w = KeyedNoise(seed, [key]), random_backbone.grid.cols
    state = random_backbone.start(PROMPTS[:1], sampling=sampling)
    h0, first = state.h_pre[:, :1], made.codes[:, :1]
    e0 = random_backbone.embed(first).repeat(2, 1, 1)
    drafts, qs = [], []
    for k in range(1, w):
        q = state.distribution_of(random_heads.predict("horizontal", k, h0, e0))[:, 0]
        qs.append(q), drafts.append(q.argmax(-1))
    draft = torch.stack(drafts, 1)
    fed = torch.cat([first, draft], 1)
    full = torch.cat([fed, made.codes[:, w:]], 1)
    p = state.distribution_of(both_streams(random_backbone, PROMPTS[:1], full)[:, 1:w])
    positions = torch.arange(1, w)[None]
    u = noise.uniform(positions, round=1, purpose="accept")[0]
    u_residual = noise.uniform(positions, round=1, purpose="residual")[0]
    accepted = 0
    for n in range(w - 1):
        pn, qn, t = p[0, n], qs[n][0], int(draft[0, n])
        if u[n] < min(1.0, float(pn[t] / qn[t])):
            want, accepted = t, accepted + 1
        else:
            mass = (pn - qn).clamp_min(0).cumsum(0)
            want = int((mass <= u_residual[n] * mass[-1]).sum())
        assert int(made.codes[0, n + 1]) == want
    assert made.rounds == [
        {"stage": "horizontal", "round": 1, "drafted": [w - 1], "accepted": [accepted]}
    ]


def test_guidance_one_needs_one_stream(random_backbone, random_heads):
    alone = Sampling(guidance=1.0)
    state = random_backbone.start(PROMPTS[:2], sampling=alone)
    assert state.streams == 2
    made = SpatiallySpeculative(r=1).decode(
        random_backbone, PROMPTS[:2], sampling=alone, seed=0, sample_keys=[1, 2], heads=random_heads
    )
    assert made.codes.shape == (2, 36)


def test_noise_does_not_depend_on_company():
    positions = torch.arange(5)[None].expand(3, -1)
    together = KeyedNoise(1, [10, 20, 30]).uniform(positions, round=2, purpose="accept")
    alone = KeyedNoise(1, [20]).uniform(positions[:1, 3:], round=2, purpose="accept")
    assert torch.equal(together[1:2, 3:], alone)
    variants = [
        KeyedNoise(s, [k]).uniform(positions[:1], round=r, purpose=p)
        for s, k, r, p in itertools.product((0, 1), (10, -10), (0, 1), ("accept", "residual"))
    ]
    assert len({v[0, 0].item() for v in variants}) == len(variants)


def test_noise_is_uniform():
    u = KeyedNoise(3, list(range(200))).uniform(
        torch.arange(100).expand(200, -1), round=0, purpose="sample"
    )
    counts = torch.histc(u, 20, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8  # chi-square, 19 df, p = 1e-3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"r": 2, "b": 2}, "give either r"),
        ({"r": 1, "v": 2}, "give either r"),
        ({"r": -1}, "decoder.r must be a whole number of at least 0"),
        ({"accept": "maybe"}, "reject, sample, argmax"),
        ({"v": 1, "i": 2}, "decoder.i=2 does nothing"),
        ({"v": 0}, "decoder.v must be a whole number of at least 1"),
    ],
)
def test_bad_budgets_name_the_option(options, words):
    with pytest.raises(ValueError, match=words):
        SpatiallySpeculative(**options)


def test_settings_do_not_depend_on_how_the_budget_was_given():
    given = SpatiallySpeculative(r=2), SpatiallySpeculative(v=1, b=2), SpatiallySpeculative()
    assert len({str(sorted(d.settings(GRID).items())) for d in given}) == 1
    assert SpatiallySpeculative(r=3).settings(GRID) != given[0].settings(GRID)


def test_lookahead_beyond_the_trained_heads(random_backbone, random_heads, sampling):
    with pytest.raises(ValueError, match="vertical"):
        SpatiallySpeculative(v=4, b=1).decode(
            random_backbone,
            PROMPTS[:1],
            sampling=sampling,
            seed=0,
            sample_keys=[0],
            heads=random_heads,
        )


def test_missing_heads_and_keys(random_backbone, sampling):
    with pytest.raises(ValueError, match="needs trained heads"):
        SpatiallySpeculative(r=1).decode(
            random_backbone, PROMPTS[:1], sampling=sampling, seed=0, sample_keys=[0]
        )
    with pytest.raises(ValueError, match="as many keys"):
        Autoregressive().decode(
            random_backbone, PROMPTS[:1], sampling=sampling, seed=0, sample_keys=[0, 1]
        )
