"""Stage: train draft heads (paper Table 6), or an EAGLE drafter, on distilled images.

`python -m ssd_research.train model=tiny` on one device; `torchrun --nproc-per-node 4 -m
ssd_research.train model=janus_pro trainer=ddp` on four. The run's `heads/` is what decoders load.
"""

import logging
import warnings
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich import get_console

from ssd_research.backbones.base import Backbone
from ssd_research.eagle import EagleDrafter
from ssd_research.heads import DTYPES, KINDS, PAPERS, DraftHeads, check_representation
from ssd_research.provenance import git_sha, versions
from ssd_research.runs import (
    Run,
    find_run,
    load_backbone,
    numeric_identity,
    open_run,
    stage_main,
    whole_number,
)
from ssd_research.training.data import DistilledImages, data_fingerprint, read_distilled, take_share
from ssd_research.training.devices import claim_device, device_arguments
from ssd_research.training.eagle import EagleTraining, check_options
from ssd_research.training.module import DrafterTraining, HeadTraining, Recipe
from ssd_research.training.persistence import (
    AtomicCheckpoints,
    LastCheckpoint,
    MetricsFile,
    fit,
    step_of,
)

log = logging.getLogger(__name__)

CHECKPOINT = Path("checkpoints", "last.ckpt")


def run(cfg: DictConfig) -> Path:
    """Train the heads of `cfg.heads` on `cfg.train.data` and return the run folder.

    Raises ValueError where the distilled data is missing, unfinished or another backbone's.
    """
    if rank_zero_only.rank:
        logging.getLogger("ssd_research").setLevel(logging.WARNING)
    _check(cfg)
    devices = device_arguments(cfg.trainer)
    device = claim_device(devices["accelerator"])
    backbone = load_backbone(OmegaConf.merge(cfg, {"runtime": {"device": device}}))
    folder = _data_folder(cfg)
    images = take_share(read_distilled(folder, backbone), cfg.train.share, seed=cfg.seed)
    data = DistilledImages(
        images,
        batch_size=cfg.train.batch_size,
        accumulate=cfg.train.accumulate,
        world_size=devices["devices"] * devices["num_nodes"],
        val_size=cfg.train.val_size,
        seed=cfg.seed,
    )
    recipe = _recipe(cfg, data)
    facts = {
        **_identity(cfg, backbone, recipe=recipe, data=data),
        "data": data_fingerprint(images),
        "precision": devices["precision"],
    }
    # Only one process writes; a finished run ends every process here, before any waits for another.
    run = (find_run if rank_zero_only.rank else open_run)(cfg, "train", facts)
    if run.done:
        return run.folder
    L.seed_everything(cfg.seed, verbose=False)
    module = _training(cfg, backbone, recipe)
    figures = _fit(cfg, run, module, data=data, devices=devices)
    if rank_zero_only.rank == 0:
        record = _provenance(backbone, facts=facts, folder=folder, figures=figures)
        module.heads.save(run.folder / "heads", record, dtype=cfg.train.storage_dtype)
        run.finish({"validation": figures, "world_size": data.world_size})
    return run.folder


def _check(cfg: DictConfig) -> None:
    """Raise ValueError for an option that would fail only after hours."""
    for key in ("epochs", "batch_size", "accumulate", "checkpoint_every"):
        whole_number(cfg, f"train.{key}", minimum=1)
    whole_number(cfg, "train.val_size")
    if cfg.heads.name not in KINDS:
        raise ValueError(f"heads.name={cfg.heads.name}; accepted: {', '.join(KINDS)}")
    if cfg.heads.name == "spatial":
        reach = [whole_number(cfg, f"heads.{axis}") for axis in ("horizontal", "vertical")]
        if sum(reach) == 0:
            raise ValueError("heads.horizontal=0 and heads.vertical=0 leave nothing to train")
        check_representation(cfg.heads.input, cfg.heads.target)
    else:
        check_options(**_kind_of_heads(cfg))
    if cfg.train.storage_dtype not in DTYPES:
        raise ValueError(
            f"train.storage_dtype={cfg.train.storage_dtype}; accepted: {', '.join(DTYPES)}"
        )


def _data_folder(cfg: DictConfig) -> Path:
    """Return `cfg.train.data`, or the newest finished distill run of this model and name."""
    if cfg.train.data is not None:
        return Path(str(cfg.train.data)).expanduser()
    root = Path(str(cfg.output_dir)).expanduser() / "distill" / cfg.model.name / str(cfg.name)
    finished = sorted(root.glob("*/DONE"), key=lambda path: path.stat().st_mtime)
    if not finished:
        raise ValueError(
            f"train.data is null and {root} holds no finished distill run; "
            f"run python -m ssd_research.distill model={cfg.model.name} first"
        )
    log.info("train.data is null; using the newest distill run %s", finished[-1].parent)
    return finished[-1].parent


