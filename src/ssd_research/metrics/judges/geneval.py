"""GenEval's two judges as one: a detector, and a colour classifier for the objects that need it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import UInt8

from ssd_research.metrics.detections import Record
from ssd_research.metrics.geneval import Detection, Rules, asked_for_colour
from ssd_research.metrics.geneval_folder import Sample
from ssd_research.metrics.judges import ColourClassifier, Detector


@dataclass(frozen=True)
class GenEvalJudge:
    """Detects objects, and names the colours that a prompt asks for and the detector leaves open.

    Raises ValueError if the rules count objects that the detector drops.
    """

    detector: Detector
    colours: ColourClassifier | None
    rules: Rules

    def __post_init__(self) -> None:
        for name in ("threshold", "counting_threshold"):
            if getattr(self.rules, name) < self.detector.floor:
                raise ValueError(
                    f"eval.rules.{name}={getattr(self.rules, name)} is below "
                    f"eval.detector.floor={self.detector.floor}, under which nothing is detected"
                )

    @property
    def label(self) -> str:
        """Return the names and versions of all that looks at the images."""
        parts = [(self.detector.name, self.detector.version)]
        if self.colours is not None:
            parts.append((self.colours.name, self.colours.version))
        return " + ".join(f"{name} {version}" for name, version in parts)

    def warm_up(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Let the colour classifier see a blank image if one of the metadata lines needs it.

        What is wrong with it then shows before hours of detection.
        """
        coloured = any(need.get("color") for line in lines for need in line["include"])
        if self.colours is not None and coloured:
            blank = np.zeros((8, 8, 3), np.uint8)
            self.colours.classify(blank, [Detection("person", 1.0, (0.0, 0.0, 8.0, 8.0))])

    def look(self, image: UInt8[np.ndarray, "h w 3"], sample: Sample) -> Record:
        """Return the objects of an image, those with a colour in question classified."""
        found = self.detector.detect(image)
        named = self._name_colours(image, self._open(sample.metadata, found))
        seen = tuple(replace(d, mask=None, colour=named.get(id(d), d.colour)) for d in found)
        return Record(sample.path, sample.sha256, self.label, float(self.detector.floor), seen)

    def _name_colours(
        self, image: UInt8[np.ndarray, "h w 3"], asked: Sequence[Detection]
    ) -> dict[int, str]:
        """Return the classified colours by the id of the detection, one class at a time."""
        named: dict[int, str] = {}
        if self.colours is None:
            return named
        for label in sorted({d.label for d in asked}):
            group = [d for d in asked if d.label == label]
            answers = self.colours.classify(image, group)
            named |= {id(d): colour for d, colour in zip(group, answers, strict=True)}
        return named

    def settled(self, metadata: Mapping[str, Any], found: Sequence[Detection]) -> bool:
        """Say whether stored detections have every colour that the rules can ask for."""
        return not self._open(metadata, found)

    def _open(self, metadata: Mapping[str, Any], found: Sequence[Detection]) -> list[Detection]:
        """Return the objects whose colour is for the colour classifier to name."""
        if self.colours is None:
            return []
        asked = asked_for_colour(metadata, found, rules=self.rules)
        return [d for d in asked if d.colour is None]
