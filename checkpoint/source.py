"""What the rest of suture needs from a checkpoint: named dense tensors, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .errors import SutureError

if TYPE_CHECKING:
    import torch


class TensorSource(Protocol):
    """Dense tensors by disk name. A plain checkpoint is one; so is a quantized one seen through its decoder."""

    @property
    def source(self) -> str:
        """What the user called it: a path, a hub id or `builtin:...`; for messages."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """The raw config.json."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by disk name."""
        ...

    @property
    def dtypes(self) -> Mapping[str, str]:
        """safetensors dtype code of every tensor by disk name."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor in its stored dtype (a quantized one: dequantized, in its scales' dtype)."""
        ...

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Rows of a 2-D tensor, without holding all of it where the storage allows."""
        ...


@runtime_checkable
class SideFiles(Protocol):
    """A source that knows the files beside its weights: a checkpoint, or what a step will have written."""

    def side(self, name: str) -> bytes | None:
        """The file `name`, whole; None when there is none."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A source that can have the system bring tensors from the disk before they are read."""

    def expect(self, names: Iterable[str]) -> None:
        """Tensors that will be read soon; nothing waits, and nothing is held."""
        ...


@runtime_checkable
class Settled(ReadsAhead, Protocol):
    """A source whose tensors never change, so that they may be read before they are asked for."""

    settled: bool  # True


def side_file(source: TensorSource, name: str) -> bytes | None:
    """A file that travels with the source's tensors; None when there is none, or the source knows of none."""
    return source.side(name) if isinstance(source, SideFiles) else None


@dataclass(frozen=True)
class PlannedSource:
    """What an earlier step will have written: names, shapes and dtypes, nothing to read yet.

    `side_files`: those that the step writes or (None) leaves out; others are those of `before`, its input.
    """

    source: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    side_files: Mapping[str, bytes | Path | None] = field(default_factory=dict)
    before: TensorSource | None = None

    def side(self, name: str) -> bytes | None:
        if name in self.side_files:
            content = self.side_files[name]
            return content.read_bytes() if isinstance(content, Path) else content
        return side_file(self.before, name) if self.before is not None else None

    def read(self, name: str) -> torch.Tensor:
        raise SutureError(f"{name}: will only exist when the step before has run")

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        return self.read(name)


@dataclass(frozen=True)
class _OfPlan:
    """Names, shapes and config of a step's output, as planned; what its tensors are the kinds below say."""

    planned: PlannedSource
    base: TensorSource

    @property
    def source(self) -> str:
        return self.planned.source

    @property
    def config(self) -> dict[str, Any]:
        return self.planned.config

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.planned.shapes

    @property
    def dtypes(self) -> Mapping[str, str]:
        return self.planned.dtypes


@dataclass(frozen=True)
class OverlaySource(_OfPlan):
    """What a step is turning `base` into: its planned names and shapes, with the tensors that exist so far.

    A tensor that was `put` is read as it is; any other planned name is read from `base`, where it must be unchanged.
    """

    _new: dict[str, torch.Tensor] = field(default_factory=dict)

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make `tensors` readable. Raises SutureError for a name or a shape that was not planned."""
        for name, tensor in tensors.items():
            if self.shapes.get(name) != tuple(tensor.shape):
                raise SutureError(f"{name}: {list(tensor.shape)} was made, {self.shapes.get(name)} was planned")
            self._new[name] = tensor

    def expect(self, names: Iterable[str]) -> None:
        if isinstance(self.base, ReadsAhead):
            shapes = self.base.shapes
            self.base.expect(name for name in names if name not in self._new and name in shapes)

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._new.pop(name, None)

    def read(self, name: str) -> torch.Tensor:
        return self._new[name] if name in self._new else self._unchanged(name).read(name)

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        return self._new[name][list(rows)] if name in self._new else self._unchanged(name).read_rows(name, rows)

    def _unchanged(self, name: str) -> TensorSource:
        if self.base.shapes.get(name) != self.shapes.get(name):
            raise SutureError(f"{name}: not made yet")
        return self.base


@dataclass(frozen=True)
class DerivedSource(_OfPlan):
    """What a step turns `base` into when each tensor can be made by itself, at any time.

    `derive(name)`: the tensor, or the name of the tensor of `base` that it is a copy of.
    """

    derive: Callable[[str], torch.Tensor | str]

    def read(self, name: str) -> torch.Tensor:
        made = self.derive(name)
        return self.base.read(made) if isinstance(made, str) else made

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        made = self.derive(name)
        return self.base.read_rows(made, rows) if isinstance(made, str) else made[list(rows)]
