"""Answers that were recorded before, replayed: no model is needed to score again."""

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from ssd_research.metrics.dpg_folder import pixel_digest
from ssd_research.metrics.judges.vqa import Answer, Asked, JudgeError
from ssd_research.paths import resolve_path

Key = tuple[str, int, int]  # item id, tile, question number
# Our own `answers.jsonl`; a table without a tile column speaks of the first image of each item.
COLUMNS = {
    "item": "item_id",
    "tile": "tile",
    "question": "question_id",
    "answer": "answer",
    "p_yes": "p_yes",
}


@dataclass(frozen=True)
class RecordedJudge:
    """Replays a .csv or .jsonl file with a row per answer, keyed by item, tile and question.

    `columns` renames the columns in `COLUMNS`; `where` keeps only the rows with these values, such
    as `{t2i_model: sd2dot1}`. `name` is who answered. A file of ours says so itself, is taken for
    that judge, and holds what the answers are about: other pixels are refused.
    """

    path: str
    name: str = ""
    columns: Mapping[str, str] | None = None
    where: Mapping[str, Any] | None = None
    version: str = field(init=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.columns or {}) - set(COLUMNS))
        if unknown:
            raise ValueError(
                f"eval.judge.columns.{unknown[0]} is not known; accepted: {', '.join(COLUMNS)}"
            )
        if self._file.suffix not in (".csv", ".jsonl"):
            raise ValueError(f"eval.judge.path={self.path} must end in .csv or .jsonl")
        judges = sorted({row["judge"] for row in self._rows if row.get("judge")})
        if len(judges) > 1:
            raise ValueError(f"{self.path} mixes the answers of {' and '.join(judges)}")
        digest = hashlib.sha256(self._file.read_bytes()).hexdigest()[:12]
        chosen = ",".join(f"{k}={v}" for k, v in sorted((self.where or {}).items()))
        origin = "" if judges else " ".join(filter(None, ("recorded", digest, chosen)))
        object.__setattr__(self, "name", "".join(judges) or self.name or self._file.stem)
        object.__setattr__(self, "version", origin)

    def answer(self, image: UInt8[np.ndarray, "h w 3"], questions: Sequence[Asked]) -> list[Answer]:
        """Return the recorded answers; JudgeError if one is absent or about another picture."""
        pixels = pixel_digest(image)
        return [self._find(asked, pixels) for asked in questions]

    def _find(self, asked: Asked, pixels: str) -> Answer:
        where = f"question {asked.number} of item {asked.item_id}, image {asked.tile}"
        found = self._answers.get((asked.item_id, asked.tile, asked.number))
        if found is None:
            raise JudgeError(f"{self.path} has no answer to {where}")
        answer, about = found
        if about is not None and about != pixels:
            raise JudgeError(f"{self.path} holds an answer about other pixels: {where}")
        return answer

    @cached_property
    def _file(self) -> Path:
        return resolve_path(self.path)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        """Return the rows that `where` keeps."""
        rows = [
            row
            for row in _read(self._file)
            if all(str(row.get(k)) == str(v) for k, v in (self.where or {}).items())
        ]
        if not rows:
            raise ValueError(f"{self.path} holds no answers (where: {self.where})")
        return rows

    @cached_property
    def _answers(self) -> dict[Key, tuple[Answer, str | None]]:
        """Return answers and their pixels by key; ValueError if two rows of one key disagree."""
        names = {**COLUMNS, **(self.columns or {})}
        found: dict[Key, tuple[Answer, str | None]] = {}
        for row in self._rows:
            absent = [names[k] for k in ("item", "question", "answer") if row.get(names[k]) is None]
            if absent:
                raise ValueError(
                    f"{self.path} has a row without {absent[0]!r}; set eval.judge.columns"
                )
            key, answer = _entry(row, names)
            said = answer, row.get("sha256")
            if found.setdefault(key, said) != said:
                item, tile, number = key
                raise ValueError(
                    f"{self.path} holds two answers to question {number} of item {item}, image "
                    f"{tile}; choose rows with eval.judge.where"
                )
        return found


def _entry(row: Mapping[str, Any], names: Mapping[str, str]) -> tuple[Key, Answer]:
    """Return the key and the answer of a row; ValueError where a number is none."""
    try:
        key = (
            str(row[names["item"]]),
            int(row.get(names["tile"]) or 0),
            int(row[names["question"]]),
        )
        p_yes = row.get(names["p_yes"])
        share = None if p_yes in (None, "") else float(str(p_yes))
    except ValueError as error:
        raise ValueError(f"a recorded answer is malformed ({error}): {dict(row)}") from error
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"a recorded answer is malformed (p_yes is no probability): {dict(row)}")
    return key, Answer(str(row[names["answer"]]), share)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table; a last line that an interruption cut short is left out.

    Raises ValueError for what is no UTF-8 text, a surplus cell, or a line that is no JSON object.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error})") from error
    if path.suffix == ".jsonl":
        yield from _json_rows(text, path)
        return
    for row in csv.DictReader(io.StringIO(text, newline="")):
        if None in row:
            raise ValueError(f"{path} has a row with more cells than columns: {row}")
        yield row


def _json_rows(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects that lines hold; ValueError for another line, unless the last is cut."""
    *lines, rest = text.split("\n")
    for line in [*lines, rest] if _whole(rest) else lines:
        row = json.loads(line) if _whole(line) else None
        if not isinstance(row, dict):
            raise ValueError(f"{path} holds a line that is no JSON object: {line[:60]}")
        yield row


def _whole(line: str) -> bool:
    """Return whether a line is JSON."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
