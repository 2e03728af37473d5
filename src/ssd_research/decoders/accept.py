"""Accept rules: pure functions of (p, q, draft), position by position.

p is the backbone's distribution and q the draft's, both after every filter; the draft is the token
in place. `draw` holds the round's random choices. Rules that test a draft come in two parts, its
odds of being kept and the distribution of what replaces it, so that a decoder may stop at the first
reject.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssd_research.decoders.noise import Draw

Dist = Float[Tensor, "B L K"]
Codes = Int[Tensor, "B L"]
Rule = Callable[[Dist, Dist, Codes, Draw], tuple[Codes, Bool[Tensor, "B L"]]]


def residual(p: Dist, q: Dist) -> Dist:
    """Return max(0, p - q), not normalised; p itself where p and q are numerically equal."""
    excess = (p - q).clamp_min(0)
    return torch.where(excess.sum(-1, keepdim=True) > 0, excess, p)


def ratio(p: Dist, q: Dist, draft: Codes) -> Float[Tensor, "B L"]:
    """Return min(1, p / q) of the drafts."""
    at = draft[..., None]
    p_draft, q_draft = p.gather(-1, at)[..., 0].double(), q.gather(-1, at)[..., 0].double()
    return (p_draft / q_draft.clamp_min(1e-300)).clamp_max(1.0)


class AcceptRule(Protocol):
    """How a chain of drafts is tested, one after the other."""

    def odds(self, p: Dist, q: Dist, draft: Codes) -> Float[Tensor, "B L"]:
        """Return the probability of keeping each draft."""

    def correction(self, p: Dist, q: Dist, draft: Codes) -> Dist:
        """Return what replaces a draft that is not kept, not normalised."""


@dataclass(frozen=True)
class Rejection:
    """Keep with min(1, p/q), else draw from the residual: exact if the draft was drawn from q."""

    def odds(self, p: Dist, q: Dist, draft: Codes) -> Float[Tensor, "B L"]:
        """Return min(1, p/q)."""
        return ratio(p, q, draft)

    def correction(self, p: Dist, q: Dist, draft: Codes) -> Dist:
        """Return max(0, p - q)."""
        return residual(p, q)


@dataclass(frozen=True, eq=False)
class Grouped:
    """Keep with min(1, p(C) / q(C)) for a group C around the draft; else the residual (GSD, lossy).

    The group holds the draft and, of the `size` nearest in rank under p (half of them above it,
    ties in order of codes), those that have mass, differ from the draft in p by less than `delta`
    and lie closer than `distance` to it: squared Euclidean, between rows of `embeddings` [K, D].
    Ranks beyond either end are left out; None switches a filter off. A draft without mass under p
    is a group of its own, so it is never kept. A group of size 1 is the token-level rule.
    """

    size: int
    delta: float | None
    distance: float | None
    embeddings: Float[Tensor, "K D"]

    def odds(self, p: Dist, q: Dist, draft: Codes) -> Float[Tensor, "B L"]:
        """Return min(1, p(C) / q(C))."""
        group, member = self.group(p, draft)
        p_group, q_group = (
            torch.where(member, x.gather(-1, group), 0).double().sum(-1) for x in (p, q)
        )
        return (p_group / q_group.clamp_min(1e-300)).clamp_max(1.0)

    def correction(self, p: Dist, q: Dist, draft: Codes) -> Dist:
        """Return max(0, p - q), code by code."""
        return residual(p, q)

    def group(self, p: Dist, draft: Codes) -> tuple[Int[Tensor, "B L G"], Bool[Tensor, "B L G"]]:
        """Return the codes of nearest ranks, and which of them are in the group."""
        order = p.argsort(dim=-1, descending=True, stable=True)
        own, codes = p.gather(-1, draft[..., None]), torch.arange(p.shape[-1], device=p.device)
        above = (p > own) | ((p == own) & (codes < draft[..., None]))
        near = torch.arange(self.size, device=p.device) - self.size // 2
        ranks = above.sum(-1, keepdim=True) + near
        group = order.gather(-1, ranks.clamp(0, p.shape[-1] - 1))
        inside, mass = (ranks >= 0) & (ranks < p.shape[-1]), p.gather(-1, group)
        member = inside & (mass > 0) & (own > 0)
        if self.delta is not None:
            member &= (mass - own).abs() < self.delta
        if self.distance is not None:
            apart = self.embeddings[group] - self.embeddings[draft][..., None, :]
            member &= apart.square().sum(-1) < self.distance
        return group, member | (near == 0)


def reject(p: Dist, q: Dist, draft: Codes, draw: Draw) -> tuple[Codes, Bool[Tensor, "B L"]]:
    """Keep the draft with probability min(1, p/q), else draw from the residual (paper 3.3, rule C).

    The paper drafts by argmax and scores the draft as if it had been sampled from q; the rule is
    applied as published.
    """
    accepted = draw.bernoulli(ratio(p, q, draft))
    corrected = draw.categorical(residual(p, q), purpose="residual", needed=~accepted)
    return torch.where(accepted, draft, corrected), accepted


def sample(p: Dist, q: Dist, draft: Codes, draw: Draw) -> tuple[Codes, Bool[Tensor, "B L"]]:
    """Draw every token from p (rule B); a token counts as accepted where it equals the draft."""
    token = draw.categorical(p, purpose="sample")
    return token, token == draft


def argmax(p: Dist, q: Dist, draft: Codes, draw: Draw) -> tuple[Codes, Bool[Tensor, "B L"]]:
    """Take the most likely code of p (rule A); accepted means that it equals the draft."""
    token = p.argmax(-1)
    return token, token == draft


RULES: dict[str, Rule] = {"reject": reject, "sample": sample, "argmax": argmax}
