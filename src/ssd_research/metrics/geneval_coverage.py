"""Which images of a benchmark a folder holds: nothing is missing, unknown or extra unnoticed.

Folders are known by the prompt in their metadata, and by their number only where a benchmark has a
prompt twice, so a seeded choice of prompts is scored as the part of the benchmark that it is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_research.metrics.geneval_folder import Sample
from ssd_research.prompts import Prompt


@dataclass(frozen=True)
class Coverage:
    """What a folder holds of a benchmark.

    `expected` is the benchmark's number of images, `missing` are the paths of those that the folder
    lacks, in the official layout, and `prompt_ids` gives the benchmark's id of each prompt folder
    by its number.
    """

    expected: int
    missing: tuple[str, ...]
    prompt_ids: Mapping[int, str]

    def require_whole(self, root: Path) -> None:
        """Raise FileNotFoundError if an image is missing, naming the first ones."""
        if self.missing:
            listed = ", ".join(self.missing[:3]) + (", ..." if len(self.missing) > 3 else "")
            raise FileNotFoundError(
                f"{root}: {len(self.missing)} of {self.expected} images are missing: {listed}; "
                "evaluate.allow_missing=true scores the others and prints their share"
            )


def cover(
    samples: Sequence[Sample], prompts: Sequence[Prompt], *, images_per_prompt: int | None
) -> Coverage:
    """Return what the samples cover of the benchmark's prompts, which carry GenEval's metadata.

    Without `images_per_prompt` every prompt should have as many images as the fullest one.

    Raises:
        ValueError: if a folder is none of the benchmark's, or holds more images than it should.
    """
    per_prompt = images_per_prompt
    if per_prompt is None:
        per_prompt = 1 + max(s.image_index for s in samples)
    extra = [s.path for s in samples if s.image_index >= per_prompt]
    if extra:
        raise ValueError(
            f"{len(extra)} images are more than eval.images_per_prompt={images_per_prompt}, "
            f"the first {extra[0]}"
        )
    found = {s.prompt_index: s.metadata for s in samples}
    ids = _identify(found, prompts)
    _refuse_strangers(found, ids)
    have = {(ids[s.prompt_index], s.image_index) for s in samples}
    places = [(p.id, image) for p in prompts for image in range(per_prompt)]
    missing = [f"{p}/samples/{image:04d}.png" for p, image in places if (p, image) not in have]
    return Coverage(len(places), tuple(missing), ids)


def _identify(found: Mapping[int, Mapping[str, Any]], prompts: Sequence[Prompt]) -> dict[int, str]:
    """Return the benchmark's id of every folder that it knows, each id once."""
    keys = [_key(p.metadata or {}) for p in prompts]
    # A folder under the number of its own prompt is that prompt; the others take what is left.
    ids = {
        number: prompts[number].id
        for number, metadata in found.items()
        if number < len(keys) and keys[number] == _key(metadata)
    }
    taken = set(ids.values())
    left: dict[str, list[str]] = {}
    for key, prompt in zip(keys, prompts, strict=True):
        if prompt.id not in taken:
            left.setdefault(key, []).append(prompt.id)
    for number in sorted(set(found) - set(ids)):
        same = left.get(_key(found[number]))
        if same:
            ids[number] = same.pop(0)
    return ids


def _key(metadata: Mapping[str, Any]) -> str:
    """Return what two lines of metadata share if they ask for the same images."""
    asked = [metadata.get(name) for name in ("tag", "prompt", "include")]
    return json.dumps([*asked, metadata.get("exclude", [])], sort_keys=True)


def _refuse_strangers(found: Mapping[int, Mapping[str, Any]], ids: Mapping[int, str]) -> None:
    strangers = sorted(set(found) - set(ids))
    if strangers:
        first = strangers[0]
        raise ValueError(
            f"{len(strangers)} of {len(found)} prompt folders are not in the benchmark, or once "
            f"too often, the first {first:05d} ({found[first]['prompt']!r})"
        )
