"""The shapes world's parser as GenEval's detector and colour classifier in one."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from ssd_research.metrics.geneval import Detection
from ssd_research.shapes import parser


@dataclass(frozen=True)
class ShapesDetector:
    """Finds the shapes of a picture; a score is the correlation with the best template."""

    name: str = "shapes-parser"
    version: str = parser.VERSION
    floor: float = 0.0

    def detect(self, image: UInt8[np.ndarray, "h w 3"]) -> list[Detection]:
        """Return every object above speck size, best score first; ValueError if not square."""
        return [Detection(d.shape, d.score, d.box, d.colour) for d in parser.parse(image)]
