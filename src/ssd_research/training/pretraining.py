"""Lightning modules that make the tiny backbone: its VQ model, then its language model.

Batches are drawn from the shapes world by index, so a resumed run sees exactly the scenes that an
uninterrupted one would have seen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import JanusForConditionalGeneration, PreTrainedTokenizerBase
from transformers.models.janus.modeling_janus import JanusVQVAE

from ssd_research.backbones.janus import conditional_ids, unconditional_ids
from ssd_research.shapes.captions import caption
from ssd_research.shapes.render import render
from ssd_research.shapes.scenes import sample_scene, sample_spec


@dataclass(frozen=True)
class Curriculum:
    """Which scenes training sees: flat and fully specified first, then the full world.

    `easy` and `full` are shares of the run: until `easy` every scene is flat and every object's
    colour is named; from `full` on the shares are `named` and `flat`; between them they move
    linearly. `weights` are the relative frequencies of the caption kinds.
    """

    weights: dict[str, float]
    easy: float = 0.15
    full: float = 0.5
    named: float = 0.4
    flat: float = 0.1
    prefix: float = 0.7

    def shares(self, progress: float) -> tuple[float, float]:
        """Return the shares (named, flat) at `progress` in [0, 1]."""
        if progress >= self.full:
            return self.named, self.flat
        t = max((progress - self.easy) / (self.full - self.easy), 0.0)
        return 1 + t * (self.named - 1), 1 + t * (self.flat - 1)


def pixels(images: np.ndarray) -> Float[Tensor, "b 3 s s"]:
    """Turn 8-bit RGB images (b, s, s, 3) into the VQ model's input in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


class SceneBatches(IterableDataset):
    """Batches (images, captions) of the shapes world, each a function of (seed, step)."""

    def __init__(
        self, *, curriculum: Curriculum, batch_size: int, steps: int, canvas: int, seed: int
    ) -> None:
        super().__init__()
        self.curriculum, self.batch_size, self.steps = curriculum, batch_size, steps
        self.canvas, self.seed = canvas, seed
        self.first_step = 0

    def __iter__(self) -> Iterator[tuple[Float[Tensor, "b 3 s s"], list[str]]]:
        for step in range(self.first_step, self.steps):
            yield self.batch(step)

    def batch(self, step: int) -> tuple[Float[Tensor, "b 3 s s"], list[str]]:
        """Return the batch of one step."""
        named, flat = self.curriculum.shares(step / self.steps)
        kinds = list(self.curriculum.weights)
        weights = np.array(list(self.curriculum.weights.values()))
        images, captions = [], []
        for index in range(step * self.batch_size, (step + 1) * self.batch_size):
            rng = np.random.default_rng([self.seed, index])
            kind = kinds[int(rng.choice(len(kinds), p=weights / weights.sum()))]
            spec = sample_spec(kind, rng, name_everything=bool(rng.random() < named))
            scene = sample_scene(spec, rng, canvas=self.canvas, flat=bool(rng.random() < flat))
            images.append(render(scene))
            captions.append(caption(spec, prefix=bool(rng.random() < self.curriculum.prefix)))
        return pixels(np.stack(images)), captions


def linear_warmup_hold_decay(step: int, *, steps: int, warmup: int, decay: float) -> float:
    """Return the factor: up over `warmup` steps, held, down to 0 over the last share `decay`."""
    start = steps * (1 - decay)
    down = (steps - step) / max(steps - start, 1) if step > start else 1.0
    return min((step + 1) / warmup, 1.0) * max(down, 0.0)


