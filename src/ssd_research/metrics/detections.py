"""`detections.jsonl`: what a judge saw in each image, stored before anything is scored.

One line per image names the image by path and sha256, the judge, and the score under which it
reported nothing, so that other rules can be tried on the same detections without a model.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_research.metrics.geneval import Detection
from ssd_research.metrics.geneval_folder import Sample


@dataclass(frozen=True)
class Record:
    """The detections of one image, by the judge of that label, with scores above `floor`."""

    path: str
    sha256: str
    judge: str
    floor: float
    detections: tuple[Detection, ...]

    def line(self) -> str:
        """Return the record as one line of JSON."""
        facts = {"path": self.path, "sha256": self.sha256, "judge": self.judge, "floor": self.floor}
        return json.dumps({**facts, "detections": [plain(d) for d in self.detections]}) + "\n"


def plain(found: Detection) -> dict[str, Any]:
    """Return a detection without its mask, as JSON has it."""
    return {
        "label": found.label,
        "score": found.score,
        "box": list(found.box),
        "colour": found.colour,
    }


def stored(
    files: Iterable[Path], samples: Sequence[Sample], *, judge: str, floor: float
) -> Iterator[tuple[Sample, Record]]:
    """Yield the records in `files` that a judge of that label and floor would write again.

    Records count for an image whose file is still the same, if their floor is at most `floor`. A
    line that an interruption cut short is passed over.
    """
    wanted = {(s.path, s.sha256): s for s in samples}
    for file in files:
        for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            record = _read(text)
            if record is None or record.judge != judge or record.floor > floor:
                continue
            sample = wanted.get((record.path, record.sha256))
            if sample is not None:
                yield sample, record


def _read(text: str) -> Record | None:
    """Return the record of a line, None for one that is cut short or of another format."""
    try:
        record = json.loads(text)
        rows = [{**d, "box": tuple(d["box"])} for d in record["detections"]]
        return Record(**{**record, "detections": tuple(Detection(**row) for row in rows)})
    except (ValueError, KeyError, TypeError):
        return None
