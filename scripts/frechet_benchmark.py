#!/usr/bin/env python3
"""Our Fréchet distance against clean-fid's, which takes SciPy's sqrtm: the same value, how fast.

    python scripts/frechet_benchmark.py                      # 2048 features, about two minutes
    python scripts/frechet_benchmark.py --features 256       # a second

Features are drawn with eigenvalues that fall as Inception's do. One JSON line goes to stdout.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable

import torch
from cleanfid.fid import frechet_distance as clean_fid

from ssd_research.metrics.frechet import Gaussian, fit, frechet_distance
from ssd_research.provenance import device_name, versions


def features(count: int, width: int, *, seed: int, shift: float) -> torch.Tensor:
    """Return correlated features [count, width] with a falling spectrum."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.arange(1, width + 1) ** -0.5
    mixing = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    return torch.randn(count, width, generator=generator) * scale @ mixing + shift


def timed(distance: Callable[[], float]) -> tuple[float, float]:
    """Return what a call returns and how many seconds it took."""
    start = time.perf_counter()
    return float(distance()), time.perf_counter() - start


def reference(a: Gaussian, b: Gaussian) -> float:
    """Return clean-fid's distance."""
    pairs = [array for g in (a, b) for array in (g.mean.numpy(), g.covariance.numpy())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return clean_fid(*pairs)


def main() -> None:
    """Time both on the same statistics and print one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    a, b = (fit(features(options.images, options.features, seed=n, shift=0.05 * n)) for n in (0, 1))
    ours, seconds = timed(lambda: frechet_distance(a, b))
    theirs, sqrtm_seconds = timed(lambda: reference(a, b))
    result = {
        "features": options.features,
        "images": options.images,
        "ours": ours,
        "clean_fid": theirs,
        "relative_difference": abs(ours - theirs) / theirs,
        "seconds": round(seconds, 2),
        "sqrtm_seconds": round(sqrtm_seconds, 2),
        "times_faster": round(sqrtm_seconds / seconds, 2),
        "device": device_name("cpu"),
        "versions": {key: versions()[key] for key in ("torch", "numpy")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
