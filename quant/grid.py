"""Scales and zero points of a weight's groups, with a search for the best range.

For each group the range [min, max] is shrunk step by step; the range whose rounding costs least, Σ_j h_j (w_j - ŵ_j)²,
is kept. h is the second moment of the inputs (diag H), so columns that matter count more; without it h = 1. The full
range is among the candidates, so a search never costs more than none.

Scales are rounded to their storage dtype **before** they are used: codes found here are the codes that are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .scheme import Quantized, Scheme, quantize_to_grid

_CHUNK = 1 << 16  # weights handled at once: the search passes over them many times and stays in the CPU's cache


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
    h = None if importance is None else importance.float().view(1, groups, width)
    scale = torch.empty(out_features, groups, device=weight.device)
    zero = torch.empty_like(scale)
    rows = max(1, _CHUNK // in_features)
    fractions = (search or Search(steps=1)).fractions()
    for start in range(0, out_features, rows):
        w = weight[start : start + rows].float().view(-1, groups, width)
        s, z = _best_range(w, scheme, dtype, h, fractions)
        scale[start : start + rows], zero[start : start + rows] = s[..., 0], z[..., 0]
    return Grid(scale, zero, scheme, dtype)


def _best_range(
    w: Tensor, scheme: Scheme, dtype: torch.dtype, h: Tensor | None, fractions: list[float]
) -> tuple[Tensor, Tensor]:
    """w [rows, groups, width] -> scale, zero [rows, groups, 1]."""
    low, high = w.amin(2, keepdim=True), w.amax(2, keepdim=True)
    best_scale, best_zero = _grid_of_range(low, high, scheme, dtype)
    if len(fractions) == 1:
        return best_scale, best_zero
    best = torch.full_like(low, torch.inf)
    for fraction in fractions:
        scale, zero = _grid_of_range(low * fraction, high * fraction, scheme, dtype)
        difference = quantize_to_grid(w, scale, zero, scheme.levels).sub_(zero).mul_(scale).sub_(w).square_()
        cost = (difference if h is None else difference.mul_(h)).sum(2, keepdim=True)
        better = cost < best
        best = torch.where(better, cost, best)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _grid_of_range(low: Tensor, high: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale (rounded to `dtype`, floored at its smallest normal number) and zero point for a range."""
    if scheme.symmetric:
        span = 2 * torch.maximum(low.abs(), high.abs())
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        span = high - low
    scale = (span / scheme.levels).to(dtype).float()
    empty = span == 0  # a group of zeros: any scale stores it exactly, and 1 cannot under- or overflow
    scale = torch.where(empty, torch.ones_like(scale), scale.clamp_(min=torch.finfo(dtype).smallest_normal))
    if scheme.symmetric:
        return scale, torch.full_like(scale, scheme.middle)
    return scale, (-low / scale).round_().clamp_(0, scheme.levels)
