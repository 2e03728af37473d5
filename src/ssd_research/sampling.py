"""The one target distribution p of the whole system, from guided logits.

Order: guidance -> temperature -> top-k -> top-p -> softmax. Accept tests, residuals and drafts all
use this p; the filters are never run again on a residual.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Inference settings: guidance w in l_u + w (l_c - l_u), temperature, top-k, top-p."""

    guidance: float
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        for name in ("guidance", "temperature", "top_k", "top_p"):
            value = getattr(self, name)
            optional = name.startswith("top") and value is None
            if not optional and not (isinstance(value, int | float) and math.isfinite(value)):
                raise ValueError(f"sampling.{name} must be a finite number, not {value}")
        if self.guidance < 0:
            raise ValueError(f"sampling.guidance must be at least 0, not {self.guidance}")
        if not self.temperature > 0:
            raise ValueError(f"sampling.temperature must be above 0, not {self.temperature}")
        if self.top_k is not None and (self.top_k < 1 or self.top_k != int(self.top_k)):
            raise ValueError(
                f"sampling.top_k must be a whole number of at least 1, or null, not {self.top_k}"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p must be in (0, 1] or null, not {self.top_p}")

    def distribution(self, logits: Float[Tensor, "B L K"]) -> Float[Tensor, "B L K"]:
        """Return p for guided logits; ties with the k-th logit are kept, as transformers does."""
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        p = logits.softmax(-1)
        if self.top_p is None or self.top_p == 1:
            return p
        ranked, order = p.sort(dim=-1, descending=True)
        beyond = ranked.cumsum(-1) - ranked >= self.top_p
        p = p.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0)
        return p / p.sum(-1, keepdim=True)
