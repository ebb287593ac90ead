"""The training of a whole model as every process of it does it: the student in memory, the teacher's predictions in files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..calibrate.crew import Crew
from ..calibrate.memory import release_memory
from ..calibrate.skeleton import Skeleton, open_skeleton
from ..checkpoint.layout import Linear
from ..checkpoint.reader import open_checkpoint
from ..lora.attach import draw
from ..lora.compose import Factors
from ..lora.distill import forward_kl, next_token
from ..lora.settings import HealSettings
from ..lora.train import Team, TrainOptions, train
from ..quant.decode import dense_view
from .heal_rounding import round_in_loop
from .judge import Split

_NOTHING = 1e-7  # nats per token: a divergence that float32 sums leave between equal models


@dataclass(frozen=True)
class Job:
    """What a process needs to know to train with the others."""

    student: Path  # its directory, quantized or not
    device: str
    parts: Split
    settings: HealSettings
    linears: tuple[Linear, ...]  # that get factors
    names: tuple[str, ...]  # parameters that are trained themselves, when none do
    teacher: tuple[Path, Path]  # what `top_k` kept: ids and log-probabilities, [sequences, length, k]
    saved: Path  # the last checkpoint, if there is one

    def help(self, crew: Crew) -> None:
        """What the other processes do: train, and keep nothing."""
        student = open_skeleton(dense_view(open_checkpoint(str(self.student))), device=self.device)
        train_job(self, student, crew, lambda state: None, lambda steps, total: steps)


@dataclass(frozen=True)
class Trained:
    """What training left: factors by layer (lora), or parameters by module name (full)."""

    factors: dict[str, Factors]  # by the linear layer's module
    weights: dict[str, Tensor]
    curve: list[dict[str, float]]
    steps: int
    tokens: int


def steps_of(settings: HealSettings, length: int) -> int:
    """As many as the budget of tokens has room for, at least one."""
    return max(1, settings.value("tokens") // (settings.value("batch") * length))


def options_of(settings: HealSettings, length: int) -> TrainOptions:
    return TrainOptions(
        steps=steps_of(settings, length),
        batch=settings.value("batch"),
        warmup=settings.value("warmup"),
        checkpoint=settings.value("checkpoint"),
        seed=settings.seed,
        optimizer=settings.value("optimizer"),
        nothing=_NOTHING,
    )


def arithmetic(settings: HealSettings, device: torch.device) -> torch.autocast:
    """In which a forward that is trained on computes; one that only measures stays in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16" and torch.is_grad_enabled())


def train_job(
    job: Job,
    student: Skeleton,
    crew: Crew,
    save: Callable[[dict[str, Any]], None],
    track: Callable[[Iterator[int], int], Iterator[int]],
) -> Trained:
    """Train factors for the job's linears, or its named parameters."""
    settings, text = job.settings, job.parts.text
    n, length = len(job.parts.train), text.ids.shape[1]
    ids, positions = text.batches(1)
    counted, predicted = (torch.from_numpy(x) for x in (job.parts.counted, job.parts.predicted))
    targets = [np.load(file, mmap_mode="r") for file in job.teacher]
    for index in range(student.n_blocks):
        student.load_block(index)
    student.load_head()
    factors = new_factors(student, settings, job.linears) if settings.method == "lora" else {}
    groups = _groups(student, settings, factors, job.names)
    scale = settings.value("alpha") / settings.value("r") if factors else 0.0
    if settings.rounding is None:
        handles: list[Any] = hook_factors(student, factors, scale)
    else:
        handles = list(round_in_loop(student, settings.rounding, factors, scale))
    keep = torch.arange(length)

    def logits(sequence: int) -> Tensor:
        hidden, at = student.embed(ids[sequence], positions[sequence]), positions[sequence]
        with arithmetic(settings, student.device):
            for index in range(student.n_blocks):
                if settings.value("recompute") and torch.is_grad_enabled():
                    hidden = checkpoint(student.block_forward, index, hidden, None, at, use_reentrant=False)
                else:
                    hidden = student.block_forward(index, hidden, positions=at)
            return student.head_forward(hidden, keep)

    def divergence(sequence: int, found: Tensor) -> Tensor:
        of_teacher = (torch.from_numpy(np.array(part[sequence])).to(student.device) for part in targets)
        return forward_kl(found[0], *of_teacher)[counted[sequence].to(student.device)].mean()

    weight = settings.value("next_token")

    def loss(sequence: int) -> Tensor:
        found = logits(sequence)
        total = divergence(sequence, found)
        if weight:
            total = total + weight * next_token(
                found, *(x.to(student.device) for x in (ids[sequence], predicted[sequence]))
            )
        return total

    def held_out(sequence: int) -> Tensor:
        return divergence(sequence, logits(sequence))

    options = options_of(settings, length)
    weights = counted.sum(1).tolist()
    start = torch.load(job.saved, weights_only=True) if job.saved.exists() else None
    team = Team(crew.rank, crew.size, crew.sum)
    curve = train(loss, groups, held_out, weights, n, options, start=start, save=save, track=track, team=team)
    for handle in handles:
        handle.remove()
    done = int(curve[-1]["step"])
    trained = Trained(
        {module: Factors(A.detach().cpu(), B.detach().cpu()) for module, (A, B) in factors.items()},
        {name: student.model.get_parameter(name).detach().cpu() for name in job.names} if not factors else {},
        curve,
        done,
        done * options.batch * length,
    )
    for index in range(student.n_blocks):
        student.free_block(index)
    student.free_head()
    release_memory(4 * sum(math.prod(shape) for shape in student.source.shapes.values()))
    return trained


def new_factors(student: Skeleton, settings: HealSettings, linears: Sequence[Linear]) -> dict[str, list[Tensor]]:
    """Module -> A [r, in], B [out, r], to be trained; B is zero."""
    generator, r = torch.Generator().manual_seed(settings.seed), settings.value("r")
    drawn = {x.module: draw("default", x.out_features, x.in_features, r, generator) for x in linears}
    return {
        module: [part.to(student.device).requires_grad_() for part in (pair.A, pair.B)]
        for module, pair in drawn.items()
    }


def _groups(
    student: Skeleton, settings: HealSettings, factors: Mapping[str, Sequence[Tensor]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Adam's groups: the factors at one rate, or each parameter of `names` at a rate relative to its size."""
    if factors:
        return [{"params": [part for pair in factors.values() for part in pair], "lr": settings.value("rate")}]
    groups = []
    for name in names:
        parameter = student.model.get_parameter(name).requires_grad_()
        size = float(parameter.detach().pow(2).mean().sqrt())
        groups.append({"params": [parameter], "lr": settings.value("rate") * size})
    return groups


def hook_factors(skeleton: Skeleton, factors: Mapping[str, Sequence[Tensor]], scale: float) -> list[Any]:
    """Let layers (module name -> A [r, in], B [out, r]) add scale B A x to what they put out; handles to undo it."""
    return [
        skeleton.model.get_submodule(module).register_forward_hook(_adding(A, B, scale))
        for module, (A, B) in factors.items()
    ]


def _adding(A: Tensor, B: Tensor, scale: float) -> Any:
    """A hook: out + scale x Aᵀ Bᵀ."""

    def add(module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        return out + scale * ((inputs[0] @ A.T) @ B.T)

    return add
