"""The exact detector of the shapes world: reads (shape, colour, box, size) off the pixels.

A plane per channel is fitted to the background; what stands out from it is cut into components at
half of its local contrast; a component's colour is the nearest reference colour and its shape the
best correlation with the renderer's own shapes after centre and scale are taken out. Smudges
are ignored: components below `MIN_AREA` of the picture (the smallest object covers five times as
much) or `MIN_CONTRAST`. All others are reported, whatever their score, so that clutter cannot pass
unseen.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from scipy import ndimage

from ssd_research.shapes.render import coverage
from ssd_research.shapes.scenes import COLOURS, SHAPES

VERSION = "1"
MIN_AREA = 0.0035
MIN_DIAMETER = 0.18  # share of the canvas; the smallest object has 0.25, decoded at least 0.2
CLEAR_SCORE = 0.9  # real shapes score above 0.95, two that touch at most 0.75
MIN_CONTRAST = 60.0  # RGB distance from the background; the faintest object, pink, has about 80
_SIDE, _EXTENT = 24, 2.4  # canonical crop: pixels per side, half width in rms radii
_DIAMETERS = (9.5, 11.0, 13.0, 16.0, 20.0, 26.0, 34.0)
_TILTS = (-10.0, -5.0, 0.0, 5.0, 10.0)  # degrees; the world tilts by at most 8
_BLURS = (0.0, 0.7)  # pixels; the second is what a VQ reconstruction does to an edge
# Image decoders round corners and fill notches, so every shape fades towards a circle and a small
# star first of all. Measured on VQ reconstructions: a circle leads a star by at least 0.045.
_HANDICAPS = np.array([{"circle": -0.007, "star": 0.015}.get(shape, 0.0) for shape in SHAPES])
_NAMES = tuple(COLOURS)
_REFERENCE = np.array(list(COLOURS.values()), float)


@dataclass(frozen=True)
class Detection:
    """One object: box (x1, y1, x2, y2) in pixels with x2, y2 exclusive, diameter in pixels.

    `score` in [0, 1] is the correlation of the component with the best template of `shape`, but 0
    for what is too small (`MIN_DIAMETER`): a blob of few pixels resembles every shape.
    """

    shape: str
    colour: str
    box: tuple[float, float, float, float]
    score: float
    diameter: float
    mask: Bool[np.ndarray, "s s"]


def parse(image: UInt8[np.ndarray, "h w 3"]) -> list[Detection]:
    """Return the objects of a picture, best score first.

    Raises:
        ValueError: if the picture is not square 8-bit RGB.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape != (len(image), len(image), 3):
        raise ValueError(f"a square 8-bit RGB picture is needed, got {image.shape} {image.dtype}")
    offset = image.astype(float) - fit_background(image)
    distance = np.sqrt((offset**2).sum(-1))
    labels, count = _components(distance)
    found = []
    for label in range(1, count + 1):
        mask = labels == label
        if mask.sum() >= MIN_AREA * labels.size and np.median(distance[mask]) >= MIN_CONTRAST:
            found += _read(image, offset, mask, clear=labels == 0)
    return sorted(found, key=lambda d: -d.score)


def _read(
    image: UInt8[np.ndarray, "s s 3"],
    offset: Float[np.ndarray, "s s 3"],
    mask: Bool[np.ndarray, "s s"],
    *,
    clear: Bool[np.ndarray, "s s"],
) -> list[Detection]:
    """Return a component's one object, or several that merely touch and are each a clear shape."""
    whole = _describe(image, offset, mask, clear=clear)
    if whole.score >= CLEAR_SCORE:
        return [whole]
    parts = [_describe(image, offset, part, clear=clear) for part in _split(mask)]
    apart = len(parts) > 1 and min(part.score for part in parts) >= CLEAR_SCORE
    return parts if apart else [whole]


def _split(mask: Bool[np.ndarray, "s s"]) -> list[Bool[np.ndarray, "s s"]]:
    """Cut a component where it is thinner than 3 pixels; pixels go to the nearest part."""
    cores, count = ndimage.label(ndimage.binary_opening(mask, np.ones((3, 3))))
    if count < 2:
        return [mask]
    nearest = ndimage.distance_transform_edt(
        cores == 0, return_distances=False, return_indices=True
    )
    parts = np.where(mask, cores[tuple(nearest)], 0)
    masks = [parts == part for part in range(1, count + 1)]
    return [m for m in masks if m.sum() >= MIN_AREA * mask.size]


@lru_cache(maxsize=4)
def _plane_basis(size: int) -> Float[np.ndarray, "n 3"]:
    axis = (np.arange(size) + 0.5) / size - 0.5
    y, x = np.meshgrid(axis, axis, indexing="ij")
    return np.stack([np.ones(size * size), x.ravel(), y.ravel()], 1)


