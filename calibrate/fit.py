"""Train something small on windows of calibration text, and keep the best of what was seen on windows held out.

Shared by trained rounding and by healing: Adam, one window a step, a rate that falls to zero over all steps. Windows held
out from training decide which epoch is kept, the start among them: the result is never worse on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError

S = TypeVar("S")


@dataclass(frozen=True)
class Fitted(Generic[S]):
    """What training found."""

    state: S
    before: float  # loss on the held-out windows at the start
    after: float  # and of what was kept
    epoch: int  # the epoch kept; 0: the start


def fit_windows(
    loss: Callable[[int], Tensor],
    parameters: Sequence[dict[str, object]],
    state: Callable[[], S],
    *,
    windows: int,
    held: int,
    epochs: int,
    seed: int,
) -> Fitted[S]:
    """Minimize `loss(window)` over `parameters` (Adam's groups, each with its rate); `state()` reads what to keep.

    The last `held` of the `windows` are held out. Deterministic under `seed` and a number of threads. A start without any
    loss on them is kept as it is. Raises SutureError when holding windows out leaves none.
    """
    n = windows - held
    if n < 1:
        raise SutureError(
            f"{windows} calibration sequences, of which {held} are held out, leave none to train on",
            "give more samples",
        )

    def held_out() -> float:
        with torch.no_grad():
            return sum(float(loss(window)) for window in range(n, windows)) / held

    adam = torch.optim.Adam(list(parameters), betas=(0.9, 0.95), eps=1e-12)
    rates = [group["lr"] for group in adam.param_groups]
    generator = torch.Generator().manual_seed(seed)
    before = best = held_out()
    kept, epoch_kept, step = state(), 0, 0
    for epoch in range(1, epochs + 1 if before > 0 else 1):
        for window in torch.randperm(n, generator=generator).tolist():
            falling = 0.5 * (1 + math.cos(math.pi * step / (epochs * n)))
            for group, rate in zip(adam.param_groups, rates, strict=True):
                group["lr"] = falling * rate
            adam.zero_grad(set_to_none=True)
            with torch.enable_grad():
                loss(window).backward()
            adam.step()
            step += 1
        now = held_out()
        if now < best:
            best, epoch_kept, kept = now, epoch, state()
    return Fitted(kept, before, best, epoch_kept)


def relative_error(out: Tensor, target: Tensor) -> Tensor:
    """Mean over tokens of ‖y - y*‖² / ‖y*‖²; out, target [..., hidden]."""
    size = target.pow(2).sum(-1).clamp_min(torch.finfo(target.dtype).tiny)
    return ((out - target).pow(2).sum(-1) / size).mean()


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 as it will be stored, or a loader computes it; the gradient passes as if nothing were rounded."""
    out = _Stored.apply(value, dtype)
    assert isinstance(out, Tensor)
    return out
