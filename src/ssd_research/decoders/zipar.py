"""ZipAR (He et al., ICML 2025): rows in parallel, each staggered behind the row above it.

A row starts when the row above holds `window` codes, and gains one code per pass from there. With
window 3, the number of the pass that samples each code (the prefill is 1; AR would take 18):

    row 0   1  2  3  4  5  6
    row 1   4  5  6  7  8  9
    row 2   7  8  9 10 11 12
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.meter import Generation
from ssd_research.decoders.accept import ratio, residual
from ssd_research.decoders.base import Decoder, require_whole
from ssd_research.decoders.noise import Noise
from ssd_research.decoders.rows import Rows, check_proxy, packed, proxy_in_force
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling


@dataclass(frozen=True)
class ZipAR(Decoder):
    """ZipAR with a fixed or an adaptive window; (H - 1) window + W + 1 passes when fixed.

    `window` None is the model's own. A window of a whole row or more is autoregressive sampling,
    code for code; every smaller one is lossy. Where rows do not end with a token, a row that starts
    early follows a proxy, fed in the place of the row above's last code until that is there:
    `nearest` (the committed code nearest to it, as in the paper) or `row_above` (the newest code of
    the row above it, as in the official code); None means `nearest` where it matters.

    `adaptive`: from `window` codes on, a candidate for the new row's first code is tested again
    with every code that the row above gains, and the row starts when one is accepted, or when the
    row above is complete. `final_commit` feeds the image's last code too, which nothing reads: the
    + 1 above, which the SSD paper counts.
    """

    window: int | None = None
    proxy: str | None = None
    adaptive: bool = False
    final_commit: bool = True
    operating_point: Mapping[str, int] = field(default_factory=lambda: {"window": 8})
    name: str = "zipar"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_proxy(self.proxy)
        require_whole("window", self.start, least=1)

    @property
    def start(self) -> int:
        """How many codes of a row let the next one start."""
        return self.operating_point["window"] if self.window is None else self.window

    def check(self, grid: TokenGrid) -> None:
        """Raise ValueError for an option that does nothing on a grid."""
        self.settings(grid)

    def settings(self, grid: TokenGrid) -> dict[str, Any]:
        """Return the window in force, at most a row, and what else matters with it."""
        proxy = proxy_in_force(self.proxy, grid, start=self.start)
        if self.adaptive and (self.start >= grid.cols or grid.rows == 1):
            raise ValueError(
                f"decoder.adaptive=true does nothing at decoder.window={self.start}: "
                f"no row starts before all {grid.cols} codes of the row above are there"
            )
        window = min(self.start, grid.cols)
        found = {"window": window, "adaptive": self.adaptive, "final_commit": self.final_commit}
        return found if proxy is None else found | {"proxy": proxy}

    @torch.inference_mode()
    def decode_with(
        self,
        backbone: Backbone,
        prompts: Sequence[str],
        *,
        sampling: Sampling,
        noise: Noise,
        heads: DraftHeads | None = None,
    ) -> Generation:
        """Decode with a given source of noise; `heads` are not used."""
        state = backbone.start(prompts, sampling=sampling)
        proxy = proxy_in_force(self.proxy, backbone.grid, start=self.start)
        rows = Rows(state, start=self.start, proxy=proxy)
        _sample(rows, torch.zeros_like(rows.count[:, :1]), noise)
        candidates = _Candidates(rows, noise) if self.adaptive else None
        while rows.feed(rows.unfed(final=self.final_commit), phase="commit"):
            going = (rows.count > 0) & (rows.count < backbone.grid.cols)
            where = rows.next.where(going if candidates else going | rows.waiting, -1)
            if candidates:
                candidates.test()
            _sample(rows, packed(where)[0], noise)
        return state.finish()


def _sample(rows: Rows, positions: Int[Tensor, "B L"], noise: Noise) -> None:
    """Sample the codes at raster positions from p, but not at -1."""
    if positions.shape[1]:
        p = rows.state.distribution(positions)
        draw = noise.at(positions, 0)
        rows.commit(positions, draw.categorical(p, purpose="sample", needed=positions >= 0))


class _Candidates:
    """For each image, a code that may become the first of its waiting row, and its law q."""

    def __init__(self, rows: Rows, noise: Noise) -> None:
        self.rows, self.noise, self.passes = rows, noise, 0
        self.there = torch.zeros_like(rows.waiting[:, :1])
        self.codes = torch.zeros_like(rows.count[:, :1])
        self.q: Float[Tensor, "B 1 K"] | None = None

    def test(self) -> None:
        """Draw candidates where rows begin to wait, test the others, commit what is accepted.

        A rejected one is replaced from the residual and waits on, unless nothing is left to wait
        for: the row above is complete.
        """
        rows, self.passes = self.rows, self.passes + 1
        waiting = rows.waiting.any(1, keepdim=True)
        if not bool(waiting.any()):
            return
        where = (rows.last + 1).clamp_max(rows.grid.rows - 1) * rows.grid.cols
        p, old = rows.state.distribution(where), waiting & self.there
        q = p if self.q is None else self.q
        draw = self.noise.at(where, self.passes)
        kept = old & draw.bernoulli(ratio(p, q, self.codes), needed=old)
        new = self.noise.at(where, 0).categorical(p, purpose="sample", needed=waiting & ~old)
        other = draw.categorical(residual(p, q), purpose="residual", needed=old & ~kept)
        self.codes = torch.where(kept, self.codes, torch.where(old, other, new))
        self.q = p
        rows.state.record_round("row_head", 1, kept, drafted=old)
        starts = kept | (waiting & (rows.count.gather(1, rows.last) == rows.grid.cols))
        self.there = waiting & ~starts
        rows.commit(where.where(starts, -1), self.codes)
