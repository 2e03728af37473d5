"""The words of a failed command: one line that names the option and what it accepts."""

import difflib
import re
import sys

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ssd_research.paths import conf_dir

ONE_IMAGE = "one image at a time does not fit: try runtime.dtype=bfloat16, or another device"
BATCH_OPTIONS = {
    "train": "train.batch_size",
    "benchmark": "benchmark.batch_sizes",
    "pretrain": "model.pretrain.lm.batch_size",
}
EXPECTED = (ValueError, FileNotFoundError, PermissionError, NotADirectoryError)


class StageError(Exception):
    """One cell of a sweep failed and its line has been written."""


def explain(error: BaseException, config_name: str) -> str | None:
    """Return one line for an error that the user can mend, or None for a defect."""
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error)
    if isinstance(error, ConfigCompositionException):
        return _composition(error, config_name)
    if isinstance(error, InstantiationException) and isinstance(error.__cause__, EXPECTED):
        return one_line(error.__cause__)
    if isinstance(error, (HydraException, OmegaConfBaseException, *EXPECTED)):
        return one_line(error)
    return None


def out_of_memory(error: BaseException, stage: str, cfg: DictConfig) -> str | None:
    """Return one line that names the stage's batch and its option, or None for another error."""
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    if not (isinstance(error, torch.OutOfMemoryError) or on_cpu):
        return None
    memory = "memory" if on_cpu else "GPU memory"
    if stage == "check":
        return f"out of {memory}: {ONE_IMAGE}"
    option = BATCH_OPTIONS.get(stage, "batch_size")
    size = OmegaConf.select(cfg, option)
    sizes = list(size) if OmegaConf.is_list(size) else [size]
    advice = f"lower {option}"
    if max(sizes) == 1:
        advice = ONE_IMAGE
    return f"out of {memory} with {option}={size}; {advice}"


def one_line(error: BaseException) -> str:
    """Return the message of an error with its line breaks folded."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return "; ".join(s.strip() for s in str(error).splitlines() if s.strip())


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    if not group:
        return str(error).splitlines()[0]
    accepted = ", ".join(sorted(error.options or [])) or "nothing"
    return f"{group}={choice} is not known; accepted: {accepted}"


def _composition(error: ConfigCompositionException, config_name: str) -> str:
    match = re.match(r"Could not override '([^']+)'", str(error))
    if match is None:
        cause = str(error.__cause__ or "").partition("\n")[0]
        return ": ".join(filter(None, (one_line(error), cause)))
    parent, _, key = match.group(1).rpartition(".")
    accepted = _accepted_keys(parent, config_name)
    close = difflib.get_close_matches(key, accepted, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    where = f"{parent} accepts" if parent else "accepted"
    return f"unknown option {match.group(1)}{hint} ({where}: {', '.join(accepted) or 'no keys'})"


def _accepted_keys(parent: str, config_name: str) -> list[str]:
    """Return the option names under `parent` in the configuration this command composes."""
    groups = [a for a in sys.argv[1:] if (conf_dir() / a.partition("=")[0].lstrip("+~")).is_dir()]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base=None):
            cfg = compose(config_name, overrides=[g for g in groups if "=" in g and "," not in g])
        node = OmegaConf.select(cfg, parent) if parent else cfg
    except (HydraException, OmegaConfBaseException, ValueError):
        return []
    return sorted(map(str, node.keys())) if isinstance(node, DictConfig) else []
