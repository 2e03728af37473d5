"""Which devices and processes a training run uses, from `trainer` and from how it was started."""

import logging
import os
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

log = logging.getLogger(__name__)


def device_arguments(trainer: DictConfig) -> dict[str, Any]:
    """Return Lightning's accelerator, devices, num_nodes, strategy and precision.

    Under torchrun its process counts replace the configured ones. Raises ValueError for several
    processes without trainer=ddp, and for a GPU that is not there.
    """
    options = OmegaConf.to_container(trainer, resolve=True)
    started = int(os.environ.get("WORLD_SIZE", 1))
    if options["strategy"] == "ddp" and "TORCHELASTIC_RUN_ID" in os.environ:
        options["devices"] = int(os.environ["LOCAL_WORLD_SIZE"])
        options["num_nodes"] = started // options["devices"]
    elif started > options["devices"] * options["num_nodes"]:
        raise ValueError(f"{started} processes were started for one device; add trainer=ddp")
    cuda = torch.cuda.is_available()
    if options["accelerator"] == "gpu" and not cuda:
        raise ValueError("trainer.accelerator=gpu, but torch finds no CUDA device; use trainer=cpu")
    if options["accelerator"] == "auto":
        options["accelerator"] = "gpu" if cuda else "cpu"
    if options["precision"] == "auto":
        options["precision"] = "bf16-mixed" if options["accelerator"] == "gpu" else "32-true"
    return options


def claim_device(accelerator: str) -> str:
    """Return `cuda` or `cpu` for this process's backbone; on GPUs select this process's own."""
    if accelerator == "gpu":
        rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0
        torch.cuda.set_device(int(rank))
        return "cuda"
    if torch.cuda.is_available():
        log.warning("training on the CPU although CUDA is present; add trainer=gpu")
    return "cpu"
