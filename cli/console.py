"""How the command line speaks: bars on a terminal, plain lines elsewhere; results on stdout, everything else on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
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

T = TypeVar("T")
_LINE_EVERY = 10.0  # seconds between plain lines of one loop


class TerminalProgress:
    """`pipeline.progress.Progress` for people and for logs."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        if self.console.is_terminal:
            yield from self._bar(items, total, label)
        else:
            yield from self._lines(items, total, label)

    def say(self, text: str) -> None:
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
            if now - last >= _LINE_EVERY or done == total:
                each = (now - start) / done
                left = f", about {each * (total - done):.0f} s left" if done < total else ""
                print(f"{label}: {done}/{total}, {each:.1f} s each{left}", file=sys.stderr, flush=True)
                last = now
