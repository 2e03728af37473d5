"""PJD against an uncached reference of its own, and what it becomes at the ends of its options."""

from dataclasses import dataclass, replace

import pytest
import torch

from ssd_research.backbones.state import DecodingState
from ssd_research.decoders import parallel_jacobi
from ssd_research.decoders.jacobi import SpeculativeJacobi
from ssd_research.decoders.noise import KeyedNoise
from ssd_research.decoders.parallel_jacobi import ParallelJacobi
from ssd_research.decoders.rows import Rows
from ssd_research.decoders.zipar import ZipAR
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling
from uncached import GRIDS, KEYS, PROMPTS, SEED, Holed, backbone_on, invert, shaped

SOFT = Sampling(2.0, temperature=3.0)  # a third of all drafts are accepted
INITS = [
    {"init": "horizontal"},
    {"init": "vertical"},
    {"init": "random"},
    {"init": "random", "init_q": "uniform"},
]


class Reference(Holed):
    """One image, one row and one draft at a time."""

    def __init__(self, *args, context, window, commit_reject, init, init_q, **options):
        super().__init__(*args, **options)
        self.context, self.window = min(context, self.grid.cols), window
        self.commit_reject, self.init, self.init_q = commit_reject, init, init_q
        self.count = [0] * self.grid.rows
        self.drafts = {}  # (row, column) -> code and its law
        self.rounds = [0, 0]

    def run(self):
        """Return the codes, the number of passes, and the drafts tested and accepted."""
        number = 1
        self.commit(0, invert(self.law(0, 0), self.uniform(0, 0)))
        while sum(self.count) < self.grid.size:
            self.step(number)
            number += 1
        return self.codes(), number, self.rounds

    def commit(self, r, code):
        self.cells[r, self.count[r]] = code
        self.count[r] += 1

    def step(self, number):
        width, todo = self.grid.cols, {}
        for r, c in enumerate(self.count):
            started = r == 0 or c > 0 or self.count[r - 1] >= self.context
            if started and c < width:
                todo[r] = min(self.window, (self.count[r - 1] if r else width) - c)
        public = self.new_cells()
        public.pop(self.grid.slots - 1 - self.grid.end_of_row, None)
        for r in todo:
            public |= self.heads(r - 1) if r and self.count[r] == 0 else {}
            if todo[r] and self.count[r]:  # the newest code, whether or not it was fed before
                public[self.slot(r, self.count[r]) - 1] = self.cells[r, self.count[r] - 1]
        for r, n in todo.items():
            for c in range(self.count[r], self.count[r] + min(n, self.window - 1)):
                self.drafts.setdefault((r, c), self.guess(r, c))
        self.feed(public)
        chains = {r: self.feed_drafts(r, n) for r, n in todo.items()}
        laws = {r: [self.model.law(e) for e in chain] for r, chain in chains.items()}
        for r, chain in chains.items():
            self.test(r, chain, laws[r], number, top=r == min(todo))

    def guess(self, r, c):
        """Return a first draft and its law."""
        size = self.model.backbone.codebook_size
        one_hot = torch.eye(size, dtype=torch.float64)
        if self.init == "horizontal" and c:
            at = r, c - 1
            left = self.cells[at] if at in self.cells else self.drafts[at][0]
            return left, one_hot[left]
        if self.init == "vertical" and r:
            return self.cells[r - 1, c], one_hot[self.cells[r - 1, c]]
        uniform = torch.full((size,), 1 / size, dtype=torch.float64)
        code = invert(uniform, self.uniform(r, c, "draft", 0))
        return code, one_hot[code] if self.init_q == "one_hot" else uniform

    def feed_drafts(self, r, n):
        """Feed drafts that only their own row sees; return the entries that predict n codes."""
        first = self.slot(r, self.count[r])
        chain = [self.entries[first - 1]] if n else []
        seen = [e for s, e in self.entries.items() if s < first]
        for c in range(self.count[r], self.count[r] + n - 1):
            entry = self.model.feed(self.drafts[r, c][0], self.slot(r, c), seen + chain)
            chain.append(entry)
        return chain

    def test(self, r, chain, laws, number, *, top):
        """Test a row's drafts, commit, and draft anew what was predicted and not committed."""
        start, going = self.count[r], True
        for n, p in enumerate(laws):
            c, drafted = start + n, n < self.window - 1
            self.rounds[0] += drafted
            if going and not drafted:
                self.commit(r, invert(p, self.uniform(r, c, "residual", number)))
                going = False
            elif going:
                x, q = self.drafts[r, c]
                going = self.uniform(r, c, "accept", number) < p[x] / q[x]
                self.rounds[1] += int(going)
                if going:
                    self.commit(r, x)
                elif self.commit_reject == "every_row" or (top and n == 0):
                    law = (p - q).clamp_min(0)
                    self.commit(r, invert(law, self.uniform(r, c, "residual", number)))
                if going and n + 1 < len(chain):  # its keys stay, made in this pass
                    self.entries[self.slot(r, c)] = chain[n + 1]
                    self.fed.add((r, c))
            if (r, c) not in self.cells:
                self.drafts[r, c] = invert(p, self.uniform(r, c, "draft", number)), p


