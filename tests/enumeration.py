"""The exact law of a decoder: its real code, run once for every way that its choices can fall.

Each image of a batch follows a script of choices. Where its script ends, an image takes the first
option that is possible and the others are queued as scripts of images to come. The product of the
options' probabilities is the probability of the image that was decoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.decoders.base import Decoder
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling

# What float64 leaves of a probability of 0: an option below is not followed.
NOTHING = 1e-14
BATCH = 4096


@dataclass
class Scripts:
    """Choices to follow, the first `length` of `path` [n, M], and which prompt's image it is."""

    prompt: np.ndarray
    path: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt)

    def split(self, count: int) -> tuple["Scripts", "Scripts"]:
        """Return the first `count` scripts and the rest."""
        parts = (
            Scripts(self.prompt[part], self.path[part], self.length[part])
            for part in (slice(None, count), slice(count, None))
        )
        return next(parts), next(parts)

    @classmethod
    def joined(cls, parts: Sequence["Scripts"]) -> "Scripts":
        """Return all scripts of all parts."""
        width = max(part.path.shape[1] for part in parts)
        paths = [np.pad(p.path, ((0, 0), (0, width - p.path.shape[1]))) for p in parts]
        return cls(
            np.concatenate([part.prompt for part in parts]),
            np.concatenate(paths),
            np.concatenate([part.length for part in parts]),
        )


@dataclass
class Enumerator:
    """A source of noise that follows scripts and notes the paths that they leave out."""

    scripts: Scripts
    probability: np.ndarray = field(init=False)
    ahead: list[Scripts] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        batch = len(self.scripts)
        self.probability = np.ones(batch)
        self.path, self.cursor = self.scripts.path.copy(), np.zeros(batch, dtype=np.int64)
        self._used: dict[tuple[int, str], np.ndarray] = {}
        self._races: dict[tuple[int, int, int], np.ndarray] = {}

    def at(self, positions: Tensor, round: int) -> "Branches":
        """Return the choices of one round at raster `positions`."""
        return Branches(self, positions.expand(len(self.scripts), -1).numpy(), round)

    def once(self, positions: np.ndarray, needed: np.ndarray, key: tuple[int, str]) -> None:
        """Raise AssertionError where noise is read that has been read: it would be the same."""
        images, columns = np.nonzero(needed)
        where = positions[images, columns]
        assert (where >= 0).all(), f"{key}: noise is read at positions below 0"
        used = self._used.setdefault(key, np.zeros((len(self.scripts), 1), dtype=bool))
        if len(where) and where.max() >= used.shape[1]:
            used = np.pad(used, ((0, 0), (0, int(where.max()) + 1 - used.shape[1])))
        fresh = np.zeros(used.shape, dtype=np.int64)
        np.add.at(fresh, (images, where), 1)
        assert not ((fresh > 1) | (used & (fresh > 0))).any(), (
            f"{key}: the same noise is read twice"
        )
        self._used[key] = used | (fresh > 0)

    def race(
        self, p: np.ndarray, images: np.ndarray, keys: list[tuple[int, int, int]]
    ) -> np.ndarray:
        """Choose argmax(log p + G) for each of R images, with `p` [R, 3].

        A key (image, position, round) has one vector G of Gumbel variables. What it has won before
        is remembered as `won` says it.
        """
        before = np.stack([self._races.get(key, np.zeros((3, 3))) for key in keys])
        after = [won(before, p, code) for code in range(3)]
        options = np.stack([share(bounds) for bounds in after], -1) / share(before)[:, None]
        choice = self.choose(options, images)
        for row, key in enumerate(keys):
            self._races[key] = after[choice[row]][row]
        return choice

    def choose(self, options: np.ndarray, images: np.ndarray) -> np.ndarray:
        """Choose one of the `options` [R, O], probabilities that sum to 1, for each of R images."""
        if len(images) and self.cursor[images].max() >= self.path.shape[1]:
            self.path = np.pad(self.path, ((0, 0), (0, 16)))
        cursor = self.cursor[images]
        possible = options > NOTHING
        scripted = cursor < self.scripts.length[images]
        choice = np.where(scripted, self.path[images, cursor], possible.argmax(1))
        taken = np.take_along_axis(options, choice[:, None], 1)[:, 0]
        assert (taken > NOTHING).all(), "a replayed image meets other choices than before"
        left = possible & ~scripted[:, None]
        left[np.arange(len(images)), choice] = False
        rows, others = np.nonzero(left)
        self._queue(images[rows], cursor[rows], others)
        self.path[images, cursor] = choice
        self.probability[images] *= taken
        self.cursor[images] += 1
        return choice

    def _queue(self, images: np.ndarray, cursor: np.ndarray, options: np.ndarray) -> None:
        if not len(images):
            return
        path = self.path[images]
        path[np.arange(len(images)), cursor] = options
        self.ahead.append(Scripts(self.scripts.prompt[images], path, cursor + 1))


