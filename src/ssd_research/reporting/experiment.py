"""A table of the paper as runs: the cells it has, their configurations, and which are finished.

`experiment=table4` names the decoders of every backbone, `scale=` what their images are of and who
scores them: `paper` with the paper's backbones and benchmarks, `tiny` in the shapes world, where
the embedded backbone stands in for all of them.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ssd_research import paper
from ssd_research.paths import conf_dir
from ssd_research.reporting.made_runs import read_run, result_settings
from ssd_research.reporting.overrides import (
    command,
    composed,
    decoder_overrides,
    key_of,
    last_of_each,
)

log = logging.getLogger(__name__)

CHOICES = ("experiment", "scale", "model")
# The table says these itself: an option given beside it would be lost or make two cells one.
TABLE_SAYS = (
    "decoder",
    "prompts",
    "eval",
    "evaluate.images",
    "benchmark.decoders",
    "benchmark.batch_sizes",
    "report.generate",
    "study.action",
    "study.a",
    "study.b",
    "train.data",
)
OF_IMAGES = ("selection.", "images_per_prompt", "batch_size")  # options of a table's own images


@dataclass(frozen=True, eq=False)
class Wanted:
    """One generate run that a table needs.

    `model` is `original`, the paper's backbone, or stands in for it; `decoder` is in the words of
    `benchmark.decoders`; `overrides` configure every stage for it, on top of the defaults;
    `printed` is the paper's row, empty where the paper prints none; `train` are overrides of train
    where the cell has heads of its own, then `heads_name` is the name of that run.
    """

    model: str
    original: str
    decoder: str
    seed: int
    overrides: tuple[str, ...]
    printed: Mapping[str, paper.Value]
    train: tuple[str, ...] = ()
    heads_name: str = ""

    def config(self, *more: str) -> DictConfig:
        """Return the configuration of this cell, with `more` overrides on top."""
        return composed([*self.overrides, *more])

    @property
    def label(self) -> str:
        """Return the decoder, and how its heads were trained where they are its own."""
        return ", ".join([self.decoder, *self.train])

    @property
    def command(self) -> str:
        """Return the command that makes it."""
        return command("generate", last_of_each(self.overrides))

    def belongs_to(self, cfg: DictConfig) -> bool:
        """Return whether a run configured as `cfg` has this cell's model and seed."""
        return (cfg.model.name, cfg.seed) == (self.model, self.seed)

    def find(self) -> Path | None:
        """Return the newest finished generate run that is this cell, or None.

        What was drafted with other heads than `heads.path` holds now is not: heads trained anew do
        not inherit images. Where no heads are, as on another machine, the path counts.
        """
        cfg = self.config()
        parent = Path(str(cfg.output_dir)).expanduser() / "generate" / self.model / str(cfg.name)
        mine = result_settings(cfg)
        found = []
        for done in parent.glob("*/DONE"):
            run = read_run(done.parent)
            if result_settings(run.config) != mine or not run.computed_as(cfg):
                continue
            if run.drafted_as(cfg):
                found.append(done)
            elif run.config.heads.path == cfg.heads.path:
                log.warning("%s was made with other heads than %s", done.parent, cfg.heads.path)
        return max(found, key=lambda done: done.stat().st_mtime).parent if found else None


def chosen(cfg: DictConfig) -> tuple[DictConfig, list[str]]:
    """Return the configuration of the chosen table at a scale, and the overrides that make it.

    Without `scale=` it is `paper` where there is a CUDA device, else `tiny`, and the log says so.

    Raises:
        ValueError: if no table is chosen, or an option is the table's own.
    """
    given = list(HydraConfig.get().overrides.task)
    if cfg.table is None:
        raise ValueError(f"experiment= must name a table; accepted: {', '.join(tables())}")
    if not any(key_of(override) == "scale" for override in given):
        scale = "paper" if torch.cuda.is_available() else "tiny"
        if cfg.get("scale") is None:
            found = "finds a" if scale == "paper" else "finds no"
            log.warning("scale=%s, as torch %s CUDA device; choose with scale=", scale, found)
        given.append(f"scale={scale}")
    cfg = composed(given)
    refuse(cfg, given)
    return composed([*given, f"model={next(iter(models(cfg, given)))}"]), given


def refuse(cfg: DictConfig, given: Sequence[str]) -> None:
    """Raise ValueError for an option that the table says itself, or that it has no use for."""
    said, own = {*TABLE_SAYS}, suite(cfg)
    said |= {"seed"} if "seeds" in cfg.table else set()
    said |= {"heads.path", *map(key_of, own_training(cfg))} if "train" in cfg.table else set()
    if "selection.held_out=true" in own.get("images", []):
        said |= {"selection.holdout", "selection.held_out", "selection.seed"}  # of the training set
    unused = {"report.readme"}
    unused |= {"train.", "distill."} if "train" not in cfg.table else set()
    unused |= {"benchmark."} if not cfg.table.get("timed") else set()
    unused |= {"study."} if not cfg.table.get("study") else set()
    for key in map(key_of, given):
        if key in said or key.startswith("decoder."):
            raise ValueError(f"{key}= does nothing here: the cells of {cfg.name} say it")
        if key.startswith(tuple(unused)):
            raise ValueError(f"{key}= does nothing here: {cfg.name} has no use for it")


def own_training(cfg: DictConfig) -> list[str]:
    """Return the overrides with which the cells of a table train heads of their own."""
    return [override for options in cfg.table.get("train", []) for override in options]


