"""What drafters are trained on, above all Smooth-L1 between predicted and true pre-norm states.

Grid shifts, here for 3 columns. A head is trained on every source whose target is in the grid; none
wraps to another row or leaves the last one:

    row         h00 h01 h02          h10 h11 h12
    horizontal  k=1: h00->h01 h01->h02 | h10->h11 h11->h12
    vertical    d=1: h00->h10 h01->h11 h02->h12
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ssd_research.grid import TokenGrid
from ssd_research.heads import Axis


def sources(
    x: Shaped[Tensor, "b n *d"], grid: TokenGrid, axis: Axis, offset: int
) -> Shaped[Tensor, "b m *d"]:
    """Return the entries of `x` (raster order) whose target `offset` ahead is in the grid."""
    x = x.unflatten(1, (grid.rows, grid.cols))
    kept = x[:, : -offset or None] if axis == "vertical" else x[:, :, : -offset or None]
    return kept.flatten(1, 2)


def targets(
    x: Shaped[Tensor, "b n *d"], grid: TokenGrid, axis: Axis, offset: int
) -> Shaped[Tensor, "b m *d"]:
    """Return the entries of `x` that lie `offset` ahead of `sources(x, ...)`, in the same order."""
    x = x.unflatten(1, (grid.rows, grid.cols))
    kept = x[:, offset:] if axis == "vertical" else x[:, :, offset:]
    return kept.flatten(1, 2)


def smooth_l1(
    h_hat: Float[Tensor, "*n d"], h: Float[Tensor, "*n d"], *, beta: float = 1.0
) -> Float[Tensor, "*n"]:
    """Return Smooth-L1 per position, the mean over the width, in float32.

    0.5 e^2 / beta where |e| < beta, else |e| - beta / 2 (Girshick 2015). The paper does not give
    beta; 1 is PyTorch's default.
    """
    return F.smooth_l1_loss(h_hat.float(), h.float(), beta=beta, reduction="none").mean(-1)


def masked_mean(
    values: Float[Tensor, "*n"], mask: Bool[Tensor, "*n"] | None = None
) -> Float[Tensor, ""]:
    """Return the mean of `values` where `mask` holds (everywhere if None), 0 if nowhere."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1)


def soft_cross_entropy(
    logits_hat: Float[Tensor, "*n K"], logits: Float[Tensor, "*n K"]
) -> Float[Tensor, "*n"]:
    """Return -sum_k p_k log q_k in nats, with p and q of `logits` and `logits_hat`."""
    return -(logits.softmax(-1) * logits_hat.log_softmax(-1)).sum(-1)


def overlap(
    logits_hat: Float[Tensor, "*n K"], logits: Float[Tensor, "*n K"]
) -> Float[Tensor, "*n"]:
    """Return sum_k min(p_k, q_k) = 1 - TV(p, q): the odds that a draft from q is accepted."""
    return torch.minimum(logits.softmax(-1), logits_hat.softmax(-1)).sum(-1)
