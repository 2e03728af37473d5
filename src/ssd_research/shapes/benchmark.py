"""The shapes world's benchmark files, in the official GenEval and DPG-Bench formats, and a judge.

Both are pure functions of their arguments. Six shapes give the short kinds few captions, so the
prompts of a kind are, in this order, the captions with "a photo of", those without it, and (only
single_object and counting) both again with a size word, which GenEval's rules do not check:
`single_object` has 36 captions and `counting` 72; beyond that they repeat.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import numpy as np

from ssd_research.shapes.captions import NUMBERS, caption
from ssd_research.shapes.parser import CLEAR_SCORE, Detection
from ssd_research.shapes.scenes import COLOURS, RELATIONS, SHAPES, SIZES, Item, Spec, sample_spec

VERSION = "1"
GENEVAL_KINDS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
DPG_COLUMNS = (
    "item_id",
    "text",
    "keywords",
    "proposition_id",
    "dependency",
    "category_broad",
    "category_detailed",
    "tuple",
    "question_natural_language",
)
LARGE = (SIZES["small"][1] + SIZES["large"][0]) / 2  # share of the canvas, halfway between both


def geneval_metadata(*, per_kind: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """Return the lines of `evaluation_metadata.jsonl`: `per_kind` prompts of each of the six kinds.

    Raises:
        ValueError: if `per_kind` is not positive.
    """
    if per_kind < 1:
        raise ValueError(f"eval.per_kind={per_kind} must be at least 1")
    return [
        metadata(spec, prefix=prefix)
        for kind in GENEVAL_KINDS
        for spec, prefix in _draw(kind, per_kind, seed)
    ]


def geneval_specs(*, per_kind: int = 60, seed: int = 0) -> list[Spec]:
    """Return what the prompts of `geneval_metadata` ask for, in the same order."""
    return [spec for kind in GENEVAL_KINDS for spec, _ in _draw(kind, per_kind, seed)]


def metadata(spec: Spec, *, prefix: bool = True) -> dict[str, Any]:
    """Return the official metadata of a spec of one of the six GenEval kinds.

    For a relation, include[0] is what the subject is placed by and include[1] the subject, whose
    `position` is [relation, 0].
    """
    include = [_requirement(item) for item in spec.items]
    line: dict[str, Any] = {"tag": spec.kind, "include": include}
    if spec.kind == "counting":
        item = spec.items[0]
        line["exclude"] = [{"class": item.shape, "count": item.count + 1}]
    if spec.relations:
        subject, relation, target = spec.relations[0]
        placed = {**include[subject], "position": [relation, 0]}
        line["include"] = [include[target], placed]
    return {**line, "prompt": caption(spec, prefix=prefix)}


def _requirement(item: Item) -> dict[str, Any]:
    colour = {"color": item.colour} if item.colour else {}
    return {"class": item.shape, "count": item.count, **colour}


def _draw(kind: str, count: int, seed: int) -> Iterator[tuple[Spec, bool]]:
    """Yield `count` (spec, prefix) of a kind: every caption once, in a seeded order, then again."""
    rng = np.random.default_rng([seed, GENEVAL_KINDS.index(kind)])
    pool: list[tuple[Spec, bool]] = []
    for specs in _specs(kind):
        for prefix in (True, False):
            pool += [(specs[i], prefix) for i in rng.permutation(len(specs))]
    yield from (pool[i % len(pool)] for i in range(count))


def _specs(kind: str) -> list[list[Spec]]:
    """Return every spec of a kind, first without size words, then those with them."""
    pairs = list(permutations(SHAPES, 2))
    if kind in ("single_object", "counting"):
        counts = [1] if kind == "single_object" else list(NUMBERS)
        plain = [Spec(kind, (Item(s, count=n),)) for s, n in product(SHAPES, counts)]
        # Four large objects do not fit on the canvas.
        sizes = list(SIZES) if kind == "single_object" else ["small"]
        items = [(replace(s.items[0], size=size),) for size, s in product(sizes, plain)]
        return [plain, [Spec(kind, item) for item in items]]
    if kind == "two_object":
        return [[Spec(kind, (Item(a), Item(b))) for a, b in pairs]]
    if kind == "colors":
        return [[Spec(kind, (Item(s, c),)) for s, c in product(SHAPES, COLOURS)]]
    if kind == "position":
        placed = product(pairs, RELATIONS)
        return [[Spec(kind, (Item(a), Item(b)), ((0, r, 1),)) for (a, b), r in placed]]
    coloured = product(pairs, permutations(COLOURS, 2))
    return [[Spec(kind, (Item(a, c), Item(b, d))) for (a, b), (c, d) in coloured]]


def dpg_rows(*, prompts: int = 60, seed: int = 0) -> list[dict[str, str]]:
    """Return the rows of DPG's CSV, one per question, for `prompts` distinct dense captions."""
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    draws = np.random.default_rng([seed, len(GENEVAL_KINDS)])
    while len(seen) < prompts:
        spec = sample_spec("dense", draws)
        text = caption(spec)
        if text not in seen:
            rows += questions(spec, item_id=f"shapes{len(seen):04d}")
            seen.add(text)
    return rows


