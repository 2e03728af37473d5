"""The numbers that the paper prints (arXiv 2606.20543 v3), one CSV per table.

Units are in the column names: `_s` seconds, `_percent`, `_gb` 1e9 bytes, `_tflops` per image.
`dpg` is the DPG-Bench average, accelerations are AR / method, `r` is `b` at `v` = 1.
"""

import csv
from functools import cache
from importlib import resources

Value = int | float | str | bool | None

TABLES = range(1, 22)


def table(number: int) -> list[dict[str, Value]]:
    """Return the rows of the paper's table `number`, with numbers as numbers and blanks as None.

    Raises ValueError for a number that is not one of the paper's 21 tables.
    """
    if number not in TABLES:
        raise ValueError(f"the paper has tables 1 to 21, not {number}")
    return [dict(row) for row in _read(number)]


def sweep(model: str) -> list[dict[str, Value]]:
    """Return Table 7's rows of one backbone (AR, ZipAR, SSD); empty where the paper has none."""
    return [row for row in table(7) if row["model"] == model]


@cache
def _read(number: int) -> list[dict[str, Value]]:
    text = resources.files(__name__).joinpath(f"table{number}.csv").read_text(encoding="utf-8")
    return [{k: _value(v) for k, v in row.items()} for row in csv.DictReader(text.splitlines())]


def _value(text: str) -> Value:
    if text in ("", "true", "false"):
        return {"": None, "true": True, "false": False}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
