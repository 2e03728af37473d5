"""Stage: decode images of prompts with `cfg.decoder`, in the folder layout of GenEval's scorer.

Every image's noise is keyed by its prompt and index, so an interruption changes no result, the
batch size none beyond rounding, and two decoders with one seed meet the same noise.
"""

import io
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import pyarrow as pa
import pyarrow.compute as pc
import torch
from omegaconf import DictConfig
from PIL import Image
from rich.console import Console
from rich.table import Table

from ssd_research.backbones.base import Backbone
from ssd_research.decoders.base import Decoder
from ssd_research.eagle import Drafter
from ssd_research.grid import TokenGrid
from ssd_research.image_rows import (
    acceptance_rate,
    image_path,
    merge,
    read_rows,
    rows_of,
    write_part,
)
from ssd_research.metrics.compute import HeadSizes
from ssd_research.prompts import Prompt, select_prompts
from ssd_research.runs import (
    heads_digest,
    heads_folder,
    load_backbone,
    load_heads,
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


@dataclass(frozen=True)
class Painter:
    """A decoder with the backbone, heads and settings it decodes with."""

    decoder: Decoder
    backbone: Backbone
    heads: Drafter | None
    sampling: Sampling
    seed: int

    @property
    def sizes(self) -> dict[str, Any]:
        """What compute and memory follow from, of the backbone and of what drafts."""
        drafting = HeadSizes.of(self.heads)
        return {"backbone": asdict(self.backbone.dimensions), "heads": asdict(drafting)}

    def paint(self, batch: Sequence[Task], folder: Path) -> None:
        """Decode a batch, write its pictures, then its rows."""
        generation = self.decoder.decode(
            self.backbone,
            [task.prompt.text for task in batch],
            sampling=self.sampling,
            seed=self.seed,
            sample_keys=[task.key for task in batch],
            heads=self.heads,
        )
        pictures = self.backbone.decode_images(generation.codes)
        if self.backbone.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.backbone.device)
            generation = replace(generation, peak_memory_bytes=peak)
        for task, picture in zip(batch, pictures, strict=True):
            buffer = io.BytesIO()
            Image.fromarray(picture).save(buffer, format="PNG")
            write_atomic(folder / "images" / image_path(task), buffer.getvalue())
        write_part(folder, rows_of(batch, generation, seed=self.seed))


def run(cfg: DictConfig) -> Path:
    """Decode `images_per_prompt` images of every prompt and return the run folder."""
    batch_size = whole_number(cfg, "batch_size", minimum=1)
    images_per_prompt = whole_number(cfg, "images_per_prompt", minimum=1)
    chosen = select_prompts(cfg.prompts, cfg.selection)
    painter = load_painter(cfg)
    painter.backbone.check_prompts([prompt.text for prompt in chosen.prompts])
    facts = {
        **identity(cfg, painter),
        "prompts": chosen.fingerprint,
        "images_per_prompt": images_per_prompt,
    }
    stage = open_run(cfg, "generate", facts)
    if not stage.done:
        manifest = json.dumps(dict(chosen.manifest), indent=2, ensure_ascii=False)
        write_atomic(stage.folder / "manifest.json", manifest + "\n")
        write_metadata(chosen.prompts, stage.folder)
        paint_missing(painter, tasks(chosen.prompts, images_per_prompt), stage.folder, batch_size)
        table = merge(stage.folder)
        stage.finish({**summary(table, painter.backbone.grid), "sizes": painter.sizes})
    say(cfg.decoder.name, summary(read_rows(stage.folder), painter.backbone.grid), stage.folder)
    return stage.folder


def load_painter(cfg: DictConfig) -> Painter:
    """Load what decodes; ValueError where the decoder drafts with heads that are not there."""
    seed = whole_number(cfg, "seed")
    decoder = hydra.utils.instantiate(cfg.decoder, _convert_="all")
    if decoder.needs_heads:
        heads_folder(cfg)  # a missing folder shows before a large backbone is loaded
    backbone = load_backbone(cfg)
    reach = decoder.reach(backbone.grid)
    heads = load_heads(cfg, backbone, **reach) if decoder.needs_heads else None
    return Painter(decoder, backbone, heads, resolve_sampling(cfg, backbone), seed)


