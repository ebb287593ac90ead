"""Train a whole model towards its teacher: LoRA factors, or the blocks' own weights.

The teacher runs once, block by block; what is kept of its predictions lies in files, so it is not in memory while the
student, which is as a whole, is trained.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..calibrate.replay import Stream, release_memory, run_block
from ..calibrate.skeleton import Skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear, ModelLayout
from ..checkpoint.source import TensorSource
from ..checkpoint.staging import Staging, write_whole
from ..lora.attach import draw
from ..lora.compose import Factors
from ..lora.distill import forward_kl, next_token, top_k
from ..lora.settings import HealSettings
from ..lora.train import TrainOptions, train
from ..quant.block import weight_of
from ..quant.targets import select
from .judge import Split
from .progress import Progress

STATE_BYTES = 16  # per trained parameter: weight, gradient and Adam's two moments in float32
_NOTHING = 1e-7  # nats per token: a divergence that float32 sums leave between equal models


@dataclass(frozen=True)
class Desk:
    """Where a training keeps its files, and whom it tells."""

    staging: Staging
    key: str
    label: str
    progress: Progress
    budget: int  # bytes of hidden states kept in memory

    def file(self, name: str) -> Path:
        return self.staging.work / f"{self.key}-{name}"


@dataclass(frozen=True)
class Trained:
    """What training left: factors by layer (lora), or parameters by module name (full)."""

    factors: dict[str, Factors]  # by the linear layer's module
    weights: dict[str, Tensor]
    curve: list[dict[str, float]]
    steps: int
    tokens: int


def linears_of(layout: ModelLayout, settings: HealSettings) -> tuple[Linear, ...]:
    """The layers that get factors. Raises SutureError for a rank that one of them does not have."""
    chosen = select(layout, settings.value("targets"), []).chosen
    found = tuple(linear for linear in chosen if linear.expert is None)
    if not found:
        raise SutureError("heal: targets selects experts alone, which get no factors", "use method: blocks or full")
    r = settings.value("r")
    low = min(found, key=lambda linear: min(linear.out_features, linear.in_features))
    if r > min(low.out_features, low.in_features):
        raise SutureError(
            f"heal: r: {r} is more than {low.name} has: [{low.out_features}, {low.in_features}]", "lower r"
        )
    return found


@dataclass(frozen=True)
class Costs:
    """What training a whole model takes."""

    note: str
    resident: int  # bytes held all along
    token_bytes: int  # per token of the sequence in work
    flops: float


def costs_of(
    source: TensorSource, layout: ModelLayout, linears: Sequence[Linear], full: int, settings: HealSettings
) -> Costs:
    """`full`: parameters that are trained themselves, when no factors are."""
    r = settings.value("r") if settings.method == "lora" else 0
    trained = sum(r * (x.out_features + x.in_features) for x in linears) if r else full
    weights = 4 * sum(prod(shape) for shape in source.shapes.values())
    tokens, again = settings.value("tokens"), bool(settings.value("recompute"))
    rows, width = source.shapes[layout.embedding]
    blocks = [sum(x.in_features + 3 * x.out_features for group in block for x in group) for block in layout.blocks]
    kept = max(blocks) + len(blocks) * width if again else sum(blocks)
    per_token = 4 * (kept + 3 * rows)  # what the backward pass waits for, and the logits three times
    # multiply-adds of forward, of the backward pass for inputs, and with full weights of that for weights
    passes = (4 if r else 6) + (2 if again else 0)
    note = (
        f"heal: trains {trained:,} parameters, {STATE_BYTES} bytes each ({STATE_BYTES * trained / 1e6:,.0f} MB), on about "
        f"{tokens:,} tokens, with the whole model in float32 in memory ({weights / 1e6:,.0f} MB) and activations of "
        f"about {per_token / 1e3:,.0f} kB per token of one sequence"
    )
    return Costs(
        note, weights + STATE_BYTES * trained, per_token, passes * tokens * sum(x.numel for x in layout.linears)
    )


def same_vocabulary(teacher: Skeleton, student: Skeleton) -> None:
    """Raise SutureError when the models' predictions are of different tokens."""
    rows = [model.source.shapes[model.layout.embedding][0] for model in (teacher, student)]
    if rows[0] != rows[1]:
        raise SutureError(
            f"heal: the original has {rows[0]} tokens, the model by now {rows[1]}: their predictions do not compare",
            "put heal before the step that changes the vocabulary",
        )


