"""Where prompts come from: lists, paths, the shapes world and hub data sets."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ssd_research.paths import resolve_path
from ssd_research.prompts import coco
from ssd_research.prompts.files import FILES, Columns, Row, read_path
from ssd_research.prompts.selection import Selection
from ssd_research.shapes import benchmark
from ssd_research.shapes.captions import caption
from ssd_research.shapes.scenes import sample_spec

ENDLESS = "shapes"
DEFAULT_PROMPTS = 60  # of a benchmark kind and of the endless source
GENERATED = ("shapes", "shapes_geneval", "shapes_dpg")
ACCEPTED = (
    f"a list of texts, a file ({' '.join(FILES)}), a folder of .txt or .parquet files, "
    f"{', '.join(GENERATED)}, or a hub data set owner/name"
)

# The mix that the tiny backbone was trained on (conf/model/tiny.yaml): kinds, share of captions
# that name every colour, share that begin with "a photo of".
SHAPES_KINDS = {
    "single_object": 0.08,
    "two_object": 0.14,
    "counting": 0.20,
    "colors": 0.08,
    "position": 0.15,
    "color_attr": 0.20,
    "dense": 0.15,
}
SHAPES_NAMED, SHAPES_PREFIX, SHAPES_PATIENCE = 0.4, 0.7, 50_000


def read_source(source: Any, selection: Selection) -> tuple[Iterable[Row], str | None]:
    """Return the rows of a source and the revision they come from (hub data sets only).

    Raises ValueError or FileNotFoundError for what is no source or cannot be read.
    """
    columns = Columns(selection.column, selection.id_column)
    if isinstance(source, Sequence) and not isinstance(source, str):
        return read_list(source), None
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"prompts={source} must be {ACCEPTED}")
    path = find_path(source)
    if path is not None and coco.is_caption_file(path):
        return coco.rows(path, seed=selection.caption_seed), None
    if path is not None:
        return read_path(path, columns), None
    if source in GENERATED:
        return read_generated(source, selection), None
    if is_hub_id(source):
        return read_hub(source, columns, split=selection.split, revision=selection.revision)
    if "/" in source or source.endswith(FILES):
        raise FileNotFoundError(f"prompts={source} does not exist; accepted: {ACCEPTED}")
    raise ValueError(f"prompts={source} is not {ACCEPTED}; a single text is prompts=['{source}']")


def read_list(texts: Sequence[Any]) -> Iterator[Row]:
    """Yield the prompts of a list given in the configuration."""
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"prompts[{index}]={text} is not a text; quote it")
        yield Row(text)


def is_hub_id(source: str) -> bool:
    """Say whether `source` can only be a hub data set: owner/name without a file's ending."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source)) and not source.endswith(FILES)


def find_path(source: str) -> Path | None:
    """Return the file or folder that `source` names, or None where there is none."""
    if source in GENERATED:
        return None
    try:
        return resolve_path(source)
    except (FileNotFoundError, OSError):
        return None


def read_generated(source: str, selection: Selection) -> Iterator[Row]:
    """Return the rows of a generated source."""
    if source == "shapes_geneval":
        return shapes_geneval(selection.per_kind or DEFAULT_PROMPTS)
    if source == "shapes_dpg":
        return shapes_dpg(selection.limit or DEFAULT_PROMPTS)
    return shapes_captions(selection.seed)


def shapes_captions(seed: int) -> Iterator[Row]:
    """Yield distinct captions of the shapes world; draw n is a function of (seed, n).

    There are over a million; the source ends when a long row of draws brings nothing new.
    """
    kinds, weights = list(SHAPES_KINDS), list(SHAPES_KINDS.values())
    seen: set[str] = set()
    newest = 0
    for index in count():
        rng = np.random.default_rng([seed, index])
        kind = kinds[int(rng.choice(len(kinds), p=weights))]
        spec = sample_spec(kind, rng, name_everything=bool(rng.random() < SHAPES_NAMED))
        text = caption(spec, prefix=bool(rng.random() < SHAPES_PREFIX))
        if text not in seen:
            seen.add(text)
            newest = index
            yield Row(text)
        elif index - newest > SHAPES_PATIENCE:
            return


def shapes_geneval(per_kind: int) -> Iterator[Row]:
    """Yield the prompts of the shapes world's GenEval, with their index as id and metadata."""
    for index, line in enumerate(benchmark.geneval_metadata(per_kind=per_kind)):
        yield Row(line["prompt"], f"{index:05d}", line)


def shapes_dpg(prompts: int) -> Iterator[Row]:
    """Yield the prompts of the shapes world's DPG-Bench, with the item id as id."""
    texts = {row["item_id"]: row["text"] for row in benchmark.dpg_rows(prompts=prompts)}
    for item_id, text in texts.items():
        yield Row(text, item_id, {"item_id": item_id, "prompt": text})


def read_hub(
    name: str, columns: Columns, *, split: str, revision: str | None
) -> tuple[Iterator[Row], str | None]:
    """Return the rows of a hub data set and the commit they come from, if it can be told.

    Raises ValueError where the data set, its split or its columns cannot be had.
    """
    from datasets import load_dataset  # takes a second to import

    try:
        data = load_dataset(name, split=split, revision=revision)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"prompts={name} is no local path, and the hub data set cannot be loaded ({reason})"
        ) from error
    columns.row(dict.fromkeys(data.column_names, ""), f"data set {name}")
    data = data.select_columns(list(filter(None, columns)))
    rows = (columns.row(r, f"data set {name} row {n}") for n, r in enumerate(data, 1))
    return rows, _commit(data.info.download_checksums)


def _commit(checksums: Mapping[str, Any] | None) -> str | None:
    """Return the commit in the addresses a data set was downloaded from: `hf://.../name@commit/...`."""
    found = (re.search(r"@([0-9a-f]{40})/", url) for url in checksums or ())
    return next((match.group(1) for match in found if match), None)
