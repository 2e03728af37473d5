"""`DecodingState`: B images under way, the only way to reach the backbone, which its meter counts.

    slot        0 ... P-1 | P        P+1      ...
    token       prompt    | code 0   code 1   ...      (end-of-row tokens have slots of their own)
    its output  -         | h_pre of 1, of 2, ...      h_pre[:, 0] is the prompt's last output

Feeding the codes at positions [a, b) writes their keys and values and gives the states that predict
a+1 ... b. Feeding other codes at the same positions later overwrites both: that is the rollback.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssd_research.backbones.attention import RasterKV, RasterPass
from ssd_research.backbones.meter import Generation, Meter
from ssd_research.sampling import Sampling

if TYPE_CHECKING:
    from ssd_research.backbones.base import Backbone


class DecodingState:
    """Codes [B, N] under way, with `h_pre` [S, N, D], the state that predicts each position.

    S counts streams: the B conditional rows, then (unless guidance is 1) the B unconditional ones.
    `scratch` slots after the image's own serve decoders that try several tokens for one position.
    """

    def __init__(
        self,
        backbone: "Backbone",
        *,
        batch: int,
        lengths: Int[Tensor, " S"],
        sampling: Sampling,
        scratch: int = 0,
    ) -> None:
        self.backbone, self.sampling, self.batch = backbone, sampling, batch
        self.lengths = lengths
        self.shared_length = int(lengths[0]) if bool((lengths == lengths[0]).all()) else None
        size = backbone.grid.size
        self.codes = torch.zeros(batch, size, dtype=torch.long, device=backbone.device)
        self.h_pre = torch.zeros(
            len(lengths), size, backbone.hidden_size, dtype=backbone.dtype, device=backbone.device
        )
        # One slot more than is used: where a batch has nothing to feed for an image, it goes there.
        self.slots = backbone.grid.slots + scratch
        self.kv: RasterKV = backbone.new_cache(len(lengths), int(lengths.max()) + self.slots + 1)
        self.meter = Meter(batch, lengths)
        self._started = time.perf_counter()
        if backbone.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(backbone.device)

    @classmethod
    def prefill(
        cls,
        backbone: "Backbone",
        ids: Sequence[Sequence[int]],
        *,
        batch: int,
        sampling: Sampling,
        scratch: int = 0,
    ) -> "DecodingState":
        """Feed the prompts in one right-padded pass; junk is overwritten before it is seen."""
        text, lengths = backbone.pad_right(ids)
        state = cls(backbone, batch=batch, lengths=lengths, sampling=sampling, scratch=scratch)
        with state.timed("prefill"):
            span = range(text.shape[1])
            slots = torch.arange(len(span), device=backbone.device).expand(len(ids), -1)
            h = backbone.run(text, RasterPass.plan(state.kv, slots, shared=span))
            rows = torch.arange(len(ids), device=backbone.device)
            state.h_pre[:, 0] = h[rows, lengths - 1]
        state.meter.count_prefill()
        return state

    @property
    def streams(self) -> int:
        """How many sequences every forward feeds: 2 B with guidance, B without."""
        return len(self.lengths)

    def forward(
        self,
        codes: Int[Tensor, "B L"],
        positions: range | Int[Tensor, "B L"],
        *,
        phase: str,
        visible: Bool[Tensor, "B M T"] | None = None,
    ) -> None:
        """Feed `codes` at raster `positions`; store the states that predict what follows each.

        A range serves all images alike; a tensor gives each its own positions, -1 where it has
        nothing to feed. A row's end-of-row token rides along with the row's last code: M counts
        them after the L codes. One call is one NFE. See `feed` for `visible`.
        """
        grid = self.backbone.grid
        if isinstance(positions, range):
            span = grid.span(positions)
            if len(span) > len(positions):
                slots = torch.arange(span.start, span.stop, device=codes.device)
                codes = codes[:, grid.position(slots) - positions.start]
            self.feed(codes, span, phase=phase, visible=visible)
        else:
            self.feed(*self.with_row_ends(codes, positions), phase=phase, visible=visible)

    def with_row_ends(
        self, codes: Int[Tensor, "B L"], positions: Int[Tensor, "B L"]
    ) -> tuple[Int[Tensor, "B M"], Int[Tensor, "B M"]]:
        """Return codes and slots with the end-of-row tokens that follow codes appended to them."""
        grid = self.backbone.grid
        slots = torch.where(positions < 0, positions, grid.slot(positions))
        last = (positions >= 0) & ((positions + 1) % grid.cols == 0)
        if not grid.end_of_row or not bool(last.any()):
            return codes, slots
        ends = torch.where(last, slots + 1, -1).sort(dim=1, descending=True).values
        ends = ends[:, : int(last.sum(1).max())]
        return torch.cat([codes, torch.zeros_like(ends)], 1), torch.cat([slots, ends], 1)

    @torch.inference_mode()
    def feed(
        self,
        codes: Int[Tensor, "B L"],
        slots: range | Int[Tensor, "B L"],
        *,
        phase: str,
        visible: Bool[Tensor, "B L T"] | None = None,
        places: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "S L D"]:
        """Feed tokens at image `slots` in one backbone forward, and return their states.

        A range serves all images alike; a tensor gives each its own slots, -1 where it has nothing
        to feed. Codes at end-of-row slots are ignored, as are those at such `places`, the slots
        that positions are counted from, if others. `visible` says which of the T = `self.slots`
        slots of the image each token may see (the prompt it always sees); without it a token sees
        the slots up to its own.
        Where the slot after a token holds a code, its state is stored as that code's `h_pre`.
        """
        shared = slots if isinstance(slots, range) else None
        if isinstance(slots, range):
            slots = torch.arange(slots.start, slots.stop, device=codes.device)[None]
        with self.timed(phase):
            embeds = self.backbone.embed_tokens(codes, slots if places is None else places)
            plan = self._plan(slots.expand(self.batch, -1), shared, visible, places)
            h = self.backbone.run(embeds.repeat(self.streams // self.batch, 1, 1), plan)
            if shared is not None:
                self._store_shared(h, shared)
            else:
                self._store(h, slots)
        if shared is not None and visible is None:
            self.meter.count(len(shared), sum(shared) + len(shared))
        else:
            fed = (slots >= 0).expand(self.batch, -1)
            seen = slots + 1 if visible is None else visible.sum(-1)
            self.meter.count(fed.sum(1), (seen * fed).sum(1))
        return h

    def _plan(
        self,
        slots: Int[Tensor, "B L"],
        shared: range | None,
        visible: Bool[Tensor, "B L T"] | None,
        places: Int[Tensor, "B L"] | None,
    ) -> RasterPass:
        twice = self.streams // self.batch
        own = self.lengths[:, None] + slots.repeat(twice, 1)
        if shared is None:
            own = own.where(slots.repeat(twice, 1) >= 0, own.new_tensor(self.kv.capacity - 1))
        elif self.shared_length is not None:
            shared = range(self.shared_length + shared.start, self.shared_length + shared.stop)
        else:
            shared = None
        seen = None
        if visible is not None:
            image = torch.arange(self.kv.capacity - 1, device=slots.device) - self.lengths[:, None]
            index = image.clamp(0, self.slots - 1)[:, None].expand(-1, slots.shape[1], -1)
            seen = visible.repeat(twice, 1, 1).gather(2, index) & (image < self.slots)[:, None]
            seen = seen | (image < 0)[:, None]
        ropes = None if places is None else self.lengths[:, None] + places.repeat(twice, 1)
        return RasterPass.plan(self.kv, own, shared=shared, visible=seen, places=ropes)

    def _store_shared(self, h: Float[Tensor, "S L D"], slots: range) -> None:
        """Keep the states of slots [a, b) whose successor is a code: a range of positions."""
        grid = self.backbone.grid
        first = grid.codes_before(slots.start + 1)
        stop = min(grid.codes_before(slots.stop + 1), grid.size)
        sources = grid.slot(torch.arange(first, stop, device=h.device)) - 1 - slots.start
        self.h_pre[:, first:stop] = h[:, sources]

    def _store(self, h: Float[Tensor, "S L D"], slots: Int[Tensor, "B L"]) -> None:
        """Keep the states of each image's own slots whose successor is a code."""
        grid = self.backbone.grid
        after = slots + 1
        kept = (slots >= 0) & (after < grid.slots) & ~grid.ends_row(after)
        rows = torch.arange(len(slots), device=h.device)[:, None].expand_as(slots)
        for stream in range(self.streams // self.batch):
            mine = h[stream * self.batch : (stream + 1) * self.batch]
            self.h_pre[rows[kept] + stream * self.batch, grid.position(after)[kept]] = mine[kept]

    @torch.inference_mode()
    def keep(self, slots: Int[Tensor, "B L"], places: Int[Tensor, "B L"]) -> None:
        """Move the keys and values of tokens in scratch `slots` to the image's slots `places`.

        Pairs of -1 move nothing.
        """
        twice = self.streams // self.batch
        junk = slots.new_tensor(self.kv.capacity - 1)
        source, target = (
            torch.where(one >= 0, self.lengths[:, None] + one, junk)
            for one in (slots.repeat(twice, 1), places.repeat(twice, 1))
        )
        self.kv.move(source, target)

    @torch.inference_mode()
    def distribution(self, positions: range | Int[Tensor, "B L"]) -> Float[Tensor, "B L K"]:
        """Return p at raster positions, shared or each image's own, from what predicts them."""
        return self.distribution_of(self.states(positions))

    def states(self, positions: range | Int[Tensor, "B L"]) -> Float[Tensor, "S L D"]:
        """Return the states that predict raster positions, shared or each image's own."""
        if isinstance(positions, range):
            return self.h_pre[:, positions.start : positions.stop]
        where = positions.clamp(0, self.backbone.grid.size - 1).repeat(
            self.streams // self.batch, 1
        )
        return self.h_pre.gather(1, where[..., None].expand(-1, -1, self.h_pre.shape[-1]))

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

    def record_round(
        self,
        stage: str,
        number: int,
        accepted: Bool[Tensor, "B L"],
        *,
        drafted: Bool[Tensor, "B L"] | None = None,
    ) -> None:
        """Add one verification round to the meter; all of it was drafted unless told otherwise."""
        drafted = torch.ones_like(accepted) if drafted is None else drafted
        self.meter.record((stage, number), drafted.sum(1), (accepted & drafted).sum(1))

    def finish(self) -> Generation:
        """Return what was decoded and what it cost."""
        total = self._now() - self._started
        device = self.backbone.device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        meter = self.meter
        return Generation(
            codes=self.codes.cpu(),
            nfe=meter.nfe,
            tokens=meter.tokens,
            seconds={**meter.seconds, "total": total},
            rounds=meter.rounds,
            work=meter.work,
            peak_memory_bytes=peak,
        )
