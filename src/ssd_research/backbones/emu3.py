"""Emu3: codes are ids of the text vocabulary, and a forced token ends every row of the image.

Two published layouts. `BAAI/Emu3-Gen-hf` holds everything in transformers' form. `BAAI/Emu3-Gen` is
the language model alone, and `BAAI/Emu3-VisionTokenizer` its image decoder. Prompts and guidance
are those of the official repository, baaivision/Emu3.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    Emu3Config,
    Emu3ForCausalLM,
    Emu3ForConditionalGeneration,
    Emu3TextConfig,
    Emu3VQVAE,
    PreTrainedTokenizerBase,
)

from ssd_research.backbones import emu3_official as official
from ssd_research.backbones.checkpoint import Checkpoint
from ssd_research.backbones.vocabulary import VocabularyBackbone
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling

POSITIVE = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, "
    "cropped, worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, "
    "username, blurry."
)
BOS, BEGIN_OF_IMAGE, IMAGE_TOKEN = "<|extra_203|>", "<|image start|>", "<|image token|>"
END_OF_ROW = "<|extra_200|>"
STATED = {  # where the official config.json repeats an id
    BOS: "bos_token_id",
    BEGIN_OF_IMAGE: "boi_token_id",
    IMAGE_TOKEN: "img_token_id",
    END_OF_ROW: "eol_token_id",
}
CODE = re.compile(r"<\|visual token (\d+)\|>")
PIXELS = 8  # the side of a code in the image


class Emu3Backbone(VocabularyBackbone):
    """Emu3 for images of any size whose sides are multiples of 8 pixels."""

    def __init__(
        self,
        decoder: nn.Module,
        lm_head: nn.Linear,
        image_decoder: Emu3VQVAE,
        tokenizer: PreTrainedTokenizerBase,
        *,
        grid: TokenGrid,
        name: str,
        defaults: Sampling,
    ) -> None:
        ids = tokenizer.get_vocab()
        super().__init__(
            decoder,
            lm_head,
            code_ids=code_ids(ids),
            end_of_row_id=ids[END_OF_ROW],
            grid=grid,
            image_size=(PIXELS * grid.rows, PIXELS * grid.cols),
            name=name,
            defaults=defaults,
        )
        self.tokenizer = tokenizer
        # Generation never looks at an image: the encoder, half of the VQ model, is let go.
        del image_decoder.encoder, image_decoder.quant_conv
        self.image_decoder = image_decoder.eval().requires_grad_(False)
        self.negative_ids = self._ids(NEGATIVE)
        if [self.negative_ids[0], self.negative_ids[-1]] != [ids[BOS], ids[IMAGE_TOKEN]]:
            raise ValueError(
                f"{name}: the tokenizer adds tokens of its own, or splits special ones"
            )

    @classmethod
    def load(
        cls,
        path: str,
        *,
        name: str,
        guidance: float,
        image_size: Sequence[int],
        temperature: float = 1.0,
        top_k: int | None = None,
        image_decoder: str | None = None,
        tokenizer: str | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Emu3Backbone":
        """Load a folder or hub repository in either layout for images of [height, width] pixels.

        `image_decoder`, in the official layout, and `tokenizer`, in either, name the checkpoints
        that these parts come from where `path` holds none, or others are wanted. Raises
        FileNotFoundError where a file is missing, ValueError for a model of another family and for
        parts that do not belong together.
        """
        checkpoint = Checkpoint.find(path, model=name)
        config = _config(checkpoint)
        grid = grid_of(image_size, positions=config.get_text_config().max_position_embeddings)
        words = _tokenizer(checkpoint, tokenizer, model=name)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        vision = None
        if image_decoder is not None:
            vision = official.load_image_decoder(image_decoder, model=name, **place)
        elif isinstance(config, Emu3TextConfig):
            raise ValueError(
                f"{checkpoint.option} holds no image decoder: set model.backbone.image_decoder to "
                "BAAI/Emu3-VisionTokenizer or its folder"
            )
        codebook = (config.vq_config if vision is None else vision.config).codebook_size
        require_ids(checkpoint, config, words.get_vocab(), codes=codebook)
        if isinstance(config, Emu3TextConfig):
            model = checkpoint.load(Emu3ForCausalLM, config=config, **place)
            stack = model.model
        else:
            model = checkpoint.load(Emu3ForConditionalGeneration, config=config, **place)
            stack, vision = model.model.text_model, vision or model.model.vqmodel
        defaults = Sampling(guidance, temperature, top_k)
        return cls(stack, model.lm_head, vision, words, grid=grid, name=name, defaults=defaults)

    def prompt_ids(self, text: str) -> list[int]:
        """Return bos, `text` with the official suffix, and what starts the image."""
        return self._ids(text + POSITIVE)

    def unconditional_ids(self, ids: list[int]) -> list[int]:
        """Return the official negative prompt, which starts the same image."""
        return list(self.negative_ids)

    def _ids(self, text: str) -> list[int]:
        size = f"{self.grid.rows}*{self.grid.cols}"
        text = f"{BOS}{text}{BEGIN_OF_IMAGE}{size}{IMAGE_TOKEN}"
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode_pixels(self, codes: Int[Tensor, "B N"]) -> Float[Tensor, "B h w 3"]:
        """Run the VQ decoder, image by image: each is the first of the four frames it makes.

        Raises ValueError for a decoder that makes anything but one RGB image of the right size.
        """
        rows = codes.unflatten(1, (self.grid.rows, self.grid.cols))
        images = torch.cat([self.image_decoder.decode(one) for one in rows.split(1)])
        if images.shape[1:] != (3, *self.image_size):
            raise ValueError(
                f"{self.name}: the image decoder made {tuple(images.shape[1:])} of "
                f"{self.grid.rows}x{self.grid.cols} codes, not {(3, *self.image_size)}"
            )
        return images.permute(0, 2, 3, 1)


def grid_of(image_size: Sequence[int], *, positions: int) -> TokenGrid:
    """Return the grid of an image of [height, width] pixels.

    Raises ValueError unless both are multiples of 8 whose tokens leave some of the model's
    `positions` to a prompt.
    """
    size = list(image_size) if isinstance(image_size, Sequence) else [image_size]
    whole = all(isinstance(n, int) and n > 0 and n % PIXELS == 0 for n in size)
    if len(size) != 2 or not whole:
        raise ValueError(
            f"model.backbone.image_size must be [height, width], multiples of {PIXELS}, not {size}"
        )
    grid = TokenGrid(size[0] // PIXELS, size[1] // PIXELS, end_of_row=True)
    if grid.slots >= positions:
        raise ValueError(
            f"model.backbone.image_size={size} takes {grid.slots} tokens, but the model has "
            f"{positions} positions for prompt and image"
        )
    return grid


def code_ids(ids: Mapping[str, int]) -> list[int]:
    """Return the id of every code, code 0 first; ValueError if their numbers have gaps."""
    found = {int(match[1]): ids[token] for token in ids if (match := CODE.fullmatch(token))}
    if not found or max(found) != len(found) - 1:
        raise ValueError(
            f"the tokenizer's visual tokens are not numbered 0, 1, ...: it has {len(found)}, "
            f"the last one {max(found, default=None)}"
        )
    return [found[code] for code in range(len(found))]


def require_ids(
    checkpoint: Checkpoint,
    config: Emu3Config | Emu3TextConfig,
    ids: Mapping[str, int],
    *,
    codes: int,
) -> None:
    """Raise ValueError unless tokenizer, config.json and codebook agree on every token in use."""
    count, words = len(code_ids(ids)), config.get_text_config().vocab_size
    if count != codes:
        raise ValueError(
            f"{checkpoint.option}: the tokenizer has {count} visual tokens, but the image decoder "
            f"{codes} codes"
        )
    found = {token: ids.get(token) for token in (*STATED, *filter(CODE.fullmatch, ids))}
    if isinstance(config, Emu3TextConfig):
        stated = found | {token: checkpoint.config.get(key) for token, key in STATED.items()}
    else:
        stated = config.vocabulary_map or {}
    for token, own in found.items():
        if own is None or own >= words or own != stated.get(token):
            raise ValueError(
                f"{checkpoint.option}: {token} has the id {own} in the tokenizer and "
                f"{stated.get(token)} in config.json, and the model knows {words} ids"
            )


def _config(checkpoint: Checkpoint) -> Emu3Config | Emu3TextConfig:
    """Return the configuration of all parts, or of the language model in the official layout."""
    if checkpoint.config.get("model_type") == official.LANGUAGE:
        return official.language_config(checkpoint)
    checkpoint.require_family("emu3", published="BAAI/Emu3-Gen-hf")
    return Emu3Config.from_pretrained(checkpoint.folder)


def _tokenizer(checkpoint: Checkpoint, other: str | None, *, model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint, or of the `other` one that the command line names."""
    if other is not None:
        files, key = ("*.json", "*.tiktoken", "*.txt"), "model.backbone.tokenizer"
        checkpoint = Checkpoint.find(other, model=model, key=key, files=files)
    if (checkpoint.folder / official.RANKS).is_file():
        return official.load_tokenizer(checkpoint)
    return checkpoint.tokenizer()
