"""AWQ: scale up the columns that matter before rounding them (arXiv 2306.00978).

A column that meets large activations costs most when it is rounded. W diag(s) and x / s give the same output, and
rounding W diag(s) leaves an error of column j that is s_j times smaller, as long as s_j does not widen its group's
range. With a = mean |x| and u = mean over outputs of |W| / (its group's max), the factors tried are

    plain: s = a^r                   duo: s = a^r / u^(1-r)              r on a grid of [0, 1]

each divided by sqrt(max s · min s); r = 0 of plain is s = 1, so the search never costs more than no scaling, on the
tokens that it sees. Then each group's range is shrunk step by step to what costs the layer's output least (*clipping*).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grid import Grid, Search, candidates, find_grid
from .scheme import Scheme, quantize_to_grid

_CHUNK = 1 << 22  # numbers of rounding errors held at once
_RIDGE = 0.01  # share of the mean of diag H added to it: fewer tokens than inputs must not make an error free


def scale_candidates(a: Tensor, u: Tensor, steps: int) -> list[tuple[str, Tensor]]:
    """(what it is, s [channels]) for a = mean |x| [channels] and u [channels]; the first is s = 1.

    A channel that is never active keeps the factor 1.
    """
    tried = [("none", torch.ones_like(a))]
    for i in range(steps + 1):
        r = i / steps
        if i:
            tried.append((f"plain {r:.3g}", _balanced(a**r, a > 0)))
        tried.append((f"duo {r:.3g}", _balanced(a**r / (u ** (1 - r) + 1e-4), a > 0)))
    return [(name, s) for name, s in tried if bool(torch.isfinite(s).all())]


def _balanced(s: Tensor, live: Tensor) -> Tensor:
    if not bool(live.any()):
        return torch.ones_like(s)
    s = s.clamp(min=1e-4)
    s = s / (s[live].max() * s[live].min()).sqrt()
    return torch.where(live, s, torch.ones_like(s)).clamp(1e-4, 1e4)


def weight_share(weights: list[tuple[Tensor, Scheme]]) -> Tensor:
    """u [in]: mean over the rows of all weights [out, in] of |W| / (its group's max)."""
    shares = []
    for W, scheme in weights:
        groups = W.abs().view(W.shape[0], scheme.groups(W.shape[1]), -1)
        shares.append((groups / (groups.amax(2, keepdim=True) + 1e-6)).view_as(W))
    return torch.cat(shares).mean(0)


def clipped_grid(weight: Tensor, scheme: Scheme, dtype: torch.dtype, x: Tensor, search: Search) -> Grid:
    """The grid for weight [out, in] whose ranges cost the output on inputs x [tokens, in] least, group by group.

    A group's cost is ||x_g (w_g - ŵ_g)||² = e H_g eᵀ with H_g the second moment of its inputs. Without tokens, of the
    weights themselves.
    """
    if x.shape[0] == 0:
        return find_grid(weight, scheme, dtype, None, search)
    out_features, in_features = weight.shape
    groups, width = scheme.groups(in_features), scheme.width(in_features)
    grouped = x.float().view(x.shape[0], groups, width).transpose(0, 1)
    H = grouped.transpose(1, 2) @ grouped  # [groups, width, width]
    diagonal = torch.diagonal(H, dim1=1, dim2=2)
    diagonal += _RIDGE * diagonal.mean(1, keepdim=True) + torch.finfo(H.dtype).tiny
    scale = torch.empty(out_features, groups, device=weight.device)
    zero = torch.full_like(scale, scheme.middle)
    rows = max(1, _CHUNK // in_features)
    for start in range(0, out_features, rows):
        w = weight[start : start + rows].float().view(-1, groups, width)
        scales, zeros = candidates(w, scheme, dtype, search)
        costs = torch.empty_like(scales[..., 0])  # [fractions, rows, groups]
        for i, tried in enumerate(scales):
            z = scheme.middle if zeros is None else zeros[i]
            error = quantize_to_grid(w, tried, z, scheme.levels).sub_(z).mul_(tried).sub_(w).transpose(0, 1)
            costs[i] = ((error @ H) * error).sum(2).T
        best = costs.argmin(0, keepdim=True)
        scale[start : start + rows] = scales[..., 0].gather(0, best)[0]
        if zeros is not None:
            zero[start : start + rows] = zeros[..., 0].gather(0, best)[0]
    return Grid(scale, zero, scheme, dtype)
