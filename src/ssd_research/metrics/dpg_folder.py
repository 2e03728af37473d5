"""The images of DPG-Bench in the three layouts it meets, each read whole or not at all.

- grids: `<item id>.png`, a 2x2 grid of four images in the order of reading (official: --pic-num 4);
  with one image per prompt the file is that image (official: --pic-num 1)
- tiles: `<item id>/0000.png`, one image per file
- run: `00000/{metadata.jsonl, samples/0000.png}`, as `generate` writes it; the metadata has the id

The official script skips what is missing or misnamed and crops what is too large without a word.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from ssd_research.metrics.dpg import listed
from ssd_research.metrics.geneval_folder import read_line
from ssd_research.metrics.pixels import read_rgb

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
GRID = 4  # images in a 2x2 grid


@dataclass(frozen=True)
class Tile:
    """One image of one item: its file below the root, its quarter of a grid, its pixels' sha256.

    `quarter` is None where the whole file is the image. `prompt` is what the image was made from,
    where the folder says so.
    """

    item_id: str
    number: int
    path: str
    quarter: int | None
    size: tuple[int, int]
    sha256: str
    prompt: str | None = None

    def read(self, root: Path) -> UInt8[np.ndarray, "h w 3"]:
        """Return the pixels of the tile."""
        return _quarter(read_rgb(root / self.path, self.path), self.quarter)


def read_tiles(root: Path, *, tiles: int) -> list[Tile]:
    """Return the tiles of a folder, item by item, after decoding every file.

    `tiles` is how many images each prompt should have: 4 makes files at the root 2x2 grids.

    Raises:
        FileNotFoundError: if there is no such folder or it is empty.
        ValueError: if a file does not belong there, cannot be decoded, is no grid of squares, has
            another size than the others, or there are more images of an item than `tiles`.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}")
    files = list(_files(root, tiles))
    if not files:
        raise FileNotFoundError(f"{root} holds no images")
    found: list[Tile] = []
    for item_id, number, path, prompt in files:
        name = path.relative_to(root).as_posix()
        pixels = read_rgb(path, name)
        grid = number is None and tiles == GRID
        if grid:
            _refuse_no_grid(pixels, name)
        for quarter in range(GRID) if grid else (None,):
            tile = _quarter(pixels, quarter)
            place = number or quarter or 0
            size = tile.shape[1], tile.shape[0]
            found.append(Tile(item_id, place, name, quarter, size, pixel_digest(tile), prompt))
    found.sort(key=lambda t: (t.item_id, t.number))
    _refuse_odd_sizes(found)
    _refuse_repeats(found, tiles)
    return found


def complete_items(
    found: Sequence[Tile], known: Mapping[str, str], *, tiles: int, allow_missing: bool
) -> list[Tile]:
    """Return the tiles of those items that have all `tiles` images.

    `known` is the prompt of every item of the benchmark.

    Raises:
        ValueError: if an image belongs to no item, or over a tenth was made from other prompts.
        FileNotFoundError: if images are missing and that is not allowed, naming the first.
    """
    unknown = sorted({t.item_id for t in found} - set(known))
    if unknown:
        raise ValueError(
            f"{len(unknown)} items among the images are not in the questions: {listed(unknown)}"
        )
    others = differing_prompts(found, known)
    if 10 * len(others) > len({t.item_id for t in found}):
        raise ValueError(
            f"{len(others)} items were made from other prompts than the questions ask about: "
            f"{listed(others)}"
        )
    have = Counter(t.item_id for t in found)
    short = [name for name in known if have[name] < tiles]
    if short and not allow_missing:
        missing = sum(tiles - have[name] for name in short)
        raise FileNotFoundError(
            f"{missing} of {tiles * len(known)} images are missing, of items {listed(short)}; "
            "evaluate.allow_missing=true scores the complete items and reports the coverage"
        )
    return [t for t in found if have[t.item_id] == tiles]


def differing_prompts(found: Sequence[Tile], known: Mapping[str, str]) -> list[str]:
    """Return the items whose images name another prompt than the benchmark's."""
    made = {t.item_id: t.prompt for t in found if t.prompt is not None}
    return [name for name, prompt in made.items() if _plain(prompt) != _plain(known[name])]


def write_images(
    root: Path, found: Sequence[Tile], folder: Path, *, layout: str, tiles: int
) -> int:
    """Write tiles as `grids` (one file per item) or `tiles`, and return the side R of an image.

    Raises:
        ValueError: for another layout, images that are no squares, or other images in `folder`.
    """
    if folder.is_file():
        raise ValueError(f"eval.folder={folder} is a file")
    if layout not in ("grids", "tiles"):
        raise ValueError(f"eval.layout={layout} is not known; accepted: grids, tiles")
    if layout == "grids" and tiles not in (1, GRID):
        raise ValueError(f"eval.tiles={tiles} images make no 2x2 grid; use 4 or 1, or layout=tiles")
    width, height = found[0].size
    if width != height:
        raise ValueError(f"images of {width}x{height} pixels cannot be cropped by the official R")
    targets = dict(_targets(found, layout))
    _refuse_strangers(root, folder, targets)
    for name, group in targets.items():
        picture = _assemble([tile.read(root) for tile in group])
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        Image.fromarray(picture).save(temporary, format="PNG")
        temporary.replace(path)
    return width


