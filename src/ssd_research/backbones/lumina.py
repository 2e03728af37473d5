"""Lumina-mGPT: `ChameleonForConditionalGeneration` behind the `Backbone` interface.

The official repository's loop lets the model write the tokens that begin an image; here they follow
the prompt, so that every image has the size that was asked for. The unconditional prompt is these
three tokens alone. Pixels need the VQGAN decoder of Chameleon, which is in no Lumina checkpoint.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    PreTrainedTokenizerBase,
)

from ssd_research.backbones.checkpoint import Checkpoint
from ssd_research.backbones.vocabulary import VocabularyBackbone
from ssd_research.backbones.vqgan import OPTION, VQGANDecoder
from ssd_research.backbones.vqgan import PUBLISHED as PUBLISHED_VQGAN
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling

PUBLISHED = "Alpha-VLLM/Lumina-mGPT-7B-768"
TEMPLATE = "Generate an image of {width}x{height} according to the following prompt:\n{prompt}"
BEGIN_OF_IMAGE = "<racm3:break>"
END_OF_TURN = "<reserved08706>"
END_OF_ROW = "<reserved08799>"
SIZE = "<reserved{:05d}>"  # 8800 + n for a side of 32 n pixels
PATCH = 16  # pixels per code and side
NO_VQ = {  # transformers' image encoder, which no Lumina checkpoint holds, all but gone
    "base_channels": 32,
    "channel_multiplier": [1],
    "num_res_blocks": 1,
    "latent_channels": 1,
    "embed_dim": 1,
    "num_embeddings": 1,
    "attn_type": "none",
}


@dataclass(frozen=True)
class LuminaTokens:
    """The ids of the tokens around an image, and `codes`, the id of every code in code order."""

    bos: int
    end_of_turn: int
    begin: tuple[int, int, int]  # begin of image, height, width
    end_of_row: int
    codes: tuple[int, ...]

    @classmethod
    def find(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary_map: Mapping[str, int],
        image_size: tuple[int, int],
    ) -> "LuminaTokens":
        """Look every token up by its name.

        Raises ValueError for a token that the tokenizer lacks or the model knows under another id.
        """
        known = tokenizer.get_vocab()

        def find(token: str) -> int:
            found = known.get(token)
            if found is None:
                raise ValueError(f"the tokenizer has no {token}")
            if vocabulary_map.get(token, found) != found:
                raise ValueError(
                    f"{token} is {found} in the tokenizer but {vocabulary_map[token]} in "
                    "vocabulary_map: the tokenizer belongs to another model"
                )
            return found

        if tokenizer.bos_token is None:
            raise ValueError("the tokenizer names no bos_token")
        height, width = (find(SIZE.format(8800 + side // 32)) for side in image_size)
        return cls(
            bos=find(tokenizer.bos_token),
            end_of_turn=find(END_OF_TURN),
            begin=(find(BEGIN_OF_IMAGE), height, width),
            end_of_row=find(END_OF_ROW),
            codes=code_ids(vocabulary_map),
        )


class LuminaBackbone(VocabularyBackbone):
    """A Lumina-mGPT model of any size, for images of one fixed size."""

    def __init__(
        self,
        model: ChameleonForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        tokens: LuminaTokens,
        *,
        image_size: tuple[int, int],
        image_decoder: str | None,
        name: str,
        defaults: Sampling,
    ) -> None:
        height, width = image_size
        super().__init__(
            model.model,
            model.lm_head,
            code_ids=tokens.codes,
            end_of_row_id=tokens.end_of_row,
            grid=TokenGrid(height // PATCH, width // PATCH, end_of_row=True),
            image_size=image_size,
            name=name,
            defaults=defaults,
        )
        self.tokenizer, self.tokens = tokenizer, tokens
        self.image_decoder_path = image_decoder

    @classmethod
    def load(
        cls,
        path: str,
        *,
        name: str,
        guidance: float,
        image_size: Sequence[int],
        image_decoder: str | None,
        temperature: float = 1.0,
        top_k: int | None = None,
        tokenizer: str | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "LuminaBackbone":
        """Load a folder or hub repository in the published layout.

        `image_size` is [height, width] in pixels. `image_decoder` names a VQGAN (see `vqgan.py`),
        which is loaded when the first image is decoded; `tokenizer` another checkpoint, where this
        one holds none. Raises FileNotFoundError or ValueError, naming the option.
        """
        size = checked_size(image_size)
        checkpoint = Checkpoint.find(path, model=name)
        checkpoint.require_family("chameleon", published=PUBLISHED)
        config = ChameleonConfig.from_dict({**checkpoint.config, "vq_config": NO_VQ})
        source = checkpoint
        if tokenizer is not None:
            key = "model.backbone.tokenizer"
            source = Checkpoint.find(tokenizer, model=name, key=key, files=("*.json",))
        words = source.tokenizer()
        try:
            tokens = LuminaTokens.find(words, config.vocabulary_map or {}, size)
        except ValueError as error:
            raise ValueError(f"{checkpoint.option}: {error}") from error
        model = checkpoint.load(
            ChameleonForConditionalGeneration,
            config=config,
            weights=per_head(checkpoint.tensors(), config),
            may_lack=("model.vqmodel.",),
            device=device,
            dtype=dtype,
        )
        defaults = Sampling(guidance, temperature, top_k)
        return cls(
            model,
            words,
            tokens,
            image_size=size,
            image_decoder=image_decoder,
            name=name,
            defaults=defaults,
        )

    @cached_property
    def image_decoder(self) -> nn.Module:
        """The VQGAN decoder, loaded when it is first needed; ValueError where none is named."""
        if self.image_decoder_path is None:
            raise ValueError(
                f"{OPTION}=null, but {self.name} needs a VQGAN to turn codes into pixels: "
                f"set it to {PUBLISHED_VQGAN}, a folder or a vqgan.ckpt"
            )
        return VQGANDecoder.load(
            self.image_decoder_path,
            model=self.name,
            codes=self.codebook_size,
            patch=PATCH,
            device=self.device,
        )

    @property
    def held_modules(self) -> list[nn.Module]:
        """All modules in memory; the VQGAN where one is named."""
        without = [self.decoder, self.image_head]
        return without if self.image_decoder_path is None else [*without, self.image_decoder]

    def prompt_ids(self, text: str) -> list[int]:
        """Return bos, the official template around `text`, end of turn, what begins an image."""
        height, width = self.image_size
        filled = TEMPLATE.format(width=width, height=height, prompt=text)
        ids = self.tokenizer(filled, add_special_tokens=False)["input_ids"]
        return [self.tokens.bos, *ids, self.tokens.end_of_turn, *self.tokens.begin]

    def unconditional_ids(self, ids: list[int]) -> list[int]:
        """Return begin of image and the image's size, whatever the prompt."""
        return list(self.tokens.begin)

    def decode_pixels(self, codes: Int[Tensor, "B N"]) -> Float[Tensor, "B h w 3"]:
        """Run Chameleon's VQGAN decoder."""
        return self.image_decoder(codes.unflatten(1, (self.grid.rows, self.grid.cols)))