def fit_background(image: UInt8[np.ndarray, "s s 3"]) -> Float[np.ndarray, "s s 3"]:
    """Fit a plane per channel to the background by trimmed least squares.

    Starts from the median of the border and keeps, in ever tighter rounds, the pixels near the fit.
    """
    size = len(image)
    basis, values = _plane_basis(size), image.reshape(-1, 3).astype(float)
    border = np.concatenate([image[:2], image[-2:], image[:, :2].swapaxes(0, 1)]).reshape(-1, 3)
    plane = np.broadcast_to(np.median(border, 0), values.shape)
    for tolerance in (45.0, 30.0, 20.0, 15.0):
        keep = np.abs(values - plane).max(1) < tolerance
        if keep.sum() < 0.1 * len(values):
            break
        kept = basis[keep]
        plane = basis @ np.linalg.solve(kept.T @ kept + 1e-6 * np.eye(3), kept.T @ values[keep])
    return np.asarray(plane).reshape(size, size, 3)


def _components(distance: Float[np.ndarray, "s s"]) -> tuple[Int[np.ndarray, "s s"], int]:
    """Label the regions above half of their local contrast, which is where an edge lies."""
    reach = 2 * round(0.06 * len(distance)) + 1
    contrast = np.maximum(ndimage.maximum_filter(distance, reach), MIN_CONTRAST)
    return ndimage.label(distance > 0.5 * contrast, np.ones((3, 3)))


def _describe(
    image: UInt8[np.ndarray, "s s 3"],
    offset: Float[np.ndarray, "s s 3"],
    mask: Bool[np.ndarray, "s s"],
    *,
    clear: Bool[np.ndarray, "s s"],
) -> Detection:
    """Return the object that `mask` shows; its soft edge reaches one pixel into what is `clear`."""
    core = _core(offset, mask)
    rgb, direction = np.median(image[core], 0), np.median(offset[core], 0)
    colour = _NAMES[int(((_REFERENCE - rgb) ** 2).sum(1).argmin())]
    near = mask | (ndimage.binary_dilation(mask, np.ones((3, 3))) & clear)
    alpha = np.clip(offset @ direction / (direction @ direction), 0, 1) * near
    shape, score, diameter = _match(alpha)
    if diameter < MIN_DIAMETER * len(mask):
        score = 0.0
    ys, xs = np.nonzero(mask)
    box = (float(xs.min()), float(ys.min()), float(xs.max() + 1), float(ys.max() + 1))
    return Detection(shape, colour, box, score, diameter, mask)


def _core(
    offset: Float[np.ndarray, "s s 3"], mask: Bool[np.ndarray, "s s"]
) -> Bool[np.ndarray, "s s"]:
    """Return the third of a component's pixels that differ most from the background."""
    strength = np.where(mask, (offset**2).sum(-1), -1.0)
    return strength >= np.quantile(strength[mask], 2 / 3)


def _canonical(alpha: Float[np.ndarray, "s s"]) -> tuple[Float[np.ndarray, " n"], float]:
    """Return the standardised crop about the centroid at unit rms radius, and that radius."""
    total = alpha.sum()
    ys, xs = np.arange(alpha.shape[0]), np.arange(alpha.shape[1])
    cx, cy = alpha.sum(0) @ xs / total, alpha.sum(1) @ ys / total
    spread = (alpha.sum(0) @ (xs - cx) ** 2 + alpha.sum(1) @ (ys - cy) ** 2) / total
    radius = math.sqrt(spread)
    axis = np.linspace(-_EXTENT, _EXTENT, _SIDE) * radius
    grid = np.meshgrid(axis + cy, axis + cx, indexing="ij")
    crop = ndimage.map_coordinates(alpha, grid, order=1).ravel()
    crop -= crop.mean()
    return crop / np.linalg.norm(crop), radius


@lru_cache(maxsize=1)
def _templates() -> tuple[Float[np.ndarray, "t n"], Int[np.ndarray, " t"], Float[np.ndarray, " t"]]:
    """Return the canonical crops of the renderer's shapes, with shape and diameter / rms radius."""
    rows = []
    for index, shape in enumerate(SHAPES):
        for d in _DIAMETERS:
            for tilt in _TILTS:
                size = int(1.2 * d) + 6
                for shift in (0.0, 0.5):
                    at = size / 2 + shift
                    alpha = coverage(
                        shape, x=at, y=at, diameter=d, angle=math.radians(tilt), size=size
                    )
                    for blur in _BLURS:
                        crop, radius = _canonical(ndimage.gaussian_filter(alpha, blur))
                        rows.append((crop, index, d / radius))
    crops, shapes, ratios = zip(*rows, strict=True)
    return np.stack(crops), np.array(shapes), np.array(ratios)


def _match(alpha: Float[np.ndarray, "s s"]) -> tuple[str, float, float]:
    """Return the best shape of a soft mask, its correlation and its diameter in pixels."""
    crops, shapes, ratios = _templates()
    crop, radius = _canonical(alpha)
    scores = crops @ crop
    best = int((scores + _HANDICAPS[shapes]).argmax())
    return SHAPES[int(shapes[best])], max(float(scores[best]), 0.0), radius * float(ratios[best])
