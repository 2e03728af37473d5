"""Which prompts of a source are used: cleaning, filters, and a rank by seeded hash of the text."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import OmegaConf

_URLS = re.compile(r"^(?:<?https?://\S+\s*)+")
# Midjourney takes all from the first `--name` on as parameters; phones turn `--` into a dash.
_FLAGS = re.compile(
    r"(?:^|\s)(?:--[a-zA-Z]|—(?:ar|aspect|v|q|s|no|c|niji|seed|stylize)\b).*$", re.S
)

_LEAST = {"limit": 1, "seed": 0, "holdout": 0, "per_kind": 1, "caption_seed": 0}
_LEAST |= {"min_words": 1, "max_words": 1}
_OPTIONAL = ("limit", "id_column", "revision", "per_kind", "max_words", "caption_seed")


@dataclass(frozen=True)
class Selection:
    """Which prompts of a source are used: the options of `selection` in conf/config.yaml."""

    limit: int | None = None
    seed: int = 0
    holdout: int = 0
    held_out: bool = False
    column: str = "prompt"
    id_column: str | None = None
    split: str = "train"
    revision: str | None = None
    per_kind: int | None = None
    caption_seed: int | None = None
    min_words: int = 1
    max_words: int | None = None
    strip_flags: bool = True

    def __post_init__(self) -> None:
        if self.max_words is not None and self.max_words < self.min_words:
            raise ValueError(
                f"selection.max_words={self.max_words} is below min_words={self.min_words}"
            )
        if self.held_out and not self.holdout:
            raise ValueError("selection.held_out=true needs selection.holdout above 0")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Selection":
        """Build from a mapping or Hydra node; ValueError names an unknown or unfit option."""
        given = plain(options)
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(
                f"unknown option selection.{unknown[0]} (accepted: {', '.join(known)})"
            )
        for key, value in given.items():
            _check_option(key, value, optional=key in _OPTIONAL)
        return cls(**given)


def _check_option(key: str, value: Any, *, optional: bool) -> None:
    """Raise ValueError unless `value` is what the option `key` of `selection` accepts."""
    if value is None and optional:
        return
    if key in _LEAST:
        accepted = f"a whole number of at least {_LEAST[key]}"
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= _LEAST[key]
    elif key in ("held_out", "strip_flags"):
        accepted, fits = "true or false", isinstance(value, bool)
    else:
        accepted, fits = "a text", isinstance(value, str)
    if not fits:
        null = " or null" if optional else ""
        raise ValueError(f"selection.{key}={value} must be {accepted}{null}")


def plain(value: Any) -> Any:
    """Return a Hydra node as plain Python, anything else as it is."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def clean(text: str, *, strip_flags: bool = True) -> str:
    """Collapse white space; `strip_flags` drops Midjourney's image addresses and parameters.

    Lone surrogates, which JSON can smuggle in and no file can hold, become question marks.
    """
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    if strip_flags:
        text = _FLAGS.sub("", _URLS.sub("", text)).strip()
    return text


def drop_reason(text: str, selection: Selection, *, duplicate: bool) -> str | None:
    """Return the filter that drops a text, or None."""
    words = len(text.split())
    if not words:
        return "empty"
    if words < selection.min_words:
        return "too_short"
    if selection.max_words is not None and words > selection.max_words:
        return "too_long"
    return "duplicate" if duplicate else None


def text_hash(text: str, *, seed: int) -> int:
    """Return a 64-bit hash of a text, whatever its case, that orders texts at random by `seed`."""
    digest = hashlib.sha256(f"{seed}\0{text.casefold()}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
