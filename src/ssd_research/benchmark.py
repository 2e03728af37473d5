"""Stage `benchmark`: decoders on the same prompts, interleaved in one process.

Seconds run from the prefill to the last code; the image decoder, which is the same for all, is left
out. Every decoder is warmed up once per batch size; the median over `benchmark.repeats` counts. In
the shapes world the same run can also say what the decoders' images are worth.
"""

import copy
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.meter import Generation
from ssd_research.decoders.base import Decoder
from ssd_research.decoders.noise import sample_key
from ssd_research.image_rows import acceptance_rate
from ssd_research.metrics import embedded
from ssd_research.metrics.geneval import Rules
from ssd_research.paths import conf_dir
from ssd_research.prompts import Prompt, load_prompts
from ssd_research.provenance import device_name, git_sha
from ssd_research.reporting.readme import publish
from ssd_research.reporting.tables import Column, filled, markdown
from ssd_research.runs import (
    heads_digest,
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
from ssd_research.workload import batches, progress

COLUMNS = (
    Column("decoder", "Decoder"),
    Column("law", "Output law"),
    Column("batch_size", "Batch"),
    Column("steps", "Steps"),
    Column("step_acceleration", "Step acceleration", suffix="×"),
    Column("seconds_per_image", "s/image", digits=3),
    Column("speedup", "Speedup", suffix="×"),
    Column("tokens", "Tokens forwarded"),
    Column("acceptance_rate", "Acceptance rate"),
    Column("peak_memory_gb", "Peak memory (GB)"),
)


QUALITY = (
    Column("nll", "NLL (nats per code)", digits=3),
    Column("geneval", "GenEval on shapes", digits=3),
    Column("accuracy", "Dense captions: facts right", digits=3),
)


@dataclass(frozen=True)
class Bench:
    """What all measurements of one run share; `heads` by the name of their kind."""

    backbone: Backbone
    heads: Mapping[str, Any]
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
            heads=self.heads[decoder.title] if decoder.needs_heads else None,
        )


def run(cfg: DictConfig) -> Path:
    """Time `benchmark.decoders` for every batch size, and return the run folder.

    Raises:
        ValueError: if a setting of `benchmark` is empty or below its least value, a decoder is not
            known, or heads are missing.
    """
    check(cfg.benchmark)
    chosen = [configured(cfg, text) for text in cfg.benchmark.decoders]
    backbone = load_backbone(cfg)
    decoders = [hydra.utils.instantiate(one.decoder, _convert_="all") for one in chosen]
    heads = {
        decoder.title: load_heads(one, backbone, **decoder.reach(backbone.grid))
        for one, decoder in zip(chosen, decoders, strict=True)
        if decoder.needs_heads
    }
    bench = Bench(backbone, heads, resolve_sampling(cfg, backbone), whole_number(cfg, "seed"))
    prompts = load_prompts(cfg.prompts, {**cfg.selection, "limit": most_prompts(cfg)})
    device = device_name(torch.device(backbone.device).type)
    identity = {
        **numeric_identity(backbone),
        "device": device,
        "git_sha": git_sha(),
        "benchmark": {k: _plain(v) for k, v in cfg.benchmark.items() if k != "readme"},
        "decoders": [decoder.settings(backbone.grid) for decoder in decoders],
        "heads": heads_digest(cfg) if heads else None,
        "prompts": [prompt.id for prompt in prompts],
        "sampling": vars(bench.sampling),
        "seed": bench.seed,
    }
    stage = open_run(cfg, "benchmark", identity)
    if not stage.done:
        rows = measure_all(bench, decoders, prompts, cfg.benchmark, device=device)
        if cfg.benchmark.quality_prompts:
            rows = with_quality(bench, decoders, rows, cfg)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomic(stage.folder / "results.jsonl", lines)
        text = table(rows, device=device, dtype=str(identity["dtype"]))
        write_atomic(stage.folder / "benchmark.md", text)
        stage.finish({"results": rows})
    text = (stage.folder / "benchmark.md").read_text(encoding="utf-8")
    Console().print(text, markup=False, soft_wrap=True)
    if cfg.benchmark.readme:
        name = "decoders" if cfg.benchmark.quality_prompts else "benchmark"
        publish(name, text, file=f"{cfg.model.name}_{name}.md", whole=text)
    return stage.folder


def configured(cfg: DictConfig, text: str) -> DictConfig:
    """Return the configuration with the decoder that `text`, as in `ssd r=2`, stands for."""
    name, *options = str(text).split()
    file = conf_dir() / "decoder" / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.yaml")))
        raise ValueError(f"benchmark.decoders: {name} is not known; accepted: {known}")
    decoder = OmegaConf.load(file)
    unknown = [one for one in options if one.partition("=")[0] not in decoder]
    if unknown:
        raise ValueError(
            f"benchmark.decoders: {name} has no option {unknown[0]}; "
            f"it accepts {', '.join(map(str, decoder))}"
        )
    other = copy.deepcopy(cfg)
    with open_dict(other):
        other.decoder = OmegaConf.merge(decoder, OmegaConf.from_dotlist(options))
    return other


def measure_all(
    bench: Bench,
    decoders: Sequence[Decoder],
    prompts: Sequence[Prompt],
    options: DictConfig,
    *,
    device: str,
) -> list[dict[str, Any]]:
    """Return the rows of every batch size."""
    rows: list[dict[str, Any]] = []
    for batch_size in options.batch_sizes:
        needed = batch_size * options.repeats
        cycled = [prompts[n % len(prompts)] for n in range(needed)]
        batches = [cycled[n : n + batch_size] for n in range(0, needed, batch_size)]
        rows += measure(bench, decoders, batches)
    return [{"device": device, **row} for row in rows]


