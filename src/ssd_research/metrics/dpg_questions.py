"""DPG-Bench's questions (Hu et al., 2024, `dpg_bench.csv`; DSG-1k has the same nine columns).

Such files are written by language models and hold odd dependencies. None of them stops the loader;
each kind is counted in `QuestionTable.oddities` and ends up in the scores.
"""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path

BROAD = ("global", "entity", "attribute", "relation", "other")  # DPG-Bench's five L1 categories
COLUMNS = ("item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language")
ODDITIES = (
    "malformed_dependencies",  # a token that is no whole number: "5, right"; ends the official run
    "self_parents",
    "later_parents",  # a parent that stands below its child
    "unknown_parents",  # a parent the item has no question for
    "duplicate_questions",  # two rows with one item and number: the last one counts
    "blank_questions",  # a row without a question, which is asked all the same
    "split_items",  # an item whose rows do not stand together
    "unknown_categories",  # none of the five
)


@dataclass(frozen=True)
class Question:
    """One yes-no question of an item; its parents' answers decide whether its own can count.

    `statement` is the CSV's `tuple`, e.g. "attribute - color (cup, red)". `parents` are numbers of
    questions of the same item, tokens that are no number left out (`malformed` says so).
    """

    item_id: str
    number: int
    text: str
    statement: str
    parents: tuple[int, ...] = ()
    malformed: bool = False

    @cached_property
    def category(self) -> str:
        """The L2 category, e.g. "attribute - color": what stands before the bracket."""
        return self.statement.partition("(")[0].strip()

    @cached_property
    def broad(self) -> str:
        """The L1 category, e.g. "attribute": what stands before the hyphen."""
        return self.category.partition("-")[0].strip()


@dataclass(frozen=True)
class QuestionTable:
    """The rows of a table in its order, the prompt of every item, and what was odd."""

    rows: tuple[Question, ...]
    texts: Mapping[str, str]
    oddities: Mapping[str, int]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, str]], *, source: str = "questions") -> "QuestionTable":
        """Build the table from rows with DPG's columns.

        Raises:
            ValueError: if there is no row, or one lacks a column or a number.
        """
        questions: list[Question] = []
        texts: dict[str, str] = {}
        for line, row in enumerate(rows, 2):
            questions.append(_question(row, f"{source} row {line}"))
            texts.setdefault(questions[-1].item_id, row["text"])
        if not questions:
            raise ValueError(f"{source} holds no questions")
        return cls(tuple(questions), texts, _oddities(questions))

    @cached_property
    def items(self) -> Mapping[str, tuple[Question, ...]]:
        """The questions of every item in order; of two with one number the last one counts."""
        return _by_item(self.rows)

    @property
    def fingerprint(self) -> str:
        """The sha256 of all rows in order."""
        rows = [
            [q.item_id, q.number, q.text, q.statement, q.parents, q.malformed] for q in self.rows
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def as_officially_read(self) -> "QuestionTable":
        """Return the table as the official script reads it.

        It skips the first data row, and of an item whose rows stand apart it keeps the last block.
        """
        blocks = groupby(self.rows[1:], key=lambda q: q.item_id)
        last = {item_id: tuple(block) for item_id, block in blocks}
        return replace(self, rows=tuple(chain.from_iterable(last.values())))

    def without_graphs_of_malformed(self) -> "QuestionTable":
        """Return the table as DSG reads it: a malformed token costs an item all dependencies."""
        spoilt = {q.item_id for q in self.rows if q.malformed}
        rows = (replace(q, parents=()) if q.item_id in spoilt else q for q in self.rows)
        return replace(self, rows=tuple(rows))


def read_questions(path: Path) -> QuestionTable:
    """Return the questions of a CSV file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no such table; the line names the file and the row.
    """
    if not path.is_file():
        raise FileNotFoundError(f"the questions {path} are not there")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            absent = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if absent:
                raise ValueError(f"{path} is no table of questions: without {', '.join(absent)}")
            return QuestionTable.of(reader, source=path.name)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error


def _question(row: Mapping[str, str | None], where: str) -> Question:
    for name in COLUMNS:
        if row.get(name) is None:
            raise ValueError(f"{where} has no {name}")
    if None in row:
        raise ValueError(f"{where} has more cells than the table has columns: quote the commas")
    number, text = str(row["proposition_id"]).strip(), str(row["question_natural_language"]).strip()
    if not number.isdecimal():
        raise ValueError(f"{where}: proposition_id {number!r} is not a number")
    tokens = [token.strip() for token in str(row["dependency"]).split(",")]
    parents = tuple(int(token) for token in tokens if token.isdecimal() and int(token))
    malformed = not all(token.isdecimal() for token in tokens)
    item_id = str(row["item_id"]).strip()
    if not item_id:
        raise ValueError(f"{where}: item_id is blank")
    return Question(item_id, int(number), text, str(row["tuple"]), parents, malformed)


def _by_item(rows: Iterable[Question]) -> dict[str, tuple[Question, ...]]:
    groups: dict[str, dict[int, Question]] = {}
    for q in rows:
        groups.setdefault(q.item_id, {})[q.number] = q
    return {item_id: tuple(group.values()) for item_id, group in groups.items()}


def _oddities(rows: Sequence[Question]) -> dict[str, int]:
    """Count each of `ODDITIES`."""
    items = _by_item(rows)
    blocks = sum(1 for _ in groupby(rows, key=lambda q: q.item_id))
    return {
        **dict.fromkeys(ODDITIES, 0),
        "split_items": blocks - len(items),
        "duplicate_questions": len(rows) - sum(map(len, items.values())),
        "blank_questions": sum(not q.text for q in rows),
        **_dependency_faults(items),
    }


def _dependency_faults(items: Mapping[str, Sequence[Question]]) -> dict[str, int]:
    """Count the odd dependencies and categories of all questions."""
    found: Counter[str] = Counter()
    for group in items.values():
        place = {q.number: n for n, q in enumerate(group)}
        for q in group:
            found["malformed_dependencies"] += q.malformed
            found["unknown_categories"] += q.broad not in BROAD
            for parent in q.parents:
                found["self_parents"] += parent == q.number
                found["unknown_parents"] += parent not in place
                found["later_parents"] += place.get(parent, -1) > place[q.number]
    return dict(found)
