"""The tools behind test_exactness.py: the enumerator and the table models, checked by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from enumeration import chi_square, exact_laws, total_variation
from ssd_research.decoders.base import Decoder
from ssd_research.decoders.noise import KeyedNoise
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling
from table_model import TableBackbone, TableHeads, ar_law, images

PLAIN = Sampling(1.0)
PAIR = TokenGrid(1, 2)


@dataclass(frozen=True)
class Scene(Decoder):
    """A decoder that is one function of the state and the noise."""

    act: Callable[..., Any] = print
    name: str = "scene"
    lossless: ClassVar[bool] = False

    @torch.inference_mode()
    def decode_with(self, backbone, prompts, *, sampling, noise, heads=None):
        state = backbone.start(prompts, sampling=sampling)
        self.act(state, noise, torch.arange(2).expand(len(prompts), -1))
        return state.finish()


def laws(act, prompts=("1",)):
    backbone = TableBackbone(PAIR, 3)
    return exact_laws(Scene(act=act), backbone, prompts, sampling=PLAIN)


def weights(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_law_of_a_small_tree_of_choices():
    def act(state, noise, where):
        draw = noise.at(where, 0)
        heads = draw.bernoulli(weights(0.25, 1.0).expand(len(where), -1))
        codes = noise.at(where, 1).categorical(
            weights(1, 0, 3).expand(len(where), 2, -1), purpose="sample", needed=heads
        )
        state.codes[:] = torch.where(heads, codes, 1)

    found = laws(act)
    expected = np.zeros((3, 3))
    expected[1, [0, 2]] = 0.75 * np.array([0.25, 0.75])
    expected[np.ix_([0, 2], [0, 2])] = 0.25 * np.outer([0.25, 0.75], [0.25, 0.75])
    np.testing.assert_allclose(found.probability[0], expected.ravel(), atol=1e-16)
    assert found.paths == 2 + 4  # a sure choice does not branch, nor does one of probability 0


def read_twice(state, noise, where):
    law = weights(1, 1, 1).expand(len(where), 2, -1)
    for _ in range(2):
        state.codes[:] = noise.at(where, 0).categorical(law, purpose="sample")


def read_at_one_place_for_two(state, noise, where):
    law = weights(1, 1, 1).expand(len(where), 2, -1)
    state.codes[:] = noise.at(where * 0, 0).categorical(law, purpose="sample")


def read_nowhere(state, noise, where):
    noise.at(where - 1, 0).bernoulli(weights(0.5, 0.5).expand(len(where), -1))


def read_of_no_mass(state, noise, where):
    law = weights(0, 0, 0).expand(len(where), 2, -1)
    noise.at(where, 0).categorical(law, purpose="sample")


def read_what_is_not_needed(state, noise, where):
    law = weights(1, 1, 1).expand(len(where), 2, -1)
    junk = noise.at(where, 0).categorical(law, purpose="sample", needed=where < 0)
    others = 1 - torch.nn.functional.one_hot(junk, 3)
    state.codes[:] = noise.at(where, 1).categorical(others.double(), purpose="sample")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (read_twice, "the same noise is read twice"),
        (read_at_one_place_for_two, "the same noise is read twice"),
        (read_nowhere, "positions below 0"),
        (read_of_no_mass, "a law without mass"),
        (read_what_is_not_needed, "replayed image meets other choices"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_misused_noise_is_caught(act, message):
    with pytest.raises(AssertionError, match=message):
        laws(act)


def race(*laws):
    """Return a decoder that draws once from each law with the same Gumbel variables."""

    def act(state, noise, where):
        for n, law in enumerate(laws):
            p = weights(*law).expand(len(where), 1, -1)
            state.codes[:, n : n + 1] = noise.at(where[:, :1], 0).categorical(p, purpose="gumbel")

    return act


def test_draws_that_share_gumbel_variables():
    """A draw follows its p; two agree with probability sum_v 1 / sum_w max(p_w/p_v, q_w/q_v)."""
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])
    joint = laws(race(p, q)).probability[0].reshape(3, 3)
    np.testing.assert_allclose(joint.sum(1), p, atol=1e-15)
    np.testing.assert_allclose(joint.sum(0), q, atol=1e-15)
    worst = np.maximum(p / p[:, None], q / q[:, None]).sum(1)
    np.testing.assert_allclose(joint.diagonal(), 1 / worst, atol=1e-15)
    found = laws(race(p, [0.7, 0, 0.3])).probability[0].reshape(3, 3)
    np.testing.assert_allclose(found.sum(0), [0.7, 0, 0.3], atol=1e-15)
    assert laws(race(p, p)).paths == 3


def test_shared_gumbel_variables_are_those_of_keyed_noise():
    p, q, count = [0.6, 0.3, 0.1], [0.2, 0.3, 0.5], 20_000
    where, noise = torch.zeros(count, 1, dtype=torch.long), KeyedNoise(0, range(count))
    codes = [
        noise.at(where, 0).categorical(weights(*law).expand(count, 1, -1), purpose="gumbel")
        for law in (p, q)
    ]
    assert chi_square(laws(race(p, q)).probability[0], torch.cat(codes, 1), 3) > 1e-4


def test_probabilities_have_to_sum_to_one():
    def act(state, noise, where):
        noise.probability[:] = 0.9

    with pytest.raises(AssertionError, match=r"sum to \[0\.9\]"):
        laws(act)


@pytest.mark.parametrize("grid", [TokenGrid(2, 2), TokenGrid(2, 2, end_of_row=True)])
def test_the_autoregressive_law_is_a_law_of_its_prompt(grid):
    backbone = TableBackbone(grid, 3)
    sampling = Sampling(2.0, temperature=0.7, top_k=2)
    one, other = (ar_law(backbone, text, sampling).numpy() for text in ("1", "1 2"))
    assert one.sum() == pytest.approx(1)
    assert (one > 0).sum() == 2**4  # two codes are left at every position
    assert total_variation(one, other) > 0.1
    assert total_variation(one, ar_law(backbone, "1", PLAIN).numpy()) > 0.1


def fed(backbone, *steps):
    """Return the laws of an image's codes 2, 0, 1 after feeding ranges of positions in turn."""
    state = backbone.start(["1 2"], sampling=Sampling(2.0))
    codes = torch.tensor([[2, 0, 1, 0]])
    for start, stop in steps:
        state.forward(codes[:, start:stop], range(start, stop), phase="verify")
    return state.distribution(range(1, 4)), codes


