"""Two models on the same items: what changed, whether chance explains it, and by how much.

With a items both right, b base only, c candidate only, d none, n in all:

    difference     (c - b) / n
    McNemar exact  two-sided binomial test of min(b, c) of b + c at 1/2
    mid-p          exact less the probability of the observed table: less conservative (Fagerland et al. 2013)
    chi-square     (b - c)^2 / (b + c)                                             McNemar 1947, many discordant items
    Bonett-Price   b' = (b+1)/(n+2), c' = (c+1)/(n+2):  c' - b' +- z sqrt((b' + c' - (c' - b')^2) / (n+2))     2012
    flips          (b + c) / n: answers that changed, which a small difference may hide (Dutta et al. 2024)

Where items share a passage, `cluster_mean` of the differences takes the place of Bonett-Price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..checkpoint.errors import SutureError
from .proportions import Proportion, wilson


@dataclass(frozen=True)
class PairedProportions:
    """Candidate against base on identical items."""

    both: int
    base_only: int
    candidate_only: int
    neither: int
    difference: float  # candidate's share less the base's
    low: float
    high: float
    p_exact: float
    p_mid: float
    chi_square: float | None  # None without a discordant item
    flips: Proportion
    level: float

    @property
    def n(self) -> int:
        return self.both + self.base_only + self.candidate_only + self.neither


def paired_proportions(base: npt.ArrayLike, candidate: npt.ArrayLike, level: float = 0.95) -> PairedProportions:
    """From right (1) or wrong (0) answers of both models, item by item."""
    x, y = np.asarray(base).astype(bool), np.asarray(candidate).astype(bool)
    if x.shape != y.shape or x.ndim != 1 or not x.size:
        raise SutureError(f"answers of shapes {x.shape} and {y.shape}", "score both models on the same items")
    b, c = int((x & ~y).sum()), int((~x & y).sum())
    difference, low, high = bonett_price(b, c, x.size, level)
    exact, mid = mcnemar(b, c)
    return PairedProportions(
        both=int((x & y).sum()),
        base_only=b,
        candidate_only=c,
        neither=int((~x & ~y).sum()),
        difference=difference,
        low=low,
        high=high,
        p_exact=exact,
        p_mid=mid,
        chi_square=mcnemar_chi_square(b, c),
        flips=wilson(b + c, x.size, level),
        level=level,
    )


def mcnemar(b: int, c: int) -> tuple[float, float]:
    """(exact, mid-p) two-sided p-values of equal chances for both kinds of discordant items; 1 without any.

    >>> exact, mid = mcnemar(b=4, c=12)  # 4 items became wrong, 12 became right
    >>> round(exact, 4), round(mid, 4)
    (0.0768, 0.049)
    """
    from scipy import stats

    if b + c == 0:
        return 1.0, 1.0
    exact = min(1.0, 2 * float(stats.binom.cdf(min(b, c), b + c, 0.5)))
    at = float(stats.binom.pmf(min(b, c), b + c, 0.5))
    mid = 1 - at if b == c else 2 * float(stats.binom.cdf(min(b, c), b + c, 0.5)) - at
    return exact, mid


def mcnemar_chi_square(b: int, c: int) -> float | None:
    """McNemar's statistic, one degree of freedom, without continuity correction; None without a discordant item."""
    return (b - c) ** 2 / (b + c) if b + c else None


def bonett_price(b: int, c: int, n: int, level: float = 0.95) -> tuple[float, float, float]:
    """((c - b)/n, low, high): Bonett & Price's interval of the difference of paired shares."""
    from scipy import stats

    z = float(stats.norm.ppf(0.5 + level / 2))
    more, less = (c + 1) / (n + 2), (b + 1) / (n + 2)
    centre = more - less
    half = z * math.sqrt((more + less - centre**2) / (n + 2))
    return (c - b) / n, max(-1.0, centre - half), min(1.0, centre + half)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment, in the given order; None (no test was made) stays None and does not count.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, i) in enumerate(known):
        running = max(running, min(1.0, (len(known) - rank) * p))
        adjusted[i] = running
    return adjusted
