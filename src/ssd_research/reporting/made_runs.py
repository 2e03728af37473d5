"""Finished generate runs, told apart by what was configured and what they drafted with."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from ssd_research.grid import TokenGrid
from ssd_research.reporting.cells import read_config, read_json
from ssd_research.runs import file_digest, heads_folder

# What two configurations must share for their generate runs to be the same.
RESULT_KEYS = (
    "model.name",
    "model.backbone",
    "prompts",
    "selection",
    "images_per_prompt",
    "sampling",
    "seed",
)
# `ssd` where r=2 is the default and `ssd r=2` are one decoder: settings in force on a grid tell.
ANY_GRID = TokenGrid(24, 24, end_of_row=True)


@dataclass(frozen=True)
class MadeRun:
    """The configuration and the identity of a finished generate run."""

    config: DictConfig
    identity: Mapping[str, Any]

    def computed_as(self, cfg: DictConfig) -> bool:
        """Return whether device and dtype are those of `cfg`, where it names any."""
        asked = {key: cfg.runtime[key] for key in ("device", "dtype")}
        return all(v in ("auto", self.identity.get(key)) for key, v in asked.items())

    def drafted_as(self, cfg: DictConfig) -> bool:
        """Return whether the drafts, if any, came from the heads that `cfg` names."""
        if self.identity.get("heads") is None:
            return True
        weights = heads_file(cfg)
        if weights is None:
            return self.config.heads.path == cfg.heads.path
        return self.identity["heads"] == _digest(weights, weights.stat().st_mtime_ns)


@cache
def read_run(folder: Path) -> MadeRun:
    """Read a finished generate run, which does not change; ValueError names a broken file."""
    meta = read_json(folder / "meta.json", "identity")
    return MadeRun(read_config(folder), meta["identity"])


def heads_file(cfg: DictConfig) -> Path | None:
    """Return the weights of the heads that `heads.path` names, or None where there are none."""
    try:
        weights = heads_folder(cfg) / "heads.safetensors"
    except ValueError:
        return None
    return weights if weights.is_file() else None


@cache
def _digest(weights: Path, changed: int) -> str:
    """Return the sha256 of weights that were last changed at `changed`, read once."""
    return file_digest(weights)


def result_settings(cfg: Any) -> dict[str, Any]:
    """Return the settings of a configuration that can change its images, as plain data."""
    found = {key: OmegaConf.select(cfg, key) for key in RESULT_KEYS}
    plain = {
        key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for key, value in found.items()
    }
    decoder = hydra.utils.instantiate(cfg.decoder, _convert_="all")
    return {**plain, "decoder": (type(decoder).__name__, decoder.settings(ANY_GRID))}
