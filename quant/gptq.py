"""GPTQ: round column by column, and let the columns not yet rounded take up the error (arXiv 2210.17323).

For a linear layer with inputs x, rounding W to Ŵ costs tr(E H Eᵀ) per token, E = W - Ŵ, H = mean x xᵀ.

    1. damp:     H += λ · mean(diag H over live columns) · I
    2. order:    columns by falling diag H (act-order), so that the columns that matter are rounded while many are free
    3. factor:   U upper triangular with UᵀU = H⁻¹
    4. column i: q = round(w_i);  e = (w_i - q) / U_ii;  w_j -= e · U_ij  for j > i
    5. lazily:   in blocks of 32 columns; the columns after a block get its errors in one product

Scales are fixed before step 4 from the original weights (*static groups*), so act-order needs no index at run time, and
are chosen by an importance-weighted search (`grid.py`). Differences from the original code: dead columns (H_ii = 0) are
rounded, not zeroed; the damping ignores them; scales are rounded to their storage dtype before they are used; a failed
factorization raises λ and is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .grid import Grid, Search, find_grid
from .rtn import round_to_grid
from .scheme import Quantized, Scheme

BLOCK = 32


@dataclass(frozen=True)
class GPTQOptions:
    """How to run GPTQ on one layer."""

    scheme: Scheme
    damp: float = 0.01  # share of the mean of diag H
    damp_limit: float = 0.3  # damp doubles up to here when the factorization fails
    actorder: bool = True
    search: Search | None = field(default_factory=Search)


@dataclass(frozen=True)
class GPTQResult:
    """What GPTQ found, and what it took."""

    quantized: Quantized
    method: str  # "gptq", or "rtn" when no damping in range made H positive definite
    damp: float  # the damping used
    retries: int
    dead: int  # columns that no token touched


def gptq(weight: Tensor, hessian: Tensor, options: GPTQOptions, dtype: torch.dtype) -> GPTQResult:
    """Quantize weight [out, in] (float) under hessian [in, in]; scales are stored as `dtype`.

    Runs in the hessian's dtype (float32 or float64). Rows are independent: weights that share their inputs may be
    stacked.
    """
    W, H = weight.to(hessian.dtype), hessian
    h = torch.diagonal(H)
    dead = h == 0
    live = ~dead
    grid = find_grid(W, options.scheme, dtype, _importance(h, live), options.search)
    if not bool(live.any()):
        return GPTQResult(round_to_grid(W, grid), "rtn", options.damp, 0, int(dead.sum()))
    order = torch.argsort(h, descending=True, stable=True) if options.actorder else torch.arange(len(h))
    factored = _inverse_factor(H.index_select(0, order).index_select(1, order), options, float(h[live].mean()))
    if factored is None:
        return GPTQResult(round_to_grid(W, grid), "rtn", options.damp_limit, _max_retries(options), int(dead.sum()))
    U, damp, retries = factored
    codes = _round_columns(W.index_select(1, order), U, grid, _group_of(options.scheme, order))
    return GPTQResult(grid.quantized(codes[:, torch.argsort(order)]), "gptq", damp, retries, int(dead.sum()))


def _importance(h: Tensor, live: Tensor) -> Tensor:
    """diag H for the range search; a dead column counts as little as the least of the live ones, but counts."""
    least = h[live].min() if bool(live.any()) else torch.ones((), dtype=h.dtype)
    return torch.where(live, h, least)


def _group_of(scheme: Scheme, order: Tensor) -> Tensor:
    """Group of each column in visiting order."""
    return order // scheme.width(len(order))


def _max_retries(options: GPTQOptions) -> int:
    retries, damp = 0, options.damp
    while damp * 2 <= options.damp_limit:
        damp, retries = damp * 2, retries + 1
    return retries


def _inverse_factor(H: Tensor, options: GPTQOptions, mean: float) -> tuple[Tensor, float, int] | None:
    """U with UᵀU = (H + damp · mean · I)⁻¹, the damp used and the retries; None when none up to the limit works.

    With J the reversal of order, J H J = L Lᵀ gives H = V Vᵀ for the upper triangular V = J L J, and U = V⁻¹: one
    factorization and one triangular inverse, where inverting H and factoring again would take twice that.
    """
    damp = options.damp
    for retries in range(_max_retries(options) + 1):
        damped = H.flip(0, 1)
        damped.diagonal().add_(damp * mean)
        L, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            U = _lower_inverse(L).flip(0, 1)
            if bool(torch.isfinite(U).all()):
                return U, damp, retries
        damp *= 2
    return None


def _lower_inverse(L: Tensor) -> Tensor:
    """Inverse of a lower triangular matrix by halves: nearly all of it is products, which run at full speed."""
    n = len(L)
    if n <= BLOCK:
        return torch.linalg.solve_triangular(L, torch.eye(n, dtype=L.dtype, device=L.device), upper=False)
    half = n // 2
    inverse = torch.zeros_like(L)
    inverse[:half, :half] = _lower_inverse(L[:half, :half])
    inverse[half:, half:] = _lower_inverse(L[half:, half:])
    inverse[half:, :half] = -inverse[half:, half:] @ (L[half:, :half] @ inverse[:half, :half])
    return inverse


def _round_columns(W: Tensor, U: Tensor, grid: Grid, group: Tensor) -> Tensor:
    """Codes [out, in] for the columns of W in visiting order. Works on Wᵀ, whose rows are contiguous.

    Within a block E holds w_i - q_i, and the factor's rows are divided by U_ii instead: fewer passes over each column.
    A column's error goes to its whole block, with weight 0 to the columns that are done: fewer views to make.
    """
    n, levels = W.shape[1], grid.scheme.levels
    w = W.T.contiguous()  # [in, out]
    scale, zero = (part.T.contiguous().to(w.dtype).unbind() for part in (grid.scale, grid.zero))  # per group [out]
    groups = group.tolist()
    U = U / torch.diagonal(U)[:, None]
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    for a in range(0, n, BLOCK):
        b = min(a + BLOCK, n)
        block, E, Q = w[a:b], torch.empty_like(w[a:b]), torch.empty_like(w[a:b])
        corner = U[a:b, a:b].triu(1)
        rows = (block.unbind(), E.unbind(), Q.unbind(), corner.unbind(), groups[a:b])
        for x, e, q, u, g in zip(*rows, strict=True):
            s, z = scale[g], zero[g]
            torch.addcdiv(z, x, s, out=q).round_().clamp_(0, levels)
            torch.sub(q, z, out=e)
            torch.addcmul(x, e, s, value=-1, out=e)
            block.addr_(u, e, alpha=-1)
        codes[a:b] = Q
        w[b:].addmm_(U[a:b, b:].T, E, alpha=-1)
    return codes.T.contiguous()


def output_error(weight: Tensor, dequantized: Tensor, hessian: Tensor) -> float:
    """Relative error of the layer's outputs on the calibration tokens, sqrt(tr(E H Eᵀ) / tr(W H Wᵀ))."""
    W, E = weight.to(hessian.dtype), (weight.to(hessian.dtype) - dequantized.to(hessian.dtype))
    cost, size = ((E @ hessian) * E).sum(dtype=torch.float64), ((W @ hessian) * W).sum(dtype=torch.float64)
    return float((cost.clamp(min=0) / size).sqrt()) if float(size) > 0 else 0.0
