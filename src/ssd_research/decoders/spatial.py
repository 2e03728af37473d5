"""SSD: Spatially Speculative Decoding (paper section 3.3, schedule of A.10).

Row 0 is decoded in cycles of horizontal drafts, every further block of rows is drafted at once from
the row above it, verified for a fixed number of rounds, and committed. The head that drafts
(y+d, x) reads h_pre(y, x), which predicted the code at (y, x), and e(y, x), its embedding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.meter import Generation
from ssd_research.backbones.state import DecodingState
from ssd_research.decoders.accept import RULES, Rule
from ssd_research.decoders.base import Decoder
from ssd_research.decoders.chain import Chain
from ssd_research.decoders.drafting import law_ahead
from ssd_research.decoders.noise import Noise
from ssd_research.decoders.spatial_exact import decode_strict
from ssd_research.grid import TokenGrid
from ssd_research.heads import Axis, DraftHeads
from ssd_research.sampling import Sampling
from ssd_research.schedule import SpatialSchedule


@dataclass(frozen=True)
class SpatiallySpeculative(Decoder):
    """SSD with v rows per block, b joint and i incremental rounds; r is b at v = 1.

    Parameters left at None come from `operating_point`, the model's own (paper Table 6). With
    `accept=strict` drafts are sampled and tested once, in order: lossless, and without rounds.
    """

    v: int | None = None
    b: int | None = None
    i: int | None = None
    r: int | None = None
    k_h: int = 5
    horizontal_rounds: int = 1
    accept: str = "reject"
    final_commit: bool = True
    operating_point: Mapping[str, int] = field(default_factory=lambda: {"v": 1, "b": 2, "i": 0})
    name: str = "ssd"
    needs_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.accept not in (*RULES, "strict"):
            raise ValueError(
                f"decoder.accept={self.accept} is not one of {', '.join(RULES)}, strict"
            )
        if self.accept == "strict":
            self._refuse_rounds()
        if self.r is not None and (self.b is not None or self.v not in (None, 1) or self.i):
            raise ValueError(
                f"decoder.r={self.r} is decoder.b at decoder.v=1: give either r, or v, b and i"
            )
        if self.r is not None and (not isinstance(self.r, int) or self.r < 0):
            raise ValueError(f"decoder.r must be a whole number of at least 0, not {self.r}")
        self.schedule(TokenGrid(2, 2))

    def _refuse_rounds(self) -> None:
        """Raise ValueError for what only rounds and their commits have a use for."""
        idle = {"b": None, "i": None, "r": None, "horizontal_rounds": 1, "final_commit": True}
        for name, default in idle.items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"decoder.{name}={getattr(self, name)} does nothing with "
                    "decoder.accept=strict, which has no rounds: leave it out"
                )

    @property
    def lossless(self) -> bool:
        """Whether the rule is the strict one."""
        return self.accept == "strict"

    @property
    def budget(self) -> dict[str, int]:
        """The verification budget in force: v, b and i."""
        if self.r is not None:
            return {"v": 1, "b": self.r, "i": 0}
        given = {"v": self.v, "b": self.b, "i": self.i}
        budget = {k: self.operating_point[k] if x is None else x for k, x in given.items()}
        if budget["v"] == 1 and self.i is None:
            budget["i"] = 0
        return budget

    def settings(self, grid: TokenGrid) -> dict[str, Any]:
        """Return the budget in force, however it was given, and the other hyper-parameters."""
        if self.accept == "strict":
            return {"v": self.budget["v"], "k_h": self.k_h, "accept": self.accept}
        given = super().settings(grid)
        del given["r"], given["operating_point"]
        return given | self.budget

    def parameters(self) -> dict[str, Any]:
        """Return the budget, as r where v = 1, and what else was set."""
        budget = self.budget
        if self.accept == "strict":
            return {"v": budget["v"]} | super().parameters()
        shown = {"r": budget["b"]} if budget["v"] == 1 else budget
        given = super().parameters().items()
        return shown | {key: value for key, value in given if key not in ("v", "b", "i", "r")}

    def schedule(self, grid: TokenGrid) -> SpatialSchedule:
        """Return the schedule on a grid."""
        budget = self.budget
        return SpatialSchedule(
            grid.rows,
            grid.cols,
            v=budget["v"],
            b=budget["b"],
            i=budget["i"],
            k_h=self.k_h,
            horizontal_rounds=self.horizontal_rounds,
            final_commit=self.final_commit,
        )

    def reach(self, grid: TokenGrid) -> dict[str, int]:
        """Return the largest offsets that the schedule drafts on this grid."""
        schedule = self.schedule(grid)
        return {
            "horizontal": max(map(len, schedule.cycles()), default=0),
            "vertical": max(map(len, schedule.blocks()), default=0),
        }

    @torch.inference_mode()
    def decode_with(
        self,
        backbone: Backbone,
        prompts: Sequence[str],
        *,
        sampling: Sampling,
        noise: Noise,
        heads: DraftHeads | None,
    ) -> Generation:
        """Decode with a given source of noise."""
        if heads is None:
            raise ValueError(f"decoder={self.name} needs trained heads: set heads.path")
        if self.accept == "strict":
            chain = Chain(backbone.start(prompts, sampling=sampling), noise)
            decode_strict(chain, heads, v=self.budget["v"], k_h=self.k_h)
            return chain.state.finish()
        schedule = self.schedule(backbone.grid)
        work = _Work(backbone.start(prompts, sampling=sampling), noise, heads, RULES[self.accept])
        work.sample_first()
        for cycle in schedule.cycles():
            q = work.draft("horizontal", range(cycle.start - 1, cycle.start), len(cycle))
            for n in range(1, schedule.horizontal_rounds + 1):
                q = work.verify(cycle, q, stage="horizontal", number=n)
            work.commit(cycle, needed=schedule.final_commit or cycle.stop < backbone.grid.size)
        for block in schedule.blocks():
            self._decode_block(work, schedule, backbone.grid, block)
        return work.state.finish()

    def _decode_block(
        self, work: "_Work", schedule: SpatialSchedule, grid: TokenGrid, block: range
    ) -> None:
        """Draft a block of rows from the row above it, verify it jointly, commit it row by row."""
        rows = range(grid.row(block.start).start, grid.row(block.stop - 1).stop)
        q = work.draft("vertical", grid.row(block.start - 1), len(block))
        for n in range(1, schedule.b + 1):
            q = work.verify(rows, q, stage="base", number=n)
        for y in block:
            row = grid.row(y)
            own = q[:, row.start - rows.start : row.stop - rows.start]
            if y > block.start:
                for n in range(1, schedule.i + 1):
                    own = work.verify(row, own, stage="incremental", number=n, after=schedule.b)
            work.commit(row, needed=schedule.final_commit or y + 1 < grid.rows)


@dataclass(frozen=True)
class _Work:
    """One image batch under way: draft, verify and commit over ranges of raster positions.

    A pass over the positions [a, b) feeds the codes at [a-1, b-1), whose outputs predict exactly
    these positions; the newest known code is always fed by the next pass.
    """

    state: DecodingState
    noise: Noise
    heads: DraftHeads
    rule: Rule

    def positions(self, span: range) -> Int[Tensor, "B L"]:
        every = torch.arange(span.start, span.stop, device=self.state.codes.device)
        return every.expand(self.state.batch, -1)

    def sample_first(self) -> None:
        """Sample the code at (0, 0) from the prefill's state."""
        first = range(1)
        draw = self.noise.at(self.positions(first), 0)
        p = self.state.distribution(first)
        self.state.codes[:, :1] = draw.categorical(p, purpose="sample")

    def draft(self, axis: Axis, source: range, count: int) -> Float[Tensor, "B L K"]:
        """Draft with the heads of offsets 1..count from `source`; write the argmax and return q.

        Horizontally the source is one position; vertically a row, whose drafts are the next rows.
        """
        state = self.state
        with state.timed("draft"):
            q = law_ahead(state, self.heads, axis, source=source, count=count)
            state.codes[:, source.stop : source.stop + q.shape[1]] = q.argmax(-1)
        return q

    def verify(
        self, span: range, q: Float[Tensor, "B L K"], *, stage: str, number: int, after: int = 0
    ) -> Float[Tensor, "B L K"]:
        """Correct the codes of `span` once, all in parallel, and return the next reference.

        Rejected positions take this round's p as their reference, accepted ones keep theirs.
        """
        state = self.state
        self._feed(span, phase="verify")
        with state.timed("verify"):
            p = state.distribution(span)
            draw = self.noise.at(self.positions(span), after + number)
            codes, accepted = self.rule(p, q, state.codes[:, span.start : span.stop], draw)
            state.codes[:, span.start : span.stop] = codes
            state.record_round(stage, number, accepted)
        return torch.where(accepted[..., None], q, p)

    def commit(self, span: range, *, needed: bool) -> None:
        """Write keys, values and states of the corrected codes, where anything reads them."""
        if needed:
            self._feed(span, phase="commit")

    def _feed(self, span: range, *, phase: str) -> None:
        fed = range(span.start - 1, span.stop - 1)
        self.state.forward(self.state.codes[:, fed.start : fed.stop], fed, phase=phase)
