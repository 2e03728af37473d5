"""VQA judges: what answers yes-no questions about a picture, behind one small protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import UInt8


class JudgeError(ValueError):
    """A judge that cannot be loaded, dies or answers what was not asked; one line says which."""


@dataclass(frozen=True)
class Asked:
    """One question about one image: DPG's item and number, the tile, and the tuple it states."""

    item_id: str
    tile: int
    number: int
    question: str
    statement: str = ""


@dataclass(frozen=True)
class Answer:
    """What a judge said, unchanged, and its probability of yes against no if it knows one."""

    answer: str
    p_yes: float | None = None


class VQAJudge(Protocol):
    """Answers questions about a picture; `name` and `version` settle its answers."""

    name: str
    version: str

    def answer(self, image: UInt8[np.ndarray, "h w 3"], questions: Sequence[Asked]) -> list[Answer]:
        """Return one answer per question about an 8-bit RGB picture; JudgeError if it cannot."""
        ...
