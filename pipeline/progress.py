"""How long loops tell what they do, without knowing who listens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
LOG = "run.log"  # beside the journal
STARTED = "started, process"
_EVERY = 10.0  # seconds between a loop's lines in the log


class Progress(Protocol):
    """The command line shows bars or lines; a library call is silent."""

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        """The items, while the loop over them is shown."""
        ...

    def say(self, text: str) -> None:
        """One line about what happens now."""
        ...


class Silent:
    """Says nothing."""

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        yield from items

    def say(self, text: str) -> None:
        return


class Logged:
    """Passes everything on, and appends it with the time of day to a file that others can follow.

    The log is for people: a disk that is full, or a log that is gone, never ends a run.
    """

    def __init__(self, shown: Progress, log: Path) -> None:
        self.shown, self.log = shown, log
        self._write(f"{STARTED} {os.getpid()}")

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        start = last = time.perf_counter()
        for done, item in enumerate(self.shown.track(items, total, label), start=1):
            yield item
            now = time.perf_counter()
            if now - last >= _EVERY or done == total:
                self._write(loop_line(label, done, total, now - start))
                last = now

    def say(self, text: str) -> None:
        self._write(text)
        self.shown.say(text)

    def __enter__(self) -> Logged:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """What ended the run, for those who look later."""
        if error is not None:
            self._write(f"ended: {type(error).__name__} {' '.join(str(error).split())}".rstrip())

    def _write(self, text: str) -> None:
        with suppress(OSError), self.log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")


class Notebook:
    """One line in a notebook's cell, rewritten as the work goes on."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def track(self, items: Iterable[T], total: int, label: str) -> Iterator[T]:
        start = last = time.perf_counter()
        for done, item in enumerate(items, start=1):
            yield item
            now = time.perf_counter()
            if now - last >= 0.5 or done == total:
                self.say(loop_line(label, done, total, now - start))
                last = now

    def say(self, text: str) -> None:
        shown = self._display.Pretty(text)
        if self._handle is None:
            self._handle = self._display.display(shown, display_id=True)
        else:
            self._handle.update(shown)


def default_progress() -> Progress:
    """What a library call does when it is not told: a line in a notebook, silence elsewhere."""
    in_notebook = "ipykernel" in sys.modules and "IPython.display" in sys.modules
    return Notebook(sys.modules["IPython.display"]) if in_notebook else Silent()


def loop_line(label: str, done: int, total: int, seconds: float) -> str:
    """`gptq: 3/30, 4.2 s each, about 1 min 53 s left`"""
    each = seconds / done
    left = f", about {_left(each * (total - done))} left" if done < total else ""
    return f"{label}: {done}/{total}, {each:.1f} s each{left}"


def _left(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
