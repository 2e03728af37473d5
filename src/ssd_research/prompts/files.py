"""Prompts in files and folders, in the order they stand there, untouched.

What is empty, malformed or of another kind raises one line that names the file, the place in it and
what is accepted.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

FILES = (".txt", ".csv", ".json", ".jsonl", ".parquet")


class Row(NamedTuple):
    """A prompt as its source has it, with an id and benchmark metadata where it has them."""

    text: str
    id: str | None = None
    metadata: Mapping[str, Any] | None = None


class Columns(NamedTuple):
    """Which columns of a table hold the texts and the ids (None: no ids)."""

    text: str = "prompt"
    id: str | None = None

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        """Return the row of a record; the metadata is the record itself if it is GenEval's."""
        for name in filter(None, self):
            if name not in record:
                key = "column" if name == self.text else "id_column"
                raise ValueError(
                    f"{where} has no {name!r} (it has {', '.join(map(str, record)) or 'nothing'}); "
                    f"set selection.{key}"
                )
        text = record[self.text]
        if not isinstance(text, str):
            raise ValueError(f"{where}: {self.text!r} is {text!r}, not a text")
        geneval = "tag" in record and "include" in record
        return Row(text, str(record[self.id]) if self.id else None, record if geneval else None)


def read_path(path: Path, columns: Columns) -> Iterator[Row]:
    """Yield the prompts of a file or folder; ValueError for other endings."""
    if path.is_dir():
        yield from _read_folder(path, columns)
    elif path.suffix == ".txt":
        yield from (Row(line) for line in _read_text(path).splitlines())
    elif path.suffix == ".csv":
        yield from _read_csv(path, columns)
    elif path.suffix == ".json":
        yield from _read_json(path, columns)
    elif path.suffix == ".jsonl":
        yield from _read_jsonl(path, columns)
    elif path.suffix == ".parquet":
        yield from _read_parquet(path, columns)
    else:
        raise ValueError(f"prompts={path}: {path.suffix or 'no ending'} is not {' '.join(FILES)}")


def _read_folder(folder: Path, columns: Columns) -> Iterator[Row]:
    """Yield one prompt per .txt file (its stem is the id), or the rows of all .parquet files."""
    texts, tables = sorted(folder.glob("*.txt")), sorted(folder.glob("*.parquet"))
    if not texts and not tables:
        raise ValueError(f"prompts={folder} is a folder without .txt or .parquet files")
    for path in texts:
        yield Row(_read_text(path), id=path.stem)
    for path in () if texts else tables:
        yield from _read_parquet(path, columns)


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{path} line {line} is not UTF-8 text") from error


def _read_csv(path: Path, columns: Columns) -> Iterator[Row]:
    reader = csv.reader(_read_text(path).splitlines(keepends=True), strict=True)
    try:
        header = next(reader, None)
        if header is None:
            raise ValueError(f"{path} is empty; its first line must name the columns")
        columns.row(dict.fromkeys(header, ""), f"{path} line 1")
        for cells in reader:
            where = f"{path} line {reader.line_num}"
            if cells and len(cells) != len(header):
                raise ValueError(f"{where} has {len(cells)} cells, the header {len(header)}")
            if cells:
                yield columns.row(dict(zip(header, cells, strict=True)), where)
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num}: {error}") from error


def _read_json(path: Path, columns: Columns) -> Iterator[Row]:
    entries = _parse(_read_text(path), path, first_line=1)
    if not isinstance(entries, list):
        raise ValueError(f"{path} must be a list of texts or of objects with {columns.text!r}")
    for index, entry in enumerate(entries):
        yield _entry(entry, columns, f"{path} entry {index + 1}")


def _read_jsonl(path: Path, columns: Columns) -> Iterator[Row]:
    # str.splitlines would also split at U+2028, which JSON texts may hold.
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip():
            yield _entry(_parse(line, path, number), columns, f"{path} line {number}")


def _parse(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ValueError(f"{path} line {line} is not JSON: {error.msg}") from error


def _entry(entry: Any, columns: Columns, where: str) -> Row:
    if isinstance(entry, str):
        return Row(entry)
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is neither a text nor an object with {columns.text!r}")
    return columns.row(entry, where)


def _read_parquet(path: Path, columns: Columns) -> Iterator[Row]:
    try:
        file = pq.ParquetFile(path)
        columns.row(dict.fromkeys(file.schema_arrow.names, ""), str(path))
        numbers = count(1)
        for batch in file.iter_batches(columns=list(filter(None, columns))):
            for record in batch.to_pylist():
                yield columns.row(record, f"{path} row {next(numbers)}")
    except pa.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is not a Parquet file: {reason}") from error
