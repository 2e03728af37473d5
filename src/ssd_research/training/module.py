"""The Lightning modules that train what drafts against a frozen backbone's own states.

Nothing of the backbone is stored or trained: its states are recomputed for every batch, since those
of one large image take tens of megabytes.
"""

import math
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ssd_research.backbones.base import Backbone
from ssd_research.eagle import Drafter
from ssd_research.heads import Axis, DraftHeads
from ssd_research.training.data import Batch, dropped_conditions
from ssd_research.training.losses import masked_mean, smooth_l1, sources, targets


@dataclass(frozen=True)
class Recipe:
    """How heads are trained (paper Table 6); what the paper leaves open is in the second block."""

    steps: int
    lr: float = 1e-4
    min_lr: float = 1e-5
    warmup_steps: int = 20
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    condition_drop: float = 0.1

    lr_schedule: str = "cosine"
    beta: float = 1.0
    seed: int = 0
    recompute_activations: bool = False

    def __post_init__(self) -> None:
        if self.lr_schedule not in ("cosine", "linear"):
            raise ValueError(f"train.lr_schedule={self.lr_schedule}; accepted: cosine, linear")
        if not 0 <= self.condition_drop <= 1:
            raise ValueError(f"train.condition_drop={self.condition_drop} must lie in 0..1")
        if self.beta <= 0:
            raise ValueError(f"train.beta={self.beta} must be above 0")
        if self.steps < 1:
            raise ValueError("train.epochs must be at least 1")

    def lr_at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step` (from 0).

        Up linearly to `lr` over the warm-up, then down to `min_lr`, which the last step uses.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        peak = max(self.warmup_steps - 1, 0)
        t = min((step - peak) / max(self.steps - 1 - peak, 1), 1.0)
        down = t if self.lr_schedule == "linear" else (1 - math.cos(math.pi * t)) / 2
        return self.lr + (self.min_lr - self.lr) * down


class DrafterTraining(L.LightningModule):
    """What all drafters share in training: the frozen teacher, the optimizer and its schedule."""

    heads: Drafter

    def __init__(self, heads: Drafter, backbone: Backbone, recipe: Recipe) -> None:
        super().__init__()
        # A Backbone is no nn.Module, so neither state_dict nor DDP sees its weights.
        self.heads, self.backbone, self.recipe = heads, backbone, recipe

    def teacher(
        self, batch: Batch, unconditional: Bool[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "B N D"]]:
        """Return (h, e): the states that predict each code, and the codes' embeddings."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            h = self.backbone.hidden_states(batch.prompts, batch.codes, unconditional=unconditional)
            h = self.own_states(h)
            e = self.backbone.embed(batch.codes.to(self.backbone.device))
        return h.to(self.device, self.dtype), e.to(self.device, self.dtype)

    def own_states(self, h_pre: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Return the states that are read, of those before the final norm: these."""
        return h_pre

    def dropped(self, batch: Batch) -> Bool[Tensor, " B"]:
        """Return which images of a batch are trained on the unconditional prompt this epoch."""
        return dropped_conditions(
            batch.sample_keys,
            seed=self.recipe.seed,
            epoch=self.current_epoch,
            share=self.recipe.condition_drop,
        )

    def best_codes(self, x: Float[Tensor, "B M D"], kind: str = "h_pre") -> Tensor:
        """Return the argmax codes [B, M] of states or predictions of a kind, without guidance."""
        with torch.autocast(self.device.type, enabled=False):
            x = x.to(self.backbone.device, self.backbone.dtype)
            return self.backbone.logits_of(x, kind, 1.0).argmax(-1).to(self.device)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW on all weights and the schedule `Recipe.lr_at`, step by step."""
        recipe = self.recipe
        optimizer = torch.optim.AdamW(
            self.heads.parameters(),
            lr=recipe.lr,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: recipe.lr_at(step) / recipe.lr
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class HeadTraining(DrafterTraining):
    """Trains every draft head on its own loss; their sum is one backward pass."""

    heads: DraftHeads

    def __init__(self, heads: DraftHeads, backbone: Backbone, recipe: Recipe) -> None:
        super().__init__(heads, backbone, recipe)
        grid = backbone.grid
        for axis, reach, size in (
            ("horizontal", heads.horizontal, grid.cols),
            ("vertical", heads.vertical, grid.rows),
        ):
            if reach >= size:
                raise ValueError(f"heads.{axis}={reach} must be below the grid's {size}")

    def own_states(self, h_pre: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Return the states that belong to the heads."""
        return self.heads.own_states(self.backbone, h_pre)

    def truth(
        self, axis: Axis, offset: int, h: Float[Tensor, "B N D"], e: Float[Tensor, "B N D"]
    ) -> Float[Tensor, "B M D"]:
        """Return what one head should predict, for every target inside the grid."""
        return targets(e if self.heads.target == "e" else h, self.backbone.grid, axis, offset)

    def predict(
        self, axis: Axis, offset: int, h: Float[Tensor, "B N D"], e: Float[Tensor, "B N D"]
    ) -> Float[Tensor, "B M D"]:
        """Return what one head predicts for every target inside the grid."""
        grid = self.backbone.grid
        h, e = (sources(x, grid, axis, offset) for x in (h, e))
        return self.heads.predict(axis, offset, h, e)

    def loss(
        self, axis: Axis, offset: int, h: Float[Tensor, "B N D"], e: Float[Tensor, "B N D"]
    ) -> Float[Tensor, ""]:
        """Return the mean Smooth-L1 of one head over the targets inside the grid."""
        predicted = self.predict(axis, offset, h, e)
        truth = self.truth(axis, offset, h, e)
        return masked_mean(smooth_l1(predicted, truth, beta=self.recipe.beta))

    def training_step(self, batch: Batch, index: int) -> Float[Tensor, ""]:
        """Return the sum of the heads' losses on one batch."""
        h, e = self.teacher(batch, self.dropped(batch))
        losses = {
            f"train/{axis}_{offset}": checkpoint(self.loss, axis, offset, h, e, use_reentrant=False)
            if self.recipe.recompute_activations
            else self.loss(axis, offset, h, e)
            for axis, offset in self.heads.offsets()
        }
        total = torch.stack(list(losses.values())).sum()
        size = len(batch.prompts)
        self.log_dict(losses, batch_size=size, sync_dist=True)
        self.log("train/loss", total, batch_size=size, sync_dist=True, prog_bar=True)
        self.log("train/lr", self.recipe.lr_at(self.global_step))
        return total

    def validation_step(self, batch: Batch, index: int) -> None:
        """Log each head's loss and how often its best code is the image's and the backbone's."""
        h, e = self.teacher(batch, None)
        codes, best = batch.codes.to(h.device), self.best_codes(h, self.heads.state_kind)
        figures = {"val/backbone/code_agreement": (best == codes).float().mean()}
        total = h.new_zeros(())
        for axis, offset in self.heads.offsets():
            loss, agreements = self.judge(axis, offset, h=h, e=e, choices=(codes, best))
            total = total + loss
            names = ("smooth_l1", "code_agreement", "argmax_agreement")
            for name, value in zip(names, (loss, *agreements), strict=True):
                figures[f"val/{axis}_{offset}/{name}"] = value
        figures["val/loss"] = total
        self.log_dict(figures, batch_size=len(batch.prompts), sync_dist=True)

    def judge(
        self,
        axis: Axis,
        offset: int,
        *,
        h: Float[Tensor, "B N D"],
        e: Float[Tensor, "B N D"],
        choices: tuple[Tensor, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """Return one head's loss and the share of its argmax codes equal to each of `choices`."""
        grid = self.backbone.grid
        predicted, truth = self.predict(axis, offset, h, e), self.truth(axis, offset, h, e)
        loss = smooth_l1(predicted, truth, beta=self.recipe.beta).mean()
        drafted = self.best_codes(predicted, self.heads.target)
        return loss, [
            (drafted == targets(choice, grid, axis, offset)).float().mean() for choice in choices
        ]
