"""GPTQ: round column by column, and let the columns not yet rounded take up the error (arXiv 2210.17323).

For a linear layer with inputs x, rounding W to Ŵ costs tr(E H Eᵀ) per token, E = W - Ŵ, H = mean x xᵀ.

    1. damp:     H += λ · mean(diag H over live columns) · I
    2. order:    columns by falling diag H (act-order), so that the columns that matter are rounded while many are free
    3. factor:   U upper triangular with UᵀU = H⁻¹
    4. column i: q = round(w_i);  e = (w_i - q) / U_ii;  w_j -= e · U_ij  for j > i
    5. lazily:   in blocks of 32 columns; the columns after a block get its errors in one product

Scales are fixed before step 4 from the weights (*static groups*), so act-order needs no index at run time, and are chosen
by an importance-weighted search (`grid.py`). With the order `group`, columns are sorted within their groups and groups by
their largest diag H: a group's columns stay together, and its scale is found when it is reached, from weights that have
taken up the errors so far. Differences from the original code: dead columns (H_ii = 0) are rounded, not zeroed; the
damping ignores them; scales are rounded to their storage dtype before they are used; a failed factorization raises λ and
is recorded.

**Asymmetric calibration.** x comes from the quantized layers before; in the original model the layer would see x̃. What
should be small is then ‖Ŵx - Wx̃‖², which depends on the data through H and D = mean (x̃ - x) xᵀ:

- *GPTAQ* (arXiv 2504.02692, eq. 15-18): with P = triu(D Uᵀ, 1) U, step 4 becomes w_j += -e · U_ij + w_i · P_ij: each column
  hands on what its own input's deviation costs.
- *Qronos* (arXiv 2505.11695): the first column is rounded to minimize the cost while the others are as they were,
  q = round(w_0 + (W D)_0 / H_00), and the others then solve the least-squares problem that is left. Without the
  constraint its solution is W + W D H⁻¹; step 4 from there, with that first q, gives the same.

D may be scaled by α: it is an estimate from few tokens. α = 0, or x̃ = x, is plain GPTQ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from .grid import Grid, Search, find_grid
from .rtn import round_to_grid
from .scheme import Quantized, Scheme

BLOCK = 32
PANEL = 192  # of a product of which only one triangle is wanted
LEAF = 128  # of a triangular inverse: a matrix this small is inverted at once


@dataclass(frozen=True)
class GPTQOptions:
    """How to run GPTQ on one layer."""

    scheme: Scheme
    damp: float = 0.01  # share of the mean of diag H
    damp_limit: float = 0.3  # damp doubles up to here when the factorization fails
    actorder: Literal["static", "group", "none"] = "static"
    search: Search | None = field(default_factory=Search)
    asymmetric: Literal["none", "gptaq", "qronos"] = "none"
    alpha: float = 1.0  # share of D that counts


@dataclass(frozen=True)
class GPTQResult:
    """What GPTQ found, and what it took."""

    quantized: Quantized
    method: str  # "gptq", or "rtn" when no damping in range made H positive definite
    damp: float  # the damping used
    retries: int
    dead: int  # columns that no token touched


def gptq(
    weight: Tensor, hessian: Tensor, options: GPTQOptions, dtype: torch.dtype, deviation: Tensor | None = None
) -> GPTQResult:
    """Quantize weight [out, in] (float) under hessian [in, in]; scales are stored as `dtype`.

    `deviation`: D [in, in], for asymmetric calibration. Runs in the hessian's dtype (float32 or float64). Rows are
    independent: weights that share their inputs may be stacked.

    >>> W = torch.tensor([[-0.9, 0.5, 0.5]])
    >>> H = torch.tensor([[1, 0, 0], [0, 1, 0.95], [0, 0.95, 1]])  # the last two inputs go together: one's error is undone
    >>> options = GPTQOptions(Scheme(bits=3, group_size=-1, symmetric=False), search=None)
    >>> found = gptq(W, H, options, torch.float32).quantized
    >>> found.codes.tolist(), round(output_error(W, found.dequantize(), H), 3)  # to nearest: 0.166
    ([[0, 6, 7]], 0.079)
    """
    W, H = weight.to(hessian.dtype), hessian
    h = torch.diagonal(H)
    dead = h == 0
    live = ~dead
    importance = _importance(h, live)
    if not bool(live.any()):
        return _rounded(W, find_grid(W, options.scheme, dtype, importance, options.search), options.damp, 0, dead)
    order = _order(h, options)
    factored = _inverse_factor(H, order, options, float(h[live].mean()))
    if factored is None:
        grid = find_grid(W, options.scheme, dtype, importance, options.search)
        return _rounded(W, grid, options.damp_limit, _max_retries(options), dead)
    U, damp, retries = factored
    W = W.index_select(1, order)
    P, first = None, None
    if deviation is not None and options.asymmetric != "none":
        D = options.alpha * deviation.to(H.dtype).index_select(0, order).index_select(1, order)
        if options.asymmetric == "gptaq":
            P = torch.triu(D @ U.T, 1) @ U
        else:
            top = h[order[0]] + damp * h[live].mean()
            first = W[:, 0] + W @ D[:, 0] / top
            W = W + ((W @ D) @ U.T) @ U
    back = torch.argsort(order)
    dynamic = options.actorder == "group"
    grid = find_grid(W[:, back], options.scheme, dtype, importance, None if dynamic else options.search)
    search = _GroupSearch(importance[order], dtype, options.search) if dynamic else None
    codes = _round_columns(W, U, grid, _group_of(options.scheme, order), P, first, search)
    return GPTQResult(grid.quantized(codes[:, back]), "gptq", damp, retries, int(dead.sum()))


def _rounded(W: Tensor, grid: Grid, damp: float, retries: int, dead: Tensor) -> GPTQResult:
    return GPTQResult(round_to_grid(W, grid), "rtn", damp, retries, int(dead.sum()))


def _order(h: Tensor, options: GPTQOptions) -> Tensor:
    """Columns in visiting order."""
    n = len(h)
    if options.actorder == "static":
        return torch.argsort(h, descending=True, stable=True)
    if options.actorder == "none":
        return torch.arange(n, device=h.device)
    width = options.scheme.width(n)
    inside = torch.argsort(h.view(-1, width), dim=1, descending=True, stable=True)
    groups = torch.argsort(h.view(-1, width).amax(1), descending=True, stable=True)
    return (inside + width * torch.arange(n // width, device=h.device)[:, None])[groups].flatten()


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


def _inverse_factor(H: Tensor, order: Tensor, options: GPTQOptions, mean: float) -> tuple[Tensor, float, int] | None:
    """U with UᵀU = (H + damp · mean · I)⁻¹, H with its columns in `order`; the damp used and the retries. None when no
    damp up to the limit works.

    With J the reversal of order, J H J = L Lᵀ gives H = V Vᵀ for the upper triangular V = J L J, and U = V⁻¹: one
    factorization and one triangular inverse, where inverting H and factoring again would take twice that. What is done
    with is let go at once: H may be half a gigabyte.
    """
    damp, back = options.damp, order.flip(0)
    for retries in range(_max_retries(options) + 1):
        damped = H.index_select(0, back).index_select(1, back)
        damped.diagonal().add_(damp * mean)
        L, info = torch.linalg.cholesky_ex(damped)
        del damped
        if int(info) == 0:
            inverse = _lower_inverse(L)
            del L
            U = inverse.flip(0, 1)
            if bool(torch.isfinite(U.sum(1)).all()):
                return U, damp, retries
        damp *= 2
    return None


def _lower_inverse(L: Tensor) -> Tensor:
    """Inverse of a lower triangular matrix by halves: nearly all of it is products, which run at full speed."""
    n = len(L)
    if n <= LEAF:
        return torch.linalg.solve_triangular(L, torch.eye(n, dtype=L.dtype, device=L.device), upper=False)
    half = n // 2
    inverse = torch.zeros_like(L)
    inverse[:half, :half] = _lower_inverse(L[:half, :half])
    inverse[half:, half:] = _lower_inverse(L[half:, half:])
    inverse[half:, :half] = (inverse[half:, half:] @ (L[half:, :half] @ inverse[:half, :half])).neg_()
    return inverse


@dataclass(frozen=True)
class _GroupSearch:
    """Finds a group's scale when its first column is reached."""

    importance: Tensor  # [in], in visiting order
    dtype: torch.dtype
    search: Search | None


