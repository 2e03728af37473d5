"""The accept rules with scripted choices, and their exact laws over all choices."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_research.decoders.accept import argmax, reject, residual, sample
from ssd_research.decoders.noise import KeyedDraw, KeyedNoise


class Scripted:
    """A draw whose outcomes are given, and which notes the odds that it was asked for."""

    def __init__(self, accepted, token):
        self.accepted, self.token = accepted, token
        self.probability = self.mass = self.purpose = None

    def bernoulli(self, probability, *, needed=None):
        self.probability = probability
        return self.accepted

    def categorical(self, p, *, purpose, needed=None):
        self.mass, self.purpose = p, purpose
        return self.token


@dataclass(frozen=True)
class Given(KeyedNoise):
    """Noise with given uniforms."""

    values: tuple[float, ...] = ()

    def uniform(self, positions, *, round, purpose):
        return torch.tensor([self.values], dtype=torch.float64)


def drawn(p, values):
    """Return the codes that the real inverse CDF takes from p at the given uniforms."""
    positions = torch.arange(len(values))[None]
    draw = KeyedDraw(Given(0, [0], tuple(values)), positions, 1)
    return draw.categorical(dist(p).expand(1, len(values), -1), purpose="residual")[0]


def dist(weights):
    return torch.tensor(weights, dtype=torch.float64)[None, None]


def apply(p, q, draft, *, accepted, token):
    """Run `reject` at one position with scripted outcomes."""
    draw = Scripted(torch.tensor([[accepted]]), torch.tensor([[token]]))
    got, kept = reject(dist(p), dist(q), torch.tensor([[draft]]), draw)
    assert draw.purpose == "residual"
    return got.item(), kept.item(), draw.probability.item(), draw.mass[0, 0].tolist()


@pytest.mark.parametrize(
    ("p", "q", "draft", "probability", "mass"),
    [
        pytest.param([0.2, 0.5, 0.3], [0.5, 0.25, 0.25], 0, 0.4, [0, 0.25, 0.05], id="q above p"),
        pytest.param([0.2, 0.5, 0.3], [0.5, 0.25, 0.25], 1, 1.0, [0, 0.25, 0.05], id="p above q"),
        pytest.param([0.5, 0.0, 0.5], [0.25, 0.75, 0.0], 1, 0.0, [0.25, 0, 0.5], id="p is 0"),
        pytest.param([0.5, 0.5, 0.0], [0.0, 0.5, 0.5], 0, 1.0, [0.5, 0, 0], id="q is 0"),
        pytest.param([0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], 3, 0.0, [0.5, 0, 0, 0], id="both are 0"),
        pytest.param([0.1, 0.2, 0.7], [0.1, 0.2, 0.7], 2, 1.0, [0.1, 0.2, 0.7], id="p equals q"),
    ],
)
def test_reject_by_hand(p, q, draft, probability, mass):
    kept = apply(p, q, draft, accepted=True, token=0)
    assert kept == (draft, True, pytest.approx(probability), pytest.approx(mass))
    corrected = apply(p, q, draft, accepted=False, token=1)
    assert corrected == (1, False, pytest.approx(probability), pytest.approx(mass))


def test_positions_are_judged_independently():
    p = dist([0.2, 0.5, 0.3]).repeat(2, 3, 1)
    q = dist([0.5, 0.25, 0.25]).repeat(2, 3, 1)
    draft = torch.tensor([[0, 1, 2], [2, 1, 0]])
    accepted = torch.tensor([[True, False, True], [False, True, False]])
    draw = Scripted(accepted, torch.full((2, 3), 1))
    token, kept = reject(p, q, draft, draw)
    assert token.tolist() == [[0, 1, 2], [1, 1, 1]]
    assert torch.equal(kept, accepted)  # not a comparison of tokens: the draft 1 was redrawn as 1
    torch.testing.assert_close(draw.probability, dist([0.4, 1, 1])[0][:, [[0, 1, 2], [2, 1, 0]]][0])


def test_sample_and_argmax_ignore_q():
    p, q = dist([0.2, 0.5, 0.3]).expand(1, 3, -1), dist([1.0, 0, 0]).expand(1, 3, -1)
    draft = torch.tensor([[0, 1, 2]])
    draw = Scripted(None, torch.tensor([[2, 1, 0]]))
    token, kept = sample(p, q, draft, draw)
    assert (token.tolist(), kept.tolist()) == ([[2, 1, 0]], [[False, True, False]])
    assert (draw.purpose, draw.probability) == ("sample", None)
    assert torch.equal(draw.mass, p)
    token, kept = argmax(p, q, draft, Scripted(None, None))
    assert (token.tolist(), kept.tolist()) == ([[1, 1, 1]], [[False, True, False]])


def test_codes_without_mass_are_never_drawn():
    edges = [0.0, 2.0**-53, 0.5 - 2.0**-53, 0.5, 1 - 2.0**-53]
    assert drawn([0.0, 0.5, 0.0, 0.5, 0.0], edges).tolist() == [1, 1, 1, 3, 3]
    excess = residual(dist([0.3, 0.3, 0.4, 0.0]), dist([0.4, 0.1, 0.1, 0.4]))
    assert set(drawn(excess[0, 0].tolist(), edges).tolist()) == {1, 2}


def test_a_residual_is_drawn_from_as_if_normalised():
    excess = residual(dist([0.25, 0.0, 0.5, 0.25]), dist([0.125, 0.75, 0.125, 0.0]))
    assert excess[0, 0].tolist() == [0.125, 0, 0.375, 0.25]
    middles = [(n + 0.5) / 60 for n in range(60)]
    assert drawn(excess[0, 0].tolist(), middles).bincount().tolist() == [10, 0, 30, 20]


def exact_law(rule, p, q, drafts):
    """Return the law of a rule's token for drafts of law `drafts`, by enumerating every choice."""
    size = len(p)
    choices = torch.cartesian_prod(torch.arange(size), torch.arange(2), torch.arange(size))
    draft, accepted, token = choices[None].unbind(-1)
    draw = Scripted(accepted.bool(), token)
    got, _ = rule(p.expand(1, len(choices), -1), q.expand(1, len(choices), -1), draft, draw)
    odds = torch.full_like(drafts[draft], 0.5)
    if draw.probability is not None:
        odds = torch.where(accepted.bool(), draw.probability, 1 - draw.probability)
    masses = draw.mass / draw.mass.sum(-1, keepdim=True)
    weight = drafts[draft] * odds * masses.gather(-1, token[..., None])[..., 0]
    return torch.zeros(size, dtype=torch.float64).index_add(0, got[0], weight[0])


def weights(size):
    return st.lists(st.integers(0, 8), min_size=size, max_size=size).filter(any)


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 5).flatmap(lambda size: st.tuples(weights(size), weights(size))))
def test_reject_is_lossless_for_drafts_sampled_from_q(pair):
    p, q = (torch.tensor(w, dtype=torch.float64) / sum(w) for w in pair)
    torch.testing.assert_close(exact_law(reject, p, q, q), p, atol=1e-12, rtol=0)
    torch.testing.assert_close(exact_law(sample, p, q, q), p, atol=1e-12, rtol=0)


def test_reject_is_biased_for_argmax_drafts():
    """The published rule: the argmax of q is kept too often, here twice as often as p asks."""
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    always_first = torch.tensor([1.0, 0, 0], dtype=torch.float64)
    got = exact_law(reject, p, q, always_first)
    torch.testing.assert_close(got, torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64))
    assert (got - p).abs().sum() / 2 > 0.1