def tables() -> list[str]:
    """Return the names of the experiments that are tables or figures of the paper."""
    files = (conf_dir() / "experiment").glob("*.yaml")
    names = [f.stem for f in files if "table" in OmegaConf.load(f)]
    return sorted(names, key=lambda name: (len(name), name))


def wanted(cfg: DictConfig, given: Sequence[str]) -> list[Wanted]:
    """Return the cells of `cfg.table` at `cfg.scale`, backbone by backbone in the paper's order.

    `given` are the overrides of the command line, which hold for every cell.

    Raises:
        ValueError: if `given` names a model that the table lacks.
    """
    return [
        cell
        for model in models(cfg, given)
        for seed in cfg.table.get("seeds", [cfg.seed])
        for cell in cells_of(cfg, given, model=model, seed=seed)
    ]


def cells_of(cfg: DictConfig, given: Sequence[str], *, model: str, seed: int) -> list[Wanted]:
    """Return the cells of one model and seed."""
    original, decoders = models(cfg, given)[model]
    rows = printed_rows(cfg.table.number, original, decoders)
    trained = cfg.table.get("train", [[]] * len(decoders))
    shared = [*common(cfg, given, model=model), f"seed={seed}"]
    cells = []
    for n, (decoder, row, train) in enumerate(zip(decoders, rows, trained, strict=True)):
        overrides, heads_name = [*shared, *decoder_overrides(decoder)], ""
        if train:
            heads_name = f"{cfg.name}_{n}"
            overrides += [override for override in train if override.startswith("heads.")]
            overrides.append(f"heads.path=${{output_dir}}/train/${{model.name}}/{heads_name}")
        cells.append(
            Wanted(model, original, decoder, seed, tuple(overrides), row, tuple(train), heads_name)
        )
    return cells


def common(cfg: DictConfig, given: Sequence[str], *, model: str) -> list[str]:
    """Return the overrides of everything that the table runs with a model.

    What the suite says of its images at this scale gives way to `given`.
    """
    return [*basic(cfg, given, model=model), *suite(cfg).get("images", []), *asked(given)]


def basic(cfg: DictConfig, given: Sequence[str], *, model: str) -> list[str]:
    """Return the overrides that hold for training too, which does not use the suite's images.

    Runs are named after the suite, so that the tables of one suite share their cells.
    """
    chosen = [o for o in given if key_of(o) in ("experiment", "scale")]
    return [*chosen, f"model={model}", f"name={cfg.table.suite}", *unresolved(cfg.scale.common)]


def asked(given: Sequence[str]) -> list[str]:
    """Return the overrides of the command line that every run of the table shares."""
    elsewhere = ("eval.", "eval/", "report.", "reproduce.")
    return [o for o in given if key_of(o) not in CHOICES and not key_of(o).startswith(elsewhere)]


def asked_of_training(given: Sequence[str]) -> list[str]:
    """Return those of them that are not about the table's images."""
    return [o for o in asked(given) if not key_of(o).startswith(OF_IMAGES)]


def asked_of_scores(given: Sequence[str]) -> list[str]:
    """Return the overrides of the command line that only evaluations have."""
    return [o for o in given if key_of(o).startswith(("eval.", "eval/"))]


def suite(cfg: DictConfig) -> dict[str, Any]:
    """Return what the table's cells are images of at this scale, and how they are scored."""
    return unresolved(cfg.scale.suites)[cfg.table.suite]


def unresolved(node: Any) -> Any:
    """Return overrides as they are written: `${model.name}` in them is that of the cell."""
    return OmegaConf.to_container(node, resolve=False)


def models(cfg: DictConfig, given: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
    """Return the models to run, each with the paper's backbone whose cells it has, and these.

    A scale with a stand-in runs it alone, in place of the first backbone of the table. Otherwise
    all of them run, or the one that `given` names. Raises ValueError if that is none of them.
    """
    cells = {str(model): list(found) for model, found in cfg.table.cells.items()}
    if cfg.scale.stand_in is not None:
        first = next(iter(cells))
        found = {str(cfg.scale.stand_in): (first, cells[first])}
    else:
        found = {model: (model, decoders) for model, decoders in cells.items()}
    named = next((o.removeprefix("model=") for o in given if key_of(o) == "model"), None)
    if named is not None and named not in found:
        raise ValueError(
            f"model={named} is not in {cfg.name} at scale={cfg.scale.name}; "
            f"accepted: {', '.join(found)}"
        )
    return found if named is None else {named: found[named]}


def printed_rows(
    number: int | None, model: str, decoders: Sequence[str]
) -> list[Mapping[str, paper.Value]]:
    """Return the paper's row for each of a backbone's decoders, empty where it prints none.

    A table of methods has a row for each of them, or for all but AR, which its caption has.
    """
    rows = [] if number is None else paper.table(number)
    rows = [row for row in rows if row.get("model", model) == model]
    if number == 11:  # printed by what is measured of SSD, not by method
        return [{}, {str(row["effect"]): row["relative_to_ar"] for row in rows}]
    if number == 18:  # both methods in one row
        (row,) = rows
        ssd = {"dpg": row["dpg_ssd"], "latency_acceleration": row["latency_acceleration"]}
        return [{"dpg": row["dpg_ar"], "latency_acceleration": 1.0}, ssd]
    if len(rows) == len(decoders) - 1 and decoders[0] == "ar":
        return [{}, *rows]
    return list(rows) if len(rows) == len(decoders) else [{} for _ in decoders]
