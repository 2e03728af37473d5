"""What only real weights can settle about codes, codebook and tokenizer; sizes in memory."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ssd_research.backbones.attention import RasterKV
from ssd_research.backbones.base import Backbone
from ssd_research.backbones.janus import JanusBackbone
from ssd_research.backbones.vocabulary import VocabularyBackbone

TEXTS = (
    "a photo of 3 cats",
    "Grüße, 1,024 naïve façades & co.: it's 90% done!",
    "  two  spaces\nand a second line",
    "一只红色的猫 🐈",
)


@dataclass(frozen=True)
class Check:
    """One finding: `passed` is None for a value to look at, on which nothing is decided."""

    name: str
    passed: bool | None
    found: str
    numbers: dict[str, Any] = field(default_factory=dict)


def parts(backbone: Backbone) -> dict[str, tuple[int, int]]:
    """Return parameters and bytes of every part that is loaded; each parameter counts once."""
    words = backbone.decoder.get_input_embeddings()
    held = [x for value in vars(backbone).values() for x in _modules(value)]
    modules = {
        "text embeddings": [words],
        "transformer": [backbone.decoder],
        "code embeddings": list(backbone.code_embedders),
        "image head": [backbone.image_head],
        "image decoder": [backbone.image_decoder],
        "other": held,
    }
    seen: set[int] = set()
    found = {}
    for name, group in modules.items():
        own = {id(p): p for module in group for p in module.parameters() if id(p) not in seen}
        seen |= set(own)
        if own:
            sizes = [(p.numel(), p.nbytes) for p in own.values()]
            found[name] = (sum(n for n, _ in sizes), sum(size for _, size in sizes))
    return found


def _modules(value: object) -> list[nn.Module]:
    if isinstance(value, nn.Module):
        return [value]
    return [x for x in value if isinstance(x, nn.Module)] if isinstance(value, tuple) else []


def cache_bytes_per_token(backbone: Backbone) -> int:
    """Return the bytes of keys and values of one token in one stream, from the configuration."""
    config = backbone.decoder.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * width
    return numbers * backbone.dtype.itemsize


def cache(backbone: Backbone, kv: RasterKV) -> Check:
    """Compare the allocated KV cache with the size that follows from the configuration."""
    streams = len(kv.keys[0])
    token = cache_bytes_per_token(backbone)
    allocated = sum(layer.nbytes for layer in (*kv.keys, *kv.values))
    wanted = token * streams * kv.capacity
    image = token * streams * backbone.grid.slots
    found = f"{token / 2**10:.4g} KiB per token and stream, {image / 2**30:.3g} GiB an image"
    numbers = {"per_token": token, "image": image, "wanted": wanted, "allocated": allocated}
    return Check("KV cache", allocated == wanted, found, numbers)


def code_order(backbone: Backbone) -> Check:
    """Check that codes and vocabulary ids pair off, and report whether id - first id is the code.

    A model whose codes are no vocabulary ids has nothing to check.
    """
    name = "code order"
    if not isinstance(backbone, VocabularyBackbone):
        return Check(name, None, "codes have an index space of their own, no vocabulary ids")
    ids = backbone.code_ids.cpu()
    first, last, count = int(ids.min()), int(ids.max()), len(ids)
    known = backbone.decoder.get_input_embeddings().weight.shape[0]
    distinct = len(ids.unique()) == count == backbone.codebook_size
    moved = (ids != torch.arange(first, first + count)).nonzero().flatten()
    numbers = {"codes": count, "first_id": first, "last_id": last, "moved": len(moved)}
    if len(moved) == 0:
        found = f"code = id - {first} for all {count} codes"
    else:
        code = int(moved[0])
        found = (
            f"{count} ids in {first}..{last}, code = id - {first} fails for {len(moved)}, "
            f"first code {code} (id {int(ids[code])}); the checkpoint's own map is used"
        )
    return Check(name, distinct and 0 <= first <= last < known, found, numbers)


def codebook(backbone: Backbone) -> Float[Tensor, "K C"]:
    """Return the image decoder's vectors, row k for code k; ValueError where they are not found."""
    tables = [m.weight for m in backbone.image_decoder.modules() if isinstance(m, nn.Embedding)]
    if len(tables) != 1 or len(tables[0]) != backbone.codebook_size:
        raise ValueError(f"{backbone.name}: the image decoder has no table of its codes")
    return tables[0].detach().float()


