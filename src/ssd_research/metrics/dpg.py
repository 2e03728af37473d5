"""DPG-Bench's scores (Hu et al., 2024) from the answers to its questions, as recorded.

A question counts only if the answers to its parents do. Per tile (one of the images of a prompt)
the score is the share of questions that count as yes; a prompt's is the mean over its tiles, and
`average` (the "DPG-Bench score") the mean over prompts. Category scores pool questions. The
official script's categories and omissions differ; `PROTOCOLS` names every difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssd_research.metrics.dpg_questions import BROAD, Question, QuestionTable

VERSION = "2"
DEPENDENCIES = ("cascade", "single", "none")
Answers = Mapping[str, Sequence[Mapping[int, str]]]  # item id -> tile -> question number -> answer


@dataclass(frozen=True)
class Scoring:
    """How answers become scores.

    `dependencies`: `cascade` zeroes a question if the score of a parent is zero by then, in the
    file's order, so that it goes on to grandchildren (DPG-Bench); `single` if a parent was itself
    answered with no (DSG); `none` never. The other fields are peculiarities of the official script.
    """

    dependencies: str = "cascade"
    exact_yes: bool = False  # "Yes", "yes." and " yes" are not yes
    last_tile_categories: bool = False  # categories from the last tile only (ELLA issue #60)
    raw_categories: bool = False  # categories without dependencies
    official_rows: bool = False  # without the first row, and of a split item only its last rows
    drop_unknown_parents: bool = False  # an item is left out once an unknown parent is looked up

    def __post_init__(self) -> None:
        if self.dependencies not in DEPENDENCIES:
            accepted = ", ".join(DEPENDENCIES)
            raise ValueError(f"dependencies={self.dependencies} is not known; accepted: {accepted}")


PROTOCOLS = {
    "fixed": Scoring(),
    "official": Scoring(
        exact_yes=True,
        last_tile_categories=True,
        raw_categories=True,
        official_rows=True,
        drop_unknown_parents=True,
    ),
}


class UnreadableItemError(LookupError):
    """The official script fails on an item, says so on its output, and leaves the item out."""


@dataclass(frozen=True)
class PromptScore:
    """One prompt: the score of each tile, and per L2 category (questions counting as yes, all)."""

    tiles: tuple[float, ...]
    categories: Mapping[str, tuple[float, int]]

    @property
    def score(self) -> float:
        """The mean over tiles."""
        return sum(self.tiles) / len(self.tiles)


def reading(answer: str) -> bool | None:
    """Return True for yes, False for no (case, spaces and a full stop aside), None for others."""
    return {"yes": True, "no": False}.get(answer.strip().rstrip(".").casefold())


def respect_dependencies(
    questions: Sequence[Question],
    marks: Mapping[int, float],
    *,
    dependencies: str,
    strict: bool = False,
) -> dict[int, float]:
    """Return the marks (1 yes, 0 no) with those zeroed whose parents do not count.

    A parent below its child is judged by its raw mark, as officially, and an unknown one not at
    all. With `strict` that is UnreadableItemError, unless a parent before it does not count: the
    official script then looks no further.
    """
    kept = dict(marks)
    judged = kept if dependencies == "cascade" else marks
    for q in questions if dependencies != "none" else ():
        for parent in q.parents:
            if strict and parent not in judged:
                raise UnreadableItemError(f"item {q.item_id} has no question {parent}")
            if judged.get(parent, 1) == 0:
                kept[q.number] = 0.0
                break
    return kept


def score_prompts(
    table: QuestionTable, answers: Answers, scoring: Scoring
) -> tuple[dict[str, PromptScore], list[str]]:
    """Return the scores of the prompts in `answers`, and the items that `scoring` leaves out.

    Raises:
        ValueError: if an item is not in the table, has no tile, or a question has no answer.
    """
    unknown = sorted(set(answers) - set(table.items))
    if unknown:
        raise ValueError(f"{len(unknown)} answered items have no questions: {listed(unknown)}")
    items = (table.as_officially_read() if scoring.official_rows else table).items
    scores, dropped = {}, []
    for item_id in (name for name in table.items if name in answers):
        try:
            scores[item_id] = _prompt(item_id, items.get(item_id, ()), answers[item_id], scoring)
        except UnreadableItemError:
            dropped.append(item_id)
    return scores, dropped


def _prompt(
    item_id: str,
    questions: Sequence[Question],
    tiles: Sequence[Mapping[int, str]],
    scoring: Scoring,
) -> PromptScore:
    if not tiles:
        raise ValueError(f"item {item_id} has no tile")
    if not questions:
        raise UnreadableItemError(f"item {item_id} has no question")
    raw = [_marks(item_id, questions, tile, scoring) for tile in tiles]
    mode = scoring.dependencies
    strict = scoring.drop_unknown_parents
    kept = [
        respect_dependencies(questions, marks, dependencies=mode, strict=strict) for marks in raw
    ]
    pooled = raw if scoring.raw_categories else kept
    sums: dict[str, tuple[float, int]] = {}
    for marks in pooled[-1:] if scoring.last_tile_categories else pooled:
        for q in questions:
            points, count = sums.get(q.category, (0.0, 0))
            sums[q.category] = points + marks[q.number], count + 1
    return PromptScore(tuple(sum(marks.values()) / len(marks) for marks in kept), sums)


def _marks(
    item_id: str, questions: Sequence[Question], answers: Mapping[int, str], scoring: Scoring
) -> dict[int, float]:
    """Return 1 or 0 per question; what is neither yes nor no is 0."""
    absent = [q.number for q in questions if q.number not in answers]
    if absent:
        raise ValueError(f"item {item_id}: question {absent[0]} has no answer")
    if scoring.exact_yes:
        return {q.number: float(answers[q.number] == "yes") for q in questions}
    return {q.number: float(reading(answers[q.number]) is True) for q in questions}


def score(
    table: QuestionTable, answers: Answers, scoring: Scoring, *, samples: int = 2000, seed: int = 0
) -> dict[str, Any]:
    """Return DPG-Bench's scores in [0, 1] (the paper prints them times 100).

    Coverage is of the table's items: `missing` have no answers, `dropped` are what the protocol
    leaves out. The 95 % intervals are percentile bootstraps over prompts. Without any prompt the
    average is None.

    Raises:
        ValueError: as `score_prompts`.
    """
    prompts, dropped = score_prompts(table, answers, scoring)
    draws = _redraw(len(prompts), samples, seed)
    values = np.array([p.score for p in prompts.values()])
    return {
        "average": float(values.mean()) if prompts else None,
        "average_ci95": _percentiles(draws @ values / max(len(values), 1)) if prompts else None,
        "categories": _pool(prompts, draws, broad=True),
        "subcategories": _pool(prompts, draws, broad=False),
        "n_expected": len(table.items),
        "n_scored": len(prompts),
        "coverage": len(prompts) / len(table.items),
        "missing": [name for name in table.items if name not in answers],
        "dropped": dropped,
    }


def compare(
    table: QuestionTable,
    first: Answers,
    second: Answers,
    scoring: Scoring,
    *,
    samples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare two methods over the prompts that both have answers for.

    The differences are first minus second; their 95 % intervals redraw prompts, in pairs.

    Raises:
        ValueError: if they have no prompt in common.
    """
    sides = [score_prompts(table, answers, scoring)[0] for answers in (first, second)]
    common = [name for name in sides[0] if name in sides[1]]
    if not common:
        raise ValueError("the two methods have no prompt in common")
    ours, theirs = ({name: side[name] for name in common} for side in sides)
    gaps = np.array([ours[name].score - theirs[name].score for name in common])
    draws = _redraw(len(common), samples, seed)
    categories = _pool(ours, draws, broad=True), _pool(theirs, draws, broad=True)
    return {
        "n_common": len(common),
        "only_first": [name for name in sides[0] if name not in sides[1]],
        "only_second": [name for name in sides[1] if name not in sides[0]],
        "first": float(np.mean([p.score for p in ours.values()])),
        "second": float(np.mean([p.score for p in theirs.values()])),
        "difference": float(gaps.mean()),
        "difference_ci95": _percentiles(draws @ gaps / len(gaps)),
        "categories": {
            name: {"first": found["score"], "second": categories[1][name]["score"]}
            for name, found in categories[0].items()
        },
    }


