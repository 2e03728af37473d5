"""Writes tiny random Emu3 checkpoints as the two published layouts lie on disk."""

import base64
import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Emu3Config,
    Emu3ForConditionalGeneration,
    Emu3TextConfig,
)
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = (
    "a red circle left of two blue stars, a large pink ring and a small black square; masterpiece, "
    "film grained, best quality. lowres, bad anatomy, bad hands, text, error, missing fingers, "
    "extra digit, fewer digits, cropped, worst quality, low quality, normal quality, jpeg "
    "artifacts, signature, watermark, username, blurry."
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))]
VISION = ["<|image token|>", "<|image start|>", "<|image end|>"]
FOLDER = "VisionTokenizer"  # of the image decoder, below that of the official layout


def write_emu3(
    folder: Path,
    *,
    layout: str = "hf",
    image_size: tuple[int, int] = (48, 64),
    layers: int = 2,
    hidden_size: int = 64,
    heads: int = 8,
    codebook_size: int = 48,
    positions: int = 512,
    seed: int = 0,
) -> None:
    """Write a checkpoint with the same weights and vocabulary in the `hf` or `official` layout.

    The official one keeps its image decoder apart, here in `folder/VisionTokenizer`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words, merges = byte_pairs()
    visual = [f"<|visual token {n:06d}|>" for n in range(codebook_size)]
    special = [*SPECIAL, *VISION, *visual]
    ids = words | {token: len(words) + n for n, token in enumerate(special)}
    model = random_emu3(
        ids,
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        codebook_size=codebook_size,
        positions=positions,
        seed=seed,
    )
    if layout == "hf":
        _write_hf(folder, model, words, merges, special)
    else:
        _write_official(folder, model, ids, words, [*VISION, *visual], image_size)


def random_emu3(
    ids: dict[str, int],
    *,
    layers: int,
    hidden_size: int,
    heads: int,
    codebook_size: int,
    positions: int,
    seed: int,
) -> Emu3ForConditionalGeneration:
    """Return an untrained model whose weights are large enough for distributions with a shape."""
    text = Emu3TextConfig(
        vocab_size=len(ids),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=positions,
        pad_token_id=ids["<|endoftext|>"],
        bos_token_id=ids["<|extra_203|>"],
        eos_token_id=ids["<|extra_204|>"],
    )
    vision = Emu3VQVAEConfig(
        codebook_size=codebook_size,
        base_channels=32,
        channel_multiplier=[1, 1, 1, 2],
        num_res_blocks=1,
        hidden_size=64,
    )
    hf_ids = {("<image>" if token == "<|extra_0|>" else token): n for token, n in ids.items()}
    config = Emu3Config(text_config=text, vq_config=vision, vocabulary_map=hf_ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Emu3ForConditionalGeneration(config).eval()
        language = [*model.model.text_model.parameters(), model.lm_head.weight]
        for p in (p for p in language if p.ndim == 2):
            torch.nn.init.normal_(p, std=1.2 / p.shape[1] ** 0.5)
        for p in (p for p in model.parameters() if p.ndim == 1):
            p.data += 0.2 * torch.randn_like(p)
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer += torch.rand_like(buffer)
    return model


def byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train a small byte-level vocabulary, each token's id its rank, and return its merges."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        [WORDS],
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(core.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 2) -> None:
    """Write sharded safetensors and their index."""
    names = sorted(tensors)
    files = {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous().clone() for name in names[n::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_hf(
    folder: Path,
    model: Emu3ForConditionalGeneration,
    words: dict[str, int],
    merges: list[tuple[str, str]],
    special: list[str],
) -> None:
    """Write the layout of BAAI/Emu3-Gen-hf: key prefixes of older transformers, GPT-2's split."""
    model.config.save_pretrained(folder)
    old = (
        (r"^model\.text_model\.", "text_model.model."),
        (r"^model\.vqmodel\.", "vqmodel."),
        (r"^lm_head\.", "text_model.lm_head."),
    )
    save_shards(folder, {rename(name, old): t for name, t in model.state_dict().items()})
    special = ["<image>" if token == "<|extra_0|>" else token for token in special]
    ids = words | {token: len(words) + n for n, token in enumerate(special)}
    core = Tokenizer(models.BPE(vocab=ids, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    core.save(str(folder / "tokenizer.json"))
    named = {
        "image_token": "<image>",
        "boi_token": "<|image start|>",
        "eoi_token": "<|image end|>",
        "image_wrapper_token": "<|image token|>",
        "eof_token": "<|extra_201|>",
    }
    settings = {
        "add_prefix_space": False,
        "bos_token": "<|extra_203|>",
        "eos_token": "<|extra_204|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": named,
        "padding_side": "left",
        "tokenizer_class": "GPT2Tokenizer",
        **named,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_official(
    folder: Path,
    model: Emu3ForConditionalGeneration,
    ids: dict[str, int],
    words: dict[str, int],
    vision: list[str],
    image_size: tuple[int, int],
) -> None:
    """Write the layouts of BAAI/Emu3-Gen and, in a folder below, of BAAI/Emu3-VisionTokenizer."""
    text = model.config.text_config
    config = {
        "architectures": ["Emu3ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_emu3.Emu3ForCausalLM"},
        "attention_dropout": 0.1,
        "boi_token_id": ids["<|image start|>"],
        "bos_token_id": ids["<|extra_203|>"],
        "eof_token_id": ids["<|extra_201|>"],
        "eoi_token_id": ids["<|image end|>"],
        "eol_token_id": ids["<|extra_200|>"],
        "eos_token_id": ids["<|extra_204|>"],
        "hidden_act": "silu",
        "hidden_size": text.hidden_size,
        "image_area": image_size[0] * image_size[1],
        "img_token_id": ids["<|image token|>"],
        "initializer_range": 0.02,
        "intermediate_size": text.intermediate_size,
        "max_position_embeddings": text.max_position_embeddings,
        "model_type": "Emu3",
        "num_attention_heads": text.num_attention_heads,
        "num_hidden_layers": text.num_hidden_layers,
        "num_key_value_heads": text.num_key_value_heads,
        "pad_token_id": ids["<|endoftext|>"],
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.44.0",
        "use_cache": True,
        "vocab_size": text.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config))
    state = model.state_dict()
    language = {
        name.replace("model.text_model.", "model."): tensor
        for name, tensor in state.items()
        if not name.startswith("model.vqmodel.")
    }
    save_shards(folder, language)
    letters = {letter: byte for byte, letter in byte_letters().items()}
    lines = [
        f"{base64.b64encode(bytes(letters[c] for c in token)).decode()} {rank}\n"
        for token, rank in sorted(words.items(), key=lambda pair: pair[1])
    ]
    (folder / "emu3.tiktoken").write_text("".join(lines))
    (folder / "emu3_vision_tokens.txt").write_text("".join(f"{token}\n" for token in vision))
    _write_vision_tokenizer(folder / FOLDER, model)


def _write_vision_tokenizer(folder: Path, model: Emu3ForConditionalGeneration) -> None:
    """Write the layout of BAAI/Emu3-VisionTokenizer: other names, attention as convolutions."""
    folder.mkdir()
    vision = model.config.vq_config
    config = {
        "architectures": ["Emu3VisionVQModel"],
        "attn_resolutions": vision.attn_resolutions,
        "ch": vision.base_channels,
        "ch_mult": vision.channel_multiplier,
        "codebook_size": vision.codebook_size,
        "double_z": False,
        "dropout": 0.0,
        "embed_dim": vision.embed_dim,
        "in_channels": 3,
        "model_type": "Emu3VisionVQ",
        "num_res_blocks": vision.num_res_blocks,
        "out_channels": 3,
        "temporal_downsample_factor": 4,
        "torch_dtype": "float32",
        "z_channels": vision.latent_channels,
    }
    (folder / "config.json").write_text(json.dumps(config))
    official = (
        (r"middle_block\.attn_norm\.", "mid.attn_1.norm."),
        (r"middle_block\.", "mid."),
        (r"attn_norms\.(\d+)\.", r"attn.\1.norm."),
        (r"(down|up)_block\.", ""),
        (r"\.([qkv])_proj\.", r".\1."),
        (r"\.out_proj\.", ".proj_out."),
    )
    tensors = {}
    for name, tensor in model.model.vqmodel.state_dict().items():
        if name.endswith("_proj.weight"):
            tensor = tensor[:, :, None, None]
        tensors[rename(name, official)] = tensor.contiguous().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rename(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    """Apply every rule once, in order."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def byte_letters() -> dict[int, str]:
    """Return the printable letter that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + n) for n, byte in enumerate(others)
    }
