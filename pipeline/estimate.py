"""What a run will take of the machine, from shapes alone: memory by part, disk, time.

Memory is counted from what is resident when the plan is made (Python, torch, transformers). Each part of a run has its
own peak, since what one leaves is given back before the next begins:

    preflight   one block through the steps, then that block, the embedding and the head in stock transformers
    steps       a block in float32 with what a step holds beside it, the hidden states, or the head for the probe's logits
    report      blocks of two models (all of them where they fit), two heads, and a piece of their logits
    reload      the output's verified blocks in a process of its own: mapped, one layer in memory
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil

from ..calibrate.skeleton import Skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.header import DTYPES
from ..checkpoint.layout import Linear
from ..checkpoint.staging import partial_of
from ..report.score import LOGIT_BYTES
from .duration import PROBE, duration
from .recipe import Recipe
from .step import PlannedStep, Prepared
from .texts import Calibration, Evaluation

_IMPORTS = 30 << 20  # of what the work itself imports: a model's module, and pieces of memory between tensors
_LOADING = 60 << 20  # that stock transformers takes to load, beside the weights
_FRESH_PROCESS = 400 << 20  # Python, torch and transformers in the process that reloads
_SMALL = 8  # an output is reloaded as a whole when it is smaller than this part of the memory at hand
_UNPACKED_BY_WORDS = 2.0  # of a layer in float32: codes of other than 4 bits are unpacked as integers, more than once


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
    experts: int  # of a block, in float32: what of it is never read one tensor at a time
    tensor: int  # the largest, as stored

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
            experts=max(
                4 * sum(x.numel for group in block for x in group if x.expert is not None) for block in layout.blocks
            ),
            tensor=max(stored.values()),
        )

    def loaded(self, blocks: int, packing: _Packing) -> int:
        """Bytes of the files that stock transformers reads for that many blocks."""
        return self.stored_outside + (packing.nbytes or self.stored_blocks) * blocks // self.n_blocks

    def reloaded(self, blocks: int, packing: _Packing) -> int:
        """Bytes of memory that it holds for them: a layer, or the head, of what is mapped; all of what it makes new."""
        held = self.largest
        if packing.copied or self.experts:
            held += self.loaded(blocks, packing) - self.stored_outside
        return held + int(self.layer * (packing.on_the_way if packing.nbytes else 0.5))


@dataclass(frozen=True)
class _Packing:
    """How the output stores its quantized layers."""

    nbytes: int  # of all blocks; 0: it has none
    copied: bool  # the loader makes new tensors of them
    on_the_way: float  # what a layer takes while it is made dense, of its size in float32

    @classmethod
    def of(cls, last: PlannedStep, sizes: _Sizes) -> _Packing:
        config = last.prepared.config.get("quantization_config") or {}
        nbytes = max(0, last.shards.nbytes - sizes.stored_outside) if config else 0
        groups = (config.get("config_groups") or {}).values()
        bytewise = all((group.get("weights") or {}).get("num_bits") == 4 for group in groups)
        copied = config.get("quant_method") == "bitsandbytes"
        return cls(nbytes, copied, 0.5 if copied else 1.5 if bytewise else _UNPACKED_BY_WORDS)


def _of_block(prepared: Prepared, sizes: _Sizes) -> int:
    """Bytes of weights that a step holds while it is at a block, or at a tensor."""
    return sizes.experts + sizes.tensor if prepared.by_tensor else (1 + prepared.working_blocks) * sizes.block


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
    logits = 4 * PROBE * rows

    def stepping(text: bool) -> int:
        length = calibration.blocks.ids.shape[1] if calibration and text else 0
        at_blocks = max(
            _of_block(step.prepared, sizes)
            + step.prepared.working
            + step.prepared.resident
            + length * step.prepared.token_bytes
            for step in steps
        )
        at_blocks += hidden + waiting if text else 0
        return max(at_blocks, sizes.largest + 4 * logits)

    packing = _Packing.of(steps[-1], sizes)
    memory = {
        "preflight": base + max(stepping(False), sizes.reloaded(1, packing) + _LOADING),
        "steps": base + stepping(True),
    }
    if evaluations:
        memory["report"] = base + _scoring(skeleton, sizes, evaluations, available // 3)
    allowed = available, max(memory.values())
    n_blocks = max(step.prepared.n_blocks for step in steps)
    blocks = _verify_blocks(recipe, sizes, n_blocks, packing, *allowed)
    memory["reload"] = _FRESH_PROCESS + _LOADING + sizes.reloaded(blocks, packing) + 3 * logits
    disk, free = _disk(recipe, steps, 2 * hidden + logits)
    return Estimate(memory, disk, duration(skeleton, steps, calibration), paused, blocks, available, free)


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


def _verify_blocks(recipe: Recipe, sizes: _Sizes, n: int, packing: _Packing, available: int, modest: int) -> int:
    """All `n` blocks of the output when it is small; else as many as are no larger than what the run takes itself, and at
    least one: a model that is streamed must not be checked at the price of the memory that streaming saved."""
    small = max(available // _SMALL, modest)
    if recipe.verify == "full" or (recipe.verify == "auto" and sizes.loaded(n, packing) < small):
        return n
    return max([1, *(k for k in range(1, n + 1) if _FRESH_PROCESS + sizes.loaded(k, packing) <= modest)])


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
