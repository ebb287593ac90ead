"""Scales and zero points of a weight's groups, with a search for the best range.

For each group the range [min, max] is shrunk step by step; a range whose rounding costs least, Σ_j h_j (w_j - ŵ_j)²,
is kept. h is the second moment of the inputs (diag H), so columns that matter count more; without it h = 1. The full
range is among the candidates, so a search never costs more than none.

Scales are rounded to their storage dtype **before** they are used: codes found here are the codes that are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .scheme import Quantized, Scheme

_STRIDE = 3  # of the ranges tried first
# Weights handled at once: few enough to stay in the CPU's cache over many passes, enough that a pass costs more than its call.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Grid:
    """scale, zero: float32 [out, groups], scale already rounded to `dtype`."""

    scale: Tensor
    zero: Tensor
    scheme: Scheme
    dtype: torch.dtype

    def quantized(self, codes: Tensor) -> Quantized:
        """Wrap codes [out, in] (any dtype, integral values)."""
        zero = None if self.scheme.symmetric else self.zero.to(torch.uint8)
        return Quantized(codes.to(torch.uint8), self.scale.to(self.dtype), zero, self.scheme)


@dataclass(frozen=True)
class Search:
    """Ranges tried: `steps` fractions of the full range, from 1 down to `smallest`. steps=1: the full range."""

    steps: int = 26
    smallest: float = 0.5

    def fractions(self) -> list[float]:
        return torch.linspace(1.0, self.smallest, self.steps, dtype=torch.float64).tolist()


def find_grid(
    weight: Tensor, scheme: Scheme, dtype: torch.dtype, importance: Tensor | None = None, search: Search | None = None
) -> Grid:
    """Grid for weight [out, in] float32; importance [in] >= 0. Without `search` the full range is used."""
    out_features, in_features = weight.shape
    groups, width = scheme.groups(in_features), scheme.width(in_features)
    h = None if importance is None else importance.float().sqrt().view(1, groups, width)
    scale = torch.empty(out_features, groups, device=weight.device)
    zero = torch.full_like(scale, scheme.middle)
    rows = max(1, _CHUNK // in_features)
    for start in range(0, out_features, rows):
        w = weight[start : start + rows].float().view(-1, groups, width)
        scales, zeros = candidates(w, scheme, dtype, search)
        best = _cheapest(w, scales, zeros, scheme, h)
        scale[start : start + rows] = scales.gather(0, best)[0, ..., 0]
        if zeros is not None:
            zero[start : start + rows] = zeros.gather(0, best)[0, ..., 0]
    return Grid(scale, zero, scheme, dtype)


def candidates(w: Tensor, scheme: Scheme, dtype: torch.dtype, search: Search | None) -> tuple[Tensor, Tensor | None]:
    """Scales (rounded to `dtype`, floored at its smallest normal number) and zero points to choose from for weights
    w [rows, groups, width], each [fractions, rows, groups, 1]; the widest range first.

    Symmetric schemes have no zero points to choose.
    """
    fractions = torch.tensor((search or Search(steps=1)).fractions(), device=w.device).view(-1, 1, 1, 1)
    low, high = w.amin(2, keepdim=True), w.amax(2, keepdim=True)
    if scheme.symmetric:
        span = 2 * torch.maximum(low.abs(), high.abs())
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        span = high - low
    scale = (fractions * span / scheme.levels).to(dtype).float().clamp_(min=torch.finfo(dtype).smallest_normal)
    scale = torch.where(span == 0, 1.0, scale)  # zeros are stored exactly by any scale; 1 cannot under- or overflow
    if scheme.symmetric:
        return scale, None
    return scale, (-low * fractions / scale).round_().clamp_(0, scheme.levels)


def _cheapest(w: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, h: Tensor | None) -> Tensor:
    """Index [1, rows, groups, 1] of the candidate whose rounding costs least; the widest range among equals.

    Every third is tried, then the neighbours of the best: 0.2 % above the least cost at 4 bits for 0.4 of the time.
    """
    if len(scales) == 1:
        return torch.zeros_like(scales, dtype=torch.int64)
    exact, rounded = torch.empty_like(w), torch.empty_like(w)
    low = -scheme.middle if zeros is None else 0

    def cost(scale: Tensor, zero: Tensor | None) -> Tensor:
        torch.mul(w, 1 / scale, out=exact)  # in units of the scale, where the error is that of rounding to an integer
        if zero is not None:
            exact.add_(zero)
        torch.round(exact, out=rounded).clamp_(low, low + scheme.levels).sub_(exact)
        if h is not None:
            rounded.mul_(h)
        return torch.linalg.vector_norm(rounded, dim=2, keepdim=True).mul_(scale)

    last = len(scales) - 1
    tried = sorted({*range(0, last, _STRIDE), last})
    costs = torch.stack([cost(scales[i], None if zeros is None else zeros[i]) for i in tried])
    least, best = costs.min(0, keepdim=True)
    start = best = torch.tensor(tried, device=w.device)[best]
    for step in (-1, 1):
        near = (start + step).clamp_(0, last)
        found = cost(scales.gather(0, near)[0], None if zeros is None else zeros.gather(0, near)[0])[None]
        better = found < least
        best = torch.where(better, near, best)
        least = torch.where(better, found, least)
    return best
