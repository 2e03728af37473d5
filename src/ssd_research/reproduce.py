"""Command `reproduce`: make every run that a table of the paper needs, then its report.

What is finished is reused, so that the same command goes on after an interruption, or after cells
were made elsewhere: `reproduce.commands=true` lists a command for each.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from ssd_research import benchmark, distill, evaluate, generate, report, study, train
from ssd_research.paths import resolve_path
from ssd_research.reporting.experiment import (
    Wanted,
    asked_of_scores,
    asked_of_training,
    basic,
    chosen,
    common,
    models,
    suite,
    unresolved,
    wanted,
)
from ssd_research.reporting.made_runs import heads_file
from ssd_research.reporting.overrides import command, composed, key_of, quoted
from ssd_research.runs import stage_main

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> Path | None:
    """Make what `experiment=` needs at `scale=`; return the report's folder, None for commands.

    Raises:
        ValueError: if no table is chosen, an option is the table's own, or files are missing.
    """
    cfg, given = chosen(cfg)
    cells = wanted(cfg, given)
    if cfg.reproduce.commands:
        list_commands(cfg, cells)
        return None
    refuse_missing(cfg, given, cells)
    for model in models(cfg, given):
        own = [cell for cell in cells if cell.model == model]
        train_heads(cfg, given, own)
        folders = make(cfg, given, own)
        shared = common(cfg, given, model=model)
        if cfg.table.get("timed"):
            benchmark.run(composed([*shared, quoted("name", cfg.name), *timing(cfg, given, own)]))
        for options in suite(cfg).get("once", []):
            evaluate.run(composed([*shared, *options, *asked_of_scores(given)]))
        if cfg.table.get("study"):
            ask(shared, folders)
    return report.run(cfg)


def list_commands(cfg: DictConfig, cells: Sequence[Wanted]) -> None:
    """Print a command for each cell."""
    for cell in cells:
        Console().print(cell.command, soft_wrap=True, highlight=False, markup=False)
    if not cells:
        log.info("%s has no images to generate: reproduce makes all of it", cfg.name)
    if any(cell.train for cell in cells):
        log.info("the heads of these cells are trained by reproduce, without reproduce.commands")


def refuse_missing(cfg: DictConfig, given: Sequence[str], cells: Sequence[Wanted]) -> None:
    """Raise ValueError for missing heads and files before hours of work, not after.

    All that evaluates is composed too, so that an option it does not have shows here.
    """
    found = dict.fromkeys(missing_heads(cells))
    for model in models(cfg, given):
        found |= dict.fromkeys(missing_files(cfg, common(cfg, given, model=model), given))
    if found:
        raise ValueError("; ".join(found))


def missing_heads(cells: Sequence[Wanted]) -> Iterator[str]:
    """Yield a line for each model whose cells draft with heads that are not there."""
    for cell in cells:
        cfg = cell.config()
        decoder = hydra.utils.instantiate(cfg.decoder, _convert_="all")
        if decoder.needs_heads and not cell.train and heads_file(cfg) is None:
            names = f"model={cell.model} name={Path(str(cfg.heads.path or 'heads')).name}"
            yield (
                f"heads.path={cfg.heads.path} holds no draft heads of {cell.model}; run "
                f"python -m ssd_research.distill {names}, then python -m ssd_research.train {names}"
            )


def missing_files(cfg: DictConfig, shared: Sequence[str], given: Sequence[str]) -> Iterator[str]:
    """Yield a line for every file or folder of `scale.files` that is used and not there."""
    own = suite(cfg)
    kinds = [own.get(kind, []) for kind in ("scores", "against_ar", "once")]
    for options in [own.get("images", []), *(options for kind in kinds for options in kind)]:
        extra = asked_of_scores(given) if options is not own.get("images") else []
        found = composed([*shared, *options, *extra])
        for option in options:
            names = re.findall(r"\$\{scale\.files\.(\w+)\}", option)
            value: Any = OmegaConf.select(found, key_of(option)) if names else None
            for path in value.values() if OmegaConf.is_dict(value) else [value]:
                if path is not None and not is_there(str(path)):
                    yield f"{path} does not exist; name yours with scale.files.{names[0]}="


def is_there(path: str) -> bool:
    """Return whether a path exists, here or where shipped files lie."""
    try:
        return bool(resolve_path(path))
    except FileNotFoundError:
        return False


def train_heads(cfg: DictConfig, given: Sequence[str], cells: Sequence[Wanted]) -> None:
    """Distill once and train the heads of those cells of one model that have their own."""
    data: Path | None = None
    for cell in cells:
        if not cell.train:
            continue
        shared, own = [*basic(cfg, given, model=cell.model)], asked_of_training(given)
        if data is None:
            data = distill.run(composed([*shared, *suite(cfg)["distill"], *own]))
        named = [quoted("name", cell.heads_name), quoted("train.data", data)]
        train.run(composed([*shared, *own, *cell.train, *named]))


def make(cfg: DictConfig, given: Sequence[str], cells: Sequence[Wanted]) -> list[Path]:
    """Generate and score the cells of one model, and return their runs."""
    autoregressive: dict[int, Path] = {}
    folders = []
    for n, cell in enumerate(cells, 1):
        log.info("%s: %s %s, cell %d of %d", cfg.name, cell.model, cell.label, n, len(cells))
        folder = generate.run(cell.config())
        folders.append(folder)
        scores = [list(options) for options in suite(cfg).get("scores", [])]
        if cell.decoder == "ar":
            autoregressive[cell.seed] = folder
        elif cell.seed in autoregressive:
            baseline = quoted("eval.baseline", autoregressive[cell.seed])
            scores += [[*options, baseline] for options in suite(cfg).get("against_ar", [])]
        for options in scores:
            images = quoted("evaluate.images", folder)
            evaluate.run(cell.config(*options, *asked_of_scores(given), images))
    return folders


def timing(cfg: DictConfig, given: Sequence[str], cells: Sequence[Wanted]) -> list[str]:
    """Return the overrides of `benchmark` that time the decoders of `cells`, each once."""
    decoders = dict.fromkeys(cell.decoder for cell in cells)
    listed = ",".join(f"'{decoder}'" for decoder in decoders)
    own = [override for override in given if key_of(override).startswith("benchmark.")]
    return [*unresolved(cfg.scale.timing), *own, f"benchmark.decoders=[{listed}]"]


def ask(shared: Sequence[str], runs: Sequence[Path]) -> None:
    """Build the study page of two runs, and say how to analyse what people send back."""
    cfg = composed([*shared, quoted("study.a", runs[0]), quoted("study.b", runs[1])])
    folder = study.build(cfg)
    console = Console()
    lines = ("put what they send back into", f"{folder.resolve() / 'responses'}")
    for line in (*lines, "then", study_command(cfg, folder)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def study_command(cfg: DictConfig, folder: Path) -> str:
    """Return the command that analyses the responses to a study."""
    key = quoted("study.key", folder.resolve() / "key.json")
    place = [quoted("output_dir", cfg.output_dir), f"model={cfg.model.name}"]
    return command("study", ["analyse", *place, quoted("name", cfg.name), key])


def main() -> None:
    """Command line: `python -m ssd_research.reproduce experiment=table4`."""
    stage_main("config", run)


if __name__ == "__main__":
    main()