@dataclass(frozen=True)
class Branches:
    """The choices of one round at some positions."""

    noise: Enumerator
    positions: np.ndarray
    round: int

    def bernoulli(self, probability: Tensor, *, needed: Tensor | None = None) -> Tensor:
        """Branch into True and False."""
        p = probability.double().numpy()
        return torch.from_numpy(self._each(np.stack([p, 1 - p], -1), "accept", needed) == 0)

    def categorical(self, p: Tensor, *, purpose: str, needed: Tensor | None = None) -> Tensor:
        """Branch into the codes that have mass; for `gumbel`, of three codes."""
        mass = p.double().numpy()
        if purpose == "gumbel":
            return torch.from_numpy(self._races(mass, needed))
        with np.errstate(invalid="ignore"):  # a law without mass, where nothing is needed
            options = mass / mass.sum(-1, keepdims=True)
        return torch.from_numpy(self._each(options, purpose, needed))

    def _each(self, options: np.ndarray, purpose: str, needed: Tensor | None) -> np.ndarray:
        """Branch where `needed`, from left to right; elsewhere return what nothing should read."""
        asked = np.ones(options.shape[:2], dtype=bool) if needed is None else needed.numpy()
        self.noise.once(self.positions, asked, (self.round, purpose))
        images = np.arange(len(options))[:, None]
        choices = (images + np.arange(options.shape[1])) % options.shape[2]
        for column in range(options.shape[1]):
            rows = np.flatnonzero(asked[:, column])
            assert np.isfinite(options[rows, column]).all(), f"{purpose}: a law without mass"
            choices[rows, column] = self.noise.choose(options[rows, column], rows)
        return choices

    def _races(self, p: np.ndarray, needed: Tensor | None) -> np.ndarray:
        """Branch as `Enumerator.race` does; a position's variables are the same in a round."""
        choices = np.zeros(p.shape[:2], dtype=np.int64)
        for column in range(p.shape[1]):
            rows = np.flatnonzero(np.ones(len(p)) if needed is None else needed[:, column].numpy())
            places = self.positions[rows, column].tolist()
            keys = [
                (row, place, self.round) for row, place in zip(rows.tolist(), places, strict=True)
            ]
            if keys:
                choices[rows, column] = self.noise.race(p[rows, column], rows, keys)
        return choices


def won(bounds: np.ndarray, p: np.ndarray, code: int) -> np.ndarray:
    """Return what is known of E = exp(-G) when `code` has won with p, as argmin E / p.

    `bounds` [R, 3, 3] say E[v] >= bounds[u, v] E[u].
    """
    bounds = bounds.copy()
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = p / p[:, code, None]
    odds[p[:, code] == 0] = np.inf  # it cannot have
    bounds[:, code] = np.maximum(bounds[:, code], odds)
    return bounds


