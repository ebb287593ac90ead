"""How the command line speaks: bars on a terminal, plain lines elsewhere; results on stdout, everything else on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..pipeline.progress import loop_line

T = TypeVar("T")
_LINE_EVERY = 10.0  # seconds between plain lines of one loop


class Level(IntEnum):
    """How much is told beside the result."""

    quiet = -1
    normal = 0
    verbose = 1


_TOLD = {"level": Level.normal}  # of this process, which carries out one command


def set_level(level: Level) -> None:
    """For the command that is being parsed."""
    _TOLD["level"] = level


def level() -> Level:
    return _TOLD["level"]


class TerminalProgress:
    """`pipeline.progress.Progress` for people and for logs: bars on a terminal, lines elsewhere and with -v, or nothing."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.level = level()

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        if self.level is Level.quiet:
            yield from items
        elif self.console.is_terminal and self.level is Level.normal:
            yield from self._bar(items, total, label)
        else:
            yield from self._lines(items, total, label)

    def say(self, text: str) -> None:
        if self.level is not Level.quiet:
            self.console.print(text, markup=False, soft_wrap=True)

    def _bar(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(label, total=total, rate="")
            start = time.perf_counter()
            for done, item in enumerate(items, start=1):
                yield item
                progress.update(task, advance=1, rate=f"{(time.perf_counter() - start) / done:.1f} s each")

    def _lines(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        start = last = time.perf_counter()
        for done, item in enumerate(items, start=1):
            yield item
            now = time.perf_counter()
            if now - last >= (_LINE_EVERY if self.level is Level.normal else 0.0) or done == total:
                print(loop_line(label, done, total, now - start), file=sys.stderr, flush=True)
                last = now
