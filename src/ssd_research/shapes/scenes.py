"""What a picture of the shapes world says (`Spec`) and shows (`Scene`).

A `Spec` holds only what the caption will say; everything it leaves open (colours, sizes, places) is
drawn when the scene is sampled. A scene is a pure function of (spec, random generator, canvas).
"""

import math
from dataclasses import dataclass, replace

import numpy as np

SHAPES = ("circle", "square", "triangle", "cross", "ring", "star")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 39, 40),
    "orange": (245, 140, 20),
    "yellow": (236, 212, 20),
    "green": (30, 150, 60),
    "blue": (35, 80, 215),
    "purple": (130, 50, 165),
    "pink": (245, 105, 180),
    "black": (25, 25, 25),
}
RELATIONS = ("left of", "right of", "above", "below")
KINDS = ("single_object", "two_object", "counting", "colors", "position", "color_attr", "dense")
SIZES: dict[str, tuple[float, float]] = {"small": (0.25, 0.29), "large": (0.37, 0.42)}
_ANY_SIZE = {1: (0.30, 0.54), 2: (0.27, 0.40), 3: (0.26, 0.33), 4: (0.25, 0.30)}


@dataclass(frozen=True)
class Item:
    """One phrase of a caption: `count` objects of a shape, perhaps with a colour and a size."""

    shape: str
    colour: str | None = None
    size: str | None = None
    count: int = 1


@dataclass(frozen=True)
class Spec:
    """What a caption says: items in the order of mention, (subject, relation, object) triples."""

    kind: str
    items: tuple[Item, ...]
    relations: tuple[tuple[int, str, int], ...] = ()

    @property
    def objects(self) -> tuple[Item, ...]:
        """Every object singly, in the order of mention."""
        return tuple(replace(item, count=1) for item in self.items for _ in range(item.count))


@dataclass(frozen=True)
class SceneObject:
    """A drawn object: centre and diameter in pixels (x right, y down), radians, RGB 0-255."""

    shape: str
    colour: str
    x: float
    y: float
    diameter: float
    angle: float
    rgb: tuple[int, int, int]


@dataclass(frozen=True)
class Scene:
    """Objects on a pastel background: `rgb + gradient . (x, y)` per channel, plus pixel noise."""

    canvas: int
    objects: tuple[SceneObject, ...]
    background: tuple[float, float, float]
    gradient: tuple[tuple[float, float], ...]
    noise: int
    noise_seed: int


def relation_holds(relation: str, a: SceneObject, b: SceneObject) -> bool:
    """Say whether `a` is clearly `relation` `b`: a gap along the axis, the larger offset."""
    dx, dy = a.x - b.x, a.y - b.y
    along, across = (dx, dy) if relation in ("left of", "right of") else (dy, dx)
    sign = -1 if relation in ("left of", "above") else 1
    return sign * along > 0.5 * (a.diameter + b.diameter) and abs(along) > 1.2 * abs(across)


def sample_spec(kind: str, rng: np.random.Generator, *, name_everything: bool = False) -> Spec:
    """Draw what a caption of `kind` says.

    `name_everything` gives every object a colour, the first stage of the curriculum; without it the
    six GenEval kinds name exactly what their official counterparts name.
    """
    shapes = [str(s) for s in rng.permutation(SHAPES)]
    colours = [str(c) for c in rng.permutation(list(COLOURS))]
    colour = [c if name_everything else None for c in colours]
    if kind == "single_object":
        return Spec(kind, (Item(shapes[0], colour[0], _size_or_none(rng, list(SIZES))),))
    if kind == "two_object":
        return Spec(kind, (Item(shapes[0], colour[0]), Item(shapes[1], colour[1])))
    if kind == "counting":
        size = _size_or_none(rng, ["small"])
        return Spec(kind, (Item(shapes[0], colour[0], size, count=int(rng.integers(2, 5))),))
    if kind == "colors":
        return Spec(kind, (Item(shapes[0], colours[0]),))
    if kind == "color_attr":
        return Spec(kind, (Item(shapes[0], colours[0]), Item(shapes[1], colours[1])))
    relation = RELATIONS[int(rng.integers(4))]
    if kind == "position":
        items = (Item(shapes[0], colour[0]), Item(shapes[1], colour[1]))
        return Spec(kind, items, ((0, relation, 1),))
    if kind == "dense":
        return _sample_dense(rng, shapes, colours, relation)
    raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")


def _size_or_none(rng: np.random.Generator, sizes: list[str], share: float = 0.3) -> str | None:
    return str(rng.choice(sizes)) if rng.random() < share else None


