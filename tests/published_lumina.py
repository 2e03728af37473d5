"""A tiny random Lumina-mGPT in the published on-disk format, and an independent VQGAN decoder."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

CODES, WIDTH, HEADS, FEEDFORWARD = 48, 32, 4, 64
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<eoss>", "<racm3:break>"]
RESERVED = [8706, 8799, *range(8801, 8833)]


def code_name(code: int) -> str:
    """Spell a code as the vocabulary does: 17 is IMGIMGBHZ."""
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


def vocabulary(codes: int) -> dict[str, int]:
    """Name every id. Bytes come first and codes in a shuffled order, so no fixed offset is right.

    The published vocabulary has other ids throughout: whoever looks names up is right in both.
    """
    order = torch.randperm(codes, generator=torch.Generator().manual_seed(7)).tolist()
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [code_name(code) for code in order]
    names += [*SPECIAL, *(f"<reserved{n:05d}>" for n in RESERVED)]
    return {name: i for i, name in enumerate(names)}


def write_tokenizer(folder: Path, codes: int) -> None:
    """Write a byte-level tokenizer whose special tokens have the published names."""
    core = Tokenizer(models.BPE(vocabulary(codes), merges=[]))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    core.decoder = decoders.ByteLevel()
    names = [*SPECIAL, *(f"<reserved{n:05d}>" for n in RESERVED)]
    core.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    core.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def lumina_config(*, layers: int, codes: int) -> dict:
    """Return config.json with the published keys; `vq_config` describes weights that are absent."""
    names = vocabulary(codes)
    return {
        "architectures": ["ChameleonXLLMXForConditionalGeneration"],
        "model_type": "chameleon",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dropout": 0.05,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "initializer_range": 0.02,
        "intermediate_size": FEEDFORWARD,
        "mask_image_logits": True,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_parallel_size": 1,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "swin_norm": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(names),
        "vocabulary_map": names,
        "vq_config": {"model_type": "chameleon_vqgan", "num_embeddings": 8192, "embed_dim": 256},
        "z_loss_weight": 1e-05,
    }


def lumina_weights(*, layers: int, codes: int, seed: int) -> dict[str, Tensor]:
    """Return random language-model weights, large enough to be opinionated.

    q_norm and k_norm have the published shape (1, head width) and values of their own.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.2) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    def near(center: float, *shape: int) -> Tensor:
        return center + 0.3 * torch.randn(*shape, generator=generator)

    words = len(vocabulary(codes))
    weights = {
        "model.embed_tokens.weight": torch.randn(words, WIDTH, generator=generator),
        "model.norm.weight": near(1, WIDTH),
        "lm_head.weight": matrix(words, WIDTH, 2.0),
    }
    for n in range(layers):
        layer = f"model.layers.{n}"
        for kind in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{kind}.weight"] = near(1, WIDTH)
        for kind in ("q", "k", "v", "o"):
            weights[f"{layer}.self_attn.{kind}_proj.weight"] = matrix(WIDTH, WIDTH)
        for kind in ("q_norm", "k_norm"):
            weights[f"{layer}.self_attn.{kind}.weight"] = near(1, 1, WIDTH // HEADS)
            weights[f"{layer}.self_attn.{kind}.bias"] = near(0, 1, WIDTH // HEADS)
        weights[f"{layer}.mlp.gate_proj.weight"] = matrix(FEEDFORWARD, WIDTH)
        weights[f"{layer}.mlp.up_proj.weight"] = matrix(FEEDFORWARD, WIDTH)
        weights[f"{layer}.mlp.down_proj.weight"] = matrix(WIDTH, FEEDFORWARD)
    return weights


def write_shards(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write two safetensors shards and their index."""
    names, index = sorted(weights), {}
    for n, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{n:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    record = {"metadata": {"total_size": size}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(record))


class Block(nn.Module):
    """Two normalised 3x3 convolutions around a shortcut, which is 1x1 where the width changes."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inner, 1e-6), nn.GroupNorm(32, outer, 1e-6)
        self.conv1 = nn.Conv2d(inner, outer, 3, padding=1)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1)
        if inner != outer:
            self.nin_shortcut = nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return y + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class Attention(nn.Module):
    """Attention of every place over all places, one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width, 1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        q, k, v = (project(z).flatten(2) for project in (self.q, self.k, self.v))
        weights = (torch.einsum("bci,bcj->bij", q, k) / q.shape[1] ** 0.5).softmax(-1)
        return x + self.proj_out(torch.einsum("bij,bcj->bci", weights, v).reshape(x.shape))


class TamingVQGAN(nn.Module):
    """Names and formulae of taming-transformers' `VQModel`, decoder side."""

    def __init__(
        self,
        *,
        codes: int = CODES,
        base: int = 32,
        multipliers: tuple[int, ...] = (1, 1, 2, 2, 4),
        blocks: int = 1,
        latent: int = 16,
        embed: int = 12,
    ) -> None:
        super().__init__()
        widths = [base * multiplier for multiplier in multipliers]
        self.quantize = nn.Module()
        self.quantize.embedding = nn.Embedding(codes, embed)
        self.post_quant_conv = nn.Conv2d(embed, latent, 1)
        self.decoder = decoder = nn.Module()
        width = widths[-1]
        decoder.conv_in = nn.Conv2d(latent, width, 3, padding=1)
        decoder.mid = nn.Module()
        decoder.mid.block_1, decoder.mid.block_2 = Block(width, width), Block(width, width)
        decoder.mid.attn_1 = Attention(width)
        ups = []
        for level in reversed(range(len(widths))):
            up = nn.Module()
            up.block = nn.ModuleList()
            for _ in range(blocks + 1):
                up.block.append(Block(width, widths[level]))
                width = widths[level]
            if level > 0:
                up.upsample = nn.Module()
                up.upsample.conv = nn.Conv2d(width, width, 3, padding=1)
            ups.insert(0, up)
        decoder.up = nn.ModuleList(ups)
        decoder.norm_out = nn.GroupNorm(32, width, 1e-6)
        decoder.conv_out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, codes: Tensor) -> Tensor:
        """Return pixels [B, h, w, 3] of codes [B, rows, cols]."""
        decoder = self.decoder
        x = self.post_quant_conv(self.quantize.embedding.weight[codes].permute(0, 3, 1, 2))
        x = decoder.conv_in(x)
        x = decoder.mid.block_2(decoder.mid.attn_1(decoder.mid.block_1(x)))
        for up in reversed(decoder.up):
            for block in up.block:
                x = block(x)
            if hasattr(up, "upsample"):
                x = up.upsample.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = decoder.conv_out(F.silu(decoder.norm_out(x)))
        return x.permute(0, 2, 3, 1)


def random_vqgan(**sizes: int) -> TamingVQGAN:
    """Return a seeded VQGAN decoder, its attention and normalisations away from their defaults."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = TamingVQGAN(**sizes)
        for name, p in model.named_parameters():
            if "attn_1" in name and p.ndim > 1:
                nn.init.normal_(p, std=2 / p.shape[1] ** 0.5)
            elif "norm" in name:
                p.data += 0.2 * torch.randn_like(p)
    return model.eval().requires_grad_(False)


def write_vqgan(file: Path, model: nn.Module) -> None:
    """Write a checkpoint as taming's trainer does, with a stump of an encoder in it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    encoder = {"encoder.conv_in.weight": torch.zeros(1), "quant_conv.weight": torch.zeros(1)}
    weights = {**model.state_dict(), **encoder}
    if file.suffix == ".safetensors":
        save_file(weights, file)
    else:
        torch.save({"state_dict": weights}, file)


def write_lumina(
    folder: Path, *, layers: int = 2, codes: int = CODES, seed: int = 0, tokenizer: bool = True
) -> TamingVQGAN:
    """Write config.json, two shards, the tokenizer and tokenizer/vqgan.ckpt; return the VQGAN."""
    folder.mkdir(parents=True, exist_ok=True)
    config = lumina_config(layers=layers, codes=codes)
    (folder / "config.json").write_text(json.dumps(config))
    write_shards(folder, lumina_weights(layers=layers, codes=codes, seed=seed))
    if tokenizer:
        write_tokenizer(folder, codes)
    vqgan = random_vqgan(codes=codes)
    write_vqgan(folder / "tokenizer" / "vqgan.ckpt", vqgan)
    return vqgan