def _recipe(cfg: DictConfig, data: DistilledImages) -> Recipe:
    options = OmegaConf.to_container(cfg.train, resolve=True) | {"seed": cfg.seed}
    options["betas"] = tuple(options["betas"])
    steps = data.steps_per_epoch * cfg.train.epochs
    named = {field.name for field in fields(Recipe)} & set(options)
    return Recipe(steps=steps, **{name: options[name] for name in named})


def _identity(
    cfg: DictConfig, backbone: Backbone, *, recipe: Recipe, data: DistilledImages
) -> dict[str, Any]:
    """Return what can change the heads; how a batch is spread over devices cannot."""
    settings = asdict(recipe)
    del settings["recompute_activations"]
    return {
        **numeric_identity(backbone),
        **settings,
        "epochs": cfg.train.epochs,
        "effective_batch": data.batch_size * data.world_size * data.accumulate,
        "accumulate": data.accumulate,
        "val_size": len(data.validation),
        **_unlike_the_papers(_kind_of_heads(cfg)),
        "initialisation": cfg.train.initialisation,
        "gradient_clip": cfg.train.gradient_clip,
        "storage_dtype": cfg.train.storage_dtype,
    }


def _kind_of_heads(cfg: DictConfig) -> dict[str, Any]:
    """Return the options of one kind of heads, whose names tell the kinds apart."""
    return {key: value for key, value in cfg.heads.items() if key not in ("name", "path")}


def _unlike_the_papers(options: dict[str, Any]) -> dict[str, Any]:
    """Return options without those that say that heads read and predict what the paper's do.

    The paper's heads keep the run ids of the time when there were no others.
    """
    usual = all(options.get(key, value) == value for key, value in PAPERS.items())
    return {key: value for key, value in options.items() if not (usual and key in PAPERS)}


def _training(cfg: DictConfig, backbone: Backbone, recipe: Recipe) -> DrafterTraining:
    """Return the training of new heads of the kind and sizes that `cfg.heads` asks for."""
    options = _kind_of_heads(cfg)
    start = cfg.train.initialisation
    module: DrafterTraining
    if cfg.heads.name == "eagle":
        drafter = EagleDrafter.like(backbone, initialisation=start)
        module = EagleTraining(drafter, backbone, recipe, **options)
    else:
        heads = DraftHeads(backbone.hidden_size, initialisation=start, **options)
        module = HeadTraining(heads, backbone, recipe)
    parameters = sum(p.numel() for p in module.heads.parameters())
    log.info("training heads=%s, %s parameters", cfg.heads.name, f"{parameters:,}")
    return module


def _fit(
    cfg: DictConfig,
    run: Run,
    module: DrafterTraining,
    *,
    data: DistilledImages,
    devices: dict[str, Any],
) -> dict[str, float]:
    """Train to the end, from the last checkpoint where there is one; return the last validation."""
    last = run.folder / CHECKPOINT
    resume = last if last.exists() else None
    first_step = step_of(resume)
    metrics = MetricsFile(run.folder / "metrics.csv", first_step=first_step)
    loggers: list[Logger] = [metrics]
    if "_target_" in cfg.logger:
        loggers.append(instantiate(cfg.logger, save_dir=str(run.folder)))
    trainer = L.Trainer(
        **devices,
        max_epochs=cfg.train.epochs,
        accumulate_grad_batches=cfg.train.accumulate,
        gradient_clip_val=cfg.train.gradient_clip,
        callbacks=_callbacks(cfg, run),
        logger=loggers,
        plugins=[AtomicCheckpoints()],
        default_root_dir=run.folder,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=None if len(data.validation) else 0,
        log_every_n_steps=1,
        enable_model_summary=False,
        enable_progress_bar=get_console().is_terminal,
    )
    log.info(
        "optimizer steps %d to %d, %d per epoch, effective batch %d on %d devices",
        first_step,
        module.recipe.steps,
        data.steps_per_epoch,
        data.batch_size * data.world_size * data.accumulate,
        data.world_size,
    )
    # Lightning cannot see that the batches continue from the optimizer step by themselves.
    warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
    fit(trainer, module, datamodule=data, ckpt_path=resume)
    return metrics.latest("val/")


def _callbacks(cfg: DictConfig, run: Run) -> list[Callback]:
    keep = LastCheckpoint(run.folder / CHECKPOINT, every=cfg.train.checkpoint_every)
    return [keep, RichProgressBar()] if get_console().is_terminal else [keep]


def _provenance(
    backbone: Backbone, *, facts: dict[str, Any], folder: Path, figures: dict[str, float]
) -> dict[str, Any]:
    return {
        "backbone": backbone.name,
        "fingerprint": backbone.fingerprint,
        "training": facts,
        "data": str(folder),
        "validation": figures,
        "versions": versions(),
        "git_sha": git_sha(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    """Command line entry point."""
    stage_main("config", run)


if __name__ == "__main__":
    main()
