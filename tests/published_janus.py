"""A small random Janus checkpoint with the files, keys and tokenizer of the published ones.

The layout is what transformers' conversion of the official weights writes: sharded safetensors with
an index, a byte-level BPE `tokenizer.json` whose `tokenizer_config.json` calls itself a Llama
tokenizer, and the processor's files.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
)

from ssd_research.backbones.tiny import ROLES, SPECIAL_TOKENS

SPECIAL = {role: token for role, token in SPECIAL_TOKENS.items() if role != "unk_token"}
TEXTS = ["a photo of a red circle above a blue square", "three green stars", "User Assistant"]
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def janus_config(
    *,
    grid: int = 4,
    patch: int = 4,
    width: int = 32,
    layers: int = 2,
    heads: int = 2,
    mlp: int = 64,
    codes: int = 32,
    words: int = 330,
    positions: int = 256,
    tower: dict[str, Any] | None = None,
    vq: dict[str, Any] | None = None,
    specials: tuple[int, int, int] = (0, 1, 2),
) -> JanusConfig:
    """Return a configuration; `tower` and `vq` replace the small vision tower and VQ model.

    `specials` are the ids of bos, eos and pad.
    """
    bos, eos, pad = specials
    text = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        rms_norm_eps=1e-6,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        tie_word_embeddings=False,
    )
    small_tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    small_vq = {
        "latent_channels": 32,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1],
        "num_res_blocks": 1,
    }
    vision = JanusVisionConfig(
        image_size=grid * patch,
        patch_size=patch,
        projection_dim=width,
        num_image_tokens=grid * grid,
        **(small_tower if tower is None else tower),
    )
    vqvae = JanusVQVAEConfig(
        embed_dim=8,
        num_embeddings=codes,
        projection_dim=width,
        image_token_embed_dim=width,
        **(small_vq if vq is None else vq),
    )
    return JanusConfig(
        text_config=text, vision_config=vision, vq_config=vqvae, tie_word_embeddings=False
    )


def full_size_config(size: str) -> JanusConfig:
    """Return the sizes of Janus-Pro `7B` or `1B`, vision tower and VQ model at their defaults."""
    sizes = {
        "7B": {"width": 4096, "layers": 30, "heads": 32, "mlp": 11008},
        "1B": {"width": 2048, "layers": 24, "heads": 16, "mlp": 5632},
    }
    return janus_config(
        grid=24,
        patch=16,
        codes=16384,
        words=102400,
        positions=16384,
        tower={},
        vq={},
        specials=(100000, 100001, 100002),
        **sizes[size],
    )


def byte_level_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer that, like the published one, adds no bos by itself."""
    core = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False),
    )
    core.add_special_tokens([*SPECIAL.values(), *ROLES])
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    return core


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write the tokenizer's files and return it."""
    core = byte_level_tokenizer()
    core.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": 16384,
        "tokenizer_class": "LlamaTokenizerFast",
        "unk_token": None,
        **SPECIAL,
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", SPECIAL)
    return core


def write_shards(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write the weights as two shards and their index."""
    names = sorted(weights)
    half = len(names) // 2
    for shard, part in zip(SHARDS, (names[:half], names[half:]), strict=True):
        tensors = {name: weights[name].contiguous() for name in part}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    place = {name: SHARDS[n >= half] for n, name in enumerate(names)}
    total = sum(weight.nbytes for weight in weights.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": place})


def random_weights(config: JanusConfig) -> JanusForConditionalGeneration:
    """Return an untrained model whose matrices are large enough to make it opinionated."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = JanusForConditionalGeneration(config)
        parts = (
            model.model.language_model,
            model.model.generation_head,
            model.model.generation_aligner,
            model.model.generation_embeddings,
        )
        for p in (p for part in parts for p in part.parameters() if p.ndim == 2):
            torch.nn.init.normal_(p, std=1.2 / p.shape[1] ** 0.5)
    return model.eval()


def write_janus(folder: Path, **sizes: Any) -> Path:
    """Write a random checkpoint in the published layout into a new folder and return it.

    `sizes` are those of `janus_config`.
    """
    folder.mkdir(parents=True)
    tokenizer = write_tokenizer(folder)
    specials = tuple(
        tokenizer.token_to_id(SPECIAL[f"{role}_token"]) for role in ("bos", "eos", "pad")
    )
    config = janus_config(specials=specials, **sizes)
    config.image_token_id = tokenizer.token_to_id(SPECIAL["image_token"])
    config.architectures = ["JanusForConditionalGeneration"]
    config.save_pretrained(folder)
    write_shards(folder, random_weights(config).state_dict())
    boi = tokenizer.token_to_id(SPECIAL["boi_token"])
    ids = dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), specials, strict=True))
    generation = {"generation_kwargs": {"boi_token_id": boi}, "guidance_scale": 5, **ids}
    write_json(folder / "generation_config.json", generation)
    side = config.vision_config.image_size
    size = {"height": side, "width": side}
    image = {"image_processor_type": "JanusImageProcessor", "do_normalize": True, "size": size}
    write_json(folder / "preprocessor_config.json", image)
    write_json(folder / "processor_config.json", {"processor_class": "JanusProcessor"})
    return folder
