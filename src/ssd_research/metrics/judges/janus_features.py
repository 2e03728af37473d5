"""Feature extractors out of a Janus checkpoint: its image tokenizer's encoder and its vision tower.

The tokenizer of `tiny` was trained on the shapes world, so its encoder serves there as Inception
does for photographs; the tower with its aligner is "Janus-Pro's visual feature space" (paper A.5).
"""

from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from transformers import JanusConfig, JanusVisionConfig
from transformers.models.janus.image_processing_janus import JanusImageProcessor
from transformers.models.janus.modeling_janus import (
    JanusVisionAlignerMLP,
    JanusVisionModel,
    JanusVQVAE,
)

from ssd_research.backbones.base import fingerprint
from ssd_research.backbones.checkpoint import Checkpoint
from ssd_research.backbones.janus import PUBLISHED
from ssd_research.metrics.judges.features import clean_resize

KEY = "eval.extractor.path"
FILES = ("*.json", "*.safetensors")


def _find(path: str, model: str) -> tuple[Checkpoint, JanusConfig]:
    """Return a Janus checkpoint and its configuration; ValueError for another family."""
    checkpoint = Checkpoint.find(path, model=model, key=KEY, files=FILES)
    checkpoint.require_family("janus", published=PUBLISHED)
    return checkpoint, JanusConfig.from_pretrained(checkpoint.folder)


def _part(checkpoint: Checkpoint, prefix: str) -> dict[str, Tensor]:
    """Return the weights below `prefix` without it; ValueError if there are none."""
    found = {
        name.removeprefix(prefix): tensor
        for name, tensor in checkpoint.tensors().items()
        if name.startswith(prefix)
    }
    if not found:
        raise ValueError(f"{checkpoint.option} holds no weights {prefix}*")
    return found


class TokenizerFeatures(nn.Module):
    """Mean and standard deviation over positions of the VQ encoder's latent channels.

    Taken before quantisation: 2 x 64 features on `tiny`. They grow with what the tokenizer must
    tell apart, which in the shapes world is colour, outline and size.
    """

    name: ClassVar[str] = "janus-vq-encoder"

    def __init__(self, path: str, *, model: str = "janus_pro", device: str = "cpu") -> None:
        super().__init__()
        checkpoint, config = _find(path, model)
        self.vq = checkpoint.load(
            JanusVQVAE,
            device=device,
            dtype=torch.float32,
            config=config.vq_config,
            weights=_part(checkpoint, "model.vqmodel."),
        ).requires_grad_(False)
        self.side = config.vision_config.image_size
        self.num_features = 2 * config.vq_config.latent_channels
        self.resize = f"clean bicubic {self.side}x{self.side}"
        self.revision = fingerprint(self.vq.encoder)

    def prepare(self, image: UInt8[np.ndarray, "h w 3"]) -> Float[Tensor, "3 s s"]:
        """Return a picture at the tokenizer's size in 0..255."""
        size = (self.side, self.side)
        return torch.from_numpy(clean_resize(image, size)).permute(2, 0, 1)

    @torch.inference_mode()
    def forward(self, images: Float[Tensor, "B 3 s s"]) -> Float[Tensor, "B d"]:
        """Return the pooled latents."""
        latents = self.vq.encoder(images.to(self.vq.device, self.vq.dtype) / 127.5 - 1).flatten(2)
        return torch.cat([latents.mean(-1), latents.std(-1)], 1)


class VisionFeatures(nn.Module):
    """The mean over patches of Janus's understanding path: its vision tower, or tower and aligner.

    `layer` is `tower` (SigLIP's last states) or `aligner` (the same as the language model sees
    them); the paper does not say which.
    """

    def __init__(
        self,
        path: str,
        *,
        model: str = "janus_pro",
        layer: str = "aligner",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if layer not in ("tower", "aligner"):
            raise ValueError(f"eval.extractor.layer={layer} is not known; accepted: tower, aligner")
        checkpoint, config = _find(path, model)
        vision = config.vision_config
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        weights = _part(checkpoint, "model.vision_model.")
        self.tower = checkpoint.load(JanusVisionModel, config=vision, weights=weights, **place)
        self.aligner = _aligner(checkpoint, vision).to(**place) if layer == "aligner" else None
        self.requires_grad_(False).eval()
        self.processor = _processor(checkpoint)
        self.name = f"janus-vision-{layer}"
        self.num_features = vision.projection_dim if layer == "aligner" else vision.hidden_size
        side = self.processor.size["height"]
        self.resize = f"JanusImageProcessor {side}x{side}"
        self.revision = fingerprint(*(m for m in (self.tower, self.aligner) if m is not None))

    def prepare(self, image: UInt8[np.ndarray, "h w 3"]) -> Float[Tensor, "3 s s"]:
        """Return a picture as the checkpoint's own image processor prepares it."""
        return self.processor(images=image, return_tensors="pt")["pixel_values"][0]

    @torch.inference_mode()
    def forward(self, images: Float[Tensor, "B 3 s s"]) -> Float[Tensor, "B d"]:
        """Return the mean of the patches' states."""
        states = self.tower(images.to(self.tower.device, self.tower.dtype)).last_hidden_state
        if self.aligner is not None:
            states = self.aligner(states)
        return states.float().mean(1)


def _aligner(checkpoint: Checkpoint, config: JanusVisionConfig) -> JanusVisionAlignerMLP:
    """Return the network between the tower and the language model."""
    aligner = JanusVisionAlignerMLP(config)
    try:
        aligner.load_state_dict(_part(checkpoint, "model.aligner."))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"{checkpoint.option}: the aligner does not fit: {reason}") from error
    return aligner


def _processor(checkpoint: Checkpoint) -> JanusImageProcessor:
    """Return the checkpoint's image processor; the class's own defaults are not Janus-Pro's."""
    if not (checkpoint.folder / "preprocessor_config.json").is_file():
        raise FileNotFoundError(
            f"{checkpoint.option}: {checkpoint.folder} holds no preprocessor_config.json"
        )
    return JanusImageProcessor.from_pretrained(checkpoint.folder)
