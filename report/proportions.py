"""Shares of right answers: intervals for one model, and generation tasks with several samples per item.

    Wilson 1927    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)     near nominal at any n, never outside [0, 1]
    pass@k         1 - C(n-c, k) / C(n, k)                     unbiased (Chen et al. 2021)
    variance       Var(item mean) = Var_items(p) + E[p(1-p)] / K                   items, and K samples of each (Miller 2024)
    clustered      sqrt( sum_g (sum_{i in g} (x_i - mean))^2 ) / n                 items that share a passage (eq. 4)

Wald's p +- 1.96 sqrt(p(1-p)/n) gives [100, 100] % for 30 of 30; nothing here does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..checkpoint.errors import SutureError


@dataclass(frozen=True)
class Proportion:
    """A share with its Wilson interval."""

    value: float
    low: float
    high: float
    n: int
    se: float  # sqrt(p(1-p)/n), for planning only: it is 0 at 0 and at 1
    level: float


@dataclass(frozen=True)
class Passes:
    """pass@k over items, each the unbiased estimate from its own samples; the interval is t over items."""

    value: float
    low: float | None  # None with one item
    high: float | None
    k: int
    n_items: int
    level: float


@dataclass(frozen=True)
class VarianceSplit:
    """Where the variance of a mean over items with K samples each comes from.

    `items` falls with more items only, `samples` with more samples too. Their sum is the squared standard error.
    """

    mean: float
    items: float  # of the mean, from the choice of items
    samples: float  # of the mean, from sampling answers
    n_items: int
    samples_per_item: float  # harmonic mean

    @property
    def se(self) -> float:
        return math.sqrt(self.items + self.samples)


def wilson(successes: int, n: int, level: float = 0.95) -> Proportion:
    """Wilson's score interval. Raises SutureError: no items, more successes than items.

    >>> found = wilson(27, 30)  # 27 of 30 items right
    >>> [round(100 * share, 1) for share in (found.value, found.low, found.high)]
    [90.0, 74.4, 96.5]
    """
    from scipy import stats

    if n < 1 or not 0 <= successes <= n:
        raise SutureError(f"{successes} of {n}: expected 0 <= successes <= items, with at least one item")
    p, z = successes / n, float(stats.norm.ppf(0.5 + level / 2))
    centre, scale = p + z**2 / (2 * n), 1 + z**2 / n
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == n else (centre + half) / scale
    return Proportion(p, low, high, n, math.sqrt(p * (1 - p) / n), level)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of k answers is right, estimated without bias from `correct` of n answers; n >= k.

    >>> round(pass_at_k(n=10, correct=1, k=5), 3)
    0.5
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise SutureError(f"pass@{k} from {correct} of {n} answers: expected 1 <= k <= answers", "sample more answers")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def pass_at_k_over_items(counts: Sequence[tuple[int, int]], k: int, level: float = 0.95) -> Passes:
    """Mean pass@k of items given as (answers, right answers), with a t interval over items."""
    from scipy import stats

    values = np.array([pass_at_k(n, correct, k) for n, correct in counts])
    if not values.size:
        raise SutureError(f"pass@{k} of no items")
    mean, low, high = float(values.mean()), None, None
    if values.size > 1:
        half = float(stats.t.ppf(0.5 + level / 2, values.size - 1) * values.std(ddof=1) / math.sqrt(values.size))
        low, high = max(0.0, mean - half), min(1.0, mean + half)
    return Passes(mean, low, high, k, values.size, level)


def split_variance(scores: Sequence[npt.ArrayLike]) -> VarianceSplit:
    """Variance of the mean of item means, split between items and samples; at least two items of two samples each.

    scores: one array of scores per item. Within-item variance is estimated with K-1; what remains of the variance of
    the item means is the items' (never below 0).
    """
    arrays = [np.asarray(row, dtype=np.float64) for row in scores]
    if len(arrays) < 2 or any(row.size < 2 for row in arrays):
        raise SutureError("the variance splits only with at least two items of two samples each", "sample more answers")
    means = np.array([row.mean() for row in arrays])
    within = float(np.mean([row.var(ddof=1) / row.size for row in arrays]))
    between = max(0.0, float(means.var(ddof=1)) - within)
    n = len(arrays)
    harmonic = n / sum(1 / row.size for row in arrays)
    return VarianceSplit(float(means.mean()), between / n, within / n, n, harmonic)


def clustered_se(values: npt.ArrayLike, clusters: Sequence[object]) -> float:
    """Standard error of the mean of items that come in clusters (Miller 2024, eq. 4), without small-sample correction."""
    x = np.asarray(values, dtype=np.float64)
    if x.size != len(clusters) or not x.size:
        raise SutureError(f"{x.size} values and {len(clusters)} cluster labels", "give one label per value")
    sums: dict[object, float] = {}
    for value, label in zip(x - x.mean(), clusters, strict=True):
        sums[label] = sums.get(label, 0.0) + float(value)
    return math.sqrt(sum(total**2 for total in sums.values())) / x.size
