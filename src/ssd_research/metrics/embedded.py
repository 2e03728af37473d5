"""The quality of codes in the shapes world, judged at once: likelihood, GenEval, dense captions.

The stages `generate` and `evaluate` do the same on disk, for any judge; this is for measurements
that must stay in one process.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.metrics import geneval
from ssd_research.metrics.geneval import Rules
from ssd_research.metrics.judges.shapes import ShapesDetector
from ssd_research.metrics.likelihood import code_nll
from ssd_research.prompts import Prompt
from ssd_research.sampling import Sampling
from ssd_research.shapes import benchmark, parser


def dense_questions(prompts: int) -> dict[str, list[dict[str, str]]]:
    """Return the questions of `prompts` dense captions by item id, in DPG's columns."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in benchmark.dpg_rows(prompts=prompts):
        found.setdefault(row["item_id"], []).append(row)
    return found


def verdict(prompt: Prompt, image: UInt8[np.ndarray, "h w 3"], rules: Rules) -> bool:
    """Say whether an image shows what a GenEval prompt of the shapes world asks for."""
    found = ShapesDetector().detect(image)
    return geneval.judge(prompt.metadata or {}, found, rules=rules).correct


def answers(rows: Sequence[Mapping[str, str]], image: UInt8[np.ndarray, "h w 3"]) -> float:
    """Return the share of a dense caption's questions that the parser answers with yes."""
    found = parser.parse(image)
    right = [benchmark.answer(row, found, canvas=image.shape[0]) for row in rows]
    return statistics.fmean(right)


def score(
    backbone: Backbone,
    prompts: Sequence[Prompt],
    codes: Int[Tensor, "B N"],
    *,
    sampling: Sampling,
    rules: Rules,
    questions: Mapping[str, Sequence[Mapping[str, str]]],
    batch_size: int,
) -> dict[str, Any]:
    """Score one image per prompt: GenEval prompts carry a tag, dense ones have `questions`.

    Returns the mean NLL in nats per code under p with AR's law, GenEval's overall with its 95 %
    interval, and the share of questions about dense captions that are answered with yes.
    """
    texts = [prompt.text for prompt in prompts]
    nll = [
        row[row.isfinite()].mean().item()
        for start in range(0, len(texts), batch_size)
        for row in code_nll(
            backbone,
            texts[start : start + batch_size],
            codes[start : start + batch_size],
            sampling,
        )
    ]
    pairs = list(zip(prompts, backbone.decode_images(codes), strict=True))
    tagged = [(p, image) for p, image in pairs if p.id not in questions]
    dense = [answers(questions[p.id], image) for p, image in pairs if p.id in questions]
    summary = geneval.aggregate(
        [verdict(p, image, rules) for p, image in tagged],
        [(p.metadata or {})["tag"] for p, _ in tagged],
        [p.text for p, _ in tagged],
    )
    return {
        "nll": statistics.fmean(nll),
        "geneval": summary["overall"],
        "geneval_ci": summary["overall_ci95"],
        "accuracy": statistics.fmean(dense),
    }
