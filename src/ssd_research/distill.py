"""Stage: let the frozen backbone paint its own training data (paper section 4).

One image per prompt, sampled autoregressively at the inference settings, kept as codes. A shard
appears whole or not at all and depends on nothing but the run's identity, so a killed run loses at
most the shard under way.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig

from ssd_research.backbones.base import Backbone
from ssd_research.decoders.autoregressive import Autoregressive
from ssd_research.prompts import PromptSet, Selection, select_prompts
from ssd_research.prompts.selection import plain
from ssd_research.runs import (
    load_backbone,
    numeric_identity,
    open_run,
    resolve_sampling,
    stage_main,
    whole_number,
    write_atomic,
)
from ssd_research.sampling import Sampling
from ssd_research.workload import Task, batches, progress, tasks

log = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("sample_key", pa.string()),  # an unsigned 64-bit integer, which not every reader can hold
        ("seed", pa.int64()),
        ("image_index", pa.int32()),
        ("codes", pa.list_(pa.int32())),
    ]
)


@dataclass(frozen=True)
class Teacher:
    """The frozen backbone with the settings under which it paints."""

    backbone: Backbone
    sampling: Sampling
    seed: int

    def paint(self, batch: Sequence[Task]) -> list[dict[str, Any]]:
        """Decode one image per task and return their rows."""
        keys = [task.key for task in batch]
        end_of_row = "folded" if self.backbone.grid.end_of_row else None
        generation = Autoregressive(end_of_row=end_of_row).decode(
            self.backbone,
            [task.prompt.text for task in batch],
            sampling=self.sampling,
            seed=self.seed,
            sample_keys=keys,
        )
        return [
            {
                "prompt_id": task.prompt.id,
                "prompt": task.prompt.text,
                "sample_key": str(key),
                "seed": self.seed,
                "image_index": task.image_index,
                "codes": codes,
            }
            for task, key, codes in zip(batch, keys, generation.codes.tolist(), strict=True)
        ]


def run(cfg: DictConfig) -> Path:
    """Distill `cfg.prompts` into Parquet shards of codes and return the run folder."""
    if cfg.decoder.name != "ar":
        raise ValueError(
            f"decoder={cfg.decoder.name}: training images are always decoded by ar; leave it out"
        )
    batch_size = whole_number(cfg, "batch_size", minimum=1)
    shard_size = whole_number(cfg, "distill.shard_size", minimum=1)
    images_per_prompt = whole_number(cfg, "images_per_prompt", minimum=1)
    chosen = select_prompts(cfg.prompts, selection(cfg))
    backbone = load_backbone(cfg)
    teacher = Teacher(backbone, resolve_sampling(cfg, backbone), whole_number(cfg, "seed"))
    backbone.check_prompts([prompt.text for prompt in chosen.prompts])
    todo = tasks(chosen.prompts, images_per_prompt)
    stage = open_run(cfg, "distill", identity(teacher, chosen, len(todo), shard_size))
    if stage.done:
        return stage.folder
    paint_shards(teacher, todo, stage.folder, shard_size=shard_size, batch_size=batch_size)
    manifest = {
        **chosen.manifest,
        "backbone": {"name": backbone.name, "fingerprint": backbone.fingerprint},
        "sampling": asdict(teacher.sampling),
        "images": len(todo),
        "shard_size": shard_size,
        "set_aside": [{"id": p.id, "prompt": p.text} for p in chosen.set_aside],
    }
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    write_atomic(stage.folder / "manifest.json", text + "\n")
    return stage.finish({"images": len(todo)})


def selection(cfg: DictConfig) -> Selection:
    """Return the selection of the training prompts: `distill.limit` and `.holdout` are defaults.

    Raises ValueError if the held-out prompts themselves are asked for.
    """
    own = plain(cfg.selection)
    if own["held_out"]:
        raise ValueError("selection.held_out=true: held-out prompts are never distilled")
    limit = whole_number(cfg, "distill.limit", minimum=1) if own["limit"] is None else own["limit"]
    holdout = own["holdout"] or whole_number(cfg, "distill.holdout")
    return Selection.of({**own, "limit": limit, "holdout": holdout})


def identity(teacher: Teacher, chosen: PromptSet, images: int, shard_size: int) -> dict[str, Any]:
    """Return everything that can change the shards."""
    return {
        **numeric_identity(teacher.backbone),
        "sampling": asdict(teacher.sampling),
        "seed": teacher.seed,
        "prompts": chosen.fingerprint,
        "held_out": chosen.manifest["held_out_sha256"],
        "images": images,
        "shard_size": shard_size,
    }


def paint_shards(
    teacher: Teacher, todo: Sequence[Task], folder: Path, *, shard_size: int, batch_size: int
) -> None:
    """Write the shards that `folder/data` lacks."""
    (folder / "data").mkdir(exist_ok=True)
    missing = [(path, part) for path, part in shards(todo, folder, shard_size) if not path.exists()]
    left = sum(len(part) for _, part in missing)
    if left < len(todo):
        log.info("distill: %d of %d images are there already", len(todo) - left, len(todo))
    with progress("distill", total=len(todo), done=len(todo) - left) as bar:
        for path, part in missing:
            rows: list[dict[str, Any]] = []
            for batch in batches(part, batch_size):
                rows += teacher.paint(batch)
                bar.update(len(batch))
            buffer = pa.BufferOutputStream()
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), buffer)
            write_atomic(path, buffer.getvalue().to_pybytes())


def shards(todo: Sequence[Task], folder: Path, size: int) -> Iterator[tuple[Path, Sequence[Task]]]:
    """Yield the path and the tasks of every shard."""
    for number, part in enumerate(batches(todo, size)):
        yield folder / "data" / f"shard-{number:05d}.parquet", part


def main() -> None:
    """Command line: `python -m ssd_research.distill model=tiny distill.limit=4096`."""
    stage_main("config", run)


if __name__ == "__main__":
    main()
