"""1D-MTP: the paper's step counts, an uncached reference, and what the strict one adds."""

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
from ssd_research.decoders import multi_token
from ssd_research.decoders.accept import Rejection
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.chain import Chain
from ssd_research.decoders.multi_token import MultiToken, MultiTokenStrict
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling
from table_model import TableBackbone, TableHeads, ar_law

FILTERED = Sampling(2.0, temperature=0.8, top_k=9, top_p=0.9)
GRIDS = ["square", "rows"]


@pytest.fixture(scope="module")
def grids():
    """Backbones and heads: without end-of-row tokens, and with them."""
    found = {"square": make_backbone(grid=4), "rows": lumina_like(3, 5)}
    return {name: (backbone, make_heads(backbone)) for name, backbone in found.items()}


def decode(backbone, heads, decoder, sampling):
    return decoder.decode(
        backbone, PROMPTS, sampling=sampling, seed=SEED, sample_keys=KEYS, heads=heads
    )


def segments(grid):
    step = grid.cols if grid.end_of_row else grid.size
    return [range(start, start + step) for start in range(0, grid.size, step)]


def fixed(alone, decoder):
    """Decode one image with the paper's fixed budget."""
    codes = []
    for segment in segments(alone.backbone.grid):
        if segment.start:
            alone.steps, alone.tokens = alone.steps + 1, alone.tokens + 1
        p = alone.p(codes)[segment.start]
        codes.append(inverted(p, alone.u(segment.start, 0, "sample")))
        alone.step([segment.start], ends=False)
        while len(codes) < segment.stop:
            codes += block(alone, decoder, codes, segment.stop)
    return codes


def block(alone, decoder, codes, stop):
    source = len(codes) - 1
    where = range(source + 1, min(source + 1 + decoder.k_h, stop))
    q = {j: alone.q("horizontal", j - source, source, codes) for j in where}
    tokens = {j: int(q[j].argmax()) for j in where}
    for n in range(1, decoder.rounds + 1):
        p, accepted = alone.p([*codes, *tokens.values()]), 0
        alone.step(where, ends=False)
        for j, x in tokens.items():
            if alone.u(j, n, "accept") < p[j, x] / q[j][x]:
                accepted += 1
            else:
                tokens[j] = inverted((p[j] - q[j]).clamp_min(0), alone.u(j, n, "residual"))
                q[j] = p[j]
        alone.record(("block", n), len(where), accepted)
    alone.step(where, ends=False)
    return list(tokens.values())


def strict(alone, decoder):
    """Decode one image by chains of sampled drafts."""
    codes, number = [alone.first()], 0
    while len(codes) < alone.backbone.grid.size:
        number, source = number + 1, len(codes) - 1
        stop = next(one.stop for one in segments(alone.backbone.grid) if source in one)
        chain = {}
        for j in range(source + 1, min(source + 1 + decoder.k_h, stop)):
            q = alone.q("horizontal", j - source, source, codes)
            chain[j] = inverted(q, alone.u(j, number, "draft")), q
        chain_step(alone, codes, chain, number, stop=alone.backbone.grid.size)
    return codes


@pytest.mark.parametrize(("grid", "sampling"), [("square", Sampling(3.0)), ("rows", FILTERED)])
@pytest.mark.parametrize(
    ("decoder", "reference"),
    [
        (MultiToken(k_h=3), fixed),
        (MultiToken(k_h=2, rounds=3), fixed),
        (MultiToken(k_h=5, rounds=0), fixed),
        (MultiTokenStrict(k_h=3), strict),
        (MultiTokenStrict(k_h=1), strict),
    ],
)
def test_equal_to_the_uncached_reference(grids, grid, sampling, decoder, reference):
    backbone, heads = grids[grid]
    made = decode(backbone, heads, decoder, sampling)
    run = lambda alone: reference(alone, decoder)  # noqa: E731
    assert_equal(made, backbone, sampling, run, heads=heads)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("decoder", [MultiToken(k_h=3), MultiTokenStrict(k_h=3)])
@pytest.mark.parametrize("sampling", [Sampling(1.0), FILTERED])
def test_an_image_alone_is_the_image_in_a_batch(grids, grid, decoder, sampling):
    backbone, heads = grids[grid]
    together = decode(backbone, heads, decoder, sampling)
    for n, (prompt, key) in enumerate(zip(PROMPTS, KEYS, strict=True)):
        one = decoder.decode(
            backbone, [prompt], sampling=sampling, seed=SEED, sample_keys=[key], heads=heads
        )
        assert one.codes[0].tolist() == together.codes[n].tolist()
        assert (one.nfe, one.tokens) == ([together.nfe[n]], [together.tokens[n]])


SMALL = {"dtype": torch.float32, "hidden_size": 8, "layers": 1, "codebook_size": 4, "guidance": 1.0}


