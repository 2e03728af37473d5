"""Lossless decoding from SSD's spatial drafts.

`decode_strict` is `accept=strict`, which the paper's first version compared SSD with: every draft
is tested once, in raster order, and a step ends at the first reject. `SpatialJacobi` (`ssd_exact`)
takes the drafts as the first iterate of MC-SJD, which tests and improves a row of them at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.meter import Generation
from ssd_research.decoders.accept import Rejection
from ssd_research.decoders.base import Decoder, require_whole
from ssd_research.decoders.chain import Chain, carried
from ssd_research.decoders.drafting import draft_law
from ssd_research.decoders.jacobi import iterate
from ssd_research.decoders.noise import Noise
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling


@dataclass(frozen=True)
class BlockDrafts:
    """Drafts of SSD's blocks: `v` rows from the committed row above them, row 0 from its left.

    Row 0 is drafted anew in every step, up to `k_h` codes from the newest one; of the other rows
    drafts stay until they are tested.
    """

    heads: DraftHeads
    v: int
    k_h: int

    def window(self, chain: Chain) -> Int[Tensor, "B L"]:
        """Return the positions from the newest code to the end of each image's row 0 or block."""
        first = self.first_row(chain)
        stop = torch.where(first > 0, (first + self.v) * chain.cols, chain.cols)
        stop = stop.where(first > 0, torch.minimum(stop, chain.committed + self.k_h))
        length = int((stop.clamp_max(chain.size) - chain.committed).max())
        return chain.window(max(1, length), stop=stop)

    def first_row(self, chain: Chain) -> Int[Tensor, " B"]:
        """Return the first row of the block that each image is in; 0 in row 0."""
        row = chain.committed // chain.cols
        return torch.where(row > 0, (row - 1) // self.v * self.v + 1, 0)

    def law(
        self, chain: Chain, positions: Int[Tensor, "B L"], new: Bool[Tensor, "B L"]
    ) -> Float[Tensor, "B L K"]:
        """Return q at the `new` positions."""
        down = positions // chain.cols - (self.first_row(chain) - 1)[:, None]
        return spatial_law(self.heads, chain, positions, torch.where(new, down, 0))


def spatial_law(
    heads: DraftHeads,
    chain: Chain,
    positions: Int[Tensor, "B L"],
    rows: Int[Tensor, "B L"],
) -> Float[Tensor, "B L K"]:
    """Return q from the heads that look `rows` down, or in row 0 right of the newest code.

    Where `rows` is 0 nothing is asked for and q means nothing.
    """
    top = positions < chain.cols
    right = torch.where(top & (rows > 0), positions - chain.committed[:, None] + 1, 0)
    down = torch.where(top, 0, rows)
    across = draft_law(chain.state, heads, "horizontal", positions=positions, offsets=right)
    below = draft_law(chain.state, heads, "vertical", positions=positions, offsets=down)
    return torch.where(top[..., None], across, below)


def decode_strict(chain: Chain, heads: DraftHeads, *, v: int, k_h: int) -> None:
    """Decode all images with `accept=strict`.

    Exact, because a draft is drawn from its q once, from what is committed, and tested once.
    """
    drafts, count, number = BlockDrafts(heads, v, k_h), chain.committed, 0
    q = chain.state.distribution(range(1))
    there = torch.zeros_like(q[..., 0], dtype=torch.bool)
    while not chain.done:
        number += 1
        with chain.state.timed("draft"):
            positions = drafts.window(chain)
            q, known = carried(q, there, count=count, length=positions.shape[1])
            known = known & (positions >= chain.cols)
            there = positions >= 0
            new = there & ~known
            q = torch.where(new[..., None], drafts.law(chain, positions, new), q)
            draw = chain.noise.at(positions, number)
            chain.write(positions, draw.categorical(q, purpose="draft", needed=new), new)
        codes = chain.drafts(positions)
        p = chain.forward(codes, positions)
        verdict = chain.test(
            Rejection(), p=p, q=q, drafts=codes, positions=positions, number=number
        )
        count = chain.commit(verdict)


@dataclass(frozen=True)
class RollingDrafts:
    """First drafts for MC-SJD: every position as soon as a code above it is committed.

    Up to `v` rows after the newest code are in reach, in row 0 up to `k_h` codes, until the whole
    rest of the row is; at most `most` are taken, if given.
    """

    heads: DraftHeads
    v: int
    k_h: int
    most: int | None

    def window(self, chain: Chain) -> Int[Tensor, "B L"]:
        """Return the positions in reach, without a gap."""
        n, cols = chain.committed, chain.cols
        reach = torch.where(n < cols, cols, self.v * cols)
        reach = torch.where(n + self.k_h < cols, self.k_h, reach)
        if self.most is not None:
            reach = reach.clamp_max(self.most)
        length = int(torch.minimum(reach, chain.size - n).max())
        return chain.window(max(1, length), stop=n + reach)

    def draft(
        self, chain: Chain, positions: Int[Tensor, "B L"], new: Bool[Tensor, "B L"]
    ) -> Float[Tensor, "B L K"]:
        """Sample drafts at the `new` positions and return their q."""
        rows = (positions - chain.committed[:, None]) // chain.cols + 1
        q = spatial_law(self.heads, chain, positions, torch.where(new, rows, 0))
        draw = chain.noise.at(positions, 0)
        chain.write(positions, draw.categorical(q, purpose="draft", needed=new), new)
        return q


@dataclass(frozen=True)
class SpatialJacobi(Decoder):
    """MC-SJD (maximal coupling) whose first drafts are sampled from SSD's heads; lossless.

    Drafts come from the committed code `v` or fewer rows above, in row 0 from the newest code, up
    to `k_h` to its right. A pass feeds all that are in reach, or `window` codes, the newest
    committed one among them. None for v is the model's own.
    """

    v: int | None = None
    k_h: int = 5
    window: int | None = None
    operating_point: Mapping[str, int] = field(default_factory=lambda: {"v": 1})
    name: str = "ssd_exact"
    lossless: ClassVar[bool] = True
    needs_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_whole("v", self.rows, least=1)
        require_whole("k_h", self.k_h, least=1)
        if self.window is not None:
            require_whole("window", self.window, least=2)

    @property
    def rows(self) -> int:
        """The rows in force."""
        return self.operating_point["v"] if self.v is None else self.v

    def settings(self, grid: TokenGrid) -> dict[str, Any]:
        """Return the rows in force and the other hyper-parameters."""
        return {"v": self.rows, "k_h": self.k_h, "window": self.window}

    def reach(self, grid: TokenGrid) -> dict[str, int]:
        """Return the largest offsets on this grid."""
        return {
            "horizontal": min(self.k_h, grid.cols - 1),
            "vertical": min(self.rows, grid.rows - 1),
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
        chain = Chain(backbone.start(prompts, sampling=sampling), noise)
        most = None if self.window is None else self.window - 1
        drafts = RollingDrafts(heads, self.rows, self.k_h, most)
        iterate(chain, Rejection(), drafts, coupling="maximal")
        return chain.state.finish()
