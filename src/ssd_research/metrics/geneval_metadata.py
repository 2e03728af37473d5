"""What a line of GenEval metadata must hold for the rules to mean something on it.

Anything else would not fail: a misspelt class or relation is never found in any image, and scores 0
as if the images were bad.
"""

from collections.abc import Mapping
from typing import Any

from ssd_research.metrics.geneval import RELATIONS, TASKS


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise ValueError unless the rules can be applied to a prompt's metadata.

    Its tag must be a task; each object in include and exclude must have a class and a count of at
    least 1; a position must be a relation to an object that stands earlier in include.
    """
    if metadata["tag"] not in TASKS:
        raise ValueError(f"tag={metadata['tag']!r} is none of {', '.join(TASKS)}")
    for key in ("include", "exclude"):
        objects = metadata.get(key, [])
        if not isinstance(objects, list) or (key == "include" and not objects):
            raise ValueError(f"{key}={objects!r} is not a list of objects")
        for index, need in enumerate(objects):
            _check_object(need, f"{key}[{index}]")
            if "position" in need:
                _check_position(need["position"], key, index)


def _check_object(need: Any, where: str) -> None:
    if not isinstance(need, dict) or not isinstance(need.get("class"), str):
        raise ValueError(f"{where}={need!r} has no class")
    count = need.get("count")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{where}.count={count!r} must be a whole number of at least 1")
    if "color" in need and not isinstance(need["color"], str):
        raise ValueError(f"{where}.color={need['color']!r} is no colour; leave it out for any")


def _check_position(position: Any, key: str, index: int) -> None:
    earlier = range(index) if key == "include" else ()
    match position:
        case [str(relation), int(target)] if relation in RELATIONS and target in earlier:
            return
    raise ValueError(
        f"{key}[{index}].position={position!r} must be [relation, index]: a relation of "
        f"{', '.join(RELATIONS)}, and the index of an object that comes earlier in include"
    )
