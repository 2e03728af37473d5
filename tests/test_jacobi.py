"""SJD, MC-SJD and GSD against an uncached reference, one image at a time; groups by hand."""

import pytest
import torch

from alone import (
    KEYS,
    PROMPTS,
    SEED,
    assert_equal,
    assert_other_codes,
    chain_step,
    inverted,
    lumina_like,
)
from conftest import make_backbone
from ssd_research.decoders import jacobi
from ssd_research.decoders.accept import Grouped, Rejection, residual
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.chain import Chain
from ssd_research.decoders.jacobi import Guesses, SpeculativeJacobi
from ssd_research.decoders.noise import KeyedDraw, KeyedNoise
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling

PLAIN, FILTERED = Sampling(1.0), Sampling(2.0, temperature=0.8, top_k=9, top_p=0.9)


@pytest.fixture(scope="module")
def square():
    """A backbone without end-of-row tokens."""
    return make_backbone(grid=4)


@pytest.fixture(scope="module")
def rows():
    """A backbone with end-of-row tokens, and an unconditional prompt of another length."""
    return lumina_like(3, 5)


def decode(backbone, decoder, sampling):
    return decoder.decode(backbone, PROMPTS, sampling=sampling, seed=SEED, sample_keys=KEYS)


def reference(alone, decoder):
    """Decode one image as the papers say; drafts are {position: (code, q)}."""
    size, cols = alone.backbone.grid.size, alone.backbone.grid.cols
    codes, drafts, number = [alone.first()], {}, 0
    while len(codes) < size:
        n, number = len(codes), number + 1
        stop = (n // cols + 1) * cols if decoder.by_row else size
        chain = {}
        for j in range(n, min(n + decoder.window - 1, stop)):
            known = codes + [x for x, _ in chain.values()]
            chain[j] = drafts[j] if j in drafts else first_draft(alone, decoder, j, known)
        odds = {} if decoder.group is None else {"odds": grouped_odds(alone, decoder)}
        p = chain_step(alone, codes, chain, number, stop=stop, **odds)
        drafts = {
            j: (redraft(alone, decoder, j, p[j], chain.get(j), number), p[j])
            for j in range(len(codes), min(n + decoder.window, stop))
        }
    return codes


def first_draft(alone, decoder, j, known):
    size, cols = alone.backbone.codebook_size, alone.backbone.grid.cols
    uniform = torch.full((size,), 1 / size, dtype=torch.float64)
    if decoder.init == "horizontal" and j % cols:
        x = known[j - 1]
    elif decoder.init == "vertical" and j >= cols:
        x = known[j - cols]
    else:
        x = inverted(uniform, alone.u(j, 0, "draft"))
    return x, uniform if decoder.init_q == "uniform" else torch.eye(size).double()[x]


def redraft(alone, decoder, j, p, old, number):
    if decoder.coupling == "gumbel":
        return int((p.log() + alone.gumbel(j)).argmax())
    if decoder.coupling == "none":
        return inverted(p, alone.u(j, number, "draft"))
    if old is None:
        return inverted(p, alone.u(j, number, "residual"))
    x, q = old
    if alone.u(j, number, "accept") < p[x] / q[x]:
        return x
    return inverted((p - q).clamp_min(0), alone.u(j, number, "residual"))


def grouped_odds(alone, decoder):
    table = alone.backbone.code_embeddings

    def odds(p, q, x):
        ranked = sorted(range(len(p)), key=lambda v: (-float(p[v]), v))
        first = ranked.index(x) - decoder.group // 2
        near = ranked[max(0, first) : first + decoder.group]
        alike = [v for v in near if p[v] > 0 and p[x] > 0 and v != x]
        if decoder.delta is not None:
            alike = [v for v in alike if abs(p[v] - p[x]) < decoder.delta]
        if decoder.distance is not None:
            alike = [v for v in alike if (table[v] - table[x]).square().sum() < decoder.distance]
        return p[[x, *alike]].sum() / q[[x, *alike]].sum()

    return odds


DECODERS = {
    "sjd": SpeculativeJacobi(window=5),
    "window of two": SpeculativeJacobi(window=2),
    "window beyond the image": SpeculativeJacobi(window=50, init="horizontal"),
    "horizontal": SpeculativeJacobi(window=9, init="horizontal"),
    "vertical": SpeculativeJacobi(window=9, init="vertical"),
    "uniform": SpeculativeJacobi(window=5, init_q="uniform"),
    "maximal": SpeculativeJacobi(window=7, coupling="maximal"),
    "maximal, uniform": SpeculativeJacobi(window=7, coupling="maximal", init_q="uniform"),
    "gumbel": SpeculativeJacobi(window=7, coupling="gumbel"),
    "by row": SpeculativeJacobi(window=5, by_row=True),
    "by row, maximal": SpeculativeJacobi(window=9, by_row=True, coupling="maximal"),
    "gsd": SpeculativeJacobi(window=5, group=4),
    "gsd, odd": SpeculativeJacobi(window=5, group=7, delta=0.05),
    "gsd, near": SpeculativeJacobi(window=5, group=14, delta=0.15, distance=60.0),
}


@pytest.mark.parametrize("name", DECODERS)
def test_equal_to_the_uncached_reference(square, name):
    decoder, sampling = DECODERS[name], square.defaults
    made = decode(square, decoder, sampling)
    assert_equal(made, square, sampling, lambda alone: reference(alone, decoder))
    assert sum(made.rounds[0]["accepted"]) > 0


@pytest.mark.parametrize("name", ["maximal", "gumbel", "by row", "gsd, odd", "vertical"])
def test_equal_to_the_reference_with_row_ends_and_filters(rows, name):
    decoder = DECODERS[name]
    made = decode(rows, decoder, FILTERED)
    assert_equal(made, rows, FILTERED, lambda alone: reference(alone, decoder))


@pytest.mark.parametrize("name", ["sjd", "maximal", "gumbel", "by row", "gsd"])
@pytest.mark.parametrize("sampling", [Sampling(1.0), FILTERED])
def test_an_image_alone_is_the_image_in_a_batch(rows, name, sampling):
    together = decode(rows, DECODERS[name], sampling)
    for n, (prompt, key) in enumerate(zip(PROMPTS, KEYS, strict=True)):
        one = DECODERS[name].decode(rows, [prompt], sampling=sampling, seed=SEED, sample_keys=[key])
        assert one.codes[0].tolist() == together.codes[n].tolist()
        assert (one.nfe, one.tokens) == ([together.nfe[n]], [together.tokens[n]])


@pytest.mark.parametrize("name", [name for name in DECODERS if "gsd" not in name])
def test_without_temperature_it_is_greedy(square, name):
    greedy = Sampling(3.0, temperature=1e-9)
    expected = decode(square, Autoregressive(), greedy)
    made = decode(square, DECODERS[name], greedy)
    assert made.codes.tolist() == expected.codes.tolist()
    assert max(made.nfe) <= square.grid.size


@pytest.mark.parametrize("name", DECODERS)
def test_every_step_commits_at_least_one_code(rows, name, monkeypatch):
    commit, counts = Chain.commit, []

    def counted(chain, verdict):
        going = chain.committed < chain.size
        counts.append(commit(chain, verdict))
        assert (counts[-1] >= 1).equal(going)
        assert int(counts[-1].max()) <= DECODERS[name].window
        return counts[-1]

    monkeypatch.setattr(Chain, "commit", counted)
    made = decode(rows, DECODERS[name], PLAIN)
    assert made.nfe == [1 + int((torch.stack(counts)[:, n] > 0).sum()) for n in range(2)]
    assert max(made.nfe) <= rows.grid.size


@pytest.mark.parametrize("limits", [{"group": 1}, {"group": 14, "distance": 0.0}])
def test_groups_of_one_are_sjd_code_for_code(square, limits):
    sampling = square.defaults
    expected = decode(square, SpeculativeJacobi(), sampling)
    made = decode(square, SpeculativeJacobi(**limits), sampling)
    assert made.codes.tolist() == expected.codes.tolist()
    assert (made.nfe, made.rounds) == (expected.nfe, expected.rounds)


def test_one_row_is_decoded_like_an_image():
    backbone = make_backbone(grid=4)
    backbone.grid = TokenGrid(1, 16)
    whole, rows = (
        decode(backbone, SpeculativeJacobi(window=6, by_row=by_row), PLAIN)
        for by_row in (False, True)
    )
    assert (whole.codes.tolist(), whole.nfe) == (rows.codes.tolist(), rows.nfe)


def group(p, draft, **options):
    """Return the codes of a draft's group."""
    embeddings = torch.tensor([[0.0], [1], [2], [3], [9]])
    rule = Grouped(
        **({"size": 3, "delta": None, "distance": None} | options), embeddings=embeddings
    )
    codes, member = rule.group(torch.tensor([[p]]), torch.tensor([[draft]]))
    return set(codes[member].tolist())


@pytest.mark.parametrize(
    ("draft", "options", "expected"),
    [
        pytest.param(1, {}, {0, 1, 2}, id="ranks around it, ties by code"),
        pytest.param(0, {}, {0, 1}, id="nothing above the first rank"),
        pytest.param(3, {}, {2, 3}, id="no mass below it"),
        pytest.param(4, {}, {4}, id="without mass it stands alone"),
        pytest.param(1, {"size": 2}, {0, 1}, id="even sizes reach higher up"),
        pytest.param(1, {"size": 4}, {0, 1, 2}, id="four: two above, of which there is one"),
        pytest.param(2, {"size": 9}, {0, 1, 2, 3}, id="all with mass"),
        pytest.param(1, {"delta": 0.2}, {1, 2}, id="p differs by delta: out"),
        pytest.param(2, {"size": 9, "distance": 4.0}, {1, 2, 3}, id="distance 4: out"),
        pytest.param(2, {"size": 9, "distance": 0.0, "delta": 0.0}, {2}, id="itself always"),
    ],
)
def test_groups_by_hand(draft, options, expected):
    assert group([0.5, 0.25, 0.25 - 2**-6, 2**-6, 0.0], draft, **options) == expected


def test_a_group_is_accepted_by_its_mass():
    p, q = torch.tensor([[[0.5, 0.2, 0.3, 0.0]]]), torch.tensor([[[0.1, 0.0, 0.9, 0.0]]])
    rule = Grouped(2, None, None, torch.zeros(4, 1))
    # Ranks are 0, 2, 1, 3: the group of 2 is {0, 2}, that of 1 is {2, 1}.
    odds = [float(rule.odds(p, q, torch.tensor([[x]]))) for x in (2, 1, 0)]
    assert odds == pytest.approx([0.8, 0.5 / 0.9, 1.0])
    assert torch.equal(rule.correction(p, q, torch.tensor([[2]])), residual(p, q))


def test_gumbel_draws_follow_p_and_collide_as_they_should():
    """Two laws give one code with probability sum_v 1 / sum_w max(p_w / p_v, q_w / q_v)."""
    p, q = (
        torch.tensor(one, dtype=torch.float64) for one in ([0.6, 0.3, 0.1, 0], [0.2, 0.3, 0.5, 0])
    )
    count = 20_000
    draw = KeyedNoise(0, range(count)).at(torch.zeros(count, 1, dtype=torch.long), 0)
    one, other = (draw.categorical(x.expand(count, 1, -1), purpose="gumbel")[:, 0] for x in (p, q))
    for x, codes in ((p, one), (q, other)):
        share = codes.bincount(minlength=4) / count
        assert (share - x).abs().max() < 0.015
    p, q = p[:3], q[:3]
    worst = torch.maximum(p / p[:, None], q / q[:, None]).sum(1)
    assert float((one == other).double().mean()) == pytest.approx(
        float((1 / worst).sum()), abs=0.015
    )


TEST, FORWARD, DRAW, DRAFT = Chain.test, Chain.forward, KeyedDraw.categorical, Guesses.draft
CARRIED = jacobi.carried


def kept_keeps_q(monkeypatch):
    """The published code of two backbones: q stays for a kept draft, though it was redrawn."""
    seen = {}

    def test(chain, rule, **options):
        verdict = TEST(chain, rule, **options)
        q, kept = options["q"], verdict.tokens[:, :-1] == options["drafts"]
        seen["x"] = torch.where(kept[..., None], q, options["p"][:, :-1])
        return verdict

    def carried(p, there, **options):
        if there.any():
            p = torch.cat([seen["x"], p[:, -1:]], 1)
        return CARRIED(p, there, **options)

    monkeypatch.setattr(Chain, "test", test)
    monkeypatch.setattr(jacobi, "carried", carried)


def plain_p(monkeypatch):
    monkeypatch.setattr(Rejection, "correction", lambda rule, p, q, draft: p)


def filtered_again(monkeypatch):
    def correction(rule, p, q, draft):
        return FILTERED.distribution(residual(p, q).log())

    monkeypatch.setattr(Rejection, "correction", correction)


def one_position_before(monkeypatch):
    def forward(chain, drafts, positions):
        p = FORWARD(chain, drafts, positions)
        return torch.cat([p[:, :1], p[:, :-1]], 1)

    monkeypatch.setattr(Chain, "forward", forward)


def residual_of_shared_noise(monkeypatch):
    def categorical(draw, p, *, purpose, needed=None):
        if purpose == "residual":
            draw, purpose = draw.noise.at(draw.positions, 0), "gumbel"
        return DRAW(draw, p, purpose=purpose, needed=needed)

    monkeypatch.setattr(KeyedDraw, "categorical", categorical)


def uniform_for_a_copy(monkeypatch):
    def draft(guesses, chain, positions, new):
        q = DRAFT(guesses, chain, positions, new)
        return torch.full_like(q, 1 / q.shape[-1])

    monkeypatch.setattr(Guesses, "draft", draft)


@pytest.mark.parametrize(
    ("mutant", "name", "sampling"),
    [
        (kept_keeps_q, "maximal", Sampling(3.0)),
        (plain_p, "sjd", Sampling(3.0)),
        (plain_p, "maximal", Sampling(3.0)),
        (filtered_again, "sjd", FILTERED),
        (filtered_again, "maximal", FILTERED),
        (one_position_before, "sjd", Sampling(3.0)),
        (one_position_before, "maximal", Sampling(3.0)),
        (residual_of_shared_noise, "gumbel", Sampling(3.0)),
        (uniform_for_a_copy, "horizontal", Sampling(3.0)),
    ],
)
def test_mutants_are_caught(square, monkeypatch, mutant, name, sampling):
    """Each plausible mistake changes codes, not only counts; test_exactness.py has their laws."""
    decoder = DECODERS[name]
    mutant(monkeypatch)
    made = decode(square, decoder, sampling)
    assert_other_codes(made, square, sampling, lambda alone: reference(alone, decoder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, r"decoder\.window must be a whole number of at least 2, not 1"),
        ({"init": "diagonal"}, "decoder.init=diagonal is not one of random, horizontal, vertical"),
        ({"init_q": "p"}, "decoder.init_q=p is not one of one_hot, uniform"),
        ({"coupling": "max"}, "decoder.coupling=max is not one of none, maximal, gumbel"),
        ({"init": "vertical", "init_q": "uniform"}, "not drawn from a uniform law"),
        ({"group": 0}, "decoder.group must be a whole number of at least 1, not 0"),
        ({"group": 3, "delta": -1}, "decoder.delta must be a number of at least 0, not -1"),
        ({"distance": 0.5}, "decoder.distance=0.5 does nothing without decoder.group"),
        ({"group": 3, "coupling": "maximal"}, "decoder.coupling=maximal couples drafts"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeJacobi(**options)


def test_settings_and_law_say_what_is_in_force():
    grid = TokenGrid(2, 2)
    assert SpeculativeJacobi().settings(grid) == {
        "window": 16,
        "init": "random",
        "init_q": "one_hot",
        "coupling": "none",
        "by_row": False,
    }
    gsd = SpeculativeJacobi(group=14, delta=0.15)
    assert gsd.settings(grid)["group"] == 14
    assert (SpeculativeJacobi().lossless, gsd.lossless) == (True, False)
