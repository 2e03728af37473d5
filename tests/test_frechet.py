"""The Fréchet distance against clean-fid's and closed forms; running moments against numpy's."""

import warnings

import numpy as np
import pytest
import torch
from cleanfid.fid import frechet_distance as clean_fid
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_research.metrics.frechet import Gaussian, Moments, fit, frechet_distance


def features(count: int, width: int, *, seed: int, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator, dtype=torch.float64)
    return torch.randn(count, width, generator=generator, dtype=torch.float64) @ mixing + shift


def theirs(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return clean-fid's distance from numpy's moments of two sets of features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pairs = [f(x.numpy()) for x in (a, b) for f in (lambda x: x.mean(0), lambda x: np.cov(x.T))]
        return float(clean_fid(*pairs))


@pytest.mark.parametrize(("count", "width"), [(50, 3), (200, 40), (400, 128)])
def test_it_equals_clean_fids_on_the_same_features(count, width) -> None:
    a = features(count, width, seed=1)
    b = features(count + 20, width, seed=2, shift=0.3)
    assert frechet_distance(fit(a), fit(b)) == pytest.approx(theirs(a, b), rel=1e-6)
    assert frechet_distance(fit(b), fit(a)) == pytest.approx(theirs(a, b), rel=1e-6)


def test_fewer_images_than_features() -> None:
    """S1 and S2 are singular, which is where clean-fid's square root turns complex."""
    a, b = features(10, 32, seed=1), features(12, 32, seed=2, shift=1.0)
    # ||S1^(1/2) S2^(1/2)||_* by the centred features themselves, without any covariance.
    centred = [(x - x.mean(0)) / (len(x) - 1) ** 0.5 for x in (a, b)]
    root = torch.linalg.svdvals(centred[0] @ centred[1].T).sum()
    expected = (a.mean(0) - b.mean(0)).square().sum() - 2 * root
    expected += sum(x.square().sum() for x in centred)
    assert frechet_distance(fit(a), fit(b)) == pytest.approx(float(expected), rel=1e-6)


def test_closed_forms() -> None:
    def gaussian(mean, deviations):
        scale = torch.tensor(deviations, dtype=torch.float64)
        return Gaussian(torch.tensor(mean, dtype=torch.float64), scale.square().diag(), 10)

    a, b = gaussian([0.0, 1.0], [1.0, 2.0]), gaussian([2.0, 0.0], [3.0, 0.5])
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-12)
    assert frechet_distance(a, b) == pytest.approx(4 + 1 + 2**2 + 1.5**2)
    point = gaussian([0.0, 1.0], [0.0, 0.0])
    assert frechet_distance(point, a) == pytest.approx(5)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 1),
    st.sampled_from([0.0, 1e3, 1e7]),
)
def test_moments_do_not_depend_on_batches_nor_on_the_mean(sizes, shift) -> None:
    all_of_them = features(sum(sizes), 4, seed=3, shift=shift)
    moments = Moments(4)
    for part in all_of_them.split(sizes):
        moments.add(part)
    found = moments.gaussian()
    assert found.count == sum(sizes)
    np.testing.assert_allclose(found.mean, all_of_them.mean(0), rtol=1e-12)
    expected = np.cov((all_of_them - shift).numpy().T)
    np.testing.assert_allclose(found.covariance, expected, rtol=1e-6, atol=1e-8)


def test_float32_features_are_summed_in_float64() -> None:
    found = fit(features(30, 3, seed=4).float())
    assert found.mean.dtype == found.covariance.dtype == torch.float64


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="3 features cannot be compared with 4"):
        frechet_distance(fit(features(9, 3, seed=1)), fit(features(9, 4, seed=1)))
    with pytest.raises(ValueError, match="at least 2 images, not 1"):
        fit(features(1, 3, seed=1))
    with pytest.raises(ValueError, match="not finite"):
        fit(torch.tensor([[1.0, float("nan")], [0.0, 1.0]]))
