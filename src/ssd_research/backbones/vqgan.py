"""Meta's VQGAN decoder, which turns the codes of the Chameleon family into pixels.

The network is that of taming-transformers (Esser et al. 2021): a plain codebook look-up, a 1x1
convolution, a convolutional decoder. diffusers' `VQModel` is the same network under other names, so
published weights are renamed, and every size follows from their shapes.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ssd_research.backbones.checkpoint import Checkpoint

OPTION = "model.backbone.image_decoder"
PUBLISHED = "GAIR/Anole-7b-v0.1"
FILES = ("tokenizer/vqgan.ckpt", "vqgan.ckpt", "model.safetensors")
UNUSED = ("encoder.", "quant_conv.", "loss.")  # decoding needs none of them
GROUPS = 32  # of every normalisation
RENAMES = (
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.norm\.", ".mid_block.attentions.0.group_norm."),
    (r"\.mid\.attn_1\.([qkv])\.", r".mid_block.attentions.0.to_\1."),
    (r"\.mid\.attn_1\.proj_out\.", ".mid_block.attentions.0.to_out.0."),
    (r"\.block\.(\d+)\.", r".resnets.\1."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"\.upsample\.", ".upsamplers.0."),
    (r"^decoder\.norm_out\.", "decoder.conv_norm_out."),
)


class VQGANDecoder(nn.Module):
    """Codes to pixels, in float32 as in the official code, one image at a time to save memory."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @classmethod
    def load(
        cls, path: str, *, model: str, codes: int, patch: int, device: torch.device
    ) -> "VQGANDecoder":
        """Load a file, or the one of FILES that a folder or a hub repository holds.

        `codes` is the backbone's codebook size and `patch` the side of a code in pixels. Raises
        FileNotFoundError where there is no such file, and ValueError, naming the option and what
        is wrong, where the file is broken, of another network or of other sizes.
        """
        file = find_weights(path, model=model)
        try:
            network = build_network(read_weights(file))
        except ValueError as error:
            raise ValueError(f"{OPTION}={path}: {file.name} {error}") from error
        scale = 2 ** (len(network.decoder.up_blocks) - 1)
        for what, size, wanted in (
            ("codes", network.quantize.n_e, codes),
            ("pixels a code", scale, patch),
        ):
            if size != wanted:
                raise ValueError(
                    f"{OPTION}={path}: {file.name} has {size} {what}, but {model} has {wanted}"
                )
        return cls(network.to(device).eval().requires_grad_(False))

    def forward(self, codes: Int[Tensor, "B rows cols"]) -> Float[Tensor, "B h w 3"]:
        """Return images in about [-1, 1]."""
        images = [self._one(image) for image in codes.split(1)]
        return torch.cat(images).permute(0, 2, 3, 1)

    def _one(self, codes: Int[Tensor, "1 rows cols"]) -> Float[Tensor, "1 3 h w"]:
        latents = self.network.quantize.embedding(codes).permute(0, 3, 1, 2)
        return self.network.decode(latents, force_not_quantize=True).sample


def find_weights(path: str, *, model: str) -> Path:
    """Return `path` if it is a file, else the first of FILES in that folder or hub repository."""
    for name in FILES:
        place = Checkpoint.find(path, model=model, key=OPTION, files=(name,)).folder
        file = place if place.is_file() else place / name
        if file.is_file():
            return file
    raise FileNotFoundError(f"{OPTION}={path} holds none of {', '.join(FILES)}")


def read_weights(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file or of a pickle that holds nothing but tensors."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ValueError("is no readable file of tensors (truncated, or something else)") from error
    weights = content.get("state_dict", content) if isinstance(content, Mapping) else None
    if not weights or not all(isinstance(one, Tensor) for one in weights.values()):
        raise ValueError("holds something else than named tensors")
    return dict(weights)


def build_network(weights: Mapping[str, Tensor]) -> nn.Module:
    """Return diffusers' network without its encoder, its weights those of the taming layout.

    Raises ValueError for a weight that is missing, unknown or of another shape, and where diffusers
    is not installed.
    """
    try:
        from diffusers import VQModel
    except ImportError as error:
        raise ValueError(
            "needs diffusers to become pixels: pip install 'ssd_research[lumina]'"
        ) from error
    used = {name: one for name, one in weights.items() if not name.startswith(UNUSED)}
    sizes = network_sizes(used)
    with torch.device("meta"):
        network: Any = VQModel(**sizes)
    network.encoder, network.quant_conv = nn.Identity(), nn.Identity()
    names = {renamed(name, levels=len(sizes["block_out_channels"])): name for name in used}
    _fill(network, used, names)
    return network


def _fill(network: Any, weights: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Put weights, found under their old `names` by the new ones, into the network in float32."""
    given = {new: weights[old].to(torch.float32) for new, old in names.items()}
    for name, weight in given.items():
        if ".attentions." in name and weight.ndim == 4:  # a 1x1 convolution, there a linear layer
            given[name] = weight.flatten(1)
    try:
        missing, unknown = network.load_state_dict(given, strict=False, assign=True)
    except RuntimeError as error:
        raise ValueError(f"has another shape: {str(error).splitlines()[-1].strip()}") from error
    if missing:
        raise ValueError(f"lacks {len(missing)} weights, the first {missing[0]}")
    if unknown:
        raise ValueError(f"has {len(unknown)} unknown weights, the first {names[unknown[0]]}")


def network_sizes(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of diffusers' `VQModel` that fit weights of the taming layout."""

    def size(name: str, axis: int = 0) -> int:
        if name not in weights:
            raise ValueError(f"lacks {name}: it is no VQGAN decoder in taming's layout")
        return weights[name].shape[axis]

    ups = [re.match(r"decoder\.up\.(\d+)\.block\.(\d+)\.conv1\.weight", name) for name in weights]
    blocks = [(int(up[1]), int(up[2])) for up in ups if up]
    levels = 1 + max((level for level, _ in blocks), default=0)
    channels = [size(f"decoder.up.{level}.block.0.conv1.weight") for level in range(levels)]
    return {
        "block_out_channels": tuple(channels),
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "layers_per_block": sum(level == 0 for level, _ in blocks) - 1,
        "latent_channels": size("post_quant_conv.weight"),
        "num_vq_embeddings": size("quantize.embedding.weight"),
        "vq_embed_dim": size("quantize.embedding.weight", 1),
        "norm_num_groups": GROUPS,
    }


def renamed(name: str, *, levels: int) -> str:
    """Return diffusers' name of a weight in taming's layout, whose levels count the other way."""
    name = re.sub(
        r"^decoder\.up\.(\d+)\.", lambda up: f"decoder.up_blocks.{levels - 1 - int(up[1])}.", name
    )
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name
