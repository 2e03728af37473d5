"""Lossless decoders on a real transformer in float32, by sampling: the tensors behind the proofs.

test_exactness.py proves the laws on table models; here attention, cache and noise are the real
ones. Images of two prompts of different lengths share each batch and are counted against the law
of autoregressive sampling, which a teacher-forced pass over all 256 images gives.
"""

import functools

import pytest
import torch

from conftest import both_streams, make_heads
from enumeration import chi_square
from ssd_research.backbones.janus import JanusBackbone
from ssd_research.backbones.tiny import random_model
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.decoders.jacobi import SpeculativeJacobi
from ssd_research.decoders.lantern import Lantern
from ssd_research.decoders.multi_token import MultiTokenStrict
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.decoders.spatial_exact import SpatialJacobi
from ssd_research.eagle import EagleDrafter
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling
from table_model import images

CODES, IMAGES, BATCH = 4, 2**15, 2**12
SAMPLING = Sampling(2.0, temperature=0.9)
PROMPTS = ["a ring", "a red circle"]
DECODERS = [
    Autoregressive(),
    MultiTokenStrict(),
    SpeculativeJacobi(window=3),
    SpeculativeJacobi(init="horizontal"),
    SpeculativeJacobi(coupling="maximal", init_q="uniform"),
    SpeculativeJacobi(coupling="gumbel"),
    Lantern(accept="strict"),
    Lantern(accept="strict", drafter="eagle", depth=2),
    Lantern(accept="strict", drafter="eagle", tree=[2, 2]),
    SpatiallySpeculative(accept="strict"),
    SpatialJacobi(),
]


class Ended(JanusBackbone):
    """Janus's classes on 2x2 codes with end-of-row tokens and a short unconditional prompt."""

    def __init__(self, dtype: torch.dtype) -> None:
        model, tokenizer = random_model(grid=2, hidden_size=16, codebook_size=CODES)
        super().__init__(model.to(dtype), tokenizer, name="ended", defaults=SAMPLING)
        self.grid = TokenGrid(2, 2, end_of_row=True)

    @functools.cache  # noqa: B019
    def prompt_ids(self, text):
        return super().prompt_ids(text)

    def end_of_row_embedding(self):
        return self.decoder.get_input_embeddings().weight[-1][None, None]

    def unconditional_ids(self, ids):
        return [ids[0], self.tokenizer.pad_token_id, ids[-1]]


@functools.cache
def laws() -> torch.Tensor:
    """Return the law of autoregressive sampling [prompts, images], in float64."""
    backbone = Ended(torch.float64)
    every = images(backbone.grid, CODES)
    found = []
    for text in PROMPTS:
        states = both_streams(backbone, [text] * len(every), every)
        p = SAMPLING.distribution(backbone.logits(states, SAMPLING.guidance))
        found.append(p.gather(-1, every[..., None])[..., 0].prod(-1))
    return torch.stack(found)


def drafter(decoder, backbone):
    """Return untrained heads of the kind that a decoder needs."""
    if not decoder.needs_heads:
        return None
    if "kind" not in decoder.reach(backbone.grid):
        return make_heads(backbone)
    torch.manual_seed(2)
    return EagleDrafter.like(backbone, initialisation="torch").eval().requires_grad_(False)


def p_values(decoder) -> list[float]:
    """Return the chi-square p-value of each prompt's images."""
    backbone = Ended(torch.float32)
    heads = drafter(decoder, backbone)
    prompts = PROMPTS * (BATCH // 2)
    parts = [
        decoder.decode(
            backbone,
            prompts,
            sampling=SAMPLING,
            seed=0,
            sample_keys=range(first, first + BATCH),
            heads=heads,
        ).codes
        for first in range(0, IMAGES, BATCH)
    ]
    codes = torch.cat(parts)
    return [chi_square(law.numpy(), codes[n::2], CODES) for n, law in enumerate(laws())]


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.title)
def test_samples_follow_the_autoregressive_law(decoder):
    assert decoder.lossless
    assert min(p_values(decoder)) > 1e-4
