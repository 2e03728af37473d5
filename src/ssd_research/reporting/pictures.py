"""Images side by side: one row per prompt and image index, one column per decoder, AR first."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ssd_research.reporting.cells import Cell

ENLARGED = 3  # times, for images of fewer pixels than SMALL
SMALL = 128
LARGEST = 320  # CSS pixels


@dataclass(frozen=True)
class PictureRow:
    """The same image of the same prompt from every decoder, as data URIs in the cells' order."""

    prompt: str
    image_index: int
    images: list[str]


def side_by_side(cells: Sequence[Cell], count: int) -> list[PictureRow]:
    """Return at most `count` rows, spread evenly over the images that all cells have."""
    tables = [{(row["prompt_id"], row["image_index"]): row for row in c.images} for c in cells]
    common = [key for key in tables[0] if all(key in table for table in tables)]
    return [
        PictureRow(
            tables[0][key]["prompt"],
            key[1],
            [data_uri(c.image_file(table[key])) for c, table in zip(cells, tables, strict=True)],
        )
        for key in spread(common, count)
    ]


def spread(found: Sequence[tuple], count: int) -> list[tuple]:
    """Return `count` entries at equal distances, or all of them if there are fewer."""
    if count >= len(found):
        return list(found)
    return [found[n * len(found) // count] for n in range(count)]


def data_uri(image: Path) -> str:
    """Return a PNG file as a data URI, so that the page needs no other file."""
    return f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"


def shown_width(pixels: int) -> int:
    """Return the width in CSS pixels at which an image of `pixels` is shown."""
    return pixels * ENLARGED if pixels < SMALL else min(pixels, LARGEST)
