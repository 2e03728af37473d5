"""Judges that are transformers checkpoints: where they lie, which exactly, and on what they run."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ssd_research.metrics.judges.vqa import JudgeError
from ssd_research.paths import resolve_path

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KEY = "eval.judge.model"
# Of a local folder, what its answers depend on: weights, configuration, tokenizer, chat template.
SUFFIXES = ("safetensors", "bin", "json", "jinja", "model", "txt")


def place(model: str) -> str:
    """Return the local folder that `eval.judge.model` names, or the hub id it else is."""
    try:
        return str(resolve_path(model))
    except FileNotFoundError:
        return model


def version(model: str, revision: str | None, *, key: str = KEY) -> str:
    """Return what settles the weights: the hub's commit, or a hash of the files of a folder.

    Raises:
        JudgeError: if there are no such weights, or a revision is given for a local folder.
    """
    folder = Path(place(model))
    if folder.is_dir():
        if revision is not None:
            name = key.rpartition(".")[0]
            raise JudgeError(
                f"{name}.revision={revision} does nothing: {key}={model} is a local folder"
            )
        digest = hashlib.sha256()
        files = [path for suffix in SUFFIXES for path in folder.glob(f"*.{suffix}")]
        for path in sorted(files):
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
        return f"sha256:{digest.hexdigest()[:12]}"
    if re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        return str(revision)[:12]
    from huggingface_hub import hf_hub_download

    with loading(model, key=key):
        config = hf_hub_download(model, "config.json", revision=revision)
    return Path(config).parent.name[:12]  # the hub's cache keeps a folder per commit


def load(
    model_class: Any, model: str, *, revision: str | None, device: str, dtype: str
) -> tuple[Any, Any]:
    """Return a model in evaluation mode on its device, and its processor.

    Raises:
        JudgeError: if they cannot be loaded or lack weights.
        ValueError: for an unknown dtype.
    """
    from transformers import AutoProcessor

    loaded = weights(model_class, model, key=KEY, revision=revision, device=device, dtype=dtype)
    with loading(model):
        return loaded, AutoProcessor.from_pretrained(place(model), revision=revision)


def weights(
    model_class: Any,
    model: str,
    *,
    key: str,
    revision: str | None,
    device: str,
    dtype: str,
    may_lack: tuple[str, ...] = (),
) -> Any:
    """Return a model without its processor, after checking that none of its weights is missing.

    Raises:
        JudgeError: if it cannot be loaded, or lacks a weight that starts with none of `may_lack`.
        ValueError: for an unknown dtype.
    """
    from ssd_research.backbones.checkpoint import quiet

    if dtype not in DTYPES:
        name = key.rpartition(".")[0]
        raise ValueError(f"{name}.dtype={dtype} is not known; accepted: {', '.join(DTYPES)}")
    with loading(model, key=key), quiet():
        loaded, report = model_class.from_pretrained(
            place(model), revision=revision, dtype=DTYPES[dtype], output_loading_info=True
        )
    lacking = sorted(name for name in report["missing_keys"] if not name.startswith(may_lack))
    if lacking:
        raise JudgeError(f"{key}={model} lacks {len(lacking)} weights, the first {lacking[0]}")
    return loaded.to(resolve_device(device)).eval().requires_grad_(False)


def refuse_overflow(*outputs: Tensor, key: str, model: str, dtype: str) -> None:
    """Raise JudgeError if a model's outputs hold NaN or infinity, which would pass for an answer.

    Half precision overflows in some models; a comparison with NaN then simply finds nothing.
    """
    if not all(bool(output.isfinite().all()) for output in outputs):
        hint = "; its weights are spoilt" if dtype == "float32" else "; set it to float32"
        raise JudgeError(
            f"{key}={model} computes no finite numbers with {key.rpartition('.')[0]}.dtype={dtype}"
            f"{hint}"
        )


def resolve_device(device: str) -> str:
    """Return `cuda` or `cpu` for auto, the device itself otherwise."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


@contextmanager
def loading(model: str, *, key: str = KEY) -> Iterator[None]:
    """Turn what transformers raises for absent or broken weights into one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise JudgeError(
            f"{key}={model} cannot be loaded ({reason}); "
            "name a local folder with its weights, or a hub id where there is a connection"
        ) from error
