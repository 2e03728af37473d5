"""BLIP (Li et al., 2022) as VQA judge: nearest in kind and size to mPLUG, the official judge."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ssd_research.metrics.judges import pretrained
from ssd_research.metrics.judges.vqa import Answer, Asked

MOST_TOKENS = 10  # of an answer; BLIP was evaluated with this limit


@dataclass(frozen=True)
class BlipJudge:
    """Answers with a `BlipForQuestionAnswering` checkpoint, greedily.

    The picture is encoded once for all its questions. Questions of one length are answered
    together, without padding: transformers' cross-attention does not mask it, so that an answer
    would depend on which questions are asked with it.
    """

    model: str
    revision: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    name: str = field(init=False)
    version: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.model)
        weights = pretrained.version(self.model, self.revision)
        object.__setattr__(self, "version", f"{weights} {self.dtype}")

    def answer(self, image: UInt8[np.ndarray, "h w 3"], questions: Sequence[Asked]) -> list[Answer]:
        """Return BLIP's answers, with P(yes) / (P(yes) + P(no)) of the first word."""
        model, processor = self._loaded
        pixels = processor.image_processor(images=image, return_tensors="pt")["pixel_values"]
        tokens = (
            processor.tokenizer([q.question for q in questions])["input_ids"] if questions else []
        )
        groups: dict[int, list[int]] = {}
        for row, ids in enumerate(tokens):
            groups.setdefault(len(ids), []).append(row)
        found: dict[int, Answer] = {}
        with torch.inference_mode():
            seen = model.vision_model(pixel_values=pixels.to(model.device, model.dtype))[0]
            for rows in groups.values():
                ids = torch.tensor([tokens[row] for row in rows], device=model.device)
                found |= zip(rows, self._read(_generate(model, seen, ids)), strict=True)
        return [found[row] for row in range(len(questions))]

    def _read(self, reply: Any) -> list[Answer]:
        pretrained.refuse_overflow(
            *reply.logits, key=pretrained.KEY, model=self.model, dtype=self.dtype
        )
        texts = self._loaded[1].tokenizer.batch_decode(reply.sequences, skip_special_tokens=True)
        p_yes = reply.logits[0].float()[:, self._words].softmax(-1)[:, 0]
        return [Answer(text.strip(), p) for text, p in zip(texts, p_yes.tolist(), strict=True)]

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from transformers import BlipForQuestionAnswering

        return pretrained.load(
            BlipForQuestionAnswering,
            self.model,
            revision=self.revision,
            device=self.device,
            dtype=self.dtype,
        )

    @cached_property
    def _words(self) -> list[int]:
        """Return the tokens of yes and no."""
        tokenizer = self._loaded[1].tokenizer
        return [tokenizer.encode(w, add_special_tokens=False)[0] for w in ("yes", "no")]


def _generate(model: Any, seen: Float[Tensor, "1 P D"], ids: Int[Tensor, "Q L"]) -> Any:
    """Return the decoder's generation for Q questions of L tokens about one encoded picture."""
    read = model.text_encoder(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        encoder_hidden_states=seen.expand(len(ids), -1, -1),
        return_dict=False,
    )[0]
    return model.text_decoder.generate(
        input_ids=torch.full((len(ids), 1), model.decoder_start_token_id, device=ids.device),
        encoder_hidden_states=read,
        eos_token_id=model.config.text_config.sep_token_id,
        pad_token_id=model.config.text_config.pad_token_id,
        max_new_tokens=MOST_TOKENS,
        do_sample=False,
        num_beams=1,
        output_logits=True,
        return_dict_in_generate=True,
    )
