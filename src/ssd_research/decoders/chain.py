"""What decoders share that commit from left to right: a chain of drafts, tested up to a reject.

Every image of a batch keeps its own number of committed codes. Between passes the cache holds all
of these but the newest, which the next pass feeds in front of the drafts:

    fed         newest  x1   x2   x3          positions n-1 ... n+2
    predicts    p1      p2   p3   p4          of n ... n+3, the bonus position last
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssd_research.backbones.state import DecodingState
from ssd_research.decoders.accept import AcceptRule
from ssd_research.decoders.noise import Noise


@dataclass(frozen=True)
class Verdict:
    """What a test of a chain found: `kept` [B, L] marks the accepted prefix of each image.

    `tokens` [B, L + 1] are the drafts, with what replaces the first rejected one in its place, or
    the bonus code after an accepted chain. `fresh` [B, L + 1] marks that one new code per image.
    """

    kept: Bool[Tensor, "B L"]
    tokens: Int[Tensor, "B M"]
    fresh: Bool[Tensor, "B M"]

    @property
    def committed(self) -> Bool[Tensor, "B M"]:
        """Marks the tokens that stay for good: the accepted prefix and the fresh one."""
        return torch.cat([self.kept, torch.zeros_like(self.fresh[:, :1])], 1) | self.fresh


class Chain:
    """A batch of images under way and how many codes of each are `committed` [B].

    With `by_row` nothing reaches over the end of the row that an image is in, as if every row were
    an image of its own: no draft and no bonus code.
    """

    def __init__(self, state: DecodingState, noise: Noise, *, by_row: bool = False) -> None:
        """Sample the code at position 0 of every image from the prefill's state."""
        self.state, self.noise, self.by_row = state, noise, by_row
        self.size, self.cols = state.backbone.grid.size, state.backbone.grid.cols
        first = torch.zeros(state.batch, 1, dtype=torch.long, device=state.codes.device)
        p = state.distribution(range(1))
        state.codes[:, :1] = noise.at(first, 0).categorical(p, purpose="sample")
        self.committed, self.dtype = torch.ones_like(first[:, 0]), p.dtype

    @property
    def done(self) -> bool:
        """Whether every image is complete."""
        return bool((self.committed == self.size).all())

    @property
    def stop(self) -> Int[Tensor, " B"]:
        """The position that nothing may reach: the image's end, or the row's."""
        if not self.by_row:
            return torch.full_like(self.committed, self.size)
        return ((self.committed // self.cols + 1) * self.cols).clamp_max(self.size)

    def places(self, length: int) -> Int[Tensor, "B L"]:
        """Return the positions of the next `length` codes, even those beyond the image."""
        return self.committed[:, None] + torch.arange(length, device=self.committed.device)

    def window(self, length: int, *, stop: Int[Tensor, " B"] | None = None) -> Int[Tensor, "B L"]:
        """Return the positions of the next `length` codes, -1 from the image's end, or `stop`, on.

        A finished image has none.
        """
        stop = self.stop if stop is None else torch.minimum(stop, self.stop)
        where = self.places(length)
        return where.where(where < stop[:, None], -1)

    def predicted(self, positions: Int[Tensor, "B L"]) -> Bool[Tensor, "B M"]:
        """Mark the M = L + 1 next places that a pass over the newest code and `positions` predicts.

        Those are the places of the drafts and one more, as far as the image goes.
        """
        there = F.pad(positions >= 0, (1, 0), value=True)
        return there & (self.places(there.shape[1]) < self.stop[:, None])

    def drafts(self, positions: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
        """Return the codes in place at positions, any code at those of -1."""
        return self.state.codes.gather(1, positions.clamp_min(0))

    def write(
        self, positions: Int[Tensor, "B L"], tokens: Int[Tensor, "B L"], where: Bool[Tensor, "B L"]
    ) -> None:
        """Put tokens in place at the positions that `where` marks."""
        rows = torch.arange(len(where), device=where.device)[:, None].expand_as(where)
        self.state.codes[rows[where], positions[where]] = tokens[where]

    def forward(
        self, drafts: Int[Tensor, "B L"], positions: Int[Tensor, "B L"]
    ) -> Float[Tensor, "B M K"]:
        """Feed the newest code and the drafts; return p at the next M = L + 1 places.

        One pass, in which finished images take no part. Where `predicted` is False p means nothing.
        """
        newest = (self.committed - 1)[:, None]
        fed = torch.cat([newest, positions], 1)
        # The last position of all predicts nothing that is asked for.
        fed = fed.where(fed + 1 < self.stop[:, None], -1)
        codes = torch.cat([self.state.codes.gather(1, newest), drafts], 1)
        self.state.forward(codes, fed, phase="verify")
        with self.state.timed("verify"):
            return self.state.distribution(self.places(fed.shape[1]))

    def test(
        self,
        rule: AcceptRule,
        *,
        p: Float[Tensor, "B M K"],
        q: Float[Tensor, "B L K"],
        drafts: Int[Tensor, "B L"],
        positions: Int[Tensor, "B L"],
        number: int,
        through: bool = False,
    ) -> Verdict:
        """Test a chain from left to right and stop at the first reject.

        One code beyond the accepted prefix is drawn: the correction of the first reject, or, where
        all drafts are accepted and the image goes on, a bonus code from p. With `through` every
        draft beyond it that fails its test is replaced too, though nothing of that is committed.
        `number` is the round of the noise.
        """
        with self.state.timed("verify"):
            there, length = positions >= 0, drafts.shape[1]
            every = self.places(length + 1)
            odds = rule.odds(p[:, :length], q, drafts)
            draw = self.noise.at(every[:, :length], number)
            accepted = there & draw.bernoulli(odds, needed=there)
            kept = accepted.long().cumprod(1).bool()
            self.state.record_round("chain", 1, kept, drafted=there)
            ends, predicted = kept.sum(1, keepdim=True), self.predicted(positions)
            place = torch.arange(length + 1, device=drafts.device).expand_as(every)
            fresh = predicted & (place == ends)
            replaced = predicted & ~F.pad(accepted, (0, 1)) if through else fresh
            at = place if through else ends
            law = _replacement(rule, at, p=p, q=q, drafts=drafts, there=there)
            draw = self.noise.at(every.gather(1, at), number)
            new = draw.categorical(law, purpose="residual", needed=replaced.gather(1, at))
            return Verdict(kept, torch.where(replaced, new, F.pad(drafts, (0, 1))), fresh)

    def commit(self, verdict: Verdict) -> Int[Tensor, " B"]:
        """Write the accepted codes and the fresh one; return how many that is for each image."""
        taken = verdict.committed
        self.write(self.places(taken.shape[1]), verdict.tokens, taken)
        count = taken.sum(1)
        self.committed = self.committed + count
        return count


def carried(
    x: Float[Tensor, "B M K"], there: Bool[Tensor, "B M"], *, count: Int[Tensor, " B"], length: int
) -> tuple[Float[Tensor, "B L K"], Bool[Tensor, "B L"]]:
    """Move what belongs to the places of a window `count` places on; return `length` places of it.

    The second value marks the places that `there` marked before; what x holds elsewhere is junk.
    """
    index = count[:, None] + torch.arange(length, device=count.device)
    at = index.clamp_max(x.shape[1] - 1)
    return _at(x, at), there.gather(1, at) & (index < x.shape[1])


def _at(x: Float[Tensor, "B M K"], places: Int[Tensor, "B L"]) -> Float[Tensor, "B L K"]:
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def _replacement(
    rule: AcceptRule,
    at: Int[Tensor, "B A"],
    *,
    p: Float[Tensor, "B M K"],
    q: Float[Tensor, "B L K"],
    drafts: Int[Tensor, "B L"],
    there: Bool[Tensor, "B L"],
) -> Float[Tensor, "B A K"]:
    """Return what replaces drafts that were not kept, and p where nothing was drafted."""
    p, q = _at(p, at), _at(F.pad(q, (0, 0, 0, 1)), at)
    correction = rule.correction(p, q, F.pad(drafts, (0, 1)).gather(1, at))
    return torch.where(F.pad(there, (0, 1)).gather(1, at)[..., None], correction, p)
