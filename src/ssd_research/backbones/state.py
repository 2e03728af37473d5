"""`DecodingState`: B images under way, the only way to reach the backbone, and the meter.

    slot        0 ... P-1 | P        P+1      ...
    token       prompt    | code 0   code 1   ...      (end-of-row tokens folded in)
    its output  -         | h_pre of 1, of 2, ...      h_pre[:, 0] is the prompt's last output

Feeding the codes at positions [a, b) writes their keys and values and gives the states that predict
a+1 ... b. Feeding other codes at the same positions later overwrites both: that is the rollback.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssd_research.backbones.attention import RasterKV, RasterPass
from ssd_research.sampling import Sampling

if TYPE_CHECKING:
    from ssd_research.backbones.base import Backbone


@dataclass
class Meter:
    """What a decoding cost: forwards, image tokens forwarded per stream, seconds, acceptance."""

    nfe: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Generation:
    """The codes [B, N] of B images on the CPU, and what they cost.

    `nfe` counts backbone forwards, the prefill included; conditional and unconditional streams
    share one. `tokens` counts image tokens forwarded per stream. `seconds` holds wall time per
    phase and `total`. Each entry of `rounds` is a verification round summed over the image: its
    `stage` (horizontal, base, incremental), `round` from 1, `drafted` tokens per image and
    `accepted` of each image. `peak_memory_bytes` is the allocator's on CUDA and 0 elsewhere.
    """

    codes: Int[Tensor, "B N"]
    nfe: int
    tokens: int
    seconds: dict[str, float]
    rounds: list[dict[str, Any]]
    peak_memory_bytes: int = 0


class DecodingState:
    """Codes [B, N] under way, with `h_pre` [S, N, D], the state that predicts each position.

    S counts streams: the B conditional rows, then (unless guidance is 1) the B unconditional ones.
    """

    def __init__(
        self, backbone: "Backbone", *, batch: int, lengths: Int[Tensor, " S"], sampling: Sampling
    ) -> None:
        self.backbone, self.sampling, self.batch = backbone, sampling, batch
        self.lengths = lengths
        self.shared_length = int(lengths[0]) if bool((lengths == lengths[0]).all()) else None
        size = backbone.grid.size
        self.codes = torch.zeros(batch, size, dtype=torch.long, device=backbone.device)
        self.h_pre = torch.zeros(
            len(lengths), size, backbone.hidden_size, dtype=backbone.dtype, device=backbone.device
        )
        self.kv: RasterKV = backbone.new_cache(
            len(lengths), int(lengths.max()) + backbone.grid.slots
        )
        self.meter = Meter()
        self._started = time.perf_counter()
        if backbone.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(backbone.device)

    @classmethod
    def prefill(
        cls, backbone: "Backbone", ids: Sequence[Sequence[int]], *, batch: int, sampling: Sampling
    ) -> "DecodingState":
        """Feed the prompts in one right-padded pass; junk is overwritten before it is seen."""
        text, lengths = backbone.pad_right(ids)
        state = cls(backbone, batch=batch, lengths=lengths, sampling=sampling)
        with state.timed("prefill"):
            span = range(text.shape[1])
            slots = torch.arange(len(span), device=backbone.device).expand(len(ids), -1)
            h = backbone.run(text, RasterPass.plan(state.kv, slots, shared=span))
            rows = torch.arange(len(ids), device=backbone.device)
            state.h_pre[:, 0] = h[rows, lengths - 1]
        state.meter.nfe += 1
        return state

    @property
    def streams(self) -> int:
        """How many sequences every forward feeds: 2 B with guidance, B without."""
        return len(self.lengths)

    @torch.inference_mode()
    def forward(
        self,
        codes: Int[Tensor, "B L"],
        positions: range | Int[Tensor, "B L"],
        *,
        phase: str,
        hidden: Bool[Tensor, "S T"] | None = None,
    ) -> None:
        """Feed `codes` at raster `positions`; store the states that predict what follows each.

        A range serves all images alike. A tensor gives every image its own positions (grids without
        end-of-row tokens only); `hidden` then marks slots nobody may see. One call is one NFE.
        Raises ValueError for `hidden` with a range, where nothing could be hidden.
        """
        if hidden is not None and isinstance(positions, range):
            raise ValueError("hidden slots need a tensor of positions, not a range")
        with self.timed(phase):
            if isinstance(positions, range):
                self._forward_range(codes, positions)
            else:
                self._forward_scattered(codes, positions, hidden)
        self.meter.nfe += 1

    def _forward_range(self, codes: Int[Tensor, "B L"], positions: range) -> None:
        grid = self.backbone.grid
        embeds, predicts = self.backbone.image_tokens(codes, positions)
        first, count = grid.slot(positions.start), embeds.shape[1]
        offsets = torch.arange(first, first + count, device=codes.device)
        shared = None
        if self.shared_length is not None:
            shared = range(self.shared_length + first, self.shared_length + first + count)
        plan = RasterPass.plan(self.kv, self.lengths[:, None] + offsets, shared=shared)
        h = self.backbone.run(embeds.repeat(self.streams // self.batch, 1, 1), plan)
        stop = min(positions.stop + 1, grid.size)
        self.h_pre[:, positions.start + 1 : stop] = h[:, predicts[: stop - positions.start - 1]]
        self.meter.tokens += count

    def _forward_scattered(
        self, codes: Int[Tensor, "B L"], positions: Int[Tensor, "B L"], hidden: Tensor | None
    ) -> None:
        if self.backbone.grid.end_of_row:
            raise NotImplementedError("positions per image need a grid without end-of-row tokens")
        twice = self.streams // self.batch
        where = positions.repeat(twice, 1)
        slots = self.lengths[:, None] + where
        plan = RasterPass.plan(self.kv, slots, shared=None, hidden=hidden)
        h = self.backbone.run(self.backbone.embed(codes).repeat(twice, 1, 1), plan)
        inside = where + 1 < self.backbone.grid.size
        rows = torch.arange(self.streams, device=codes.device)[:, None].expand_as(where)
        self.h_pre[rows[inside], where[inside] + 1] = h[inside]
        self.meter.tokens += positions.shape[1]

    @torch.inference_mode()
    def distribution(self, positions: range) -> Float[Tensor, "B L K"]:
        """Return p at consecutive positions from the states that predict them."""
        return self.distribution_of(self.h_pre[:, positions.start : positions.stop])

    @torch.inference_mode()
    def distribution_of(self, h_pre: Float[Tensor, "S L D"]) -> Float[Tensor, "B L K"]:
        """Return the guided, filtered distribution that any pre-norm states stand for."""
        return self.sampling.distribution(self.backbone.logits(h_pre, self.sampling.guidance))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the wall time of a block to `phase`; on CUDA the device is waited for."""
        start = self._now()
        yield
        seconds = self.meter.seconds
        seconds[phase] = seconds.get(phase, 0.0) + self._now() - start

    def _now(self) -> float:
        if self.backbone.device.type == "cuda":
            torch.cuda.synchronize(self.backbone.device)
        return time.perf_counter()

    def record_round(self, stage: str, number: int, accepted: Bool[Tensor, "B L"]) -> None:
        """Add one verification round to the meter."""
        counts = accepted.sum(1).tolist()
        for entry in self.meter.rounds:
            if (entry["stage"], entry["round"]) == (stage, number):
                entry["drafted"] += accepted.shape[1]
                entry["accepted"] = [a + c for a, c in zip(entry["accepted"], counts, strict=True)]
                return
        self.meter.rounds.append(
            {"stage": stage, "round": number, "drafted": accepted.shape[1], "accepted": counts}
        )

    def finish(self) -> Generation:
        """Return what was decoded and what it cost."""
        total = self._now() - self._started
        device = self.backbone.device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        meter = self.meter
        seconds = {**meter.seconds, "total": total}
        return Generation(self.codes.cpu(), meter.nfe, meter.tokens, seconds, meter.rounds, peak)
