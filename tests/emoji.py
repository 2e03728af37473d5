"""Emoji of COCO classes as scenes, and a detector and colour classifier that read them exactly.

A sprite keeps its own pixels or is filled with one of GenEval's colours; part of it can be spoilt,
which lowers the score that the detector gives it to the share that is left.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from ssd_research.metrics.geneval import Detection
from ssd_research.metrics.geneval_words import OBJECTS

DATA = Path(__file__).parents[2] / "shared" / "data"
BACKGROUND = np.array((171, 205, 239), np.uint8)
SPOILT = np.array((3, 250, 7), np.uint8)
PALETTE = {
    "red": (220, 20, 20),
    "orange": (255, 140, 0),
    "yellow": (250, 230, 20),
    "green": (20, 150, 40),
    "blue": (20, 40, 220),
    "purple": (120, 20, 160),
    "pink": (255, 130, 190),
    "brown": (110, 60, 20),
    "black": (10, 10, 10),
    "white": (250, 250, 250),
}


@dataclass(frozen=True)
class Sprite:
    """The opaque pixels of an emoji: colours [h, w, 3] and mask [h, w], cut to the mask."""

    rgb: np.ndarray
    mask: np.ndarray


@cache
def sprites() -> dict[str, Sprite]:
    """Return the sprites by GenEval's class."""
    found = {}
    folder = DATA / "emoji_sample"
    for line in (folder / "captions.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        pixels = np.array(Image.open(folder / entry["file_name"]).convert("RGBA"))
        mask = pixels[..., 3] > 127
        rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
        cut = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        found[entry["coco_class"]] = Sprite(pixels[cut][..., :3], mask[cut])
    return found


@dataclass
class Canvas:
    """A picture in the making, plain at first."""

    pixels: np.ndarray

    @classmethod
    def blank(cls, side: int = 256) -> "Canvas":
        return cls(np.tile(BACKGROUND, (side, side, 1)))

    def put(
        self, label: str, *, at: tuple[int, int], colour: str | None = None, score: float = 1.0
    ) -> "Canvas":
        """Centre a sprite at (x, y), with all but a share `score` of its pixels spoilt."""
        sprite = sprites()[label]
        height, width = sprite.mask.shape
        x, y = at[0] - width // 2, at[1] - height // 2
        rgb = (
            sprite.rgb.copy()
            if colour is None
            else np.tile(np.uint8(PALETTE[colour]), (height, width, 1))
        )
        rows, columns = sprite.mask.nonzero()
        spoilt = slice(0, round((1 - score) * len(rows)))
        rgb[rows[spoilt], columns[spoilt]] = SPOILT
        place = self.pixels[y : y + height, x : x + width]
        assert (place == BACKGROUND).all(), "sprites must not touch"
        place[sprite.mask] = rgb[sprite.mask]
        return self


@dataclass(frozen=True)
class TemplateDetector:
    """Finds every sprite whose silhouette stands alone, with its mask."""

    floor: float = 0.05
    name: str = "emoji-templates"
    version: str = "1"
    labels: frozenset[str] = frozenset(OBJECTS)
    colours: tuple[str, ...] = ()

    def detect(self, image: np.ndarray) -> list[Detection]:
        return [d for d in find(image.shape, image.tobytes()) if d.score > self.floor]


@cache
def find(shape: tuple[int, int, int], content: bytes) -> list[Detection]:
    """Return the sprites of an image, found once however often it is looked at."""
    image = np.frombuffer(content, np.uint8).reshape(shape)
    covered = np.pad((image != BACKGROUND).any(-1), 1)
    corners = covered[1:-1, 1:-1] & ~covered[1:-1, :-2] & ~covered[:-2, 1:-1]
    found = []
    for y, x in zip(*corners.nonzero(), strict=True):
        for label, sprite in sprites().items():
            left = x - int(sprite.mask[0].argmax())
            height, width = sprite.mask.shape
            there = covered[1 + y : 1 + y + height, 1 + left : 1 + left + width]
            if left >= 0 and there.shape == sprite.mask.shape and (there == sprite.mask).all():
                found.append(_detection(image, label, (int(left), int(y)), sprite))
    return found


def _detection(image: np.ndarray, label: str, corner: tuple[int, int], sprite: Sprite) -> Detection:
    (x, y), (height, width) = corner, sprite.mask.shape
    pixels = image[y : y + height, x : x + width][sprite.mask]
    same = (pixels == sprite.rgb[sprite.mask]).all(-1).mean()
    plain = max((pixels == colour).all(-1).mean() for colour in PALETTE.values())
    mask = np.zeros(image.shape[:2], bool)
    mask[y : y + height, x : x + width] = sprite.mask
    box = (float(x), float(y), float(x + width), float(y + height))
    return Detection(label, float(max(same, plain)), box, mask=mask)


@dataclass(frozen=True)
class PaletteColours:
    """Names the palette's colour that fills most of an object's mask."""

    name: str = "emoji-palette"
    version: str = "1"
    colours: tuple[str, ...] = tuple(PALETTE)

    def classify(self, image: np.ndarray, objects: list[Detection]) -> list[str]:
        return [self._colour(image if d.mask is None else image[d.mask]) for d in objects]

    def _colour(self, pixels: np.ndarray) -> str:
        share = {name: (pixels == rgb).all(-1).mean() for name, rgb in PALETTE.items()}
        return max(share, key=share.get)
