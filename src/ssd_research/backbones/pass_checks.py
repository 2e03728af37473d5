"""Passes that must agree, on the weights and in the precision at hand: blocks, batches, training.

An image is sampled code by code, as plain decoding does; the same codes are then fed in other ways.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.state import DecodingState
from ssd_research.backbones.weight_checks import Check
from ssd_research.sampling import Sampling

STATE_LIMIT = 1e-4  # of the largest state, in float32 and float64
LAW_LIMIT = 1e-4  # mean total variation, in float32 and float64
HALF = (torch.bfloat16, torch.float16)
HALF_NOTE = (
    "In this precision passes of different shapes round differently (a law 0.02 apart is usual): "
    "nothing is decided here; runtime.dtype=float32 decides."
)


@torch.inference_mode()
def sample_rows(
    state: DecodingState, rows: int, *, seed: int, tick: Callable[[], object] = lambda: None
) -> None:
    """Sample the first rows of the images one code at a time; `tick` is called after each.

    Raises ValueError where a distribution is not finite, as numbers too large for float16 make it.
    """
    generator = torch.Generator().manual_seed(seed)
    grid = state.backbone.grid
    for n in range(rows * grid.cols):
        p = state.distribution(range(n, n + 1))[:, 0].float().cpu()
        if not torch.isfinite(p).all():
            raise ValueError(
                f"{state.backbone.name} in {state.backbone.dtype}: the distribution at position "
                f"{n} is not finite; try runtime.dtype=bfloat16 or float32"
            )
        code = torch.multinomial(p, 1, generator=generator).to(state.codes.device)
        state.codes[:, n : n + 1] = code
        if n + 1 < grid.size:
            state.forward(code, range(n, n + 1), phase="commit")
        tick()


@torch.inference_mode()
def feed_rows(state: DecodingState, codes: Int[Tensor, "B N"], rows: int) -> None:
    """Feed the first rows as blocks: wrong drafts first, then the codes that overwrite them."""
    backbone = state.backbone
    wrong = (codes + 1) % backbone.codebook_size
    for y in range(rows):
        span = backbone.grid.row(y)
        for source in (wrong, codes):
            state.forward(source[:, span.start : span.stop], span, phase="verify")


@dataclass(frozen=True)
class Witness:
    """One image sampled code by code: `h_pre` [S, n, D] of its first n positions is the reference.

    `codes` [1, N] are zeros after the sampled rows.
    """

    backbone: Backbone
    prompt: str
    sampling: Sampling
    rows: int
    codes: Int[Tensor, "1 N"]
    h_pre: Float[Tensor, "S n D"]

    @classmethod
    def of(cls, state: DecodingState, prompt: str, rows: int) -> "Witness":
        """Keep what a sampled state of one image says, without its cache."""
        count = rows * state.backbone.grid.cols
        h_pre = state.h_pre[:, :count].clone()
        return cls(state.backbone, prompt, state.sampling, rows, state.codes.clone(), h_pre)

    def blocks(self) -> Check:
        """Compare rows fed as blocks, over wrong drafts, with the codes fed one by one."""
        state = self.backbone.start([self.prompt], sampling=self.sampling)
        feed_rows(state, self.codes, self.rows)
        return self.compare("block pass = token pass", state.h_pre)

    def batch(self) -> Check:
        """Compare the image beside another one, whose prompt is longer, with the image alone."""
        prompts = [self.prompt, companion(self.prompt)]
        state = self.backbone.start(prompts, sampling=self.sampling)
        other = (self.codes * 7 + 3) % self.backbone.codebook_size
        feed_rows(state, torch.cat([self.codes, other]), self.rows)
        return self.compare("in a batch = alone", state.h_pre[:: len(prompts)])

    def teacher_forced(self) -> Check:
        """Compare one causal pass over prompt and image, without a cache, with decoding."""
        streams = len(self.h_pre)
        h_pre = self.backbone.hidden_states(
            [self.prompt] * streams,
            self.codes.repeat(streams, 1),
            unconditional=torch.arange(streams) >= 1,
        )
        return self.compare("teacher-forced = decoded", h_pre)

    @torch.inference_mode()
    def compare(self, name: str, h_pre: Float[Tensor, "S M D"]) -> Check:
        """Compare other states of the same positions, and the laws (distributions) they stand for.

        Laws are compared by total variation. float32 and float64 have a limit; in bfloat16 and
        float16 only a NaN fails.
        """
        apart, laws, modes = 0.0, [], []
        finite = True
        for y in range(self.rows):
            span = self.backbone.grid.row(y)
            pair = [h[:, span.start : span.stop] for h in (self.h_pre, h_pre)]
            apart = max(apart, float((pair[0] - pair[1]).abs().max()))
            p, q = (
                self.sampling.distribution(self.backbone.logits(h, self.sampling.guidance))
                for h in pair
            )
            finite = finite and bool(torch.isfinite(p).all() and torch.isfinite(q).all())
            laws.append((p - q).abs().sum(-1).flatten() / 2)
            modes.append((p.argmax(-1) != q.argmax(-1)).flatten())
        law = torch.cat(laws).double()
        numbers = {
            "positions": len(law),
            "state_difference": apart,
            "largest_state": float(self.h_pre.abs().max()),
            "total_variation_mean": float(law.mean()),
            "total_variation_max": float(law.max()),
            "argmax_differs": int(torch.cat(modes).sum()),
        }
        return Check(name, self._verdict(numbers, finite), _words(numbers), numbers)

    def _verdict(self, numbers: dict[str, float], finite: bool) -> bool | None:
        if not finite:
            return False
        if self.backbone.dtype in HALF:
            return None
        states = numbers["state_difference"] <= STATE_LIMIT * max(1.0, numbers["largest_state"])
        return states and numbers["total_variation_mean"] <= LAW_LIMIT


def _words(numbers: dict[str, float]) -> str:
    return (
        f"states {numbers['state_difference']:.0e} of {numbers['largest_state']:.3g}; "
        f"law {numbers['total_variation_mean']:.1e}, at most {numbers['total_variation_max']:.1e}; "
        f"argmax {numbers['argmax_differs']} of {numbers['positions']}"
    )


def companion(prompt: str) -> str:
    """Return a longer prompt in words that the model knows if it knows those of `prompt`."""
    return f"{prompt} {prompt}"
