"""The tiny backbone's configuration and tokenizer: transformers' Janus classes, made small.

Only sizes differ from Janus-Pro; loading and decoding go through the Janus adapter unchanged.
"""

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from ssd_research.shapes.captions import vocabulary

SPECIAL_TOKENS = {
    "bos_token": "<｜begin▁of▁sentence｜>",
    "eos_token": "<｜end▁of▁sentence｜>",
    "pad_token": "<｜▁pad▁｜>",
    "unk_token": "<unk>",
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_placeholder>",
}
ROLES = ("<|User|>", "<|Assistant|>")


def tiny_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer that lower-cases, adds bos and knows exactly `words`."""
    special = [*SPECIAL_TOKENS.values(), *ROLES]
    vocabulary = {token: i for i, token in enumerate([*special, ":", *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(special)
    bos = SPECIAL_TOKENS["bos_token"]
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, **SPECIAL_TOKENS)


def tiny_config(
    tokenizer: PreTrainedTokenizerFast,
    *,
    image_size: int,
    hidden_size: int,
    layers: int,
    heads: int,
    codebook_size: int,
) -> JanusConfig:
    """Return a Janus configuration for `image_size` pixels and a VQ down-sampling of 4.

    The vision tower, which generation never runs, is as small as the class allows.
    """
    grid = image_size // 4
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=32 * round(hidden_size * 8 / 3 / 32),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=64 + grid * grid,
        rms_norm_eps=1e-6,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    vision = JanusVisionConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=image_size,
        patch_size=4,
        mlp_ratio=1.0,
        projection_dim=hidden_size,
        num_image_tokens=grid * grid,
        depth=1,
    )
    vq = JanusVQVAEConfig(
        embed_dim=8,
        num_embeddings=codebook_size,
        latent_channels=64,
        base_channels=32,
        channel_multiplier=[1, 2, 2],
        num_res_blocks=1,
        num_patches=grid,
        projection_dim=hidden_size,
        image_token_embed_dim=hidden_size,
    )
    return JanusConfig(
        text_config=text,
        vision_config=vision,
        vq_config=vq,
        image_token_id=tokenizer.convert_tokens_to_ids(tokenizer.image_token),
        tie_word_embeddings=False,
    )


def random_model(
    *, grid: int = 6, hidden_size: int = 32, layers: int = 2, codebook_size: int = 32, seed: int = 0
) -> tuple[JanusForConditionalGeneration, PreTrainedTokenizerFast]:
    """Return an untrained Janus model and tokenizer, large enough in its weights to be opinionated.

    The usual initialisation makes every distribution nearly uniform, which would hide mistakes, so
    all matrices are scaled up.
    """
    tokenizer = tiny_tokenizer(vocabulary())
    config = tiny_config(
        tokenizer,
        image_size=4 * grid,
        hidden_size=hidden_size,
        layers=layers,
        heads=2,
        codebook_size=codebook_size,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = JanusForConditionalGeneration(config)
        parts = [model.model.language_model, model.model.generation_head]
        parts += [model.model.generation_aligner, model.model.generation_embeddings]
        for p in (p for part in parts for p in part.parameters() if p.ndim == 2):
            torch.nn.init.normal_(p, std=1.2 / p.shape[1] ** 0.5)
    return model, tokenizer
