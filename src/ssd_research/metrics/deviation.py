"""How far a decoder's images lie from AR's for the same prompt, in a feature space (paper A.5).

For prompt k with features x (AR) and y (the decoder) of N images each:

    shift_k = ||mean y - mean x||^2,   tr S = trace of the covariance over seeds (divisor N - 1)

averaged over prompts, `location = sqrt(shift / tr S_AR)` in AR's conditional standard deviations
and `scale = tr S_decoder / tr S_AR - 1`. This plug-in shift (the paper's) is biased: two samples of
one law have the expected value (tr S_x + tr S_y) / N. `shift_debiased` takes that out.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

VERSION = 1
Features = Float[np.ndarray, "K N d"]


@dataclass(frozen=True)
class Deviation:
    """Squared centre shift and spreads, means over prompts; `noise` is the shift's own bias."""

    shift: float
    trace_ar: float
    trace_decoder: float
    noise: float

    def __post_init__(self) -> None:
        if not self.trace_ar > 0:
            raise ValueError(
                "AR's images of a prompt are all alike, so there is no spread to measure by; "
                "generate them with sampling.top_k above 1"
            )

    @property
    def location(self) -> float:
        """The plug-in shift in AR's conditional standard deviations (Table 11's 0.70)."""
        return math.sqrt(self.shift / self.trace_ar)

    @property
    def scale(self) -> float:
        """The relative change of the spread (Table 11's +25 %)."""
        return self.trace_decoder / self.trace_ar - 1

    @property
    def shift_debiased(self) -> float:
        """The shift without its bias; below 0 by chance where there is none."""
        return self.shift - self.noise

    @property
    def location_debiased(self) -> float:
        """The debiased shift in AR's conditional standard deviations, 0 where it is negative."""
        return math.sqrt(max(self.shift_debiased, 0) / self.trace_ar)


def independent_noise(trace_ar: float, trace_decoder: float, images: int) -> float:
    """Return the expected plug-in shift of two equal laws from `images` independent seeds each."""
    return (trace_ar + trace_decoder) / images


def normalise(features: Float[np.ndarray, "*n d"]) -> Float[np.ndarray, "*n d"]:
    """Return features of unit length; ValueError for one of length 0."""
    length = np.linalg.norm(features, axis=-1, keepdims=True)
    if not (length > 0).all():
        raise ValueError("a feature vector of length 0 cannot be normalised: eval.normalize=false")
    return features / length


def per_prompt(ar: Features, decoder: Features, *, shared_seeds: bool) -> Float[np.ndarray, "K 4"]:
    """Return shift, tr S_AR, tr S_decoder and the shift's bias of every prompt.

    With `shared_seeds` image n of both came from the same noise, so their means move together: the
    bias is that of the paired differences, tr cov(y - x) / N. Raises ValueError for a single image.
    """
    images = ar.shape[1]
    if images < 2:
        raise ValueError("a spread over seeds needs at least 2 images per prompt")
    ar, decoder = ar.astype(np.float64), decoder.astype(np.float64)
    shift = ((decoder.mean(1) - ar.mean(1)) ** 2).sum(-1)
    spread_ar, spread_decoder = (x.var(1, ddof=1).sum(-1) for x in (ar, decoder))
    noise = (spread_ar + spread_decoder) / images
    if shared_seeds:
        noise = (decoder - ar).var(1, ddof=1).sum(-1) / images
    return np.stack([shift, spread_ar, spread_decoder, noise], 1)


def pool(rows: Float[np.ndarray, "K 4"]) -> Deviation:
    """Return the means over prompts."""
    return Deviation(*(float(value) for value in rows.mean(0)))


def split_half_null(ar: Features, *, splits: int, seed: int) -> dict[str, float]:
    """Return what the measure says of AR against itself: halves of each prompt's own images.

    Means over `splits` random halvings. The plug-in shift of N / 2 against N / 2 images is twice
    as noisy as that of N against N; `debiased` should be about 0. Raises ValueError below 4 images.
    """
    images = ar.shape[1]
    if images < 4:
        raise ValueError(f"a split-half null needs at least 4 images per prompt, not {images}")
    rng, half, found = np.random.default_rng(seed), images // 2, []
    for _ in range(splits):
        order = np.argsort(rng.random(ar.shape[:2]), axis=1)
        shuffled = np.take_along_axis(ar, order[..., None], 1)
        first, second = shuffled[:, :half], shuffled[:, half : 2 * half]
        found.append(pool(per_prompt(first, second, shared_seeds=False)))
    return {
        "images": half,
        "shift": float(np.mean([one.shift for one in found])),
        "shift_debiased": float(np.mean([one.shift_debiased for one in found])),
        "location": float(np.mean([one.location for one in found])),
    }


def intervals(rows: Float[np.ndarray, "K 4"], *, samples: int, seed: int) -> dict[str, list[float]]:
    """Return 95 % percentile intervals of every figure over redraws of the prompts."""
    rng = np.random.default_rng(seed)
    drawn = [pool(rows[rng.integers(0, len(rows), len(rows))]) for _ in range(samples)]
    names = ("shift", "shift_debiased", "location", "location_debiased", "scale")
    ends = {
        name: np.percentile([getattr(one, name) for one in drawn], [2.5, 97.5]) for name in names
    }
    return {f"{name}_ci95": [float(end) for end in pair] for name, pair in ends.items()}
