"""Speculative Jacobi decoding: the drafts of a step are the backbone's own guesses of the last one.

SJD (Teng et al., ICLR 2025), MC-SJD (So et al., 2025: `coupling`) and GSD (So et al., ICCV 2025:
`group`) are one loop over a window of L codes, of which the newest is committed:

    forward     y  x1 x2 x3 x4       p at x1 ... x4 and at one position more
    test        x1 against q1, x2 against q2, ... : x3 is the first to be rejected
    commit      x1 x2, and y3 from the residual of p3 and q3
    redraft     x4 from p4, which becomes its q, whether x4 changes or not
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.meter import Generation
from ssd_research.decoders.accept import AcceptRule, Grouped, Rejection
from ssd_research.decoders.base import Decoder, require_whole
from ssd_research.decoders.chain import Chain, Verdict, carried
from ssd_research.decoders.noise import Noise
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling

INITIALISATIONS = ("random", "horizontal", "vertical")
LAWS = ("one_hot", "uniform")
COUPLINGS = ("none", "maximal", "gumbel")


class FirstDrafts(Protocol):
    """Where the drafts of positions come from that no pass has predicted yet."""

    def window(self, chain: Chain) -> Int[Tensor, "B L"]:
        """Return the positions that the next pass drafts, -1 where there are fewer."""

    def draft(
        self, chain: Chain, positions: Int[Tensor, "B L"], new: Bool[Tensor, "B L"]
    ) -> Float[Tensor, "B L K"]:
        """Put drafts in place at the `new` positions and return the laws q of those."""


def iterate(chain: Chain, rule: AcceptRule, first: FirstDrafts, *, coupling: str) -> None:
    """Decode all images to their ends.

    Exact with token-level rejection, because, given all that lies before a position, its draft is
    distributed as its q when it is tested for the only time that counts.
    """
    state, count, number = chain.state, chain.committed, 0
    p = state.distribution(range(1))  # predicted nothing that is not committed
    predicted = torch.zeros_like(p[..., 0], dtype=torch.bool)
    while not chain.done:
        number += 1
        with state.timed("draft"):
            positions = first.window(chain)
            q, known = carried(p, predicted, count=count, length=positions.shape[1])
            new = (positions >= 0) & ~known
            q = torch.where(new[..., None], first.draft(chain, positions, new), q)
        drafts = chain.drafts(positions)
        p = chain.forward(drafts, positions)
        verdict = chain.test(
            rule,
            p=p,
            q=q,
            drafts=drafts,
            positions=positions,
            number=number,
            through=coupling == "maximal",
        )
        with state.timed("draft"):
            predicted = chain.predicted(positions)
            beyond = predicted & (verdict.fresh.cumsum(1) == 1) & ~verdict.fresh
            redraft(chain, verdict, beyond, p=p, number=number, coupling=coupling)
            count = chain.commit(verdict)


def redraft(
    chain: Chain,
    verdict: Verdict,
    beyond: Bool[Tensor, "B M"],
    *,
    p: Float[Tensor, "B M K"],
    number: int,
    coupling: str,
) -> None:
    """Put new drafts in place at what lies `beyond` the code that a step commits last, from p.

    Coupled ones keep their code where they can: `maximal` drafts went through the accept test,
    which keeps with min(1, p/q); with `gumbel` a position's draws share their Gumbel variables,
    which the test and the residual know nothing of.
    """
    places, tokens = chain.places(p.shape[1]), verdict.tokens
    if coupling == "none":
        draw = chain.noise.at(places, number)
        tokens = draw.categorical(p, purpose="draft", needed=beyond)
    elif coupling == "gumbel":
        tokens = chain.noise.at(places, 0).categorical(p, purpose="gumbel", needed=beyond)
    chain.write(places, tokens, beyond)


@dataclass(frozen=True)
class Guesses:
    """First drafts without any model: random codes, or copies of a neighbour."""

    length: int
    init: str
    init_q: str

    def window(self, chain: Chain) -> Int[Tensor, "B L"]:
        """Return the next `length` positions."""
        return chain.window(self.length)

    def draft(
        self, chain: Chain, positions: Int[Tensor, "B L"], new: Bool[Tensor, "B L"]
    ) -> Float[Tensor, "B L K"]:
        """Put guesses in place; their q is one-hot, or the uniform law that they were drawn from.

        One-hot is exact for any guess, random or not: given the guess, it is certain.
        """
        codes = chain.state.backbone.codebook_size
        shape = (*new.shape, codes)
        uniform = torch.full(shape, 1 / codes, dtype=chain.dtype, device=new.device)
        random = new & ~has_source(self.init, positions, cols=chain.cols)
        draw = chain.noise.at(positions, 0)
        chain.write(positions, draw.categorical(uniform, purpose="draft", needed=random), random)
        for column in range(new.shape[1] if self.init != "random" else 0):
            # From left to right: a guess may be copied from the guess before it.
            one = slice(column, column + 1)
            source = positions[:, one] - (1 if self.init == "horizontal" else chain.cols)
            copy = chain.drafts(source)
            chain.write(positions[:, one], copy, new[:, one] & ~random[:, one])
        if self.init_q == "uniform":
            return uniform
        guesses = chain.drafts(positions)
        return torch.zeros_like(uniform).scatter_(-1, guesses[..., None], 1.0)


def has_source(init: str, positions: Int[Tensor, "B L"], *, cols: int) -> Bool[Tensor, "B L"]:
    """Marks the positions with a neighbour to copy: a row's first has no left, row 0 none above."""
    if init == "horizontal":
        return positions % cols > 0
    return (positions >= cols) & (init == "vertical")