def _sample_dense(
    rng: np.random.Generator, shapes: list[str], colours: list[str], relation: str
) -> Spec:
    n = int(rng.integers(2, 4))
    sizes = [str(s) for s in rng.choice(list(SIZES), n)]
    if n == 3:
        # Three objects fit beside each other only if at most one of them is large.
        large = int(rng.integers(4))
        sizes = ["large" if k == large else "small" for k in range(3)]
    items = tuple(Item(shapes[k], colours[k], sizes[k]) for k in range(n))
    relations = [(0, relation, 1)]
    if n == 3:
        across = RELATIONS[2:] if relation in RELATIONS[:2] else RELATIONS[:2]
        relations.append((2, across[int(rng.integers(2))], 1))
    return Spec("dense", items, tuple(relations))


def sample_scene(
    spec: Spec, rng: np.random.Generator, *, canvas: int = 48, flat: bool = False
) -> Scene:
    """Draw a scene of which `spec` is true and complete: it shows nothing the caption leaves out.

    Objects that no relation places are laid out in reading order of their mention, as people
    describe a picture. `flat` leaves out the background's gradient and noise.
    """
    for _ in range(100):
        objects = _place(spec, _dress(spec, rng, canvas), rng, canvas)
        if objects is not None:
            break
    else:
        raise ValueError(f"no scene fits on {canvas} pixels for {spec}")
    tint = rng.uniform(-14, 14, 3)
    red, green, blue = (float(c) for c in rng.uniform(188, 238) + tint)
    slope = (
        np.zeros((3, 2))
        if flat
        else rng.uniform(-0.5, 0.5, (1, 2)) + rng.uniform(-0.1, 0.1, (3, 2))
    )
    gradient = tuple((float(a), float(b)) for a, b in slope * (48 / canvas))
    return Scene(
        canvas, objects, (red, green, blue), gradient, 0 if flat else 2, int(rng.integers(2**31))
    )


def _dress(spec: Spec, rng: np.random.Generator, canvas: int) -> list[SceneObject]:
    """Give every object the colour, size and tilt that the spec leaves open, still at (0, 0)."""
    free = [c for c in rng.permutation(list(COLOURS)) if c not in {i.colour for i in spec.items}]
    colours = [item.colour or str(free.pop()) for item in spec.items]
    dressed = []
    for item, colour in zip(spec.items, colours, strict=True):
        for _ in range(item.count):
            low, high = SIZES[item.size] if item.size else _ANY_SIZE[len(spec.objects)]
            rgb = np.clip(np.array(COLOURS[colour]) + rng.integers(-8, 9, 3), 0, 255)
            tilt = float(rng.uniform(-1, 1)) * math.radians(8)
            diameter = float(rng.uniform(low, high)) * canvas
            r, g, b = (int(v) for v in rgb)
            dressed.append(SceneObject(item.shape, colour, 0.0, 0.0, diameter, tilt, (r, g, b)))
    return dressed


def _place(
    spec: Spec, objects: list[SceneObject], rng: np.random.Generator, canvas: int, tries: int = 60
) -> tuple[SceneObject, ...] | None:
    """Find places without overlap that satisfy the relations; None if `tries` draws do not."""
    margin = 0.03 * canvas
    diameters = np.array([o.diameter for o in objects])
    half = diameters / 2
    # A square's corners and a triangle's reach beyond half the diameter by a fifth.
    need = (half[:, None] + half[None, :]) + 0.08 * canvas
    upper = np.triu(np.ones((len(objects), len(objects)), bool), 1)
    for _ in range(tries):
        xy = rng.uniform(0, 1, (len(objects), 2)) * (canvas - 2 * margin - diameters[:, None])
        xy += margin + half[:, None]
        gap = np.hypot(*(xy[:, None, :] - xy[None, :, :]).transpose(2, 0, 1))
        if bool((gap < need)[upper].any()):
            continue
        if not spec.relations:
            # Reading order in bands of a third of the canvas: top to bottom, then left to right.
            order = np.lexsort((xy[:, 0], (3 * xy[:, 1] / canvas).astype(int)))
            if bool((np.diff(order) < 0).any()) and len(spec.items) > 1:
                continue
        placed = tuple(
            replace(o, x=float(x), y=float(y)) for o, (x, y) in zip(objects, xy, strict=True)
        )
        if all(relation_holds(r, placed[a], placed[b]) for a, r, b in spec.relations):
            return placed
    return None
