"""Every random choice of a decoder, keyed by (seed, sample, raster position, round, purpose).

The key is hashed, not drawn from a stream, so a result depends neither on the batch size nor on
the order of work, and two decoders with the same seed meet the same noise at a position.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

PURPOSES = {"sample": 1, "accept": 2, "residual": 3, "draft": 4, "gumbel": 5}
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_key(prompt_id: str, image_index: int) -> int:
    """Return the stable 64-bit key of one image of one prompt."""
    digest = hashlib.sha256(f"{prompt_id}\x00{image_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


class Draw(Protocol):
    """The choices at some positions in one round; tests replace it by an enumerator.

    `needed` marks the choices that anything depends on: what is drawn elsewhere is never read.
    """

    def bernoulli(
        self, probability: Float[Tensor, "B L"], *, needed: Bool[Tensor, "B L"] | None = None
    ) -> Bool[Tensor, "B L"]:
        """Return True with the given probability, independently everywhere."""

    def categorical(
        self,
        p: Float[Tensor, "B L K"],
        *,
        purpose: str,
        needed: Bool[Tensor, "B L"] | None = None,
    ) -> Int[Tensor, "B L"]:
        """Return a code drawn from p (which need not be normalised) everywhere.

        The purpose `gumbel` is for draws that are repeated at a position in one round: all of them
        share one Gumbel variable per code, so that similar laws mostly give the same code.
        """


class Noise(Protocol):
    """A source of draws."""

    def at(self, positions: Int[Tensor, "B L"], round: int) -> Draw:
        """Return the draws of one round at raster `positions`."""


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class KeyedNoise:
    """Counter-based uniforms for the images `sample_keys` (one 64-bit key each)."""

    seed: int
    sample_keys: Sequence[int]

    def at(self, positions: Int[Tensor, "B L"], round: int) -> "KeyedDraw":
        """Return the draws of one round at raster `positions`."""
        return KeyedDraw(self, positions, round)

    def uniform(
        self, positions: Int[Tensor, "B L"], *, round: int, purpose: str
    ) -> Float[Tensor, "B L"]:
        """Return float64 uniforms in [0, 1)."""
        x = self._words(positions, round, purpose) >> np.uint64(11)
        return torch.from_numpy(x.astype(np.float64) * 2.0**-53).to(positions.device)

    def gumbel(
        self, positions: Int[Tensor, "B L"], codes: int, *, round: int
    ) -> Float[Tensor, "B L K"]:
        """Return float64 Gumbel variables, one per code."""
        x = self._words(positions, round, "gumbel")
        with np.errstate(over="ignore"):
            x = _mix(x[..., None] + _GOLDEN * np.arange(1, codes + 1, dtype=np.uint64))
        u = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        return torch.from_numpy(-np.log(-np.log(u))).to(positions.device)

    def _words(self, positions: Int[Tensor, "B L"], round: int, purpose: str) -> np.ndarray:
        """Return 64 random bits for every position."""
        with np.errstate(over="ignore"):
            # Python ints wrap explicitly: numpy refuses negative or larger values as uint64.
            x = _mix(np.array([self.seed & (2**64 - 1)], dtype=np.uint64) + _GOLDEN)
            x = _mix(x ^ np.array([k & (2**64 - 1) for k in self.sample_keys], dtype=np.uint64))
            x = _mix(
                x[:, None] + _GOLDEN * (positions.cpu().numpy().astype(np.uint64) + np.uint64(1))
            )
            return _mix(x + _GOLDEN * np.uint64((round << 8) + PURPOSES[purpose]))


@dataclass(frozen=True)
class KeyedDraw:
    """The draws of one round at some positions."""

    noise: KeyedNoise
    positions: Int[Tensor, "B L"]
    round: int

    def bernoulli(
        self, probability: Float[Tensor, "B L"], *, needed: Bool[Tensor, "B L"] | None = None
    ) -> Bool[Tensor, "B L"]:
        """Return u < probability."""
        return self.noise.uniform(self.positions, round=self.round, purpose="accept") < probability

    def categorical(
        self,
        p: Float[Tensor, "B L K"],
        *,
        purpose: str,
        needed: Bool[Tensor, "B L"] | None = None,
    ) -> Int[Tensor, "B L"]:
        """Invert the cumulative sum of p, normalised, at one uniform per position.

        The smallest code whose cumulative mass exceeds u is taken, so a code of mass 0 never is.
        For the purpose `gumbel` it is argmax(log p + G) instead.
        """
        if purpose == "gumbel":
            noise = self.noise.gumbel(self.positions, p.shape[-1], round=self.round)
            return (p.double().log() + noise).argmax(-1)
        u = self.noise.uniform(self.positions, round=self.round, purpose=purpose)
        mass = p.double().cumsum(-1)
        index = torch.searchsorted(mass, (u * mass[..., -1]).contiguous()[..., None], right=True)[
            ..., 0
        ]
        # u * total can round up to the total itself: fall back on the last code that has mass.
        last = p.shape[-1] - 1 - (p > 0).flip(-1).int().argmax(-1)
        return torch.minimum(index, last)
