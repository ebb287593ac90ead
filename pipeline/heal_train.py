"""The training of a whole model as every process of it does it: the student in memory, the teacher's predictions in files."""

from __future__ import annotations

import contextlib
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

PIECE = 1 << 22  # logits that are there at once when they are made again
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
    with contextlib.ExitStack() as stack:
        if settings.value("weights") == "stored":
            stack.enter_context(student.reading_as_needed())
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
        for handle in handles:
            stack.callback(handle.remove)
        lesson = Lesson(job, student)
        options = options_of(settings, length)
        start = torch.load(job.saved, weights_only=True) if job.saved.exists() else None
        team = Team(crew.rank, crew.size, crew.sum)
        curve = train(
            lesson.loss,
            groups,
            lesson.held_out,
            lesson.weights,
            n,
            options,
            start=start,
            save=save,
            track=track,
            team=team,
        )
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


class Lesson:
    """What a sequence costs the student, whose weights are loaded: its divergence from the teacher, and more."""

    def __init__(self, job: Job, student: Skeleton) -> None:
        text, self.student, self.settings = job.parts.text, student, job.settings
        self.ids, self.positions = text.batches(1)
        self.counted, predicted = (torch.from_numpy(x) for x in (job.parts.counted, job.parts.predicted))
        self.weights: list[int] = self.counted.sum(1).tolist()  # tokens of each sequence
        self.teacher = [np.load(file, mmap_mode="r") for file in job.teacher]
        ids = torch.from_numpy(text.ids).long()
        self.targets = torch.where(predicted, ids, -100).roll(-1, 1)  # after each token; a first one is never predicted
        vocabulary = student.source.shapes[student.layout.embedding][0]
        self.piece = max(16, PIECE // vocabulary)  # tokens

    def loss(self, sequence: int) -> Tensor:
        """To be minimized."""
        divergence, nll = self._found(sequence)
        weight = self.settings.value("next_token")
        if not weight:
            return divergence
        tokens = (self.targets[sequence] != -100).sum().clamp_min(1).to(nll.device)
        return divergence + weight * nll / tokens

    def held_out(self, sequence: int) -> Tensor:
        """Divergence, in nats per token that counts."""
        return self._found(sequence)[0]

    def _found(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Mean divergence over the tokens that count, and the negative log-likelihood of those to be predicted, in all."""
        hidden, at = self.student.embed(self.ids[sequence], self.positions[sequence]), self.positions[sequence]
        small = self.settings.value("recompute")

        def run(part: Callable[..., Any], *given: Any) -> Any:
            again = small and torch.is_grad_enabled()
            return checkpoint(part, *given, use_reentrant=False) if again else part(*given)

        with arithmetic(self.settings, self.student.device):
            for index in range(self.student.n_blocks):
                hidden = run(self.student.block_forward, index, hidden, None, at)
            length = hidden.shape[1]
            pieces = torch.arange(length).split(self.piece if small else length)
            found = [run(self._of_piece, hidden, piece, sequence) for piece in pieces]
        divergence, nll = (torch.stack(parts).sum() for parts in zip(*found, strict=True))
        return divergence / self.weights[sequence], nll

    def _of_piece(self, hidden: Tensor, piece: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        """Sums over tokens `piece` of the sequence."""
        device = self.student.device
        logits = self.student.head_forward(hidden, piece)[0]
        rows = slice(int(piece[0]), int(piece[-1]) + 1)
        of_teacher = (torch.from_numpy(np.array(part[sequence, rows])).to(device) for part in self.teacher)
        divergence = forward_kl(logits, *of_teacher)[self.counted[sequence, rows].to(device)].sum()
        if not self.settings.value("next_token"):
            return divergence, torch.zeros((), device=device)
        return divergence, next_token(logits, self.targets[sequence, rows].to(device)).sum()


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
