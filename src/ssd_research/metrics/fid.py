"""FID: the Fréchet distance between the features of generated and of reference images.

Two FIDs can only be compared when extractor, resize, reference images and their preprocessing are
the same, and so is the number of generated images, with which the bias falls. The file of reference
statistics therefore says how it was made, and is refused where the evaluation differs.
"""

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ssd_research.metrics.frechet import Gaussian
from ssd_research.metrics.judges.features import FeatureExtractor, center_crop
from ssd_research.metrics.picture_folder import Picture

VERSION = 1
Pixels = UInt8[np.ndarray, "h w 3"]
PREPROCESS: dict[str, Callable[[Pixels], Pixels]] = {
    "none": lambda image: image,
    "center_crop": center_crop,
}
ARRAYS = ("mu", "sigma", "n")


@dataclass(frozen=True)
class Provenance:
    """How reference statistics came about; every field must agree with the evaluation's.

    `preprocess` is what was done to a reference image before the resize, which squashes what is not
    square: `none` as clean-fid does, or `center_crop`. `images` hashes names and contents.
    """

    extractor: str
    revision: str
    resize: str
    preprocess: str
    images: str

    @classmethod
    def of(cls, extractor: FeatureExtractor, *, preprocess: str, images: str = "") -> "Provenance":
        """Return what an evaluation asks for; `images` is empty where any list will do."""
        if preprocess not in PREPROCESS:
            raise ValueError(
                f"eval.reference.preprocess={preprocess} is not known; "
                f"accepted: {', '.join(PREPROCESS)}"
            )
        return cls(extractor.name, extractor.revision, extractor.resize, preprocess, images)


@dataclass(frozen=True)
class Reference:
    """Reference statistics and where they come from."""

    gaussian: Gaussian
    provenance: Provenance


def write_reference(path: Path, reference: Reference) -> None:
    """Write mu, sigma, n and the provenance as .npz, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    gaussian = reference.gaussian
    arrays: dict[str, Any] = {
        "mu": gaussian.mean.numpy(),
        "sigma": gaussian.covariance.numpy(),
        "n": np.array(gaussian.count),
        **{key: np.array(text) for key, text in asdict(reference.provenance).items()},
    }
    with part.open("wb") as file:
        np.savez(file, **arrays)
    part.replace(path)


def read_reference(path: Path, wanted: Provenance) -> Reference:
    """Return reference statistics made as `wanted`.

    Raises ValueError, in one line, for a file that is broken, does not say how it was made (as
    clean-fid's own do not), or was made differently.
    """
    option = f"eval.reference.statistics={path}"
    content = _arrays(path, option)
    needed = [*ARRAYS, *asdict(wanted)]
    lacking = [name for name in needed if name not in content]
    if lacking:
        raise ValueError(
            f"{option} does not say how it was made (it lacks {', '.join(lacking)}); "
            "make it from the reference images: eval.reference.images=<folder>"
        )
    made = Provenance(**{name: str(content[name]) for name in asdict(wanted)})
    _refuse_difference(made, wanted, option)
    return Reference(_gaussian(content, option), made)


def _arrays(path: Path, option: str) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    # A .npy file is read as an array, which is no context: TypeError.
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{option} is not a whole .npz file: {error}") from error


def _refuse_difference(made: Provenance, wanted: Provenance, option: str) -> None:
    differing = [
        f"{key} {found!r}, not {asdict(wanted)[key]!r}"
        for key, found in asdict(made).items()
        if found != asdict(wanted)[key] and not (key == "images" and not wanted.images)
    ]
    if differing:
        raise ValueError(
            f"{option} was made with {'; '.join(differing)}: "
            "its FID would mean something else; name another file"
        )


def _gaussian(content: dict[str, np.ndarray], option: str) -> Gaussian:
    mean, covariance, count = (content[name] for name in ARRAYS)
    if not _is_gaussian(mean, covariance, count):
        raise ValueError(
            f"{option}: mu {list(mean.shape)}, sigma {list(covariance.shape)} and n={count} "
            "are not the finite mean and covariance of at least 2 images"
        )
    mu, sigma = (torch.from_numpy(array.astype(np.float64)) for array in (mean, covariance))
    return Gaussian(mu, sigma, int(count))


def _is_gaussian(mean: np.ndarray, covariance: np.ndarray, count: np.ndarray) -> bool:
    """Say whether three arrays are a mean, a covariance matrix and a number of images."""
    kinds = (mean.dtype.kind, covariance.dtype.kind, count.dtype.kind)
    if kinds[:2] != ("f", "f") or kinds[2] not in "iu" or count.ndim or count < 2:
        return False
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        return False
    finite = np.isfinite(mean).all() and np.isfinite(covariance).all()
    return bool(
        finite and np.allclose(covariance, covariance.T) and (covariance.diagonal() >= 0).all()
    )


def extract(
    pictures: Sequence[Picture],
    extractor: FeatureExtractor,
    *,
    store: Path,
    batch_size: int,
    preprocess: str = "none",
) -> Iterator[Float[Tensor, "b d"]]:
    """Yield the features of pictures batch by batch, keeping each batch in the folder `store`.

    A batch that an interrupted evaluation left there is read instead, so `store` must belong to
    these pictures and this extractor. Raises ValueError for a picture that cannot be read or has no
    finite features.
    """
    store.mkdir(parents=True, exist_ok=True)
    change = PREPROCESS[preprocess]
    for start in range(0, len(pictures), batch_size):
        path = store / f"{start:06d}-{batch_size}.npy"
        if not path.exists():
            batch = pictures[start : start + batch_size]
            prepared = [extractor.prepare(change(picture.read())) for picture in batch]
            features = extractor(torch.stack(prepared)).float().cpu().numpy()
            _refuse_unfit(features, batch, extractor)
            part = store / ".part"
            with part.open("wb") as file:
                np.save(file, features)
            part.replace(path)
        yield torch.from_numpy(np.load(path))


def _refuse_unfit(
    features: Float[np.ndarray, "b d"], batch: Sequence[Picture], extractor: FeatureExtractor
) -> None:
    for picture, finite in zip(batch, np.isfinite(features).all(1), strict=True):
        if not finite:
            raise ValueError(f"{extractor.name} finds no finite features in {picture.file}")
