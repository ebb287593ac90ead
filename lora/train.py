"""Train parameters on sequences, so that a run killed at any moment goes on with the same numbers.

Which sequences a step sees depends on the seed and the step alone; a checkpoint holds the parameters, Adam's moments and
the curve. So the curve of a run that was stopped is, to the bit, that of one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError
from .distill import rate_at


@dataclass(frozen=True)
class TrainOptions:
    """How to train. A group's own rate is multiplied by the schedule."""

    steps: int
    batch: int  # sequences per step, of all processes; their gradients are added up one by one
    warmup: float
    checkpoint: int  # steps between checkpoints
    seed: int
    optimizer: str = "adamw"  # or adamw8bit
    nothing: float = 0.0  # a start whose held-out loss is below this is left as it is


@dataclass(frozen=True)
class Team:
    """Which of how many processes this is, that train together; `add` replaces tensors by their sums over all."""

    rank: int = 0
    size: int = 1
    add: Callable[[Sequence[Tensor]], None] = lambda tensors: None


def train(
    loss: Callable[[int], Tensor],
    groups: Sequence[dict[str, Any]],
    held_out: Callable[[int], Tensor],
    weights: Sequence[float],
    sequences: int,
    options: TrainOptions,
    *,
    start: dict[str, Any] | None,
    save: Callable[[dict[str, Any]], None],
    track: Callable[[Iterator[int], int], Iterator[int]],
    team: Team | None = None,
) -> list[dict[str, float]]:
    """Minimize the mean of `loss(sequence)` over the first `sequences`; the parameters are left as trained. Returns the
    curve, which beside the loss says the mean of `held_out` over the others.

    `weights`: how many of its tokens a sequence's value is the mean of; means are over tokens. `start`: what `save` was
    given last, or None; process 0 alone saves. Raises SutureError when the loss is not finite.
    """
    team = team or Team()
    parameters: list[Tensor] = [p for group in groups for p in group["params"]]
    adam = optimizer_of(options.optimizer, groups)
    rates = [group["lr"] for group in adam.param_groups]
    curve: list[dict[str, float]] = []
    done, since = 0, []

    def held() -> float:
        """Of the sequences that this process takes, summed over all."""
        rest = range(sequences, len(weights))
        with torch.no_grad():
            values = [float(held_out(s)) * weights[s] for s in rest[team.rank :: team.size]]
        total = torch.tensor([sum(values)], dtype=torch.float64)
        team.add([total])
        return float(total) / sum(weights[s] for s in rest)

    if start is None:
        curve.append({"step": 0, "held_out_kl": held()})
        if curve[0]["held_out_kl"] < options.nothing:
            return curve
    else:
        done, curve = int(start["step"]), list(start["curve"])
        adam.load_state_dict(start["adam"])
        with torch.no_grad():
            for parameter, value in zip(parameters, start["parameters"], strict=True):
                parameter.copy_(value)
    order = _order(sequences, options, done)
    for step in track(iter(range(done, options.steps)), options.steps - done):
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate * rate_at(step, options.steps, options.warmup)
        adam.zero_grad(set_to_none=True)
        chosen = [next(order) for _ in range(options.batch)]
        tokens = sum(weights[s] for s in chosen)
        total = torch.zeros(1)
        for sequence in chosen[team.rank :: team.size]:
            with torch.enable_grad():
                part = loss(sequence) * (weights[sequence] / tokens)
                part.backward()
            total += part.detach().cpu()
        for parameter in parameters:
            if parameter.grad is None:  # of an expert that no token went to
                parameter.grad = torch.zeros_like(parameter)
        total = total.to(parameters[0].device)
        team.add([total, *(p.grad for p in parameters if p.grad is not None)])
        if not float(total) < float("inf"):
            raise SutureError(
                f"training: the loss is {float(total)} at step {step + 1} of {options.steps}", "use a lower rate"
            )
        adam.step()
        since.append(float(total))
        if (step + 1) % options.checkpoint == 0 or step + 1 == options.steps:
            curve.append({"step": step + 1, "loss": sum(since) / len(since), "held_out_kl": held()})
            since.clear()
            if team.rank == 0:
                save(
                    {
                        "step": step + 1,
                        "parameters": [parameter.detach().cpu() for parameter in parameters],
                        "adam": adam.state_dict(),
                        "curve": curve,
                    }
                )
    return curve


def optimizer_of(name: str, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW without decay; `adamw8bit`: its moments as 8-bit codes, by bitsandbytes. Raises SutureError without that."""
    if name == "adamw":
        return torch.optim.AdamW(list(groups), betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    # eps: a second moment that its code rounds to zero must not make a step of any size
    return _bitsandbytes().optim.AdamW8bit(list(groups), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def check_optimizer(name: str) -> None:
    """Raises SutureError when it is not to be had."""
    if name == "adamw8bit":
        _bitsandbytes()


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except Exception as error:  # ImportError, or what its native library raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SutureError(
            f"heal: optimizer: adamw8bit needs bitsandbytes, which cannot be imported: {reason}",
            "pip install bitsandbytes, or use optimizer: adamw",
        ) from error
    return bitsandbytes


def _order(sequences: int, options: TrainOptions, done: int) -> Iterator[int]:
    """Sequence numbers from step `done` on: every pass over them in another order."""
    epoch, skipped = divmod(done * options.batch, sequences)
    while True:
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
        yield from torch.randperm(sequences, generator=generator).tolist()[skipped:]
        epoch, skipped = epoch + 1, 0