def codebook_norms(backbone: Backbone) -> Check:
    """Report the norms of the codebook's rows, which Janus's encoder wants to be 1.

    DeepSeek's encoder compares normalised vectors, transformers' the vectors as they are; both
    decoders normalise. So only unit rows make both encode an image alike.
    """
    norms = codebook(backbone).norm(dim=1)
    low, mean, high = (float(x) for x in (norms.min(), norms.mean(), norms.max()))
    unit = bool(((norms - 1).abs() < 1e-2).all())
    found = f"row norms {low:.4g} to {high:.4g}, mean {mean:.4g}: {'' if unit else 'not '}unit"
    if isinstance(backbone, JanusBackbone) and not unit:
        found += "; decoding normalises, but do not encode images with transformers' JanusVQVAE"
    numbers = {"min": low, "mean": mean, "max": high, "unit": unit}
    return Check("codebook norms", None, found, numbers)


def code_neighbours(backbone: Backbone, *, sample: int = 512) -> Check:
    """Report whether codes that look alike are alike to the language model.

    The correlation of distances in the codebook with those of the model's input embeddings, over
    the pairs of `sample` codes, beside the largest of 20 shuffled orders. A trained model whose
    codes are paired with the wrong vectors shows no more than the shuffled ones.
    """
    generator = torch.Generator().manual_seed(0)
    picked = torch.randperm(backbone.codebook_size, generator=generator)[:sample]
    picked = picked.to(backbone.device)
    vectors = codebook(backbone)[picked].cpu()
    embeddings = backbone.code_embeddings[picked].float().cpu()
    pairs = torch.triu_indices(len(picked), len(picked), offset=1)
    looks = torch.cdist(vectors, vectors)[*pairs]
    means = torch.cdist(embeddings, embeddings)

    def correlation(order: Tensor) -> float:
        shuffled = means[order][:, order][*pairs]
        return float(torch.corrcoef(torch.stack([looks, shuffled]))[0, 1])

    found = correlation(torch.arange(len(picked)))
    orders = [torch.randperm(len(picked), generator=generator) for _ in range(20)]
    chance = max(abs(correlation(order)) for order in orders)
    text = f"correlation of look and embedding distances {found:.3f}; shuffled at most {chance:.3f}"
    numbers = {"correlation": found, "shuffled": chance}
    return Check("codes alike to the model", None, text, numbers)


def prompt_tokens(backbone: Backbone, prompt: str) -> Check:
    """Check a prompt's ids: one bos in front, special tokens whole, nothing beyond the table.

    Emu3's official tokenizer does not say which token is its bos.
    """
    tokenizer, ids = backbone.tokenizer, backbone.prompt_ids(prompt)
    special = {**tokenizer.get_added_vocab(), **special_ids(tokenizer)}
    split = [
        token
        for token, number in special.items()
        if list(tokenizer(token, add_special_tokens=False)["input_ids"]) != [number]
    ]
    wrong = []
    bos = tokenizer.bos_token_id
    if bos not in (None, ids[0]) or ids.count(ids[0]) != 1:
        wrong.append(f"bos ({bos}) is not once in front: {ids[:3]}")
    if split:
        wrong.append(f"{len(split)} special tokens are split, the first {split[0]!r}")
    if max(ids) >= backbone.decoder.get_input_embeddings().weight.shape[0]:
        wrong.append(f"id {max(ids)} is beyond the embedding table")
    ends = "".join(map(str, tokenizer.convert_ids_to_tokens(ids[-3:])))
    found = f"{len(ids)} tokens, the last three {ends}; {len(special)} special tokens are whole"
    return Check("prompt tokens", not wrong, "; ".join(wrong) or found, {"ids": ids})


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of the named special tokens."""
    return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def round_trip(backbone: Backbone, prompt: str) -> Check:
    """Check that text survives encoding and decoding, up to case and the width of spaces.

    Texts with words that a word-level tokenizer does not know are left out.
    """
    tokenizer = backbone.tokenizer
    texts, lost = 0, []
    for text in (prompt, *TEXTS):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id in ids:
            continue
        texts += 1
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if plain(back) != plain(text):
            lost.append(f"{text!r} comes back as {back!r}")
    found = "; ".join(lost) or f"{texts} texts come back"
    return Check("tokenizer round trip", not lost, found, {"texts": texts})


def plain(text: str) -> str:
    """Return a text in lower case with single spaces, none before punctuation."""
    return re.sub(r"\s+(?=[,.:;!?])", "", " ".join(text.lower().split()))


def tokenizers_agree(
    own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, texts: Sequence[str]
) -> Check:
    """Check that two tokenizers of one model give the same ids."""
    wrong = []
    for text in texts:
        ids = [list(one(text, add_special_tokens=False)["input_ids"]) for one in (own, other)]
        if ids[0] != ids[1]:
            wrong.append(f"{text!r} is {ids[0]} and there {ids[1]}")
    found = f"{len(wrong)} of {len(texts)} texts differ, the first: {wrong[0]}" if wrong else ""
    return Check("tokenizers agree", not wrong, found or f"on {len(texts)} texts")
