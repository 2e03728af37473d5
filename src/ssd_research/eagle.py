"""An EAGLE-style drafter: one decoder layer that predicts the backbone's states one by one.

    input     [h0; e0]  [h1; e1]  [h2; e2]        h_i predicts the code at i, e_i embeds that code
    output       h1        h2        h3           (Li et al. 2024, EAGLE, section 4.1)

Fed its own output for h, it goes on beyond what the backbone has seen. It has keys and values of
its own, over the codes of one image: h0 stands for the prompt, and the pair at a row's last code
predicts the state that follows the row's end-of-row token, where there is one. Like draft heads it
knows nothing of logits; with guidance it runs on both streams.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ssd_research.backbones.attention import RasterKV, RasterPass, raster_attention
from ssd_research.backbones.base import Backbone
from ssd_research.heads import (
    DraftHeads,
    check_initialisation,
    open_heads,
    require_kind,
    write_heads,
)

THETA = 10_000.0  # of the rotary positions


def rotated(x: Float[Tensor, "S H L w"], places: Int[Tensor, "S L"]) -> Float[Tensor, "S H L w"]:
    """Turn queries or keys by their rotary positions (Su et al. 2021), halves paired as Llama's."""
    half = x.shape[-1] // 2
    kind = torch.promote_types(x.dtype, torch.float32)
    frequency = THETA ** (-torch.arange(half, device=x.device, dtype=kind) / half)
    angle = places[:, None, :, None] * frequency
    a, b = x.chunk(2, dim=-1)
    turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.cat(turned, dim=-1).to(x.dtype)


class EagleDrafter(nn.Module):
    """`u = W0 [h; e]`, then one pre-norm decoder layer of Llama's kind on u; no biases.

    The layer is this class's own, whatever the backbone's layers are like (Chameleon's normalise
    queries and keys, this one does not); only its sizes are the backbone's. `initialisation` is as
    for draft heads: `linear` starts both residual branches at zero, `identity` also W0 as [I 0].
    """

    layer_idx = 0  # the drafter's one layer in its own cache

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int,
        kv_heads: int,
        intermediate_size: int,
        initialisation: str = "linear",
    ) -> None:
        super().__init__()
        check_initialisation(initialisation)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, hidden_size // heads
        d, kv = hidden_size, kv_heads * self.head_size
        self.project = nn.Linear(2 * d, d, bias=False)
        self.attention_norm = nn.RMSNorm(d, eps=1e-6)
        self.query = nn.Linear(d, heads * self.head_size, bias=False)
        self.key, self.value = nn.Linear(d, kv, bias=False), nn.Linear(d, kv, bias=False)
        self.output = nn.Linear(heads * self.head_size, d, bias=False)
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.gate = nn.Linear(d, intermediate_size, bias=False)
        self.up = nn.Linear(d, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, d, bias=False)
        if initialisation != "torch":
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.down.weight)
        if initialisation == "identity":
            nn.init.eye_(self.project.weight)

    @classmethod
    def like(cls, backbone: Backbone, *, initialisation: str = "linear") -> "EagleDrafter":
        """Return an untrained drafter with the sizes of a backbone's layers."""
        config = backbone.decoder.config
        return cls(
            backbone.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            intermediate_size=config.intermediate_size,
            initialisation=initialisation,
        )

    def forward(
        self,
        h: Float[Tensor, "S L D"],
        e: Float[Tensor, "S L D"],
        places: Int[Tensor, "S L"],
        raster: RasterPass | None = None,
    ) -> Float[Tensor, "S L D"]:
        """Return the state after each pair (h, e), where `places` are the codes' raster positions.

        Without a `raster` pass over the drafter's cache each pair sees those before it.
        """
        u = self.project(torch.cat([h, e], dim=-1))
        x = self.attention_norm(u)
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        query, key = rotated(query, places), rotated(key, places)
        seen, _ = raster_attention(self, query, key, value, None, raster=raster)
        u = u + self.output(seen.flatten(2))
        z = self.norm(u)
        return u + self.down(F.silu(self.gate(z)) * self.up(z))

    def new_cache(self, streams: int, capacity: int) -> RasterKV:
        """Allocate the keys and values of `streams` sequences of at most `capacity` pairs."""
        weight = self.project.weight
        return RasterKV(
            1,
            streams=streams,
            heads=self.kv_heads,
            capacity=capacity,
            width=self.head_size,
            dtype=weight.dtype,
            device=weight.device,
        )

    def require(self, *, kind: str = "spatial", **reach: int) -> None:
        """Raise ValueError for a decoder that drafts with spatial heads."""
        require_kind("eagle", kind)

    def save(self, folder: Path, provenance: Mapping[str, Any], *, dtype: str = "float32") -> None:
        """Write heads.safetensors (stored as `dtype`) and heads.json into `folder`, atomically.

        `provenance` must name the `backbone` and its `fingerprint`; kind and sizes are added.
        """
        sizes = {
            "kind": "eagle",
            "hidden_size": self.hidden_size,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "intermediate_size": self.intermediate_size,
        }
        write_heads(folder, self.state_dict(), {**provenance, **sizes}, dtype=dtype)

    @classmethod
    def load(cls, folder: Path | str, backbone: Backbone) -> "EagleDrafter":
        """Load a drafter onto `backbone`'s device and dtype.

        Raises ValueError where the file is missing or broken, holds spatial heads, or was trained
        for another backbone or width.
        """
        with open_heads(folder, backbone, kind="eagle") as (record, file):
            sizes = {key: record[key] for key in ("heads", "kv_heads", "intermediate_size")}
            with torch.device("meta"):
                drafter = cls(record["hidden_size"], **sizes)
            tensors = {name: file.get_tensor(name) for name in drafter.state_dict()}
        drafter.load_state_dict(tensors, assign=True)
        return drafter.to(backbone.device, backbone.dtype).eval().requires_grad_(False)


Drafter = DraftHeads | EagleDrafter
