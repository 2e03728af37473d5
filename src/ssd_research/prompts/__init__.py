"""Prompts: a source, cleaned, selected by a seeded hash of the text, with a manifest.

The hash makes a subset independent of the order of files and rows. Held-out prompts come first in
that order, so they are the same whatever the limit, and no text is both held out and selected.
"""

import hashlib
import heapq
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ssd_research.prompts.files import Row
from ssd_research.prompts.selection import Selection, clean, drop_reason, plain, text_hash
from ssd_research.prompts.sources import DEFAULT_PROMPTS, ENDLESS, read_source

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A prompt: a stable id (noise is keyed by it), its text, and its benchmark metadata if any.

    Where the source names no id it is the index of a benchmark's prompt, else a hash of the text.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class PromptSet:
    """The prompts to use, those set aside, and the record of how they came about."""

    prompts: tuple[Prompt, ...]
    set_aside: tuple[Prompt, ...]
    manifest: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        """The sha256 of ids, texts and metadata in order."""
        return self.manifest["sha256"]


def load_prompts(source: Any, selection: Selection | Mapping[str, Any]) -> list[Prompt]:
    """Return the selected prompts of a source.

    `source` is a list of texts, a path, a generated source or a hub data set (`sources.ACCEPTED`).
    Raises ValueError or FileNotFoundError, in one line, for anything missing, empty or malformed.
    """
    return list(select_prompts(source, selection).prompts)


def select_prompts(source: Any, selection: Selection | Mapping[str, Any]) -> PromptSet:
    """Return the selected prompts of a source with the held-out ones and the manifest."""
    if not isinstance(selection, Selection):
        selection = Selection.of(selection)
    source = plain(source)
    name = source if isinstance(source, str) else "list"
    rows, revision = read_source(source, selection)
    counts: Counter[str] = Counter()
    kept = cleaned(rows, selection, counts)
    aside, others = _split(kept, selection, endless=source == ENDLESS)
    used = aside[: selection.limit] if selection.held_out else others
    _check(name, [*aside, *others], used, selection=selection, counts=counts)
    manifest = {
        "source": name,
        "revision": revision,
        "columns": {"text": selection.column, "id": selection.id_column},
        "seed": selection.seed,
        "counts": {**counts, "held_out": len(aside), "selected": len(used)},
        "sha256": list_digest(used),
        "held_out_sha256": list_digest(aside),
    }
    return PromptSet(tuple(used), tuple(aside), manifest)


def cleaned(rows: Iterable[Row], selection: Selection, counts: Counter[str]) -> Iterator[Prompt]:
    """Yield the prompts that pass the filters, counting in `counts` what each filter drops.

    Benchmark prompts, which carry metadata, are never dropped or cut: a score is over all of them.
    Of texts that differ only in upper and lower case the first is kept.
    """
    seen: set[int] = set()
    for row in rows:
        counts["read"] += 1
        benchmark = row.metadata is not None
        text = clean(row.text, strip_flags=selection.strip_flags and not benchmark)
        key = text_hash(text, seed=0)
        reason = None if benchmark else drop_reason(text, selection, duplicate=key in seen)
        counts[reason or "kept"] += 1
        if reason is None:
            seen.add(key)
            fallback = f"{counts['read'] - 1:05d}" if benchmark else _digest(text)[:16]
            yield Prompt(row.id or fallback, text, row.metadata)


def _split(
    prompts: Iterator[Prompt], selection: Selection, *, endless: bool
) -> tuple[list[Prompt], list[Prompt]]:
    """Return (set aside, selected); without a limit the selected ones keep the source's order."""
    held, limit = selection.holdout, selection.limit
    if endless:
        # Already in random order, and a longer list begins with the shorter one.
        pool = list(islice(prompts, held + (limit or DEFAULT_PROMPTS)))
        return pool[:held], pool[held:]

    def rank(prompt: Prompt) -> int:
        return text_hash(prompt.text, seed=selection.seed)

    if limit is not None:
        pool = heapq.nsmallest(held + limit, prompts, key=rank)
        return pool[:held], pool[held:]
    pool = list(prompts)
    aside = heapq.nsmallest(held, range(len(pool)), key=lambda n: rank(pool[n]))
    others = sorted(set(range(len(pool))).difference(aside))
    return [pool[n] for n in aside], [pool[n] for n in others]


def _check(
    name: str,
    found: Iterable[Prompt],
    used: Sequence[Prompt],
    *,
    selection: Selection,
    counts: Mapping[str, int],
) -> None:
    """Raise ValueError where nothing is left or ids repeat; warn where there are too few."""
    if not counts["kept"]:
        dropped = ", ".join(f"{n} {why}" for why, n in counts.items() if why != "read")
        detail = f" (dropped: {dropped})" if dropped else ""
        raise ValueError(f"prompts={name} holds no prompts{detail}")
    if not used:
        raise ValueError(
            f"holdout={selection.holdout} sets aside all {counts['kept']} prompts of {name}"
        )
    twice = [i for i, n in Counter(p.id for p in found).items() if n > 1]
    if twice:
        raise ValueError(f"prompts={name}: the id {twice[0]!r} names two prompts; ids must differ")
    if selection.limit is not None and len(used) < selection.limit:
        log.warning("%s has %d prompts to select, not limit=%d", name, len(used), selection.limit)


def _digest(value: Any) -> str:
    """Return the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def list_digest(prompts: Iterable[Prompt]) -> str:
    """Return the sha256 of the ids, texts and metadata of prompts, in order."""
    return _digest([[p.id, p.text, p.metadata] for p in prompts])
