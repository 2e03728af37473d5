"""Stage `benchmark`: AR and SSD on the same prompts, interleaved in one process.

Seconds run from the prefill to the last code; the image decoder, which is the same for all, is left
out. Every decoder is warmed up once per batch size; the median over `benchmark.repeats` counts.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.state import Generation
from ssd_research.decoders.autoregressive import END_OF_ROW, Autoregressive
from ssd_research.decoders.base import Decoder
from ssd_research.decoders.noise import sample_key
from ssd_research.decoders.spatial import SpatiallySpeculative
from ssd_research.heads import DraftHeads
from ssd_research.prompts import Prompt, load_prompts
from ssd_research.provenance import device_name, git_sha
from ssd_research.reporting.readme import publish
from ssd_research.reporting.tables import Column, filled, markdown
from ssd_research.runs import (
    load_backbone,
    load_heads,
    numeric_identity,
    open_run,
    resolve_sampling,
    stage_main,
    write_atomic,
)
from ssd_research.sampling import Sampling

COLUMNS = (
    Column("decoder", "Decoder"),
    Column("batch_size", "Batch"),
    Column("steps", "Steps"),
    Column("step_acceleration", "Step acceleration", suffix="×"),
    Column("seconds_per_image", "s/image", digits=3),
    Column("speedup", "Speedup", suffix="×"),
    Column("tokens", "Tokens forwarded"),
    Column("acceptance_rate", "Acceptance rate"),
    Column("peak_memory_gb", "Peak memory (GB)"),
)


@dataclass(frozen=True)
class Bench:
    """What all measurements of one run share."""

    backbone: Backbone
    heads: DraftHeads
    sampling: Sampling
    seed: int

    def decode(self, decoder: Decoder, prompts: Sequence[Prompt]) -> Generation:
        """Decode one image of each prompt."""
        return decoder.decode(
            self.backbone,
            [prompt.text for prompt in prompts],
            sampling=self.sampling,
            seed=self.seed,
            sample_keys=[sample_key(prompt.id, n) for n, prompt in enumerate(prompts)],
            heads=self.heads if decoder.needs_heads else None,
        )


def run(cfg: DictConfig) -> Path:
    """Time AR and SSD at `benchmark.rounds` for every batch size, and return the run folder.

    Raises:
        ValueError: if a setting of `benchmark` is empty or below its least value, or heads are
            missing.
    """
    check(cfg.benchmark)
    backbone = load_backbone(cfg)
    heads = load_heads(cfg, backbone)
    bench = Bench(backbone, heads, resolve_sampling(cfg, backbone), int(cfg.seed))
    prompts = load_prompts(cfg.prompts, {**cfg.selection, "limit": most_prompts(cfg)})
    device = device_name(torch.device(backbone.device).type)
    identity = {
        **numeric_identity(backbone),
        "device": device,
        "git_sha": git_sha(),
        "benchmark": {k: _plain(v) for k, v in cfg.benchmark.items() if k != "readme"},
        "heads": str(cfg.heads.path),
        "prompts": [prompt.id for prompt in prompts],
        "sampling": vars(bench.sampling),
        "seed": bench.seed,
    }
    stage = open_run(cfg, "benchmark", identity)
    if not stage.done:
        rows = measure_all(bench, prompts, cfg.benchmark, device=device)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomic(stage.folder / "results.jsonl", lines)
        text = table(rows, device=device, dtype=str(identity["dtype"]))
        write_atomic(stage.folder / "benchmark.md", text)
        stage.finish({"results": rows})
    text = (stage.folder / "benchmark.md").read_text(encoding="utf-8")
    Console().print(text, markup=False, soft_wrap=True)
    if cfg.benchmark.readme:
        publish("benchmark", text, file=f"{cfg.model.name}_benchmark.md", whole=text)
    return stage.folder


def measure_all(
    bench: Bench, prompts: Sequence[Prompt], options: DictConfig, *, device: str
) -> list[dict[str, Any]]:
    """Return the rows of every batch size."""
    rows: list[dict[str, Any]] = []
    for batch_size in options.batch_sizes:
        batch = [prompts[n % len(prompts)] for n in range(batch_size)]
        rows += measure(bench, batch, rounds=options.rounds, repeats=options.repeats)
    return [{"device": device, **row} for row in rows]


def check(benchmark: DictConfig) -> None:
    """Raise ValueError for a list without entries or a number below its least value."""
    for key, least in (("batch_sizes", 1), ("rounds", 0)):
        found = benchmark[key]
        if not found or min(found) < least:
            raise ValueError(f"benchmark.{key}={_plain(found)} needs numbers of at least {least}")
    if benchmark.repeats < 1:
        raise ValueError(f"benchmark.repeats={benchmark.repeats} must be at least 1")


def most_prompts(cfg: DictConfig) -> int:
    """Return how many prompts the largest batch takes, at most `selection.limit`."""
    largest = max(cfg.benchmark.batch_sizes)
    return largest if cfg.selection.limit is None else min(largest, cfg.selection.limit)


def measure(
    bench: Bench, batch: Sequence[Prompt], *, rounds: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Return one row per decoder for one batch: AR, then SSD at each number of rounds.

    Where rows end with a token, AR comes with a forward for each, as in the paper, which is what
    the ratios are to, and with that token folded into the forward of its row's last code.
    The repeats are interleaved (AR, r=0, r=1, ..., AR, r=0, ...), so that a slower minute of the
    machine slows all of them.
    """
    decoders: dict[str, Decoder] = {"AR": Autoregressive()}
    if bench.backbone.grid.end_of_row:
        decoders = {f"AR {way}": Autoregressive(end_of_row=way) for way in END_OF_ROW}
    decoders |= {f"SSD r={r}": SpatiallySpeculative(r=r) for r in rounds}
    for decoder in decoders.values():
        bench.decode(decoder, batch)
    runs: dict[str, list[Generation]] = {name: [] for name in decoders}
    for _ in range(repeats):
        for name, decoder in decoders.items():
            runs[name].append(bench.decode(decoder, batch))
    ar = summary(next(iter(runs.values())))
    return [{"decoder": name, **compared(summary(found), ar)} for name, found in runs.items()]


