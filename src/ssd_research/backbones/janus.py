"""Janus-Pro and the tiny backbone: `JanusForConditionalGeneration` behind the `Backbone` interface.

Image codes have their own embedding table and head, so no vocabulary ids are involved. The
unconditional prompt is as long as the prompt: all but its first and last token become pad tokens,
and these are attended to, as in the official repository.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import JanusConfig, JanusForConditionalGeneration, PreTrainedTokenizerBase

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.checkpoint import Checkpoint
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling

PUBLISHED = "deepseek-community/Janus-Pro-7B"
OFFICIAL = "multi_modality"  # the model type in DeepSeek's own layout
NEVER_RUN = ("lm_head.", "model.vision_model.", "model.aligner.")
TEMPLATE = "<|User|>: {}\n\n<|Assistant|>:"
BEGIN_OF_IMAGE = "<begin_of_image>"


def conditional_ids(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Return the function from a prompt to its ids: bos, template, begin of image.

    Published tokenizers differ in whether they add bos by themselves, so it is put here.
    """

    def ids(text: str) -> list[int]:
        sequence = TEMPLATE.format(text) + BEGIN_OF_IMAGE
        rest = tokenizer(sequence, add_special_tokens=False)["input_ids"]
        return [tokenizer.bos_token_id, *rest]

    return ids


def unconditional_ids(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return `ids` with every token but the first and the last replaced by pad."""
    return [ids[0], *[tokenizer.pad_token_id] * (len(ids) - 2), ids[-1]]


def require_special_tokens(tokenizer: PreTrainedTokenizerBase, option: str) -> None:
    """Raise ValueError unless bos, pad and begin of image are tokens of their own.

    `option` is the setting that named the checkpoint.
    """
    for role in ("bos", "pad"):
        if getattr(tokenizer, f"{role}_token_id") is None:
            raise ValueError(f"{option}: the tokenizer has no {role} token")
    ids = tokenizer(BEGIN_OF_IMAGE, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ValueError(
            f"{option}: {BEGIN_OF_IMAGE} is {len(ids)} tokens of the tokenizer, not one of its own"
        )


class JanusBackbone(Backbone):
    """A Janus model of any size; its grid follows from its configuration."""

    def __init__(
        self,
        model: JanusForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        defaults: Sampling,
    ) -> None:
        super().__init__(model.model.language_model)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.name, self.defaults = tokenizer, name, defaults
        vision = model.config.vision_config
        side = vision.image_size // vision.patch_size
        self.grid = TokenGrid(side, side)
        self.image_size = (vision.image_size, vision.image_size)
        self.hidden_size = model.config.text_config.hidden_size
        self.codebook_size = model.config.vq_config.num_embeddings
        self.image_head = model.model.generation_head
        self.image_decoder = model.model.vqmodel
        self.code_embedders = (model.model.generation_embeddings, model.model.generation_aligner)
        with torch.no_grad():
            every_code = torch.arange(self.codebook_size, device=self.device)
            self.code_embeddings = model.prepare_embeddings_for_image_generation(every_code)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        name: str,
        guidance: float,
        temperature: float = 1.0,
        top_k: int | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "JanusBackbone":
        """Load a folder or hub repository in Hugging Face layout.

        Raises FileNotFoundError where neither exists, ValueError for a model of another family or
        a checkpoint that does not hold every weight.
        """
        checkpoint = Checkpoint.find(path, model=name)
        if checkpoint.config.get("model_type") == OFFICIAL:
            raise ValueError(
                f"{checkpoint.option} holds a Janus model in DeepSeek's own layout; this needs the "
                f"Hugging Face layout, such as {PUBLISHED} "
                f"(scripts/download_weights.sh {name} <folder>)"
            )
        checkpoint.require_family("janus", published=PUBLISHED)
        tokenizer = checkpoint.tokenizer()
        require_special_tokens(tokenizer, checkpoint.option)
        config = JanusConfig.from_pretrained(checkpoint.folder)
        # Generation never looks at an image or writes text: the vision tower's layers stay on the
        # disk, and the text head (0.8 GB of Janus-Pro-7B in bfloat16) goes.
        config.vision_config.num_hidden_layers = 0
        model = checkpoint.load(
            JanusForConditionalGeneration,
            config=config,
            device=device,
            dtype=dtype,
            may_lack=NEVER_RUN,
        )
        model.lm_head = nn.Identity()
        defaults = Sampling(guidance, temperature, top_k)
        return cls(model, tokenizer, name=name, defaults=defaults)

    def prompt_ids(self, text: str) -> list[int]:
        """Return bos, the official template around `text`, begin of image."""
        return conditional_ids(self.tokenizer)(text)

    def unconditional_ids(self, ids: list[int]) -> list[int]:
        """Return as many tokens as the prompt has, pads between the first and the last."""
        return unconditional_ids(self.tokenizer, ids)

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Raise ValueError for words outside a word-level vocabulary, which tiny has, or length."""
        super().check_prompts(prompts)
        unknown = self.tokenizer.unk_token_id
        if unknown is None:
            return
        for text in prompts:
            if unknown not in self.prompt_ids(text):
                continue
            pieces = self.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text.lower())
            words = [w for w, _ in pieces if self.tokenizer.convert_tokens_to_ids(w) == unknown]
            known = sorted(w for w in self.tokenizer.get_vocab() if w.isalpha())
            raise ValueError(
                f"prompt {text!r}: {self.name} does not know {', '.join(map(repr, words))}; "
                f"it knows: {' '.join(known)}"
            )

    @property
    def held_modules(self) -> list[nn.Module]:
        """The whole model: what generation never runs is small or gone."""
        return [self.model]

    @property
    def codebook(self) -> Float[Tensor, "K C"]:
        """The unit vectors that Janus's VQ decoder looks codes up in."""
        return F.normalize(self.image_decoder.quantize.embedding.weight, dim=-1)

    def decode_pixels(self, codes: Int[Tensor, "B N"]) -> Float[Tensor, "B h w 3"]:
        """Run Janus's VQ decoder."""
        return self.model.decode_image_tokens(codes)