def check(benchmark: DictConfig) -> None:
    """Raise ValueError for a list without entries or a number below its least value."""
    sizes = benchmark.batch_sizes
    if not sizes or min(sizes) < 1:
        raise ValueError(f"benchmark.batch_sizes={_plain(sizes)} needs numbers of at least 1")
    if not benchmark.decoders:
        raise ValueError("benchmark.decoders=[] needs at least one decoder, the baseline first")
    if benchmark.repeats < 1:
        raise ValueError(f"benchmark.repeats={benchmark.repeats} must be at least 1")


def most_prompts(cfg: DictConfig) -> int:
    """Return how many prompts the largest batch's repeats take, at most `selection.limit`."""
    largest = max(cfg.benchmark.batch_sizes) * cfg.benchmark.repeats
    return largest if cfg.selection.limit is None else min(largest, cfg.selection.limit)


def measure(
    bench: Bench, decoders: Sequence[Decoder], batches: Sequence[Sequence[Prompt]]
) -> list[dict[str, Any]]:
    """Return one row per decoder, compared with the first, for batches of one size.

    The repeats are interleaved (every decoder on the first batch, every decoder on the second,
    ...), so that a slower minute of the machine slows all of them.
    """
    for decoder in decoders:
        bench.decode(decoder, batches[0])
    runs: list[list[Generation]] = [[] for _ in decoders]
    for batch in batches:
        for decoder, found in zip(decoders, runs, strict=True):
            found.append(bench.decode(decoder, batch))
    baseline = summary(runs[0])
    return [
        {
            "decoder": decoder.title_with(decoder.settings(bench.backbone.grid)),
            "law": "lossless" if decoder.lossless else "lossy",
            **compared(summary(found), baseline),
        }
        for decoder, found in zip(decoders, runs, strict=True)
    ]


def summary(runs: Sequence[Generation]) -> dict[str, Any]:
    """Return the means and medians of one decoder's repeats on batches of one size."""
    batch_size = len(runs[0].codes)
    phases = sorted({phase for run in runs for phase in run.seconds} - {"total"})
    rounds = [
        (entry["stage"], entry["round"], sum(entry["drafted"]), sum(entry["accepted"]))
        for run in runs
        for entry in run.rounds
    ]
    return {
        "batch_size": batch_size,
        "steps": statistics.mean(n for run in runs for n in run.nfe),
        "tokens": statistics.mean(n for run in runs for n in run.tokens),
        "seconds_per_image": statistics.median(run.seconds["total"] for run in runs) / batch_size,
        "seconds_total": [run.seconds["total"] for run in runs],
        "seconds_per_phase": {
            phase: statistics.median(run.seconds.get(phase, 0.0) for run in runs)
            for phase in phases
        },
        "acceptance_rate": acceptance_rate(rounds),
        "peak_memory_gb": max(run.peak_memory_bytes for run in runs) / 1e9 or None,
    }


def compared(row: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """Return `row` with its ratios to the baseline's steps and seconds."""
    ratios = {
        "step_acceleration": baseline["steps"] / row["steps"],
        "speedup": baseline["seconds_per_image"] / row["seconds_per_image"],
    }
    return {**row, **ratios}


def with_quality(
    bench: Bench, decoders: Sequence[Decoder], rows: Sequence[dict[str, Any]], cfg: DictConfig
) -> list[dict[str, Any]]:
    """Return the rows with what each decoder's images of the shapes benchmarks are worth."""
    count = whole_number(cfg, "benchmark.quality_prompts", minimum=1)
    batch_size = whole_number(cfg, "batch_size", minimum=1)
    prompts = load_prompts("shapes_geneval", {**cfg.selection, "limit": None, "per_kind": count})
    prompts += load_prompts("shapes_dpg", {**cfg.selection, "limit": count})
    questions = embedded.dense_questions(count)
    found: dict[str, dict[str, Any]] = {}
    with progress("quality", total=len(decoders) * len(prompts), done=0) as bar:
        for decoder in decoders:
            codes = []
            for batch in batches(prompts, batch_size):
                codes.append(bench.decode(decoder, batch).codes)
                bar.update(len(batch))
            found[decoder.title_with(decoder.settings(bench.backbone.grid))] = embedded.score(
                bench.backbone,
                prompts,
                torch.cat(codes),
                sampling=bench.sampling,
                rules=Rules(**OmegaConf.load(conf_dir() / "eval" / "shapes_geneval.yaml").rules),
                questions=questions,
                batch_size=batch_size,
            )
    return [{**row, **found[row["decoder"]], "quality_images": len(prompts)} for row in rows]


def table(rows: Sequence[dict[str, Any]], *, device: str, dtype: str) -> str:
    """Return the results as Markdown, with what they were measured on."""
    repeats = len(rows[0]["seconds_total"])
    note = (
        f"Measured on {device}, {dtype}; ratios are to the first row of a batch size; median of "
        f"{repeats} interleaved repeats after a warm-up.\n"
    )
    if "quality_images" in rows[0]:
        note += f"Quality: {rows[0]['quality_images']} images of each decoder, the same prompts.\n"
    return f"{markdown(filled((*COLUMNS, *QUALITY), rows), rows)}\n{note}"


def _plain(value: Any) -> Any:
    return list(value) if hasattr(value, "__iter__") and not isinstance(value, str) else value


def main() -> None:
    """Command line: `python -m ssd_research.benchmark model=tiny`."""
    stage_main("config", run)


if __name__ == "__main__":
    main()
