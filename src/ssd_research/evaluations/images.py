"""What every evaluation starts from: the images of a finished run, or a bare folder of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ssd_research.paths import resolve_path
from ssd_research.runs import write_atomic


def image_root(images: str) -> Path:
    """Return the folder of prompt folders of `evaluate.images`: a generate run or a bare folder.

    Raises:
        ValueError: if it is a run that has not finished.
        FileNotFoundError: if it does not exist.
    """
    root = resolve_path(images)
    if (root / "config.yaml").exists() and not (root / "DONE").exists():
        raise ValueError(
            f"evaluate.images={images} is an unfinished run; repeat its generate command first"
        )
    return root / "images" if (root / "images").is_dir() else root


def refuse_short_run(root: Path, count: int) -> None:
    """Raise FileNotFoundError if a generate run recorded another number of images than it holds."""
    table = root.parent / "images.parquet"
    if root.name == "images" and table.is_file():
        recorded = pq.read_metadata(table).num_rows
        if recorded != count:
            raise FileNotFoundError(f"{root} holds {count} images, {table.name} lists {recorded}")


def write_rows(rows: Sequence[Mapping[str, Any]], *, path: Path) -> None:
    """Write rows as Parquet, atomically."""
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer)
    write_atomic(path, buffer.getvalue().to_pybytes())
