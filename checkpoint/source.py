"""What the rest of suture needs from a checkpoint: named dense tensors, read one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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


@dataclass(frozen=True)
class PlannedSource:
    """What an earlier step will have written: names, shapes and dtypes, nothing to read yet."""

    source: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def read(self, name: str) -> torch.Tensor:
        raise SutureError(f"{name}: will only exist when the step before has run")

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        return self.read(name)
