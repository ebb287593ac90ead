"""Products of linear layers: in less time, or in less memory.

Products of float32 layers on the CPU go through oneDNN, which torch ships beside the library that it calls.

`nn.functional.linear` calls MKL there. On processors without AVX-512 (where this was timed) oneDNN takes 0.8 of its time
at a thousand tokens; both add up float32 in some order, and only calibration, whose sums are statistics, is given to it:
what verification compares with stock transformers is computed by the same library there and here, since the last bit
decides where a model rounds its inputs or chooses an expert. Where gradients are wanted, on other devices and dtypes, and
in builds of torch without oneDNN, layers compute as they always do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_PIECE = 1 << 22  # numbers of a weight that are in the dtype of its inputs at once


def product_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times weight [out, in], of any dtype and device, which is widened to x's some rows at a time."""
    n, step = len(weight), max(1, _PIECE // weight.shape[1])
    y = x.new_empty(*x.shape[:-1], n)
    wide = x.new_empty(min(step, n), weight.shape[1])
    for start in range(0, n, step):
        rows = weight[start : start + step]
        y[..., start : start + step] = nn.functional.linear(x, wide[: len(rows)].copy_(rows))
    return y if bias is None else y.add_(bias)


class ProductAsRead(torch.autograd.Function):
    """`product_by_rows` with a weight that is read for it, and again for the gradient of x: nothing of it stays."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, read: Callable[[], Tensor], bias: Tensor | None) -> Tensor:
        """x [..., in], read() [out, in], which gets no gradient, nor does bias; in x's dtype, or in autocast's."""
        ctx.read, ctx.dtype = read, x.dtype
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
            bias = None if bias is None else bias.to(x.dtype)
        return product_by_rows(x, read(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (g,) = grads
        weight = ctx.read()
        n, step = len(weight), max(1, _PIECE // weight.shape[1])
        wide = g.new_empty(min(step, n), weight.shape[1])
        found = g.new_zeros(*g.shape[:-1], weight.shape[1])
        for start in range(0, n, step):
            rows = weight[start : start + step]
            found += g[..., start : start + step] @ wide[: len(rows)].copy_(rows)
        return found.to(ctx.dtype), None, None


class Product(nn.Linear):
    """nn.Linear, computed by oneDNN where that is possible."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        weight = self.weight
        if not HAVE_ONEDNN or torch.is_grad_enabled() or input.dtype != torch.float32 or input.device.type != "cpu":
            return nn.functional.linear(input, weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input, weight, self.bias, "none", [], "")


@contextlib.contextmanager
def through_onednn(model: nn.Module) -> Iterator[None]:
    """Let the model's linear layers compute so while inside."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__class__ = Product
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear


def _have_onednn() -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        x, w = torch.ones(2, 3), torch.ones(4, 3)
        return bool((torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") == 3).all())
    except (RuntimeError, NotImplementedError):
        return False


HAVE_ONEDNN = _have_onednn()
