"""Weights stored as small numbers of a dtype of their own (int8, float8) beside a tensor of scales: read only.

| format | weight X [out, in] | scale |
|---|---|---|
| compressed-tensors `int-quantized`, `naive-quantized` | X.weight int8 | weight_scale [1], [out, 1], [out, in/g] (+ zeros) |
| compressed-tensors `float-quantized` | X.weight float8_e4m3 | the same |
| `fp8` (DeepSeek, transformers' FP8) | X.weight float8_e4m3 | weight_scale_inv [⌈out/128⌉, ⌈in/128⌉]; a factor |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError


def scaled_dense(
    name: str,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    zero: Tensor | None = None,
    block: tuple[int, int] | None = None,
) -> Tensor:
    """The weight [out, in] in `dtype`, rounded once. Scales cover equal parts, or `block`s of which the last may be cut.

    Raises SutureError when the scales do not fit the weight.
    """
    out, in_features = weight.shape
    per_weight = _spread(name, scale.float(), out, in_features, block)
    values = weight.float()
    if zero is not None:
        values = values - _spread(name, zero.float(), out, in_features, block)
    return (values * per_weight).to(dtype)


def _spread(name: str, scale: Tensor, out: int, in_features: int, block: tuple[int, int] | None) -> Tensor:
    """Scales broadcast to [out, in]."""
    if scale.numel() == 1:
        return scale.view(1, 1)
    rows, cols = scale.shape if scale.dim() == 2 else (len(scale), 1)
    scale = scale.view(rows, cols)
    height, width = block or (out // rows, in_features // cols)
    covers = rows == -(-out // max(height, 1)) and cols == -(-in_features // max(width, 1))
    if not covers or (block is None and (rows * height != out or cols * width != in_features)):
        raise SutureError(f"{name}: scales of shape {[rows, cols]} do not fit a weight of {[out, in_features]}")
    return scale.repeat_interleave(height, 0)[:out].repeat_interleave(width, 1)[:, :in_features]
