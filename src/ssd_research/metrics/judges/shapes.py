"""The shapes world's parser as GenEval's detector and colour classifier in one."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8

from ssd_research.metrics.geneval import Detection
from ssd_research.shapes import parser
from ssd_research.shapes.scenes import COLOURS, SHAPES


@dataclass(frozen=True)
class ShapesDetector:
    """Finds the shapes of a picture; a score is the correlation with the best template."""

    name: ClassVar[str] = "shapes-parser"
    version: ClassVar[str] = parser.VERSION
    floor: ClassVar[float] = 0.0
    labels: ClassVar[Collection[str]] = SHAPES
    colours: ClassVar[Collection[str]] = tuple(COLOURS)

    def detect(self, image: UInt8[np.ndarray, "h w 3"]) -> list[Detection]:
        """Return every object above speck size, best score first; ValueError if not square."""
        return [Detection(d.shape, d.score, d.box, d.colour) for d in parser.parse(image)]
