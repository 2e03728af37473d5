"""Hydra's overrides: put together for a table's cells, composed, and written as a command."""

import copy
import re
import shlex
from collections.abc import Sequence
from functools import cache

from hydra import compose
from omegaconf import DictConfig


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration under `overrides`, of which the last of a key holds."""
    return copy.deepcopy(_composed(last_of_each(overrides)))


def last_of_each(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the last override of every option."""
    return tuple({key_of(one): one for one in overrides}.values())


@cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    """Compose once: a table's cells are configured again and again, and Hydra takes its time."""
    return compose("config", overrides=list(overrides))


def key_of(override: str) -> str:
    """Return the option that an override sets."""
    return override.partition("=")[0].lstrip("+~")


def quoted(key: str, value: object) -> str:
    """Return the override that gives an option a text, whatever characters this has."""
    if re.fullmatch(r"[A-Za-z/][\w./-]*", str(value)):
        return f"{key}={value}"
    text = re.sub(r"(\\+)(?='|$)", r"\1\1", str(value)).replace("'", r"\'")
    return f"{key}='{text}'"


def command(stage: str, overrides: Sequence[str]) -> str:
    """Return a stage's command line for a shell."""
    return shlex.join(["python", "-m", f"ssd_research.{stage}", *overrides])


def decoder_overrides(text: str) -> list[str]:
    """Return Hydra's overrides for a decoder in the words of `benchmark.decoders`: `ssd r=2`."""
    name, *options = text.split()
    return [f"decoder={name}", *(f"decoder.{option}" for option in options)]
