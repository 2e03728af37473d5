"""The geometry of an image's codes: raster positions, rows and columns, sequence slots."""

from dataclasses import dataclass


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
    def slots(self) -> int:
        """Tokens per image, end-of-row tokens included."""
        return self.rows * (self.cols + self.end_of_row)

    def row(self, y: int) -> range:
        """Return the raster positions of row `y`."""
        return range(y * self.cols, (y + 1) * self.cols)

    def slot(self, position: int) -> int:
        """Return the sequence slot of a raster position, counted from the image's first code."""
        return position + self.end_of_row * (position // self.cols)