def decode(grid, sampling=SOFT, prompts=PROMPTS, keys=KEYS, **options):
    return ParallelJacobi(**options).decode(
        backbone_on(grid),
        prompts,
        sampling=sampling,
        seed=SEED,
        sample_keys=keys,
    )


def expected(grid, sampling=SOFT, **options):
    """Return what the reference makes of each image."""
    options = {"commit_reject": "every_row", "init": "horizontal", "init_q": "one_hot"} | options
    return [
        Reference(backbone_on(grid), *one, sampling=sampling, **options).run()
        for one in zip(PROMPTS, KEYS, strict=True)
    ]


def assert_equal_to_the_reference(grid, sampling=SOFT, **options):
    made, want = decode(grid, sampling, **options), expected(grid, sampling, **options)
    assert made.codes.tolist() == [codes for codes, _, _ in want]
    assert made.nfe == [passes for _, passes, _ in want]
    (chain,) = made.rounds
    assert chain["drafted"] == [drafted for _, _, (drafted, _) in want]
    assert chain["accepted"] == [accepted for _, _, (_, accepted) in want]


@pytest.mark.parametrize("commit_reject", parallel_jacobi.COMMIT_REJECT)
@pytest.mark.parametrize(
    ("grid", "context", "window"),
    [
        ("square", 1, 3),
        ("square", 2, 16),
        ("square", 4, 2),
        ("wide", 3, 4),
        ("tall", 2, 3),
        ("one_row", 2, 3),
        ("ends", 1, 3),
        ("ends", 2, 16),
        ("one_ending_row", 2, 3),
    ],
)
def test_pjd_equals_the_uncached_reference(grid, context, window, commit_reject):
    assert_equal_to_the_reference(grid, context=context, window=window, commit_reject=commit_reject)


@pytest.mark.parametrize("grid", ["square", "ends"])
@pytest.mark.parametrize("init", INITS, ids=lambda init: "_".join(init.values()))
def test_first_drafts(grid, init):
    assert_equal_to_the_reference(grid, context=2, window=4, **init)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(3.0, temperature=2.0, top_k=4)])
@pytest.mark.parametrize("grid", ["square", "ends"])
def test_filters_and_guidance(grid, sampling):
    assert_equal_to_the_reference(grid, sampling, context=2, window=4)


def test_a_proxy_from_the_row_above():
    assert_equal_to_the_reference("square", context=2, window=4, proxy="row_above")


