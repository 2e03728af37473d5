"""What drafting and verifying rows cost, in autoregressive steps (paper Table 13, Figures 4 and 5).

At a generation position three things are timed on the same cache: one AR step (a forward of one
code, its distribution, a choice), a draft of 1..n rows (vertical heads on the row above, their
distributions, the most likely codes) and a verification of 1..n rows (one forward of all their
codes, their distributions). No cost depends on the weights, so untrained heads do as well.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.state import DecodingState
from ssd_research.decoders.drafting import law_ahead
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling

VERSION = 1
WARM_UP = 3  # untimed repetitions before the timed ones


@dataclass(frozen=True)
class Bench:
    """A batch of images under way whose every row so far is filled with arbitrary codes."""

    state: DecodingState
    heads: DraftHeads
    repeats: int

    @classmethod
    def start(
        cls,
        backbone: Backbone,
        prompts: Sequence[str],
        *,
        sampling: Sampling,
        rows: int,
        repeats: int,
    ) -> "Bench":
        """Prefill the prompts and make untrained heads for `rows` rows."""
        state = backbone.start(prompts, sampling=sampling)
        heads = DraftHeads(backbone.hidden_size, horizontal=1, vertical=rows)
        heads = heads.to(backbone.device, backbone.dtype).eval().requires_grad_(False)
        arbitrary = 7919 * torch.arange(backbone.grid.size, device=backbone.device)
        with torch.inference_mode():
            state.codes.copy_(arbitrary.remainder(backbone.codebook_size))
        return cls(state, heads, repeats)

    def fill(self, row: int) -> None:
        """Put the codes of all rows above `row` into the cache."""
        span = range(row * self.state.backbone.grid.cols)
        if span:
            self.state.forward(self.state.codes[:, : len(span)], span, phase="commit")

    def ar_step(self, row: int) -> None:
        """Decode one code at the beginning of `row`."""
        at = row * self.state.backbone.grid.cols
        self.state.forward(self.state.codes[:, at : at + 1], range(at, at + 1), phase="commit")
        self.state.distribution(range(at + 1, at + 2)).argmax(-1)

    def draft(self, row: int, rows: int) -> None:
        """Draft `rows` rows from the row above `row`."""
        state, grid = self.state, self.state.backbone.grid
        with torch.inference_mode():
            q = law_ahead(state, self.heads, "vertical", source=grid.row(row - 1), count=rows)
            q.argmax(-1)

    def verify(self, row: int, rows: int) -> None:
        """Verify `rows` rows from `row` on."""
        grid = self.state.backbone.grid
        span = range(grid.row(row).start, grid.row(row + rows - 1).stop)
        fed = range(span.start - 1, span.stop - 1)
        self.state.forward(self.state.codes[:, fed.start : fed.stop], fed, phase="verify")
        self.state.distribution(span)

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the median seconds of one repetition; on CUDA the device is waited for."""
        found = []
        for _ in range(WARM_UP + self.repeats):
            before = self.state.meter.seconds.get("cost", 0.0)
            with self.state.timed("cost"):
                work()
            found.append(self.state.meter.seconds["cost"] - before)
        return statistics.median(found[WARM_UP:])


def places(grid_rows: int, rows: int, count: int) -> list[int]:
    """Return `count` rows, not the first, at equal distances, where `rows` rows still fit."""
    last = grid_rows - rows
    if count == 1:
        return [1]
    spread = [1 + round(n * (last - 1) / (count - 1)) for n in range(count)]
    return list(dict.fromkeys(spread))


def measure(bench: Bench, *, rows: int, positions: int) -> list[dict[str, Any]]:
    """Return a row for 1..`rows` rows: costs in AR steps, means over `positions` places.

    `tokens_per_step` is what one drafted and verified block yields for each AR step of time
    (Figure 5), were all of it accepted.
    """
    grid = bench.state.backbone.grid
    found: dict[int, list[dict[str, float]]] = {n: [] for n in range(1, rows + 1)}
    for row in places(grid.rows, rows, positions):
        bench.fill(row)
        step = bench.seconds(partial(bench.ar_step, row))
        for n, entries in found.items():
            draft = bench.seconds(partial(bench.draft, row, n))
            verify = bench.seconds(partial(bench.verify, row, n))
            entries.append({"ar": step, "draft": draft / step, "verify": verify / step})
    table = []
    for n, entries in found.items():
        mean = {key: statistics.fmean(e[key] for e in entries) for key in ("ar", "draft", "verify")}
        tokens = n * grid.cols
        table.append(
            {
                "rows": n,
                "tokens": tokens,
                "drafting_ar_steps": mean["draft"],
                "verification_ar_steps": mean["verify"],
                "tokens_per_step": tokens / (mean["draft"] + mean["verify"]),
                "ar_step_seconds": mean["ar"],
            }
        )
    return table
