"""What draft heads say: of the positions after a row or a code, or of each image's own positions.

Here alone it is decided what heads read and how their predictions become q, whatever these are.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssd_research.backbones.state import DecodingState
from ssd_research.heads import Axis, DraftHeads


def read(
    state: DecodingState, heads: DraftHeads, source: range | Int[Tensor, "B L"]
) -> tuple[Float[Tensor, "S L D"], Float[Tensor, "S L D"]]:
    """Return (h, e), what heads read at raster positions: all streams share the codes.

    The code at a source and h_pre, the state that predicted it, have to be final.
    """
    if isinstance(source, range):
        codes = state.codes[:, source.start : source.stop]
    else:
        codes = state.codes.gather(1, source)
    e = state.backbone.embed(codes).repeat(state.streams // state.batch, 1, 1)
    return heads.own_states(state.backbone, state.states(source)), e


def law_of(
    state: DecodingState, heads: DraftHeads, predicted: Float[Tensor, "S L D"]
) -> Float[Tensor, "B L K"]:
    """Return q of what heads predict, guided and filtered as p is."""
    if heads.target == "h_pre":  # a state like the backbone's own
        return state.distribution_of(predicted)
    guidance = state.sampling.guidance
    return state.sampling.distribution(state.backbone.logits_of(predicted, heads.target, guidance))


def law_ahead(
    state: DecodingState, heads: DraftHeads, axis: Axis, *, source: range, count: int
) -> Float[Tensor, "B M K"]:
    """Return q at offsets 1..count from all of `source`, offset by offset."""
    h, e = read(state, heads, source)
    drafts = [heads.predict(axis, offset, h, e) for offset in range(1, count + 1)]
    state.meter.count_drafts(axis, count * len(source))
    return law_of(state, heads, torch.cat(drafts, dim=1))


def draft_law(
    state: DecodingState,
    heads: DraftHeads,
    axis: Axis,
    *,
    positions: Int[Tensor, "B L"],
    offsets: Int[Tensor, "B L"],
) -> Float[Tensor, "B L K"]:
    """Return q at raster `positions`, each from the source `offsets` columns or rows before it.

    Where an offset is 0 the heads have nothing to say: q is 0 there.
    """
    dtype = torch.promote_types(state.backbone.dtype, torch.float32)
    shape = (*positions.shape, state.backbone.codebook_size)
    q = torch.zeros(shape, dtype=dtype, device=positions.device)
    step = state.backbone.grid.cols if axis == "vertical" else 1
    state.meter.count_drafts(axis, (offsets > 0).sum(1))
    for offset in (one for one in offsets.unique().tolist() if one > 0):
        columns = (offsets == offset).any(0).nonzero()[:, 0]
        source = (positions[:, columns] - offset * step).clamp_min(0)
        law = law_of(state, heads, heads.predict(axis, offset, *read(state, heads, source)))
        mine = offsets[:, columns, None] == offset
        q[:, columns] = torch.where(mine, law, q[:, columns])
    return q
