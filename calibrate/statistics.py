"""Streaming statistics of a linear layer's inputs.

Tokens are summed up `chunk` at a time, counted from the first: sums do not depend on how the text was batched, and a
product over many tokens passes over the [in, in] total less often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

CHUNK = 2048  # tokens
EXPERT_CHUNK = 128  # of an expert, whose buffers are many and see few tokens
_PANEL = 256  # columns per panel of the symmetric product: only the upper panels are computed


@dataclass
class Waiting:
    """Rows [chunk, ...] that wait until they are enough."""

    chunk: int
    rows: Tensor | None = None
    held: int = 0

    def through(self, x: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """The chunks that x [tokens, ...] completes, in `dtype`; each is to be used before the next is asked for."""
        start = 0
        while start < len(x):
            taken = min(self.chunk - self.held, len(x) - start)
            if taken == self.chunk:
                yield x[start : start + taken].to(dtype)
            else:
                if self.rows is None:
                    self.rows = torch.empty(self.chunk, *x.shape[1:], dtype=dtype, device=x.device)
                self.rows[self.held : self.held + taken] = x[start : start + taken]
                self.held += taken
                if self.held == self.chunk:
                    self.held = 0
                    yield self.rows
            start += taken

    def rest(self) -> Iterator[Tensor]:
        """What still waits, and will not again."""
        if self.rows is not None and self.held:
            yield self.rows[: self.held]
        self.rows, self.held = None, 0


@dataclass
class SecondMoment:
    """H = (1/n) sum over tokens of x xᵀ, [in, in]; GPTQ's Hessian up to a factor that it does not feel."""

    total: Tensor  # [in, in]: upper panels of sum x xᵀ over the tokens that do not wait
    tokens: int = 0
    waiting: Waiting = field(default_factory=lambda: Waiting(CHUNK))

    @classmethod
    def zeros(
        cls,
        in_features: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        chunk: int = CHUNK,
    ) -> SecondMoment:
        return cls(torch.zeros(in_features, in_features, dtype=dtype, device=device), 0, Waiting(chunk))

    def add(self, x: Tensor) -> None:
        """x: [..., in]: what is before the last counts as tokens."""
        rows = self.rows(x)
        self.tokens += len(rows)
        self._sum(self.waiting.through(rows, self.total.dtype))

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (len(self.total),)

    def rows(self, x: Tensor) -> Tensor:
        """[tokens, in] of what `add` takes."""
        return x.reshape(-1, x.shape[-1])

    def panels(self) -> Iterator[slice]:
        """Rows of the total that are summed by themselves."""
        return _panels(len(self.total))

    def add_panel(self, panel: slice, rows: Tensor) -> None:
        """Add one chunk's share of a panel."""
        self.total[panel, panel.start :].addmm_(rows[:, panel].T, rows[:, panel.start :])

    def _sum(self, chunks: Iterator[Tensor]) -> None:
        for rows in chunks:
            for panel in self.panels():
                self.add_panel(panel, rows)

    def hessian(self) -> Tensor:
        """H [in, in], symmetric; zeros when no token was seen."""
        self._sum(self.waiting.rest())
        return _symmetric(self.total.triu()).div_(max(self.tokens, 1))

    def into_hessian(self) -> Tensor:
        """`hessian`, in the place of the sum: nothing can be added or asked any more."""
        self._sum(self.waiting.rest())
        return _symmetric(self.total.triu_()).div_(max(self.tokens, 1))


def _panels(n: int) -> Iterator[slice]:
    return (slice(start, min(start + _PANEL, n)) for start in range(0, n, _PANEL))


def _symmetric(upper: Tensor) -> Tensor:
    """An upper triangular matrix with its triangle mirrored, in place."""
    for start in range(0, len(upper), _PANEL):
        end = start + _PANEL
        corner = upper[start:end, start:end]
        corner.add_(corner.triu(1).T)
        upper[end:, start:end] = upper[start:end, end:].T
    return upper


@dataclass
class Deviation:
    """D = (1/n) sum over tokens of (x̃ - x) xᵀ, [in, in]: how inputs x miss those of another model, x̃, along themselves."""

    total: Tensor
    tokens: int = 0
    waiting: Waiting = field(default_factory=lambda: Waiting(CHUNK))

    @classmethod
    def zeros(
        cls, in_features: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Deviation:
        return cls(torch.zeros(in_features, in_features, dtype=dtype, device=device))

    def add(self, x: Tensor, other: Tensor) -> None:
        """x, other: [..., in], the same tokens through either model."""
        pairs = self.rows(x, other)
        self.tokens += len(pairs)
        self._sum(self.waiting.through(pairs, self.total.dtype))

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (2, len(self.total))

    def rows(self, x: Tensor, other: Tensor) -> Tensor:
        """[tokens, 2, in] of what `add` takes."""
        width = x.shape[-1]
        return torch.stack((x.reshape(-1, width), other.reshape(-1, width)), 1)

    def panels(self) -> Iterator[slice]:
        """Rows of the total that can be summed by themselves."""
        return _panels(len(self.total))

    def add_panel(self, panel: slice, pairs: Tensor) -> None:
        """Add one chunk's share of a panel."""
        one, two = pairs.unbind(1)
        self.total[panel].addmm_((two[:, panel] - one[:, panel]).T, one)

    def _sum(self, chunks: Iterator[Tensor]) -> None:
        for pairs in chunks:
            one, two = pairs.unbind(1)
            self.total.addmm_((two - one).T, one)

    def mean(self) -> Tensor:
        """D [in, in]; zeros when no token was seen."""
        self._sum(self.waiting.rest())
        return self.total / max(self.tokens, 1)
