"""The geometry of an image's codes: raster positions, rows and columns, sequence slots."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Index = TypeVar("Index", int, Tensor)


@dataclass(frozen=True)
class TokenGrid:
    """`rows` x `cols` codes in raster order; `end_of_row` if a forced token ends each row.

    Raster position p = y * cols + x counts codes only. A slot counts every token of the image's
    sequence, so slot(p) = p + y where the backbone has end-of-row tokens and p elsewhere.
    """

    rows: int
    cols: int
    end_of_row: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise ValueError(f"a token grid needs at least 1x1 codes, not {self.rows}x{self.cols}")

    @property
    def size(self) -> int:
        """Codes per image."""
        return self.rows * self.cols

    @property
    def row_len(self) -> int:
        """Tokens per row, the end-of-row token included."""
        return self.cols + self.end_of_row

    @property
    def slots(self) -> int:
        """Tokens per image, end-of-row tokens included."""
        return self.rows * self.row_len

    def row(self, y: int) -> range:
        """Return the raster positions of row `y`."""
        return range(y * self.cols, (y + 1) * self.cols)

    def slot(self, position: Index) -> Index:
        """Return the sequence slot of a raster position, counted from the image's first code."""
        return position + self.end_of_row * (position // self.cols)

    def position(self, slot: Index) -> Index:
        """Return the raster position of the code in a slot, of the row's last code at its end."""
        return slot - (slot + self.end_of_row) // self.row_len * self.end_of_row

    def codes_before(self, slot: int) -> int:
        """Return how many codes lie before a slot."""
        return slot - self.end_of_row * (slot // self.row_len)

    def ends_row(self, slots: Tensor) -> Tensor:
        """Return where `slots` hold end-of-row tokens."""
        if not self.end_of_row:
            return torch.zeros_like(slots, dtype=torch.bool)
        return slots % self.row_len == self.cols

    def span(self, positions: range) -> range:
        """Return the slots of consecutive codes and of the end-of-row tokens that follow them."""
        return range(self.slot(positions.start), self.slot(positions.stop))
