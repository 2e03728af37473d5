"""The Lightning module that trains an EAGLE drafter: states and codes, teacher-forced.

Loss: Smooth-L1 of the predicted states + `ce_weight` x the cross-entropy of their codes with the
backbone's own p, without guidance (Li et al. 2024, EAGLE, section 4.2; LANTERN trains the same).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ssd_research.backbones.base import Backbone
from ssd_research.eagle import EagleDrafter
from ssd_research.training.data import Batch, unit_hash
from ssd_research.training.losses import overlap, smooth_l1, soft_cross_entropy
from ssd_research.training.module import DrafterTraining, Recipe

LOGITS = 2**26  # logits that are held at a time: 256 MB in float32
Measure = Callable[[Tensor, Tensor], Tensor]


def check_options(**options: Any) -> None:
    """Raise ValueError for an option of `heads=eagle` that is not a number of at least 0."""
    for name, value in options.items():
        if not (isinstance(value, int | float) and value >= 0):
            raise ValueError(f"heads.{name}={value} must be a number of at least 0")


class EagleTraining(DrafterTraining):
    """Trains an EAGLE drafter; `feature_noise` is the width of the uniform noise on its states."""

    heads: EagleDrafter

    def __init__(
        self,
        heads: EagleDrafter,
        backbone: Backbone,
        recipe: Recipe,
        *,
        ce_weight: float = 0.1,
        feature_noise: float = 0.2,
    ) -> None:
        check_options(ce_weight=ce_weight, feature_noise=feature_noise)
        super().__init__(heads, backbone, recipe)
        self.ce_weight, self.feature_noise = ce_weight, feature_noise

    def predict(
        self, h: Float[Tensor, "B N D"], e: Float[Tensor, "B N D"]
    ) -> Float[Tensor, "B M D"]:
        """Return h_hat at positions 1 ... N-1, each from the pairs up to the position before it."""
        places = torch.arange(h.shape[1] - 1, device=h.device).expand(len(h), -1)
        return self.heads(h[:, :-1], e[:, :-1], places)

    def noise(self, keys: Sequence[str], like: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Return each image's noise of this epoch, which no batch, process or restart changes."""
        seed, source = self.recipe.seed, torch.Generator(like.device)
        parts = []
        for key in keys:
            unit = unit_hash("feature noise", seed, self.current_epoch, key)
            source.manual_seed(int(unit * 2**53))
            parts.append(torch.rand(like.shape[1:], generator=source, device=like.device))
        return (torch.stack(parts) - 0.5).to(like.dtype) * self.feature_noise

    def losses(
        self, h_hat: Float[Tensor, "B M D"], h: Float[Tensor, "B N D"]
    ) -> dict[str, Float[Tensor, ""]]:
        """Return the two losses of predicted states, and `loss`, their weighted sum."""
        regression = smooth_l1(h_hat, h[:, 1:], beta=self.recipe.beta).mean()
        entropy = self.over_codes(soft_cross_entropy, h_hat, h)
        total = regression + self.ce_weight * entropy
        return {"smooth_l1": regression, "cross_entropy": entropy, "loss": total}

    def over_codes(
        self, measure: Measure, h_hat: Float[Tensor, "B M D"], h: Float[Tensor, "B N D"]
    ) -> Float[Tensor, ""]:
        """Return the mean over positions of `measure`, of the logits after `h_hat` and after `h`.

        Logits over all codes would take the most memory of all: only some positions' are held at a
        time, and they are computed again for the gradient.
        """

        def measured(*states: Float[Tensor, "M D"]) -> Float[Tensor, ""]:
            return measure(*(self.code_logits(one) for one in states)).sum()

        predicted, true = h_hat.flatten(0, 1), h[:, 1:].flatten(0, 1)
        size = max(1, LOGITS // self.backbone.codebook_size)
        pairs = zip(predicted.split(size), true.split(size), strict=True)
        sums = [checkpoint(measured, *pair, use_reentrant=False) for pair in pairs]
        return torch.stack(sums).sum() / len(true)

    def code_logits(self, h_pre: Float[Tensor, "M D"]) -> Float[Tensor, "M K"]:
        """Return the frozen norm's and head's logits, without guidance."""
        with torch.autocast(self.device.type, enabled=False):
            state = h_pre.to(self.backbone.device, self.backbone.dtype)
            return self.backbone.logits(state[None], 1.0)[0]

    def training_step(self, batch: Batch, index: int) -> Float[Tensor, ""]:
        """Return the loss of one batch."""
        h, e = self.teacher(batch, self.dropped(batch))
        noisy = h + self.noise(batch.sample_keys, h)
        if self.recipe.recompute_activations:
            h_hat = checkpoint(self.predict, noisy, e, use_reentrant=False)
        else:
            h_hat = self.predict(noisy, e)
        losses = self.losses(h_hat, h)
        figures = {f"train/{name}": value for name, value in losses.items()}
        self.log_dict(figures, batch_size=len(h), sync_dist=True, prog_bar=True)
        self.log("train/lr", self.recipe.lr_at(self.global_step))
        return losses["loss"]

    def validation_step(self, batch: Batch, index: int) -> None:
        """Log the losses, how often the best code is the image's and the backbone's, and 1 - TV."""
        h, e = self.teacher(batch, None)
        h_hat = self.predict(h, e)
        codes, best, drafted = batch.codes.to(h.device), self.best_codes(h), self.best_codes(h_hat)
        losses = self.losses(h_hat, h)
        figures = {
            "val/backbone/code_agreement": (best == codes).float().mean(),
            "val/eagle/smooth_l1": losses["smooth_l1"],
            "val/eagle/cross_entropy": losses["cross_entropy"],
            "val/eagle/code_agreement": (drafted == codes[:, 1:]).float().mean(),
            "val/eagle/argmax_agreement": (drafted == best[:, 1:]).float().mean(),
            "val/eagle/overlap": self.over_codes(overlap, h_hat, h),
            "val/loss": losses["loss"],
        }
        self.log_dict(figures, batch_size=len(h), sync_dist=True)