def share(bounds: np.ndarray) -> np.ndarray:
    """Return the probability [R] of `bounds` for three independent exponential variables E.

    With s = E1/E0 and t = E2/E0, of joint density 2 / (1 + s + t)^3, they say that s, t and t/s lie
    in intervals. It is integrated over t first.
    """
    least = np.clip(bounds, 1e-60, 1e60)
    low, high = least[:, 0, 1], 1 / least[:, 1, 0]
    t_low, t_high = least[:, 0, 2], 1 / least[:, 2, 0]
    r_low, r_high = least[:, 1, 2], 1 / least[:, 2, 1]
    start = np.maximum(low, t_low / r_high)
    stop = np.minimum(high, t_high / r_low)
    below = _under_kink(start, stop, t_low, r_low, first_flat=True)
    above = _under_kink(start, stop, t_high, r_high, first_flat=False)
    possible = (start < stop) & (t_low < t_high) & (r_low < r_high)
    return np.where(possible, np.maximum(below - above, 0), 0)


def _under_kink(
    start: np.ndarray, stop: np.ndarray, t: np.ndarray, r: np.ndarray, *, first_flat: bool
) -> np.ndarray:
    """Integrate 1 / (1 + s + y)^2 over s for y = max(t, r s), which is flat first, or the min."""
    kink = np.clip(t / r, start, stop)
    flat = (start, kink) if first_flat else (kink, stop)
    steep = (kink, stop) if first_flat else (start, kink)
    over_flat = 1 / (1 + flat[0] + t) - 1 / (1 + flat[1] + t)
    over_steep = (1 / (1 + (1 + r) * steep[0]) - 1 / (1 + (1 + r) * steep[1])) / (1 + r)
    return over_flat + over_steep


@dataclass(frozen=True)
class Laws:
    """The law [prompts, images] of a decoder, and how many ways there were to get there."""

    probability: np.ndarray
    paths: int


def exact_laws(
    decoder: Decoder,
    backbone: Backbone,
    prompts: Sequence[str],
    *,
    sampling: Sampling,
    heads: DraftHeads | None = None,
    batch: int = BATCH,
) -> Laws:
    """Return the probability of every image of every prompt, all prompts in the same batches.

    Raises AssertionError where the probabilities of a prompt's images do not sum to 1.
    """
    decoder.check(backbone.grid)
    if heads is not None:
        heads.require(**decoder.reach(backbone.grid))
    size, codes = backbone.grid.size, backbone.codebook_size
    weights = codes ** np.arange(size - 1, -1, -1)
    law, paths = np.zeros((len(prompts), codes**size)), 0
    first = np.arange(len(prompts))
    queue = [Scripts(first, np.zeros((len(first), 32), dtype=np.int16), np.zeros_like(first))]
    while queue:
        noise = Enumerator(_next(queue, batch))
        owners = noise.scripts.prompt
        mine = [prompts[n] for n in owners]
        made = decoder.decode_with(backbone, mine, sampling=sampling, noise=noise, heads=heads)
        np.add.at(law, (owners, made.codes.numpy() @ weights), noise.probability)
        paths += len(owners)
        queue += noise.ahead
    assert np.abs(law.sum(1) - 1).max() < 1e-12, f"the probabilities sum to {law.sum(1)}"
    return Laws(law, paths)


def _next(queue: list[Scripts], batch: int) -> Scripts:
    """Take up to `batch` scripts from the end of the queue: depth first, which keeps it short."""
    taken = [queue.pop()]
    while queue and sum(map(len, taken)) < batch:
        taken.append(queue.pop())
    chosen, rest = Scripts.joined(taken).split(batch)
    if len(rest):
        queue.append(rest)
    return chosen


def total_variation(one: np.ndarray, other: np.ndarray) -> float:
    """Return half the sum of absolute differences."""
    return float(np.abs(one - other).sum() / 2)


def chi_square(law: np.ndarray, codes: Tensor, size: int) -> float:
    """Return the p-value of images [n, N] with codes below `size` under a law of whole images.

    Images that are expected less than ten times are counted together. 0 for an impossible image.
    """
    number = codes.numpy() @ size ** np.arange(codes.shape[1] - 1, -1, -1)
    counts = np.bincount(number, minlength=len(law))
    if counts[law == 0].any():
        return 0.0
    common = law * len(codes) >= 10
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(law[common], law[~common].sum()) * len(codes)
    return float(stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue)
