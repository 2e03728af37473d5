"""ZipAR against an uncached reference of its own, which knows no rows, no cache and no mask."""

from dataclasses import replace

import pytest
import torch

from ssd_research.backbones.state import DecodingState
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.rows import Rows
from ssd_research.decoders.zipar import ZipAR
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling
from uncached import GRIDS, KEYS, PROMPTS, SEED, Holed, backbone_on, invert, shaped


def fixed(*args, window, **options):
    """Decode on the fixed schedule: pass number r w + c + 1 samples cell (r, c)."""
    one = Holed(*args, **options)
    height, width = one.grid.rows, one.grid.cols
    w = min(window, width)
    for number in range(1, (height - 1) * w + width + 1):
        now = [(r, number - 1 - r * w) for r in range(height) if 0 <= number - 1 - r * w < width]
        if number > 1:
            fed = one.new_cells()
            for r, c in now:
                fed |= one.heads(r - 1) if c == 0 else {}
            one.feed(fed)
        laws = {cell: one.law(*cell) for cell in now}
        one.cells |= {cell: invert(p, one.uniform(*cell)) for cell, p in laws.items()}
    return one.codes(), number


def adaptive(*args, window, **options):
    """Decode with an adaptive window, row by row of the definition."""
    one = Holed(*args, **options)
    height, width = one.grid.rows, one.grid.cols
    count, candidate, q, number, tests = [1] + [0] * (height - 1), None, None, 1, [0, 0]
    one.cells[0, 0] = invert(one.law(0, 0), one.uniform(0, 0))
    while sum(count) < height * width:
        number += 1
        last = max(r for r in range(height) if count[r])
        waits = last + 1 < height and count[last] >= window
        one.feed(one.new_cells() | (one.heads(last) if waits else {}))
        laws = {r: one.law(r, count[r]) for r in range(height) if 0 < count[r] < width}
        if waits:
            head, p = (last + 1, 0), one.law(last + 1, 0)
            kept, full = False, count[last] == width
            if candidate is None:
                candidate = invert(p, one.uniform(*head))
            else:
                tests[0] += 1
                kept = one.uniform(*head, "accept", number - 1) < p[candidate] / q[candidate]
                tests[1] += int(kept)
                if not kept:
                    u = one.uniform(*head, "residual", number - 1)
                    candidate = invert((p - q).clamp_min(0), u)
            q = p
            if kept or full:
                one.cells[head], count[last + 1], candidate = candidate, 1, None
        for r, p in laws.items():
            one.cells[r, count[r]] = invert(p, one.uniform(r, count[r]))
            count[r] += 1
    return one.codes(), number, tests


def decode(backbone, sampling=None, prompts=PROMPTS, keys=KEYS, **options):
    return ZipAR(**options).decode(
        backbone,
        prompts,
        sampling=sampling or backbone.defaults,
        seed=SEED,
        sample_keys=keys,
    )


def both(backbone, run, **options):
    """Return what a reference makes of each image."""
    options = {"sampling": backbone.defaults} | options
    return [run(backbone, *one, **options) for one in zip(PROMPTS, KEYS, strict=True)]


@pytest.mark.parametrize(
    ("grid", "window"),
    [
        *[("square", w) for w in (1, 2, 5)],
        *[("ends", w) for w in (1, 3, 9)],
        *[("wide", 4), ("tall", 2), ("one_row", 2), ("one_ending_row", 1)],
    ],
)
def test_zipar_equals_the_uncached_reference(grid, window):
    made = decode(backbone_on(grid), window=window)
    for n, (codes, passes) in enumerate(both(backbone_on(grid), fixed, window=window)):
        assert made.codes[n].tolist() == codes
        assert made.nfe[n] == passes + 1


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(2.0, temperature=0.8, top_k=4)])
@pytest.mark.parametrize("grid", ["square", "ends"])
def test_filters_and_guidance(grid, sampling):
    made = decode(backbone_on(grid), sampling, window=2)
    want = both(backbone_on(grid), fixed, sampling=sampling, window=2)
    assert made.codes.tolist() == [codes for codes, _ in want]


