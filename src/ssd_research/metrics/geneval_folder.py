"""The folder layout of GenEval's official scorer: `00000/{metadata.jsonl, samples/0000.png}`."""

import hashlib
import io
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ssd_research.metrics.pixels import decoding, refuse_deep


@dataclass(frozen=True)
class Sample:
    """One image of one prompt: `path` relative to the root, the sha256 of its file."""

    prompt_index: int
    image_index: int
    path: str
    sha256: str
    metadata: dict[str, Any]


def read_samples(root: Path) -> list[Sample]:
    """Return the samples of a folder, in order, after checking that each is fit to be scored.

    Every prompt folder must hold one line of GenEval metadata, and every image must be whole and of
    the same size. What is missing is for `geneval_coverage` to say: the official scorer skips it
    without a word.

    Raises:
        FileNotFoundError: if there is no image at all, or a metadata file is missing.
        ValueError: if there is an extra file, a broken image, one of another size, or metadata that
            is not GenEval's.
    """
    samples, sizes = [], {}
    for folder in numbered(root, root, suffix="", digits=5):
        metadata = _read_metadata(folder / "metadata.jsonl")
        for path in numbered(root, folder / "samples", suffix=".png", digits=4):
            content = path.read_bytes()
            name = str(path.relative_to(root))
            sizes[name] = _size(content, name)
            digest = hashlib.sha256(content).hexdigest()
            samples.append(Sample(int(folder.name), int(path.stem), name, digest, metadata))
    if not samples:
        raise FileNotFoundError(f"{root} holds no images (expected 00000/samples/0000.png, ...)")
    _refuse_odd_sizes(sizes)
    return samples


def numbered(root: Path, folder: Path, *, suffix: str, digits: int) -> list[Path]:
    """Return the numbered files of a folder by number, its folders if `suffix` is empty.

    Hidden ones are left out; ValueError for anything else, named relative to `root`.
    """
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    named: dict[int, Path] = {}
    for path in found:
        if path.name.startswith("."):
            continue
        number = path.name.removesuffix(suffix) if suffix else path.name
        named_so = path.name.endswith(suffix) and number.isascii() and number.isdecimal()
        if not named_so or len(number) < digits or path.is_dir() == bool(suffix):
            shape = "0" * digits + suffix
            raise ValueError(
                f"{path.relative_to(root)} does not belong here: expected {shape}, ..."
            )
        twin = named.setdefault(int(number), path)
        if twin != path:
            raise ValueError(
                f"{path.relative_to(root)} does not belong here: {twin.name} has the same number"
            )
    return [named[number] for number in sorted(named)]


def _read_metadata(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    metadata = read_line(path)
    absent = [key for key in ("tag", "include", "prompt") if key not in metadata]
    if absent:
        raise ValueError(f"{path} has no GenEval metadata: without {', '.join(absent)}")
    return metadata


def read_line(path: Path) -> dict[str, Any]:
    """Return the one JSON object of a prompt folder's `metadata.jsonl`; ValueError if it is not."""
    try:
        line = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not one line of JSON: {error}") from error
    if not isinstance(line, dict):
        raise ValueError(f"{path} is not one line of JSON with keys: {line!r}")
    return line


def _size(content: bytes, name: str) -> tuple[int, int]:
    """Return (width, height) of a PNG whose every chunk is there and unharmed."""
    with decoding(name), Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        size, mode = image.size, image.mode
        image.verify()
    refuse_deep(mode, name)
    return size


def _refuse_odd_sizes(sizes: dict[str, tuple[int, int]]) -> None:
    (usual, _), *others = Counter(sizes.values()).most_common()
    if others:
        odd = [name for name, size in sizes.items() if size != usual]
        width, height = sizes[odd[0]]
        raise ValueError(
            f"{len(odd)} of {len(sizes)} images are not {usual[0]}x{usual[1]} pixels: "
            f"{odd[0]} is {width}x{height}"
        )
