"""Sums over tokens of which several processes hold a part each, to the last bit those that one process comes to.

One process adds chunk after chunk to the panels of a sum (`statistics.py`). Process r has the r-th part of the tokens:

    1. what a part leaves of a chunk goes to the next process, whose first chunk it begins;
    2. panel by panel: take the sum so far from the process before, add one's own chunks, hand it on;
    3. the last process has the whole sum, and gives it to those that need it.

While one process is at a panel, the one before is at the next: all work at once but for the first and last panels. The
order of every addition is that of one process, so nothing is left to chance, or to how many they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .crew import Crew
from .statistics import Deviation, SecondMoment, Waiting


@dataclass
class Held:
    """A sum to which nothing has been added yet, and this process's part of what is to be."""

    sum: SecondMoment | Deviation
    needed_by: int | None  # the process that needs it; None: all do
    items: list[tuple[Tensor, ...]] = field(default_factory=list)  # what `sum.add` takes, in order


def relay(crew: Crew, held: Sequence[Held]) -> None:
    """Complete the sums on the processes that need them; elsewhere their numbers mean nothing. Every process calls this
    with the same sums, in the same order."""
    counts = torch.tensor(crew.gather([sum(one.sum.rows(*item).shape[0] for item in one.items) for one in held]))
    before, last = counts[: crew.rank].sum(0).tolist(), crew.size - 1
    leads = [_pass_rest(crew, number, one, before[number]) for number, one in enumerate(held)]
    sent: list[Any] = []
    for number, (one, lead) in enumerate(zip(held, leads, strict=True)):
        panels = list(one.sum.panels())
        tags = [(number, k) for k in range(len(panels))]
        taken = [crew.take(one.sum.total[p], crew.rank - 1, _tag(*tag)) for p, tag in zip(panels, tags, strict=True)]
        for panel, tag, arrived in zip(panels, tags, taken, strict=True):
            arrived()
            _add(one, lead, panel, rest=crew.rank == last)
            sent.append(crew.give(one.sum.total[panel], crew.rank + 1, _tag(*tag)))
    for done in sent:
        done()
    for number, one in enumerate(held):
        one.items.clear()
        one.sum.tokens = int(counts[:, number].sum())
        if one.needed_by is None:
            crew.broadcast(one.sum.total, last)
        elif one.needed_by != last and crew.rank == last:
            crew.give(one.sum.total, one.needed_by, _tag(number, 0))()
        elif one.needed_by == crew.rank != last:
            crew.take(one.sum.total, last, _tag(number, 0))()


def _tag(number: int, panel: int) -> int:
    return 1 + (number << 10) + panel


def _pass_rest(crew: Crew, number: int, one: Held, before: int) -> Tensor:
    """The rows [n, ...] with which this process's first chunk begins; its own last ones go to the next process."""
    chunk, dtype = one.sum.waiting.chunk, one.sum.total.dtype
    lead = torch.empty(before % chunk, *one.sum.row_shape, dtype=dtype, device=one.sum.total.device)
    if len(lead):
        crew.take(lead, crew.rank - 1, _tag(number, 1023))()
    left = (len(lead) + sum(one.sum.rows(*item).shape[0] for item in one.items)) % chunk
    if left and crew.rank < crew.size - 1:
        pieces: list[Tensor] = []
        for rows in (one.sum.rows(*item) for item in reversed(one.items)):
            pieces.insert(0, rows[max(0, len(rows) - left) :].to(dtype))
            left -= len(pieces[0])
            if not left:
                break
        crew.give(torch.cat([lead[len(lead) - left :], *pieces]), crew.rank + 1, _tag(number, 1023))()
    return lead


def _add(one: Held, lead: Tensor, panel: slice, rest: bool) -> None:
    """Add this process's whole chunks to a panel; and what is `rest` after them."""
    waiting, dtype = Waiting(one.sum.waiting.chunk), one.sum.total.dtype
    for rows in (lead, *(one.sum.rows(*item) for item in one.items)):
        for chunk in waiting.through(rows, dtype):
            one.sum.add_panel(panel, chunk)
    if rest:
        for chunk in waiting.rest():
            one.sum.add_panel(panel, chunk)
