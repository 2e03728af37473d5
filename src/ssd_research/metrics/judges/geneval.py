"""GenEval's two judges as one: a detector, and a colour classifier for the objects that need it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from ssd_research.metrics.detections import Record
from ssd_research.metrics.geneval import Detection, Rules, asked_for_colour
from ssd_research.metrics.geneval_folder import Sample
from ssd_research.metrics.judges import ColourClassifier, Detector
from ssd_research.metrics.judges.recorded_detections import RecordedDetector
from ssd_research.prompts import Prompt


@dataclass(frozen=True)
class GenEvalJudge:
    """Detects objects, and names the colours that a prompt asks for and the detector leaves open.

    Raises ValueError if the rules count objects that the detector drops.
    """

    detector: Detector
    colours: ColourClassifier | None
    rules: Rules

    def __post_init__(self) -> None:
        if not 0 <= self.detector.floor < 1:
            raise ValueError(f"eval.detector.floor={self.detector.floor} must be in [0, 1)")
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
        return " + ".join(f"{name} {version}".strip() for name, version in parts)

    @property
    def recorded(self) -> Path | None:
        """Return the file that holds all this judge can say, or None if it looks at images."""
        return self.detector.file if isinstance(self.detector, RecordedDetector) else None

    def refuse_unknown(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError if a prompt asks for a class or colour that nobody here can name.

        Such a prompt would score 0 whatever its images show.
        """
        if self.recorded is not None:
            return
        namer = self.colours or self.detector
        known = {
            "class": (self.detector.name, self.detector.labels),
            "color": (namer.name, namer.colours),
        }
        for prompt in prompts:
            for key, word in _words(prompt.metadata or {}):
                name, words = known[key]
                if word not in words:
                    raise ValueError(
                        f"prompt {prompt.id} ({prompt.text!r}) asks for {key}={word!r}; {name} "
                        f"knows {', '.join(words) or 'none'}"
                    )

    def warm_up(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Let the colour classifier see a blank image if one of the metadata lines needs it.

        What is wrong with it then shows before hours of detection.
        """
        coloured = any(need.get("color") for line in lines for need in line["include"])
        if self.colours is not None and coloured:
            blank = np.zeros((8, 8, 3), np.uint8)
            self.colours.classify(blank, [Detection("person", 1.0, (0.0, 0.0, 8.0, 8.0))])

    def look(self, image: UInt8[np.ndarray, "h w 3"], sample: Sample) -> Record:
        """Return the objects of an image, those with a colour in question classified.

        Raises:
            ValueError: if the detector reports a score or box that is none.
        """
        found = self.detector.detect(image)
        _refuse_garbage(found, self.detector.name, sample.path)
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
        asked = asked_for_colour(metadata, found, rules=self.rules)
        return [d for d in asked if d.colour is None]


def _words(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every class and colour that a line of metadata names, with its key."""
    for need in (*metadata["include"], *metadata.get("exclude", [])):
        yield from ((key, need[key]) for key in ("class", "color") if key in need)


def _refuse_garbage(found: Sequence[Detection], name: str, path: str) -> None:
    """Raise ValueError for a detection without a number for a score or an area to its box."""
    for d in found:
        x1, y1, x2, y2 = d.box
        if not (math.isfinite(d.score + x1 + y1 + x2 + y2) and x1 < x2 and y1 < y2):
            raise ValueError(f"{name} reported {d.label} of score {d.score} at {d.box} in {path}")
