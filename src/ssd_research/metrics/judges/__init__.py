"""Judges: what looks at images, behind the small protocols that the metrics are written against."""

from typing import Protocol

import numpy as np
from jaxtyping import UInt8

from ssd_research.metrics.geneval import Detection


class Detector(Protocol):
    """Finds labelled objects in a picture; `name` and `version` go into every result."""

    name: str
    version: str

    def detect(self, image: UInt8[np.ndarray, "h w 3"]) -> list[Detection]:
        """Return the objects of an 8-bit RGB picture with their boxes, scores and colours."""
        ...
