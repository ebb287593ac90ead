"""Stream tensors into safetensors shards whose layout is known before the first byte.

All names, dtypes and shapes of the output are planned first. So every tensor has a fixed place in a fixed file: tensors
can arrive in any order, a shard never has to fit in memory, the space is reserved before the work starts, and a resumed
run writes the same bytes to the same places.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from .disk import open_for_writing, reserve, write_at
from .errors import SutureError
from .header import DTYPES, code_of

if TYPE_CHECKING:
    import torch

DEFAULT_SHARD_BYTES = 5_000_000_000
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the output: dtype as safetensors' code (`BF16`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return (prod(self.shape) * DTYPES[self.dtype].bits + 7) // 8


@dataclass(frozen=True)
class Shard:
    """One file: its header's bytes (8-byte length included) and where each tensor begins."""

    file: str
    header: bytes
    starts: dict[str, int]
    size: int


@dataclass(frozen=True)
class ShardPlan:
    """All files of the output's weights."""

    shards: tuple[Shard, ...]
    specs: dict[str, TensorSpec]
    index: bytes | None  # model.safetensors.index.json, when there are several shards

    @property
    def nbytes(self) -> int:
        return sum(shard.size for shard in self.shards)


def plan_shards(specs: Sequence[TensorSpec], max_bytes: int = DEFAULT_SHARD_BYTES) -> ShardPlan:
    """Place tensors in order into shards of at most `max_bytes` (a larger tensor gets a shard of its own)."""
    by_name = {spec.name: spec for spec in specs}
    if len(by_name) != len(specs):
        raise SutureError("the output would hold two tensors of one name")
    parts: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if parts[-1] and filled + spec.nbytes > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(spec)
        filled += spec.nbytes
    n = len(parts)
    names = ["model.safetensors"] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    shards = tuple(_shard(name, part) for name, part in zip(names, parts, strict=True))
    index = None
    if n > 1:
        weight_map = {spec.name: shard.file for shard, part in zip(shards, parts, strict=True) for spec in part}
        total = sum(spec.nbytes for spec in specs)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        index = (json.dumps(content, indent=2) + "\n").encode()
    return ShardPlan(shards, by_name, index)


def _shard(file: str, specs: Iterable[TensorSpec]) -> Shard:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    at = 0
    for spec in specs:
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        offsets[spec.name] = at
        at += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Shard(file, header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + at)


class ShardWriter:
    """Writes tensors to their planned places. Use as a context manager."""

    def __init__(self, directory: Path, plan: ShardPlan) -> None:
        self.plan = plan
        self.directory = directory
        self._home = {name: shard for shard in plan.shards for name in shard.starts}
        self._open: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._marks = threading.Lock()  # one thread may sync while another writes
        directory.mkdir(parents=True, exist_ok=True)
        with disk_errors(directory):
            for shard in plan.shards:
                self._reserve(shard)
            if plan.index is not None:
                (directory / "model.safetensors.index.json").write_bytes(plan.index)

    def _reserve(self, shard: Shard) -> None:
        fd = open_for_writing(self.directory / shard.file)
        self._open[shard.file] = fd
        reserve(fd, shard.size, self.directory)
        write_at(fd, shard.header, 0)
        self._dirty.add(shard.file)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor; its dtype and shape must be the planned ones."""
        import torch

        spec = self.plan.specs[name]
        if code_of(tensor.dtype) != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise SutureError(
                f"{name}: planned as {spec.dtype} {list(spec.shape)}, computed as "
                f"{code_of(tensor.dtype)} {list(tensor.shape)}"
            )
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self.write_bytes(name, raw.numpy().data)

    def write_bytes(self, name: str, raw: bytes | bytearray | memoryview) -> None:
        """Write a tensor's bytes as they are."""
        spec, shard = self.plan.specs[name], self._home[name]
        if len(raw) != spec.nbytes:
            raise SutureError(f"{name}: planned with {spec.nbytes} bytes, given {len(raw)}")
        with disk_errors(self.directory / shard.file):
            write_at(self._open[shard.file], raw, shard.starts[name])
        with self._marks:
            self._dirty.add(shard.file)

    def sync(self) -> None:
        """Return once everything written so far is on disk."""
        with self._marks:
            files, self._dirty = sorted(self._dirty), set()  # what is written meanwhile waits for the next call
        with disk_errors(self.directory):
            for file in files:
                os.fsync(self._open[file])

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's write errors into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise SutureError(f"{path}: the disk is full", "free some space, then run again with --resume") from error
        raise SutureError(f"{path}: {error.strerror or error}", "nothing was put under the final name") from error
