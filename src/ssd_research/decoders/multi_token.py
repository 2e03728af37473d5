"""1D-MTP: SSD's horizontal heads alone, along the raster (the paper's baseline and a strict one).

`MultiToken` is the paper's: every block of `k_h` codes takes its verification rounds and a commit,
whatever was accepted, which gives every published step count. `MultiTokenStrict` is speculative
decoding with the same heads: drafts are sampled, tested in order, and the first reject ends a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.meter import Generation
from ssd_research.backbones.state import DecodingState
from ssd_research.decoders.accept import Rejection, reject
from ssd_research.decoders.base import Decoder, require_whole
from ssd_research.decoders.chain import Chain
from ssd_research.decoders.drafting import draft_law
from ssd_research.decoders.noise import Noise
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling


def segments(grid: TokenGrid) -> list[range]:
    """Return the positions that are decoded in one go: rows that a token ends, or the image."""
    return [grid.row(y) for y in range(grid.rows)] if grid.end_of_row else [range(grid.size)]


@dataclass(frozen=True)
class MultiToken(Decoder):
    """1D-MTP with a fixed budget: 2 + (rounds + 1) ceil((n - 1) / k_h) forwards per segment.

    A segment of n codes is a row where rows end with a token, the whole image elsewhere. Its first
    code is sampled after the prefill, or after a forward for the end-of-row token before it, and
    has a commit of its own. Drafts are each head's argmax, corrected as SSD's (`accept.reject`).
    """

    k_h: int = 5
    rounds: int = 1
    name: str = "mtp"
    lossless: ClassVar[bool] = False
    needs_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_whole("k_h", self.k_h, least=1)
        require_whole("rounds", self.rounds, least=0)

    def reach(self, grid: TokenGrid) -> dict[str, int]:
        """Return how far blocks reach."""
        return {"horizontal": min(self.k_h, len(segments(grid)[0]) - 1), "vertical": 0}

    @torch.inference_mode()
    def decode_with(
        self,
        backbone: Backbone,
        prompts: Sequence[str],
        *,
        sampling: Sampling,
        noise: Noise,
        heads: DraftHeads | None,
    ) -> Generation:
        """Decode with a given source of noise."""
        if heads is None:
            raise ValueError(f"decoder={self.name} needs trained heads: set heads.path")
        state = backbone.start(prompts, sampling=sampling)
        for segment in segments(backbone.grid):
            self._sample_first(state, noise, segment.start)
            for start in range(segment.start + 1, segment.stop, self.k_h):
                block = range(start, min(start + self.k_h, segment.stop))
                self._decode_block(state, noise, heads, block)
        return state.finish()

    def _sample_first(self, state: DecodingState, noise: Noise, position: int) -> None:
        """Sample a segment's first code and commit it; later segments begin after a row's end."""
        if position:
            end = state.backbone.grid.slot(position) - 1
            state.feed(state.codes[:, :1], range(end, end + 1), phase="commit")
        first = range(position, position + 1)
        draw = noise.at(_every(state, first), 0)
        p = state.distribution(first)
        state.codes[:, position : position + 1] = draw.categorical(p, purpose="sample")
        _feed(state, first, phase="commit")

    def _decode_block(
        self, state: DecodingState, noise: Noise, heads: DraftHeads, block: range
    ) -> None:
        """Draft a block from the code before it, correct it all in parallel, and commit it."""
        where, span = _every(state, block), slice(block.start, block.stop)
        with state.timed("draft"):
            offsets = where - (block.start - 1)
            q = draft_law(state, heads, "horizontal", positions=where, offsets=offsets)
            state.codes[:, span] = q.argmax(-1)
        for n in range(1, self.rounds + 1):
            _feed(state, block, phase="verify")
            with state.timed("verify"):
                p = state.distribution(block)
                codes, accepted = reject(p, q, state.codes[:, span], noise.at(where, n))
                state.codes[:, span] = codes
                q = torch.where(accepted[..., None], q, p)
                state.record_round("block", n, accepted)
        _feed(state, block, phase="commit")


def _every(state: DecodingState, positions: range) -> Int[Tensor, "B L"]:
    """Return a range of positions for every image."""
    every = torch.arange(positions.start, positions.stop, device=state.codes.device)
    return every.expand(state.batch, -1)


def _feed(state: DecodingState, positions: range, *, phase: str) -> None:
    """Feed the codes of a range within a segment, without the token that ends it."""
    slot = state.backbone.grid.slot(positions.start)
    codes = state.codes[:, positions.start : positions.stop]
    state.feed(codes, range(slot, slot + len(positions)), phase=phase)


def draft_chain(
    chain: Chain, heads: DraftHeads, *, length: int, number: int
) -> tuple[Int[Tensor, "B L"], Float[Tensor, "B L K"], Int[Tensor, "B L"]]:
    """Sample up to `length` codes that go on from each image's newest; return where, q and codes.

    Where a token ends rows, a chain does not reach beyond the newest code's row: -1 is where there
    is no draft. `number` is the round of the noise.
    """
    segment = len(segments(chain.state.backbone.grid)[0])
    stop = ((chain.committed - 1) // segment + 1) * segment
    positions = chain.window(length, stop=stop)
    with chain.state.timed("draft"):
        there = positions >= 0
        offsets = torch.where(there, positions - chain.committed[:, None] + 1, 0)
        q = draft_law(chain.state, heads, "horizontal", positions=positions, offsets=offsets)
        draw = chain.noise.at(positions, number)
        return positions, q, draw.categorical(q, purpose="draft", needed=there)


@dataclass(frozen=True)
class MultiTokenStrict(Decoder):
    """Speculative decoding with the horizontal heads: a chain of up to `k_h` sampled drafts.

    Every step drafts anew from the newest code, within the row where a token ends rows, tests the
    drafts in order and stops at the first reject; a chain without one gives a bonus code.
    """

    k_h: int = 5
    name: str = "mtp_strict"
    lossless: ClassVar[bool] = True
    needs_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_whole("k_h", self.k_h, least=1)

    def reach(self, grid: TokenGrid) -> dict[str, int]:
        """Return how far chains reach."""
        return {"horizontal": min(self.k_h, len(segments(grid)[0]) - 1), "vertical": 0}

    @torch.inference_mode()
    def decode_with(
        self,
        backbone: Backbone,
        prompts: Sequence[str],
        *,
        sampling: Sampling,
        noise: Noise,
        heads: DraftHeads | None,
    ) -> Generation:
        """Decode with a given source of noise."""
        if heads is None:
            raise ValueError(f"decoder={self.name} needs trained heads: set heads.path")
        chain, number = Chain(backbone.start(prompts, sampling=sampling), noise), 0
        while not chain.done:
            number += 1
            positions, q, drafts = draft_chain(chain, heads, length=self.k_h, number=number)
            p = chain.forward(drafts, positions)
            verdict = chain.test(
                Rejection(), p=p, q=q, drafts=drafts, positions=positions, number=number
            )
            chain.commit(verdict)
        return chain.state.finish()
