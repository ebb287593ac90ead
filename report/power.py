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
from collections.abc import Iterator, Mapping
from typing import Any

from ..checkpoint.errors import SutureError
from .clusters import MIN_CLUSTERS
from .figures import finite

POWER = 0.8  # of what a report itself says


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


def power_of(se: float | None, n: int, level: float = 0.95, power: float = POWER) -> dict[str, Any] | None:
    """What n items could show, from the standard error of their mean difference; None where it is 0 or undefined."""
    if not se:
        return None
    found = _z(power, level) * se
    return {"power": power, "detectable": found, "items_for_one_point": math.ceil(n * (found / 0.01) ** 2)}


def needed(
    content: Mapping[str, Any], *, ratio: float = 1.01, points: float = 1.0, power: float = POWER
) -> list[dict[str, Any]]:
    """How much text, and how many items, show a stated difference: from what a report.json measured of the same two models.

    ratio: of perplexities, below or above 1; points: of accuracy, in percent. Standard errors shrink with the square root of
    documents or items of the same kind, so the documents' and groups' effect stays in. `needed` is None where the report saw
    no spread, or too few documents to know it.
    """
    if not 0 < points < 100:
        raise SutureError(f"points = {points:g}: expected a difference of accuracy in percent, such as 1")
    return [*_texts_needed(content, ratio, power), *_items_needed(content, points / 100, power)]


def _texts_needed(content: Mapping[str, Any], ratio: float, power: float) -> Iterator[dict[str, Any]]:
    for scored in (content, *content["sets"]):
        row = next(metric for metric in scored["metrics"] if metric["name"] == "ppl_ratio")
        level, n = row["level"], row["n_tokens"]
        se = finite(row["se_log"]) if row["ci"] is not None else None
        tokens = tokens_needed(ratio, se, n, power=power, level=level) if se else None
        yield {
            "name": scored["name"] or scored["protocol"]["data"],
            "metric": "perplexity ratio",
            "unit": "tokens",
            "measured": n,
            "detectable": detectable_ratio(se, power=power, level=level) if se else None,
            "difference": ratio,
            "needed": tokens,
            row["cluster"] + "s": None
            if tokens is None
            else max(MIN_CLUSTERS, math.ceil(row["n_clusters"] * tokens / n)),
        }


def _items_needed(content: Mapping[str, Any], difference: float, power: float) -> Iterator[dict[str, Any]]:
    for row in (*content["tasks"], *content["generation"]):
        found, level = row["paired"]["power"], row["level"]
        detectable = None
        if found is not None:
            detectable = found["detectable"] * _z(power, level) / _z(found["power"], level)
        yield {
            "name": row["name"],
            "metric": row["metric"],
            "unit": "items",
            "measured": row["n_items"],
            "detectable": detectable,
            "difference": difference,
            "needed": None if detectable is None else math.ceil(row["n_items"] * (detectable / difference) ** 2),
        }


def _z(power: float, level: float) -> float:
    from scipy import stats

    if not 0 < power < 1 or not 0 < level < 1:
        raise SutureError(f"power = {power}, level = {level}: expected numbers between 0 and 1")
    return float(stats.norm.ppf(0.5 + level / 2) + stats.norm.ppf(power))


def _check(difference: float) -> None:
    if not 0 < abs(difference) < 1:
        raise SutureError(f"difference = {difference}: expected a share other than 0, such as 0.03 for 3 points")
