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

    Records count for an image whose file is still the same, if their floor is at most `floor`.
    """
    wanted = {(s.path, s.sha256): s for s in samples}
    for file in files:
        for record in read_records(file) if file.exists() else ():
            sample = wanted.get((record.path, record.sha256))
            if sample is not None and record.judge == judge and record.floor <= floor:
                yield sample, record


def read_records(file: Path) -> Iterator[Record]:
    """Yield the records of a file; lines that were cut short or are of other kinds are left out."""
    records = map(_read, file.read_bytes().splitlines())
    return (record for record in records if record is not None)


def _read(text: bytes) -> Record | None:
    """Return the record of a line, None for one that is cut short or of another format."""
    try:
        record = json.loads(text)
        rows = [{**d, "box": tuple(d["box"])} for d in record["detections"]]
        return Record(**{**record, "detections": tuple(Detection(**row) for row in rows)})
    except (ValueError, KeyError, TypeError):
        return None
