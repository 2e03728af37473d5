"""Folders of pictures for metrics that need no metadata: which there are, and of which prompt.

Three layouts: the images of a generate run, GenEval's prompt folders, and a flat folder in which a
file's stem is its prompt's id (COCO's `000000397133.jpg`). Nothing is skipped without a word.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import UInt8
from PIL import Image

from ssd_research.metrics.geneval_folder import numbered, read_line
from ssd_research.metrics.pixels import decoding, read_rgb

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
        return read_rgb(self.file, str(self.file))

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, as the file's head says; ValueError for no image."""
        with decoding(str(self.file)), Image.open(self.file) as image:
            return image.size


def read_pictures(root: Path) -> list[Picture]:
    """Return the pictures of a folder in order, at least two.

    Raises:
        FileNotFoundError: if there are fewer, or one that the run recorded is missing.
        ValueError: if a file does not belong there, or two are the same image of a prompt.
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
    if len(found) == 1:
        raise FileNotFoundError(f"{root} holds 1 image; a covariance needs at least 2")
    _refuse_twins(found)
    return found


def refuse_odd_sizes(pictures: Sequence[Picture]) -> None:
    """Raise ValueError if pictures of one origin differ in size, which a resize would hide."""
    sizes = [picture.size for picture in pictures]
    usual, _ = Counter(sizes).most_common(1)[0]
    odd = [(p, size) for p, size in zip(pictures, sizes, strict=True) if size != usual]
    if odd:
        picture, (width, height) = odd[0]
        raise ValueError(
            f"{len(odd)} of {len(sizes)} images are not {usual[0]}x{usual[1]} pixels: "
            f"{picture.file} is {width}x{height}"
        )


def _refuse_twins(pictures: Sequence[Picture]) -> None:
    """Raise ValueError if two files claim to be the same image of the same prompt."""
    first: dict[tuple[str, int], Picture] = {}
    for picture in pictures:
        twin = first.setdefault((picture.prompt_id, picture.image_index), picture)
        if twin is not picture:
            raise ValueError(
                f"{twin.file} and {picture.file} are both image {picture.image_index} "
                f"of prompt {picture.prompt_id}"
            )


def list_hash(pictures: Sequence[Picture]) -> str:
    """Return 16 hex digits of the names and contents of pictures, whatever their order."""
    lines = sorted(f"{picture.name} {picture.sha256}" for picture in pictures)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def export_by_image_id(pictures: Sequence[Picture], folder: Path) -> None:
    """Write pictures to `<image id, 12 digits>.png` in a flat folder, as clean-fid reads them.

    Raises ValueError where a prompt has several images or its id is no COCO image id, and where the
    folder holds anything else, which clean-fid would count.
    """
    for picture in pictures:
        if picture.image_index or not picture.prompt_id.isdigit():
            raise ValueError(
                f"eval.export: {picture.name} cannot be named by a COCO image id: prompts must be "
                "a COCO caption file, with one image each"
            )
    targets = {f"{int(picture.prompt_id):012d}.png": picture for picture in pictures}
    _prepare(folder, targets)
    for name, picture in targets.items():
        part = folder / f".{name}.part"
        if picture.file.suffix.lower() == ".png":
            shutil.copyfile(picture.file, part)
        else:
            Image.fromarray(picture.read()).save(part, format="png")
        part.replace(folder / name)


def _prepare(folder: Path, names: Iterable[str]) -> None:
    """Make the folder of an export; ValueError if it is a file or holds what is not in `names`."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"eval.export={folder} is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted({path.name for path in folder.glob("[!.]*")}.difference(names))
    if others:
        raise ValueError(f"eval.export={folder} holds {others[0]}: name an empty folder")


def _of_run(root: Path, table: Path) -> Iterator[Picture]:
    """Yield the pictures that a generate run recorded: all of them must be there, and no other."""
    try:
        rows = pq.read_table(table, columns=list(COLUMNS)).to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{table} is not the table of a generate run: {error}") from error
    missing = [row["path"] for row in rows if not (root / row["path"]).is_file()]
    if missing:
        listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise FileNotFoundError(
            f"{root}: {len(missing)} of {len(rows)} images are missing: {listed}"
        )
    recorded = {row["path"] for row in rows}
    for file in sorted(root.glob("*/samples/[!.]*")):
        if file.relative_to(root).as_posix() not in recorded:
            raise ValueError(f"{file} does not belong here: {table.name} does not list it")
    for row in rows:
        yield _picture(
            root / row["path"], root, row["prompt_id"], row["image_index"], row["prompt"]
        )


def _of_prompt_folders(root: Path) -> Iterator[Picture]:
    """Yield the pictures of numbered prompt folders, named by their metadata or number."""
    for folder in numbered(root, root, suffix="", digits=5):
        metadata = folder / "metadata.jsonl"
        line = read_line(metadata) if metadata.is_file() else {}
        prompt_id = str(line.get("prompt_id", folder.name))
        for file in numbered(root, folder / "samples", suffix=".png", digits=4):
            yield _picture(file, root, prompt_id, int(file.stem), line.get("prompt"))


def _of_flat_folder(root: Path) -> Iterator[Picture]:
    for file in sorted(root.iterdir()):
        if file.name.startswith("."):
            continue
        if file.suffix.lower() not in SUFFIXES or file.is_dir():
            raise ValueError(f"{file} does not belong here: images end with {' '.join(SUFFIXES)}")
        yield _picture(file, root, file.stem, 0, None)


def _picture(
    file: Path, root: Path, prompt_id: str, image_index: int, prompt: str | None
) -> Picture:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    name = file.relative_to(root).as_posix()
    return Picture(file, name, digest, prompt_id, image_index, prompt)
