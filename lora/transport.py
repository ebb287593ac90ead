"""Carry an adapter over to a model that was made from its base by linear surgery, exactly.

When W' = P W M for fixed P and M, the change of W becomes the change P (s B A) M of W': B' = P B and A' = A M, nothing is
approximated. P and M are not taken from what a tool says that it did: they are found by comparing the two checkpoints
layer by layer, and must reproduce W' from W. Tried in this order:

selection   every row of W' is a row of W, or of the layers that were fused into it; or every column is one of W's:
            heads permuted or dropped, projections fused or taken apart
pooling     each group of heads of W' is the mean of a group of neighbouring heads of W: mean-pooled GQA
scaling     W' = diag(t) W diag(u): the scales that AWQ and SmoothQuant move between layers, norms folded

What none of these reproduces is refused, with how far the nearest came: SVD, Procrustes and least-squares conversions
mix in the weights themselves, so there an adapter has to be merged first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .compose import Factors

_EXACT = 2.0**-20  # of a number's size, for float32 arithmetic done in another order
_STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: _EXACT, torch.float64: _EXACT}


@dataclass(frozen=True, eq=False)
class Map:
    """How one layer's weight became another's: B' = left(B), A' = right(A)."""

    what: str
    rows: Tensor | None = None  # [out'] row of the (stacked) source for each row
    columns: Tensor | None = None  # [in'] column of the source for each column
    pool: tuple[int, int] | None = None  # (rows of a head, heads that were pooled into one)
    left: Tensor | None = None  # [out] factors of rows
    right: Tensor | None = None  # [in] factors of columns

    def apply(self, factors: Factors) -> Factors:
        """The factors of the changed layer, float64."""
        A, B = factors.A.double(), factors.B.double()
        if self.rows is not None:
            B = B[self.rows]
        if self.pool is not None:
            B = pooled(B, *self.pool)
        if self.columns is not None:
            A = A[:, self.columns]
        if self.left is not None:
            B = self.left[:, None] * B
        if self.right is not None:
            A = A * self.right
        return Factors(A, B)


def pooled(W: Tensor, head: int, group: int) -> Tensor:
    """Means over `group` neighbouring heads of `head` rows: [n * group * head, m] -> [n * head, m]."""
    return W.reshape(-1, group, head, W.shape[1]).mean(1).reshape(-1, W.shape[1])


def find_map(sources: Sequence[Tensor], target: Tensor, head: int | None) -> Map | float:
    """How `target` [out', in'] came from `sources` [out_i, in] stacked, or how far off the nearest is (relative)."""
    stacked = torch.cat(list(sources)) if len(sources) > 1 else sources[0]
    if stacked.shape == target.shape and torch.equal(stacked, target):
        return Map("unchanged" if len(sources) == 1 else "fused", rows=torch.arange(target.shape[0]))
    rows = _selection(stacked, target)
    if rows is not None:
        return Map("rows selected", rows=rows)
    columns = _selection(stacked.T, target.T)
    if columns is not None:
        return Map("columns selected", columns=columns)
    best = math.inf
    for found in (_pooling(stacked, target, head), _scaling(stacked, target)):
        if isinstance(found, Map):
            return found
        best = min(best, found)
    return best


def _selection(source: Tensor, target: Tensor) -> Tensor | None:
    """For each row of `target` the row of `source` that is bit for bit the same; None when one has none or several."""
    if source.shape[1] != target.shape[1]:
        return None
    where: dict[bytes, int] = {}
    for i, row in enumerate(_bytes(source)):
        where.setdefault(row, i)
    found = [where.get(row, -1) for row in _bytes(target)]
    return None if -1 in found else torch.tensor(found)


def _bytes(W: Tensor) -> list[bytes]:
    raw = W.contiguous().view(torch.uint8).numpy()
    return [row.tobytes() for row in raw]


def _pooling(source: Tensor, target: Tensor, head: int | None) -> Map | float:
    if head is None or source.shape[1] != target.shape[1] or target.shape[0] == 0:
        return math.inf
    group, rest = divmod(source.shape[0], target.shape[0])
    if rest or group < 2 or target.shape[0] % head:
        return math.inf
    off = _distance(pooled(source.double(), head, group), target)
    return off if off > 1 else Map(f"means of {group} heads", pool=(head, group))


def _scaling(source: Tensor, target: Tensor) -> Map | float:
    """t and u of target = diag(t) source diag(u), by alternating least squares from log ratios."""
    if source.shape != target.shape:
        return math.inf
    W, V = source.double(), target.double()
    u = torch.ones(W.shape[1], dtype=torch.float64)
    t = torch.ones(W.shape[0], dtype=torch.float64)
    for _ in range(20):
        scaled = W * u
        t = (scaled * V).sum(1) / scaled.square().sum(1).clamp_min(1e-300)
        scaled = t[:, None] * W
        u = (scaled * V).sum(0) / scaled.square().sum(0).clamp_min(1e-300)
    off = _distance(t[:, None] * W * u, target)
    return off if off > 1 else Map("scaled", left=t, right=u)


def _distance(predicted: Tensor, target: Tensor) -> float:
    """Largest difference over what rounding to the target's dtype may do; at most 1: the same."""
    V = target.double()
    allowed = _STEP[target.dtype] * V.abs() + 1e-6 * V.abs().max()
    return float(((predicted - V).abs() / allowed.clamp_min(1e-300)).max())


def fused_factors(parts: Sequence[Factors | None], outs: Sequence[int]) -> Factors | None:
    """Factors of stacked layers from those of each: A's stacked, B's block diagonal. None without any."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    A = torch.cat([part.A.double() for part in given])
    B = torch.zeros(sum(outs), A.shape[0], dtype=torch.float64)
    row = column = 0
    for part, out in zip(parts, outs, strict=True):
        if part is not None:
            B[row : row + out, column : column + part.rank] = part.B.double()
            column += part.rank
        row += out
    return Factors(A, B)


def without_empty_ranks(factors: Factors) -> Factors:
    """Drop ranks whose column of B is zero, as taking a fused layer apart leaves."""
    used = factors.B.abs().amax(0) > 0
    return factors if bool(used.all()) or not bool(used.any()) else Factors(factors.A[used], factors.B[:, used])
