"""Folders of pictures for metrics that need no metadata: which there are, and of which prompt.

Three layouts: the images of a generate run, GenEval's prompt folders, and a flat folder in which a
file's stem is its prompt's id (COCO's `000000397133.jpg`). Nothing is skipped without a word.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
COLUMNS = ("prompt_id", "prompt", "image_index", "path")


@dataclass(frozen=True)
class Picture:
    """One picture: its file, the sha256 of that, and the prompt it was made for.

    `name` is the path below the folder; `prompt` is None where the folder does not say.
    """

    file: Path
    name: str
    sha256: str
    prompt_id: str
    image_index: int
    prompt: str | None = None

    def read(self) -> UInt8[np.ndarray, "h w 3"]:
        """Return the pixels; ValueError for a truncated or unreadable file."""
        try:
            with Image.open(self.file) as image:
                return np.array(image.convert("RGB"))
        except (OSError, SyntaxError, UnidentifiedImageError) as error:
            raise ValueError(f"{self.file} is not a readable image: {error}") from error


def read_pictures(root: Path) -> list[Picture]:
    """Return the pictures of a folder in order.

    Raises:
        FileNotFoundError: if there are none, or one that the run recorded is missing.
        ValueError: if a file in a flat folder is no picture.
    """
    table = root.parent / "images.parquet"
    if root.name == "images" and table.is_file():
        found = list(_of_run(root, table))
    elif any(root.glob("*/samples")):
        found = list(_of_prompt_folders(root))
    else:
        found = list(_of_flat_folder(root))
    if not found:
        raise FileNotFoundError(f"{root} holds no images")
    return found


def list_hash(pictures: Sequence[Picture]) -> str:
    """Return 16 hex digits of the names and contents of pictures, whatever their order."""
    lines = sorted(f"{picture.name} {picture.sha256}" for picture in pictures)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def export_by_image_id(pictures: Sequence[Picture], folder: Path) -> None:
    """Write pictures to `<image id, 12 digits>.png` in a flat folder, as clean-fid reads them.

    Raises ValueError where a prompt has several images or its id is no COCO image id.
    """
    for picture in pictures:
        if picture.image_index or not picture.prompt_id.isdigit():
            raise ValueError(
                f"eval.export: {picture.name} cannot be named by a COCO image id: prompts must be "
                "a COCO caption file, with one image each"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        target = folder / f"{int(picture.prompt_id):012d}.png"
        if picture.file.suffix.lower() == ".png":
            shutil.copyfile(picture.file, target)
        else:
            Image.fromarray(picture.read()).save(target)


def _of_run(root: Path, table: Path) -> Iterator[Picture]:
    """Yield the pictures that a generate run recorded, all of which must be there."""
    rows = pq.read_table(table, columns=list(COLUMNS)).to_pylist()
    missing = [row["path"] for row in rows if not (root / row["path"]).is_file()]
    if missing:
        listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise FileNotFoundError(
            f"{root}: {len(missing)} of {len(rows)} images are missing: {listed}"
        )
    for row in rows:
        yield _picture(
            root / row["path"], root, row["prompt_id"], row["image_index"], row["prompt"]
        )


def _of_prompt_folders(root: Path) -> Iterator[Picture]:
    """Yield the pictures of numbered prompt folders, named by their metadata or number."""
    for samples in sorted(root.glob("*/samples")):
        metadata = samples.parent / "metadata.jsonl"
        try:
            line = json.loads(metadata.read_text(encoding="utf-8")) if metadata.is_file() else {}
        except ValueError as error:
            raise ValueError(f"{metadata} is not one line of JSON: {error}") from error
        prompt_id = str(line.get("prompt_id", samples.parent.name))
        for file in sorted(samples.glob("*.png")):
            yield _picture(file, root, prompt_id, int(file.stem), line.get("prompt"))


def _of_flat_folder(root: Path) -> Iterator[Picture]:
    for file in sorted(root.iterdir()):
        if file.name.startswith("."):
            continue
        if file.suffix.lower() not in SUFFIXES:
            raise ValueError(f"{file} does not belong here: images end with {' '.join(SUFFIXES)}")
        yield _picture(file, root, file.stem, 0, None)


def _picture(
    file: Path, root: Path, prompt_id: str, image_index: int, prompt: str | None
) -> Picture:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    name = file.relative_to(root).as_posix()
    return Picture(file, name, digest, prompt_id, image_index, prompt)