def _round_columns(
    W: Tensor,
    U: Tensor,
    grid: Grid,
    group: Tensor,
    P: Tensor | None = None,
    first: Tensor | None = None,
    search: _GroupSearch | None = None,
) -> Tensor:
    """Codes [out, in] for the columns of W in visiting order. Works on Wᵀ, whose rows are contiguous.

    Within a block errors are w_i - q_i, and the factor's rows are divided by U_ii instead (in place: U is the caller's no
    more): fewer passes over each column.
    A column's error goes to its whole block, with weight 0 to the columns that are done: fewer views to make.

    `first` [out]: what is rounded in the first column's stead. With `search` the grid is overwritten group by group; a
    group's columns must then be next to one another.
    """
    n, levels = W.shape[1], grid.scheme.levels
    w = W.T.contiguous()  # [in, out]
    scale, zero = (part.T.contiguous().to(w.dtype) for part in (grid.scale, grid.zero))  # [groups, out]
    U.div_(torch.diagonal(U).clone()[:, None])
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    kernel = None if search is not None else _kernel(w)
    per_group, groups = (scale.unbind(), zero.unbind()), group.tolist()

    def reach(i: int) -> None:
        if search is not None and (i == 0 or groups[i - 1] != groups[i]):
            _find_group(w, i, groups[i], grid, search, scale[groups[i]], zero[groups[i]])

    for a, b in _blocks(n, None if search is None else grid.scheme.width(n)):
        block = w[a:b]
        corners = (U[a:b, a:b].triu(1), None if P is None else P[a:b, a:b].contiguous())
        wanted = first if a == 0 else None
        if kernel is not None:
            Q, E = kernel(block, scale, zero, group[a:b], levels, *corners, wanted)
        else:
            reached = None if search is None else lambda i, a=a: reach(a + i)
            Q, E = round_block(block, *per_group, groups[a:b], levels, *corners, wanted, reached)
        codes[a:b] = Q
        w[b:].addmm_(U[a:b, b:].T, E, alpha=-1)
        if P is not None:
            w[b:].addmm_(P[a:b, b:].T, block)
    return codes.T.contiguous()


