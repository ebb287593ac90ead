"""Train a block's weights so that it puts out what the original block did, from what the blocks before it now put out.

Every tensor W is trained as W0 + s D with s the root mean square of W0 and D from zero, so that a rate means the same
share of every tensor, those too whose numbers are as small as 2^-24. What the forward sees is rounded to the stored dtype;
the gradient passes (straight through). The loss is the mean over tokens of ‖y - y*‖² / ‖y*‖².
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calibrate.fit import Fitted, fit_windows, relative_error, stored

Forward = Callable[[Mapping[str, Tensor], Any], Tensor]
"""(weights by name, one of the inputs) -> the block's outputs, differentiable."""


@dataclass(frozen=True)
class HealOptions:
    """How to train one block."""

    epochs: int
    rate: float  # per step, in root mean squares of each tensor
    seed: int


def heal_block(
    forward: Forward,
    weights: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    inputs: Sequence[Any],
    targets: Sequence[Tensor],
    held: int,
    options: HealOptions,
) -> Fitted[dict[str, Tensor]]:
    """Train `weights` (float32, stored as `dtypes` say) on windows inputs -> targets; targets are [B, T, hidden] float32,
    and of the inputs `forward` alone knows what they are.

    The last `held` windows choose the epoch. The result's state are the weights in their stored dtypes.
    """
    sizes = {name: weight.pow(2).mean().sqrt().clamp_min(1e-30) for name, weight in weights.items()}
    moves = {name: torch.zeros_like(weight).requires_grad_() for name, weight in weights.items()}

    def now() -> dict[str, Tensor]:
        return {name: stored(weight + sizes[name] * moves[name], dtypes[name]) for name, weight in weights.items()}

    def loss(window: int) -> Tensor:
        return relative_error(forward(now(), inputs[window]), targets[window])

    def state() -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: value.to(dtypes[name]) for name, value in now().items()}

    groups: list[dict[str, object]] = [{"params": list(moves.values()), "lr": options.rate}]
    return fit_windows(loss, groups, state, windows=len(inputs), held=held, epochs=options.epochs, seed=options.seed)