class VQTraining(L.LightningModule):
    """Trains a Janus VQ model: MSE + L1, EMA codebook of unit rows, revival of unused codes.

    Codes are looked up by cosine, as Janus's own quantiser does; with unit rows the plain distance
    of transformers' `encode` picks the same code.
    """

    def __init__(
        self,
        vq: JanusVQVAE,
        *,
        steps: int,
        lr: float = 2e-3,
        ema: float = 0.98,
        beta: float = 0.25,
        contrast: float = 3.0,
    ) -> None:
        super().__init__()
        self.vq, self.steps, self.lr, self.ema, self.beta = vq, steps, lr, ema, beta
        self.contrast = contrast
        size, width = vq.quantize.embedding.weight.shape
        vq.quantize.embedding.weight.requires_grad_(False)
        vq.quantize.embedding.weight.copy_(F.normalize(torch.randn(size, width), dim=-1))
        self.register_buffer("usage", torch.ones(size))
        self.register_buffer("sums", vq.quantize.embedding.weight.clone())

    def reconstruct(
        self, x: Float[Tensor, "b 3 s s"]
    ) -> tuple[Float[Tensor, "b 3 s s"], Float[Tensor, "n c"], Int[Tensor, " n"]]:
        """Return the reconstruction, the unit encodings and their codes."""
        z = F.normalize(self.vq.quant_conv(self.vq.encoder(x)).float(), dim=1)
        flat = z.permute(0, 2, 3, 1).flatten(0, 2)
        with torch.autocast(x.device.type, enabled=False):
            codes = (flat.detach() @ self.vq.quantize.embedding.weight.T).argmax(-1)
        grid = z.shape[-2:]
        q = self.vq.quantize.embedding.weight[codes].unflatten(0, (len(x), *grid))
        q = z + (q.permute(0, 3, 1, 2) - z).detach()
        return self.vq.decoder(self.vq.post_quant_conv(q)), flat, codes

    def training_step(self, batch: tuple[Tensor, list[str]], index: int) -> Tensor:
        """Return MSE + L1 + commitment, and move the codebook towards this batch."""
        x, _ = batch
        y, flat, codes = self.reconstruct(x)
        chosen = self.vq.quantize.embedding.weight[codes]
        error, commit = y.float() - x, (flat - chosen).pow(2).sum(-1).mean()
        self._move_codebook(flat.detach(), codes)
        self.log("vq/mse", error.pow(2).mean(), prog_bar=True)
        self.log("vq/codes_used", (self.usage > 0.3).sum().float(), prog_bar=True)
        # Objects cover a tenth of a picture; without weight the codebook goes to its background.
        weight = 1 + self.contrast * (x - x.mean((2, 3), keepdim=True)).abs().mean(1, keepdim=True)
        return (weight * (error.pow(2) + 0.3 * error.abs())).mean() + self.beta * commit

    @torch.no_grad()
    def _move_codebook(self, flat: Float[Tensor, "n c"], codes: Int[Tensor, " n"]) -> None:
        self.usage.mul_(self.ema).add_(
            codes.bincount(minlength=len(self.usage)), alpha=1 - self.ema
        )
        self.sums.mul_(self.ema).index_add_(0, codes, flat, alpha=1 - self.ema)
        dead = self.usage < 0.3
        if self.global_step < 0.7 * self.steps and self.global_step % 10 == 0 and bool(dead.any()):
            # Keyed by the step, so that a resumed run revives the same codes.
            key = torch.Generator().manual_seed(self.global_step)
            pick = torch.randint(len(flat), (int(dead.sum()),), generator=key)
            self.sums[dead] = flat[pick.to(flat.device)]
            self.usage[dead] = 1.0
        self.vq.quantize.embedding.weight.copy_(F.normalize(self.sums, dim=-1))

    def validation_step(self, batch: tuple[Tensor, list[str]], index: int) -> None:
        """Log the reconstruction error on held-out scenes."""
        x, _ = batch
        self.log("vq/val_mse", F.mse_loss(self.reconstruct(x)[0].float(), x), batch_size=len(x))

    def configure_optimizers(self) -> dict:  # noqa: D102
        optimizer = torch.optim.AdamW(self.vq.parameters(), lr=self.lr, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            partial(linear_warmup_hold_decay, steps=self.steps, warmup=50, decay=0.6),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, captions: list[str], *, unconditional: list[bool]
) -> list[list[int]]:
    """Return the ids that precede an image's codes, as the Janus adapter builds them."""
    encode = conditional_ids(tokenizer)
    return [
        unconditional_ids(tokenizer, encode(text)) if drop else encode(text)
        for text, drop in zip(captions, unconditional, strict=True)
    ]


