"""Raster KV buffers, and the attention function that writes and reads them.

Registered with transformers under the name `raster`: no HF cache, no HF mask, no padding. Every
stream is left-aligned, so a token's slot is its position in its own stream, and a query sees the
slots up to its own. Overwriting slots is the rollback: a stale slot is rewritten before any query
can see it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "raster"


class RasterKV:
    """Keys and values of all layers, each [streams, KV heads, capacity, head width].

    Buffers start as zeros, never uninitialised: a NaN in an unseen slot would survive a mask.
    """

    def __init__(
        self,
        layers: int,
        *,
        streams: int,
        heads: int,
        capacity: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (streams, heads, capacity, width)
        self.capacity = capacity
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    def move(self, source: Int[Tensor, "S L"], target: Int[Tensor, "S L"]) -> None:
        """Copy keys and values from some slots to others, all layers at once."""
        rows = torch.arange(len(source), device=source.device)[:, None]
        for buffer in (*self.keys, *self.values):
            buffer[rows, :, target] = buffer[rows, :, source]


@dataclass(frozen=True)
class RasterPass:
    """Where one forward writes and what it sees.

    `slots` [S, L] are the tokens' slots, `places` the positions that the model takes them to have
    (their slots, unless a decoder tries several tokens for one position). `shared` is the slots'
    range when every stream uses the same one (the fast path: slices instead of scatters). `mask`
    [S or 1, 1, L, T] is True where a query may look; None means that every one of the `length`
    first slots is visible to every query.
    """

    kv: RasterKV
    slots: Int[Tensor, "S L"]
    places: Int[Tensor, "S L"]
    length: int
    shared: range | None
    mask: Bool[Tensor, "X 1 L T"] | None

    @classmethod
    def plan(
        cls,
        kv: RasterKV,
        slots: Int[Tensor, "S L"],
        *,
        shared: range | None,
        visible: Bool[Tensor, "S L T"] | None = None,
        places: Int[Tensor, "S L"] | None = None,
    ) -> "RasterPass":
        """Work out the mask once per forward, for all layers.

        Without `visible`, which says what each query may look at, it sees the slots up to its own.
        The last slot of the buffers holds tokens that nothing may see.
        """
        places = slots if places is None else places
        if visible is not None:
            return cls(kv, slots, places, visible.shape[-1], shared, visible[:, None])
        if shared is None:
            length = int(slots.masked_fill(slots == kv.capacity - 1, 0).max()) + 1
        else:
            length = shared.stop
            if len(shared) == 1:
                return cls(kv, slots, places, length, shared, None)
        queries = slots if shared is None else slots[:1]
        mask = torch.arange(length, device=slots.device) <= queries[:, None, :, None]
        return cls(kv, slots, places, length, shared, mask)

    def write(
        self, layer: int, key: Float[Tensor, "S h L w"], value: Float[Tensor, "S h L w"]
    ) -> tuple[Float[Tensor, "S h T w"], Float[Tensor, "S h T w"]]:
        """Store this forward's keys and values and return all that a query could see."""
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        if self.shared is not None:
            keys[:, :, self.shared.start : self.shared.stop] = key
            values[:, :, self.shared.start : self.shared.stop] = value
        else:
            rows = torch.arange(len(self.slots), device=self.slots.device)[:, None]
            keys[rows, :, self.slots] = key.transpose(1, 2)
            values[rows, :, self.slots] = value.transpose(1, 2)
        return keys[:, :, : self.length], values[:, :, : self.length]


def raster_attention(
    module: nn.Module,
    query: Float[Tensor, "S H L w"],
    key: Float[Tensor, "S h L w"],
    value: Float[Tensor, "S h L w"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    raster: RasterPass | None = None,
    **_: object,
) -> tuple[Float[Tensor, "S L H w"], None]:
    """Attend over the raster buffers, or plainly causally where no `raster` pass is given.

    Extra keywords are what transformers' models hand to every attention function.
    """
    grouped = query.shape[1] != key.shape[1]
    if raster is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    else:
        keys, values = raster.write(module.layer_idx, key, value)
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=raster.mask, scale=scaling, enable_gqa=grouped
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, raster_attention)
