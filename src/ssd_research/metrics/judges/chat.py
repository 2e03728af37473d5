"""Chat models that see (Qwen-VL, InternVL, SmolVLM, ...) as VQA judges, by their first token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from ssd_research.metrics.judges import pretrained
from ssd_research.metrics.judges.vqa import Answer, Asked, JudgeError

SPELLINGS = {
    "yes": ("yes", "Yes", "YES", " yes", " Yes", " YES"),
    "no": ("no", "No", "NO", " no", " No", " NO"),
}


@dataclass(frozen=True)
class ChatJudge:
    """Answers with an image-text-to-text checkpoint: whichever of yes and no is likelier.

    Where both together have less than `least_mass` of the first token's probability, the model
    wants to say something else: its likeliest token is the answer, and counted as unparsable.
    """

    model: str
    revision: str | None = None
    device: str = "auto"
    dtype: str = "bfloat16"
    prompt: str = "{question} Answer with yes or no."
    least_mass: float = 0.1
    batch_size: int = 8
    name: str = field(init=False)
    version: str = field(init=False)

    def __post_init__(self) -> None:
        if "{question}" not in self.prompt:
            raise ValueError(f"eval.judge.prompt={self.prompt!r} has no place for {{question}}")
        if not 0 <= self.least_mass < 1:
            raise ValueError(f"eval.judge.least_mass={self.least_mass} must be in [0, 1)")
        if self.batch_size < 1:
            raise ValueError(f"eval.judge.batch_size={self.batch_size} must be at least 1")
        object.__setattr__(self, "name", self.model)
        weights = pretrained.version(self.model, self.revision)
        settings = f"{self.dtype} {self.prompt!r} least_mass={self.least_mass}"
        object.__setattr__(self, "version", f"{weights} {settings}")

    def answer(self, image: UInt8[np.ndarray, "h w 3"], questions: Sequence[Asked]) -> list[Answer]:
        """Return yes, no or the odd first token per question, with P(yes) / (P(yes) + P(no))."""
        picture = Image.fromarray(image)
        found: list[Answer] = []
        for start in range(0, len(questions), self.batch_size):
            group = [asked.question for asked in questions[start : start + self.batch_size]]
            found += [self._read(row) for row in self._first_token(picture, group)]
        return found

    def _first_token(self, picture: Image.Image, questions: Sequence[str]) -> Float[Tensor, "Q V"]:
        """Return the probabilities of the first token of each reply."""
        model, processor = self._loaded
        texts = [self._chat(question) for question in questions]
        start = processor.tokenizer.bos_token
        inputs = processor(
            text=texts,
            images=[[picture]] * len(texts),
            padding=True,
            add_special_tokens=not (start and texts[0].startswith(start)),
            return_tensors="pt",
        ).to(model.device, model.dtype)
        with torch.inference_mode():
            # Not a plain forward: generate also places the tokens right behind the padding.
            reply = model.generate(
                **inputs,
                max_new_tokens=1,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        first = reply.logits[0].float().softmax(-1).cpu()
        pretrained.refuse_overflow(first, key=pretrained.KEY, model=self.model, dtype=self.dtype)
        return first

    def _chat(self, question: str) -> str:
        """Return the chat up to where the model replies."""
        content = [
            {"type": "image"},
            {"type": "text", "text": self.prompt.replace("{question}", question)},
        ]
        return self._loaded[1].apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )

    def _read(self, probabilities: Float[Tensor, "V"]) -> Answer:
        yes, no = (probabilities[self._words[word]].sum().item() for word in ("yes", "no"))
        p_yes = yes / (yes + no) if yes + no else None
        if yes + no < self.least_mass or p_yes is None:
            token = int(probabilities.argmax())
            return Answer(self._loaded[1].tokenizer.decode([token]).strip(), p_yes)
        return Answer("yes" if yes > no else "no", p_yes)

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoModelForImageTextToText

        model, processor = pretrained.load(
            AutoModelForImageTextToText,
            self.model,
            revision=self.revision,
            device=self.device,
            dtype=self.dtype,
        )
        processor.tokenizer.padding_side = "left"
        return model, processor

    @cached_property
    def _words(self) -> dict[str, list[int]]:
        """Return the tokens that are a spelling of yes, and of no, as a whole."""
        tokenizer = self._loaded[1].tokenizer
        found: dict[str, list[int]] = {}
        for word, spellings in SPELLINGS.items():
            pieces = [tokenizer.encode(text, add_special_tokens=False) for text in spellings]
            single = {p[0] for p in pieces if len(p) == 1} - {tokenizer.unk_token_id}
            if not single:
                raise JudgeError(f"eval.judge.model={self.model} has no token for {word}")
            found[word] = sorted(single)
        return found