@pytest.mark.parametrize("window", [1, 4])
def test_a_proxy_from_the_row_above(window):
    made = decode(backbone_on("square"), window=window, proxy="row_above")
    want = both(backbone_on("square"), fixed, window=window, proxy="row_above")
    assert made.codes.tolist() == [codes for codes, _ in want]


@pytest.mark.parametrize(
    ("grid", "window"),
    [*[("square", w) for w in (1, 2, 4)], ("ends", 1), ("ends", 3), ("wide", 2), ("tall", 1)],
)
def test_an_adaptive_window_equals_the_uncached_reference(grid, window):
    made = decode(backbone_on(grid), window=window, adaptive=True)
    want = both(backbone_on(grid), adaptive, window=window)
    assert made.codes.tolist() == [codes for codes, _, _ in want]
    assert made.nfe == [passes + 1 for _, passes, _ in want]
    (tests,) = made.rounds
    assert tests["stage"] == "row_head"
    assert tests["drafted"] == [drafted for _, _, (drafted, _) in want]
    assert tests["accepted"] == [accepted for _, _, (_, accepted) in want]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("more", [0, 100])
def test_a_window_of_a_whole_row_is_autoregressive(grid, more):
    backbone = backbone_on(grid)
    made = decode(backbone, window=backbone.grid.cols + more, final_commit=False)
    want = Autoregressive().decode(
        backbone, PROMPTS, sampling=backbone.defaults, seed=SEED, sample_keys=KEYS
    )
    assert torch.equal(made.codes, want.codes)
    assert made.nfe == [backbone.grid.size] * 2


@pytest.mark.parametrize("options", [{}, {"adaptive": True}, {"final_commit": False}])
@pytest.mark.parametrize("grid", ["square", "ends"])
def test_an_image_in_a_batch_equals_it_alone(grid, options):
    prompts = [*PROMPTS, "a green cross", "a photo of three blue stars"]
    keys = [*KEYS, 303, 404]
    together = decode(backbone_on(grid), prompts=prompts, keys=keys, window=2, **options)
    for n, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
        alone = decode(backbone_on(grid), prompts=[prompt], keys=[key], window=2, **options)
        assert torch.equal(alone.codes[0], together.codes[n])
        assert (alone.nfe[0], alone.tokens[0]) == (together.nfe[n], together.tokens[n])


def test_adaptive_images_advance_at_their_own_pace():
    made = decode(
        backbone_on("ends"), prompts=[PROMPTS[0]] * 4, keys=[1, 2, 3, 4], window=1, adaptive=True
    )
    assert len(set(made.nfe)) > 1


@pytest.mark.parametrize("grid", ["square", "ends"])
def test_last_commit_is_read_by_nothing(grid):
    full = decode(backbone_on(grid), window=2)
    less = decode(backbone_on(grid), window=2, final_commit=False)
    assert torch.equal(full.codes, less.codes)
    assert (full.nfe, full.tokens) == ([n + 1 for n in less.nfe], [n + 1 for n in less.tokens])


@pytest.mark.parametrize(
    ("rows", "cols", "end_of_row", "window", "nfe"),
    [
        (24, 24, False, 8, 209),
        pytest.param(48, 48, True, 16, 801, marks=pytest.mark.slow),
        pytest.param(90, 90, True, 16, 1515, marks=pytest.mark.slow),
    ],
    ids=["janus", "lumina", "emu3"],
)
def test_steps_of_the_paper(rows, cols, end_of_row, window, nfe):
    grid = TokenGrid(rows, cols, end_of_row=end_of_row)
    size = {"grid": cols + 1, "hidden_size": 16, "layers": 1}
    backbone = shaped(grid, dtype=torch.float32, **size)
    made = decode(backbone, prompts=["a ring"], keys=[0], window=window)
    assert made.nfe == [nfe] == [(rows - 1) * window + cols + 1]
    assert made.tokens == [rows * cols + rows - 1]  # every code, and what every later row follows


FEED, UNFED, HEADS, PRESENT = DecodingState.feed, Rows.unfed, Rows._heads, Rows.present


