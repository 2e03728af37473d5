"""What decoders share that commit from left to right: a chain of drafts, tested up to a reject.

Every image of a batch keeps its own number of committed codes. Between passes the cache holds all
of these but the newest, which the next pass feeds in front of the drafts:

    fed         newest  x1   x2   x3          positions n-1 ... n+2
    predicts    p1      p2   p3   p4          of n ... n+3, the bonus position last
"""

from dataclasses import dataclass

import torch
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


class Chain:
    """A batch of images under way and how many codes of each are `committed` [B]."""

    def __init__(self, state: DecodingState, noise: Noise) -> None:
        """Sample the code at position 0 of every image from the prefill's state."""
        self.state, self.noise = state, noise
        first = torch.zeros(state.batch, 1, dtype=torch.long, device=state.codes.device)
        draw = noise.at(first, 0)
        state.codes[:, :1] = draw.categorical(state.distribution(range(1)), purpose="sample")
        self.committed = torch.ones_like(first[:, 0])

    @property
    def done(self) -> bool:
        """Whether every image is complete."""
        return bool((self.committed == self.state.backbone.grid.size).all())

    def window(self, length: int, *, stop: Int[Tensor, " B"] | None = None) -> Int[Tensor, "B L"]:
        """Return the positions of the next `length` codes, -1 from the image's end, or `stop`, on.

        A finished image has none.
        """
        stop = self.committed.new_tensor(self.state.backbone.grid.size) if stop is None else stop
        where = self.committed[:, None] + torch.arange(length, device=self.committed.device)
        return where.where(where < stop[..., None], -1)

    def forward(
        self, drafts: Int[Tensor, "B L"], positions: Int[Tensor, "B L"]
    ) -> Float[Tensor, "B M K"]:
        """Feed the newest code and the drafts; return p at the drafts' positions and one more.

        One pass over M = L + 1 positions, in which finished images take no part. What p says at
        positions of -1, or beyond the image, means nothing.
        """
        last = self.state.backbone.grid.size - 1
        newest = (self.committed - 1)[:, None]
        fed = torch.cat([newest.where(newest < last, -1), positions], 1)
        # The image's last position predicts nothing.
        fed = fed.where(fed < last, -1)
        codes = torch.cat([self.state.codes.gather(1, newest), drafts], 1)
        self.state.forward(codes, fed, phase="verify")
        predicted = newest + 1 + torch.arange(fed.shape[1], device=fed.device)
        return self.state.distribution(predicted)

    def test(
        self,
        rule: AcceptRule,
        *,
        p: Float[Tensor, "B M K"],
        q: Float[Tensor, "B L K"],
        drafts: Int[Tensor, "B L"],
        positions: Int[Tensor, "B L"],
        number: int,
    ) -> Verdict:
        """Test a chain from left to right and stop at the first reject.

        One code beyond the accepted prefix is drawn: the correction of the first reject, or, where
        all drafts are accepted and the image goes on, a bonus code from p. `number` is the round of
        the noise.
        """
        there = positions >= 0
        length = drafts.shape[1]
        every = self.committed[:, None] + torch.arange(length + 1, device=drafts.device)
        accepted = self.noise.at(every[:, :length], number).bernoulli(
            rule.odds(p[:, :length], q, drafts), needed=there
        )
        kept = (accepted & there).long().cumprod(1).bool()
        count = kept.sum(1)
        place = torch.arange(length + 1, device=drafts.device)
        inside = every < self.state.backbone.grid.size
        fresh = (place == count[:, None]) & inside
        law = p.clone()
        law[:, :length] = torch.where(
            there[..., None], rule.correction(p[:, :length], q, drafts), p[:, :length]
        )
        draw = self.noise.at(every, number)
        new = draw.categorical(law, purpose="residual", needed=fresh)
        padded = torch.cat([drafts, drafts[:, :1]], 1)
        self.state.record_round("chain", 1, kept, drafted=there)
        return Verdict(kept, torch.where(fresh, new, padded), fresh)

    def commit(self, verdict: Verdict) -> Int[Tensor, " B"]:
        """Write the accepted codes and the fresh one; return how many that is for each image."""
        kept = torch.cat([verdict.kept, torch.zeros_like(verdict.fresh[:, :1])], 1)
        taken = kept | verdict.fresh
        place = torch.arange(taken.shape[1], device=taken.device)
        where = self.committed[:, None] + place
        rows = torch.arange(len(taken), device=taken.device)[:, None].expand_as(where)
        self.state.codes[rows[taken], where[taken]] = verdict.tokens[taken]
        count = taken.sum(1)
        self.committed = self.committed + count
        return count
