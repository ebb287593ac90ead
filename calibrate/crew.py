"""Several processes that carry out one command together: torchrun, or accelerate launch, starts it once for each.

Process 0 does all that is done: it plans, writes, judges. Where work can be divided, it shares a job with the others,
which wait for nothing else, and every process takes its part:

- training: of each step's sequences; gradients are summed over all, and all make the same step. Nothing depends on how
  many they are, but for the order in which float32 numbers are added.
- scoring: of the windows, whose figures process 0 puts together. Nothing depends on how many they are.
- rounding with GPTQ: of the calibration text, whose second moments are added up in the order of one process, and of the
  rows of each layer. Nothing depends on how many they are.

What is not divided process 0 does while the others wait. The processes must see the same files.

Their connections are no default group of torch.distributed, which libraries would find: compressed-tensors, loading a
checkpoint, would then wait for the other processes to load it too.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError

T = TypeVar("T")


class Job(Protocol):
    """Work in which all processes take part; plain data, which process 0 sends to the others."""

    def help(self, crew: Crew) -> None:
        """What another process than 0 does for it."""
        ...


@dataclass(eq=False)
class Crew:
    """This process among all of them. What talks to others raises SutureError when one of them is gone."""

    rank: int = 0
    size: int = 1
    group: Any = None  # what moves tensors between them, in the processors' memory
    shared: int = 0  # jobs so far

    def own(self, file: Path) -> Path:
        """The name that this process gives a file for itself: in one directory, no two of them may have one name."""
        return file if self.size == 1 else file.with_stem(f"{file.stem}-of-{self.rank}")

    def share(self, job: Job | None) -> None:
        """Process 0: give the others something to do; None: nothing is left."""
        if self.size > 1:
            self.shared += job is not None
            self._send_all(job)

    def follow(self) -> None:
        """Other processes: do what process 0 shares until nothing is left."""
        while (job := self._send_all(None)) is not None:
            job.help(self)

    def _send_all(self, thing: Any) -> Any:
        """What process 0 has, on every process."""
        content = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        self.broadcast(size, 0)
        if self.rank > 0:
            content = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(content, 0)
        return pickle.loads(content.numpy().tobytes())

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Make the tensor, on any device, what it is in process `source`."""
        if self.size > 1:
            content = tensor.cpu()
            with _told(self.size):
                self.group.broadcast(content, source).wait()
            if content is not tensor and self.rank != source:
                tensor.copy_(content)

    def give(self, tensor: Tensor, to: int, tag: int) -> Callable[[], None]:
        """Begin to send a tensor to the process `to`, if there is such; call what this returns before it changes."""
        if not 0 <= to < self.size:
            return _nothing
        content = tensor.cpu()
        with _told(self.size):
            sending = self.group.send([content], to, tag)

        def sent() -> None:
            with _told(self.size):
                sending.wait()

        return sent

    def take(self, tensor: Tensor, source: int, tag: int) -> Callable[[], None]:
        """Begin to receive what the process `source`, if there is such, gives under this tag; it is there once what this
        returns has been called."""
        if not 0 <= source < self.size:
            return _nothing
        content = tensor.cpu()
        with _told(self.size):
            receiving = self.group.recv([content], source, tag)

        def arrived() -> None:
            with _told(self.size):
                receiving.wait()
            if content is not tensor:
                tensor.copy_(content)

        return arrived

    def meet(self) -> None:
        """Return once all processes have come here."""
        self.sum([torch.zeros(1)])

    def part(self, n: int) -> range:
        """Of n things in a row, those that this process takes: the first process the first ones, and so on."""
        return range(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors, of one dtype and device, by their sums over all processes."""
        if self.size > 1:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
            with _told(self.size):
                self.group.allreduce([flat]).wait()
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def gather(self, part: T) -> list[T]:
        """Every process's part, in the order of their ranks; tensors in it must be on the CPU."""
        if self.size == 1:
            return [part]
        content = torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(content)
        self.sum([sizes])
        found = [
            content if rank == self.rank else torch.empty(n, dtype=torch.uint8) for rank, n in enumerate(sizes.tolist())
        ]
        for rank, one in enumerate(found):
            self.broadcast(one, rank)
        return [part if rank == self.rank else pickle.loads(one.numpy().tobytes()) for rank, one in enumerate(found)]


ALONE = Crew()


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _told(size: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo: the connection is closed
        raise SutureError(
            f"one of the {size} processes that work together is gone",
            "start them again with --resume: the run goes on from what is done (its own message, if any, says why it ended)",
        ) from error
