"""Command `reproduce`: make every run that a table of the paper needs, then its report.

What is finished is reused, so that the same command goes on after an interruption, or after cells
were made elsewhere: `reproduce.commands=true` lists a command for each.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from ssd_research import benchmark, distill, evaluate, generate, report, train
from ssd_research.reporting.experiment import (
    Wanted,
    asked,
    basic,
    chosen,
    common,
    composed,
    models,
    suite,
    unresolved,
    wanted,
)
from ssd_research.runs import stage_main

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> Path | None:
    """Make what `experiment=` needs at `scale=`; return the report's folder, None for commands.

    Raises:
        ValueError: if no table is chosen, or an option is the table's own.
    """
    cfg, given = chosen(cfg)
    cells = wanted(cfg, given)
    if cfg.reproduce.commands:
        Console().print("\n".join(c.command for c in cells), soft_wrap=True, highlight=False)
        return None
    for model in models(cfg, given):
        own = [cell for cell in cells if cell.model == model]
        train_heads(cfg, given, own)
        make(cfg, own)
        shared = common(cfg, given, model=model)
        if cfg.table.get("timed"):
            benchmark.run(composed([*shared, *timing(cfg, own)]))
        for options in suite(cfg).get("once", []):
            evaluate.run(composed([*shared, *options]))
    return report.run(cfg)


def train_heads(cfg: DictConfig, given: Sequence[str], cells: Sequence[Wanted]) -> None:
    """Distill once and train the heads of those cells of one model that have their own."""
    data: Path | None = None
    for cell in cells:
        if not cell.train:
            continue
        shared = [*basic(cfg, given, model=cell.model), *asked(given), f"seed={cell.seed}"]
        if data is None:
            data = distill.run(composed([*shared, *suite(cfg)["distill"]]))
        named = [f"name={cell.heads_name}", f"train.data='{data}'"]
        train.run(composed([*shared, *cell.train, *named]))


def make(cfg: DictConfig, cells: Sequence[Wanted]) -> None:
    """Generate and score the cells of one model."""
    autoregressive: dict[int, Path] = {}
    for n, cell in enumerate(cells, 1):
        log.info("%s: %s %s, cell %d of %d", cfg.name, cell.model, cell.label, n, len(cells))
        folder = generate.run(cell.config())
        scores = [list(options) for options in suite(cfg).get("scores", [])]
        if cell.decoder == "ar":
            autoregressive[cell.seed] = folder
        elif cell.seed in autoregressive:
            baseline = f"eval.baseline='{autoregressive[cell.seed]}'"
            scores += [[*options, baseline] for options in suite(cfg).get("against_ar", [])]
        for options in scores:
            evaluate.run(cell.config(*options, f"evaluate.images='{folder}'"))


def timing(cfg: DictConfig, cells: Sequence[Wanted]) -> list[str]:
    """Return the overrides of `benchmark` that time the decoders of `cells`, each once."""
    decoders = dict.fromkeys(cell.decoder for cell in cells)
    listed = ",".join(f"'{decoder}'" for decoder in decoders)
    return [*unresolved(cfg.scale.timing), f"benchmark.decoders=[{listed}]"]


def main() -> None:
    """Command line: `python -m ssd_research.reproduce experiment=table4`."""
    stage_main("config", run)


if __name__ == "__main__":
    main()