def holes_seen(rows):
    return torch.ones_like(PRESENT.fget(rows))


def heads_unseen(rows):
    rows.headed = torch.zeros_like(rows.headed)
    return PRESENT.fget(rows)


def tokens_of_this_pass_unseen(rows):
    fed, rows.fed = rows.fed, (rows.fed - 1).clamp_min(0)
    present = PRESENT.fget(rows)
    rows.fed = fed
    return present


def in_order_of_arrival(state, codes, slots, **options):
    before = getattr(state, "arrived", 0)
    state.arrived = before + slots.shape[1]
    places = torch.arange(before, state.arrived).expand_as(slots)
    return FEED(state, codes, slots, places=places, **options)


def proxy_stays(rows, *, final):
    tokens = UNFED(rows, final=final)
    ends = tokens.slots % rows.grid.cols == rows.grid.cols - 1
    ends[:, -1] = False
    ends &= tokens.slots < rows.grid.size - 1
    return replace(tokens, slots=tokens.slots.where(~ends, -1))


def head_a_row_too_high(rows):
    heads = HEADS(rows)
    slots = heads.slots.where(heads.slots < rows.grid.row_len, heads.slots - rows.grid.row_len)
    return replace(heads, slots=slots)


def no_heads(rows):
    heads = HEADS(rows)
    return replace(heads, slots=torch.full_like(heads.slots, -1))


def head_sees_all(rows):
    return replace(HEADS(rows), since=torch.zeros_like(HEADS(rows).slots))


MUTANTS = [
    (Rows, "present", property(holes_seen)),
    (Rows, "present", property(heads_unseen)),
    (Rows, "present", property(tokens_of_this_pass_unseen)),
    (DecodingState, "feed", in_order_of_arrival),
    (Rows, "unfed", proxy_stays),
    (Rows, "_heads", head_a_row_too_high),
    (Rows, "_heads", no_heads),
    (Rows, "_heads", head_sees_all),
]


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    MUTANTS,
    ids=[getattr(m, "fget", m).__name__ for _, _, m in MUTANTS],
)
@pytest.mark.parametrize("grid", ["square", "ends"])
def test_mutants_are_caught(grid, owner, name, mutant, expected, monkeypatch):
    """The comparison above has teeth: each plausible mistake changes codes."""
    if mutant is proxy_stays and grid == "ends":
        pytest.skip("rows that end with a token have no proxy")
    monkeypatch.setattr(owner, name, mutant)
    assert decode(backbone_on(grid), window=2).codes.tolist() != expected[grid]


@pytest.fixture(scope="module")
def expected():
    return {
        grid: [codes for codes, _ in both(backbone_on(grid), fixed, window=2)]
        for grid in ("square", "ends")
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 0}, "decoder.window must be a whole number of at least 1, not 0"),
        ({"proxy": "left"}, "decoder.proxy=left is not one of nearest, row_above, null"),
    ],
)
def test_bad_options_name_the_key(options, words):
    with pytest.raises(ValueError, match=words):
        ZipAR(**options)


@pytest.mark.parametrize(
    ("grid", "options", "words"),
    [
        ("ends", {"window": 2, "proxy": "nearest"}, "rows end with a token"),
        ("square", {"window": 6, "proxy": "nearest"}, "rows start complete"),
        ("square", {"window": 6, "adaptive": True}, "decoder.adaptive=true does nothing"),
        ("one_row", {"window": 2, "adaptive": True}, "decoder.adaptive=true does nothing"),
    ],
)
def test_options_that_do_nothing_are_refused(grid, options, words):
    with pytest.raises(ValueError, match=words):
        decode(backbone_on(grid), **options)


def test_settings_are_those_in_force():
    shared = {"adaptive": False, "final_commit": True}
    square, ends = GRIDS["square"], GRIDS["ends"]
    assert ZipAR(window=2).settings(square) == {"window": 2, "proxy": "nearest"} | shared
    assert ZipAR(window=2).settings(ends) == {"window": 2} | shared
    assert ZipAR(window=9).settings(square) == {"window": 5} | shared
    assert ZipAR(operating_point={"window": 4}).settings(ends)["window"] == 4
