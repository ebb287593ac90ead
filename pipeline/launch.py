"""Where a command finds the other processes that a launcher started for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..calibrate.crew import ALONE, Crew
from ..checkpoint.errors import SutureError

T = TypeVar("T")
_PATIENCE = timedelta(days=30)  # how long the others wait while process 0 does what only one does


@contextlib.contextmanager
def joined() -> Iterator[Crew]:
    """This process among those that a launcher started, by the environment that it set; alone where it set none."""
    size, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if size < 2:
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        store, _, _ = next(rendezvous("env://"))
        group = dist.ProcessGroupGloo(store, rank, size, _PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise SutureError(
            f"the {size} processes did not find each other: {' '.join(str(error).split())[:200]}",
            "start them with torchrun or accelerate launch",
        ) from error
    crew = Crew(rank, size, group)
    try:
        yield crew
    except SutureError:
        if rank == 0 and not crew.shared:  # refused before the work: nothing that the others need to be told of
            crew.share(None)
        raise
    if rank == 0:
        crew.share(None)


def together(work: Callable[[Crew], T]) -> T | None:
    """What `work` comes to in process 0; None in the others, which have then done what it gave them."""
    with joined() as crew:
        if crew.rank == 0:
            return work(crew)
        crew.follow()
        return None
