"""Carry token batches through a model block by block, and stop a block's forward at the inputs of its linear layers.

A `Stream` holds the hidden states of all batches: in memory, or past a budget in a memory-mapped file.

`staged_block` runs one block over a stream. Each batch's forward is a greenlet; a hook on the linear layers of stage k
pauses it there. When every batch waits at stage k, its inputs have been observed, the caller changes its weights, and
all go on. So each stage sees the outputs of the stages already quantized, and the block's forward runs **once**, where
re-running it for every stage would cost as many forwards as there are stages. What waits holds its activations; when
that would pass the memory budget, `paused=False` re-runs instead, with the same results.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from ..checkpoint.disk import reserve
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from ..checkpoint.writer import disk_errors
from .product import through_onednn
from .skeleton import Skeleton

Window = tuple[
    Tensor, Tensor | None
]  # hidden states [1, T, hidden], and their positions [1, T] where pieces are isolated
_PIECE = 64 << 20  # bytes of hidden states written or read at once


@dataclass
class Stream:
    """Token batches and their hidden states, all windows of one batch of equal length."""

    ids: list[Tensor]  # each [B, T] int64
    hidden: list[Tensor]  # each [B, T, hidden], views of `buffer`
    buffer: Tensor
    positions: list[Tensor | None]  # each [B, T] int64, starting again at isolated pieces; None: nothing is isolated
    mapped: mmap.mmap | None = None  # the file behind `buffer`
    saving: Future[None] | None = None  # must be over before the hidden states may change
    before: int = 0  # of a part: bytes that come before it in the file of the whole
    beside: int = 0  # and bytes of all other parts

    @classmethod
    def start(
        cls,
        skeleton: Skeleton,
        ids: Sequence[Tensor],
        budget: int | None = None,
        spill: Path | None = None,
        positions: Sequence[Tensor | None] | None = None,
    ) -> Stream:
        """Embed the batches. Past `budget` bytes the states live in the file `spill` instead of memory."""
        stream = cls.empty(skeleton, ids, budget, spill, positions)
        stream.embed(skeleton)
        return stream

    @classmethod
    def empty(
        cls,
        skeleton: Skeleton,
        ids: Sequence[Tensor],
        budget: int | None = None,
        spill: Path | None = None,
        positions: Sequence[Tensor | None] | None = None,
        part: range | None = None,
    ) -> Stream:
        """Room for the batches' hidden states; with `part`, for those batches alone."""
        width = int(skeleton.hf_config.hidden_size)
        every = [batch.numel() * width for batch in ids]
        part = range(len(every)) if part is None else part
        sizes = every[part.start : part.stop]
        ids = ids[part.start : part.stop]
        positions = positions and positions[part.start : part.stop]
        total = sum(sizes)
        if spill is not None and budget is not None and total * skeleton.dtype.itemsize > budget:
            with (
                disk_errors(spill),
                spill.open("wb") as file,
            ):  # reserved: a mapped page without disk would end the process
                reserve(file.fileno(), total * skeleton.dtype.itemsize, spill.parent)
            with spill.open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), total * skeleton.dtype.itemsize)
            buffer = torch.frombuffer(mapped, dtype=skeleton.dtype)
        else:
            mapped, buffer = None, torch.empty(total, dtype=skeleton.dtype)
        views = buffer.split(sizes)
        hidden = [view.view(*batch.shape, width) for view, batch in zip(views, ids, strict=True)]
        before, beside = (n * skeleton.dtype.itemsize for n in (sum(every[: part.start]), sum(every) - total))
        return cls(list(ids), hidden, buffer, list(positions or [None] * len(hidden)), mapped, None, before, beside)

    def embed(self, skeleton: Skeleton) -> None:
        """Make the hidden states those that reach `skeleton`'s first block."""
        for ids, positions, view in zip(self.ids, self.positions, self.hidden, strict=True):
            view.copy_(skeleton.embed(ids, positions))

    def through(self, skeleton: Skeleton, index: int, batch: int) -> Tensor:
        """What the loaded block `index` makes of a batch's hidden states, on the skeleton's device."""
        return skeleton.run_block(index, self.hidden[batch].to(skeleton.device), self.positions[batch])

    def windows(self) -> list[Window]:
        """Every sequence by itself."""
        return [
            (hidden[i : i + 1], None if positions is None else positions[i : i + 1])
            for hidden, positions in zip(self.hidden, self.positions, strict=True)
            for i in range(len(hidden))
        ]

    @property
    def tokens(self) -> int:
        return sum(batch.numel() for batch in self.ids)

    def replace(self, batch: int, out: Tensor) -> None:
        """Set one batch's hidden states."""
        if self.saving is not None:
            self.saving.result()
            self.saving = None
        self.hidden[batch].copy_(out)
        self.let_go()

    def let_go(self) -> None:
        """Hand mapped pages back to the system, which keeps what is in them and brings it again when it is read."""
        if self.mapped is not None and hasattr(self.mapped, "madvise"):
            self.mapped.madvise(mmap.MADV_DONTNEED)

    def save(self, path: Path) -> None:
        """Write the hidden states, and return once they are on disk. A part goes to its place in the file of the whole."""
        content = self._bytes()
        with disk_errors(path):
            path.touch()
        with disk_errors(path), path.open("r+b") if self.beside else path.open("wb") as file:
            file.seek(self.before)
            for start in range(0, len(content), _PIECE):
                file.write(content[start : start + _PIECE])
                self.let_go()
            file.flush()
            os.fsync(file.fileno())

    def _bytes(self) -> memoryview:
        return self.buffer.view(torch.uint8).numpy().data

    def restore(self, path: Path) -> None:
        """Read what `save` wrote. Raises SutureError when the file is not of this stream's size."""
        size = self.buffer.numel() * self.buffer.element_size() + self.beside
        if not path.exists() or path.stat().st_size != size:
            raise SutureError(f"{path}: the saved hidden states are not {size} bytes", "start again with --overwrite")
        content = self._bytes()
        with path.open("rb") as file:
            file.seek(self.before)
            for start in range(0, len(content), _PIECE):
                file.readinto(content[start : start + _PIECE])
                self.let_go()


