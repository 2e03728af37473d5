"""Captions of the shapes world in natural word order, and the closed list of their words."""

from ssd_research.shapes.scenes import COLOURS, RELATIONS, SHAPES, SIZES, Item, Spec

NUMBERS = {2: "two", 3: "three", 4: "four"}
PREFIX = "a photo of "


def plural(shape: str) -> str:
    """Return the plural of a shape's name."""
    return shape + ("es" if shape.endswith("s") else "s")


def phrase(item: Item) -> str:
    """Return the noun phrase of an item: `a large red circle`, `three rings`."""
    words = [w for w in (item.size, item.colour) if w]
    if item.count > 1:
        return " ".join([NUMBERS[item.count], *words, plural(item.shape)])
    words.append(item.shape)
    return ("an " if words[0][0] in "aeiou" else "a ") + " ".join(words)


def caption(spec: Spec, *, prefix: bool = True) -> str:
    """Return the caption of a spec, e.g. `a photo of a red circle above a blue square`."""
    items = [phrase(item) for item in spec.items]
    text = items[0]
    if spec.relations:
        _, relation, _ = spec.relations[0]
        text += f" {relation} {items[1]}"
        for subject, relation, target in spec.relations[1:]:
            text += f", with {items[subject]} {relation} the {spec.items[target].shape}"
    elif len(items) > 1:
        text = " and ".join(items)
    return (PREFIX if prefix else "") + text


def vocabulary() -> list[str]:
    """Return every word a caption can hold, sorted: the tiny tokenizer's word list."""
    words = {
        "a",
        "an",
        "the",
        "with",
        "and",
        "photo",
        "of",
        ",",
        *COLOURS,
        *SIZES,
        *NUMBERS.values(),
    }
    words.update(SHAPES, map(plural, SHAPES))
    words.update(w for r in RELATIONS for w in r.split())
    return sorted(words)
