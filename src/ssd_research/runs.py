"""Run folders and what every stage needs before its first line of work.

A run lives in `outputs/<stage>/<model>/<name>/<run_id>/`. Its id hashes everything that can change
a result and nothing else, so the same command finds a finished run and resumes a broken one.
"""

import hashlib
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ssd_research.backbones.base import Backbone
from ssd_research.command import EXPECTED, StageError, explain, out_of_memory
from ssd_research.eagle import Drafter, EagleDrafter
from ssd_research.heads import PAPERS, DraftHeads
from ssd_research.paths import conf_dir, resolve_path
from ssd_research.provenance import device_name, git_sha, versions
from ssd_research.sampling import Sampling

log = logging.getLogger(__name__)

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


@dataclass(frozen=True)
class Run:
    """One run of one stage: its folder, and the facts that `meta.json` will hold."""

    folder: Path
    stage: str
    identity: Mapping[str, Any]
    device: str
    seed: int
    started: float = field(default_factory=time.time)

    @property
    def done(self) -> bool:
        """Whether an earlier command finished this run."""
        return (self.folder / "DONE").exists()

    def finish(self, extra: Mapping[str, Any] | None = None) -> Path:
        """Write `meta.json` with `extra` facts, then `DONE`, and return the folder."""
        now = time.time()
        meta = {
            "stage": self.stage,
            "run_id": self.folder.name,
            "identity": dict(self.identity),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "git_sha": git_sha(),
            "versions": versions(),
            "device": device_name(self.device),
            "seed": self.seed,
            "started": datetime.fromtimestamp(self.started, UTC).isoformat(timespec="seconds"),
            "seconds": round(now - self.started, 3),
            **(extra or {}),
        }
        write_atomic(self.folder / "meta.json", json.dumps(meta, indent=2, default=str) + "\n")
        write_atomic(self.folder / "DONE", "")
        log.info("%s finished: %s", self.stage, self.folder)
        return self.folder


def run_id(identity: Mapping[str, Any]) -> str:
    """Return 12 hex digits of the sha256 of `identity` as canonical JSON."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def find_run(cfg: DictConfig, stage: str, identity: Mapping[str, Any]) -> Run:
    """Return the run of `stage` for `identity`, existing or not, touching nothing."""
    root = Path(str(cfg.output_dir)).expanduser() / stage / cfg.model.name / str(cfg.name)
    folder = root / run_id(identity)
    return Run(
        folder, stage, identity, resolve_device(cfg.runtime.device), whole_number(cfg, "seed")
    )


def open_run(cfg: DictConfig, stage: str, identity: Mapping[str, Any]) -> Run:
    """Open the run folder of `stage` for `identity`, creating it where it does not exist.

    Says in the log whether the run is reused (`run.done`), resumed or new. Raises PermissionError,
    as one line that names `output_dir`, when the folder cannot be written.
    """
    run = find_run(cfg, stage, identity)
    folder = run.folder
    if run.done:
        log.info("%s: reusing the finished run %s", stage, folder)
        return run
    resumed = (folder / "config.yaml").exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    except OSError as error:
        reason = error.strerror or str(error)
        raise PermissionError(
            f"output_dir={cfg.output_dir} cannot be written ({reason}); "
            "choose another folder with output_dir=<folder>"
        ) from error
    log.info("%s: %s %s", stage, "resuming" if resumed else "writing to", folder)
    return run


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write `content` under a temporary name and rename it, so `path` is whole or absent."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def resolve_device(device: str) -> str:
    """Return `cpu` or `cuda` for runtime.device auto, cpu or cuda; ValueError if it is absent."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"runtime.device={device} is not known; accepted: auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "runtime.device=cuda, but torch finds no CUDA device; use runtime=cpu or runtime=auto"
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the dtype for runtime.dtype; auto is bfloat16 on cuda and float32 on cpu."""
    if dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"runtime.dtype={dtype} is not known; accepted: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def load_backbone(cfg: DictConfig) -> Backbone:
    """Load `cfg.model.backbone` with the device, dtype and threads of `cfg.runtime`."""
    device = resolve_device(cfg.runtime.device)
    dtype = resolve_dtype(cfg.runtime.dtype, device)
    use_threads(cfg)
    try:
        return hydra.utils.instantiate(cfg.model.backbone, device=device, dtype=dtype)
    except InstantiationException as error:
        if isinstance(error.__cause__, EXPECTED):
            raise error.__cause__ from None
        raise


def heads_folder(cfg: DictConfig) -> Path:
    """Return the folder that `heads.path` names: heads, a train run, or a folder of train runs.

    Of several train runs the newest finished one counts. ValueError says how to train heads if
    there are none.
    """
    train = f"python -m ssd_research.train model={cfg.model.name} heads={cfg.heads.name}"
    if cfg.heads.path is None:
        raise ValueError(
            f"decoder={cfg.decoder.name} drafts with heads and heads.path is null; "
            f"train them with {train}, then pass heads.path=<train run>/heads"
        )
    try:
        folder = resolve_path(cfg.heads.path)
    except FileNotFoundError as error:
        raise ValueError(
            f"heads.path={cfg.heads.path} does not exist; train heads with {train}"
        ) from error
    finished = sorted(folder.glob("*/DONE"), key=lambda done: done.stat().st_mtime)
    run = finished[-1].parent if finished else folder
    return run / "heads" if (run / "heads").is_dir() else run


def heads_digest(cfg: DictConfig) -> str:
    """Return the sha256 of the weights that `heads.path` names, which a run's identity holds."""
    return file_digest(heads_folder(cfg) / "heads.safetensors")


