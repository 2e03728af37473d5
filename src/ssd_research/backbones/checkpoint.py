"""Where a published checkpoint lies, and what can be wrong with it, in one clear line each."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from ssd_research.paths import resolve_path

PATTERNS = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A folder in a published layout, and the `option` of the command line that named it."""

    folder: Path
    option: str

    @classmethod
    def find(
        cls,
        path: str,
        *,
        model: str,
        key: str = "model.backbone.path",
        files: Sequence[str] = PATTERNS,
    ) -> "Checkpoint":
        """Return the local folder of `path`, or of the hub repository of that name, fetched once.

        Of a hub repository only what matches `files` is fetched. Raises FileNotFoundError, naming
        the option `key` and what to run, where there are no weights.
        """
        option = f"{key}={path}"
        hint = f"fetch the weights with scripts/download_weights.sh {model} <folder>"
        try:
            return cls(resolve_path(path), option)
        except FileNotFoundError:
            if path.count("/") != 1 or path.startswith(("checkpoints/", ".", "~")):
                raise FileNotFoundError(f"{option} does not exist; {hint}") from None
        try:
            return cls(Path(snapshot_download(path, allow_patterns=list(files))), option)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0].partition(". ")[0]
            raise FileNotFoundError(
                f"{option} is no folder and cannot be fetched from the hub ({reason}); "
                f"{hint} and pass {key}=<folder>"
            ) from error

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return config.json; FileNotFoundError or ValueError where it is absent or broken."""
        file = self.folder / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{self.option}: {self.folder} holds no config.json")
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.option}: config.json is broken: {error}") from error

    def require_family(self, family: str, *, published: str) -> None:
        """Raise ValueError unless config.json says `family`, as that of `published` does."""
        found = self.config.get("model_type")
        if found != family:
            raise ValueError(
                f"{self.option} holds a {found} model, not a {family} one in Hugging Face layout "
                f"(such as {published})"
            )

    def shards(self) -> list[Path]:
        """Return the safetensors files, each of which is there and whole.

        Raises:
            FileNotFoundError: there is none, or one that the index names is missing.
            ValueError: one is truncated or no safetensors file.
        """
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        else:
            names = sorted(file.name for file in self.folder.glob("*.safetensors"))
        if not names:
            raise FileNotFoundError(f"{self.option}: {self.folder} holds no *.safetensors weights")
        for name in names:
            if not (self.folder / name).is_file():
                raise FileNotFoundError(f"{self.option} lacks the shard {name}")
            try:
                with safe_open(self.folder / name, framework="pt"):
                    pass
            except SafetensorError as error:
                raise ValueError(f"{self.option}: broken weights in {name}: {error}") from error
        return [self.folder / name for name in names]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the checkpoint, mapped from disk and read when it is used."""
        found: dict[str, Tensor] = {}
        for shard in self.shards():
            with safe_open(shard, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return found

    def load(
        self,
        model_class: type[PreTrainedModel],
        *,
        device: str,
        dtype: torch.dtype,
        config: PreTrainedConfig | None = None,
        weights: Mapping[str, Tensor] | None = None,
        may_lack: tuple[str, ...] = (),
    ) -> PreTrainedModel:
        """Load a transformers model straight onto its device, in evaluation mode.

        `config` and `weights` replace what the folder holds. Raises ValueError for a weight that is
        missing (unless its name starts with one of `may_lack`) or of another shape.
        """
        given: dict[str, Any] = {} if config is None else {"config": config}
        place: Path | None = self.folder
        if weights is None:
            self.shards()
        else:
            place, given["state_dict"] = None, dict(weights)
        try:
            with quiet():
                model, report = model_class.from_pretrained(
                    place,
                    dtype=dtype,
                    attn_implementation="sdpa",
                    device_map={"": torch.device(device)},
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                    **given,
                )
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"{self.option}: the weights do not fit on {device} as {dtype}; "
                "try runtime.dtype=bfloat16"
            ) from error
        if report["mismatched_keys"]:
            name, found, wanted = sorted(report["mismatched_keys"])[0]
            raise ValueError(
                f"{self.option}: {name} has the shape {list(found)}, "
                f"but config.json asks for {list(wanted)}"
            )
        lacking = sorted(key for key in report["missing_keys"] if not key.startswith(may_lack))
        if lacking:
            raise ValueError(f"{self.option} lacks {len(lacking)} weights, the first {lacking[0]}")
        return model.eval()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer; FileNotFoundError where the folder holds none."""
        if not (self.folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{self.option}: {self.folder} holds no tokenizer.json")
        try:
            # Not AutoTokenizer: a class named in tokenizer_config.json may rebuild tokenizer.json.
            return PreTrainedTokenizerFast.from_pretrained(self.folder)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"{self.option}: broken tokenizer: {reason}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from listing the weights that are left out on purpose.

    Its progress bar is for terminals only.
    """
    level, bar = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity_error()
    if bar and not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()