def questions(spec: Spec, *, item_id: str) -> list[dict[str, str]]:
    """Return one row per fact of a dense spec, in DPG's nine columns.

    The tuple states the fact and `answer` reads it: an attribute depends on its entity, a relation
    on both of its entities, the count and the background on nothing.
    """
    facts: list[tuple[str, str, str, tuple[int, ...]]] = []
    entity = []
    for item in spec.items:
        one = f"a {item.shape}"
        facts.append(("entity - whole", item.shape, f"Is there {one}?", ()))
        entity.append(len(facts))
        for name, value in (("color", item.colour), ("size", item.size)):
            if value:
                asked = f"Is the {item.shape} {value}?"
                facts.append(
                    (f"attribute - {name}", f"{item.shape}, {value}", asked, (entity[-1],))
                )
    for subject, relation, target in spec.relations:
        a, b = spec.items[subject].shape, spec.items[target].shape
        asked = f"Is the {a} {relation} the {b}?"
        both = (entity[subject], entity[target])
        facts.append(("relation - spatial", f"{a}, {b}, {relation}", asked, both))
    n = len(spec.objects)
    facts.append(("other - count", f"objects, =={n}", f"Are there exactly {n} objects?", ()))
    facts.append(("global", "plain background", "Is the background plain?", ()))
    return [_row(item_id, spec, index, *fact) for index, fact in enumerate(facts, 1)]


def _row(
    item_id: str, spec: Spec, index: int, category: str, what: str, asked: str, parents: tuple
) -> dict[str, str]:
    broad, _, detailed = category.partition(" - ")
    dependency = ",".join(map(str, parents)) or "0"
    cells = (item_id, caption(spec), what, str(index), dependency, broad, detailed or broad)
    return dict(zip(DPG_COLUMNS, (*cells, f"{category} ({what})", asked), strict=True))


def answer(row: Mapping[str, str], detections: Sequence[Detection], *, canvas: int) -> bool:
    """Answer the question of one DPG row from the parser's detections on a `canvas`-pixel picture.

    Like a VQA judge it looks for any object that makes the statement true; only clear shapes
    (`CLEAR_SCORE`) are objects. The count is of everything that stands out, and the background is
    plain when nothing but clear shapes does.

    Raises:
        ValueError: if the row's tuple is not one that `questions` writes.
    """
    category, _, what = row["tuple"].rstrip(")").partition(" (")
    words = what.split(", ")
    clear = [d for d in detections if d.score >= CLEAR_SCORE]
    if category == "entity - whole":
        return any(d.shape == words[0] for d in clear)
    if category == "attribute - color":
        return any((d.shape, d.colour) == tuple(words) for d in clear)
    if category == "attribute - size":
        large = words[1] == "large"
        return any(d.shape == words[0] and (d.diameter > LARGE * canvas) == large for d in clear)
    if category == "relation - spatial":
        return _related(words, clear)
    if category == "other - count":
        return len(detections) == int(words[1].removeprefix("=="))
    if category == "global":
        return len(clear) == len(detections)
    raise ValueError(f"the shapes judge cannot read the tuple {row['tuple']!r}")


def _related(words: Sequence[str], detections: Sequence[Detection]) -> bool:
    """Say whether some first shape is `relation` some second shape, along the larger offset."""
    subject, target, relation = words
    axis = 0 if relation in ("left of", "right of") else 1
    sign = -1 if relation in ("left of", "above") else 1
    for a in (d for d in detections if d.shape == subject):
        for b in (d for d in detections if d.shape == target):
            offset = [(a.box[k] + a.box[k + 2] - b.box[k] - b.box[k + 2]) / 2 for k in (0, 1)]
            if sign * offset[axis] > abs(offset[1 - axis]):
                return True
    return False