def identity(cfg: DictConfig, painter: Painter) -> dict[str, Any]:
    """Return everything but the prompts that can change an image."""
    decoder = painter.decoder
    return {
        **numeric_identity(painter.backbone),
        "image_decoder": painter.backbone.image_decoder_fingerprint,
        "decoder": {"method": type(decoder).__name__, **decoder.settings(painter.backbone.grid)},
        "heads": None if painter.heads is None else heads_digest(cfg),
        "sampling": asdict(painter.sampling),
        "seed": painter.seed,
    }


def write_metadata(prompts: Sequence[Prompt], folder: Path) -> None:
    """Write each prompt's `metadata.jsonl`: a benchmark's own line, else its id and text."""
    for index, prompt in enumerate(prompts):
        place = folder / "images" / f"{index:05d}"
        (place / "samples").mkdir(parents=True, exist_ok=True)
        line = prompt.metadata or {"prompt": prompt.text, "prompt_id": prompt.id}
        write_atomic(place / "metadata.jsonl", json.dumps(line) + "\n")


def paint_missing(painter: Painter, todo: Sequence[Task], folder: Path, batch_size: int) -> None:
    """Decode the tasks of which `folder` has no rows yet."""
    there = read_rows(folder).select(["prompt_index", "image_index"]).to_pylist()
    done = {(row["prompt_index"], row["image_index"]) for row in there}
    left = [task for task in todo if task.place not in done]
    if done:
        log.info("generate: %d of %d images are there already", len(done), len(todo))
    with progress("generate", total=len(todo), done=len(todo) - len(left)) as bar:
        for batch in batches(left, batch_size):
            painter.paint(batch, folder)
            bar.update(len(batch))


def summary(table: pa.Table, grid: TokenGrid) -> dict[str, Any]:
    """Return images, steps (NFE) per image, step acceleration over AR, and seconds per image.

    AR takes one step per token; where rows end with a token of their own, the acceleration over
    AR with that token folded into its row's last step (one step per code) is named beside it.
    """
    steps = pc.mean(table["nfe"]).as_py()
    seconds = pc.sum(pc.divide(table["seconds_total"], table["batch_size"])).as_py()
    rounds = (entry for row in table["rounds"].to_pylist() for entry in json.loads(row))
    accepted = acceptance_rate(rounds)
    peak = pc.max(table["peak_memory_bytes"]).as_py()
    memory = {"peak_memory_gb": round(peak / 1e9, 2)} if peak else {}
    folded = {}
    if grid.end_of_row:
        folded = {
            "ar_steps_folded": grid.size,
            "step_acceleration_folded": round(grid.size / steps, 3),
        }
    return {
        "images": len(table),
        "steps": round(steps, 2),
        "ar_steps": grid.slots,
        "step_acceleration": round(grid.slots / steps, 3),
        **folded,
        "acceptance_rate": None if accepted is None else round(accepted, 4),
        "seconds_per_image": round(seconds / len(table), 4),
        "batch_size": pc.max(table["batch_size"]).as_py(),
        **memory,
    }


def say(decoder: str, facts: dict[str, Any], folder: Path) -> None:
    """Print the run's summary as a table, and its folder."""
    table = Table(title=f"generate: {decoder}", title_justify="left")
    for name in facts:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*("-" if value is None else str(value) for value in facts.values()))
    console = Console()
    console.print(table)
    console.print(str(folder), soft_wrap=True, highlight=False)


def main() -> None:
    """Command line: `python -m ssd_research.generate decoder=ssd prompts=shapes_geneval`."""
    stage_main("config", run)


if __name__ == "__main__":
    main()