def file_digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_heads(
    cfg: DictConfig,
    backbone: Backbone,
    *,
    horizontal: int | None = None,
    vertical: int | None = None,
    kind: str = "spatial",
) -> Drafter:
    """Load what `heads.path` holds: draft heads, of an axis up to an offset where one is given.

    A decoder that drafts with an EAGLE drafter asks for that `kind`. What draft heads read and
    predict they say themselves; ValueError where `heads.input` and `heads.target` say otherwise.
    """
    folder = heads_folder(cfg)
    if kind == "eagle":
        return EagleDrafter.load(folder, backbone)
    heads = DraftHeads.load(folder, backbone, horizontal=horizontal, vertical=vertical)
    asked = {key: cfg.heads.get(key, value) for key, value in PAPERS.items()}
    if asked not in (PAPERS, heads.representation):
        raise ValueError(
            f"heads.path={cfg.heads.path} holds heads that predict {heads.target} from "
            f"{heads.input}, not {asked['target']} from {asked['input']}: leave heads.input and "
            "heads.target out, or name other heads"
        )
    return heads


def resolve_sampling(cfg: DictConfig, backbone: Backbone) -> Sampling:
    """Return the target distribution: `cfg.sampling`, with null meaning the model's own default."""
    chosen = {key: value for key, value in cfg.sampling.items() if value is not None}
    return replace(backbone.defaults, **chosen)


def use_threads(cfg: DictConfig) -> None:
    """Give torch the CPU threads of `runtime.threads`, or leave its own choice where it is null."""
    if cfg.runtime.threads is not None:
        torch.set_num_threads(whole_number(cfg, "runtime.threads", minimum=1))


def whole_number(cfg: DictConfig, key: str, *, minimum: int = 0) -> int:
    """Return the option `key` as an int; ValueError names it otherwise."""
    value = OmegaConf.select(cfg, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{key}={value} must be a whole number of at least {minimum}")
    return value


def numeric_identity(backbone: Backbone) -> dict[str, str]:
    """Return what of the backbone and its arithmetic can change a result, for a run's identity."""
    return {
        "backbone": backbone.fingerprint,
        "prompt_tokens": backbone.prompt_fingerprint,
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "device": torch.device(backbone.device).type,
    }


def stage_main(config_name: str, run: Callable[[DictConfig], Any]) -> None:
    """Run a stage from the command line: Hydra, then `run(cfg)`; call it from the stage's `main`.

    What the user can mend is one line on stderr and exit status 2; an interrupt is 130. Anything
    else is a defect and keeps its traceback. In a sweep the other cells still run. With
    HYDRA_FULL_ERROR=1 every error keeps its traceback.
    """
    full = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # Hydra would print several lines itself; this makes it raise, so one place words the error.
    os.environ["HYDRA_FULL_ERROR"] = "1"

    def task(cfg: DictConfig) -> None:
        try:
            run(cfg)
        except Exception as error:
            stage = run.__module__.rpartition(".")[2]
            if run.__module__ == "__main__":
                stage = Path(sys.argv[0]).stem
            message = out_of_memory(error, stage, cfg) or explain(error, config_name)
            if message is None or full:
                raise
            sys.stderr.write(f"error: {message}\n")
            if HydraConfig.get().mode == RunMode.RUN:
                sys.exit(2)
            raise StageError(message) from error

    task.__module__, task.__qualname__ = run.__module__, run.__qualname__
    try:
        hydra.main(version_base=None, config_path=str(conf_dir()), config_name=config_name)(task)()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command resumes this run\n")
        sys.exit(130)
    except StageError:
        sys.exit(2)
    except Exception as error:
        message = None if full else explain(error, config_name)
        if message is None:
            raise
        sys.stderr.write(f"error: {message}\n")
        sys.exit(2)