@dataclass(frozen=True)
class SpeculativeJacobi(Decoder):
    """SJD over a window of `window` codes; lossless unless drafts are accepted by groups.

    A window's new positions start as `random` codes, or as copies of the code to the left
    (`horizontal`; random in column 0) or above (`vertical`; random in row 0). `init_q` is the law
    that a first draft is tested against: `one_hot`, as published, or for random ones `uniform`,
    which accepts more. `coupling` makes redrafts keep their code more often (MC-SJD): `maximal` by
    the accept test, `gumbel` by shared noise. `by_row` clips windows at the ends of rows.

    With `group` G a draft is accepted by the mass of up to G codes around it (GSD, lossy): those
    near it in rank, closer than `delta` in p and than `distance` in squared distance of input
    embeddings; None is no such limit.
    """

    window: int = 16
    init: str = "random"
    init_q: str = "one_hot"
    coupling: str = "none"
    by_row: bool = False
    group: int | None = None
    delta: float | None = None
    distance: float | None = None
    name: str = "sjd"

    def __post_init__(self) -> None:
        require_whole("window", self.window, least=2)
        choices = (("init", INITIALISATIONS), ("init_q", LAWS), ("coupling", COUPLINGS))
        for name, values in (*choices, ("by_row", (True, False))):
            value = getattr(self, name)
            if value not in values:
                raise ValueError(
                    f"decoder.{name}={value} is not one of {', '.join(map(str, values))}"
                )
        if self.init_q == "uniform" and self.init != "random":
            raise ValueError(
                f"decoder.init_q=uniform would be wrong with decoder.init={self.init}: copies are "
                "not drawn from a uniform law; use one_hot, or decoder.init=random"
            )
        self._check_group()

    def _check_group(self) -> None:
        limits = {"delta": self.delta, "distance": self.distance}
        if self.group is not None:
            require_whole("group", self.group, least=1)
            if self.coupling != "none":
                raise ValueError(
                    f"decoder.coupling={self.coupling} couples drafts by the token-level rule: "
                    "leave it at none, or leave out decoder.group"
                )
        for name, value in limits.items():
            if value is not None and self.group is None:
                raise ValueError(f"decoder.{name}={value} does nothing without decoder.group")
            if value is not None and not (isinstance(value, int | float) and value >= 0):
                raise ValueError(f"decoder.{name} must be a number of at least 0, not {value}")

    @property
    def lossless(self) -> bool:
        """Whether drafts are accepted code by code."""
        return self.group is None

    def settings(self, grid: TokenGrid) -> dict[str, Any]:
        """Return the hyper-parameters, those of groups only where there are any."""
        given = super().settings(grid)
        if self.group is None:
            for name in ("group", "delta", "distance"):
                del given[name]
        return given

    def rule(self, backbone: Backbone) -> AcceptRule:
        """Return how drafts are accepted."""
        if self.group is None:
            return Rejection()
        every = torch.arange(backbone.codebook_size, device=backbone.device)
        return Grouped(self.group, self.delta, self.distance, backbone.embed(every[None])[0])

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
        chain = Chain(backbone.start(prompts, sampling=sampling), noise, by_row=self.by_row)
        guesses = Guesses(self.window - 1, self.init, self.init_q)
        iterate(chain, self.rule(backbone), guesses, coupling=self.coupling)
        return chain.state.finish()
