"""COCO's caption files (captions_val2017.json): one prompt per image, its id the image's.

The paper evaluates FID on COCO2017-val 5K without saying which of an image's five captions it took.
Here it is the one of the lowest annotation id, or one at random that depends on nothing but a seed
and the image. The image of a prompt is named `<image id, 12 digits>.png`, as COCO's own are.
"""

import codecs
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ssd_research.prompts.files import Row


@dataclass(frozen=True)
class Caption:
    """One caption of one image; white space is collapsed."""

    image_id: int
    caption_id: int
    caption: str

    @property
    def id(self) -> str:
        """The image id as COCO writes it in file names, which names the prompt."""
        return f"{self.image_id:012d}"

    @property
    def file_name(self) -> str:
        """The name of a generated image in a flat folder."""
        return f"{self.id}.png"


def is_caption_file(path: Path) -> bool:
    """Say whether a file is a JSON object with annotations, which no other prompt file is."""
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        if not file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            return False
    try:
        return "annotations" in json.loads(path.read_bytes())
    except ValueError:
        return False


def read_captions(path: Path, *, seed: int | None = None) -> list[Caption]:
    """Return one caption of every image of a COCO file, by image id.

    It is the caption of the lowest annotation id, or with a seed one at random. Raises ValueError
    where the file is not in COCO's format or an image has no caption.
    """
    by_image: dict[int, list[Caption]] = {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        for image in content["images"]:
            by_image[int(image["id"])] = []
        for entry in content["annotations"]:
            text = " ".join(entry["caption"].split())
            captions = by_image[int(entry["image_id"])]
            if text:
                captions.append(Caption(int(entry["image_id"]), int(entry["id"]), text))
    except (AttributeError, KeyError, TypeError, ValueError, IsADirectoryError) as error:
        raise ValueError(
            f"{path} is not a COCO caption file: images need id, annotations id, image_id of one "
            f"of them, and caption (found {error!r})"
        ) from error
    if not by_image:
        raise ValueError(f"{path} lists no images")
    silent = [image for image, captions in by_image.items() if not captions]
    if silent:
        raise ValueError(f"{path}: {len(silent)} images have no caption, the first {silent[0]}")
    return [_choose(by_image[image], seed) for image in sorted(by_image)]


def _choose(captions: Sequence[Caption], seed: int | None) -> Caption:
    """Return the first caption by annotation id, or with a seed the first by a seeded hash."""

    def rank(caption: Caption) -> tuple[bytes, int]:
        text = f"{seed}\0{caption.image_id}\0{caption.caption_id}"
        return b"" if seed is None else hashlib.sha256(text.encode()).digest(), caption.caption_id

    return min(captions, key=rank)


def rows(path: Path, *, seed: int | None = None) -> Iterator[Row]:
    """Yield the prompts of a COCO file; their metadata names the caption, so none is dropped."""
    for one in read_captions(path, seed=seed):
        yield Row(one.caption, one.id, {"prompt": one.caption, **manifest_line(one)})


def manifest_line(caption: Caption) -> Mapping[str, Any]:
    """Return image_id, caption_id, caption and file_name of one prompt."""
    return {**asdict(caption), "file_name": caption.file_name}