def round_block(
    block: Tensor,
    scale: Sequence[Tensor],
    zero: Sequence[Tensor],
    group: Sequence[int],
    levels: int,
    U: Tensor,
    P: Tensor | None = None,
    first: Tensor | None = None,
    reach: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Round a block of columns, given as rows [columns, out], one after another: (codes, errors w_i - q_i), like it.

    `block` takes up the errors. scale, zero: [out] per group; group: of each column; U [columns, columns]: the factor's
    part, its rows divided by U_ii, above the diagonal; P likewise, of GPTAQ. `first` [out]: what is rounded in the first
    column's stead. `reach(i)` is called before column i is rounded. For GPUs the same is a kernel, `gptq_kernel.py`.
    """
    E, Q = torch.empty_like(block), torch.empty_like(block)
    rows = (block.unbind(), E.unbind(), Q.unbind(), U.unbind(), group)
    for i, (x, e, q, u, g) in enumerate(zip(*rows, strict=True)):
        if reach is not None:
            reach(i)
        s, z = scale[g], zero[g]
        torch.addcdiv(z, first if first is not None and i == 0 else x, s, out=q).round_().clamp_(0, levels)
        torch.sub(q, z, out=e)
        torch.addcmul(x, e, s, value=-1, out=e)
        if P is not None:
            block.addr_(P[i], x.clone())
        block.addr_(u, e, alpha=-1)
    return Q, E


def _kernel(w: Tensor) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """`round_block` for w's device and dtype as a kernel, where there is one."""
    if w.device.type != "cuda" or w.dtype != torch.float32 or find_spec("triton") is None:
        return None
    from .gptq_kernel import round_block as fused

    return fused


def _blocks(n: int, width: int | None) -> list[tuple[int, int]]:
    """Runs of at most `BLOCK` columns. With `width`, a group never begins in one and ends in another unless it fills
    both: its scale must be found from columns that have taken up every error before it."""
    if width is None or width == n or BLOCK % width == 0:
        starts = range(0, n, BLOCK)
        return [(a, min(a + BLOCK, n)) for a in starts]
    step = width if width > BLOCK else BLOCK // width * width
    bounds = [(a, min(a + step, n)) for a in range(0, n, step)]
    return [(c, min(c + BLOCK, b)) for a, b in bounds for c in range(a, b, BLOCK)]


def _find_group(w: Tensor, at: int, k: int, grid: Grid, search: _GroupSearch, scale: Tensor, zero: Tensor) -> None:
    """Scale and zero points [out] of group `k`, whose columns begin at row `at` of w [in, out], into the grid and `scale`,
    `zero`."""
    width = grid.scheme.width(len(w))
    alone = Scheme(grid.scheme.bits, -1, grid.scheme.symmetric)
    columns, importance = w[at : at + width].T, search.importance[at : at + width]
    found = find_grid(columns.contiguous(), alone, search.dtype, importance, search.search)
    grid.scale[:, k], grid.zero[:, k] = found.scale[:, 0], found.zero[:, 0]
    scale.copy_(found.scale[:, 0])
    zero.copy_(found.zero[:, 0])


def output_error(weight: Tensor, dequantized: Tensor, hessian: Tensor) -> float:
    """Relative error of the layer's outputs on the calibration tokens, sqrt(tr(E H Eᵀ) / tr(W H Wᵀ))."""
    return relative_error(*row_energies(weight, dequantized, hessian))


def row_energies(weight: Tensor, dequantized: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """diag(E H Eᵀ) and diag(W H Wᵀ), each [out]: what each row's rounding costs, and what the row puts out."""
    W, E = weight.to(hessian.dtype), (weight.to(hessian.dtype) - dequantized.to(hessian.dtype))
    return _energies(E, hessian), _energies(W, hessian)


def relative_error(costs: Tensor, sizes: Tensor) -> float:
    """`output_error` of the rows with these energies; summed in float64."""
    cost, size = float(costs.double().sum()), float(sizes.double().sum())
    return math.sqrt(max(cost, 0.0) / size) if size > 0 else 0.0


def _energies(W: Tensor, H: Tensor) -> Tensor:
    """diag(W H Wᵀ) in the dtype of H. H is symmetric: what is left of a panel's diagonal counts twice, what is right of it
    not at all."""
    rows = torch.zeros(W.shape[0], dtype=W.dtype, device=W.device)
    for a in range(0, W.shape[1], PANEL):
        panel = slice(a, a + PANEL)
        product = torch.addmm(W[:, panel] @ H[panel, panel], W[:, :a], H[:a, panel], alpha=2)
        rows += product.mul_(W[:, panel]).sum(1)
    return rows


def asymmetric_cost(weight: Tensor, dense: Tensor, hessian: Tensor, deviation: Tensor) -> float:
    """mean ‖Ŵx - Wx̃‖² - mean ‖W(x̃ - x)‖², which differ from the first by what no Ŵ changes. float64."""
    W, H, D = weight.double(), hessian.double(), deviation.double()
    E = dense.double() - W
    return float(((E @ H) * E).sum() - 2 * ((W @ D) * E).sum())
