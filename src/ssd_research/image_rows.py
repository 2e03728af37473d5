"""`images.parquet` of a generate run: one row per image, gathered batch by batch.

Each batch leaves a file in `parts/` once its pictures are written, so a killed run loses at most
the batch under way, whatever batch size resumes it.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from ssd_research.backbones.meter import Drafting, Generation, Work
from ssd_research.runs import write_atomic
from ssd_research.workload import Task

HEADS: tuple[Drafting, ...] = get_args(Drafting)
PHASES = ("prefill", "draft", "verify", "commit", "total")
TABLE = "images.parquet"

SCHEMA = pa.schema(
    [
        ("prompt_index", pa.int32()),
        ("image_index", pa.int32()),
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("path", pa.string()),
        ("sample_key", pa.string()),  # an unsigned 64-bit integer
        ("seed", pa.int64()),
        ("batch_size", pa.int32()),  # images decoded together with this one
        ("nfe", pa.int32()),
        ("tokens", pa.int32()),
        # What follows is described at `backbones.meter.Work`.
        ("streams", pa.int32()),
        ("prompt_tokens", pa.int32()),
        ("attended", pa.int64()),
        *[(f"head_tokens_{kind}", pa.int64()) for kind in HEADS],
        ("eagle_attended", pa.int64()),
        *[(f"seconds_{phase}", pa.float64()) for phase in PHASES],  # of the whole batch
        ("drafted", pa.int32()),
        ("accepted", pa.int32()),
        ("rounds", pa.string()),  # JSON: [[stage, round, drafted, accepted], ...]
        ("peak_memory_bytes", pa.int64()),
        ("codes", pa.list_(pa.int32())),
    ]
)


def image_path(task: Task) -> str:
    """Return the path of a task's picture below `images/`, as GenEval's scorer expects it."""
    return f"{task.prompt_index:05d}/samples/{task.image_index:04d}.png"


def rows_of(batch: Sequence[Task], generation: Generation, *, seed: int) -> list[dict[str, Any]]:
    """Return one row per image of a decoded batch."""
    shared = {
        "seed": seed,
        "batch_size": len(batch),
        "peak_memory_bytes": generation.peak_memory_bytes,
        **{f"seconds_{phase}": generation.seconds.get(phase, 0.0) for phase in PHASES},
    }
    return [
        {
            **shared,
            **_acceptance(generation, row),
            **_work(generation.work, row),
            "nfe": generation.nfe[row],
            "tokens": generation.tokens[row],
            "prompt_index": task.prompt_index,
            "image_index": task.image_index,
            "prompt_id": task.prompt.id,
            "prompt": task.prompt.text,
            "path": image_path(task),
            "sample_key": str(task.key),
            "codes": generation.codes[row].tolist(),
        }
        for row, task in enumerate(batch)
    ]


def _work(work: Work, row: int) -> dict[str, int]:
    """Return the work on one image of the batch."""
    none = [0] * len(work.attended)
    return {
        "streams": work.streams,
        "prompt_tokens": work.prompt_tokens[row],
        "attended": work.attended[row],
        "eagle_attended": work.eagle_attended[row],
        **{f"head_tokens_{kind}": work.head_tokens.get(kind, none)[row] for kind in HEADS},
    }


def _acceptance(generation: Generation, row: int) -> dict[str, Any]:
    """Return what one image of the batch drafted and accepted, in all and by round."""
    rounds = [
        [entry["stage"], entry["round"], entry["drafted"][row], entry["accepted"][row]]
        for entry in generation.rounds
    ]
    return {
        "drafted": sum(drafted for *_, drafted, _ in rounds),
        "accepted": sum(accepted for *_, accepted in rounds),
        "rounds": json.dumps(rounds),
    }


def acceptance_rate(rounds: Iterable[Sequence[Any]]) -> float | None:
    """Return accepted / drafted over rounds [stage, number, drafted, accepted]; None without any.

    Row 0 of SSD (stage `horizontal`) is left out, as in the paper's Tables 14-16, where the rate is
    undefined at r = 0.
    """
    counted = [entry for entry in rounds if entry[0] != "horizontal"]
    drafted = sum(entry[2] for entry in counted)
    return sum(entry[3] for entry in counted) / drafted if drafted else None


def write_part(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows of one batch to `parts/`, named by its first image."""
    first = f"{rows[0]['prompt_index']:05d}-{rows[0]['image_index']:04d}"
    (folder / "parts").mkdir(exist_ok=True)
    _write(folder / "parts" / f"{first}.parquet", pa.Table.from_pylist(list(rows), SCHEMA))


def read_rows(folder: Path) -> pa.Table:
    """Return the rows of every image decoded so far, in order.

    Columns that an older version did not write are null.
    """
    paths = [p for p in (folder / TABLE,) if p.exists()]
    paths += sorted((folder / "parts").glob("*.parquet"))
    tables = [SCHEMA.empty_table(), *map(pq.read_table, paths)]
    table = pa.concat_tables(tables, promote_options="default")
    # After a kill between the two steps of `merge` a row is in the table and in its part.
    places = list(
        zip(*(table[k].to_pylist() for k in ("prompt_index", "image_index")), strict=True)
    )
    last = {place: row for row, place in enumerate(places)}
    return table.take(pa.array([last[place] for place in sorted(last)], pa.int64()))


def merge(folder: Path) -> pa.Table:
    """Write `images.parquet` from the parts, remove them, and return the table."""
    table = read_rows(folder)
    _write(folder / TABLE, table)
    for path in (folder / "parts").glob("*.parquet"):
        path.unlink()
    if (folder / "parts").is_dir():
        (folder / "parts").rmdir()
    return table


def _write(path: Path, table: pa.Table) -> None:
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    write_atomic(path, buffer.getvalue().to_pybytes())
