"""The answers behind DPG-Bench's scores: asked once, stored at once, found again."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ssd_research.metrics.dpg import Answers
from ssd_research.metrics.dpg_folder import Tile
from ssd_research.metrics.dpg_questions import QuestionTable
from ssd_research.metrics.judges.vqa import Answer, Asked, JudgeError, VQAJudge
from ssd_research.paths import resolve_path
from ssd_research.runs import write_atomic
from ssd_research.workload import progress

log = logging.getLogger(__name__)

STORE = "answers.jsonl"
Place = tuple[str, int]  # item id, number of the image
Said = dict[Place, dict[int, Answer]]  # by question number


@dataclass(frozen=True)
class Exam:
    """What is asked: the tiles of complete items, their questions, and who answers."""

    root: Path
    tiles: Sequence[Tile]
    table: QuestionTable
    judge: VQAJudge

    @property
    def examiner(self) -> str:
        """The judge as it is stored with every answer."""
        return f"{self.judge.name} {self.judge.version}".strip()


def ask(exam: Exam, *, store: Path) -> Said:
    """Return the answers about every tile, after writing all of them to `store`.

    Raises:
        JudgeError: if the judge fails; what it has answered is kept.
    """
    said = dict(_stored(exam, sorted(store.parent.parent.glob(f"*/{STORE}"))))
    if said:
        log.info("%d of %d images have stored answers", len(said), len(exam.tiles))
    # A line that an interruption cut short must not be continued: keep whole tiles only.
    kept = [t for t in exam.tiles if (t.item_id, t.number) in said]
    write_atomic(store, "".join(_lines(exam, t, said[t.item_id, t.number]) for t in kept))
    left = [t for t in exam.tiles if (t.item_id, t.number) not in said]
    with (
        store.open("a", encoding="utf-8") as file,
        progress("evaluate", total=len(exam.tiles), done=len(kept)) as bar,
    ):
        for tile in left:
            answers = _interview(exam, tile)
            file.write(_lines(exam, tile, answers))
            file.flush()
            said[tile.item_id, tile.number] = answers
            bar.update()
    return said


def _interview(exam: Exam, tile: Tile) -> dict[int, Answer]:
    """Return the judge's answers about one tile by question number."""
    questions = exam.table.items[tile.item_id]
    asked = [Asked(tile.item_id, tile.number, q.number, q.text, q.statement) for q in questions]
    answers = exam.judge.answer(tile.read(exam.root), asked)
    if len(answers) != len(asked):
        raise JudgeError(
            f"{exam.judge.name} gave {len(answers)} answers to {len(asked)} questions about "
            f"{tile.path}"
        )
    return {q.number: answer for q, answer in zip(questions, answers, strict=True)}


def _lines(exam: Exam, tile: Tile, answers: Mapping[int, Answer]) -> str:
    """Return one line of JSON per answer about a tile."""
    records = (
        {
            "item_id": tile.item_id,
            "tile": tile.number,
            "question_id": q.number,
            "question": q.text,
            **asdict(answers[q.number]),
            "judge": exam.examiner,
            "sha256": tile.sha256,
        }
        for q in exam.table.items[tile.item_id]
    )
    return "".join(json.dumps(record) + "\n" for record in records)


def _stored(exam: Exam, stores: Sequence[Path]) -> Iterator[tuple[Place, dict[int, Answer]]]:
    """Yield the tiles whose every question this judge has answered about the same pixels."""
    found = {
        (r["item_id"], r["tile"], r["sha256"], r["question_id"], r["question"]): Answer(
            r["answer"], r["p_yes"]
        )
        for store in stores
        for r in _records(store)
        if r["judge"] == exam.examiner
    }
    for t in exam.tiles:
        questions = exam.table.items[t.item_id]
        keys = {q.number: (t.item_id, t.number, t.sha256, q.number, q.text) for q in questions}
        if all(key in found for key in keys.values()):
            yield (t.item_id, t.number), {number: found[key] for number, key in keys.items()}


def _records(store: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a store."""
    for line in store.read_text(encoding="utf-8").split("\n"):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def read_rival(against: str, exam: Exam) -> Answers:
    """Return the answers of the evaluation to compare with.

    Raises:
        ValueError: if it has not finished, another judge answered, or other questions were asked.
    """
    folder = Path(against)
    with suppress(FileNotFoundError):
        folder = resolve_path(against)
    if not (folder / "DONE").is_file() or not (folder / STORE).is_file():
        raise ValueError(f"eval.against={against} is no finished evaluation of this kind")
    asked = {(q.item_id, q.number): q.text for q in exam.table.rows}
    found: dict[str, dict[int, dict[int, str]]] = {}
    for record in _records(folder / STORE):
        if record["judge"] != exam.examiner:
            raise ValueError(
                f"eval.against={against} was judged by {record['judge']}, this by {exam.examiner}; "
                "scores of different judges do not compare"
            )
        item_id, number = record["item_id"], record["question_id"]
        if asked.get((item_id, number)) != record["question"]:
            raise ValueError(
                f"eval.against={against} was asked other questions than eval.questions holds: "
                f"number {number} of item {item_id}"
            )
        tiles = found.setdefault(item_id, {})
        tiles.setdefault(record["tile"], {})[record["question_id"]] = record["answer"]
    return {item_id: [tiles[n] for n in sorted(tiles)] for item_id, tiles in found.items()}


def texts(said: Said) -> Answers:
    """Return what was answered by item, tile and question."""
    found: dict[str, list[dict[int, str]]] = {}
    for item_id, tile in sorted(said):
        answers = {number: answer.answer for number, answer in said[item_id, tile].items()}
        found.setdefault(item_id, []).append(answers)
    return found
