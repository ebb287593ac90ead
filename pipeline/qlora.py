"""The base that a QLoRA run saw, and what is left of its adapter when the merged weights are quantized on the same grid.

Training on 4-bit weights fits the adapter to Q(W), not to W. Both can be merged into: `original` adds the change to W,
`dequantized` to Q(W). The second lies on Q's grid, so a change smaller than its steps is rounded away when the result is
quantized that way again: the adapter vanishes. How much survives is measured here: <Q(W') - W, dW> / <dW, dW>.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibrate.skeleton import open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.reader import Checkpoint
from ..checkpoint.source import PlannedSource, TensorSource
from ..lora.settings import MergeSettings
from ..quant.bitsandbytes import blockwise_from, quantize_4bit
from ..quant.decode import DenseView, dense_view
from ..quant.rtn import rtn
from ..quant.scheme import STORAGE

NF4_BLOCK = 64  # numbers that share a scale, as bitsandbytes quantizes a model on loading


@dataclass(frozen=True)
class AsTrained:
    """A model whose linear layers read as bitsandbytes' NF4 makes them: quantized and dequantized, in their own dtype."""

    base: TensorSource
    transposed: Mapping[str, bool]  # tensors that go through NF4 -> whether they are stored [in, out]
    double: bool  # double quantization of the scales

    @property
    def source(self) -> str:
        return self.base.source

    @property
    def config(self) -> dict[str, object]:
        return self.base.config

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.base.shapes

    @property
    def dtypes(self) -> Mapping[str, str]:
        return self.base.dtypes

    def side(self, name: str) -> bytes | None:
        return self.base.side(name)

    def read(self, name: str) -> Tensor:
        W = self.base.read(name)
        return self.again(name, W) if name in self.transposed else W

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        return self.read(name)[list(rows)] if name in self.transposed else self.base.read_rows(name, rows)

    def again(self, name: str, W: Tensor) -> Tensor:
        """W through NF4 and back."""
        return _nf4(W.T, self.double).T.contiguous() if self.transposed[name] else _nf4(W, self.double)


def _nf4(W: Tensor, double: bool) -> Tensor:
    return quantize_4bit(W.contiguous(), "nf4", NF4_BLOCK, double).dequantize().to(W.dtype)


def merge_base(source: TensorSource, settings: MergeSettings) -> TensorSource:
    """What adapters are added to. Raises SutureError when it is not clear which base is meant."""
    if not isinstance(source, Checkpoint | PlannedSource):
        return source
    view = dense_view(source, weights_alone=True)
    if isinstance(view, DenseView):
        if settings.base == "original":
            raise SutureError(
                f"{source.source}: is quantized, and base: original asks for the weights that it was made from",
                "give that checkpoint, or set base: dequantized to merge into what this one dequantizes to",
            )
        return view
    if settings.base == "original":
        return source
    layout = open_skeleton(source).layout
    chosen = {linear.place.tensor: linear.conv1d for linear in layout.linears if linear.place.expert is None}
    return AsTrained(source, chosen, settings.quantization == "nf4-double")


def regrid(base: TensorSource, name: str) -> Callable[[Tensor], Tensor] | None:
    """Quantizing the tensor `name` again as it was, and back; None for a tensor or a format that this is not known of."""
    if isinstance(base, AsTrained):
        return (lambda W: base.again(name, W)) if name in base.transposed else None
    packed = base.packed.get(name) if isinstance(base, DenseView) else None
    if packed is None or not isinstance(base, DenseView):
        return None
    scheme = packed.scheme
    if scheme is not None:
        return lambda W: rtn(W.float(), scheme, STORAGE[packed.dtype]).dequantize()
    states = [part for part in packed.parts if ".quant_state." in part]
    if not states:
        return None
    was = blockwise_from({part: base.checkpoint.read(part) for part in packed.parts}, name, base.source)
    double = was.nested_absmax is not None

    def again(W: Tensor) -> Tensor:
        straight = W if tuple(W.shape) == was.shape else W.T
        new = quantize_4bit(straight.to(STORAGE[was.dtype]).contiguous(), was.kind, was.block, double).dequantize()
        return new if straight is W else new.T

    return again


@torch.no_grad()
def survival(base: Tensor, merged: Tensor, again: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """(<Q(W') - W, dW>, <dW, dW>) for W on Q's grid and W' = W + dW."""
    delta = merged.float() - base.float()
    return float(((again(merged).float() - base.float()) * delta).sum()), float(delta.square().sum())