def test_the_cache_gives_the_teacher_forced_law():
    backbone = TableBackbone(TokenGrid(2, 2, end_of_row=True), 3)
    expected, codes = fed(backbone, (0, 1), (1, 2), (2, 3))
    for steps in (((0, 3),), ((0, 2), (1, 3)), ((0, 3), (0, 1), (1, 3))):
        assert torch.equal(fed(backbone, *steps)[0], expected)
    prompts, drop = ["1 2"] * 2, torch.tensor([False, True])
    states = backbone.hidden_states(prompts, codes.repeat(2, 1), unconditional=drop)
    forced = Sampling(2.0).distribution(backbone.logits(states, 2.0))
    torch.testing.assert_close(forced[:, 1:], expected, atol=1e-15, rtol=0)


def test_what_a_key_saw_when_it_was_made_counts():
    """The code at 1 is fed beside a wrong code at 0, which is then corrected: 1 is stale."""
    backbone = TableBackbone(TokenGrid(2, 2), 3)
    state = backbone.start(["1"], sampling=PLAIN)
    right = torch.tensor([[2, 0, 1]])
    state.forward(torch.tensor([[1, 0]]), range(2), phase="verify")
    state.forward(right[:, :1], range(1), phase="commit")
    state.forward(right[:, 2:], range(2, 3), phase="commit")
    stale = state.distribution(range(3, 4))
    state.forward(right[:, 1:], range(1, 3), phase="commit")
    assert (state.distribution(range(3, 4)) - stale).abs().max() > 0.01


def test_laws_differ_by_prompt_place_and_history():
    backbone = TableBackbone(TokenGrid(2, 2), 3)
    codes = images(backbone.grid, 3)
    states = torch.cat([backbone.hidden_states([text] * 81, codes) for text in ("1", "2")])
    p = PLAIN.distribution(backbone.logits(states, 1.0))
    histories = 2 * (1 + 3 + 9 + 27)
    assert len({tuple(one) for one in p.flatten(0, 1).tolist()}) == histories


def test_neighbours_alone_decide_without_surprise():
    backbone = TableBackbone(TokenGrid(2, 2), 3, neighbours=True, surprise=0.0)
    codes = torch.tensor([[2, 0, 1, 0], [1, 0, 1, 0], [2, 1, 1, 0]])
    states = backbone.hidden_states(["1"] * 3, codes)
    p = PLAIN.distribution(backbone.logits(states, 1.0))
    assert torch.equal(p[0, 3], p[1, 3])  # left and above are 1 and 0 in both
    assert not torch.equal(p[0, 3], p[2, 3])
    heads = TableHeads(backbone)
    e = backbone.embed(codes)
    for axis, offset, source, target in (("vertical", 1, 1, 3), ("horizontal", 1, 2, 3)):
        drafted = heads.predict(axis, offset, states[:, source], e[:, source])
        assert torch.equal(drafted[:, 1], states[:, target, 1])
        seen = drafted[:, 2:] == torch.cat(
            [codes[:, : source + 1] + 1, 0 * codes[:, source + 1 :]], 1
        )
        assert bool(seen.all())


def test_enumeration_is_what_keyed_noise_samples():
    """10,000 images of real noise against the exact law of a decoder that is far from AR."""
    backbone = TableBackbone(TokenGrid(2, 2, end_of_row=True), 3, neighbours=True)
    decoder, heads, sampling = SpatiallySpeculative(r=2), TableHeads(backbone), Sampling(2.0)
    found = exact_laws(decoder, backbone, ["1"], sampling=sampling, heads=heads)
    law = found.probability[0]
    assert total_variation(law, ar_law(backbone, "1", sampling).numpy()) > 0.05
    count = 10_000
    made = decoder.decode(
        backbone, ["1"] * count, sampling=sampling, seed=0, sample_keys=range(count), heads=heads
    )
    assert chi_square(law, made.codes, 3) > 1e-4
    assert chi_square(np.full(81, 1 / 81), made.codes, 3) < 1e-12
