"""The next block's tensors on their way to a GPU, while this block computes there.

A thread reads them, in a page-locked copy, and has them copied on a CUDA stream of its own; the block that takes them makes
the computing stream wait for that copy and nothing else. What it costs: one more block in its stored dtype on the GPU, and one
tensor at a time in page-locked memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor


class Mover(Protocol):
    """How a tensor gets from the processor's memory to where it is used."""

    def start(self, host: Tensor) -> Any:
        """Begin, in the thread that reads; what `finish` is given."""
        ...

    def finish(self, moving: Any) -> Tensor:
        """The tensor, usable by what is computed from now on."""
        ...


class CudaMover:
    """By a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def start(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        pinned = host.pin_memory()
        with torch.cuda.stream(self.stream):
            there = pinned.to(self.device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.stream)
        done.synchronize()  # in this thread: the page-locked copy may go, and the next one is not begun before
        return there, done

    def finish(self, moving: tuple[Tensor, torch.cuda.Event]) -> Tensor:
        there, done = moving
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(done)
        there.record_stream(computing)  # its memory is not given away before what is computed now is done with it
        return there


class Upload:
    """Tensors of a source that never changes, by name."""

    def __init__(self, read: Callable[[str], Tensor], mover: Mover) -> None:
        self._read, self._mover = read, mover
        self._thread = ThreadPoolExecutor(1, "suture-upload")
        self._coming: dict[str, Future[Any]] = {}

    def expect(self, names: Iterable[str]) -> None:
        """Begin to bring these; what was expected before and not taken is let go."""
        for coming in self._coming.values():
            coming.cancel()
        self._coming = {name: self._thread.submit(self._bring, name) for name in dict.fromkeys(names)}

    def take(self, name: str) -> Tensor | None:
        """The tensor, or None when it was not expected. Raises what reading it raised."""
        coming = self._coming.pop(name, None)
        return None if coming is None else self._mover.finish(coming.result())

    def _bring(self, name: str) -> Any:
        return self._mover.start(self._read(name))
