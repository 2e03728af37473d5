"""The Fréchet distance between Gaussians fitted to features (Heusel et al., 2017), in float64.

`d^2 = ||m1 - m2||^2 + tr S1 + tr S2 - 2 tr (S1 S2)^(1/2)`. With S1 = R R^T the eigenvalues of S1 S2
are those of the symmetric `R^T S2 R`, so that no root of an unsymmetric matrix is taken: what
singular covariances (fewer images than features) do to `sqrtm` cannot happen here.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor


@dataclass(frozen=True)
class Gaussian:
    """Mean [d] and covariance [d, d] (divisor n - 1) of the features of `count` images."""

    mean: Float64[Tensor, " d"]
    covariance: Float64[Tensor, "d d"]
    count: int


class Moments:
    """Mean and covariance of features that come batch by batch, none of which is kept.

    Batches are merged with their own centres (Chan et al., 1983): summing squares of uncentred
    features loses digits where means are large.
    """

    def __init__(self, num_features: int) -> None:
        self.count = 0
        self.mean = torch.zeros(num_features, dtype=torch.float64)
        self.scatter = torch.zeros(num_features, num_features, dtype=torch.float64)

    def add(self, features: Float[Tensor, "B d"]) -> None:
        """Take in a batch of features; ValueError where one is not finite."""
        features = features.detach().cpu().double()
        if not bool(features.isfinite().all()):
            raise ValueError("features are not finite: the extractor fails on one of the images")
        count, mean = self.count + len(features), features.mean(0)
        centred, shift = features - mean, mean - self.mean
        between = self.count * len(features) / count * torch.outer(shift, shift)
        self.scatter += centred.T @ centred + between
        self.mean = self.mean + shift * (len(features) / count)
        self.count = count

    def gaussian(self) -> Gaussian:
        """Return the fitted Gaussian; ValueError from fewer than two images."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 images, not {self.count}")
        return Gaussian(self.mean.clone(), self.scatter / (self.count - 1), self.count)


def fit(features: Float[Tensor, "n d"]) -> Gaussian:
    """Return the Gaussian of features that are all in memory."""
    moments = Moments(features.shape[1])
    moments.add(features)
    return moments.gaussian()


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """Return the squared Fréchet distance d^2, which is what FID reports.

    Raises:
        ValueError: if the two have different numbers of features.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"{len(a.mean)} features cannot be compared with {len(b.mean)}")
    between = (a.mean - b.mean).square().sum()
    traces = a.covariance.trace() + b.covariance.trace()
    return float(between + traces - 2 * trace_of_root(a.covariance, b.covariance))


def trace_of_root(a: Float64[Tensor, "d d"], b: Float64[Tensor, "d d"]) -> Float64[Tensor, ""]:
    """Return tr (A B)^(1/2) of two covariances; eigenvalues below 0 are rounding and count as 0."""
    root = factor(a)
    product = root.T @ b @ root
    return torch.linalg.eigvalsh((product + product.T) / 2).clamp_min(0).sqrt().sum()


def factor(a: Float64[Tensor, "d d"]) -> Float64[Tensor, "d d"]:
    """Return R with A = R R^T: Cholesky's, or where A is singular the symmetric root by eigh."""
    lower, failed = torch.linalg.cholesky_ex(a)
    if not failed:
        return lower
    values, vectors = torch.linalg.eigh(a)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T
