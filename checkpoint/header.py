"""Safetensors headers: where each tensor's bytes lie in a file, checked in full before any of them is read.

A file is  8 bytes: header length N, little endian │ N bytes: JSON │ data.  The JSON maps a tensor's name to its dtype,
shape and data_offsets (begin, end), which must tile the data without hole or overlap up to the last byte of the file.
The format: https://github.com/huggingface/safetensors#format. We parse it ourselves because the library's messages do
not tell a truncated file from one with extra bytes, and because a header must cost no more than its own size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from .errors import SutureError, did_you_mean
from .strict_json import parse_strict_json, refuse_lfs_pointer, regular_size

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own bound
_PREFIX_BYTES = 8
_DOWNLOAD_AGAIN = "download or copy the file again"


class DType(NamedTuple):
    """How one safetensors dtype is stored."""

    bits: int  # per element
    torch_name: str | None  # attribute of torch; None: bytes only


DTYPES: dict[str, DType] = {
    "F64": DType(64, "float64"),
    "F32": DType(32, "float32"),
    "F16": DType(16, "float16"),
    "BF16": DType(16, "bfloat16"),
    "I64": DType(64, "int64"),
    "I32": DType(32, "int32"),
    "I16": DType(16, "int16"),
    "I8": DType(8, "int8"),
    "U64": DType(64, "uint64"),
    "U32": DType(32, "uint32"),
    "U16": DType(16, "uint16"),
    "U8": DType(8, "uint8"),
    "BOOL": DType(8, "bool"),
    "C64": DType(64, "complex64"),
    "F8_E4M3": DType(8, "float8_e4m3fn"),
    "F8_E5M2": DType(8, "float8_e5m2"),
    "F8_E8M0": DType(8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": DType(8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": DType(8, "float8_e5m2fnuz"),
    "F6_E2M3": DType(6, None),
    "F6_E3M2": DType(6, None),
    "F4": DType(4, None),
}

_CODES = {f"torch.{dtype.torch_name}": code for code, dtype in DTYPES.items() if dtype.torch_name}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, not loaded."""

    name: str
    dtype: str  # safetensors code, a key of DTYPES
    shape: tuple[int, ...]
    file: Path
    start: int  # byte offset in the file; -1: in a .bin file, where only torch can find it
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one safetensors file; tensors in the order of the header."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def code_of(dtype: torch.dtype) -> str:
    """Safetensors code of a torch dtype: `code_of(torch.bfloat16) == "BF16"`. SutureError when it has none."""
    code = _CODES.get(str(dtype))
    if code is None:
        raise SutureError(f"{dtype} has no safetensors dtype", f"cast to one of {', '.join(sorted(_CODES))}")
    return code


def torch_dtype_of(info: TensorInfo) -> torch.dtype:
    """The torch dtype of a tensor. SutureError for packed 4 and 6 bit floats, which torch cannot hold by element."""
    import torch

    name = DTYPES[info.dtype].torch_name
    dtype = getattr(torch, name, None) if name else None
    if dtype is None:
        raise SutureError(f"{info.file}: tensor {info.name!r} has dtype {info.dtype}, which torch has no dtype for")
    return dtype


def read_header(path: Path) -> Header:
    """Parse and check the header of the safetensors file `path`; no tensor data is read.

    Raises:
        SutureError: not a complete and consistent safetensors file; the message says in which way.
    """
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            data = _header_bytes(path, file, size)
    except OSError as error:
        raise SutureError(f"{path} cannot be read: {error.strerror}") from error
    entries = parse_strict_json(data, f"{path}: header")
    if not isinstance(entries, dict):
        raise SutureError(f"{path}: the header is not a JSON object", _DOWNLOAD_AGAIN)
    metadata = _metadata(path, entries.pop("__metadata__", None))
    data_start = _PREFIX_BYTES + len(data)
    tensors = {name: _tensor_info(path, name, entry, data_start) for name, entry in entries.items()}
    data_end = _check_tiling(path, tensors.values(), data_start)
    if size < data_end:
        raise SutureError(
            f"{path} is truncated: {data_end:,} bytes expected from its header, {size:,} are there", _DOWNLOAD_AGAIN
        )
    if size > data_end:
        raise SutureError(
            f"{path} has {size - data_end:,} bytes after its last tensor: {data_end:,} expected from its header, "
            f"{size:,} are there",
            f"{_DOWNLOAD_AGAIN}; if it was written by a tool, that tool left stale bytes behind",
        )
    return Header(tensors, metadata)


