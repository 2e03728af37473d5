"""PJD, parallel Jacobi decoding (Liao et al., CVPR 2026): SJD in several rows at once.

A row starts when the row above holds `context` codes, and never gets ahead of it:

    row 0   x x x x x y 1 2 3       x  committed       y  the newest code of a row
    row 1   x x y 1 2               1 2 3  drafts, each row's own test as in SJD
    row 2   y                       (row 2 has no codes to draft below: row 1 has no more)

Drafts see their own row's drafts, and of the rows above what is committed. No code of the authors
is public: options stand for what their text leaves open.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.meter import Generation
from ssd_research.decoders.accept import ratio, residual
from ssd_research.decoders.base import Decoder, require_whole
from ssd_research.decoders.jacobi import INITIALISATIONS, LAWS, has_source
from ssd_research.decoders.noise import Noise
from ssd_research.decoders.rows import Rows, Tokens, check_proxy, proxy_in_force
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling

COMMIT_REJECT = ("every_row", "top_row_first")


@dataclass(frozen=True)
class ParallelJacobi(Decoder):
    """PJD: a row starts after `context` codes of the one above, a pass tests `window` codes of it.

    The newest code of a row and its drafts make up the window, as in SJD, so at most `window` codes
    of a row are committed per pass. None for `context` is the model's own.

    A row's chain of drafts ends at the first one that is rejected. With `commit_reject=every_row`
    the code that replaces it is committed, from the residual: SJD in every row. `top_row_first`
    commits it only if it is the first of the top unfinished row, the least that guarantees
    progress; elsewhere a rejected draft is drawn anew from p and tested again. A code that follows
    an accepted chain is committed in both.

    `init` and `init_q` are SJD's: first drafts are `random`, or copies of the code to the left
    (`horizontal`) or above (`vertical`). `proxy` is ZipAR's, for rows that start early.

    Lossy, because a row is tested below a row that is not complete. With a context of a whole row
    and `every_row` it is SJD with windows that end with the row, code for code, and exact.
    """

    context: int | None = None
    window: int = 16
    commit_reject: str = "every_row"
    init: str = "horizontal"
    init_q: str = "one_hot"
    proxy: str | None = None
    operating_point: Mapping[str, int] = field(default_factory=lambda: {"context": 6})
    name: str = "pjd"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_proxy(self.proxy)
        choices = {"commit_reject": COMMIT_REJECT, "init": INITIALISATIONS, "init_q": LAWS}
        for key, values in choices.items():
            if getattr(self, key) not in values:
                raise ValueError(
                    f"decoder.{key}={getattr(self, key)} is not one of {', '.join(values)}"
                )
        if self.init_q == "uniform" and self.init != "random":
            raise ValueError(
                f"decoder.init_q=uniform would be wrong with decoder.init={self.init}: copies are "
                "not drawn from a uniform law; use one_hot, or decoder.init=random"
            )
        require_whole("context", self.start, least=1)
        require_whole("window", self.window, least=1)

    @property
    def start(self) -> int:
        """How many codes of a row let the next one start."""
        return self.operating_point["context"] if self.context is None else self.context

    def check(self, grid: TokenGrid) -> None:
        """Raise ValueError for an option that does nothing on a grid."""
        proxy_in_force(self.proxy, grid, start=self.start)

    def settings(self, grid: TokenGrid) -> dict[str, Any]:
        """Return what is in force: sizes that a row has room for, a proxy where there is one."""
        given = super().settings(grid) | {
            "context": min(self.start, grid.cols),
            "window": min(self.window, grid.cols + 1),
        }
        given["proxy"] = proxy_in_force(self.proxy, grid, start=self.start)
        unused = {"operating_point"} | ({"proxy"} if given["proxy"] is None else set())
        return {key: value for key, value in given.items() if key not in unused}

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
        first, p = torch.zeros_like(rows.count[:, :1]), state.distribution(range(1))
        rows.commit(first, noise.at(first, 0).categorical(p, purpose="sample"))
        front, number = _Front.of(rows, window=self.window), 0
        p, before = p.expand(-1, front.positions.shape[1], -1), front.emptied
        while front.going:
            number += 1
            with state.timed("draft"):
                q, known = front.carried(p, before)
                new = front.drafted & ~known
                q = torch.where(new[..., None], self._guess(rows, noise, front, new), q)
            rows.feed(front.tokens(rows), phase="verify")
            with state.timed("verify"):
                p = state.distribution(front.positions)
                taken = self._test(rows, noise, front, p=p, q=q, number=number)
            with state.timed("draft"):
                beyond = front.positions.where(front.inside & ~taken, -1)
                draw = noise.at(front.positions, number)
                rows.put(beyond, draw.categorical(p, purpose="draft", needed=beyond >= 0))
            before, front = front, _Front.of(rows, window=self.window)
        return state.finish()

    def _guess(
        self, rows: Rows, noise: Noise, front: "_Front", new: Bool[Tensor, "B M"]
    ) -> Float[Tensor, "B M K"]:
        """Put first drafts in place at the `new` positions and return the laws q of those."""
        state, where, cols = rows.state, front.positions, rows.grid.cols
        codes = state.backbone.codebook_size
        dtype = torch.promote_types(state.backbone.dtype, torch.float32)
        uniform = torch.full((*where.shape, codes), 1 / codes, dtype=dtype, device=where.device)
        copied = new & has_source(self.init, where, cols=cols)
        random = new & ~copied
        draw = noise.at(where, 0).categorical(uniform, purpose="draft", needed=random)
        rows.put(where.where(random, -1), draw)
        source = front.before(copied) if self.init == "horizontal" else where - cols
        copies = state.codes.gather(1, source.clamp(0, rows.grid.size - 1))
        rows.put(where.where(copied, -1), copies)
        if self.init_q == "uniform":
            return uniform
        return torch.zeros_like(uniform).scatter_(-1, state.codes.gather(1, where)[..., None], 1.0)

    def _test(
        self,
        rows: Rows,
        noise: Noise,
        front: "_Front",
        *,
        p: Float[Tensor, "B M K"],
        q: Float[Tensor, "B M K"],
        number: int,
    ) -> Bool[Tensor, "B M"]:
        """Test every row's drafts from left to right, commit what stays, and mark it."""
        state, where, tested = rows.state, front.positions, front.drafted
        drafts, draw = state.codes.gather(1, where), noise.at(where, number)
        accepted = tested & draw.bernoulli(ratio(p, q, drafts), needed=tested)
        kept = front.by_row(accepted).long().cumprod(-1).bool()
        ends = kept.sum(-1)
        rejected = ends < front.by_row(tested).sum(-1)
        fresh = ends < front.length
        if self.commit_reject == "top_row_first":
            top_first = (torch.arange(fresh.shape[1], device=where.device) == 0) & (ends == 0)
            fresh &= ~rejected | top_first
        at = front.flat(ends)
        p_end, q_end = (x.gather(1, at[..., None].expand(-1, -1, x.shape[-1])) for x in (p, q))
        law = torch.where(rejected[..., None], residual(p_end, q_end), p_end)
        draw = noise.at(where.gather(1, at), number)
        new = draw.categorical(law, purpose="residual", needed=fresh)
        rows.commit(where.where(kept.flatten(1), -1), drafts)
        rows.commit(where.gather(1, at).where(fresh, -1), new)
        # The pass has fed the accepted drafts, all but a row's newest code.
        rows.fed = torch.maximum(rows.fed, rows.count - 1)
        state.record_round("chain", 1, kept.flatten(1), drafted=tested)
        return kept.flatten(1).scatter(1, at, fresh)


