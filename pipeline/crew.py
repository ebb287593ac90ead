"""Several processes that train one model together: torchrun, or accelerate launch, starts this command once for each.

Process 0 does all that is done: it plans, writes, judges. Where a step trains, it shares the `Job` with the others, which
wait for nothing else; every process then takes its part of each step's sequences, gradients are summed over all, and all
make the same step. So nothing depends on how many they are, but for the order in which float32 numbers are added. The
processes must see the same files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.errors import SutureError

_PATIENCE = timedelta(days=30)  # how long the others wait while process 0 does what only one does


@dataclass(frozen=True)
class Crew:
    """This process among all of them."""

    rank: int = 0
    size: int = 1

    def share(self, job: Any) -> None:
        """Process 0: give the others something to do; None: nothing is left."""
        if self.size > 1:
            with _told(self.size):
                dist.broadcast_object_list([job], src=0)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors, of one dtype and device, by their sums over all processes. Raises SutureError when one of
        those is gone."""
        if self.size > 1:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            with _told(self.size):
                dist.all_reduce(flat)
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def follow(self, work: Callable[[Any, Crew], object]) -> None:
        """Other processes: do what process 0 shares until nothing is left."""
        while True:
            found: list[Any] = [None]
            with _told(self.size):
                dist.broadcast_object_list(found, src=0)
            if found[0] is None:
                return
            work(found[0], self)


ALONE = Crew()


@contextlib.contextmanager
def joined() -> Iterator[Crew]:
    """This process among those that a launcher started, by the environment that it set; alone where it set none."""
    size, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if size < 2:
        yield ALONE
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    crew = Crew(rank, size)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise SutureError(
            f"the {size} processes did not find each other: {' '.join(str(error).split())[:200]}",
            "start them with torchrun or accelerate launch",
        ) from error
    try:
        yield crew
        if rank == 0:
            crew.share(None)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _told(size: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo: the connection is closed; nccl: a DistBackendError, which is one
        raise SutureError(
            f"one of the {size} processes that train together is gone",
            "start them again with --resume: training goes on from its last checkpoint",
        ) from error
