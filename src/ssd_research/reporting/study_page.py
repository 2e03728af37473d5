"""The page of a blind preference study: which pairs it shows, and the files it is made of.

Nothing in the page tells the methods apart: pictures are written anew under names made of their
pixels, and which of two comes first is drawn by the runs' ids. Only the key, kept elsewhere, knows.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ssd_research.reporting.cells import Cell
from ssd_research.reporting.page import environment

VERSION = "2"
ENLARGED_TO = 384  # CSS pixels up to which small pictures are shown enlarged
GROUP = 10  # pairs of which each method comes first in half
IDENTITY = {
    "prompts": "prompts",
    "seed": "seed",
    "images_per_prompt": "number of images per prompt",
}
Place = tuple[int, int]


@dataclass(frozen=True)
class Pair:
    """The pictures of methods a and b for one prompt and image index, in this order.

    `files` are the runs' own, `names` what they are called in the page.
    """

    id: str
    prompt_id: str
    prompt: str
    image_index: int
    files: tuple[Path, Path]
    names: tuple[str, str]
    size: tuple[int, int]


def require_comparable(a: Cell, b: Cell) -> None:
    """Raise ValueError unless two runs hold images of the same prompts and seed, all of them."""
    if a.folder == b.folder:
        raise ValueError(f"study.a and study.b are the same run, {a.folder}")
    for key, words in IDENTITY.items():
        if a.meta["identity"].get(key) != b.meta["identity"].get(key):
            raise ValueError(
                f"study.a and study.b differ in their {words}; generate both with the same"
            )
    if {_place(row) for row in a.images} != {_place(row) for row in b.images}:
        raise ValueError("study.a and study.b list different images; generate both again")


def choose_pairs(a: Cell, b: Cell, *, count: int | None, seed: int) -> tuple[list[Pair], int]:
    """Return `count` pairs (None: all) by a seeded hash, and how many were passed over.

    A pair of two equal pictures, which nobody could choose between, is passed over.

    Raises:
        ValueError: if fewer pairs differ, a file is no image, or two sizes differ.
        FileNotFoundError: if an image of either run is missing.
    """
    require_comparable(a, b)
    others = {_place(row): row for row in b.images}
    for cell in (a, b):
        for file in map(cell.image_file, cell.images):
            if not file.is_file():
                raise FileNotFoundError(f"{file} is missing; generate this run again")
    pairs: list[Pair] = []
    equal = 0
    for row in sorted(a.images, key=lambda row: digest("rank", seed, *_place(row))):
        if len(pairs) == count:
            break
        files = (a.image_file(row), b.image_file(others[_place(row)]))
        pair = _pair(row, files, seed)
        equal += pair.names[0] == pair.names[1]
        pairs += [pair] if pair.names[0] != pair.names[1] else []
    if len(pairs) < (count or 1):
        wanted = "at least one pair" if count is None else f"study.pairs={count}"
        raise ValueError(f"{wanted} is needed, but the runs have {len(pairs)} that differ")
    return pairs, equal


def _place(row: dict[str, Any]) -> Place:
    return row["prompt_index"], row["image_index"]


def _pair(row: dict[str, Any], files: tuple[Path, Path], seed: int) -> Pair:
    first, second = map(pixels, files)
    if first.shape != second.shape:
        raise ValueError(f"{files[0]} and {files[1]} differ in size, which would tell them apart")
    place = _place(row)
    return Pair(
        id=digest("pair", seed, *place)[:12],
        prompt_id=row["prompt_id"],
        prompt=row["prompt"],
        image_index=row["image_index"],
        files=files,
        names=(
            digest("image", seed, *place, content=first.tobytes())[:16],
            digest("image", seed, *place, content=second.tobytes())[:16],
        ),
        size=(first.shape[1], first.shape[0]),
    )


def pixels(file: Path) -> np.ndarray:
    """Return an image file as uint8 [height, width, 3]; ValueError if it is none."""
    try:
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError) as error:  # what Pillow raises for damaged files
        raise ValueError(f"{file} is no whole image; generate this run again") from error


def digest(*parts: object, content: bytes = b"") -> str:
    """Return the sha256 of parts and content as hex digits."""
    return hashlib.sha256("/".join(map(str, parts)).encode() + b"\n" + content).hexdigest()


def key(
    study: str, cells: Sequence[Cell], pairs: Sequence[Pair], *, equal: int, title: str, seed: int
) -> dict[str, Any]:
    """Return what tells the methods apart, for `key.json`: labels, runs, and pictures by method.

    `equal` is the number of pairs that were passed over.
    """
    return {
        "study": study,
        "version": VERSION,
        "title": title,
        "seed": seed,
        "model": " and ".join(dict.fromkeys(cell.config.model.name for cell in cells)),
        "equal_pairs_passed_over": equal,
        "methods": {
            side: {"label": label, "run": str(cell.folder)}
            for side, label, cell in zip("ab", labels(cells), cells, strict=True)
        },
        "pairs": {
            pair.id: {
                "prompt_id": pair.prompt_id,
                "prompt": pair.prompt,
                "image_index": pair.image_index,
                "a": pair.names[0],
                "b": pair.names[1],
            }
            for pair in pairs
        },
    }


def labels(cells: Sequence[Cell]) -> list[str]:
    """Return the titles of two runs, with their models or folders where these tell them apart."""
    found = [cell.title for cell in cells]
    models = [cell.config.model.name for cell in cells]
    if models[0] != models[1]:
        found = [f"{model} {title}" for model, title in zip(models, found, strict=True)]
    if found[0] == found[1]:
        found = [f"{title} ({cell.folder.name})" for title, cell in zip(found, cells, strict=True)]
    return found


def sides(pairs: Sequence[Pair], *, secret: str) -> dict[str, list[str]]:
    """Return, by pair in the order of their ids, its pictures in the order the page lists them.

    Of every `GROUP` pairs, a comes first in half. The page shows a group as it is or mirrored, so
    that each method stands left equally often for every evaluator. `secret` decides which half;
    it must not be in the page.
    """
    ordered, found = sorted(pairs, key=lambda pair: pair.id), {}
    for start in range(0, len(ordered), GROUP):
        group = ordered[start : start + GROUP]
        ranked = sorted(group, key=lambda pair: digest("first", secret, pair.id))
        a_first = {pair.id for pair in ranked[: len(group) // 2]}
        for pair in group:
            found[pair.id] = list(pair.names if pair.id in a_first else reversed(pair.names))
    return found


def to_html(study: str, pairs: Sequence[Pair], *, secret: str, title: str, seed: int) -> str:
    """Return `index.html`, which shows the pictures in `images/` beside it."""
    prompts = {pair.id: pair.prompt for pair in pairs}
    width, height = (max(side) for side in zip(*(pair.size for pair in pairs), strict=True))
    data = {
        "study": study,
        "seed": seed,
        "group": GROUP,
        "pairs": [
            {"pair": pair, "prompt": prompts[pair], "images": names}
            for pair, names in sides(pairs, secret=secret).items()
        ],
    }
    return (
        environment()
        .get_template("study.html.j2")
        .render(
            title=title,
            data=data,
            width=width,
            height=height,
            enlarged=max(1, ENLARGED_TO // width),
        )
    )


def write_page(page: Path, html: str, *, pairs: Sequence[Pair]) -> None:
    """Write the page's folder under a temporary name and rename it, so it is whole or absent.

    A page that is there is left alone: its study's id has settled what it holds.
    Pictures are written in the order of their names, so that not even their dates tell anything.
    """
    if page.is_dir():
        return
    temporary = page.with_name(f".{page.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "images").mkdir(parents=True)
    pictures = [one for pair in pairs for one in zip(pair.names, pair.files, strict=True)]
    for name, file in sorted(pictures):
        Image.fromarray(pixels(file)).save(temporary / "images" / f"{name}.png")
    (temporary / "index.html").write_text(html, encoding="utf-8")
    temporary.replace(page)
