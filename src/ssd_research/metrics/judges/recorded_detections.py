"""Detections that were stored before, replayed: other rules are tried without a model."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from ssd_research.metrics.detections import read_records
from ssd_research.metrics.geneval import Detection
from ssd_research.paths import resolve_path


@dataclass(frozen=True)
class RecordedDetector:
    """Stands, under its name, for the judge that wrote a `detections.jsonl`.

    Its labels and colours are not known. ValueError for a file without detections, or of two
    judges; FileNotFoundError if there is none.
    """

    path: str
    name: str = field(init=False)
    version: str = field(init=False, default="")  # the name holds it
    floor: float = field(init=False)
    labels: tuple[str, ...] = field(init=False, default=())
    colours: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        records = list(read_records(self.file))
        judges = sorted({record.judge for record in records})
        if len(judges) != 1:
            found = " and ".join(judges) or "no detections"
            raise ValueError(f"eval.detections={self.path} holds {found}; it must be of one judge")
        object.__setattr__(self, "name", judges[0])
        object.__setattr__(self, "floor", max(record.floor for record in records))

    @cached_property
    def file(self) -> Path:
        """The absolute path of the file; FileNotFoundError if it does not exist."""
        try:
            return resolve_path(self.path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"eval.detections={self.path} does not exist") from error

    def detect(self, image: UInt8[np.ndarray, "h w 3"]) -> list[Detection]:
        """Refuse to look at what nobody has looked at: always ValueError."""
        raise ValueError(f"eval.detections={self.path} has nothing of this image")