class LanguageTraining(L.LightningModule):
    """Trains Janus's language model, aligner and generation head on codes of a frozen VQ model.

    Muon on the layers' matrices, AdamW on the rest; one caption in ten is dropped, so that the
    unconditional stream of guidance is learned too.
    """

    def __init__(
        self,
        model: JanusForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        *,
        steps: int,
        muon_lr: float = 0.02,
        adam_lr: float = 3e-3,
        condition_drop: float = 0.1,
        decay: float = 0.3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.tokenizer, self.steps = model, tokenizer, steps
        self.muon_lr, self.adam_lr, self.decay = muon_lr, adam_lr, decay
        self.condition_drop, self.seed = condition_drop, seed
        model.requires_grad_(False)
        for part in (
            model.model.language_model,
            model.model.generation_embeddings,
            model.model.generation_aligner,
            model.model.generation_head,
        ):
            part.requires_grad_(True)

    def loss(self, images: Float[Tensor, "b 3 s s"], ids: list[list[int]]) -> Tensor:
        """Return the mean cross-entropy in nats per code."""
        m = self.model.model
        with torch.no_grad():
            codes = m.vqmodel.encode(images).image_tokens.view(len(images), -1)
        longest = max(map(len, ids))
        text = torch.full((len(ids), longest), 0, device=self.device)
        for row, one in zip(text, ids, strict=True):
            row[: len(one)] = torch.tensor(one)
        embedded = self.model.prepare_embeddings_for_image_generation(codes[:, :-1])
        words = m.get_input_embeddings()(text)
        # Left-aligned without padding: each image follows its own prompt, junk comes last.
        lengths = torch.tensor([len(one) for one in ids], device=self.device)
        total = longest + codes.shape[1] - 1
        x = torch.zeros(len(ids), total, words.shape[-1], dtype=words.dtype, device=self.device)
        x[:, :longest] = words
        slots = lengths[:, None] + torch.arange(codes.shape[1] - 1, device=self.device)
        x = x.scatter(1, slots[..., None].expand(-1, -1, x.shape[-1]), embedded.to(x.dtype))
        h = m.language_model(inputs_embeds=x, use_cache=False).last_hidden_state
        source = lengths[:, None] - 1 + torch.arange(codes.shape[1], device=self.device)
        h = h.gather(1, source[..., None].expand(-1, -1, h.shape[-1]))
        return F.cross_entropy(m.generation_head(h).float().flatten(0, 1), codes.flatten())

    def training_step(self, batch: tuple[Tensor, list[str]], index: int) -> None:
        """Take one step of both optimizers."""
        images, captions = batch
        rng = np.random.default_rng([self.seed, self.global_step // 2, 1])
        drop = (rng.random(len(captions)) < self.condition_drop).tolist()
        loss = self.loss(images, prompt_ids(self.tokenizer, captions, unconditional=drop))
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, self.lr_schedulers(), strict=True):
            optimizer.step()
            schedule.step()
        self.log("lm/loss", loss, prog_bar=True)

    def validation_step(self, batch: tuple[Tensor, list[str]], index: int) -> None:
        """Log the losses on held-out scenes; conditional below unconditional is what text tells."""
        images, captions = batch
        for name, drop in (("cond", False), ("uncond", True)):
            ids = prompt_ids(self.tokenizer, captions, unconditional=[drop] * len(captions))
            self.log(f"lm/val_{name}", self.loss(images, ids), batch_size=len(images))

    def configure_optimizers(self) -> tuple[list, list]:  # noqa: D102
        layers = self.model.model.language_model.layers
        matrices = [p for p in layers.parameters() if p.ndim == 2]
        known = {id(p) for p in matrices}
        rest = [p for p in self.model.parameters() if p.requires_grad and id(p) not in known]
        optimizers = [
            torch.optim.Muon(matrices, lr=self.muon_lr, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(rest, lr=self.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        factor = partial(linear_warmup_hold_decay, steps=self.steps, warmup=100, decay=self.decay)
        return optimizers, [torch.optim.lr_scheduler.LambdaLR(o, factor) for o in optimizers]
