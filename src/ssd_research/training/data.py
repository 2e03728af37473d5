"""Distilled images as training data, in an order that no restart or process count changes.

Optimizer step s of epoch e takes the s-th effective batch of the permutation keyed by (seed, e). An
effective batch is batch_size x processes x accumulate images, whoever computes which part of it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import lightning as L
import numpy as np
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from ssd_research.backbones.base import Backbone

COLUMNS = ["prompt_id", "prompt", "sample_key", "codes"]
VALIDATION_BATCH = 16  # a validation step holds logits over all codes


class Batch(NamedTuple):
    """Images of one training step on one process."""

    prompts: list[str]
    sample_keys: list[str]
    codes: Int[Tensor, "B N"]


def read_distilled(folder: Path, backbone: Backbone) -> Dataset:
    """Read the images of a finished distill run: prompt_id, prompt, sample_key, codes.

    Raises ValueError where the run is missing, unfinished or another backbone's.
    """
    if not (folder / "DONE").is_file():
        state = "is not finished" if folder.is_dir() else "does not exist"
        raise ValueError(
            f"train.data={folder} {state}: it must be the folder of a finished distill run"
        )
    shards = sorted(map(str, (folder / "data").glob("*.parquet")))
    if not shards:
        raise ValueError(f"train.data={folder} holds no data/*.parquet")
    _check_teacher(folder / "manifest.json", backbone)
    images = Dataset(pq.read_table(shards, columns=COLUMNS))
    _check_codes(images, backbone, folder)
    return images


def take_share(images: Dataset, share: float, *, seed: int) -> Dataset:
    """Return a seeded choice of a share of the images, in their order; a smaller one is part of it.

    Raises ValueError unless 0 < share <= 1.
    """
    if isinstance(share, bool) or not 0 < share <= 1:
        raise ValueError(f"train.share={share} must be above 0 and at most 1")
    count = max(1, round(share * len(images)))
    if count == len(images):
        return images
    order = np.random.default_rng(seed).permutation(len(images))
    return images.select(np.sort(order[:count]))


def _check_teacher(manifest: Path, backbone: Backbone) -> None:
    if not manifest.is_file():
        return
    teacher = json.loads(manifest.read_text(encoding="utf-8"))["backbone"]
    if teacher["fingerprint"] != backbone.fingerprint:
        raise ValueError(
            f"train.data={manifest.parent} was distilled from {teacher['name']} "
            f"({teacher['fingerprint']}), not from {backbone.name} ({backbone.fingerprint})"
        )


def _check_codes(images: Dataset, backbone: Backbone, folder: Path) -> None:
    column = images.data.column("codes").combine_chunks()
    lengths = column.value_lengths().to_numpy()
    grid = backbone.grid
    if len(lengths) == 0 or (lengths != grid.size).any():
        raise ValueError(
            f"train.data={folder}: every image needs {grid.rows}x{grid.cols} = {grid.size} "
            f"codes for {backbone.name}; found lengths {sorted(set(lengths.tolist()))[:5]}"
        )
    codes = column.flatten().to_numpy()
    if codes.min() < 0 or codes.max() >= backbone.codebook_size:
        raise ValueError(
            f"train.data={folder}: codes {codes.min()}..{codes.max()} lie outside "
            f"0..{backbone.codebook_size - 1} of {backbone.name}"
        )


def data_fingerprint(images: Dataset) -> str:
    """Return 16 hex digits of the sha256 of all prompts, sample keys and codes, in file order."""
    digest = hashlib.sha256()
    for name in COLUMNS[:-1]:
        digest.update("\0".join(map(str, images[name])).encode())
    digest.update(images.data.column("codes").combine_chunks().flatten().to_numpy().tobytes())
    return digest.hexdigest()[:16]


def unit_hash(*parts: int | str) -> float:
    """Return a number in [0, 1) that is a fixed function of `parts`."""
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64


def dropped_conditions(
    sample_keys: Sequence[str], *, seed: int, epoch: int, share: float
) -> Bool[Tensor, " B"]:
    """Return which images lose their prompt in `epoch`, about `share` of them, image by image."""
    drops = [unit_hash("condition", seed, epoch, key) < share for key in sample_keys]
    return torch.tensor(drops, dtype=torch.bool)


def split_by_prompt(prompt_ids: Sequence[str], *, val_size: int) -> tuple[list[int], list[int]]:
    """Return row indices (train, validation), split by a hash of the prompt id.

    Validation takes `val_size` prompts, at most a tenth of them. All images of a
    prompt fall on the same side.
    """
    unique = sorted(set(prompt_ids), key=lambda prompt: (unit_hash("split", prompt), prompt))
    held_out = set(unique[: min(val_size, len(unique) // 10)])
    train = [i for i, prompt in enumerate(prompt_ids) if prompt not in held_out]
    return train, [i for i, prompt in enumerate(prompt_ids) if prompt in held_out]


class ShardedBatches(Sampler[list[int]]):
    """One process's batches of an epoch, continued from the optimizer step that `step()` returns.

    With 2 processes and accumulate 2, effective batch s of the epoch's permutation is cut into
    [s: micro 0 rank 0 | micro 0 rank 1 | micro 1 rank 0 | micro 1 rank 1]. The images that do not
    fill the last effective batch of an epoch are left out; another epoch leaves out others.
    """

    def __init__(
        self,
        size: int,
        *,
        batch_size: int,
        accumulate: int,
        rank: int,
        world_size: int,
        seed: int,
        step: Callable[[], int],
    ) -> None:
        self.size, self.batch_size, self.accumulate = size, batch_size, accumulate
        self.rank, self.world_size, self.seed, self.step = rank, world_size, seed, step

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch."""
        return self.size // (self.batch_size * self.world_size * self.accumulate)

    def __len__(self) -> int:
        return self.steps * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = divmod(self.step(), self.steps)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        for micro in range(first * self.accumulate, len(self)):
            start = (micro * self.world_size + self.rank) * self.batch_size
            yield order[start : start + self.batch_size].tolist()