def _header_bytes(path: Path, file: BinaryIO, size: int) -> bytes:
    """The JSON bytes of the header. `file` is at its start; `size` is its size in bytes."""
    head = file.read(_PREFIX_BYTES)
    if size == 0 or not head:
        raise SutureError(f"{path} is empty, a safetensors file was expected", _DOWNLOAD_AGAIN)
    if head[0:4] == b"vers":
        refuse_lfs_pointer(path, head + file.read(32))
    length = int.from_bytes(head, "little") if len(head) == _PREFIX_BYTES else 0
    if length > MAX_HEADER_BYTES:
        raise SutureError(
            f"{path} is not a safetensors file: it would have a header of {length:,} bytes, "
            f"{MAX_HEADER_BYTES:,} are allowed",
            _DOWNLOAD_AGAIN,
        )
    if size < _PREFIX_BYTES + length:
        raise SutureError(
            f"{path} is truncated inside its header: at least {_PREFIX_BYTES + length:,} bytes expected, "
            f"{size:,} are there",
            _DOWNLOAD_AGAIN,
        )
    data = file.read(length)
    if len(data) < length:
        raise SutureError(f"{path} changed while it was read", "try again when nothing writes to it")
    return data


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise SutureError(f"{path}: __metadata__ in the header does not map texts to texts")
    return value


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """Check one entry of the header; `data_start` is the offset in the file where the data begins."""
    where = f"{path}: tensor {name!r:.200}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise SutureError(f"{where}: dtype, shape and data_offsets expected in the header, found {entry!r:.200}")
    code = entry["dtype"]
    if not isinstance(code, str) or code not in DTYPES:
        near = did_you_mean(code, DTYPES) if isinstance(code, str) else ""
        raise SutureError(
            f"{where} has dtype {code!r:.60}, which is not known here{near}", f"known: {', '.join(DTYPES)}"
        )
    nbytes = _nbytes(where, entry["shape"], DTYPES[code].bits)
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise SutureError(f"{where}: two offsets >= 0 expected in data_offsets, found {offsets!r:.200}")
    begin, end = offsets
    if end - begin != nbytes:
        raise SutureError(
            f"{where}: {code} of shape {tuple(entry['shape'])} takes {nbytes:,} bytes, "
            f"data_offsets ({begin}, {end}) hold {end - begin:,}",
            _DOWNLOAD_AGAIN,
        )
    return TensorInfo(name, code, tuple(entry["shape"]), path, data_start + begin, nbytes)


def _nbytes(where: str, shape: Any, bits: int) -> int:
    """Bytes of a tensor of `shape` with `bits` per element, after checking the shape."""
    if not isinstance(shape, list) or not all(_is_count(dim) for dim in shape):
        raise SutureError(f"{where}: a list of sizes >= 0 expected as shape, found {shape!r:.200}")
    strides = 1  # as the product, but a size of 0 counts 1: torch multiplies strides out even for an empty tensor
    for dim in shape:
        strides *= max(dim, 1)
        if strides * bits >= 2**63:
            raise SutureError(f"{where}: shape {shape!r:.200} is too large")
    total = math.prod(shape) * bits
    if total % 8:
        raise SutureError(f"{where}: shape {tuple(shape)} at {bits} bits per element does not fill whole bytes")
    return total // 8


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_tiling(path: Path, tensors: Iterable[TensorInfo], data_start: int) -> int:
    """Check that the tensors follow each other without hole or overlap; returns the file offset after the last."""
    position, before = data_start, "the header"
    for info in sorted(tensors, key=lambda info: (info.start, info.nbytes)):
        if info.start != position:
            kind = "overlaps" if info.start < position else "leaves a hole after"
            raise SutureError(
                f"{path}: tensor {info.name!r} {kind} {before}: offset {position - data_start:,} expected, "
                f"found {info.start - data_start:,}",
                _DOWNLOAD_AGAIN,
            )
        position, before = info.start + info.nbytes, f"tensor {info.name!r}"
    return position


def read_range(file: Path, start: int, nbytes: int) -> bytearray:
    """`nbytes` bytes of `file` from byte offset `start`.

    Raises:
        SutureError: the file is shorter than that, or the read fails.
    """
    return read_ranges(file, [(start, nbytes)])


def read_ranges(file: Path, ranges: list[tuple[int, int]]) -> bytearray:
    """The bytes of several (start, nbytes) ranges of `file`, one after the other. Raises as `read_range` does."""
    size = regular_size(file)  # before the buffer is allocated
    if any(start + nbytes > size for start, nbytes in ranges):
        raise _changed(file, max(start + nbytes for start, nbytes in ranges), size)
    buffer = bytearray(sum(nbytes for _, nbytes in ranges))
    view = memoryview(buffer)
    filled = start = 0
    try:
        with file.open("rb", buffering=0) as opened:
            for start, nbytes in ranges:
                opened.seek(start)
                range_end = filled + nbytes
                while filled < range_end:  # one read returns at most 2 GiB on Linux
                    count = opened.readinto(view[filled:range_end])
                    if not count:
                        raise _changed(file, start + nbytes, opened.tell())
                    filled += count
    except OSError as error:
        raise SutureError(f"{file}: reading failed at byte {start:,}: {error.strerror}") from error
    return buffer


def _changed(file: Path, expected: int, found: int) -> SutureError:
    return SutureError(
        f"{file} was truncated or changed after it was opened: {expected:,} bytes expected, {found:,} are there",
        "start again when nothing writes to it",
    )
