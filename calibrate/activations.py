"""A linear layer's inputs: the ranges that they take, and what is left of them as 8-bit integers.

Integer kernels see x as round(x / s) s. *Dynamic*: s is max |x| / 127.5 of each token, found at run time. *Static*: one
s for all, stored. The arithmetic is that of compressed-tensors' forward, operation by operation, so that a model with
these inputs computes what stock transformers computes from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .skeleton import Skeleton

BITS = 8
HALF_RANGE = (2**BITS - 1) / 2  # of the codes -128..127


@dataclass
class ChannelRanges:
    """Per input channel, over all tokens seen: max |x|, and sum |x| (float64)."""

    largest: Tensor  # [in] float32
    total: Tensor  # [in] float64
    tokens: int = 0

    @classmethod
    def zeros(cls, in_features: int, device: torch.device | str = "cpu") -> ChannelRanges:
        return cls(
            torch.zeros(in_features, device=device), torch.zeros(in_features, dtype=torch.float64, device=device)
        )

    def add(self, x: Tensor) -> None:
        """x: [..., in]."""
        size = x.reshape(-1, x.shape[-1]).abs()
        if size.shape[0]:
            self.largest = torch.maximum(self.largest, size.amax(0))
            self.total += size.sum(0, dtype=torch.float64)
            self.tokens += size.shape[0]

    @property
    def mean(self) -> Tensor:
        """Mean |x| [in], float32."""
        return (self.total / max(self.tokens, 1)).float()


def peak_ratio(largest: Tensor) -> float:
    """How far the widest channel stands out: the largest of max |x| over its median (of the channels in use)."""
    used = largest[largest > 0]
    return float(used.max() / used.median()) if used.numel() else 1.0


def static_scale(largest: float, dtype: torch.dtype) -> Tensor:
    """The stored scale [1] for inputs up to `largest`, rounded to `dtype`."""
    scale = torch.tensor([largest / HALF_RANGE]).to(dtype)
    return scale if float(scale) > 0 else torch.full_like(scale, torch.finfo(dtype).eps)


def through_integers(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """x [..., in] after a round trip through 8-bit integers; `scale` [1], or None: one per token."""
    if scale is None:
        low, high = torch.aminmax(x, dim=-1, keepdim=True)
        scale = torch.maximum(low.abs(), high.abs()) / HALF_RANGE
        scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    else:
        scale = scale.to(x.dtype)
    return (x / scale).clamp_(-(2 ** (BITS - 1)), 2 ** (BITS - 1) - 1).round_().mul_(scale)


def quantize_inputs(skeleton: Skeleton, scales: Mapping[str, Tensor | None]) -> list[RemovableHandle]:
    """From now on the linear modules named (module names) are given their inputs through integers."""
    return [
        skeleton.model.get_submodule(module).register_forward_pre_hook(
            _hook(None if scale is None else scale.to(skeleton.device))
        )
        for module, scale in scales.items()
    ]


def _hook(scale: Tensor | None) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def through(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (through_integers(inputs[0], scale), *inputs[1:])

    return through
