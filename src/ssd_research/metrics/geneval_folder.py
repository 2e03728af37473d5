"""The folder layout of GenEval's official scorer: `00000/{metadata.jsonl, samples/0000.png}`."""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError


@dataclass(frozen=True)
class Sample:
    """One image of one prompt: `path` relative to the root, the sha256 of its file."""

    prompt_index: int
    image_index: int
    path: str
    sha256: str
    metadata: dict[str, Any]


def read_samples(root: Path) -> list[Sample]:
    """Return the samples of a folder, in order, after checking that it is whole.

    Whole means: prompt folders numbered from 0 without a gap, the same number of images in each,
    numbered likewise, one line of metadata each, and every image of the same size. The official
    scorer skips what is missing without a word.

    Raises:
        FileNotFoundError: if a prompt, image or metadata file is missing.
        ValueError: if there is an extra file, an unreadable image, one of another size, or metadata
            that is not GenEval's.
    """
    folders = _numbered(root, root, suffix="", digits=5)
    images = [_numbered(root, f / "samples", suffix=".png", digits=4) for f in folders]
    most = max(map(len, images))
    _refuse_gaps(root, folders, images, most)
    samples, sizes = [], {}
    for p, (folder, paths) in enumerate(zip(folders, images, strict=True)):
        metadata = _read_metadata(folder / "metadata.jsonl")
        for k, path in enumerate(paths):
            content = path.read_bytes()
            name = str(path.relative_to(root))
            sizes[name] = _size(content, name)
            samples.append(Sample(p, k, name, hashlib.sha256(content).hexdigest(), metadata))
    _refuse_odd_sizes(sizes)
    return samples


def _numbered(root: Path, folder: Path, *, suffix: str, digits: int) -> list[Path]:
    """Return the numbered entries of a folder by number, hidden ones left out."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    found = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    for path in found:
        number = path.name.removesuffix(suffix) if suffix else path.name
        if not (path.name.endswith(suffix) and number.isdigit() and len(number) >= digits):
            shape = "0" * digits + suffix
            raise ValueError(
                f"{path.relative_to(root)} does not belong here: expected {shape}, ..."
            )
    if not found:
        raise FileNotFoundError(f"{folder} is empty")
    return sorted(found, key=lambda p: int(p.name.removesuffix(suffix) if suffix else p.name))


def _refuse_gaps(
    root: Path, folders: Sequence[Path], images: Sequence[Sequence[Path]], most: int
) -> None:
    """Raise FileNotFoundError naming the first missing paths, if any prompt or image is missing."""
    last = int(folders[-1].name)
    have = {
        int(f.name): {int(p.stem) for p in paths} for f, paths in zip(folders, images, strict=True)
    }
    most = max(most, 1 + max(max(numbers) for numbers in have.values()))
    missing = [
        f"{p:05d}/samples/{k:04d}.png"
        for p in range(last + 1)
        for k in range(most)
        if k not in have.get(p, set())
    ]
    if missing:
        listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        expected = (last + 1) * most
        raise FileNotFoundError(
            f"{root}: {len(missing)} of {expected} images are missing: {listed}"
        )


def _read_metadata(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        metadata = dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is not one line of JSON: {error}") from error
    absent = [key for key in ("tag", "include", "prompt") if key not in metadata]
    if absent:
        raise ValueError(f"{path} has no GenEval metadata: without {', '.join(absent)}")
    return metadata


def _size(content: bytes, name: str) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(content)) as image:
            return image.size
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} is not a readable image") from error


def _refuse_odd_sizes(sizes: dict[str, tuple[int, int]]) -> None:
    (usual, _), *others = Counter(sizes.values()).most_common()
    if others:
        odd = [name for name, size in sizes.items() if size != usual]
        width, height = sizes[odd[0]]
        raise ValueError(
            f"{len(odd)} of {len(sizes)} images are not {usual[0]}x{usual[1]} pixels: "
            f"{odd[0]} is {width}x{height}"
        )
