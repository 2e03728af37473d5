"""Chains by hand: windows, the test up to the first reject, what is drawn and what is committed."""

import pytest
import torch

from conftest import make_backbone
from ssd_research.decoders.accept import Rejection
from ssd_research.decoders.chain import Chain, carried
from ssd_research.decoders.noise import KeyedNoise
from ssd_research.sampling import Sampling

PROMPTS = ["a red circle", "a large pink square left of a small black circle"]
K = 4


class Script:
    """Noise that keeps the drafts it is told to, takes the likeliest code, and notes all calls."""

    def __init__(self, accepted):
        self.accepted, self.calls = torch.tensor(accepted), []

    def at(self, positions, round):
        self.positions, self.round = positions, round
        return self

    def bernoulli(self, probability, *, needed=None):
        self.note("accept", needed)
        return self.accepted

    def categorical(self, p, *, purpose, needed=None):
        self.note(purpose, needed)
        return p.argmax(-1)

    def note(self, purpose, needed):
        rows = [where[mask].tolist() for where, mask in zip(self.positions, needed, strict=True)]
        self.calls.append((purpose, self.round, rows))


@pytest.fixture(autouse=True)
def _without_gradients():
    """As in `decode_with`."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def backbone():
    """4x4 positions and 4 codes."""
    return make_backbone(grid=4, codebook_size=K)


def chain_at(backbone, committed, *, by_row=False):
    state = backbone.start(PROMPTS, sampling=Sampling(2.0))
    chain = Chain(state, KeyedNoise(0, [1, 2]), by_row=by_row)
    chain.committed = torch.tensor(committed)
    return chain


@pytest.mark.parametrize(
    ("committed", "options", "expected"),
    [
        ([1, 9], {}, [[1, 2, 3], [9, 10, 11]]),
        ([14, 16], {}, [[14, 15, -1], [-1, -1, -1]]),
        ([1, 6], {"stop": [3, 6]}, [[1, 2, -1], [-1, -1, -1]]),
        ([2, 4], {"by_row": True}, [[2, 3, -1], [4, 5, 6]]),
        ([15, 16], {"by_row": True}, [[15, -1, -1], [-1, -1, -1]]),
        ([2, 4], {"by_row": True, "stop": [9, 5]}, [[2, 3, -1], [4, -1, -1]]),
    ],
)
def test_windows(backbone, committed, options, expected):
    chain = chain_at(backbone, committed, by_row=options.get("by_row", False))
    stop = torch.tensor(options["stop"]) if "stop" in options else None
    assert chain.window(3, stop=stop).tolist() == expected


def test_a_pass_predicts_its_drafts_and_one_place_more(backbone):
    chain = chain_at(backbone, [14, 6])
    positions = chain.window(3, stop=torch.tensor([16, 7]))
    expected = [[True, True, False, False], [True, True, False, False]]
    assert chain.predicted(positions).tolist() == expected
    rows = chain_at(backbone, [14, 6], by_row=True)
    expected = [[True, True, False, False], [True, True, False, False]]
    assert rows.predicted(rows.window(3)).tolist() == expected
    assert not chain_at(backbone, [16, 16]).predicted(torch.full((2, 3), -1)).any()


def run_test(backbone, committed, accepted, *, through=False, stop=None):
    """Test chains of the drafts 0, 1, 2 with p and q that say which code replaces what."""
    chain = chain_at(backbone, committed)
    chain.noise = Script(accepted)
    positions = chain.window(3, stop=None if stop is None else torch.tensor(stop))
    drafts = torch.tensor([[0, 1, 2]] * 2)
    q = torch.nn.functional.one_hot(drafts, K).double() * 0.9 + 0.025
    p = torch.tensor([0.5, 0.2, 0.1, 0.2]).double().expand(2, 4, -1)
    verdict = chain.test(
        Rejection(), p=p, q=q, drafts=drafts, positions=positions, number=7, through=through
    )
    return chain, verdict


YES, NO = True, False


def test_a_chain_stops_at_its_first_reject_or_goes_one_beyond(backbone):
    chain, verdict = run_test(backbone, [1, 5], [[YES, NO, YES], [YES, YES, YES]])
    assert verdict.kept.tolist() == [[YES, NO, NO], [YES, YES, YES]]
    assert verdict.fresh.tolist() == [[NO, YES, NO, NO], [NO, NO, NO, YES]]
    # Where 1 was rejected 0 has the most of p - q; the bonus code is the likeliest of p.
    assert verdict.tokens[verdict.fresh].tolist() == [0, 0]
    assert chain.noise.calls == [
        ("accept", 7, [[1, 2, 3], [5, 6, 7]]),
        ("residual", 7, [[2], [8]]),
    ]
    assert chain.commit(verdict).tolist() == [2, 4]
    assert chain.committed.tolist() == [3, 9]
    assert chain.state.codes[0, 1:3].tolist() == [0, 0]
    assert chain.state.codes[1, 5:9].tolist() == [0, 1, 2, 0]
    (entry,) = chain.state.meter.rounds
    assert (entry["stage"], entry["drafted"], entry["accepted"]) == ("chain", [3, 3], [1, 3])


def test_at_the_end_of_an_image_there_is_no_bonus(backbone):
    chain, verdict = run_test(backbone, [14, 16], [[YES, YES, YES]] * 2)
    assert verdict.kept.tolist() == [[YES, YES, NO], [NO, NO, NO]]
    assert not verdict.fresh.any()
    assert chain.commit(verdict).tolist() == [2, 0]
    assert chain.done
    assert chain.noise.calls == [("accept", 7, [[14, 15], []]), ("residual", 7, [[], []])]


def test_a_shorter_chain_has_its_bonus_where_it_ends(backbone):
    chain, verdict = run_test(backbone, [5, 5], [[YES, YES, YES]] * 2, stop=[6, 5])
    assert verdict.committed.tolist() == [[YES, YES, NO, NO], [YES, NO, NO, NO]]
    assert verdict.tokens[verdict.committed].tolist() == [0, 0, 0]
    assert chain.noise.calls[1] == ("residual", 7, [[6], [5]])


def test_through_replaces_every_draft_that_fails(backbone):
    chain, verdict = run_test(backbone, [1, 5], [[NO, YES, NO], [YES] * 3], through=True)
    assert verdict.kept.tolist() == [[NO, NO, NO], [YES, YES, YES]]
    assert verdict.fresh.tolist() == [[YES, NO, NO, NO], [NO, NO, NO, YES]]
    # 0 gives way to 1 or 3, the draft 1 stays, 2 gives way to 0, and so does nothing at all.
    assert verdict.tokens.tolist() == [[1, 1, 0, 0], [0, 1, 2, 0]]
    assert chain.noise.calls[1] == ("residual", 7, [[1, 3, 4], [8]])
    assert chain.commit(verdict).tolist() == [1, 4]


def test_what_was_predicted_moves_with_the_window():
    x = torch.arange(4.0)[None, :, None].repeat(2, 1, 1)
    there = torch.tensor([[True, True, True, False], [True] * 4])
    moved, known = carried(x, there, count=torch.tensor([2, 1]), length=4)
    assert known.tolist() == [[True, False, False, False], [True, True, True, False]]
    assert moved[known].flatten().tolist() == [2, 1, 2, 3]


def test_finished_images_take_no_part(backbone):
    chain = chain_at(backbone, [3, 16])
    before = chain.state.meter.nfe
    chain.forward(torch.zeros(2, 3, dtype=torch.long), chain.window(3))
    assert chain.state.meter.nfe == [before[0] + 1, before[1]]
    assert chain.state.meter.tokens == [4, 0]


def test_the_last_position_of_all_is_never_fed(backbone):
    chain = chain_at(backbone, [14, 15])
    chain.forward(torch.zeros(2, 3, dtype=torch.long), chain.window(3))
    assert chain.state.meter.tokens == [2, 1]
