"""Train a whole model towards its teacher: LoRA factors, or the blocks' own weights.

The teacher runs once, block by block; what is kept of its predictions lies in files, so it is not in memory while the
student, which is as a whole, is trained.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calibrate.crew import ALONE, Crew
from ..calibrate.replay import Stream, run_block
from ..calibrate.skeleton import Skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear, ModelLayout
from ..checkpoint.source import TensorSource
from ..checkpoint.staging import Staging, write_whole
from ..lora.compose import Factors
from ..lora.distill import top_k
from ..lora.settings import HealSettings
from ..lora.train import check_optimizer
from ..quant.block import weight_of
from ..quant.targets import select
from .heal_train import PIECE, Job, Trained, options_of, train_job
from .judge import Split
from .progress import Progress

STATE_BYTES = 16  # per trained parameter: weight, gradient and Adam's two moments in float32
_STATE_BYTES = {"adamw": STATE_BYTES, "adamw8bit": 10}  # with moments of one byte


@dataclass(frozen=True)
class Desk:
    """Where a training keeps its files, and whom it tells."""

    staging: Staging
    key: str
    label: str
    progress: Progress
    budget: int  # bytes of hidden states kept in memory
    student: Path  # the directory of what is trained
    crew: Crew = ALONE

    def file(self, name: str) -> Path:
        return self.staging.work / f"{self.key}-{name}"


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
    tokens, again = settings.value("tokens"), bool(settings.value("recompute"))
    rows, width = source.shapes[layout.embedding]
    in_use = list(source.shapes.values())
    model = "the whole model in float32 in memory"
    if settings.value("weights") == "stored":
        read = {x.place.tensor for x in layout.linears if x.expert is None} | {layout.embedding, layout.head}
        in_use = [shape for name, shape in source.shapes.items() if name not in read]
        model = "the model's layers read when they multiply, and the rest in memory"
    weights = 4 * sum(map(prod, in_use))
    blocks = [sum(x.in_features + 3 * x.out_features for group in block for x in group) for block in layout.blocks]
    kept = max(blocks) + len(blocks) * width if again else sum(blocks) + 3 * rows
    per_token = 4 * kept  # what the backward pass waits for, and the logits three times
    # multiply-adds of forward, of the backward pass for inputs, and with full weights of that for weights
    state = _STATE_BYTES[settings.value("optimizer")]
    passes = (4 if r else 6) + (2 if again else 0)
    note = (
        f"heal: trains {trained:,} parameters, {state} bytes each ({state * trained / 1e6:,.0f} MB), on about "
        f"{tokens:,} tokens, with {model} ({weights / 1e6:,.0f} MB) and activations of about {per_token / 1e3:,.0f} kB per "
        "token of one sequence"
    )
    resident = weights + state * trained + (3 * 4 * PIECE if again else 0)
    return Costs(note, resident, per_token, passes * tokens * sum(x.numel for x in layout.linears))


def notes_of(settings: HealSettings) -> tuple[str, ...]:
    """What to know of this machine before. Raises SutureError for an optimizer that is not to be had."""
    if settings.method != "blocks":
        check_optimizer(settings.value("optimizer"))
    if settings.precision == "bf16" and not torch.cuda.is_available() and not has_bf16():
        return ("heal: precision: bf16: this processor has no bf16 arithmetic, so training is slower than in float32",)
    return ()


def has_bf16() -> bool:
    """Whether the processor multiplies bf16 numbers itself."""
    checks = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return any(bool(check()) for check in checks if check is not None)


def same_vocabulary(teacher: Skeleton, student: Skeleton) -> None:
    """Raise SutureError when the models' predictions are of different tokens."""
    rows = [model.source.shapes[model.layout.embedding][0] for model in (teacher, student)]
    if rows[0] != rows[1]:
        raise SutureError(
            f"heal: the original has {rows[0]} tokens, the model by now {rows[1]}: their predictions do not compare",
            "put heal before the step that changes the vocabulary",
        )


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
    if desk.crew.size > settings.value("batch"):
        raise SutureError(
            f"heal: batch: {settings.value('batch')} sequences per step are fewer than {desk.crew.size} processes",
            "start fewer processes, or raise batch",
        )
    job = Job(
        student=desk.student,
        device=student.device.type,
        parts=parts,
        settings=settings,
        linears=tuple(linears),
        names=tuple(names),
        teacher=_teacher_targets(teacher, parts, settings.value("top_k"), desk),
        saved=desk.file("training.pt"),
    )
    steps = options_of(settings, parts.text.ids.shape[1]).steps

    def save(state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_whole(job.saved, buffer.getvalue())
        point = state["curve"][-1]
        desk.progress.say(
            f"{desk.label}: step {point['step']} of {steps}, loss {point['loss']:.4f}, "
            f"held-out divergence {point['held_out_kl']:.4f}"
        )

    desk.crew.share(job)
    return train_job(
        job, student, desk.crew, save, lambda i, total: desk.progress.track(i, total, f"{desk.label}: train")
    )


@torch.no_grad()
def _teacher_targets(teacher: Skeleton, parts: Split, k: int, desk: Desk) -> tuple[Path, Path]:
    """Files of token ids (int32) and log-probabilities (float32) of the teacher's k likeliest, each [N, T, k]."""
    k = min(k, teacher.source.shapes[teacher.layout.head or teacher.layout.embedding][0])
    files = desk.file("teacher-ids.npy"), desk.file("teacher-log-p.npy")
    if desk.staging.find(step=desk.key, unit="teacher") is None:
        ids, positions = parts.text.batches(2)
        stream = Stream.start(teacher, ids, desk.budget, desk.file("teacher-hidden.bin"), positions)
        for index in desk.progress.track(range(teacher.n_blocks), teacher.n_blocks, f"{desk.label}: teacher"):
            teacher.load_block(index)
            run_block(teacher, index, stream)
            teacher.free_block(index)
        teacher.load_head()
        shape = (*parts.text.ids.shape, k)
        arrays = [
            np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)
            for file, dtype in zip(files, (np.int32, np.float32), strict=True)
        ]
        keep, at = torch.arange(shape[1]), 0
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
    return files


def merged_weight(before: Skeleton, linear: Linear, factors: Factors, scale: float) -> Tensor:
    """The loaded layer's weight as its module has it, with the factors' change; float32."""
    change = scale * (factors.B.double() @ factors.A.double())
    new = weight_of(before, linear).double().cpu() + change
    return (new.T if linear.conv1d else new).float().contiguous()
