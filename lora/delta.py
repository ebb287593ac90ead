"""The arithmetic of low-rank changes, on tensors alone.

A change of a stored weight W [n, m] is  dW = L R  with L [n, r] and R [r, m], the scale folded into L. For a linear layer
L = s B and R = A (arXiv 2106.09685); a Conv1D and an embedding are stored transposed, so there L = s A^T and R = B^T.
DoRA (arXiv 2402.09353) then gives each output the magnitude that it learned:  W' = m (W + L R) / ||W + L R||, the norm
over an output's weights: over rows of a linear layer (axis 0 numbers the outputs), over columns of the others (axis 1).

All of it is float32 and rounded once, at the end. Large weights go through in slabs of rows, so that what is computed
beside the weight stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_SLAB = 1 << 18  # numbers of a weight that are in work at once


@dataclass(frozen=True, eq=False)
class Delta:
    """One adapter's change of one weight [n, m]; `share` is the adapter's weight among several."""

    L: Tensor  # [n, r], scale included
    R: Tensor  # [r, m]
    magnitude: Tensor | None = None  # DoRA's m: [n] for axis 0, [m] for axis 1
    axis: int = 0
    share: float = 1.0

    @property
    def rank(self) -> int:
        return self.R.shape[0]


@dataclass(frozen=True)
class Rounding:
    """What a change is beside its weight, and what storing it in the weight's dtype leaves of it."""

    weight: float  # ||W||
    delta: float  # ||W' - W|| before rounding
    kept: float  # <stored - W, dW> / <dW, dW>: 1 when nothing of the change is lost
    noise: float  # ||stored - W'|| / ||dW||: rounding error beside the change
    unchanged: float  # share of the stored numbers that are what they were


def norms(W: Tensor, delta: Delta) -> Tensor:
    """||W + L R|| over each output's weights, float32 [n] (axis 0) or [m] (axis 1)."""
    total = torch.zeros(W.shape[delta.axis], dtype=torch.float64)
    for start, stop in slabs(W.shape):
        V = torch.addmm(W[start:stop].float(), delta.L[start:stop], delta.R).double()
        if delta.axis == 0:
            total[start:stop] = V.square().sum(1)
        else:
            total += V.square().sum(0)
    return total.sqrt().float()


def norms_by_expansion(W: Tensor, delta: Delta) -> Tensor:
    """`norms` without forming W + L R: ||W||^2 + 2 <W, L R> + ||L R||^2, in float64. Another way to the same numbers."""
    W, L, R = W.double(), delta.L.double(), delta.R.double()
    if delta.axis == 1:
        W, L, R = W.T, R.T, L.T
    squares = W.square().sum(1) + 2 * ((W @ R.T) * L).sum(1) + ((L @ (R @ R.T)) * L).sum(1)
    return squares.clamp_min(0).sqrt().float()


def factor(W: Tensor, delta: Delta) -> Tensor | None:
    """DoRA's m / ||W + L R||, shaped to multiply W; None without DoRA."""
    if delta.magnitude is None:
        return None
    ratio = delta.magnitude.float() / norms(W, delta)
    return ratio[:, None] if delta.axis == 0 else ratio[None, :]


def merged(
    W: Tensor,
    deltas: Sequence[Delta],
    rows: tuple[int, int] | None = None,
    factors: Sequence[Tensor | None] = (),
    out: Tensor | None = None,
) -> Tensor:
    """W + sum of shares times changes, float32 [n, m]; each change is of W itself, so their order does not matter.

    With `rows`, W [stop - start, m] is only those rows of the weight, and `factors` are the whole weight's. `out`: memory
    for the result, not W's.
    """
    start, stop = rows or (0, W.shape[0])
    factors = factors or [factor(W, delta) for delta in deltas]
    W = W.float()
    out = torch.empty_like(W) if out is None else out
    total = W
    for delta, ratio in zip(deltas, factors, strict=True):
        L = delta.L[start:stop]
        if ratio is None:
            total = torch.addmm(total, L, delta.R, alpha=delta.share, out=out)
            continue
        part = ratio[start:stop] if delta.axis == 0 else ratio
        total = torch.add(total, delta.share * (part * torch.addmm(W, L, delta.R) - W), out=out)
    return total if deltas else out.copy_(W)


