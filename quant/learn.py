"""Train a block's rounding: what to round each weight to, and the scales, so that the block puts out what it did.

At 2 and 3 bits, minimizing each layer's own error is not enough: errors of a block's layers can cancel one another, and
what matters of a layer is what the nonlinearities let through. So all quantized layers of a block are trained together
(block-wise training as in EfficientQAT's Block-AP, arXiv 2407.11062, and BRECQ, arXiv 2102.05426; here from GPTQ's codes,
in code units, and on few tokens). For every weight there is a latent u, in units of its group's scale s:

    q = clamp(round(u), 0, 2^b - 1)        ŵ = (q - z) · s

u and s are trained by Adam through the rounding as if it were the identity inside the range and flat outside (straight
through); z stays. The inputs come from the quantized blocks before, the targets from the original model, so a block also
learns to undo errors before it. The loss is the mean over tokens of ‖y - y*‖² / ‖y*‖²: the norm that reads y next divides
by that size, and few tokens whose states are a thousand times larger than others' would be all that a plain mean sees.

Latents start at GPTQ's codes, moved towards the original weight: a weight that lies near a boundary needs little to cross
it. Windows held out from training decide which epoch is kept, GPTQ's start among them: the result is never worse on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calibrate.fit import fit_windows, relative_error, stored
from .scheme import Quantized, Scheme


@dataclass(frozen=True)
class LearnOptions:
    """How to train one block."""

    epochs: int = 4  # passes over the training windows; the rate falls to zero over all of them
    rate: float = 0.02  # of the latents, in codes per step
    scale_rate: float = 0.005  # of the scales, each relative to what it was at the start, per step
    lean: float = 0.5  # how far a latent starts from its code towards the original weight; 1: all the way
    held_out: float = 0.125  # share of the windows that choose the epoch
    seed: int = 0


@dataclass(frozen=True)
class Start:
    """Where a layer's training starts."""

    weight: Tensor  # the original [out, in]
    quantized: Quantized


@dataclass(frozen=True)
class Learned:
    """What training found."""

    quantized: dict[str, Quantized]
    before: float  # loss on the held-out windows at the start
    after: float  # and of what was kept
    epoch: int  # the epoch kept; 0: the start
    moved: float  # share of the codes that changed


Forward = Callable[[Mapping[str, Tensor], Any], Tensor]
"""(dense weights [out, in] by layer, one of the inputs) -> the block's outputs, differentiable."""


def learn(
    forward: Forward,
    starts: Mapping[str, Start],
    inputs: Sequence[Any],
    targets: Sequence[Tensor],
    options: LearnOptions,
) -> Learned:
    """Train the layers of `starts` on windows inputs -> targets; targets are [B, T, hidden] float32, and of the inputs
    `forward` alone knows what they are.

    Deterministic under `options.seed` and a number of threads. Raises SutureError when holding windows out leaves none.
    """
    layers = {name: _Layer.of(start, options.lean) for name, start in starts.items()}

    def loss(window: int) -> Tensor:
        weights = {name: layer.weight() for name, layer in layers.items()}
        return relative_error(forward(weights, inputs[window]), targets[window])

    fitted = fit_windows(
        loss,
        [group for layer in layers.values() for group in layer.parameters(options)],
        lambda: {name: layer.state() for name, layer in layers.items()},
        windows=len(inputs),
        held=max(1, round(options.held_out * len(inputs))),  # the last windows
        epochs=options.epochs,
        seed=options.seed,
    )
    quantized = {name: layers[name].quantized(*state) for name, state in fitted.state.items()}
    moved = sum(int((quantized[name].codes != start.quantized.codes).sum()) for name, start in starts.items())
    total = sum(start.quantized.codes.numel() for start in starts.values())
    return Learned(quantized, fitted.before, fitted.after, fitted.epoch, moved / total)


class _Round(torch.autograd.Function):
    """Nearest code; the gradient passes where the latent is inside the range."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, levels: int) -> Tensor:
        ctx.save_for_backward((latent >= -0.5) & (latent <= levels + 0.5))
        return latent.round().clamp_(0, levels)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return grad_outputs[0] * inside, None


@dataclass(frozen=True)
class _Layer:
    """The trained state of one layer."""

    latent: Tensor  # [out, in] float32, in codes
    start_scale: Tensor  # [out, groups] float32
    factor: Tensor  # [out, groups] float32, which the start's scale is multiplied by
    zero: Tensor  # [out, groups] float32, not trained
    scheme: Scheme
    dtype: torch.dtype  # of the stored scales
    asymmetric: bool

    @classmethod
    def of(cls, start: Start, lean: float) -> _Layer:
        quantized = start.quantized
        scale = quantized.scale.float()
        zero = torch.full_like(scale, quantized.scheme.middle) if quantized.zero is None else quantized.zero.float()
        rows, groups = scale.shape
        codes = quantized.codes.float()
        original = (start.weight.float().view(rows, groups, -1) / scale[..., None] + zero[..., None]).view_as(codes)
        latent = codes + lean * (original - codes).clamp(-0.5, 0.5)
        asymmetric = quantized.zero is not None
        latent.requires_grad_()
        factor = torch.ones_like(scale).requires_grad_()
        return cls(latent, scale, factor, zero, quantized.scheme, quantized.scale.dtype, asymmetric)

    def parameters(self, options: LearnOptions) -> list[dict[str, object]]:
        return [
            {"params": [self.latent], "lr": options.rate},
            {"params": [self.factor], "lr": options.scale_rate},
        ]

    def weight(self) -> Tensor:
        """Dense [out, in] as `Quantized.dequantize` gives it, in float32; differentiable."""
        codes = _Round.apply(self.latent, self.scheme.levels)
        scale = stored(self.start_scale * self.factor, self.dtype)
        assert isinstance(codes, Tensor)
        rows, groups = scale.shape
        dense = (codes.view(rows, groups, -1) - self.zero[..., None]) * scale[..., None]
        return stored(dense, self.dtype).view(rows, -1)

    def state(self) -> tuple[Tensor, Tensor]:
        codes = self.latent.detach().round().clamp_(0, self.scheme.levels)
        return codes.to(torch.uint8), (self.start_scale * self.factor.detach()).to(self.dtype)

    def quantized(self, codes: Tensor, scale: Tensor) -> Quantized:
        return Quantized(codes, scale, self.zero.to(torch.uint8) if self.asymmetric else None, self.scheme)
