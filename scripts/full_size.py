#!/usr/bin/env python3
"""Latency and memory of the paper's backbones at full size, with random weights made on the device.

A fixed schedule takes as long with random weights as with trained ones, so this needs no download:

    python scripts/full_size.py                        # one GPU, all three models, 8 minutes
    python scripts/full_size.py --device cpu --small   # the same code on little models, a minute

For every model: SSD at its operating point and AR, interleaved, single images. AR decodes as many
rows as the time allows; seconds per row grow linearly with the context, so the rest of the image is
a fitted line, and the result says so. One JSON line per measurement goes to stdout.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Emu3ForCausalLM,
    Emu3TextConfig,
    Emu3VQVAE,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
)
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.emu3 import BEGIN_OF_IMAGE, BOS, END_OF_ROW, IMAGE_TOKEN, Emu3Backbone
from ssd_research.backbones.janus import JanusBackbone
from ssd_research.backbones.lumina import NO_VQ, LuminaBackbone, LuminaTokens
from ssd_research.decoders.noise import KeyedNoise
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads
from ssd_research.provenance import device_name, versions
from ssd_research.sampling import Sampling

PROMPT_TOKENS = 80


class Words:
    """A tokenizer for whom every prompt has the same number of tokens."""

    bos_token_id, pad_token_id, unk_token_id = 0, 1, None

    def __init__(self, vocabulary: dict[str, int] | None = None) -> None:
        self.vocabulary = vocabulary or {}

    def get_vocab(self) -> dict[str, int]:
        """Return the special tokens."""
        return self.vocabulary

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Return ids that begin and end as the adapter expects."""
        first, last = (self.vocabulary.get(token, 2) for token in (BOS, IMAGE_TOKEN))
        return {"input_ids": [first, *range(3, PROMPT_TOKENS + 1), last]}


def janus(small: bool) -> Backbone:
    """Return a random Janus-Pro-7B."""
    width, layers, grid, codes = (64, 2, 6, 64) if small else (4096, 30, 24, 16384)
    text = LlamaConfig(
        vocab_size=256 if small else 102400,
        hidden_size=width,
        intermediate_size=128 if small else 11008,
        num_hidden_layers=layers,
        num_attention_heads=2 if small else 32,
        num_key_value_heads=2 if small else 32,
        max_position_embeddings=16384,
        rms_norm_eps=1e-6,
    )
    vision = JanusVisionConfig(
        image_size=16 * grid, patch_size=16, projection_dim=width, num_hidden_layers=0
    )
    vq = JanusVQVAEConfig(
        embed_dim=8, num_embeddings=codes, projection_dim=width, image_token_embed_dim=width
    )
    config = JanusConfig(text_config=text, vision_config=vision, vq_config=vq)
    model = JanusForConditionalGeneration(config)
    return JanusBackbone(model, Words(), name="janus_pro", defaults=Sampling(5.0))


def lumina(small: bool) -> Backbone:
    """Return a random Lumina-mGPT-7B-768."""
    little = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    codes, side = (64, 96) if small else (8192, 768)
    config = ChameleonConfig(
        vocab_size=512 if small else 65536,
        vocabulary_map={"<image>": 3},
        vq_config=NO_VQ,
        **((little | heads) if small else {}),
    )
    model = ChameleonForConditionalGeneration(config)
    tokens = LuminaTokens(0, 1, (100, 101, 102), 103, tuple(range(4, 4 + codes)))
    return LuminaBackbone(
        model,
        Words(),
        tokens,
        image_size=(side, side),
        image_decoder=None,
        name="lumina_mgpt",
        defaults=Sampling(4.0, top_k=min(2000, codes)),
    )


def emu3(small: bool) -> Backbone:
    """Return a random Emu3-Gen."""
    little = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    codes, side = (64, 10) if small else (32768, 90)
    config = Emu3TextConfig(
        vocab_size=512 if small else 184622,
        pad_token_id=0,
        **((little | heads) if small else {}),
    )
    special = [BOS, BEGIN_OF_IMAGE, IMAGE_TOKEN, END_OF_ROW]
    names = [*special, *(f"<|visual token {n:06d}|>" for n in range(codes))]
    words = Words({name: 100 + n for n, name in enumerate(names)})
    vq = {"base_channels": 32, "num_res_blocks": 1, "hidden_size": 128} if small else {}
    model = Emu3ForCausalLM(config)
    return Emu3Backbone(
        model.model,
        model.lm_head,
        Emu3VQVAE(Emu3VQVAEConfig(codebook_size=codes, **vq)),
        words,
        grid=TokenGrid(side, side, end_of_row=True),
        name="emu3",
        defaults=Sampling(3.0, top_k=min(2048, codes)),
    )


