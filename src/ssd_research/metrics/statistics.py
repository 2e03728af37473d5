"""Comparing two methods over seeds: means, Welch's test, the paired test, and equivalence.

The paper's Table 9 is Welch's test on sample standard deviations (divisor n - 1). That a difference
is not significant does not make two methods equal, least of all with five seeds: `equivalence` asks
instead whether it is smaller than a stated margin.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (divisor n - 1) of n values, one a seed."""

    mean: float
    sd: float
    n: int

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ValueError(f"a standard deviation needs at least 2 seeds, not {self.n}")

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        """Return the summary of values; ValueError from fewer than two."""
        if len(values) < 2:
            raise ValueError(f"a standard deviation needs at least 2 seeds, not {len(values)}")
        return cls(statistics.fmean(values), statistics.stdev(values), len(values))


@dataclass(frozen=True)
class Difference:
    """A difference of means with its t test."""

    difference: float
    stderr: float
    df: float
    confidence: float = 0.95

    @property
    def t(self) -> float:
        """The difference in standard errors; infinite where there is no spread at all."""
        if self.stderr == 0:
            return math.copysign(math.inf, self.difference) if self.difference else 0.0
        return self.difference / self.stderr

    @property
    def p(self) -> float:
        """The two-sided p value."""
        return float(2 * stats.t.sf(abs(self.t), self.df))

    @property
    def interval(self) -> tuple[float, float]:
        """The confidence interval of the difference."""
        half = float(stats.t.ppf((1 + self.confidence) / 2, self.df)) * self.stderr
        return self.difference - half, self.difference + half

    def equivalence(self, margin: float) -> float:
        """Return the p value of two one-sided tests that the difference lies within +- `margin`.

        Below alpha the methods are equivalent at that margin (Schuirmann, 1987), which is the same
        as the 1 - 2 alpha interval lying within it. Raises ValueError for a margin of 0 or less.
        """
        if margin <= 0:
            raise ValueError(f"eval.margin={margin} must be above 0")
        if self.stderr == 0:
            return float(abs(self.difference) >= margin)
        above = stats.t.sf((self.difference + margin) / self.stderr, self.df)
        below = stats.t.cdf((self.difference - margin) / self.stderr, self.df)
        return float(max(above, below))


def welch(a: Summary, b: Summary, *, confidence: float = 0.95) -> Difference:
    """Return mean a - mean b under Welch's test, which lets the two spreads differ."""
    parts = [one.sd**2 / one.n for one in (a, b)]
    total = sum(parts)
    df = float(a.n + b.n - 2)
    if total > 0:
        df = total**2 / sum(v**2 / (one.n - 1) for v, one in zip(parts, (a, b), strict=True))
    return Difference(a.mean - b.mean, math.sqrt(total), df, confidence)


def paired(a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95) -> Difference:
    """Return the mean of a - b where entry k of both has the same seed; ValueError if not as many.

    Worth having when both methods meet the same noise, as all decoders here do under one seed.
    """
    if len(a) != len(b):
        raise ValueError(f"a paired test needs the same seeds of both: {len(a)} and {len(b)}")
    summary = Summary.of([x - y for x, y in zip(a, b, strict=True)])
    stderr = summary.sd / math.sqrt(summary.n)
    return Difference(summary.mean, stderr, summary.n - 1, confidence)