def run_block(skeleton: Skeleton, index: int, stream: Stream) -> None:
    """Replace the stream's hidden states by block `index`'s outputs; the block must be loaded."""
    for batch in range(len(stream.hidden)):
        stream.replace(batch, stream.through(skeleton, index, batch))


class _SeenError(Exception):
    """Ends a block's forward once what was wanted of it has been seen."""


@torch.no_grad()
def observe_inputs(
    skeleton: Skeleton, index: int, stream: Stream, linear: Linear, observe: Callable[[Tensor], None]
) -> None:
    """Call `observe` with each batch's inputs of a linear layer of the loaded block `index`, and go no further."""

    def see(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        observe(inputs[0])
        raise _SeenError

    handle = skeleton.model.get_submodule(linear.module).register_forward_pre_hook(see)
    try:
        for batch in range(len(stream.hidden)):
            with contextlib.suppress(_SeenError):
                stream.through(skeleton, index, batch)
    finally:
        handle.remove()


@torch.no_grad()
def overflowing_layer(skeleton: Skeleton, index: int, hidden: Tensor) -> str:
    """Name of the first linear layer of a loaded block whose inputs are not finite, or the block's outputs."""
    found: list[str] = []

    def watch(linear: Linear) -> Any:
        def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if not bool(torch.isfinite(inputs[0]).all()):
                found.append(f"{linear.name}: its inputs")

        return skeleton.model.get_submodule(linear.module).register_forward_pre_hook(look)

    handles = [watch(linear) for group in skeleton.layout.blocks[index] for linear in group]
    try:
        skeleton.run_block(index, hidden)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else f"block {index}: its outputs"


@torch.no_grad()
def staged_block(
    skeleton: Skeleton,
    index: int,
    stream: Stream,
    stages: Sequence[Sequence[Linear]],
    observe: Callable[..., None],
    change: Callable[[int], None],
    paused: bool = True,
    beside: tuple[Skeleton, Stream] | None = None,
) -> None:
    """Run block `index` over the stream, stopping at each stage.

    For stage k (linears that share their input): `observe(k, x)` is called once per batch with that input ([B, T, in],
    [T, in], or a list of [t, in] with one entry per expert), then `change(k)` once, which may replace the weights.
    Afterwards the stream holds the outputs of the changed block.

    `beside`: a second model and its stream over the same batches, run in step with the first: `observe(k, x, y)` then
    also gets that model's input, and its stream holds its outputs afterwards.
    """
    lanes = [_Lane(skeleton, index, stream, stages)]
    run = _run_paused if paused else _run_again
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [lane.remove() for lane in lanes])
        if beside is not None:
            lanes.append(_Lane(beside[0], index, beside[1], stages))
        for lane in lanes:
            stack.enter_context(through_onednn(lane.skeleton.block(index)))
        run(lanes, len(stages), len(stream.hidden), observe, change)


