"""Files that others wrote: regular files only, bounded sizes, and JSON read strictly.

Python's `json` keeps the last of two equal keys, takes NaN and Infinity, and turns 1e999 into infinity; a config or an
index that holds any of these means different things to different readers, so each is an error here.
"""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from .errors import SutureError

LFS_POINTER = b"version https://git-lfs"


def regular_size(path: Path) -> int:
    """Size in bytes of the regular file `path`, following links.

    Raises:
        SutureError: missing, a broken link, a directory, a device or pipe, or not permitted.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        if path.is_symlink():
            raise SutureError(f"{path} is a broken link", "download or copy the file that it points to") from error
        raise SutureError(f"{path} cannot be read: {_reason(error)}") from error
    if stat.S_ISDIR(status.st_mode):
        raise SutureError(f"{path} is a directory, a file was expected")
    if not stat.S_ISREG(status.st_mode):
        raise SutureError(f"{path} is not a regular file")
    return status.st_size


def refuse_lfs_pointer(path: Path, head: bytes) -> None:
    """Raise SutureError when `head`, the first bytes of `path`, is a git-LFS pointer instead of the file itself."""
    if head.startswith(LFS_POINTER):
        raise SutureError(
            f"{path} is a git-LFS pointer, the file itself was not fetched",
            "run `git lfs pull` in its repository, or download the file again",
        )


def strict_json(path: Path, limit: int) -> Any:
    """The JSON value in the file `path`, which may hold at most `limit` bytes.

    Raises:
        SutureError: unreadable, larger than `limit`, not UTF-8, not JSON, a duplicate key, NaN or Infinity.
    """
    size = regular_size(path)
    if size > limit:
        raise SutureError(f"{path} has {size:,} bytes, at most {limit:,} are read from such a file")
    try:
        with path.open("rb") as file:
            data = file.read(size + 1)  # not `limit`: that much would be set aside first
    except OSError as error:
        raise SutureError(f"{path} cannot be read: {_reason(error)}") from error
    refuse_lfs_pointer(path, data)
    if not data.strip():
        raise SutureError(f"{path} is empty, JSON was expected", "download it again")
    return parse_strict_json(data, str(path))


def parse_strict_json(data: bytes, where: str) -> Any:
    """The JSON value in `data`; `where` names its place in errors.

    Raises:
        SutureError: not UTF-8, not JSON, nested too deeply, a duplicate key, NaN, Infinity or an infinite number.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float
        )
        if "\\u" in text:  # an escape can smuggle in half a surrogate pair, which no later write could encode
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise SutureError(f"{where}: not valid UTF-8 ({error})") from error
    except RecursionError as error:
        raise SutureError(f"{where}: JSON nested too deeply") from error
    except ValueError as error:
        raise SutureError(f"{where}: not valid JSON: {error}") from error
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice!r} is there twice")
    return unique


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is too large for a number")
    return value


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
