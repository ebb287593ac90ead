"""How many items or tokens a stated difference needs, and what difference a given number can show.

    n  = (z_{1-a/2} + z_{power})^2 (omega^2 + s_A^2/K_A + s_B^2/K_B) / delta^2          Miller 2024 (arXiv 2411.00640), eq. 9
    discordant items                        omega^2 = flips - difference^2
    tokens, from clusters                   N = N_0 (se_0 (z_{1-a/2} + z_{power}) / log(1 + delta))^2

omega^2 is the variance of the difference of the items' expected scores, s^2 the mean variance of an answer given its
item, K the answers sampled per item. The last line scales the paired standard error se_0 that N_0 tokens of documents
gave, so the documents' effect is in it.
"""

from __future__ import annotations

import math
from typing import Any

from ..checkpoint.errors import SutureError


def items_needed(
    difference: float,
    *,
    variance: float,
    within_a: float = 0.0,
    within_b: float = 0.0,
    samples: int = 1,
    power: float = 0.8,
    level: float = 0.95,
) -> int:
    """Items that show `difference` (0.03 = 3 points) with probability `power` in a paired comparison.

    variance: omega^2; within_a, within_b: mean variance of an answer given its item; samples: answers per item.
    """
    _check(difference)
    total = variance + (within_a + within_b) / samples
    return math.ceil((_z(power, level) / difference) ** 2 * total)


def items_needed_from_flips(difference: float, flips: float, *, power: float = 0.8, level: float = 0.95) -> int:
    """Items that show `difference` when a share `flips` of the answers changes.

    >>> items_needed_from_flips(0.03, flips=0.1)  # to show 3 points where a tenth of the answers changes
    865
    """
    _check(difference)
    if not abs(difference) <= flips <= 1:
        raise SutureError(
            f"flips = {flips}: a difference of {difference} needs at least so many", "give a larger share"
        )
    return items_needed(difference, variance=flips - difference**2, power=power, level=level)


def detectable_difference(n: int, flips: float, *, power: float = 0.8, level: float = 0.95) -> float:
    """Smallest difference that n items show with probability `power` when a share `flips` of the answers changes."""
    return _z(power, level) * math.sqrt(flips / n)


def tokens_needed(ratio: float, se_log: float, n_tokens: int, *, power: float = 0.8, level: float = 0.95) -> int:
    """Tokens that show a perplexity ratio (1.01 = one percent), given the paired standard error of `n_tokens`."""
    if ratio <= 0 or ratio == 1:
        raise SutureError(f"ratio = {ratio}: expected a ratio other than 1, such as 1.01")
    return math.ceil(n_tokens * (_z(power, level) * se_log / math.log(ratio)) ** 2)


def detectable_ratio(se_log: float, *, power: float = 0.8, level: float = 0.95) -> float:
    """Smallest perplexity ratio above 1 that a measurement with this paired standard error shows."""
    exponent = _z(power, level) * se_log
    return math.exp(exponent) if exponent < 700 else math.inf


def power_of(se: float | None, n: int, level: float = 0.95, power: float = 0.8) -> dict[str, Any] | None:
    """What n items could show, from the standard error of their mean difference; None where it is 0 or undefined."""
    if not se:
        return None
    found = _z(power, level) * se
    return {"power": power, "detectable": found, "items_for_one_point": math.ceil(n * (found / 0.01) ** 2)}


def _z(power: float, level: float) -> float:
    from scipy import stats

    if not 0 < power < 1 or not 0 < level < 1:
        raise SutureError(f"power = {power}, level = {level}: expected numbers between 0 and 1")
    return float(stats.norm.ppf(0.5 + level / 2) + stats.norm.ppf(power))


def _check(difference: float) -> None:
    if not 0 < abs(difference) < 1:
        raise SutureError(f"difference = {difference}: expected a share other than 0, such as 0.03 for 3 points")
