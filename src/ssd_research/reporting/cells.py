"""Finished generate runs with their evaluations, found by run id: the cells of a report."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import hydra
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from ssd_research.decoders.base import Decoder

log = logging.getLogger(__name__)

SHARED = ("backbone", "sampling", "seed", "prompts", "images_per_prompt")


@dataclass(frozen=True)
class Cell:
    """One generate run: its folder, resolved configuration, `meta.json`, images and scores.

    `images` has one entry per image, without codes; `scores` one per benchmark, by its name.
    """

    folder: Path
    config: DictConfig
    meta: dict[str, Any]
    images: list[dict[str, Any]]
    scores: dict[str, dict[str, Any]]

    @cached_property
    def decoder(self) -> Decoder:
        """The decoder as it was configured."""
        return hydra.utils.instantiate(self.config.decoder, _convert_="all")

    @property
    def title(self) -> str:
        """Return the decoder's title; that of AR also says what became of end-of-row tokens."""
        return self.decoder.title_with(self.meta["identity"].get("decoder", {}))

    @property
    def source(self) -> str:
        """Return where the prompts came from."""
        prompts = self.config.prompts
        return prompts if isinstance(prompts, str) else "own prompts"

    @property
    def image_width(self) -> int:
        """Return the width of the images in pixels."""
        with Image.open(self.image_file(self.images[0])) as image:
            return image.width

    def image_file(self, row: dict[str, Any]) -> Path:
        """Return the PNG of one entry of `images`."""
        return self.folder / "images" / row["path"]

    @property
    def setting(self) -> str:
        """Return what latency depends on besides the decoder: device, dtype and batch size."""
        return f"{self.meta['device']}, {self.meta['identity']['dtype']}, batch {self.batch_size}"

    @property
    def batch_size(self) -> int:
        """How many images were decoded together; a last, smaller batch does not count."""
        return max(row["batch_size"] for row in self.images)

    @property
    def comparable(self) -> str:
        """Return what two cells must share to be compared: backbone, law p, seed and images."""
        identity = self.meta["identity"]
        return json.dumps([identity.get(key) for key in SHARED], sort_keys=True)


def find_cells(root: Path, model: str, name: str, *, folders: Sequence[str] | None) -> list[Cell]:
    """Return the cells in `folders`, or those of every finished generate run of a model and name.

    Raises:
        ValueError: if a folder is no finished generate run, or none is found.
    """
    if folders:
        runs = [Path(folder).expanduser().resolve() for folder in folders]
        for run in runs:
            if not (run / "DONE").exists() or not (run / "images.parquet").exists():
                raise ValueError(f"report.generate: {run} is not a finished generate run")
    else:
        parent = root / "generate" / model / name
        runs = sorted(p.parent.resolve() for p in parent.glob("*/DONE"))
    if not runs:
        raise ValueError(
            f"no finished generate run in {root / 'generate' / model / name}; first run "
            f"python -m ssd_research.generate model={model} name={name} decoder=ar"
        )
    return sorted(map(read_cell, runs), key=_order)


def _order(cell: Cell) -> tuple[bool, str, int, str]:
    """Return the sort key that puts AR first, then sorts by decoder and steps."""
    return cell.decoder.name != "ar", cell.decoder.name, cell.images[0]["nfe"], cell.folder.name


def read_cell(folder: Path) -> Cell:
    """Read one finished generate run and the newest evaluation of it under every benchmark.

    Raises ValueError or FileNotFoundError, which name the file, for one that is broken or gone.
    """
    found = sorted(_evaluations(folder), key=lambda pair: pair[0])
    return Cell(
        folder=folder,
        config=read_config(folder),
        meta=read_json(
            folder / "meta.json", "identity", "device", "versions", "git_sha", "started"
        ),
        images=_image_rows(folder / "images.parquet"),
        scores={scores["benchmark"]: scores for _, scores in found},
    )


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """Return the object in a run's JSON file; ValueError names a file without it or its `keys`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); make this run again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; make this run again")
    missing = [key for key in keys if key not in content]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; make this run again")
    return content


def read_config(folder: Path) -> DictConfig:
    """Return the resolved configuration of a run; ValueError if its file is broken."""
    path = folder / "config.yaml"
    try:
        config = OmegaConf.load(path)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not YAML; make this run again") from error
    if not isinstance(config, DictConfig) or "decoder" not in config:
        raise ValueError(f"{path} holds no configuration of a run; make this run again")
    return config


def _image_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's images without their codes; ValueError if the file is broken."""
    try:
        columns = [name for name in pq.read_schema(path).names if name != "codes"]
        rows = pq.read_table(path, columns=columns).to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not Parquet ({error}); make this run again") from error
    if not rows:
        raise ValueError(f"{path} lists no image; make this run again")
    return rows


def _evaluations(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (time, scores) of the finished evaluate runs whose images came from `folder`."""
    for path in folder.parents[3].glob("evaluate/*/*/*/scores.json"):
        if not (path.parent / "DONE").exists():
            continue
        scores = read_json(path, "benchmark")
        if folder.name in Path(scores.get("images", "")).parts:
            meta = read_json(path.parent / "meta.json", "started")
            yield meta["started"], {**scores, "run_id": path.parent.name}


def find_imageless(root: Path, model: str, name: str) -> dict[str, dict[str, Any]]:
    """Return the tables of evaluations of a model and name that need no images, by run id.

    Of several of one benchmark the newest counts.
    """
    newest: dict[str, tuple[str, dict[str, Any]]] = {}
    for done in sorted((root / "evaluate" / model / name).glob("*/DONE"), key=_finished):
        scores = read_json(done.parent / "scores.json", "benchmark")
        if "images" not in scores and "table" in scores:
            newest[scores["benchmark"]] = done.parent.name, scores
        elif "images" not in scores:
            log.warning("%s is of an older version, without a table: delete it", done.parent)
    return dict(newest.values())


def _finished(done: Path) -> float:
    return done.stat().st_mtime


def groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Return the cells in groups that may be compared, the largest group first."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.comparable, []).append(cell)
    return sorted(found.values(), key=len, reverse=True)