def steps_of(settings: HealSettings, length: int) -> int:
    """As many as the budget of tokens has room for, at least one."""
    return max(1, settings.value("tokens") // (settings.value("batch") * length))


def train_whole(
    student: Skeleton,
    teacher: Skeleton,
    parts: Split,
    settings: HealSettings,
    linears: Sequence[Linear],
    names: Sequence[str],
    desk: Desk,
) -> Trained:
    """Train factors for `linears`, or the parameters `names`; both models have one vocabulary."""
    ids = torch.from_numpy(np.concatenate([parts.train, parts.held]))
    n, length = len(parts.train), ids.shape[1]
    targets = _teacher_targets(teacher, ids, settings.value("top_k"), desk)
    for index in range(student.n_blocks):
        student.load_block(index)
    student.load_head()
    embedded = Stream.start(student, ids.split(1), desk.budget, desk.file("embedded.bin"))
    factors = new_factors(student, settings, linears) if settings.method == "lora" else {}
    groups = _groups(student, settings, factors, names)
    handles = hook_factors(student, factors, settings.value("alpha") / settings.value("r") if factors else 0.0)
    keep = torch.arange(length)

    def logits(sequence: int) -> Tensor:
        hidden = embedded.hidden[sequence].to(student.device)
        for index in range(student.n_blocks):
            if settings.value("recompute") and torch.is_grad_enabled():
                hidden = checkpoint(student.block_forward, index, hidden, use_reentrant=False)
            else:
                hidden = student.block_forward(index, hidden)
        return student.head_forward(hidden, keep)

    def divergence(sequence: int, found: Tensor) -> Tensor:
        of_teacher = (torch.from_numpy(np.array(part[sequence])).to(student.device) for part in targets)
        return forward_kl(found[0], *of_teacher).mean()

    weight = settings.value("next_token")

    def loss(sequence: int) -> Tensor:
        found = logits(sequence)
        total = divergence(sequence, found)
        if weight:
            total = total + weight * next_token(found, ids[sequence : sequence + 1].to(student.device))
        return total

    def held_out() -> float:
        with torch.no_grad():
            return sum(float(divergence(s, logits(s))) for s in range(n, len(ids))) / (len(ids) - n)

    options = TrainOptions(
        steps=steps_of(settings, length),
        batch=settings.value("batch"),
        warmup=settings.value("warmup"),
        checkpoint=settings.value("checkpoint"),
        seed=settings.seed,
        nothing=_NOTHING,
    )

    def save(state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_whole(desk.file("training.pt"), buffer.getvalue())
        point = state["curve"][-1]
        desk.progress.say(
            f"{desk.label}: step {point['step']} of {options.steps}, loss {point['loss']:.4f}, "
            f"held-out divergence {point['held_out_kl']:.4f}"
        )

    def track(steps: Iterator[int], total: int) -> Iterator[int]:
        return desk.progress.track(steps, total, f"{desk.label}: train")

    saved = desk.file("training.pt")
    start = torch.load(saved, weights_only=True) if saved.exists() else None
    curve = train(loss, groups, held_out, n, options, start=start, save=save, track=track)
    for handle in handles:
        handle.remove()
    done = int(curve[-1]["step"])
    trained = Trained(
        {module: Factors(A.detach().cpu(), B.detach().cpu()) for module, (A, B) in factors.items()},
        {name: student.model.get_parameter(name).detach().cpu() for name in names} if not factors else {},
        curve,
        done,
        done * options.batch * length,
    )
    for index in range(student.n_blocks):
        student.free_block(index)
    student.free_head()
    release_memory()
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


@torch.no_grad()
def _teacher_targets(teacher: Skeleton, ids: Tensor, k: int, desk: Desk) -> tuple[Any, Any]:
    """Token ids (int32) and log-probabilities (float32) of the teacher's k likeliest, each [N, T, k], in files."""
    k = min(k, teacher.source.shapes[teacher.layout.head or teacher.layout.embedding][0])
    files = [desk.file(f"teacher-{name}.npy") for name in ("ids", "log-p")]
    if desk.staging.find(step=desk.key, unit="teacher") is None:
        stream = Stream.start(teacher, ids.split(2), desk.budget, desk.file("teacher-hidden.bin"))
        for index in desk.progress.track(range(teacher.n_blocks), teacher.n_blocks, f"{desk.label}: teacher"):
            teacher.load_block(index)
            run_block(teacher, index, stream)
            teacher.free_block(index)
        teacher.load_head()
        shape = (*ids.shape, k)
        arrays = [
            np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)
            for file, dtype in zip(files, (np.int32, np.float32), strict=True)
        ]
        keep, at = torch.arange(ids.shape[1]), 0
        for hidden in stream.hidden:
            for row in hidden.split(1):
                found = top_k(teacher.logits(row.to(teacher.device), keep)[0], k)
                for array, part in zip(arrays, found, strict=True):
                    array[at] = part.cpu().numpy()
                at += 1
        teacher.free_head()
        for array in arrays:
            array.flush()
        desk.staging.record({"step": desk.key, "unit": "teacher"})
    return tuple(np.load(file, mmap_mode="r") for file in files)  # type: ignore[return-value]


def merged_weight(before: Skeleton, linear: Linear, factors: Factors, scale: float) -> Tensor:
    """The loaded layer's weight as its module has it, with the factors' change; float32."""
    change = scale * (factors.B.double() @ factors.A.double())
    new = weight_of(before, linear).double().cpu() + change
    return (new.T if linear.conv1d else new).float().contiguous()
