"""Tables of numbers as Markdown, CSV and LaTeX; a table is a list of rows and a list of columns."""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
BLANK = "–"
_LATEX = {"\\": r"\textbackslash{}", "×": r"$\times$", "–": "--", "−": "$-$", "Δ": r"$\Delta$"}


@dataclass(frozen=True)
class Column:
    """One printed column: the row's key, the heading, decimals of numbers, and a unit after them.

    `key + "_note"`, where a row has it, is printed instead of the number; `key + "_ci"`, a pair, is
    printed behind it in brackets. `signed` prints a plus before positive numbers. `significant`,
    for numbers of all sizes, is how many digits a number that is no count shows at least.
    """

    key: str
    title: str
    digits: int = 2
    suffix: str = ""
    signed: bool = False
    significant: int | None = None

    def text(self, row: Row) -> str:
        """Return the cell of `row` as it is printed."""
        note, value = row.get(f"{self.key}_note"), row.get(self.key)
        if note or value is None:
            return str(note or BLANK)
        interval = row.get(f"{self.key}_ci")
        if interval is None:
            return self.number(value)
        return f"{self.number(value)} [{', '.join(map(self.number, interval))}]"

    def number(self, value: Any) -> str:
        """Return one value: counts in full, other numbers with `digits` decimals."""
        if isinstance(value, str):
            return value
        sign = "+" if self.signed else "-"
        places = 0 if float(value).is_integer() and isinstance(value, int) else self.digits
        if self.significant is not None and value and not isinstance(value, int):
            places = max(0, self.significant - 1 - math.floor(math.log10(abs(value))))
        return f"{value:{sign},.{places}f}{self.suffix}"


@dataclass(frozen=True)
class Table:
    """One printed table: caption, columns that have something to print, rows."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]

    @classmethod
    def of(cls, caption: str, columns: Sequence[Column], rows: Sequence[Row]) -> "Table":
        """Return the table without the columns in which no row has anything to print."""
        return cls(caption, filled(columns, rows), rows)

    def markdown(self) -> str:
        """Return the caption and the table as Markdown."""
        return f"{self.caption}\n\n{markdown(self.columns, self.rows)}"

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Table":
        """Return the table that `dataclasses.asdict` made plain, as scores.json holds it."""
        columns = [Column(**column) for column in data["columns"]]
        return cls(data["caption"], columns, data["rows"])


def filled(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Return the columns in which at least one row has something to print."""
    return [c for c in columns if any(c.text(row) != BLANK for row in rows)]


def markdown(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Return a Markdown table; the first column is aligned left, the others right."""
    rules = ["---", *["---:"] * (len(columns) - 1)]
    lines = [[c.title for c in columns], rules, *[[c.text(r) for c in columns] for r in rows]]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def latex(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Return a LaTeX tabular with booktabs rules."""
    head = " & ".join(_escape(c.title) for c in columns)
    body = "".join(" & ".join(_escape(c.text(r)) for c in columns) + " \\\\\n" for r in rows)
    return (
        f"\\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}\n\\toprule\n{head} \\\\\n\\midrule\n"
        f"{body}\\bottomrule\n\\end{{tabular}}\n"
    )


def csv_text(rows: Sequence[Row]) -> str:
    """Return all keys of all rows as CSV, unrounded; an interval becomes two columns."""
    flat = [
        dict(pair for key, value in row.items() for pair in _flatten(key, value)) for row in rows
    ]
    file = io.StringIO()
    names = list(dict.fromkeys(name for row in flat for name in row))
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


def _flatten(key: str, value: Any) -> list[tuple[str, Any]]:
    if not key.endswith("_ci"):
        return [(key, value)]
    low, high = value or (None, None)
    return [(f"{key}_low", low), (f"{key}_high", high)]


def _escape(text: str) -> str:
    text = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<!\\)([&%#_])", r"\\\1", text)
