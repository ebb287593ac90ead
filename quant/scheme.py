"""What a quantized weight is: bits, groups, symmetry, and the integer codes themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError


@dataclass(frozen=True)
class Scheme:
    """Uniform integer quantization of a weight [out, in] along its inputs."""

    bits: int  # 2..8
    group_size: int  # inputs that share a scale; -1: one scale per output channel
    symmetric: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise SutureError(f"bits: {self.bits} is outside 2..8")
        if self.group_size != -1 and self.group_size < 1:
            raise SutureError(f"group_size: {self.group_size} is neither positive nor -1 (one scale per channel)")

    @property
    def levels(self) -> int:
        """Highest code; codes are 0..levels."""
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        """The zero point of a symmetric scheme."""
        return 2 ** (self.bits - 1)

    def groups(self, in_features: int) -> int:
        return 1 if self.group_size == -1 else in_features // self.group_size

    def width(self, in_features: int) -> int:
        """Inputs per group."""
        return in_features if self.group_size == -1 else self.group_size

    def divides(self, in_features: int) -> bool:
        return in_features % self.width(in_features) == 0

    def bits_per_weight(self, in_features: int, scale_bits: int = 16) -> float:
        """Storage per weight with scales and zero points."""
        overhead = scale_bits + (0 if self.symmetric else self.bits)
        return self.bits + overhead / self.width(in_features)


@dataclass(frozen=True)
class Activations:
    """How a layer's inputs are rounded: to 8 bits, symmetric; `dynamic`: one scale per token, else one for all, stored."""

    dynamic: bool = True


@dataclass(frozen=True)
class Quantized:
    """A quantized weight: w = (code - zero) * scale, group by group."""

    codes: Tensor  # uint8 [out, in], 0..levels
    scale: Tensor  # storage dtype [out, groups]
    zero: Tensor | None  # uint8 [out, groups]; None: symmetric, the scheme's middle
    scheme: Scheme

    def dequantize(self) -> Tensor:
        """The weight [out, in] in the scales' dtype, as a loader computes it: one rounding, after the product."""
        dense = torch.empty(self.codes.shape, dtype=self.scale.dtype, device=self.codes.device)
        for some in row_pieces(*self.codes.shape):
            dense[some] = self.rows(some)
        return dense

    def rows(self, some: slice) -> Tensor:
        """These rows of `dequantize`."""
        scale = self.scale[some].float()[..., None]
        zero = self.scheme.middle if self.zero is None else self.zero[some].float()[..., None]
        codes = self.codes[some].view(*scale.shape[:2], -1).float()
        # (code - zero) is exact in every storage dtype, so the fp32 product rounded once is the storage dtype's product
        return codes.sub_(zero).mul_(scale).to(self.scale.dtype).flatten(1)


def quantize_to_grid(weight: Tensor, scale: Tensor, zero: Tensor | float, levels: int) -> Tensor:
    """Nearest codes (float) of `weight` on the grid; arguments broadcast."""
    return (weight / scale + zero).round_().clamp_(0, levels)


def row_pieces(rows: int, cols: int, weights: int = 1 << 20) -> Iterator[slice]:
    """Rows of a matrix some at a time, about so many weights: what is computed of them on the way is never a whole matrix,
    which may be as large as the block it comes from."""
    step = max(1, weights // max(cols, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def split_rows(quantized: Quantized, sizes: list[int]) -> list[Quantized]:
    """Undo a concatenation of weights along their outputs."""
    zeros = [None] * len(sizes) if quantized.zero is None else list(quantized.zero.split(sizes))
    parts = zip(quantized.codes.split(sizes), quantized.scale.split(sizes), zeros, strict=True)
    return [Quantized(codes, scale, zero, quantized.scheme) for codes, scale, zero in parts]


STORAGE: dict[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
