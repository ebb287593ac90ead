"""The base that a QLoRA run saw, and what is left of its adapter when the merged weights are quantized on the same grid.

Training on 4-bit weights fits the adapter to Q(W), not to W. Both can be merged into: `original` adds the change to W,
`dequantized` to Q(W). The second lies on Q's grid, so a change smaller than its steps is rounded away when the result is
quantized that way again: the adapter vanishes. How much survives is measured here: <Q(W') - W, dW> / <dW, dW>.

Q is NF4 (arXiv 2305.14314) in blocks of 64, as the step `nf4` writes it without double quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from ..calibrate.skeleton import open_layout
from ..checkpoint.errors import SutureError
from ..checkpoint.source import TensorSource, side_file
from ..lora.settings import MergeSettings
from ..quant.bitsandbytes import quantize_4bit
from ..quant.rtn import rtn
from ..quant.scheme import Scheme

BLOCK = 64


@dataclass(frozen=True)
class AsTrained:
    """A model whose linear layers read as NF4 makes them: quantized and dequantized, in their own dtype."""

    base: TensorSource
    transposed: Mapping[str, bool]  # tensors that go through NF4 -> whether they are stored [in, out]

    @property
    def source(self) -> str:
        return self.base.source

    @property
    def config(self) -> dict[str, Any]:
        return self.base.config

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.base.shapes

    @property
    def dtypes(self) -> Mapping[str, str]:
        return self.base.dtypes

    def side(self, name: str) -> bytes | None:
        return side_file(self.base, name)

    def read(self, name: str) -> Tensor:
        W = self.base.read(name)
        return self.again(name, W) if name in self.transposed else W

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        return self.read(name)[list(rows)] if name in self.transposed else self.base.read_rows(name, rows)

    def again(self, name: str, W: Tensor) -> Tensor:
        """W through NF4 and back."""
        return nf4(W.T).T.contiguous() if self.transposed[name] else nf4(W)


def nf4(W: Tensor) -> Tensor:
    """W [out, in] through NF4 and back, in its own dtype."""
    return quantize_4bit(W.contiguous(), "nf4", BLOCK, False).dequantize()


def rounding_of(name: str, settings: BaseModel) -> Callable[[Tensor], Tensor]:
    """W [out, in] as a step that quantizes leaves it, rounded to nearest (GPTQ and others choose codes better, on the same
    steps)."""
    if name in ("nf4", "fp4"):
        size = int(getattr(settings, "block_size", BLOCK))
        return lambda W: quantize_4bit(W.contiguous(), name, size, False).dequantize()  # type: ignore[arg-type]
    bits, group = getattr(settings, "bits", 8), getattr(settings, "group_size", -1)
    scheme = Scheme(
        int(bits) if isinstance(bits, int | float) else 8, int(group), bool(getattr(settings, "symmetric", True))
    )
    return lambda W: rtn(W, scheme, W.dtype).dequantize() if scheme.divides(W.shape[1]) else W


def merge_base(source: TensorSource, settings: MergeSettings) -> TensorSource:
    """What adapters are added to."""
    if settings.base == "original":
        return source
    layout = open_layout(source)
    if layout.family.own_linear:
        raise SutureError(
            f"base: dequantized: bitsandbytes leaves {layout.family.model_type}'s {layout.family.own_linear} as it is ("
            "not nn.Linear), so the original is what a QLoRA run saw",
            "use base: original",
        )
    chosen = {linear.place.tensor: linear.conv1d for linear in layout.linears if linear.expert is None}
    return AsTrained(source, chosen)


@torch.no_grad()
def survival(base: Tensor, merged: Tensor, again: Tensor) -> tuple[float, float]:
    """(<Q(W') - W, dW>, <dW, dW>) for W on Q's grid, W' = W + dW, and Q(W')."""
    delta = merged.float() - base.float()
    return float(((again.float() - base.float()) * delta).sum()), float(delta.square().sum())
