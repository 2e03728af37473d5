"""What a decoding cost: forwards, tokens, attention, draft heads, acceptance and seconds.

Numbers of images stay on the device until the end, so that no decoder waits for them. All of them
are an image's own: they do not depend on the batch that it was decoded in.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

Drafting = Literal["horizontal", "vertical", "eagle"]


@dataclass(frozen=True)
class Work:
    """The work on each of B images, whatever the decoder, from which FLOPs follow.

    `streams` is how many sequences an image takes: 2 with guidance, else 1. `prompt_tokens` counts
    the prefilled tokens of all its streams. `attended` counts the pairs of a fed token and one that
    it sees, itself included, over all passes and streams, the prefill's too; `eagle_attended` those
    of an EAGLE drafter. `head_tokens` counts what draft heads read per stream, by axis: one is one
    head, or an EAGLE drafter, on one token.
    """

    streams: int
    prompt_tokens: list[int]
    attended: list[int]
    head_tokens: dict[Drafting, list[int]]
    eagle_attended: list[int]


@dataclass(frozen=True)
class Generation:
    """The codes [B, N] of B images on the CPU, and what they cost.

    `nfe` counts the backbone forwards of each image, the prefill included; conditional and
    unconditional streams share one. `tokens` counts image tokens forwarded for each image, per
    stream. `seconds` holds the batch's wall time per phase and `total`. Each entry of `rounds` is a
    verification round summed over the image: its `stage` (horizontal, base, incremental), `round`
    from 1, and the tokens `drafted` and `accepted` of each image. `peak_memory_bytes` is the
    allocator's on CUDA and 0 elsewhere.
    """

    codes: Int[Tensor, "B N"]
    nfe: list[int]
    tokens: list[int]
    seconds: dict[str, float]
    rounds: list[dict[str, Any]]
    work: Work
    peak_memory_bytes: int = 0


class Meter:
    """The counts of a batch under way: passes of the batch, and of each image all the rest."""

    def __init__(self, batch: int, lengths: Int[Tensor, " S"]) -> None:
        """Count the prefill's tokens from the prompts' `lengths`, conditional rows first."""
        self.passes = 0
        self.seconds: dict[str, float] = {}
        self.streams = len(lengths) // batch
        by_stream = lengths.view(self.streams, batch)
        self.prompt_tokens: Int[Tensor, " B"] = by_stream.sum(0)
        self._nfe = torch.zeros_like(self.prompt_tokens)
        self._tokens = torch.zeros_like(self._nfe)
        self._attended = (by_stream * (by_stream + 1) // 2).sum(0)
        self._eagle_attended = torch.zeros_like(self._nfe)
        self._head_tokens: dict[Drafting, Tensor] = {}
        self._rounds: dict[tuple[str, int], list[Tensor]] = {}

    @property
    def nfe(self) -> list[int]:
        """Backbone forwards of each image, the prefill included."""
        return self._nfe.tolist()

    @property
    def tokens(self) -> list[int]:
        """Image tokens forwarded for each image, per stream."""
        return self._tokens.tolist()

    @property
    def work(self) -> Work:
        """The work on each image so far."""
        return Work(
            streams=self.streams,
            prompt_tokens=self.prompt_tokens.tolist(),
            attended=self._attended.tolist(),
            head_tokens={axis: count.tolist() for axis, count in self._head_tokens.items()},
            eagle_attended=self._eagle_attended.tolist(),
        )

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The verification rounds in the order in which they first came up."""
        return [
            {
                "stage": stage,
                "round": number,
                "drafted": drafted.tolist(),
                "accepted": accepted.tolist(),
            }
            for (stage, number), (drafted, accepted) in self._rounds.items()
        ]

    def count_prefill(self) -> None:
        """Count the forward of the prompts, in which every image takes part."""
        self.passes += 1
        self._nfe += 1

    def count(self, tokens: int | Int[Tensor, " B"], seen: int | Int[Tensor, " B"]) -> None:
        """Count one pass that forwards so many tokens; an image without any took no part in it.

        `seen` is how many image tokens they see, all together, in one stream. The prompt they see
        too.
        """
        self.passes += 1
        self._tokens += tokens
        self._nfe += 1 if isinstance(tokens, int) else (tokens > 0).long()
        self._attended += self.prompt_tokens * tokens + self.streams * seen

    def count_drafts(self, axis: Drafting, tokens: int | Int[Tensor, " B"]) -> None:
        """Count evaluations of the draft heads of an axis, or of an EAGLE drafter, per stream."""
        before = self._head_tokens.get(axis, torch.zeros_like(self._nfe))
        self._head_tokens[axis] = before + tokens

    def count_eagle(self, tokens: Int[Tensor, " B"], seen: Int[Tensor, " B"]) -> None:
        """Count what an EAGLE drafter reads, and how many pairs (h, e) of a stream that sees."""
        self.count_drafts("eagle", tokens)
        self._eagle_attended = self._eagle_attended + self.streams * seen

    def record(
        self, key: tuple[str, int], drafted: Int[Tensor, " B"], accepted: Int[Tensor, " B"]
    ) -> None:
        """Add drafted and accepted tokens to the round `key`, a stage and a number from 1."""
        if key not in self._rounds:
            self._rounds[key] = [torch.zeros_like(self._nfe), torch.zeros_like(self._nfe)]
        self._rounds[key][0] += drafted
        self._rounds[key][1] += accepted
