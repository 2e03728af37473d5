"""What decoders share that work on several rows of an image at once.

A row starts before the one above it is complete, so parts of the raster are holes:

    row 0   x x x x x x p      x  committed          p  the end of row 0, fed before its time so
    row 1   x x x . . . .      .  hole                  that row 1 has a token to follow: the
    row 2   . . . . . . .                               end-of-row token, or a proxy

Every token is fed at its true place in the raster. It sees what lies before it and is there, holes
are masked, and what it sees is not brought up to date later. All tensors of rows are [B, H].
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ssd_research.backbones.state import DecodingState
from ssd_research.grid import TokenGrid

PROXIES = ("nearest", "row_above")


def check_proxy(proxy: str | None) -> None:
    """Raise ValueError for a proxy rule that does not exist."""
    if proxy not in (None, *PROXIES):
        raise ValueError(f"decoder.proxy={proxy} is not one of {', '.join(PROXIES)}, null")


def proxy_in_force(proxy: str | None, grid: TokenGrid, *, start: int) -> str | None:
    """Return the proxy rule where rows start after `start` codes; None where none is needed.

    Raises ValueError for a rule that was asked for and would do nothing.
    """
    if not grid.end_of_row and start < grid.cols and grid.rows > 1:
        return proxy or PROXIES[0]
    if proxy is not None:
        raise ValueError(
            f"decoder.proxy={proxy} does nothing here: "
            + ("this model's rows end with a token" if grid.end_of_row else "rows start complete")
            + "; leave it out"
        )
    return None


def packed(values: Int[Tensor, "B L"], *others: Int[Tensor, "B L"]) -> list[Int[Tensor, "B M"]]:
    """Move entries of `values` below 0 to the end, cut what only holds such, in others alike."""
    order = values.argsort(dim=1, descending=True, stable=True)
    most = int((values >= 0).sum(1).max())
    return [one.gather(1, order[:, :most]) for one in (values, *others)]


@dataclass(frozen=True)
class Tokens:
    """Codes [B, L] for a pass at image `slots`, -1 where there is nothing.

    A token sees all slots from `since` up to its own: there lies what only its own row may see.
    """

    codes: Int[Tensor, "B L"]
    slots: Int[Tensor, "B L"]
    since: Int[Tensor, "B L"]

    def and_more(self, more: "Tokens") -> "Tokens":
        """Return these tokens and more in one pass."""
        pairs = (self.codes, more.codes), (self.slots, more.slots), (self.since, more.since)
        return Tokens(*(torch.cat(pair, 1) for pair in pairs))


class Rows:
    """A batch of images under way: how many codes of each row are committed, and how many fed.

    A row starts when the one above it has `start` codes, or all; `proxy` is the rule in force. Of
    each image the first code has to be committed before anything is asked of its rows.
    """

    def __init__(self, state: DecodingState, *, start: int, proxy: str | None) -> None:
        self.state, self.grid, self.proxy = state, state.backbone.grid, proxy
        self.start = min(start, self.grid.cols)
        self.index = torch.arange(self.grid.rows, device=state.codes.device)
        self.count = torch.zeros(
            state.batch, self.grid.rows, dtype=torch.long, device=state.codes.device
        )
        self.fed = torch.zeros_like(self.count)
        self.headed = torch.zeros_like(self.count, dtype=torch.bool)

    @property
    def last(self) -> Int[Tensor, "B 1"]:
        """The lowest row of each image that holds a code."""
        return (self.count > 0).sum(1, keepdim=True) - 1

    @property
    def waiting(self) -> Bool[Tensor, "B H"]:
        """Marks the one row of an image that holds no code yet and may start."""
        ready = self.count.gather(1, self.last) >= self.start
        return ready & (self.index == self.last + 1)

    @property
    def next(self) -> Int[Tensor, "B H"]:
        """The position of each row's next code, which is the next row's where it is complete."""
        return self.index * self.grid.cols + self.count

    def put(self, positions: Int[Tensor, "B L"], codes: Int[Tensor, "B L"]) -> None:
        """Write codes at raster positions, at -1 nothing."""
        there = positions >= 0
        images = torch.arange(len(positions), device=positions.device)[:, None].expand_as(there)
        self.state.codes[images[there], positions[there]] = codes[there]

    def commit(self, positions: Int[Tensor, "B L"], codes: Int[Tensor, "B L"]) -> None:
        """Write codes for good, each the next of its row or one of the next; at -1 nothing."""
        self.put(positions, codes)
        rows = positions.clamp_min(0) // self.grid.cols
        self.count.scatter_add_(1, rows, (positions >= 0).long())

    def unfed(self, *, final: bool = False) -> Tokens:
        """Return each row's newest code where no pass has had it, and the head of a new row.

        The image's last code, after which nothing follows, only with `final`.
        """
        newest = (self.next - 1).where(self.count > self.fed, -1)
        newest = newest.where((newest < self.grid.size - 1) | final, -1)
        codes = self.state.codes.gather(1, newest.clamp_min(0))
        slots = torch.where(newest < 0, -1, self.grid.slot(newest))
        return Tokens(codes, slots, slots).and_more(self._heads())

    def _heads(self) -> Tokens:
        """Return the token that a waiting row follows, unless it is the row above's last code."""
        slots = self.grid.slot((self.last + 1) * self.grid.cols) - 1
        needed = self.waiting.any(1, keepdim=True)
        if not self.grid.end_of_row:
            needed = needed & (self.count.gather(1, self.last) < self.grid.cols)
        slots = slots.where(needed, -1)
        return Tokens(self._proxies(), slots, slots)

    def _proxies(self) -> Int[Tensor, "B 1"]:
        """Return the code that stands in for the last one of each image's lowest row.

        `nearest`: the committed code at the smallest distance, the lowest row's where it is a tie.
        `row_above`: the newest code of the row above, which the first row has none of.
        """
        source = (self.last - 1).clamp_min(0)
        if self.proxy == "nearest":
            up = self.last - self.index
            distance = (up**2 + (self.grid.cols - self.count) ** 2) * self.grid.rows + up
            source = distance.masked_fill(up < 0, 2**62).argmin(1, keepdim=True)
        return self.state.codes.gather(1, self.next.gather(1, source) - 1)

    def feed(self, tokens: Tokens, *, phase: str) -> bool:
        """Feed `unfed()` and whatever else in one pass; return whether there was anything."""
        slots, codes, since = packed(tokens.slots, tokens.codes, tokens.since)
        if not slots.shape[1]:
            return False
        self.fed = self.count.clone()
        self.headed = self.headed | self.waiting.roll(-1, 1)
        every = torch.arange(self.grid.slots, device=slots.device)
        own = every >= since[..., None]
        visible = (every <= slots[..., None]) & (self.present[:, None] | own)
        self.state.feed(codes, slots, phase=phase, visible=visible)
        return True

    @property
    def present(self) -> Bool[Tensor, "B T"]:
        """Marks the image slots whose keys every later token may see."""
        column = torch.arange(self.grid.row_len, device=self.fed.device)
        there = column < self.fed[..., None]
        there[..., -1] |= self.headed
        return there.flatten(1)
