"""Judges: what looks at images, behind the small protocols that the metrics are written against."""

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from ssd_research.metrics.geneval import Detection


@runtime_checkable
class Detector(Protocol):
    """Finds labelled objects in a picture; `name` and `version` go into every result.

    What scores at most `floor` is never reported, nor is a label that is not among `labels`.
    `colours` are those that it names itself.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def version(self) -> str: ...  # noqa: D102
    @property
    def floor(self) -> float: ...  # noqa: D102
    @property
    def labels(self) -> Collection[str]: ...  # noqa: D102
    @property
    def colours(self) -> Collection[str]: ...  # noqa: D102

    def detect(self, image: UInt8[np.ndarray, "h w 3"]) -> list[Detection]:
        """Return the objects of an 8-bit RGB picture: boxes, scores, and colours or masks."""
        ...


@runtime_checkable
class ColourClassifier(Protocol):
    """Names colours of detected objects; `name` and `version` go into every result."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def version(self) -> str: ...  # noqa: D102
    @property
    def colours(self) -> Collection[str]: ...  # noqa: D102

    def classify(
        self, image: UInt8[np.ndarray, "h w 3"], objects: Sequence[Detection]
    ) -> list[str]:
        """Return the colour of each object, all of one label, by its mask or its box alone."""
        ...
