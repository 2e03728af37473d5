"""How often drafts would be accepted, offset by offset (paper Figure 1, right).

The heads are run on true states of whole images (teacher forcing), so each offset is measured by
itself, without the errors that a decoder's own drafts pile up. Expectations over the acceptance
test, exactly rather than by drawing, with p the target and q the draft's distribution:

    sampled   sum_k min(p_k, q_k) = 1 - TV(p, q)        a draft drawn from q, rule min(1, p/q)
    argmax    min(1, p_c / q_c), c = argmax q           SSD's own drafts and rule
    match     p_c                                       a draw from p equals the draft

Both of p and q are guided and filtered. Figure 1 holds AR's images of held-out prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.decoders.accept import ratio
from ssd_research.heads import Axis, DraftHeads
from ssd_research.sampling import Sampling
from ssd_research.training.losses import sources, targets

VERSION = 1
MEASURES = ("sampled", "argmax", "match")
CHUNK = 512  # positions whose distributions are in memory at once


@dataclass(frozen=True)
class Offset:
    """The acceptance at one offset: means [B] per image over its `positions` targets."""

    axis: Axis
    offset: int
    positions: int
    sampled: Float[np.ndarray, " B"]
    argmax: Float[np.ndarray, " B"]
    match: Float[np.ndarray, " B"]


@torch.no_grad()
def by_offset(
    backbone: Backbone,
    heads: DraftHeads,
    prompts: Sequence[str],
    codes: Int[Tensor, "B N"],
    sampling: Sampling,
) -> Iterator[Offset]:
    """Yield the acceptance at every offset of the heads on a batch of images.

    Raises ValueError for prompts the tokenizer cannot express.
    """
    codes = codes.to(backbone.device)
    flags = [False] if sampling.guidance == 1 else [False, True]
    rows = torch.ones(len(prompts), dtype=torch.bool)
    streams = [backbone.hidden_states(prompts, codes, unconditional=rows & flag) for flag in flags]
    h_pre = torch.cat(streams)  # [S, N, D], conditional rows first
    h = heads.own_states(backbone, h_pre)
    e = backbone.embed(codes).to(h.dtype).repeat(len(flags), 1, 1)
    grid = backbone.grid
    for axis, offset in heads.offsets():
        predicted = heads.predict(
            axis, offset, sources(h, grid, axis, offset), sources(e, grid, axis, offset)
        )
        true = targets(h_pre, grid, axis, offset)
        parts = [
            _accepted(backbone, sampling, part, predicted_part, heads.target)
            for part, predicted_part in zip(
                true.split(CHUNK, 1), predicted.split(CHUNK, 1), strict=True
            )
        ]
        means = torch.cat(parts, 1).mean(1).cpu().numpy()  # [B, 3]
        yield Offset(axis, offset, predicted.shape[1], *means.T)


def _accepted(
    backbone: Backbone,
    sampling: Sampling,
    h_pre: Float[Tensor, "S L D"],
    predicted: Float[Tensor, "S L D"],
    target: str,
) -> Float[Tensor, "B L 3"]:
    """Return the three expectations at each position of a part, whose `target` was predicted."""
    p, q = (
        sampling.distribution(backbone.logits_of(x, kind, sampling.guidance).double())
        for x, kind in ((h_pre, "h_pre"), (predicted, target))
    )
    draft = q.argmax(-1)
    sampled = torch.minimum(p, q).sum(-1)
    match = p.gather(-1, draft[..., None])[..., 0]
    return torch.stack([sampled, ratio(p, q, draft), match], -1)


def summarise(
    found: Sequence[Offset], *, samples: int, seed: int
) -> list[dict[str, float | int | str | list[float]]]:
    """Return a row per offset: means over images with 95 % intervals that redraw images.

    `found` may hold several batches of an offset.
    """
    rows: list[dict[str, float | int | str | list[float]]] = []
    for axis, offset in dict.fromkeys((one.axis, one.offset) for one in found):
        same = [one for one in found if (one.axis, one.offset) == (axis, offset)]
        values = np.stack(
            [np.concatenate([getattr(one, name) for one in same]) for name in MEASURES], 1
        )  # [images, 3]
        rng = np.random.default_rng(seed)
        redrawn = [
            values[rng.integers(0, len(values), len(values))].mean(0) for _ in range(samples)
        ]
        low, high = np.percentile(redrawn, [2.5, 97.5], axis=0)
        row: dict[str, float | int | str | list[float]] = {
            "axis": axis,
            "offset": offset,
            "positions": same[0].positions,
            "images": len(values),
        }
        for n, name in enumerate(MEASURES):
            row[name] = float(values[:, n].mean())
            row[f"{name}_ci"] = [float(low[n]), float(high[n])]
        rows.append(row)
    return rows
