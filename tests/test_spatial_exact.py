"""`accept=strict` and `ssd_exact` against uncached references; their laws by enumeration."""

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
from conftest import make_backbone, make_heads
from enumeration import exact_laws, total_variation
from ssd_research.decoders import jacobi, spatial_exact
from ssd_research.decoders.accept import Rejection
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.chain import Chain
from ssd_research.decoders.noise import KeyedDraw
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.decoders.spatial_exact import RollingDrafts, SpatialJacobi
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling
from table_model import TableBackbone, TableHeads, ar_law

FILTERED = Sampling(2.0, temperature=0.8, top_k=9, top_p=0.9)
GRIDS = ["square", "rows"]


@pytest.fixture(scope="module")
def grids():
    """Backbones and heads: without end-of-row tokens, and with them."""
    found = {"square": make_backbone(grid=4), "rows": lumina_like(4, 5)}
    return {name: (backbone, make_heads(backbone)) for name, backbone in found.items()}


def strict(v, k_h=2):
    return SpatiallySpeculative(accept="strict", v=v, k_h=k_h)


def decode(backbone, heads, decoder, sampling):
    return decoder.decode(
        backbone, PROMPTS, sampling=sampling, seed=SEED, sample_keys=KEYS, heads=heads
    )


def in_blocks(alone, decoder):
    """Decode one image with drafts that are each tested once; {position: (draft, q)}."""
    grid, v = alone.backbone.grid, decoder.v
    cols, codes, number, drafts = grid.cols, [alone.first()], 0, {}
    while len(codes) < grid.size:
        number, n = number + 1, len(codes)
        if n < cols:
            drafts = {
                j: drafted(alone, "horizontal", j - n + 1, n - 1, codes, j, number)
                for j in range(n, min(n + decoder.k_h, cols))
            }
        elif n not in drafts:
            first = (n // cols - 1) // v * v + 1
            rows = range(first, min(first + v, grid.rows))
            drafts = {
                j: drafted(
                    alone, "vertical", y - first + 1, (first - 1) * cols + x, codes, j, number
                )
                for y in rows
                for x in range(cols)
                if (j := y * cols + x) >= n
            }
        chain_step(alone, codes, drafts, number, stop=grid.size)
        drafts = {j: draft for j, draft in drafts.items() if j >= len(codes)}
    return codes


def drafted(alone, axis, offset, source, codes, position, number):
    q = alone.q(axis, offset, source, codes)
    return inverted(q, alone.u(position, number, "draft")), q


def rolling(alone, decoder):
    """Decode one image by MC-SJD from drafts of the row above."""
    grid, v, k_h = alone.backbone.grid, decoder.v, decoder.k_h
    cols, codes, number, drafts = grid.cols, [alone.first()], 0, {}
    while len(codes) < grid.size:
        number, n = number + 1, len(codes)
        stop = n + v * cols
        if n < cols:
            stop = n + cols if n + k_h >= cols else n + k_h
        if decoder.window is not None:
            stop = min(stop, n + decoder.window - 1)
        chain = {}
        for j in range(n, min(stop, grid.size)):
            if j in drafts:
                chain[j] = drafts[j]
            elif j < cols:
                chain[j] = drafted(alone, "horizontal", j - n + 1, n - 1, codes, j, 0)
            else:
                down = next(d for d in range(1, v + 1) if j - d * cols < n)
                chain[j] = drafted(alone, "vertical", down, j - down * cols, codes, j, 0)
        p = chain_step(alone, codes, chain, number, stop=grid.size)
        drafts = {}
        for j in range(len(codes), min(n + len(chain) + 1, grid.size)):
            x, q = chain.get(j, (0, torch.zeros_like(p[j])))
            if j not in chain or alone.u(j, number, "accept") >= p[j, x] / q[x]:
                x = inverted((p[j] - q).clamp_min(0), alone.u(j, number, "residual"))
            drafts[j] = x, p[j]
    return codes


CASES = [
    (strict(1), in_blocks),
    (strict(2, k_h=3), in_blocks),
    (SpatialJacobi(v=1, k_h=2), rolling),
    (SpatialJacobi(v=2, k_h=3), rolling),
    (SpatialJacobi(v=3, k_h=1), rolling),
    (SpatialJacobi(v=2, k_h=2, window=4), rolling),
]


@pytest.mark.parametrize(("grid", "sampling"), [("square", Sampling(3.0)), ("rows", FILTERED)])
@pytest.mark.parametrize(("decoder", "reference"), CASES)
def test_equal_to_the_uncached_reference(grids, grid, sampling, decoder, reference):
    backbone, heads = grids[grid]
    made = decode(backbone, heads, decoder, sampling)
    run = lambda alone: reference(alone, decoder)  # noqa: E731
    assert_equal(made, backbone, sampling, run, heads=heads)


@pytest.mark.parametrize("decoder", [strict(2), SpatialJacobi(v=2, k_h=2)])
@pytest.mark.parametrize("sampling", [Sampling(1.0), FILTERED])
def test_an_image_alone_is_the_image_in_a_batch(grids, decoder, sampling):
    backbone, heads = grids["rows"]
    together = decode(backbone, heads, decoder, sampling)
    for n, (prompt, key) in enumerate(zip(PROMPTS, KEYS, strict=True)):
        one = decoder.decode(
            backbone, [prompt], sampling=sampling, seed=SEED, sample_keys=[key], heads=heads
        )
        assert one.codes[0].tolist() == together.codes[n].tolist()
        assert (one.nfe, one.tokens) == ([together.nfe[n]], [together.tokens[n]])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("decoder", [strict(2), SpatialJacobi(v=2)])
def test_without_temperature_it_is_greedy(grids, grid, decoder):
    backbone, heads = grids[grid]
    greedy = Sampling(3.0, temperature=1e-9)
    expected = decode(backbone, None, Autoregressive(), greedy)
    made = decode(backbone, heads, decoder, greedy)
    assert made.codes.tolist() == expected.codes.tolist()
    assert max(made.nfe) <= backbone.grid.size


class Knowing(DraftHeads):
    """Heads that are never wrong: the states of the greedy image, by place and stream."""

    def __init__(self, backbone, codes):
        super().__init__(backbone.hidden_size, horizontal=5, vertical=3)
        alone = [backbone.hidden_states(PROMPTS, codes)]
        alone.append(
            backbone.hidden_states(PROMPTS, codes, unconditional=torch.tensor([True, True]))
        )
        self.states, self.cols = torch.cat(alone), backbone.grid.cols

    def predict(self, axis, offset, h, e):
        step = offset * (self.cols if axis == "vertical" else 1)
        near = torch.cdist(h, self.states).argmin(-1)
        at = (near + step).clamp_max(self.states.shape[1] - 1)
        return self.states.gather(1, at[..., None].expand_as(h))


@pytest.mark.parametrize(
    ("decoder", "steps"),
    [
        # Row 0 of 5 codes: drafts of 2, a bonus, then what is left of the row, and another bonus.
        pytest.param(strict(1), 1 + 2 + 3, id="strict: a row per step"),
        pytest.param(strict(3), 1 + 2 + 1, id="strict: three rows at once"),
        # Positions 1-3, then 4-9 (a row after the newest code, and a bonus), 10-15, 16-19.
        pytest.param(SpatialJacobi(v=1, k_h=2), 1 + 1 + 3, id="exact: a row per step"),
        pytest.param(SpatialJacobi(v=3, k_h=2), 1 + 1 + 2, id="exact: what is in reach"),
    ],
)
def test_perfect_drafts_are_all_accepted(grids, decoder, steps):
    backbone, _ = grids["rows"]
    greedy = Sampling(3.0, temperature=1e-9)
    codes = decode(backbone, None, Autoregressive(), greedy).codes
    made = decode(backbone, Knowing(backbone, codes), decoder, greedy)
    assert made.codes.tolist() == codes.tolist()
    assert made.rounds[0]["accepted"] == made.rounds[0]["drafted"]
    assert made.nfe == [steps] * 2


def variation(decoder, grid, sampling=Sampling(1.0)):  # noqa: B008
    backbone = TableBackbone(grid, 3, neighbours=True)
    found = exact_laws(decoder, backbone, ["1"], sampling=sampling, heads=TableHeads(backbone))
    return total_variation(found.probability[0], ar_law(backbone, "1", sampling).numpy())


TEST, FORWARD, DRAW = Chain.test, Chain.forward, KeyedDraw.categorical


def kept_keeps_q(monkeypatch):
    """A draft that is kept beyond the first reject keeps its q: the published MC-SJD."""
    seen, carried = {}, jacobi.carried

    def test(chain, rule, **options):
        verdict = TEST(chain, rule, **options)
        kept = verdict.tokens[:, :-1] == options["drafts"]
        seen["x"] = torch.where(kept[..., None], options["q"], options["p"][:, :-1])
        return verdict

    def keeping(p, there, **options):
        p = torch.cat([seen["x"], p[:, -1:]], 1) if there.any() else p
        return carried(p, there, **options)

    monkeypatch.setattr(Chain, "test", test)
    monkeypatch.setattr(jacobi, "carried", keeping)


def drafts_after_a_reject_take_p(monkeypatch):
    """The law of the last pass for drafts that were drawn from the heads'."""
    seen, carried = {}, spatial_exact.carried

    def forward(chain, drafts, positions):
        seen["p"] = FORWARD(chain, drafts, positions)
        return seen["p"]

    def renewed(q, there, **options):
        q = seen["p"][:, : q.shape[1]] if there.any() else q
        return carried(q, there, **options)

    monkeypatch.setattr(Chain, "forward", forward)
    monkeypatch.setattr(spatial_exact, "carried", renewed)


def tested_through(monkeypatch):
    """No stop at the first reject: later drafts are judged under a rejected one."""

    def test(chain, rule, **options):
        verdict = TEST(chain, rule, **(options | {"through": True}))
        there = torch.nn.functional.pad(options["positions"] >= 0, (0, 1))
        fresh = there & ~torch.nn.functional.pad(verdict.kept, (0, 1)) | verdict.fresh
        return type(verdict)(verdict.kept, verdict.tokens, fresh)

    monkeypatch.setattr(Chain, "test", test)


def plain_p(monkeypatch):
    monkeypatch.setattr(Rejection, "correction", lambda rule, p, q, draft: p)


def one_position_before(monkeypatch):
    def forward(chain, drafts, positions):
        p = FORWARD(chain, drafts, positions)
        return torch.cat([p[:, :1], p[:, :-1]], 1)

    monkeypatch.setattr(Chain, "forward", forward)


def law_of_another_head(monkeypatch):
    """q of a head one row farther than the one that drafted."""
    law = spatial_exact.spatial_law

    def other(heads, chain, positions, rows):
        q = law(heads, chain, positions, rows)
        return torch.where((rows > 0)[..., None], q.roll(1, -1), q)

    def drafted(self, chain, positions, new):
        rows = (positions - chain.committed[:, None]) // chain.cols + 1
        q = law(self.heads, chain, positions, torch.where(new, rows, 0))
        draw = chain.noise.at(positions, 0)
        chain.write(positions, draw.categorical(q, purpose="draft", needed=new), new)
        return other(self.heads, chain, positions, torch.where(new, rows, 0))

    monkeypatch.setattr(RollingDrafts, "draft", drafted)


@pytest.mark.parametrize(
    ("mutant", "decoder", "reference"),
    [
        (kept_keeps_q, SpatialJacobi(v=2, k_h=2), rolling),
        (law_of_another_head, SpatialJacobi(v=2, k_h=2), rolling),
        (plain_p, SpatialJacobi(v=2, k_h=2), rolling),
        (drafts_after_a_reject_take_p, strict(2), in_blocks),
        (tested_through, strict(2), in_blocks),
        (plain_p, strict(2), in_blocks),
        (one_position_before, strict(2), in_blocks),
    ],
)
def test_mutants_are_caught(grids, monkeypatch, mutant, decoder, reference):
    """By the reference, and by the law."""
    backbone, heads = grids["square"]
    mutant(monkeypatch)
    made = decode(backbone, heads, decoder, Sampling(3.0))
    run = lambda alone: reference(alone, decoder)  # noqa: E731
    assert_other_codes(made, backbone, Sampling(3.0), run, heads=heads)
    assert variation(decoder, TokenGrid(2, 2)) > 1e-3


@pytest.mark.parametrize(
    "given", [{"b": 2}, {"i": 0}, {"r": 2}, {"horizontal_rounds": 2}, {"final_commit": False}]
)
def test_strict_refuses_what_it_has_no_use_for(given):
    (name,) = given
    with pytest.raises(ValueError, match=rf"decoder\.{name}=.* does nothing with decoder\.accept"):
        SpatiallySpeculative(accept="strict", **given)


def test_what_is_in_force_is_said():
    grid = TokenGrid(4, 5)
    model = {"v": 2, "b": 5, "i": 4}
    ssd = SpatiallySpeculative(accept="strict", operating_point=model)
    assert ssd.settings(grid) == {"v": 2, "k_h": 5, "accept": "strict"}
    assert (ssd.title, ssd.lossless) == ("SSD v=2, accept=strict", True)
    assert not SpatiallySpeculative().lossless
    exact = SpatialJacobi(operating_point=model)
    assert exact.settings(grid) == {"v": 2, "k_h": 5, "window": None}
    assert exact.reach(grid) == ssd.reach(grid) == {"horizontal": 4, "vertical": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"v": 0}, r"decoder\.v must be a whole number of at least 1, not 0"),
        ({"k_h": 0}, r"decoder\.k_h must be a whole number of at least 1, not 0"),
        ({"window": 1}, r"decoder\.window must be a whole number of at least 2, not 1"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SpatialJacobi(**options)


def test_heads_have_to_be_there(grids):
    with pytest.raises(ValueError, match="decoder=ssd_exact needs trained heads"):
        decode(grids["square"][0], None, SpatialJacobi(), Sampling(3.0))
