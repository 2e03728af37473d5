"""The answers of a preference study: downloaded files and the key, checked and put together."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_research.metrics.preference import Vote

FORMAT = "blind-study-responses 1"
SIDES = ("left", "right")
LONGEST = 1e9  # seconds, some 30 years; a larger number is none


@dataclass(frozen=True)
class Key:
    """What tells the methods of a study apart; `pairs` holds prompt and pictures of each pair."""

    study: str
    title: str
    seed: int
    model: str
    labels: Mapping[str, str]
    runs: Mapping[str, str]
    pairs: Mapping[str, Mapping[str, Any]]
    equal: int  # pairs of equal pictures, which the study has passed over


@dataclass(frozen=True)
class Responses:
    """One evaluator's file of answers; `missing` are the pairs without one."""

    evaluator: str
    file: Path
    votes: list[Vote]
    missing: list[str]


def read_key(path: Path) -> Key:
    """Read the `key.json` of a built study; ValueError if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        methods = content["methods"]
        return Key(
            study=content["study"],
            title=content["title"],
            seed=content["seed"],
            model=content["model"],
            labels={side: methods[side]["label"] for side in "ab"},
            runs={side: methods[side]["run"] for side in "ab"},
            pairs={
                pair: {field: shown[field] for field in ("prompt_id", "a", "b")}
                for pair, shown in content["pairs"].items()
            },
            equal=content["equal_pairs_passed_over"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no key of a study") from error


def read_responses(files: Sequence[Path], key: Key) -> list[Responses]:
    """Return every evaluator's answers, in the order of their names.

    Raises:
        ValueError: with one line per defect: a file that holds no answers, or those of another
            study; an evaluator with two files; a pair unknown or answered twice; odd pictures.
    """
    problems: list[str] = []
    owners: dict[str, Path] = {}
    found = []
    for file in files:
        content = _content(file, key)
        if isinstance(content, str):
            problems.append(content)
            continue
        first = owners.setdefault(content["evaluator"], file)
        if first != file:
            problems.append(
                f"{file.name}: {content['evaluator']} has answered in {first.name} too; "
                "keep the one that counts"
            )
        defects = list(_defects(file, content["answers"], key))
        problems += defects
        found += [] if defects else [_responses(file, content, key)]
    if problems:
        raise ValueError("\n".join(problems))
    return sorted(found, key=lambda responses: responses.evaluator)


def _content(file: Path, key: Key) -> dict[str, Any] | str:
    """Return what a file holds, or in one line why it cannot be used."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))  # editors add a mark
    except (ValueError, RecursionError):
        return f"{file.name} is no whole JSON file; download it again"
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return f"{file.name} holds no answers to a study ({FORMAT})"
    if content.get("study") != key.study:
        return f"{file.name} answers study {content.get('study')}, not {key.study}"
    evaluator, answers = content.get("evaluator"), content.get("answers")
    if not isinstance(evaluator, str) or not evaluator or not isinstance(answers, list):
        return f"{file.name} lacks its evaluator or answers"
    return content


def _defects(file: Path, answers: Sequence[Any], key: Key) -> Iterator[str]:
    """Yield one line for each answer that does not fit the study."""
    seen = set()
    for number, answer in enumerate(answers, 1):
        pair = answer.get("pair") if isinstance(answer, dict) else None
        shown = key.pairs.get(pair) if isinstance(pair, str) else None
        if shown is None:
            yield f"{file.name}: answer {number} is to pair {pair}, which is not in this study"
            continue
        if pair in seen:
            yield f"{file.name}: pair {pair} is answered twice"
        elif {str(answer.get(side)) for side in SIDES} != {shown["a"], shown["b"]}:
            yield f"{file.name}: answer {number} names other pictures than pair {pair} has"
        elif answer.get("choice") not in SIDES:
            yield f"{file.name}: answer {number} chooses {answer.get('choice')}, not left or right"
        elif not _is_time(answer.get("seconds")):
            yield f"{file.name}: answer {number} does not say how many seconds it took"
        seen.add(pair)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LONGEST  # NaN is not


def _responses(file: Path, content: Mapping[str, Any], key: Key) -> Responses:
    votes = [_vote(content["evaluator"], answer, key) for answer in content["answers"]]
    answered = {vote.pair for vote in votes}
    missing = [pair for pair in key.pairs if pair not in answered]
    return Responses(content["evaluator"], file, votes, missing)


def _vote(evaluator: str, answer: Mapping[str, Any], key: Key) -> Vote:
    shown = key.pairs[answer["pair"]]
    return Vote(
        evaluator=evaluator,
        pair=answer["pair"],
        prompt=shown["prompt_id"],
        prefers_a=answer[answer["choice"]] == shown["a"],
        a_left=answer["left"] == shown["a"],
        seconds=float(answer["seconds"]),
    )