@pytest.mark.parametrize(
    ("grid", "window", "init"),
    [
        ("square", 2, INITS[0]),
        ("square", 16, INITS[1]),
        ("wide", 4, INITS[2]),
        ("one_row", 3, INITS[0]),
        ("ends", 4, INITS[3]),
        ("ends", 16, INITS[0]),
        ("one_ending_row", 2, INITS[2]),
    ],
)
def test_a_context_of_a_whole_row_is_sjd_by_rows(grid, window, init):
    backbone = backbone_on(grid)
    made = decode(grid, context=backbone.grid.cols, window=window, **init)
    want = SpeculativeJacobi(window=window, by_row=True, **init).decode(
        backbone, PROMPTS, sampling=SOFT, seed=SEED, sample_keys=KEYS
    )
    assert torch.equal(made.codes, want.codes)
    assert (made.nfe, made.tokens, made.rounds) == (want.nfe, want.tokens, want.rounds)


@dataclass(frozen=True)
class OneDraw(KeyedNoise):
    """Noise that is the same in every round and for every purpose."""

    def uniform(self, positions, *, round, purpose):
        return super().uniform(positions, round=0, purpose="sample")


@pytest.mark.parametrize(("grid", "window"), [("square", 2), ("ends", 3), ("wide", 1)])
def test_without_drafts_it_is_zipar(grid, window):
    backbone = backbone_on(grid)
    options = {"sampling": backbone.defaults, "noise": OneDraw(SEED, KEYS), "heads": None}
    made = ParallelJacobi(context=window, window=1).decode_with(backbone, PROMPTS, **options)
    want = ZipAR(window=window, final_commit=False).decode_with(backbone, PROMPTS, **options)
    assert torch.equal(made.codes, want.codes)
    assert (made.nfe, made.tokens) == (want.nfe, want.tokens)
    assert made.nfe == [(backbone.grid.rows - 1) * window + backbone.grid.cols] * 2


@pytest.mark.parametrize("commit_reject", parallel_jacobi.COMMIT_REJECT)
@pytest.mark.parametrize("grid", ["square", "ends"])
def test_an_image_in_a_batch_equals_it_alone(grid, commit_reject):
    prompts = [*PROMPTS, "a green cross", "a photo of three blue stars"]
    options = {"context": 2, "window": 4, "commit_reject": commit_reject}
    keys = [*KEYS, 303, 404]
    together = decode(grid, prompts=prompts, keys=keys, **options)
    assert len(set(together.tokens)) > 1
    for n, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
        alone = decode(grid, prompts=[prompt], keys=[key], **options)
        assert torch.equal(alone.codes[0], together.codes[n])
        assert (alone.nfe[0], alone.tokens[0]) == (together.nfe[n], together.tokens[n])


@pytest.mark.parametrize("context", [1, 2, 4, 5])
def test_every_row_advances_in_every_pass(context):
    """So rows start at the latest when ZipAR's do, and the last one takes no longer."""
    made = decode("square", context=context, window=4)
    assert max(made.nfe) <= 4 * context + 5


def test_the_janus_grid():
    backbone = shaped(TokenGrid(24, 24), dtype=torch.float32, grid=24, hidden_size=16, layers=1)
    made = ParallelJacobi().decode(
        backbone, ["a ring"], sampling=backbone.defaults, seed=0, sample_keys=[0]
    )
    assert 24 < made.nfe[0] <= 23 * 6 + 24


FEED, PRESENT = DecodingState.feed, Rows.present
Front = parallel_jacobi._Front
OF, CARRIED, TOKENS = Front.of, Front.carried, Front.tokens


def drafts_of_other_rows_seen(state, codes, slots, *, visible, **options):
    fed = torch.zeros_like(visible[:, 0]).scatter(1, slots.clamp_min(0), slots >= 0)
    every = torch.arange(visible.shape[-1])
    return FEED(
        state,
        codes,
        slots,
        visible=visible | (fed[:, None] & (every <= slots[..., None])),
        **options,
    )


def own_drafts_unseen(front, rows):
    tokens = TOKENS(front, rows)
    return replace(tokens, since=tokens.slots)