def collate(rows: Sequence[dict]) -> Batch:
    """Turn rows of the data set into a batch."""
    codes = torch.tensor([row["codes"] for row in rows], dtype=torch.long)
    return Batch([row["prompt"] for row in rows], [row["sample_key"] for row in rows], codes)


class DistilledImages(L.LightningDataModule):
    """Training and validation images of a distill run.

    Every process validates on all validation images, which gives the same figures for any number.
    """

    def __init__(
        self,
        images: Dataset,
        *,
        batch_size: int,
        accumulate: int = 1,
        world_size: int = 1,
        val_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        train, validation = split_by_prompt(images["prompt_id"], val_size=val_size)
        self.train, self.validation = images.select(train), images.select(validation)
        self.batch_size, self.accumulate, self.world_size = batch_size, accumulate, world_size
        self.seed = seed
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"{len(train)} training images are fewer than one batch of {batch_size} per device "
                f"x {world_size} devices x {accumulate}: lower train.batch_size or distill more"
            )

    def batches(self, rank: int, step: Callable[[], int]) -> ShardedBatches:
        """Return the batches of process `rank`."""
        return ShardedBatches(
            len(self.train),
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            rank=rank,
            world_size=self.world_size,
            seed=self.seed,
            step=step,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return self.batches(0, lambda: 0).steps

    def train_dataloader(self) -> DataLoader:
        """Load this process's batches; each epoch starts at the trainer's optimizer step."""
        trainer = self.trainer
        batches = self.batches(trainer.global_rank, lambda: trainer.global_step)
        return DataLoader(self.train, batch_sampler=batches, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        """Load every validation image, in file order."""
        size = min(self.batch_size, VALIDATION_BATCH)
        return DataLoader(self.validation, batch_size=size, collate_fn=collate)
