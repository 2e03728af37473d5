"""GenEval's official rules (Ghosh et al., 2023) on detections, and its scores.

The rules are those of `evaluate_images.py` and `summary_scores.py` in djghosh13/geneval; only the
detector and the colour classifier are left to a judge, which supplies label, score, box and colour.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool

VERSION = "1"
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RELATIONS = ("left of", "right of", "above", "below")
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Detection:
    """One detected object: box (x1, y1, x2, y2) in pixels, y down; colour None if not known.

    The mask serves a colour classifier; the rules never look at it and no file holds it.
    """

    label: str
    score: float
    box: Box
    colour: str | None = None
    mask: Bool[np.ndarray, "h w"] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Rules:
    """The official script's options: detections count when their score is above the threshold.

    Of two objects of a class whose boxes overlap by an IoU of `max_overlap` or more, the less
    confident one does not count; at 1, the official value, every object does.
    """

    threshold: float = 0.3
    counting_threshold: float = 0.9
    max_objects: int = 16
    position_threshold: float = 0.1
    max_overlap: float = 1.0

    def __post_init__(self) -> None:
        for name in ("threshold", "counting_threshold"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"eval.rules.{name}={value} must be in [0, 1)")
        if self.max_objects < 1:
            raise ValueError(f"eval.rules.max_objects={self.max_objects} must be at least 1")
        if not 0 <= self.position_threshold < math.inf:
            raise ValueError(
                f"eval.rules.position_threshold={self.position_threshold} must be at least 0"
            )
        if not 0 < self.max_overlap <= 1:
            raise ValueError(f"eval.rules.max_overlap={self.max_overlap} must be in (0, 1]")


@dataclass(frozen=True)
class Verdict:
    """Whether one image shows what its prompt says, and if not, why (one reason a line)."""

    correct: bool
    reason: str


def judge(
    metadata: Mapping[str, Any], detections: Sequence[Detection], *, rules: Rules | None = None
) -> Verdict:
    """Return the verdict on one image from its official metadata and its detections.

    Raises:
        ValueError: if the metadata is not GenEval's.
    """
    if "tag" not in metadata or "include" not in metadata:
        raise ValueError("the prompt has no GenEval metadata (keys tag and include)")
    rules = rules or Rules()
    objects = counted(metadata, detections, rules=rules)
    reasons: list[str] = []
    groups: list[list[Detection] | None] = []
    for need in metadata["include"]:
        found = objects.get(need["class"], [])[: need["count"]]
        failure = _shortfall(need, found) or _misplaced(need, found, groups, rules)
        groups.append(None if failure else found)
        reasons += [failure] if failure else []
    for ban in metadata.get("exclude", []):
        count = len(objects.get(ban["class"], []))
        if count >= ban["count"]:
            reasons.append(f"expected {ban['class']}<{ban['count']}, found {count}")
    return Verdict(not reasons, "\n".join(reasons))


def counted(
    metadata: Mapping[str, Any], detections: Sequence[Detection], *, rules: Rules | None = None
) -> dict[str, list[Detection]]:
    """Return the detections that count for an image by label, most confident first."""
    rules = rules or Rules()
    counting = metadata["tag"] == "counting"
    return _by_label(detections, rules.counting_threshold if counting else rules.threshold, rules)


def asked_for_colour(
    metadata: Mapping[str, Any], detections: Sequence[Detection], *, rules: Rules | None = None
) -> list[Detection]:
    """Return the detections whose colour the rules can ask for, whatever their thresholds.

    These are the `count` most confident of each class that must have a colour.
    """
    needs = [need for need in metadata["include"] if need.get("color") is not None]
    objects = _by_label(detections, 0.0, rules or Rules()) if needs else {}
    return [d for need in needs for d in objects.get(need["class"], [])[: need["count"]]]


def _by_label(
    detections: Sequence[Detection], threshold: float, rules: Rules
) -> dict[str, list[Detection]]:
    """Group the detections above a threshold by label, most confident first."""
    objects: dict[str, list[Detection]] = {}
    for d in sorted(detections, key=lambda d: -d.score):
        group = objects.setdefault(d.label, [])
        if d.score > threshold and len(group) < rules.max_objects:
            group.append(d)
    return {label: _distinct(group, rules.max_overlap) for label, group in objects.items() if group}


def _distinct(group: Sequence[Detection], max_overlap: float) -> list[Detection]:
    """Return the objects that overlap too little with every more confident one that is kept."""
    kept: list[Detection] = []
    for d in group:
        if max_overlap == 1 or all(overlap(d.box, other.box) < max_overlap for other in kept):
            kept.append(d)
    return kept


def overlap(a: Box, b: Box) -> float:
    """Return the IoU of two boxes as the official script measures it, edge pixels included."""
    common = _area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    union = _area(a) + _area(b) - common
    return common / union if union else 0.0


def _area(box: Box) -> float:
    return max(box[2] - box[0] + 1, 0) * max(box[3] - box[1] + 1, 0)


def _shortfall(need: Mapping[str, Any], found: Sequence[Detection]) -> str | None:
    """Return what is missing of the required number or colour, or None."""
    name, count, colour = need["class"], need["count"], need.get("color")
    if len(found) < count:
        return f"expected {name}>={count}, found {len(found)}"
    if colour is None:
        return None
    seen = Counter(str(d.colour) for d in found)
    if seen[colour] >= count:
        return None
    listing = ", ".join(f"{n} {c}" for c, n in seen.items())
    return f"expected {colour} {name}>={count}, found {seen[colour]} {colour}; and {listing}"


def _misplaced(
    need: Mapping[str, Any],
    found: Sequence[Detection],
    groups: Sequence[list[Detection] | None],
    rules: Rules,
) -> str | None:
    """Return which required relation fails, or None: every subject-target pair must satisfy it."""
    if "position" not in need:
        return None
    relation, index = need["position"]
    targets = groups[index]
    if targets is None:
        return f"no target for {need['class']} to be {relation}"
    for subject in found:
        for target in targets:
            holds = relations(subject.box, target.box, threshold=rules.position_threshold)
            if relation not in holds:
                seen = " and ".join(sorted(holds))
                return f"expected {need['class']} {relation} target, found {seen} target"
    return None


def relations(a: Box, b: Box, *, threshold: float = 0.1) -> frozenset[str]:
    """Return where box `a` lies relative to box `b`; two relations can hold at once.

    With o the offset of the centres, each axis is shrunk to r = sign(o) max(|o| - threshold (size_a
    + size_b), 0); with d = r / ||o||, d_x < -0.5 is left of, d_y < -0.5 above, and so on.
    """
    boxes = np.array([a, b], float).reshape(2, 2, 2)
    centre, size = boxes.mean(1), np.abs(boxes[:, 1] - boxes[:, 0])
    offset = centre[0] - centre[1]
    shrunk = np.maximum(np.abs(offset) - threshold * size.sum(0), 0) * np.sign(offset)
    if bool((np.abs(shrunk) < 1e-3).all()):
        return frozenset()
    dx, dy = shrunk / np.linalg.norm(offset)
    holds = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return frozenset(name for name, true in holds.items() if true)


def aggregate(
    correct: Sequence[bool],
    tags: Sequence[str],
    prompts: Sequence[str],
    *,
    samples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the scores of images with verdicts `correct`, task `tags` and prompt identities.

    A task's score is the mean over its images, `overall` the unweighted mean of the six tasks, null
    if a task has no image. The 95 % interval is a percentile bootstrap that redraws whole prompts
    within each task, as a prompt's images stand or fall together.

    Raises:
        ValueError: if there is no image or a tag is none of the six tasks.
    """
    unknown = sorted(set(tags) - set(TASKS))
    if unknown or not tags:
        raise ValueError(f"GenEval tags must be among {', '.join(TASKS)}; got {unknown or 'none'}")
    sums = {task: _prompt_sums(task, correct, tags, prompts) for task in TASKS}
    present = [task for task in TASKS if len(sums[task])]
    score = {task: float(sums[task][:, 0].sum() / sums[task][:, 1].sum()) for task in present}
    rng = np.random.default_rng(seed)
    draws = {task: _bootstrap(sums[task], samples, rng) for task in present}
    overall = interval = None
    if len(present) == len(TASKS):
        overall = sum(score.values()) / len(TASKS)
        interval = _percentiles(np.mean([draws[task] for task in present], 0))
    solved = np.concatenate([sums[task][:, 0] > 0 for task in present])
    return {
        "overall": overall,
        "overall_ci95": interval,
        "tasks": {
            task: {
                "score": score[task],
                "ci95": _percentiles(draws[task]),
                "images": int(sums[task][:, 1].sum()),
                "prompts": len(sums[task]),
            }
            for task in present
        },
        "missing_tasks": [task for task in TASKS if task not in present],
        "images_correct": float(np.mean(correct)),
        "prompts_correct": float(solved.mean()),
    }


def _prompt_sums(
    task: str, correct: Sequence[bool], tags: Sequence[str], prompts: Sequence[str]
) -> np.ndarray:
    """Return (correct images, images) of every prompt of a task, in order of first appearance."""
    totals: dict[str, list[int]] = {}
    for good, tag, prompt in zip(correct, tags, prompts, strict=True):
        if tag == task:
            total = totals.setdefault(prompt, [0, 0])
            total[0] += bool(good)
            total[1] += 1
    return np.array(list(totals.values()), int).reshape(-1, 2)


def _bootstrap(sums: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
    """Return the task's score in `samples` redraws of its prompts."""
    drawn = sums[rng.integers(0, len(sums), (samples, len(sums)))].sum(1)
    return drawn[:, 0] / drawn[:, 1]


def _percentiles(draws: np.ndarray) -> list[float]:
    return [float(v) for v in np.percentile(draws, [2.5, 97.5])]