def present_with(rows, fed):
    before, rows.fed = rows.fed, fed
    present = PRESENT.fget(rows)
    rows.fed = before
    return present


def two_more_seen(rows):
    return present_with(rows, (rows.fed + (rows.fed > 0) * 2).clamp_max(rows.grid.cols))


def newest_unseen(rows):
    return present_with(rows, (rows.fed - 1).clamp_min(0))


def holes_seen(rows):
    return torch.ones_like(PRESENT.fget(rows))


def row_overtakes(cls, rows, *, window):
    front = OF(rows, window=window)
    free = (rows.grid.cols - front.first).clamp(0, front.window)
    return replace(front, length=free.where(front.length > 0, 0))


def q_forgotten(front, p, earlier):
    q, known = CARRIED(front, p, earlier)
    return q, torch.zeros_like(known)


def q_of_the_neighbour(front, p, earlier):
    return CARRIED(front, p.roll(1, 1), earlier)


def in_order_of_arrival(state, codes, slots, **options):
    before = getattr(state, "arrived", 0)
    state.arrived = before + slots.shape[1]
    places = torch.arange(before, state.arrived).expand_as(slots)
    return FEED(state, codes, slots, places=places, **options)


MUTANTS = [
    (DecodingState, "feed", drafts_of_other_rows_seen),
    (DecodingState, "feed", in_order_of_arrival),
    (Front, "tokens", own_drafts_unseen),
    (Rows, "present", property(two_more_seen)),
    (Rows, "present", property(holes_seen)),
    (Rows, "present", property(newest_unseen)),
    (Front, "of", classmethod(row_overtakes)),
    (Front, "carried", q_forgotten),
    (Front, "carried", q_of_the_neighbour),
]


@pytest.fixture(scope="module")
def right():
    return {
        grid: [codes for codes, _, _ in expected(grid, context=2, window=4)]
        for grid in ("square", "ends")
    }


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    MUTANTS,
    ids=[getattr(m, "fget", getattr(m, "__func__", m)).__name__ for _, _, m in MUTANTS],
)
@pytest.mark.parametrize("grid", ["square", "ends"])
def test_mutants_are_caught(grid, owner, name, mutant, right, monkeypatch):
    """The comparison above has teeth: each plausible mistake changes codes."""
    monkeypatch.setattr(owner, name, mutant)
    assert decode(grid, context=2, window=4).codes.tolist() != right[grid]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 0}, "decoder.context must be a whole number of at least 1, not 0"),
        ({"window": 0}, "decoder.window must be a whole number of at least 1, not 0"),
        ({"proxy": "left"}, "decoder.proxy=left is not one of nearest, row_above, null"),
        ({"commit_reject": "no"}, "decoder.commit_reject=no is not one of every_row"),
        ({"init": "left"}, "decoder.init=left is not one of random, horizontal, vertical"),
        ({"init_q": "none"}, "decoder.init_q=none is not one of one_hot, uniform"),
        ({"init_q": "uniform"}, "decoder.init_q=uniform would be wrong"),
    ],
)
def test_bad_options_name_the_key(options, words):
    with pytest.raises(ValueError, match=words):
        ParallelJacobi(**options)


@pytest.mark.parametrize(
    ("grid", "context", "words"),
    [("ends", 2, "rows end with a token"), ("square", 6, "rows start complete")],
)
def test_a_proxy_that_does_nothing_is_refused(grid, context, words):
    with pytest.raises(ValueError, match=words):
        decode(grid, context=context, proxy="nearest")


def test_settings_are_those_in_force():
    shared = {"commit_reject": "every_row", "init": "horizontal", "init_q": "one_hot"}
    given = ParallelJacobi(context=2, window=4)
    assert given.settings(GRIDS["ends"]) == {"context": 2, "window": 4} | shared
    assert given.settings(GRIDS["square"])["proxy"] == "nearest"
    own = ParallelJacobi(operating_point={"context": 9})
    assert own.settings(GRIDS["square"]) == {"context": 5, "window": 6} | shared
