"""What every evaluation starts from: the images of a finished run, or a bare folder of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig

from ssd_research.paths import resolve_path
from ssd_research.runs import write_atomic


def image_root(images: str, *, option: str = "evaluate.images") -> Path:
    """Return the folder of prompt folders of an option: a generate run or a bare folder.

    Raises:
        ValueError: if it is a run that has not finished, or a file.
        FileNotFoundError: if it does not exist.
    """
    try:
        root = resolve_path(images)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{option}={images} does not exist") from error
    if not root.is_dir():
        raise ValueError(f"{option}={images} is not a folder")
    run = root.parent if root.name == "images" else root
    if (run / "config.yaml").exists() and not (run / "DONE").exists():
        raise ValueError(
            f"{option}={images} is an unfinished run; repeat its generate command first"
        )
    return root / "images" if (root / "images").is_dir() else root


def run_of(root: Path) -> str | None:
    """Return the id of the generate run that an image root belongs to, None for a bare folder.

    It belongs to an evaluation's identity: two runs may hold the same images, as two lossless
    decoders do at top-k 1, and each needs scores of its own.
    """
    made = root.parent
    return made.name if root.name == "images" and (made / "DONE").exists() else None


def refuse_short_run(root: Path, count: int) -> None:
    """Raise FileNotFoundError if a generate run recorded another number of images than it holds."""
    table = root.parent / "images.parquet"
    if root.name == "images" and table.is_file():
        recorded = pq.read_metadata(table).num_rows
        if recorded != count:
            raise FileNotFoundError(f"{root} holds {count} images, {table.name} lists {recorded}")


def allows_missing(cfg: DictConfig) -> bool:
    """Return `evaluate.allow_missing`; ValueError unless it is true or false."""
    value = cfg.evaluate.allow_missing
    if not isinstance(value, bool):
        raise ValueError(f"evaluate.allow_missing={value} must be true or false")
    return value


def write_rows(rows: Sequence[Mapping[str, Any]], *, path: Path) -> None:
    """Write rows as Parquet, atomically."""
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer)
    write_atomic(path, buffer.getvalue().to_pybytes())
