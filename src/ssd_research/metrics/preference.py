"""Which of two methods people prefer: the statistics of a paired, blind, forced choice (Table 10).

The paper gives mean ± sd over evaluators. Beside it stand what other evaluators (t), independent
answers (binomial) or other prompts (bootstrap) would have made of it, and the bias to one side.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from scipy import stats

VERSION = "1"
LEVEL = 0.95


@dataclass(frozen=True)
class Vote:
    """One answer: whether method a was preferred to b, whether it stood left, and the seconds."""

    evaluator: str
    pair: str
    prompt: str
    prefers_a: bool
    a_left: bool
    seconds: float

    @property
    def chose_left(self) -> bool:
        """Whether the left picture was chosen."""
        return self.prefers_a == self.a_left


@dataclass(frozen=True)
class Estimate:
    """A mean share over n evaluators; what fewer than two, or no spread, leave open is None."""

    mean: float
    sd: float | None
    n: int
    ci95: tuple[float, float] | None
    t: float | None
    p: float | None


def over_evaluators(rates: Sequence[float]) -> Estimate:
    """Return the mean of the evaluators' win rates, with their sample sd (ddof = 1)."""
    return from_summary(fmean(rates), stdev(rates) if len(rates) > 1 else None, n=len(rates))


def from_summary(mean: float, sd: float | None, *, n: int) -> Estimate:
    """Return the t interval, and the two-sided t test against 1/2, of a printed mean ± sd.

    t = (mean - 1/2) / (sd / sqrt(n)) with n - 1 degrees of freedom.
    """
    if not sd:
        return Estimate(mean, sd, n, None, None, None)
    error = sd / math.sqrt(n)
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * error
    t = (mean - 0.5) / error
    p = 2 * float(stats.t.sf(abs(t), n - 1))
    return Estimate(mean, sd, n, (mean - half, mean + half), t, p)


def share(hits: int, total: int) -> dict[str, Any]:
    """Return hits / total, its exact (Clopper-Pearson) interval and binomial p against 1/2."""
    test = stats.binomtest(hits, total)
    interval = test.proportion_ci(LEVEL, method="exact")
    return {
        "hits": hits,
        "total": total,
        "share": hits / total,
        "ci95": (float(interval.low), float(interval.high)),
        "p": float(test.pvalue),
    }


def bootstrap_prompts(
    votes: Sequence[Vote], *, samples: int, seed: int
) -> tuple[float, float] | None:
    """Return the 95 % percentile interval of a's share of answers when prompts are redrawn.

    A prompt brings all its answers along, as they stand or fall together. One prompt alone has
    nothing to be redrawn from: None.
    """
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for vote in votes:
        sums[vote.prompt][0] += vote.prefers_a
        sums[vote.prompt][1] += 1
    if len(sums) < 2:
        return None
    table = np.array(list(sums.values()))
    rng = np.random.default_rng(seed)
    drawn = table[rng.integers(0, len(table), (samples, len(table)))].sum(1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    return float(low), float(high)


def per_evaluator(votes: Sequence[Vote]) -> dict[str, dict[str, Any]]:
    """Return answers, wins of a, win rate of a, share of left choices and seconds by evaluator."""
    groups: dict[str, list[Vote]] = defaultdict(list)
    for vote in votes:
        groups[vote.evaluator].append(vote)
    return {
        evaluator: {
            "answered": len(group),
            "wins_a": sum(vote.prefers_a for vote in group),
            "win_rate_a": fmean(vote.prefers_a for vote in group),
            "left_share": fmean(vote.chose_left for vote in group),
            "median_seconds": median(vote.seconds for vote in group),
        }
        for evaluator, group in groups.items()
    }


def aggregate(votes: Sequence[Vote], *, samples: int, seed: int) -> dict[str, Any]:
    """Return win rates and every test of them; b's win rate is 1 - a's, as there are no ties.

    Raises:
        ValueError: if there is no vote.
    """
    if not votes:
        raise ValueError("a preference needs at least one answer")
    rates = [row["win_rate_a"] for row in per_evaluator(votes).values()]
    estimate = over_evaluators(rates)
    wins = sum(vote.prefers_a for vote in votes)
    return {
        "evaluators": estimate.n,
        "win_rate": {"a": estimate.mean, "b": 1 - estimate.mean},
        "sd": estimate.sd,
        "ci95": estimate.ci95,
        "t_test": {"t": estimate.t, "df": estimate.n - 1, "p": estimate.p},
        "answers": share(wins, len(votes)),
        "prompts_ci95": bootstrap_prompts(votes, samples=samples, seed=seed),
        "left": share(sum(vote.chose_left for vote in votes), len(votes)),
        "a_left": fmean(vote.a_left for vote in votes),
    }
