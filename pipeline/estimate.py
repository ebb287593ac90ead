"""What a run will take of the machine, from shapes alone: memory by part, disk, time.

Memory is counted from what is resident when the plan is made (Python, torch, transformers). Each part of a run has its
own peak, since what one leaves is given back before the next begins:

    preflight   one block through the steps, then that block, the embedding and the head in stock transformers
    steps       a block in float32 with what a step holds beside it, the hidden states, or the head for the probe's logits
    report      blocks of two models (all of them where they fit), two heads, and a piece of their logits
    reload      the output's verified blocks in a process of its own: as stored, one layer in float32
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil
import torch

from ..calibrate.skeleton import Skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.header import DTYPES
from ..checkpoint.layout import Linear
from ..checkpoint.staging import partial_of
from ..report.score import LOGIT_BYTES
from .recipe import Recipe
from .step import PlannedStep
from .texts import Calibration, Evaluation

_IMPORTS = 30 << 20  # of what the work itself imports: a model's module, and pieces of memory between tensors
_LOADING = 60 << 20  # that stock transformers takes to load, beside the weights
_FRESH_PROCESS = 400 << 20  # Python, torch and transformers in the process that reloads
_PROBE = 128  # tokens
_WRITING = 500e6  # bytes per second


@dataclass(frozen=True)
class Estimate:
    """Predicted needs. Bytes and seconds; seconds are for the steps alone."""

    memory: Mapping[str, int]  # by part
    disk: int
    seconds: float
    paused: bool  # a block's forward can wait at its stages within the memory at hand
    verify_blocks: int  # blocks that verification reloads
    available_memory: int
    available_disk: int

    @property
    def peak_memory(self) -> int:
        """Of the largest process."""
        return max(self.memory.values())


@dataclass(frozen=True)
class _Sizes:
    """Bytes of a model's parts, in float32 and as stored."""

    block: int  # the largest, in float32
    head: int
    largest: int  # tensor outside the blocks, as stored
    stored_blocks: int  # all of them
    stored_outside: int
    n_blocks: int
    layer: int  # the most that the reload has in float32 at once: a layer, or what of a block is no linear layer

    @classmethod
    def of(cls, skeleton: Skeleton) -> _Sizes:
        layout, shapes, dtypes = skeleton.layout, skeleton.source.shapes, skeleton.source.dtypes
        names = [{place.tensor for place in layout.block_tensors(i).values()} for i in range(skeleton.n_blocks)]
        inside = set().union(*names)
        stored = {name: prod(shape) * DTYPES[dtypes[name]].bits // 8 for name, shape in shapes.items()}
        return cls(
            block=max(4 * sum(prod(shapes[name]) for name in block) for block in names),
            head=4 * prod(shapes[layout.head or layout.embedding]),
            largest=max((size for name, size in stored.items() if name not in inside), default=0),
            stored_blocks=sum(stored[name] for name in inside),
            stored_outside=sum(size for name, size in stored.items() if name not in inside),
            n_blocks=skeleton.n_blocks,
            layer=max(4 * _widened_at_once(linears) for groups in layout.blocks for linears in groups),
        )

    def reloaded(self, blocks: int, packed: int, stays: bool) -> int:
        """Bytes of stock transformers with that many blocks. `packed`: of all blocks in the output's codes, which become
        dense in the model's dtype with a layer of integers on the way, or (`stays`) one layer at a time."""
        inside = packed if stays else self.stored_blocks + packed
        on_the_way = self.layer // 2 if stays else self.layer if packed else 0
        return self.stored_outside + inside * blocks // self.n_blocks + self.layer + on_the_way


def _widened_at_once(linears: Sequence[Linear]) -> int:
    """Weights that the reload widens together: a linear layer's, or those of all experts."""
    by_layer = [linear.numel for linear in linears]
    return sum(by_layer) if linears[0].expert is not None or linears[0].conv1d else max(by_layer)


def estimated(
    recipe: Recipe,
    skeleton: Skeleton,
    steps: Sequence[PlannedStep],
    calibration: Calibration | None,
    evaluations: Sequence[Evaluation],
    batch: int,
) -> Estimate:
    """Raises SutureError when the disk has not the room."""
    sizes, available = _Sizes.of(skeleton), psutil.virtual_memory().available
    base = psutil.Process().memory_info().rss + _IMPORTS
    hidden, waiting, paused = _of_text(skeleton, steps, calibration, batch, available)
    rows = skeleton.source.shapes[skeleton.layout.head or skeleton.layout.embedding][0]
    logits = 4 * _PROBE * rows

    def stepping(text: bool) -> int:
        length = calibration.blocks.ids.shape[1] if calibration and text else 0
        at_blocks = max(
            (1 + step.prepared.working_blocks) * sizes.block
            + step.prepared.working
            + step.prepared.resident
            + length * step.prepared.token_bytes
            for step in steps
        )
        at_blocks += hidden + waiting if text else 0
        return max(at_blocks, sizes.head * 3 // 2 + 4 * logits, 2 * sizes.largest)

    packing = steps[-1].prepared.config.get("quantization_config") or {}
    method = packing.get("quant_method")
    packed = max(0, steps[-1].shards.nbytes - sizes.stored_outside) if method else 0
    codes = packed, method == "bitsandbytes"
    memory = {
        "preflight": base + max(stepping(False), sizes.reloaded(1, *codes) + _LOADING),
        "steps": base + stepping(True),
    }
    if evaluations:
        memory["report"] = base + _scoring(skeleton, sizes, evaluations, available // 3)
    allowed = available * 6 // 10, max(memory.values())
    n_blocks = max(step.prepared.n_blocks for step in steps)
    blocks = _verify_blocks(recipe, sizes, n_blocks, codes, _FRESH_PROCESS + _LOADING + 3 * logits, *allowed)
    memory["reload"] = _FRESH_PROCESS + _LOADING + sizes.reloaded(blocks, *codes) + 3 * logits
    disk, free = _disk(recipe, steps, 2 * hidden + logits)
    return Estimate(memory, disk, _seconds(skeleton, steps, calibration), paused, blocks, available, free)


def _of_text(
    skeleton: Skeleton, steps: Sequence[PlannedStep], calibration: Calibration | None, batch: int, available: int
) -> tuple[int, int, bool]:
    """Bytes of hidden states in memory, bytes that forwards hold which wait at a stage, and whether they wait."""
    if calibration is None:
        return 0, 0, True
    samples, length = calibration.blocks.ids.shape
    tokens, width = samples * length, int(skeleton.hf_config.hidden_size)
    streams = max(step.prepared.streams for step in steps)
    hidden = 4 * tokens * width * streams
    inputs = max(linear.in_features for linear in skeleton.layout.linears)
    waiting = 4 * tokens * (3 * width + max(inputs, 4 * width)) * min(streams, 2)
    paused = waiting < available // 3
    if not paused:
        waiting = waiting * batch // samples
    return hidden if hidden <= hidden_budget(available) else 0, waiting, paused


def hidden_budget(available: int) -> int:
    """Bytes of hidden states kept in memory; more go to a file."""
    return available // 4


def _scoring(skeleton: Skeleton, sizes: _Sizes, evaluations: Sequence[Evaluation], budget: int) -> int:
    every = 4 * sum(
        prod(skeleton.source.shapes[place.tensor])
        for index in range(sizes.n_blocks)
        for place in skeleton.layout.block_tensors(index).values()
    )
    fits = every <= budget // 2  # as `report.score` decides, for each of the two models
    width = int(skeleton.hf_config.hidden_size)
    inner = max(linear.out_features for linear in skeleton.layout.linears)
    tokens = max(min(2048, sum(ids.size for ids in evaluation.windows.ids)) for evaluation in evaluations)
    windows = max(sum(ids.size for ids in evaluation.windows.ids) for evaluation in evaluations)
    states = 0 if fits else 2 * 4 * width * windows
    activations = 4 * tokens * (4 * width + 4 * inner)
    blocks = 2 * every if fits else sizes.block
    return blocks + 2 * sizes.head + 2 * LOGIT_BYTES + activations + (states if states <= budget else 0)


def _verify_blocks(
    recipe: Recipe, sizes: _Sizes, n: int, codes: tuple[int, bool], beside: int, free: int, modest: int
) -> int:
    """All `n` blocks of the output when they fit into `free` bytes; else as many as fit into what the run takes itself, and
    at least one: a model that is streamed because it is larger than memory must not be checked at the price of all
    memory."""
    if recipe.verify == "full" or (recipe.verify == "auto" and beside + sizes.reloaded(n, *codes) < free):
        return n
    return max([1, *(k for k in range(1, n + 1) if beside + sizes.reloaded(k, *codes) <= min(free, modest))])


def _disk(recipe: Recipe, steps: Sequence[PlannedStep], beside: int) -> tuple[int, int]:
    """(bytes needed, bytes free) where the output goes. `beside`: what is saved for a moment beside the weights."""
    output = Path(recipe.output)
    where = next(parent for parent in [output, *output.resolve().parents] if parent.exists())
    disk = sum(step.shards.nbytes for step in steps) + beside
    free = shutil.disk_usage(where).free + _reclaimable(output)
    if disk > free:
        raise SutureError(
            f"output: {disk / 1e9:.2f} GB are needed under {where}, {free / 1e9:.2f} GB are free",
            "free some space or choose another disk",
        )
    return disk, free


def _reclaimable(output: Path) -> int:
    """Bytes that an unfinished run already holds in its place."""
    partial = partial_of(output)
    return sum(file.stat().st_size for file in partial.rglob("*") if file.is_file()) if partial.exists() else 0


def _seconds(skeleton: Skeleton, steps: Sequence[PlannedStep], calibration: Calibration | None) -> float:
    layout = skeleton.layout
    tokens = calibration.blocks.ids.size if calibration else 0
    linear_flops = 2 * sum(linear.numel for linear in layout.linears)
    statistic_flops = 2 * sum(group[0].in_features ** 2 // 2 for groups in layout.blocks for group in groups)
    rounding_flops = 2 * sum(2 * linear.numel * linear.in_features for linear in layout.linears) if tokens else 0
    textual = [step.prepared for step in steps if step.kind.needs_text(step.settings)]
    forwards = sum(prepared.forwards * prepared.reached for prepared in textual)
    reached = max((prepared.reached for prepared in textual), default=1.0)
    flops = tokens * (forwards * linear_flops + reached * statistic_flops) + reached * rounding_flops
    flops += sum(step.prepared.flops for step in steps)
    return flops / measured_flops() + sum(step.shards.nbytes for step in steps) / _WRITING


def measured_flops() -> float:
    """Multiply-adds per second, twice, of a product of ordinary size on this machine."""
    a, b = torch.ones(1024, 1024), torch.ones(1024, 1024)
    torch.mm(a, b)
    start = time.perf_counter()
    for _ in range(3):
        torch.mm(a, b)
    return 3 * 2 * 1024**3 / max(time.perf_counter() - start, 1e-6)
