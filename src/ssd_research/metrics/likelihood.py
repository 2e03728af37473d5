"""How likely the frozen backbone finds the images that a decoder made.

`NLL = -1/N sum_i log p(c_i | prompt, c_<i)` in nats per code, with p the guided, filtered target
distribution of AR sampling. A lossless decoder has AR's mean; below it a decoder seeks modes, above
it codes do not fit together. The distance |NLL - AR's| is what counts, so neither sign is better.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.sampling import Sampling

VERSION = 1
CHUNK = 512  # positions whose distributions are in memory at once


@torch.no_grad()
def code_nll(
    backbone: Backbone, prompts: Sequence[str], codes: Int[Tensor, "B N"], sampling: Sampling
) -> Float[Tensor, "B N"]:
    """Return -log p of every code, teacher-forced, in float64; inf where top-k or top-p exclude it.

    Two causal passes, conditional and unconditional (one at guidance 1). Raises ValueError for
    prompts the tokenizer cannot express.
    """
    codes = codes.to(backbone.device)
    flags = [False] if sampling.guidance == 1 else [False, True]
    rows = torch.ones(len(prompts), dtype=torch.bool)
    streams = [backbone.hidden_states(prompts, codes, unconditional=rows & flag) for flag in flags]
    h_pre = torch.cat(streams)  # [S, N, D], conditional rows first
    nll = []
    for h, c in zip(h_pre.split(CHUNK, 1), codes.split(CHUNK, 1), strict=True):
        p = sampling.distribution(backbone.logits(h, sampling.guidance).double())  # [B, L, K]
        nll.append(-p.gather(-1, c[..., None]).squeeze(-1).log())
    return torch.cat(nll, 1)


def mean_nll(
    backbone: Backbone, prompts: Sequence[str], codes: Int[Tensor, "B N"], sampling: Sampling
) -> Float[Tensor, " B"]:
    """Return the mean NLL of each image in nats per code under p."""
    return code_nll(backbone, prompts, codes, sampling).mean(-1)


def sampling_of(run: Path, backbone: Backbone) -> Sampling:
    """Return the law that a finished generate run sampled from.

    Raises ValueError if `run` is none, or was made with another backbone.
    """
    if not (run / "meta.json").is_file() or not (run / "images.parquet").is_file():
        raise ValueError(
            f"{run} is not a finished generate run, whose codes this evaluation reads: "
            "evaluate.images=<run folder>"
        )
    identity = json.loads((run / "meta.json").read_text(encoding="utf-8"))["identity"]
    if identity["backbone"] != backbone.fingerprint:
        raise ValueError(
            f"{run} was made with backbone {identity['backbone']}, but {backbone.name} is "
            f"{backbone.fingerprint}; evaluate it with the model= that generated it"
        )
    return Sampling(**identity["sampling"])


def score_images(
    backbone: Backbone, images: Path, *, sampling: Sampling, batch_size: int
) -> list[dict[str, Any]]:
    """Return one row per image of a generate run's `images.parquet`: its NLL and coverage.

    `nll` is over the codes that p can emit, `outside` the share of codes that it cannot (top-k,
    top-p). Raises ValueError where the codes do not fit the backbone's grid.
    """
    columns = ["prompt_id", "prompt", "image_index", "codes"]
    rows = pq.read_table(images, columns=columns).to_pylist()
    for row in rows:
        if len(row["codes"]) != backbone.grid.size:
            raise ValueError(
                f"{images}: an image has {len(row['codes'])} codes, but {backbone.name} has "
                f"{backbone.grid.size}; evaluate it with the model= that generated it"
            )
    scored = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        codes = torch.tensor([row["codes"] for row in batch])
        nll = code_nll(backbone, [row["prompt"] for row in batch], codes, sampling)
        scored += [_image_row(row, values) for row, values in zip(batch, nll.cpu(), strict=True)]
    return scored


def _image_row(row: dict[str, Any], nll: Float[Tensor, " N"]) -> dict[str, Any]:
    inside = nll[nll.isfinite()]
    return {
        "prompt_id": row["prompt_id"],
        "image_index": row["image_index"],
        "nll": inside.mean().item() if len(inside) else math.inf,
        "outside": 1 - len(inside) / len(nll),
    }


def aggregate(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean NLL over images with its standard error, and the share of codes outside p."""
    rows = list(rows)
    if not rows:
        raise ValueError("there is no image to score; generate some first")
    nll = [row["nll"] for row in rows]
    return {
        "benchmark": "likelihood",
        "version": VERSION,
        "unit": "nats per code",
        "higher_is_better": None,
        "n_scored": len(rows),
        "nll": statistics.fmean(nll),
        "nll_stderr": statistics.stdev(nll) / len(nll) ** 0.5 if len(nll) > 1 else None,
        "outside": statistics.fmean(row["outside"] for row in rows),
    }
