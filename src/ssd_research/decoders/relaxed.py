"""Accept rules that trade exactness for length: LANTERN (Jang et al. 2025), LANTERN++ (Park 2025).

Codes whose codebook vectors are close look alike, so a draft x may stand for its neighbours: p is
replaced by p~, in which the mass of the nearest neighbours lies on x. As many of the k nearest take
part as keep the moved mass within a bound, and that mass is TV(p~, p).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssd_research.decoders.accept import Codes, Dist, ratio


@dataclass(frozen=True, eq=False)
class Relaxed:
    """Keep a draft with min(1, p~/q), else draw from max(0, p~ - q).

    `nearest` holds the k nearest codes of each code, nearest first. The bound on the moved mass is
    `delta` (LANTERN), or (lam - 1) p(x) where `lam` is given (LANTERN++).
    """

    nearest: Int[Tensor, "K k"]
    delta: float = 0.0
    lam: float | None = None

    def target(self, p: Dist, draft: Codes) -> Dist:
        """Return p~, the target as each draft is judged by it."""
        at = draft[..., None]
        own = p.gather(-1, at)
        around = self.nearest[draft].long()
        mass = p.gather(-1, around)
        used = mass.cumsum(-1) <= self.bound(own)
        relaxed = p.scatter(-1, around, torch.where(used, 0, mass))
        return relaxed.scatter(-1, at, own + (mass * used).sum(-1, keepdim=True))

    def bound(self, own: Float[Tensor, "B L 1"]) -> Float[Tensor, "B L 1"]:
        """Return how much mass may move to a draft whose own is `own`."""
        return torch.full_like(own, self.delta) if self.lam is None else (self.lam - 1) * own

    def odds(self, p: Dist, q: Dist, draft: Codes) -> Float[Tensor, "B L"]:
        """Return min(1, p~/q)."""
        return ratio(self.target(p, draft), q, draft)

    def correction(self, p: Dist, q: Dist, draft: Codes) -> Dist:
        """Return max(0, p~ - q); p itself where p~ and q are numerically equal."""
        excess = (self.target(p, draft) - q).clamp_min(0)
        return torch.where(excess.sum(-1, keepdim=True) > 0, excess, p)
