"""Round to nearest: the baseline, and what a layer without data gets.

Each weight becomes the nearest point of its group's grid (`grid.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grid import Grid, Search, find_grid
from .scheme import Quantized, Scheme, quantize_to_grid, row_pieces


def rtn(
    weight: Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    importance: Tensor | None = None,
    search: Search | None = None,
) -> Quantized:
    """Quantize weight [out, in]; scales are stored as `dtype`. `importance` [in] weighs the range search.

    >>> weight = torch.tensor([[-0.8, 0.1, 0.35, 0.7]])
    >>> found = rtn(weight, Scheme(bits=4, group_size=4), torch.float32, search=None)
    >>> found.codes.tolist(), round(float(found.scale), 4)
    ([[0, 9, 11, 15]], 0.1067)
    """
    return round_to_grid(weight, find_grid(weight, scheme, dtype, importance, search))


def round_to_grid(weight: Tensor, grid: Grid) -> Quantized:
    """Nearest codes on a given grid."""
    out_features, in_features = weight.shape
    groups = grid.scale.shape[1]
    codes = torch.empty(out_features, in_features, dtype=torch.uint8, device=weight.device)
    for some in row_pieces(out_features, in_features):
        w = weight[some].float().reshape(-1, groups, in_features // groups)
        found = quantize_to_grid(w, grid.scale[some, :, None], grid.zero[some, :, None], grid.scheme.levels)
        codes[some] = found.view(-1, in_features)
    return grid.quantized(codes)
