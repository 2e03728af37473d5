"""The official Emu3 checkpoints, in the form that transformers' own classes take.

`BAAI/Emu3-Gen` is a language model with the weights of `Emu3ForCausalLM` and a tiktoken vocabulary;
`BAAI/Emu3-VisionTokenizer` is `Emu3VQVAE` under other names. Both come with classes of their own
(baaivision/Emu3), which are not run here.
"""

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import normalizers
from torch import Tensor
from transformers import Emu3TextConfig, Emu3VQVAE, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig

from ssd_research.backbones.checkpoint import Checkpoint

LANGUAGE, VISION = "Emu3", "Emu3VisionVQ"  # what config.json calls them
RANKS, VISION_TOKENS = "emu3.tiktoken", "emu3_vision_tokens.txt"
SPLIT = (  # Qwen's: every digit is a piece of its own
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (  # between the ranks and the vision tokens
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|extra_{n}|>" for n in range(205)),
)
LANGUAGE_SETTINGS = (  # the same in both
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("initializer_range", "attention_dropout", "rope_theta", "tie_word_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)
VISION_SETTINGS = {  # official name -> transformers'
    "codebook_size": "codebook_size",
    "embed_dim": "embed_dim",
    "z_channels": "latent_channels",
    "double_z": "double_latent",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "temporal_downsample_factor": "temporal_downsample_factor",
    "ch": "base_channels",
    "ch_mult": "channel_multiplier",
    "num_res_blocks": "num_res_blocks",
    "attn_resolutions": "attn_resolutions",
}
VISION_WEIGHTS = (  # official name -> transformers', one rule after the other
    (r"\.mid\.attn_1\.norm\.", ".middle_block.attn_norm."),
    (r"\.mid\.", ".middle_block."),
    (r"\.attn\.(\d+)\.norm\.", r".attn_norms.\1."),
    (r"\.(down|up)\.(\d+)\.", r".\1_block.\1.\2."),
    (r"\.([qkv])\.(weight|bias)$", r".\1_proj.\2"),
    (r"\.proj_out\.", ".out_proj."),
)


def language_config(checkpoint: Checkpoint) -> Emu3TextConfig:
    """Return the configuration of the language model; ValueError for a setting not known here."""
    config = checkpoint.config
    if config.get("rope_scaling") is not None:
        raise ValueError(f"{checkpoint.option}: rope_scaling={config['rope_scaling']} is not known")
    return Emu3TextConfig(**{key: config[key] for key in LANGUAGE_SETTINGS if key in config})


def load_image_decoder(path: str, *, model: str, device: str, dtype: torch.dtype) -> Emu3VQVAE:
    """Load the image tokenizer of a folder or hub repository in the official layout.

    Raises FileNotFoundError or ValueError where it is missing, of another family or broken.
    """
    checkpoint = Checkpoint.find(path, model=model, key="model.backbone.image_decoder")
    checkpoint.require_family(VISION, published="BAAI/Emu3-VisionTokenizer")
    config = vision_config(checkpoint.config)
    weights = dict(renamed(name, tensor) for name, tensor in checkpoint.tensors().items())
    return checkpoint.load(Emu3VQVAE, config=config, weights=weights, device=device, dtype=dtype)


def vision_config(found: Mapping[str, Any]) -> Emu3VQVAEConfig:
    """Return the configuration of the image tokenizer in transformers' words."""
    given = {ours: found[key] for key, ours in VISION_SETTINGS.items() if key in found}
    config = Emu3VQVAEConfig(**given)
    # Attention is as wide as the deepest level, which transformers wants to be told.
    config.hidden_size = config.base_channels * config.channel_multiplier[-1]
    return config


def renamed(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Return a weight of the image tokenizer and its name as `Emu3VQVAE` takes them.

    Attention is made of 1x1 convolutions in one and of linear layers in the other.
    """
    for pattern, replacement in VISION_WEIGHTS:
        name = re.sub(pattern, replacement, name)
    linear = re.search(r"\.([qkv]|out)_proj\.weight$", name) is not None
    return name, tensor[:, :, 0, 0] if linear else tensor


class _Converter(TikTokenConverter):
    """transformers' converter, without the tiktoken package.

    That one keeps a copy of every file it ever read, and returns it for another file at that path.
    """

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        """Return the rank of every token."""
        lines = Path(tiktoken_url).read_bytes().splitlines()
        pairs = [line.split() for line in lines if line]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerFast:
    """Build the tokenizer from the ranks and the vision tokens; FileNotFoundError, ValueError."""
    ranks, names = checkpoint.folder / RANKS, checkpoint.folder / VISION_TOKENS
    if not names.is_file():
        raise FileNotFoundError(f"{checkpoint.option}: {checkpoint.folder} holds no {names.name}")
    try:
        core = _Converter(vocab_file=str(ranks), pattern=SPLIT).converted()
    except ValueError as error:
        raise ValueError(f"{checkpoint.option}: {ranks.name} is broken: {error}") from error
    core.normalizer = normalizers.NFC()
    vision = [line.strip() for line in names.read_text(encoding="utf-8").splitlines()]
    core.add_special_tokens([*SPECIAL_TOKENS, *filter(None, vision)])
    return PreTrainedTokenizerFast(tokenizer_object=core)
