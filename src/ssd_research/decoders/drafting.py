"""What draft heads say about positions that each image of a batch has of its own."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssd_research.backbones.state import DecodingState
from ssd_research.heads import Axis, DraftHeads


def draft_law(
    state: DecodingState,
    heads: DraftHeads,
    axis: Axis,
    *,
    positions: Int[Tensor, "B L"],
    offsets: Int[Tensor, "B L"],
) -> Float[Tensor, "B L K"]:
    """Return q at raster `positions`, each from the source `offsets` columns or rows before it.

    The source's code and h_pre, the state that predicted it, have to be final. Where an offset is 0
    the heads have nothing to say: q is 0 there.
    """
    dtype = torch.promote_types(state.backbone.dtype, torch.float32)
    shape = (*positions.shape, state.backbone.codebook_size)
    q = torch.zeros(shape, dtype=dtype, device=positions.device)
    step = state.backbone.grid.cols if axis == "vertical" else 1
    for offset in (one for one in offsets.unique().tolist() if one > 0):
        columns = (offsets == offset).any(0).nonzero()[:, 0]
        source = (positions[:, columns] - offset * step).clamp_min(0)
        e = state.backbone.embed(state.codes.gather(1, source))
        e = e.repeat(state.streams // state.batch, 1, 1)
        law = state.distribution_of(heads.predict(axis, offset, state.states(source), e))
        mine = offsets[:, columns, None] == offset
        q[:, columns] = torch.where(mine, law, q[:, columns])
    return q
