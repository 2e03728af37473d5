"""Autoregressive decoding: the reference law, one backbone forward per code."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.meter import Generation
from ssd_research.backbones.state import DecodingState
from ssd_research.decoders.base import Decoder
from ssd_research.decoders.noise import Noise
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling

END_OF_ROW = ("own_pass", "folded")


@dataclass(frozen=True)
class Autoregressive(Decoder):
    """Sample position after position from p, one forward per code, the prefill included.

    A row's forced end-of-row token, where the backbone has one, takes a forward of its own as in
    the official loops and the paper's counts (`end_of_row=own_pass`: H (W + 1) forwards), or rides
    in the forward of the row's last code (`folded`: H W). None means `own_pass` where it matters.
    """

    end_of_row: str | None = None
    name: str = "ar"
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.end_of_row not in (None, *END_OF_ROW):
            raise ValueError(
                f"decoder.end_of_row={self.end_of_row} is not one of {', '.join(END_OF_ROW)}, null"
            )

    def check(self, grid: TokenGrid) -> None:
        """Raise ValueError for an `end_of_row` where rows end without a token."""
        if self.end_of_row is not None and not grid.end_of_row:
            raise ValueError(
                f"decoder.end_of_row={self.end_of_row} does nothing here: this model has no "
                "end-of-row tokens; leave it out"
            )

    def in_force(self, grid: TokenGrid) -> str | None:
        """Return what becomes of end-of-row tokens on a grid; None where it has none."""
        return (self.end_of_row or "own_pass") if grid.end_of_row else None

    def settings(self, grid: TokenGrid) -> dict[str, Any]:
        """Return what becomes of end-of-row tokens, where there are any."""
        found = self.in_force(grid)
        return {} if found is None else {"end_of_row": found}

    @torch.inference_mode()
    def decode_with(
        self,
        backbone: Backbone,
        prompts: Sequence[str],
        *,
        sampling: Sampling,
        noise: Noise,
        heads: DraftHeads | None = None,
    ) -> Generation:
        """Decode with a given source of noise; `heads` are not used."""
        grid = backbone.grid
        own_pass = self.in_force(grid) == "own_pass"
        state = backbone.start(prompts, sampling=sampling)
        every = torch.arange(grid.size, device=backbone.device).expand(len(prompts), -1)
        for n in range(grid.size):
            p = state.distribution(range(n, n + 1))
            draw = noise.at(every[:, n : n + 1], 0)
            code = state.codes[:, n : n + 1] = draw.categorical(p, purpose="sample")
            last = n + 1 == grid.size
            if own_pass:
                self._feed_apart(state, code, n, last=last)
            elif not last:
                state.forward(code, range(n, n + 1), phase="commit")
        return state.finish()

    def _feed_apart(
        self, state: DecodingState, code: Int[Tensor, "B 1"], position: int, *, last: bool
    ) -> None:
        """Feed a code, then its row's end-of-row token, in forwards of their own.

        The official loops also spend a forward on the image's last code, whose only product is
        the last end-of-row token; so does this, for the counts and seconds to be theirs.
        """
        slot = state.backbone.grid.slot(position)
        state.feed(code, range(slot, slot + 1), phase="commit")
        if (position + 1) % state.backbone.grid.cols == 0 and not last:
            state.feed(code, range(slot + 1, slot + 2), phase="commit")
