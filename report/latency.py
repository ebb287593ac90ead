"""Is B faster than A? Timing on a machine that drifts, with an interval that says what the machine allows to be said.

Runs alternate A B B A, so that a slow drift falls on both alike; one such block gives r = log(mean B / mean A). The
estimate is exp(median r) over the blocks, its interval the percentile bootstrap of the median over blocks, at least as
wide as that of the order statistics. Timing first
all A and then all B calls 18 to 47 % of identical pairs different at a nominal 5 %; this keeps its level.

An A/A control of the same size runs beside it. When its interval leaves 1, or is wider than the effect, the machine is
too noisy for a verdict. No sample is ever removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Timed = Callable[[], float]  # runs the work once and returns its seconds

BLOCKS, RESAMPLES = 20, 5000
_STABLE, _WARM_UP, _WARM_UP_CAP = 0.02, 5, 30


@dataclass(frozen=True)
class LatencyRatio:
    """Seconds of B over seconds of A."""

    ratio: float
    low: float
    high: float
    level: float
    blocks: int
    seconds_a: FloatArray  # in the order of timing
    seconds_b: FloatArray
    control: tuple[float, float, float]  # A/A: ratio, low, high
    warm_up: tuple[int, int]  # runs before timing

    @property
    def too_noisy(self) -> bool:
        """The control finds a difference where there is none, or its half width is more than the effect."""
        _, low, high = self.control
        half = (math.log(high) - math.log(low)) / 2
        return not low <= 1 <= high or half > abs(math.log(self.ratio))


def measure(a: Timed, b: Timed, *, blocks: int = BLOCKS, level: float = 0.95, seed: int = 0) -> LatencyRatio:
    """Warm both up, then time `blocks` blocks of A B B A, and as many of A A A A."""
    warm = (warm_up(a), warm_up(b))
    first, second = interleave(a, b, blocks)
    control_a, control_b = interleave(a, a, blocks)
    ratio, low, high = median_ratio(first, second, level, seed)
    return LatencyRatio(
        ratio=ratio,
        low=low,
        high=high,
        level=level,
        blocks=blocks,
        seconds_a=first.ravel(),
        seconds_b=second.ravel(),
        control=median_ratio(control_a, control_b, level, seed),
        warm_up=warm,
    )


def warm_up(run: Timed) -> int:
    """Run until the median of the last five lies within 2 % of the five before; the number of runs, at most 30."""
    seconds: list[float] = []
    while len(seconds) < _WARM_UP_CAP:
        seconds.append(run())
        if len(seconds) >= 2 * _WARM_UP:
            last, before = np.median(seconds[-_WARM_UP:]), np.median(seconds[-2 * _WARM_UP : -_WARM_UP])
            if abs(last / before - 1) < _STABLE:
                break
    return len(seconds)


def interleave(a: Timed, b: Timed, blocks: int) -> tuple[FloatArray, FloatArray]:
    """Seconds of both, each (blocks, 2), from blocks of A B B A."""
    times_a, times_b = np.zeros((blocks, 2)), np.zeros((blocks, 2))
    for i in range(blocks):
        times_a[i, 0] = a()
        times_b[i, 0] = b()
        times_b[i, 1] = b()
        times_a[i, 1] = a()
    return times_a, times_b


def median_ratio(a: FloatArray, b: FloatArray, level: float = 0.95, seed: int = 0) -> tuple[float, float, float]:
    """(exp of the median log-ratio over blocks, low, high) from seconds (blocks, 2).

    The percentile bootstrap draws blocks; with few of them it is a little short, so each end is at least as far out as
    the order statistic that covers the median at `level` whatever the distribution (20 blocks: the 6th and the 15th).
    """
    from scipy import stats

    r = np.log(b.mean(axis=1) / a.mean(axis=1))
    draws = np.random.default_rng(seed).integers(0, r.size, (RESAMPLES, r.size))
    medians = np.median(r[draws], axis=1)
    low, high = np.quantile(medians, [0.5 - level / 2, 0.5 + level / 2])
    rank = int(stats.binom.ppf(0.5 - level / 2, r.size, 0.5)) - 1  # from 0; below it lies at most (1 - level) / 2
    if rank >= 0:
        ordered = np.sort(r)
        low, high = min(low, ordered[rank]), max(high, ordered[r.size - 1 - rank])
    return math.exp(float(np.median(r))), math.exp(float(low)), math.exp(float(high))


def summary(seconds: FloatArray) -> dict[str, float]:
    """Median, median absolute deviation and 95th percentile, in seconds, and the number of runs."""
    median = float(np.median(seconds))
    return {
        "median": median,
        "mad": float(np.median(np.abs(seconds - median))),
        "p95": float(np.quantile(seconds, 0.95)),
        "runs": int(seconds.size),
    }