class _Lane:
    """One model's forwards through a block, each in a greenlet that hooks on the linear layers pause at every stage."""

    def __init__(self, skeleton: Skeleton, index: int, stream: Stream, stages: Sequence[Sequence[Linear]]) -> None:
        self.skeleton, self.index, self.stream = skeleton, index, stream
        self.watched: set[int] = set(range(len(stages)))
        self.passed: dict[greenlet, set[int]] = {}
        self.forwards: list[greenlet] = []
        self.handles = [
            module.register_forward_pre_hook(self._hook(k))
            for k, stage in enumerate(stages)
            for module in _stage_modules(skeleton, stage)
        ]

    def _hook(self, stage: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def arrive(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            me = getcurrent()
            passed = self.passed.setdefault(me, set())
            if stage in self.watched and stage not in passed:
                passed.add(stage)
                parent = me.parent
                assert parent is not None
                parent.switch(stage, inputs[0])

        return arrive

    def start(self) -> None:
        """A new forward for every batch, none begun."""
        self.passed.clear()
        self.forwards = [greenlet(self._forward) for _ in self.stream.hidden]

    def _forward(self, batch: int) -> Tensor:
        return self.stream.through(self.skeleton, self.index, batch)

    def _resume(self, batch: int) -> Any:
        run = self.forwards[batch]
        return run.switch() if run else run.switch(batch)

    def go(self, batch: int, stage: int) -> Any:
        """Let a batch's forward run to its next stop, which must be `stage`; its inputs there."""
        arrived = self._resume(batch)
        if not isinstance(arrived, tuple) or arrived[0] != stage:
            found = f"stage {arrived[0]}" if isinstance(arrived, tuple) else "the block's end"
            raise SutureError(f"block {self.index}: the forward came to {found} where stage {stage} was expected")
        return arrived[1]

    def finish(self, batch: int) -> None:
        """Let a batch's forward run to its end, and put its outputs into the stream."""
        out = self._resume(batch)
        assert isinstance(out, Tensor)
        self.stream.replace(batch, out)

    def end(self) -> None:
        """End forwards that are still paused; nothing for those that are finished or not begun."""
        for run in self.forwards:
            run.throw()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _stage_modules(skeleton: Skeleton, stage: Sequence[Linear]) -> list[nn.Module]:
    first = stage[0]
    experts = skeleton.family.experts
    if first.expert is None or experts is None:
        return [skeleton.model.get_submodule(linear.module) for linear in stage]
    path = f"{skeleton.layout.block_prefix(first.block)}{experts.module}"
    kind = "reach_down" if first.role.endswith("down_proj") else "reach_gate_up"
    return [skeleton.model.get_submodule(f"{path}.{kind}")]


def _run_paused(
    lanes: list[_Lane], n_stages: int, n_batches: int, observe: Callable[..., None], change: Callable[[int], None]
) -> None:
    for lane in lanes:
        lane.start()
    try:
        for stage in range(n_stages):
            for batch in range(n_batches):
                observe(stage, *[lane.go(batch, stage) for lane in lanes])
            change(stage)
        for batch in range(n_batches):
            for lane in lanes:
                lane.finish(batch)
    finally:
        for lane in lanes:
            lane.end()


def _run_again(
    lanes: list[_Lane], n_stages: int, n_batches: int, observe: Callable[..., None], change: Callable[[int], None]
) -> None:
    for stage in range(n_stages):
        for lane in lanes:
            lane.watched = set(range(stage, n_stages))  # a later one that comes first is an error
            lane.start()
        for batch in range(n_batches):
            observe(stage, *[lane.go(batch, stage) for lane in lanes])
            for lane in lanes:
                lane.forwards[batch].throw()
        change(stage)
    for lane in lanes:
        lane.watched = set()
        run_block(lane.skeleton, lane.index, lane.stream)