def _targets(found: Sequence[Tile], layout: str) -> Iterator[tuple[str, list[Tile]]]:
    """Yield the files to write and the tiles of each; ValueError for ids that name no file."""
    # The official script takes what is before the first full stop for the id.
    strange = [t.item_id for t in found if not t.item_id or set(t.item_id) & set("./\\")]
    if strange:
        raise ValueError(f"item {strange[0]!r} cannot name a file of the official script")
    if layout == "tiles":
        yield from ((f"{t.item_id}/{t.number:04d}.png", [t]) for t in found)
        return
    groups: dict[str, list[Tile]] = {}
    for tile in found:
        groups.setdefault(tile.item_id, []).append(tile)
    yield from ((f"{item_id}.png", group) for item_id, group in groups.items())


def _refuse_strangers(root: Path, folder: Path, targets: Mapping[str, Sequence[Tile]]) -> None:
    """Raise ValueError if the folder holds images that are not those of this export."""
    there = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    strangers = []
    for path in there:
        name = path.relative_to(folder).as_posix()
        ours = [tile.read(root) for tile in targets.get(name, ())]
        if not ours or not np.array_equal(read_rgb(path, str(path)), _assemble(ours)):
            strangers.append(name)
    if strangers:
        raise ValueError(
            f"{folder} holds other images already: {listed(strangers)}; choose another eval.folder"
        )


def _assemble(tiles: Sequence[UInt8[np.ndarray, "s s 3"]]) -> UInt8[np.ndarray, "h w 3"]:
    """Return one image, or four as a 2x2 grid in the order of reading."""
    if len(tiles) == 1:
        return tiles[0]
    top, bottom = np.concatenate(tiles[:2], 1), np.concatenate(tiles[2:], 1)
    return np.concatenate([top, bottom], 0)


def _files(root: Path, tiles: int) -> Iterator[tuple[str, int | None, Path, str | None]]:
    """Yield (item id, number or None, file, prompt or None) of every image, by layout."""
    for path in sorted(p for p in root.iterdir() if not p.name.startswith(".")):
        if (path / "metadata.jsonl").is_file() or (path / "samples").is_dir():
            metadata = _metadata(path / "metadata.jsonl")
            item_id = str(metadata.get("item_id", metadata.get("prompt_id")))
            for number, image in _numbered(path / "samples", root):
                yield item_id, number, image, metadata.get("prompt")
        elif path.is_dir():
            yield from ((path.name, number, image, None) for number, image in _numbered(path, root))
        elif path.suffix.lower() in SUFFIXES and tiles in (1, GRID):
            yield path.stem, None, path, None
        elif not (path.name.startswith("dpg-bench") and path.suffix == ".txt"):  # official results
            raise ValueError(f"{path.relative_to(root)} does not belong here: {_expected(tiles)}")


def _expected(tiles: int) -> str:
    """Say which files at the root of a folder are understood."""
    if tiles in (1, GRID):
        return "expected <item id>.png or folders"
    return f"with eval.tiles={tiles} every item needs a folder of its own"


def _numbered(folder: Path, root: Path) -> Iterator[tuple[int, Path]]:
    """Yield the images of a folder by their numbers, none if there is no such folder."""
    found = folder.iterdir() if folder.is_dir() else ()
    paths = sorted(p for p in found if not p.name.startswith("."))
    for path in paths:
        if not (path.stem.isdecimal() and path.suffix.lower() in SUFFIXES):
            raise ValueError(f"{path.relative_to(root)} does not belong here: expected 0000.png")
    yield from ((int(path.stem), path) for path in sorted(paths, key=lambda p: int(p.stem)))


def _metadata(path: Path) -> dict[str, Any]:
    metadata = read_line(path)
    if metadata.get("item_id", metadata.get("prompt_id")) is None:
        raise ValueError(f"{path} names no item: without item_id or prompt_id")
    if not isinstance(metadata.get("prompt"), str | None):
        raise ValueError(f"{path}: its prompt is no text")
    return metadata


def _quarter(pixels: UInt8[np.ndarray, "h w 3"], quarter: int | None) -> UInt8[np.ndarray, "r s 3"]:
    """Return the whole picture, or a quarter of it in the order of reading."""
    if quarter is None:
        return pixels
    side = len(pixels) // 2
    row, column = divmod(quarter, 2)
    return pixels[row * side : (row + 1) * side, column * side : (column + 1) * side]


def pixel_digest(pixels: UInt8[np.ndarray, "h w 3"]) -> str:
    """Return the sha256 of a picture's size and pixels, whatever file it lay in."""
    shape = f"{pixels.shape[1]}x{pixels.shape[0]} ".encode()
    return hashlib.sha256(shape + np.ascontiguousarray(pixels).tobytes()).hexdigest()


def _refuse_no_grid(pixels: UInt8[np.ndarray, "h w 3"], name: str) -> None:
    height, width = pixels.shape[:2]
    if height != width or width % 2:
        raise ValueError(
            f"{name} is {width}x{height} pixels, no 2x2 grid of square images (2R x 2R); "
            "with one image per prompt pass eval.tiles=1"
        )


def _refuse_odd_sizes(found: Sequence[Tile]) -> None:
    (usual, _), *others = Counter(t.size for t in found).most_common()
    if others:
        odd = [t for t in found if t.size != usual]
        width, height = odd[0].size
        raise ValueError(
            f"{len(odd)} of {len(found)} images are not {usual[0]}x{usual[1]} pixels: "
            f"{odd[0].path} is {width}x{height}"
        )


def _refuse_repeats(found: Sequence[Tile], tiles: int) -> None:
    """Raise ValueError if two images have one place, or a place is beyond `tiles`."""
    places = Counter((t.item_id, t.number) for t in found)
    for (item_id, number), count in places.items():
        if count > 1:
            raise ValueError(f"item {item_id} has {count} images number {number}")
        if number >= tiles:
            raise ValueError(
                f"item {item_id} has an image number {number}, beyond eval.tiles={tiles} per prompt"
            )


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
