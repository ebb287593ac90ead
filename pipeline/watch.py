"""A run seen from outside: what its log says, and whether it still goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..checkpoint.errors import SutureError
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.staging import partial_of
from .progress import LOG, STARTED


@dataclass(frozen=True)
class Seen:
    """A line of the log, or (last) how the run ended."""

    text: str
    ended: Literal["", "finished", "died"] = ""


def follow(output: Path, every: float = 0.5) -> Iterator[Seen]:
    """The log's lines of the run that writes `output`, as they come, until it has finished or its process is gone.

    Raises SutureError when there is neither an output nor a run.
    """
    log = partial_of(output) / "work" / LOG
    if not log.is_file() and not (output / MANIFEST).is_file():
        raise SutureError(
            f"{output}: neither a finished output nor a run: there is no {log}", "give the run's output directory"
        )
    read = 0
    process: int | None = None
    while True:
        alive = process is None or _is_alive(process)  # asked before reading: what a dying run wrote is still shown
        lines, read = _new_lines(log, read)
        for line in lines:
            found = re.search(rf"{STARTED} (\d+)", line)
            process = int(found[1]) if found else process
            yield Seen(line)
        if not log.is_file():
            done = (output / MANIFEST).is_file()
            end = f"{output}: finished" if done else f"{output}: the run was given up, and left nothing"
            yield Seen(end, "finished" if done else "died")
            return
        if not alive or (process is not None and not _is_alive(process) and not _new_lines(log, read)[0]):
            yield Seen(f"{output}: the run has ended without an output; --resume goes on with what is done", "died")
            return
        time.sleep(every)


def _new_lines(log: Path, read: int) -> tuple[list[str], int]:
    """Whole lines after byte `read`, and where they end."""
    try:
        with log.open("rb") as file:
            file.seek(read)
            new = file.read()
    except FileNotFoundError:
        return [], read
    whole = new[: new.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), read + len(whole)


def _is_alive(process: int) -> bool:
    import psutil

    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