def summary(runs: Sequence[Generation]) -> dict[str, Any]:
    """Return the medians of one decoder's repeats on one batch."""
    first, batch_size = runs[0], len(runs[0].codes)
    phases = sorted({phase for run in runs for phase in run.seconds} - {"total"})
    return {
        "batch_size": batch_size,
        "steps": statistics.mean(first.nfe),
        "tokens": statistics.mean(first.tokens),
        "seconds_per_image": statistics.median(run.seconds["total"] for run in runs) / batch_size,
        "seconds_total": [run.seconds["total"] for run in runs],
        "seconds_per_phase": {
            phase: statistics.median(run.seconds.get(phase, 0.0) for run in runs)
            for phase in phases
        },
        "acceptance_rate": acceptance_rate(first),
        "peak_memory_gb": max(run.peak_memory_bytes for run in runs) / 1e9 or None,
    }


def acceptance_rate(run: Generation) -> float | None:
    """Return accepted / drafted tokens over the images and the rounds of all rows but the first."""
    rounds = [entry for entry in run.rounds if entry["stage"] != "horizontal"]
    drafted = sum(sum(entry["drafted"]) for entry in rounds)
    return sum(sum(entry["accepted"]) for entry in rounds) / drafted if drafted else None


def compared(row: dict[str, Any], ar: dict[str, Any]) -> dict[str, Any]:
    """Return `row` with its ratios to AR's steps and seconds."""
    ratios = {
        "step_acceleration": ar["steps"] / row["steps"],
        "speedup": ar["seconds_per_image"] / row["seconds_per_image"],
    }
    return {**row, **ratios}


def table(rows: Sequence[dict[str, Any]], *, device: str, dtype: str) -> str:
    """Return the results as Markdown, with what they were measured on."""
    repeats = len(rows[0]["seconds_total"])
    note = (
        f"Measured on {device}, {dtype}; median of {repeats} interleaved repeats after a warm-up.\n"
    )
    return f"{markdown(filled(COLUMNS, rows), rows)}\n{note}"


def _plain(value: Any) -> Any:
    return list(value) if hasattr(value, "__iter__") and not isinstance(value, str) else value


def main() -> None:
    """Command line: `python -m ssd_research.benchmark model=tiny`."""
    stage_main("config", run)


if __name__ == "__main__":
    main()
