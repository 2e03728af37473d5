"""Accept rules: pure functions from (p, q, draft, draw) to (token, accepted), position by position.

p is the backbone's distribution and q the draft's, both after every filter; the draft is the token
in place. `draw` holds the round's random choices.
"""

from collections.abc import Callable

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


def reject(p: Dist, q: Dist, draft: Codes, draw: Draw) -> tuple[Codes, Bool[Tensor, "B L"]]:
    """Keep the draft with probability min(1, p/q), else draw from the residual (paper 3.3, rule C).

    The paper drafts by argmax and scores the draft as if it had been sampled from q; the rule is
    applied as published.
    """
    at = draft[..., None]
    p_draft, q_draft = p.gather(-1, at)[..., 0].double(), q.gather(-1, at)[..., 0].double()
    accepted = draw.bernoulli((p_draft / q_draft.clamp_min(1e-300)).clamp_max(1.0))
    token = torch.where(accepted, draft, draw.categorical(residual(p, q), purpose="residual"))
    return token, accepted


def sample(p: Dist, q: Dist, draft: Codes, draw: Draw) -> tuple[Codes, Bool[Tensor, "B L"]]:
    """Draw every token from p (rule B); a token counts as accepted where it equals the draft."""
    token = draw.categorical(p, purpose="sample")
    return token, token == draft


def argmax(p: Dist, q: Dist, draft: Codes, draw: Draw) -> tuple[Codes, Bool[Tensor, "B L"]]:
    """Take the most likely code of p (rule A); accepted means that it equals the draft."""
    token = p.argmax(-1)
    return token, token == draft


RULES: dict[str, Rule] = {"reject": reject, "sample": sample, "argmax": argmax}