def merge_into(W: Tensor, deltas: Sequence[Delta]) -> Rounding:
    """Merge into the stored weight W [n, m], in place, rounding once to its dtype."""
    factors = [factor(W, delta) for delta in deltas]
    weight = delta2 = along = error2 = 0.0
    same = 0
    parts = slabs(W.shape)
    shape = (max((stop - start for start, stop in parts), default=0), W.shape[1])
    memory = torch.empty(2, *shape), torch.empty(shape, dtype=W.dtype)  # once: what is new every time is paged in anew
    for start, stop in parts:
        there = W[start:stop]
        before, exact, stored = memory[0][0, : stop - start], memory[0][1, : stop - start], memory[1][: stop - start]
        before.copy_(there)
        merged(before, deltas, (start, stop), factors, out=exact)
        stored.copy_(exact)
        same += _equal_bits(stored, there)
        there.copy_(stored)
        weight += _inner(before, before)
        change, error = before.sub_(exact), exact.sub_(stored)  # both with the other sign
        delta2 += _inner(change, change)
        along += _inner(change, error)
        error2 += _inner(error, error)
    return rounding(weight, delta2, along, error2, same / max(W.numel(), 1))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _equal_bits(a: Tensor, b: Tensor) -> int:
    """How many numbers of a and b are the same; numpy counts several times as fast as torch."""
    whole = _BITS[a.element_size()]
    return int(np.count_nonzero(a.view(whole).numpy() == b.view(whole).numpy()))


def _inner(a: Tensor, b: Tensor) -> float:
    """<a, b>, in one pass over memory."""
    return float(torch.dot(a.flatten(), b.flatten()))


def rounding(weight2: float, delta2: float, along: float, error2: float, unchanged: float) -> Rounding:
    """From sums of squares: of the weight, of the change, of change times rounding error, of the rounding error."""
    if delta2 == 0:
        return Rounding(weight2**0.5, 0.0, 1.0, 0.0, unchanged)
    return Rounding(weight2**0.5, delta2**0.5, 1 + along / delta2, (error2 / delta2) ** 0.5, unchanged)


def slabs(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Row ranges of a matrix [n, m] of about `_SLAB` numbers each."""
    n, m = shape
    step = max(1, _SLAB // max(m, 1))
    return [(start, min(start + step, n)) for start in range(0, n, step)]


# -- spectra: everything from r x r cores ------------------------------------------------------------------------------


def singular_values(L: Tensor, R: Tensor) -> Tensor:
    """Of L R, descending, float64 [r]: QR of both factors, then the SVD of an r x r core."""
    return torch.linalg.svdvals(_core(L, R)[2])


def norm(L: Tensor, R: Tensor) -> float:
    """||L R||, by the r x r Gram matrices of the factors."""
    L, R = L.double(), R.double()
    return float(((L.T @ L) * (R @ R.T)).sum().clamp_min(0).sqrt())


def _core(L: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    Ql, Rl = torch.linalg.qr(L.double())
    Qr, Rr = torch.linalg.qr(R.double().T)
    return Ql, Qr, Rl @ Rr.T


def reduce(L: Tensor, R: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """The best approximation of L R of rank `rank`: (L', R', share of ||L R||^2 kept), float64, split evenly.

    Costs O((n + m) r^2): L R itself is never formed.
    """
    Ql, Qr, core = _core(L, R)
    U, S, Vh = torch.linalg.svd(core)
    total, r = float(S.square().sum()), min(rank, S.shape[0])
    root = S[:r].sqrt()
    kept = float(S[:r].square().sum()) / total if total else 1.0
    return (Ql @ U[:, :r]) * root, root[:, None] * (Vh[:r] @ Qr.T), kept


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of the singular values' shares (Roy & Vetterli 2007): r when all are equal, 1 when one rules."""
    values = values.double()
    total = values.sum()
    if float(total) == 0:
        return 0.0
    p = values / total
    return float(torch.exp(-(p * p.clamp_min(1e-300).log()).sum()))


# -- bases that training changed before its first step -----------------------------------------------------------------


def pissa(W: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """(L0, R0), float32: the r principal components of W [out, in], which PiSSA (arXiv 2404.02948) takes out of the base."""
    U, S, Vh = torch.linalg.svd(W.float(), full_matrices=False)
    return U[:, :r] * S[:r], Vh[:r]


def olora(W: Tensor, r: int, scale: float) -> tuple[Tensor, Tensor]:
    """(L0, R0), float32: what OLoRA (arXiv 2406.01775) takes out of W [out, in]: scale times the first r of its QR."""
    Q, R = torch.linalg.qr(W.float())
    return scale * Q[:, :r], R[:r]
