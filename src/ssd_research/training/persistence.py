"""What a training run keeps on disk: checkpoints and metrics.csv, whole at any moment."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only


class AtomicCheckpoints(TorchCheckpointIO):
    """Checkpoints that are written beside their place and renamed, so a kill leaves the old one."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        torch.save(checkpoint, part)
        part.replace(path)


def step_of(checkpoint: Path | None) -> int:
    """Return the optimizer step of `checkpoint`, without reading its tensors; 0 for None."""
    if checkpoint is None:
        return 0
    # Only our own checkpoints come here, and the tiny backbone's hold a schedule object.
    loaded = torch.load(checkpoint, mmap=True, map_location="meta", weights_only=False)
    return loaded["global_step"]


def fit(trainer: L.Trainer, *data: Any, **options: Any) -> None:
    """Call `trainer.fit`, but let an interrupt stay one: Lightning would exit with status 1."""
    try:
        trainer.fit(*data, **options)
    except SystemExit as stopped:
        if trainer.interrupted:
            raise KeyboardInterrupt from stopped
        raise
    if trainer.interrupted:
        raise KeyboardInterrupt


class LastCheckpoint(Checkpoint):
    """last.ckpt, every `every` optimizer steps and after each epoch's validation.

    None is written between an epoch's last step and its validation, which a resumed run would skip.
    """

    def __init__(self, path: Path, *, every: int) -> None:
        super().__init__()
        self.path, self.every, self.saved_step = path, every, -1

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Note the step that a resumed run starts from."""
        self.saved_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, *batch: Any
    ) -> None:
        """Save when due, once per optimizer step."""
        step = trainer.global_step
        if step % self.every == 0 and step != self.saved_step and not trainer.is_last_batch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Save after validation."""
        self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.path, weights_only=False)
        self.saved_step = trainer.global_step


class MetricsFile(Logger):
    """metrics.csv: one row per optimizer step, continued from a checkpoint's step on resume."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        super().__init__()
        self.path = Path(path)
        self.rows: dict[int, dict[str, Any]] = {}
        if self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    if int(row["step"]) < first_step:
                        self.rows[int(row["step"])] = {k: v for k, v in row.items() if v != ""}

    @property
    def name(self) -> str:
        """Return the logger's name."""
        return "metrics"

    @property
    def version(self) -> str:
        """Return the empty string: a run has one metrics file."""
        return ""

    def latest(self, prefix: str) -> dict[str, float]:
        """Return the newest value of every figure whose name starts with `prefix`."""
        found: dict[str, float] = {}
        for step in sorted(self.rows):
            row = self.rows[step]
            found |= {key: float(row[key]) for key in row if key.startswith(prefix)}
        return found

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any) -> None:
        """Do nothing: the run folder's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add `metrics` to the row of `step`."""
        row = self.rows.setdefault(step or 0, {"step": step or 0})
        row.update({key: f"{value:.8g}" for key, value in metrics.items()})

    @rank_zero_only
    def save(self) -> None:
        """Write all rows."""
        columns = dict.fromkeys(key for row in self.rows.values() for key in row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(columns), restval="")
            writer.writeheader()
            writer.writerows(self.rows[step] for step in sorted(self.rows))
        part.replace(self.path)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write all rows a last time."""
        if self.rows:
            self.save()
