"""Which heads to merge: groups of equal size whose pairs lose least."""

from __future__ import annotations

from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

Grouping = Literal["contiguous", "similar"]
Groups = tuple[tuple[int, ...], ...]

_GAIN = 1e-12  # relative: below it a swap is rounding


def contiguous(n: int, groups: int) -> Groups:
    """Heads 0, 1, ... in order."""
    size = n // groups
    return tuple(tuple(range(j * size, (j + 1) * size)) for j in range(groups))


def group_by_cost(cost: Tensor, groups: int) -> Groups:
    """Split n heads into `groups` groups of n / groups with a small sum of `cost` [n, n] over the pairs inside.

    From two starts, the heads in order and a greedy choice of the nearest, heads are swapped between groups while that
    gains; the better end is returned. The same costs give the same groups, and never worse ones than in order.
    """
    n = cost.shape[0]
    starts = (contiguous(n, groups), _greedy(cost, groups))
    ends = [_swapped(cost, start) for start in starts]
    best = min(ends, key=lambda found: _total(cost, found))
    return tuple(sorted(tuple(sorted(group)) for group in best))


def _greedy(cost: Tensor, groups: int) -> Groups:
    """Each group begins with the lowest free head and takes the free head that is nearest to those it has."""
    free, size = list(range(cost.shape[0])), cost.shape[0] // groups
    made = []
    for _ in range(groups):
        group = [free.pop(0)]
        while len(group) < size:
            nearest = min(free, key=lambda head: float(cost[head, group].sum()))
            group.append(nearest)
            free.remove(nearest)
        made.append(tuple(group))
    return tuple(made)


def _swapped(cost: Tensor, start: Groups) -> Groups:
    """Make the swap that gains most until none gains."""
    n = cost.shape[0]
    home = torch.empty(n, dtype=torch.int64)
    for number, group in enumerate(start):
        home[list(group)] = number
    least = _GAIN * float(cost.sum())
    while True:
        member = torch.nn.functional.one_hot(home, len(start)).to(cost.dtype)  # [n, groups]
        to_group = cost @ member  # of head i with all of group j
        own = to_group[torch.arange(n), home]
        # i goes to b's group without b, b to i's without i
        gain = own[:, None] + own[None] - to_group[:, home] - to_group[:, home].T + 2 * cost
        gain = torch.where(home[:, None] == home[None], -torch.inf, gain)
        at = int(gain.argmax())
        i, j = divmod(at, n)
        if float(gain[i, j]) <= least:
            return tuple(tuple(int(head) for head in (home == j).nonzero()[:, 0]) for j in range(len(start)))
        home[i], home[j] = int(home[j]), int(home[i])


def _total(cost: Tensor, groups: Groups) -> float:
    return float(sum(cost[i, j] for group in groups for i, j in combinations(group, 2)))
