"""SSD's schedule as data: every backbone forward of an image, and the closed form of their number.

Paper sections 3.3 and A.10. Row 0 is decoded in cycles of `k_h` codes, then blocks of `v` rows are
drafted, verified jointly `b` times, and committed row by row with `i` incremental rounds between.
"""

from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "verify", "commit"]
Stage = Literal["prefill", "horizontal", "base", "incremental"]


@dataclass(frozen=True)
class Pass:
    """One backbone forward over the raster positions [start, stop).

    `round` counts the verification rounds of one block or row from 1; a commit has round 0.
    """

    phase: Phase
    stage: Stage
    start: int
    stop: int
    round: int = 0


@dataclass(frozen=True)
class SpatialSchedule:
    """The passes of one image on `rows` x `cols` codes.

    `v` rows per block, `b` joint rounds, `i` incremental rounds per further row, `k_h` horizontal
    heads and `horizontal_rounds` in row 0. `final_commit=False` leaves out the image's last commit,
    which nothing reads.
    """

    rows: int
    cols: int
    v: int = 1
    b: int = 2
    i: int = 0
    k_h: int = 5
    horizontal_rounds: int = 1
    final_commit: bool = True

    def __post_init__(self) -> None:
        for name, least in (("v", 1), ("b", 0), ("i", 0), ("k_h", 1), ("horizontal_rounds", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"decoder.{name} must be a whole number of at least {least}, not {value}"
                )
        if self.v == 1 and self.i:
            raise ValueError(
                f"decoder.i={self.i} does nothing at decoder.v=1: leave it out, or set decoder.v>=2"
            )

    def cycles(self) -> list[range]:
        """Return the raster positions that each cycle of row 0 drafts; position 0 is sampled."""
        return [range(x, min(x + self.k_h, self.cols)) for x in range(1, self.cols, self.k_h)]

    def blocks(self) -> list[range]:
        """Return the rows of each block; the last one may be shorter."""
        return [range(y, min(y + self.v, self.rows)) for y in range(1, self.rows, self.v)]

    def passes(self) -> list[Pass]:
        """Return every backbone forward in order, the prefill first."""
        passes = [Pass("prefill", "prefill", 0, 0)]
        for cycle in self.cycles():
            verify = range(1, self.horizontal_rounds + 1)
            passes += [Pass("verify", "horizontal", cycle.start, cycle.stop, n) for n in verify]
            passes.append(Pass("commit", "horizontal", cycle.start, cycle.stop))
        for block in self.blocks():
            passes += self._block_passes(block)
        return passes if self.final_commit or len(passes) == 1 else passes[:-1]

    def _block_passes(self, block: range) -> list[Pass]:
        w = self.cols
        joint = (block.start * w, block.stop * w)
        passes = [Pass("verify", "base", *joint, n) for n in range(1, self.b + 1)]
        for y in block:
            row = (y * w, (y + 1) * w)
            if y > block.start:
                passes += [Pass("verify", "incremental", *row, n) for n in range(1, self.i + 1)]
            passes.append(Pass("commit", "base" if y == block.start else "incremental", *row))
        return passes

    def nfe(self) -> int:
        """Return the closed form 1 + (h+1) ceil((W-1)/k_h) + sum over blocks of (b+1) + (m-1)(i+1).

        With h = 1 and k_h = 5 it gives every step count of Tables 3, 4, 7, 14-16, 20 and 21.
        """
        cycles = -(-(self.cols - 1) // self.k_h)
        blocks = sum((self.b + 1) + (len(m) - 1) * (self.i + 1) for m in self.blocks())
        last = not self.final_commit and cycles + blocks > 0
        return 1 + (self.horizontal_rounds + 1) * cycles + blocks - last