def checked_size(image_size: Sequence[int]) -> tuple[int, int]:
    """Return (height, width); ValueError unless both are multiples of 32 pixels."""
    sides = list(image_size) if isinstance(image_size, Sequence) else [image_size]
    if len(sides) != 2 or not all(
        isinstance(side, int) and side > 0 and side % 32 == 0 for side in sides
    ):
        raise ValueError(
            f"model.backbone.image_size={sides} must be [height, width] in pixels, "
            "each a multiple of 32"
        )
    return sides[0], sides[1]


def code_ids(vocabulary_map: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ids of the codes 0 ... K-1 from their names: `IMGIMG`, digits as A...J, `Z`.

    Raises ValueError unless the names are exactly those of K codes.
    """
    names = {name: token for name, token in vocabulary_map.items() if name.startswith("IMGIMG")}
    ids: dict[int, int] = {}
    for name, token in names.items():
        letters = re.fullmatch(r"IMGIMG([A-J]+)Z", name)
        if letters is None:
            raise ValueError(f"vocabulary_map has {name}, which names no code")
        code = int("".join(str(ord(letter) - ord("A")) for letter in letters[1]))
        if code in ids:
            raise ValueError(f"vocabulary_map names the code {code} twice, the second time {name}")
        ids[code] = token
    missing = sorted(set(range(max(len(ids), 1))) - set(ids))
    if missing:
        raise ValueError(f"vocabulary_map names {len(ids)} codes, but not the code {missing[0]}")
    if len(set(ids.values())) < len(ids):
        raise ValueError("vocabulary_map gives several codes the same id")
    return tuple(ids[code] for code in range(len(ids)))


def per_head(weights: Mapping[str, Tensor], config: ChameleonConfig) -> dict[str, Tensor]:
    """Return the language model's weights with one row of q_norm and k_norm for every head.

    Published are as many rows as there were model-parallel shards, one for 7B, each shared by
    consecutive heads. All other weights are passed on as they are.
    """
    heads = {"q_norm": config.num_attention_heads, "k_norm": config.num_key_value_heads}
    given = {}
    for name, weight in weights.items():
        if name.startswith("model.vqmodel."):
            continue
        norm = re.search(r"\.self_attn\.([qk]_norm)\.", name)
        repeats = heads[norm[1]] // len(weight) if norm else 1
        given[name] = weight if repeats == 1 else weight.repeat_interleave(repeats, dim=0)
    return given
