"""The shapes world's parser as a VQA judge that is exactly right."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from ssd_research.metrics.judges.vqa import Answer, Asked
from ssd_research.shapes import benchmark, parser


@dataclass(frozen=True)
class ShapesVQA:
    """Answers the questions of the shapes world from the objects that the parser finds."""

    name: str = "shapes-parser"
    version: str = f"{parser.VERSION}.{benchmark.VERSION}"

    def answer(self, image: UInt8[np.ndarray, "h w 3"], questions: Sequence[Asked]) -> list[Answer]:
        """Return yes or no per question; ValueError if it is not of the shapes world."""
        found = parser.parse(image)
        right = [
            benchmark.answer({"tuple": asked.statement}, found, canvas=len(image))
            for asked in questions
        ]
        return [Answer("yes" if yes else "no", float(yes)) for yes in right]