def count_unparsable(table: QuestionTable, answers: Answers) -> dict[str, Any]:
    """Count the answers that are neither yes nor no; they score zero."""
    given = [
        tile[q.number] for item_id in answers for tile in answers[item_id]
        for q in table.items[item_id]
    ]  # fmt: skip
    odd = sum(reading(answer) is None for answer in given)
    return {"answers": len(given), "unparsable": odd, "share": odd / max(len(given), 1)}


def _pool(
    prompts: Mapping[str, PromptScore], draws: np.ndarray, *, broad: bool
) -> dict[str, dict[str, Any]]:
    """Return score, interval and number of questions of every L1 (`broad`) or L2 category."""
    totals: dict[str, np.ndarray] = {}
    for row, prompt in enumerate(prompts.values()):
        for category, sums in prompt.categories.items():
            name = category.partition("-")[0].strip() if broad else category
            totals.setdefault(name, np.zeros((len(prompts), 2)))[row] += sums
    order = [name for name in BROAD if name in totals] if broad else []
    found = {}
    for name in [*order, *sorted(set(totals) - set(order))]:
        points, count = totals[name].sum(0)
        redrawn = draws @ totals[name]
        valid = redrawn[redrawn[:, 1] > 0]
        found[name] = {
            "score": float(points / count),
            "ci95": _percentiles(valid[:, 0] / valid[:, 1]),
            "questions": int(count),
        }
    return found


def _redraw(count: int, samples: int, seed: int) -> np.ndarray:
    """Return how often each of `count` prompts is drawn in each of `samples` redraws."""
    rng = np.random.default_rng(seed)
    if not count:
        return np.zeros((samples, 0))
    return rng.multinomial(count, np.full(count, 1 / count), size=samples).astype(float)


def _percentiles(draws: np.ndarray) -> list[float] | None:
    """Return the 95 % interval of redrawn values, None without any."""
    return [float(v) for v in np.percentile(draws, [2.5, 97.5])] if len(draws) else None


def listed(names: Sequence[str]) -> str:
    """Return the first three names as words."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