@dataclass(frozen=True)
class _Front:
    """The rows of each image that a pass works on, the top unfinished one and those below.

    Of row `rows` [B, A] it may commit the `length` codes from column `first` on; where an image has
    fewer rows the length is 0. M = A `window` places in all, row after row.
    """

    rows: Int[Tensor, "B A"]
    first: Int[Tensor, "B A"]
    length: Int[Tensor, "B A"]
    window: int
    grid: TokenGrid

    @classmethod
    def of(cls, rows: Rows, *, window: int) -> "_Front":
        """Return what comes next: up to `window` codes, none of them right of the row above's."""
        cols = rows.grid.cols
        window = min(window, cols + 1)
        top = (rows.count == cols).sum(1, keepdim=True)
        lowest = rows.last + rows.waiting.any(1, keepdim=True)
        index = torch.arange(max(1, int((lowest - top).max()) + 1), device=top.device)
        active = top + index <= lowest
        every = (top + index).clamp_max(rows.grid.rows - 1)
        above = rows.count.gather(1, (every - 1).clamp_min(0)).where(every > 0, cols)
        first = rows.count.gather(1, every)
        length = (above - first).clamp(0, window).where(active, 0)
        return cls(every, first, length, window, rows.grid)

    @property
    def emptied(self) -> "_Front":
        """The same rows with nothing to commit."""
        return replace(self, length=torch.zeros_like(self.length))

    @property
    def going(self) -> bool:
        """Whether any image has codes left to commit."""
        return bool((self.length > 0).any())

    @property
    def offset(self) -> Int[Tensor, " L"]:
        """The places of one row's window."""
        return torch.arange(self.window, device=self.rows.device)

    @property
    def start(self) -> Int[Tensor, "B A"]:
        """The position of each row's first place."""
        return self.rows * self.grid.cols + self.first

    @property
    def positions(self) -> Int[Tensor, "B M"]:
        """The raster positions of the places; what lies outside of rows is any position."""
        where = self.start[..., None] + self.offset
        return where.clamp_max(self.grid.size - 1).flatten(1)

    @property
    def inside(self) -> Bool[Tensor, "B M"]:
        """Marks the places whose codes the pass may commit."""
        return (self.offset < self.length[..., None]).flatten(1)

    @property
    def drafted(self) -> Bool[Tensor, "B M"]:
        """Marks the places that hold drafts: all but the last of a full window."""
        return self.inside & (self.offset < self.window - 1).repeat(self.rows.shape[1])

    def by_row(self, x: Bool[Tensor, "B M"]) -> Bool[Tensor, "B A L"]:
        """Return marks of places with rows and places of a row apart."""
        return x.unflatten(1, (-1, self.window))

    def flat(self, places: Int[Tensor, "B A"]) -> Int[Tensor, "B A"]:
        """Return the index among all M of one place of each row."""
        return places + torch.arange(places.shape[1], device=places.device) * self.window

    def before(self, copied: Bool[Tensor, "B M"]) -> Int[Tensor, "B M"]:
        """Return the position of the last code of the row before each place that is no copy."""
        own = torch.where(self.by_row(copied), -1, self.offset).cummax(-1).values
        return (self.start[..., None] + own).flatten(1)

    def carried(
        self, p: Float[Tensor, "B N K"], earlier: "_Front"
    ) -> tuple[Float[Tensor, "B M K"], Bool[Tensor, "B M"]]:
        """Return what `p`, of an earlier front's places, holds for these, and where it does."""
        row = self.rows - earlier.rows[:, :1]
        known = row < earlier.rows.shape[1]
        row = row.clamp_max(earlier.rows.shape[1] - 1)
        place = (self.first - earlier.first.gather(1, row))[..., None] + self.offset
        known = known[..., None] & (place < earlier.length.gather(1, row)[..., None])
        at = (row[..., None] * self.window + place.clamp(0, self.window - 1)).flatten(1)
        return p.gather(1, at[..., None].expand(-1, -1, p.shape[-1])), known.flatten(1)

    def tokens(self, rows: Rows) -> Tokens:
        """Return what the pass feeds: newest codes, heads of rows, and drafts to predict more.

        A newest code that an earlier pass has had is fed again if its row has codes to commit.
        """
        ahead = self.grid.slot(self.start) - 1
        again = (self.length > 0) & (self.first > 0)
        again &= rows.fed.gather(1, self.rows) == self.first
        newest = rows.state.codes.gather(1, (self.start - 1).clamp_min(0))
        slots = ahead.where(again, -1)
        where, fed = self.positions, self.offset + 1 < self.length[..., None]
        drafts = Tokens(
            rows.state.codes.gather(1, where),
            self.grid.slot(where).where(fed.flatten(1), -1),
            ahead[..., None].expand_as(fed).flatten(1),
        )
        return rows.unfed().and_more(Tokens(newest, slots, slots)).and_more(drafts)
