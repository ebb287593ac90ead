"""How long loops tell what they do, without knowing who listens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")


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
