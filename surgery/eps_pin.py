"""Make an RMSNorm that a stock class insists on multiply by a constant.

RMSNorm(c) = γ c / sqrt(mean c² + ε). With c scaled down by 2^-k until mean c² 4^-k ≤ 2^-24 ε, float32 cannot see the
mean beside ε: the norm is multiplication by γ/√ε. Powers of two cost no precision in bfloat16 and float32; float16 has
no such exponents. γ brings the numbers, which are what is cached, back to about their size.

k needs no data: the block's input is g∘u with |u|² ≤ D (it comes out of an RMSNorm itself), so |W x + b| is at most
√D ‖W diag(g)‖₂ + |b|, for any text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6  # of the norm inside every stock MLA class, whatever the config says
_SHARE = 2.0**-24
_LARGEST_EXPONENT = 80  # 2^-80 times any weight is still a normal bfloat16


@dataclass(frozen=True)
class Pin:
    """Rows that feed the norm ×`down`, the norm's weight `gain`, columns that read it ×`up`."""

    exponent: int

    @property
    def down(self) -> float:
        return 2.0**-self.exponent

    @property
    def gain(self) -> float:
        return 2.0 ** round(math.log2(math.sqrt(EPS) / self.down))

    @property
    def up(self) -> float:
        return math.sqrt(EPS) / (self.down * self.gain)


def pin(rows: Tensor, bias: Tensor, gain: Tensor) -> Pin:
    """rows: [r, D] and bias [r] that feed the norm; gain: [D], weight of the RMSNorm before them. Float64.

    Raises ValueError when no exponent fits, which only damaged weights bring about.
    """
    largest = float(torch.linalg.matrix_norm(rows * gain, 2)) * math.sqrt(rows.shape[1])
    mean = (largest + float(torch.linalg.vector_norm(bias))) ** 2 / rows.shape[0]
    exponent = max(0, math.ceil(0.5 * math.log2(max(mean, 1e-300) / (_SHARE * EPS))))
    if exponent > _LARGEST_EXPONENT:
        raise ValueError(f"latents of up to {math.sqrt(mean):.3g} are too large to pin the norm's ε")
    return Pin(exponent)
