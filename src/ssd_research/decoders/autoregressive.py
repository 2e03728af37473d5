"""Autoregressive decoding: the reference law, one backbone forward per code."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.state import Generation
from ssd_research.decoders.base import Decoder
from ssd_research.decoders.noise import Noise
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling


@dataclass(frozen=True)
class Autoregressive(Decoder):
    """Sample position after position from p; N codes take N forwards, the prefill included.

    A row's forced end-of-row token, where the backbone has one, rides in the forward of the row's
    last code.
    """

    name: str = "ar"
    lossless: ClassVar[bool] = True

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
        state = backbone.start(prompts, sampling=sampling)
        every = torch.arange(backbone.grid.size, device=backbone.device).expand(len(prompts), -1)
        for n in range(backbone.grid.size):
            p = state.distribution(range(n, n + 1))
            draw = noise.at(every[:, n : n + 1], 0)
            state.codes[:, n : n + 1] = draw.categorical(p, purpose="sample")
            if n + 1 < backbone.grid.size:
                state.forward(state.codes[:, n : n + 1], range(n, n + 1), phase="commit")
        return state.finish()
