"""Renderer of the shapes world: every object drawn at 3x and box-filtered, in numpy."""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, UInt8

from ssd_research.shapes.scenes import Scene, SceneObject

_SCALE = 3
_Plane = Float[np.ndarray, "h w"]


def _star(u: _Plane, v: _Plane) -> np.ndarray:
    step = 2 * math.pi / 5
    angle = np.abs((np.arctan2(u, -v) + step / 2) % step - step / 2)
    # The edge from the outer tip (radius 1) to the inner notch (radius 0.45, half a step on).
    nx, ny = 0.45 * math.sin(step / 2), 1 - 0.45 * math.cos(step / 2)
    rho = np.hypot(u, v)
    return rho * (nx * np.cos(angle) + ny * np.sin(angle)) <= nx


_INSIDE: dict[str, Callable[[_Plane, _Plane], np.ndarray]] = {
    "circle": lambda u, v: u**2 + v**2 <= 1,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) <= 0.86,
    "triangle": lambda u, v: (v <= 0.75) & (1.9 * np.abs(u) <= v + 1),
    "cross": lambda u, v: (
        (np.minimum(np.abs(u), np.abs(v)) <= 0.3) & (np.maximum(np.abs(u), np.abs(v)) <= 1)
    ),
    "ring": lambda u, v: (u**2 + v**2 <= 1) & (u**2 + v**2 >= 0.3),
    "star": _star,
}


def coverage(
    shape: str, *, x: float, y: float, diameter: float, angle: float, size: int
) -> Float[np.ndarray, "size size"]:
    """Return the share of each pixel of a `size` x `size` canvas that the shape covers, 0 to 1."""
    axis = (np.arange(size * _SCALE) + 0.5) / _SCALE
    dx, dy = (axis - x)[None, :], (axis - y)[:, None]
    cos, sin, radius = math.cos(angle), math.sin(angle), diameter / 2
    u = (dx * cos + dy * sin) / radius
    v = (dy * cos - dx * sin) / radius
    inside = _INSIDE[shape](u, v)
    return inside.reshape(size, _SCALE, size, _SCALE).mean((1, 3))


def _paint(image: Float[np.ndarray, "s s 3"], o: SceneObject) -> None:
    """Blend one object into the image, touching only the window it can reach."""
    reach = math.ceil(0.75 * o.diameter) + 1
    left, top = max(int(o.x) - reach, 0), max(int(o.y) - reach, 0)
    window = image[top : top + 2 * reach, left : left + 2 * reach]
    size = 2 * reach
    alpha = coverage(
        o.shape, x=o.x - left, y=o.y - top, diameter=o.diameter, angle=o.angle, size=size
    )
    alpha = alpha[: window.shape[0], : window.shape[1], None]
    window += alpha * (np.array(o.rgb) - window)


def render(scene: Scene) -> UInt8[np.ndarray, "s s 3"]:
    """Render a scene to 8-bit RGB; the same scene always gives the same pixels."""
    size = scene.canvas
    axis = np.arange(size) - size / 2
    gradient = np.array(scene.gradient)
    image = (
        np.array(scene.background)
        + axis[None, :, None] * gradient[:, 0]
        + axis[:, None, None] * gradient[:, 1]
    )
    for o in scene.objects:
        _paint(image, o)
    if scene.noise:
        rng = np.random.default_rng(scene.noise_seed)
        image += rng.integers(-scene.noise, scene.noise + 1, image.shape)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)
