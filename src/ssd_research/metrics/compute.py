"""Compute and memory per image of any decoder, from what was counted (paper Table 12).

FLOPs, a multiply and an add each, S the streams of an image:

    backbone    2 (layers' parameters x (S tokens + prompt tokens) + head's parameters x S tokens)
    attention   4 x layers x attention width x pairs of a token and one that it sees
    heads       2 x S x parameters of a head x tokens that heads read

As in the paper, the model's whole head is counted once for every image token that is fed, whether
its logits are read or not, and not for drafts. Memory is in bytes, and GB are 1e9 of them.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssd_research.backbones.base import parameters
from ssd_research.backbones.dimensions import Dimensions, held_bytes
from ssd_research.eagle import Drafter, EagleDrafter

VERSION = 1
Row = Mapping[str, Any]
Pair = tuple[float, float]
COUNTED = (  # columns of images.parquet
    "tokens",
    "streams",
    "prompt_tokens",
    "attended",
    "head_tokens_horizontal",
    "head_tokens_vertical",
    "head_tokens_eagle",
    "eagle_attended",
)
PARTS = ("backbone", "attention", "horizontal_heads", "vertical_heads", "eagle")


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of loaded draft heads: parameters of one, bytes of all, attention width of EAGLE's."""

    parameters: int = 0
    weight_bytes: int = 0
    attention_width: int = 0

    @classmethod
    def of(cls, heads: Drafter | None) -> "HeadSizes":
        """Return the sizes of what a decoder drafts with; None is nothing."""
        if heads is None:
            return cls()
        size, held = parameters(heads), held_bytes(heads.parameters())
        if isinstance(heads, EagleDrafter):
            return cls(size, held, heads.heads * heads.head_size)
        return cls(size // max(1, heads.horizontal + heads.vertical), held)


def flops(sizes: Dimensions, heads: HeadSizes, row: Row) -> dict[str, float]:
    """Return the FLOPs of one image by PARTS; `row` holds its COUNTED numbers."""
    fed = row["streams"] * row["tokens"]
    linear = sizes.layer_parameters * (fed + row["prompt_tokens"]) + sizes.head_parameters * fed
    head = 2 * row["streams"] * heads.parameters
    return {
        "backbone": 2.0 * linear,
        "attention": 4.0 * sizes.layers * sizes.attention_width * row["attended"],
        "horizontal_heads": float(head * row["head_tokens_horizontal"]),
        "vertical_heads": float(head * row["head_tokens_vertical"]),
        "eagle": head * row["head_tokens_eagle"]
        + 4.0 * heads.attention_width * row["eagle_attended"],
    }


def kv_bytes(sizes: Dimensions, row: Row) -> int:
    """Return the keys and values of one image at its end, in bytes, all streams together."""
    tokens = row["prompt_tokens"] + row["streams"] * sizes.image_tokens
    return 2 * sizes.layers * sizes.kv_width * sizes.number_bytes * tokens


def per_image(sizes: Dimensions, heads: HeadSizes, row: Row) -> dict[str, Any]:
    """Return TFLOPs (1e12) by part and in all, and the keys and values in GB, of one image."""
    parts = {f"{part}_tflops": count / 1e12 for part, count in flops(sizes, heads, row).items()}
    return {
        **parts,
        "total_tflops": sum(parts.values()),
        "kv_gb": kv_bytes(sizes, row) / 1e9,
    }


def interval(values: Sequence[float], prompts: Sequence[str], *, samples: int, seed: int) -> Pair:
    """Return the 95 % interval of a mean over images, from `samples` redraws of whole prompts."""
    groups: dict[str, list[float]] = {}
    for prompt, value in zip(prompts, values, strict=True):
        groups.setdefault(prompt, []).append(value)
    means = np.array([statistics.fmean(group) for group in groups.values()])
    drawn = np.random.default_rng(seed).integers(0, len(means), (samples, len(means)))
    low, high = np.percentile(means[drawn].mean(1), [2.5, 97.5])
    return float(low), float(high)


def aggregate(
    sizes: Dimensions, heads: HeadSizes, rows: Sequence[Row], *, samples: int, seed: int
) -> dict[str, Any]:
    """Return the means over images of `per_image`, the interval of all TFLOPs, and memory in GB.

    `rows` hold `per_image` and `prompt_id`, `batch_size`, `peak_memory_bytes`. `weights_gb` are all
    weights, `heads_gb` those of draft heads among them. `peak_gb` is the allocator's largest peak
    with `batch_size` images at once, `activations_kv_gb` what of it is no weights; both are None
    where no peak was measured.
    """
    keys = (*(f"{part}_tflops" for part in PARTS), "total_tflops", "kv_gb")
    weights = sizes.weight_bytes + heads.weight_bytes
    peak = max(row["peak_memory_bytes"] for row in rows)
    totals, prompts = ([row[key] for row in rows] for key in ("total_tflops", "prompt_id"))
    return {
        **{key: statistics.fmean(row[key] for row in rows) for key in keys},
        "total_tflops_ci95": interval(totals, prompts, samples=samples, seed=seed),
        "weights_gb": weights / 1e9,
        "heads_gb": heads.weight_bytes / 1e9,
        "activations_kv_gb": (peak - weights) / 1e9 if peak else None,
        "peak_gb": peak / 1e9 if peak else None,
        "batch_size": max(row["batch_size"] for row in rows),
    }