@pytest.mark.parametrize(
    ("grid", "steps"),
    [
        pytest.param(TokenGrid(24, 24), 232, id="janus"),
        pytest.param(TokenGrid(48, 48, end_of_row=True), 1056, id="lumina", marks=pytest.mark.slow),
        pytest.param(TokenGrid(90, 90, end_of_row=True), 3420, id="emu3", marks=pytest.mark.slow),
    ],
)
def test_engine_steps_of_the_paper(grid, steps):
    """Step accelerations 2.48, 2.23 and 2.39 over AR's 576, 2352 and 8190 steps (Table 1)."""
    make = lumina_like if grid.end_of_row else make_backbone
    size = (grid.rows, grid.cols) if grid.end_of_row else ()
    backbone = make(*size, **SMALL, grid=24)
    made = MultiToken().decode(
        backbone,
        ["a ring"],
        sampling=backbone.defaults,
        seed=0,
        sample_keys=[0],
        heads=make_heads(backbone, vertical=1),
    )
    assert made.nfe == [steps]
    own = -(-(len(segments(grid)[0]) - 1) // 5)
    assert steps == len(segments(grid)) * (2 * own + 2)


def test_a_row_is_decoded_as_ssd_decodes_its_first(grids):
    """`same procedure as the horizontal component`: row 0 of both is the same, code for code."""
    backbone, heads = grids["rows"]
    ssd = decode(backbone, heads, SpatiallySpeculative(r=0, k_h=3), Sampling(3.0))
    mtp = decode(backbone, heads, MultiToken(k_h=3), Sampling(3.0))
    assert mtp.codes[:, :5].tolist() == ssd.codes[:, :5].tolist()
    assert mtp.codes.tolist() != ssd.codes.tolist()


@pytest.mark.parametrize("grid", GRIDS)
def test_without_temperature_the_strict_one_is_greedy(grids, grid):
    backbone, heads = grids[grid]
    greedy = Sampling(3.0, temperature=1e-9)
    expected = decode(backbone, None, Autoregressive(), greedy)
    made = decode(backbone, heads, MultiTokenStrict(), greedy)
    assert made.codes.tolist() == expected.codes.tolist()
    assert max(made.nfe) <= backbone.grid.size


def variation(decoder, sampling=Sampling(1.0)):  # noqa: B008
    backbone = TableBackbone(TokenGrid(2, 2, end_of_row=True), 3, neighbours=True)
    found = exact_laws(decoder, backbone, ["1"], sampling=sampling, heads=TableHeads(backbone))
    return total_variation(found.probability[0], ar_law(backbone, "1", sampling).numpy())


def plain_p(monkeypatch):
    monkeypatch.setattr(Rejection, "correction", lambda rule, p, q, draft: p)


def argmax_drafts(monkeypatch):
    """Drafts that are not drawn from q, tested as if they were."""
    law = multi_token.draft_law

    def sharper(*args, **options):
        q = law(*args, **options)
        sharper.codes = q.argmax(-1)
        return q

    forward = Chain.forward
    monkeypatch.setattr(multi_token, "draft_law", sharper)
    monkeypatch.setattr(Chain, "forward", lambda c, _, at: forward(c, sharper.codes, at))
    test = Chain.test
    monkeypatch.setattr(
        Chain, "test", lambda c, rule, **o: test(c, rule, **(o | {"drafts": sharper.codes}))
    )


def one_position_before(monkeypatch):
    forward = Chain.forward

    def shifted(chain, drafts, positions):
        p = forward(chain, drafts, positions)
        return torch.cat([p[:, :1], p[:, :-1]], 1)

    monkeypatch.setattr(Chain, "forward", shifted)


@pytest.mark.parametrize("mutant", [plain_p, argmax_drafts, one_position_before])
def test_mutants_of_the_strict_one_are_caught(grids, monkeypatch, mutant):
    backbone, heads = grids["rows"]
    decoder, sampling = MultiTokenStrict(k_h=3), Sampling(3.0)
    mutant(monkeypatch)
    made = decode(backbone, heads, decoder, sampling)
    run = lambda alone: strict(alone, decoder)  # noqa: E731
    assert_other_codes(made, backbone, sampling, run, heads=heads)
    assert variation(decoder) > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiToken(k_h=0), r"decoder\.k_h must be a whole number of at least 1, not 0"),
        (lambda: MultiToken(rounds=-1), r"decoder\.rounds must be a whole number of at least 0"),
        (lambda: MultiTokenStrict(k_h=0), r"decoder\.k_h must be a whole number of at least 1"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("decoder", [MultiToken(k_h=6), MultiTokenStrict(k_h=6)])
def test_heads_have_to_be_there_and_to_reach(grids, decoder):
    backbone, heads = grids["square"]
    with pytest.raises(ValueError, match=f"decoder={decoder.name} needs trained heads"):
        decode(backbone, None, decoder, Sampling(3.0))
    with pytest.raises(ValueError, match=r"up to \+6"):
        decode(backbone, heads, decoder, Sampling(3.0))
    assert decoder.reach(TokenGrid(3, 5, end_of_row=True)) == {"horizontal": 4, "vertical": 0}
