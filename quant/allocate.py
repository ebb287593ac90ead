"""Which layers get how many bits: the least total loss within a budget of storage.

A multiple-choice knapsack: unit u (layers that share their input, which must have one format) at choice c costs
`costs[u][c]` bits of storage and `losses[u][c]`; one choice per unit, the costs' sum at most the budget, the losses' sum
least. Solved by dynamic programming over the budget in `_QUANTA` parts, costs rounded up; what rounding left over then
buys the upgrades that gain most per bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..checkpoint.errors import SutureError

_QUANTA = 20_000


def allocate(costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int) -> list[int]:
    """The choice of each unit. Raises SutureError when even the cheapest choices exceed the budget."""
    least = sum(min(row) for row in costs)
    if least > budget:
        raise SutureError(f"the fewest bits need {least} bits of storage, the budget is {budget}", "raise average_bits")
    if sum(max(row) for row in costs) <= budget:
        return [int(np.argmin(row)) for row in losses]
    quantum = max(1, budget // _QUANTA)
    room = budget // quantum
    best = np.zeros(room + 1)  # least loss of the units so far with at most so many quanta
    picked = np.zeros((len(costs), room + 1), dtype=np.int16)
    for u, (row, loss) in enumerate(zip(costs, losses, strict=True)):
        new = np.full(room + 1, np.inf)
        for c, cost in enumerate(row):
            used = math.ceil(cost / quantum)
            if used > room:
                continue
            candidate = np.full(room + 1, np.inf)
            candidate[used:] = best[: room + 1 - used] + loss[c]
            better = candidate < new
            new[better], picked[u, better] = candidate[better], c
        best = new
    if not np.isfinite(best[room]):  # only rounding up stands in the way
        choice = [int(np.argmin(row)) for row in costs]
    else:
        choice, at = [0] * len(costs), room
        for u in reversed(range(len(costs))):
            choice[u] = int(picked[u, at])
            at -= math.ceil(costs[u][choice[u]] / quantum)
    return _spend(costs, losses, budget, choice)


def _spend(
    costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int, choice: list[int]
) -> list[int]:
    """Upgrades that still fit, the best gain per bit first."""
    left = budget - sum(row[c] for row, c in zip(costs, choice, strict=True))
    while True:
        gains = [
            ((losses[u][choice[u]] - loss) / max(1, costs[u][c] - costs[u][choice[u]]), u, c)
            for u in range(len(costs))
            for c, loss in enumerate(losses[u])
            if loss < losses[u][choice[u]] and costs[u][c] - costs[u][choice[u]] <= left
        ]
        if not gains:
            return choice
        _, u, c = max(gains)
        left -= costs[u][c] - costs[u][choice[u]]
        choice[u] = c