MODELS: dict[str, tuple[Callable[[bool], Backbone], dict[str, int]]] = {
    "janus_pro": (janus, {"v": 1, "b": 2, "i": 0}),
    "lumina_mgpt": (lumina, {"v": 2, "b": 5, "i": 4}),
    "emu3": (emu3, {"v": 1, "b": 5, "i": 0}),
}


def build(name: str, *, device: str, dtype: torch.dtype, small: bool) -> Backbone:
    """Return a random backbone made on the device, in `dtype`."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return MODELS[name][0](small)
    finally:
        torch.set_default_dtype(torch.float32)


def clock(device: str) -> float:
    """Return the time once the device has finished what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.inference_mode()
def ar_rows(backbone: Backbone, *, seconds: float, device: str) -> list[float]:
    """Return the seconds of each row that AR decodes before the time is up, prefill in the first.

    A row's end-of-row token takes a forward of its own, as in the paper.
    """
    grid, noise = backbone.grid, KeyedNoise(0, [0])
    rows, start = [], clock(device)
    began = start
    state = backbone.start(["a prompt"], sampling=backbone.defaults)
    for y in range(grid.rows):
        for n in grid.row(y):
            draw = noise.at(torch.tensor([[n]], device=backbone.device), 0)
            code = draw.categorical(state.distribution(range(n, n + 1)), purpose="sample")
            slot = grid.slot(n)
            state.feed(code, range(slot, slot + 1), phase="commit")
        if grid.end_of_row:
            slot = grid.slot(n) + 1
            state.feed(code, range(slot, slot + 1), phase="commit")
        now = clock(device)
        rows.append(now - start)
        start = now
        if now - began > seconds:
            break
    return rows


def whole_image(rows: list[float], *, count: int) -> tuple[float, bool]:
    """Return AR's seconds for `count` rows, and whether a fitted line stands for some of them."""
    if len(rows) == count:
        return sum(rows), False
    steady = rows[1:] if len(rows) > 2 else rows
    slope, base = np.polyfit(range(len(steady)), steady, 1) if len(steady) > 1 else (0.0, rows[0])
    offset = len(rows) - len(steady)
    return sum(rows) + sum(base + slope * (y - offset) for y in range(len(rows), count)), True


def measure(name: str, *, seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return latency, ratio and peak memory of one model within about `seconds`."""
    began = clock(args.device)
    backbone = build(name, device=args.device, dtype=getattr(torch, args.dtype), small=args.small)
    budget = MODELS[name][1]
    heads = DraftHeads(backbone.hidden_size, horizontal=5, vertical=budget["v"])
    heads = heads.to(backbone.device, backbone.dtype).eval().requires_grad_(False)
    decoder = SpatiallySpeculative(**budget)
    options = {"sampling": backbone.defaults, "seed": 0, "heads": heads, "sample_keys": [0]}
    warm = decoder.decode(backbone, ["a prompt"], **options)
    ar_rows(backbone, seconds=0.0, device=args.device)
    ssd = []
    for _ in range(2):
        ssd.append(decoder.decode(backbone, ["a prompt"], **options))
    left = seconds - (clock(args.device) - began)
    rows = ar_rows(backbone, seconds=max(left, 0.0), device=args.device)
    ssd.append(decoder.decode(backbone, ["a prompt"], **options))
    ar, fitted = whole_image(rows, count=backbone.grid.rows)
    latency = statistics.median(run.seconds["total"] for run in ssd)
    parameters = sum(p.numel() for p in backbone.decoder.parameters())
    return {
        "model": name,
        "device": device_name(args.device),
        "dtype": args.dtype,
        "small": args.small,
        "versions": versions(),
        "decoder_parameters": parameters,
        "ar_seconds": ar,
        "ar_rows_measured": len(rows),
        "ar_extrapolated": fitted,
        "ar_steps": backbone.grid.slots,
        "ssd": budget,
        "ssd_seconds": latency,
        "ssd_seconds_all": [run.seconds["total"] for run in ssd],
        "ssd_seconds_per_phase": ssd[-1].seconds,
        "ssd_steps": ssd[-1].nfe[0],
        "speedup": ar / latency,
        "step_acceleration": backbone.grid.slots / ssd[-1].nfe[0],
        "peak_memory_gb": max(run.peak_memory_bytes for run in (warm, *ssd)) / 1e9 or None,
        "seconds_with_building": clock(args.device) - began,
    }


def main() -> None:
    """Measure the chosen models one after the other, each within its share of the time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all models together")
    parser.add_argument("--small", action="store_true", help="little models, to try the script")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda, but torch finds no CUDA device; use --device cpu --small")
    for name in args.models:
        result = measure(name, seconds=args.seconds / len(args.models), args=args)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
