"""What Linux, macOS and Windows do differently with files: locks, room, positions, syncing, links.

Whatever a system has is used; the branches for what it lacks are tested by taking the calls away (tests/test_disk.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_BINARY: int = getattr(os, "O_BINARY", 0)  # Windows would turn every byte 10 into two
_PIECE = 1 << 30  # bytes per call: some systems take no more than 2 GiB


def take_lock(file: IO[Any]) -> None:
    """Lock an open file until it is closed, or its process ends. Raises OSError when another holds it."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]


def open_for_writing(path: Path) -> int:
    """A descriptor of a file that need not exist, for `reserve` and `write_at`; nothing in it is lost."""
    return os.open(path, os.O_RDWR | os.O_CREAT | _BINARY, 0o644)


def reserve(fd: int, size: int, directory: Path) -> None:
    """Make a file `size` bytes long. Raises OSError (ENOSPC) now when the disk has no room, not after hours.

    Without posix_fallocate (macOS, Windows) the room is only looked at: what others write meanwhile may take it.
    """
    reserves = hasattr(os, "posix_fallocate")
    if not reserves and shutil.disk_usage(directory).free < size - os.fstat(fd).st_size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, size)
    if reserves:
        os.posix_fallocate(fd, 0, size)


def write_at(fd: int, raw: bytes | bytearray | memoryview, offset: int) -> None:
    """Write bytes from a position on."""
    view = memoryview(raw).cast("B")
    while view:
        if hasattr(os, "pwrite"):
            done = os.pwrite(fd, view[:_PIECE], offset)
        else:
            os.lseek(fd, offset, os.SEEK_SET)
            done = os.write(fd, view[:_PIECE])
        view, offset = view[done:], offset + done


def read_soon(path: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Have the system read (start, bytes) ranges of a file into its cache, if it takes such advice; does not wait."""
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError):  # whoever reads will say what is wrong
        fd = os.open(path, os.O_RDONLY)
        try:
            for start, nbytes in ranges:
                os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def sync_file(path: Path) -> None:
    """Return once a file's bytes are on disk."""
    fd = os.open(path, (os.O_RDWR if os.name == "nt" else os.O_RDONLY) | _BINARY)  # Windows syncs what it may write
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Return once a directory's names are on disk; Windows neither can nor needs to be told."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def disk_used(directory: Path) -> int:
    """Bytes of the files below a directory; one that goes away meanwhile does not count."""
    total = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() and not file.is_symlink() else 0
    return total


def link_or_copy(file: Path, link: Path) -> None:
    """A second name for a file's bytes: a link where the system lets this user make one (Windows often does not)."""
    for make in (os.symlink, os.link, shutil.copyfile):
        try:
            make(file.resolve(), link)
        except OSError:
            if make is shutil.copyfile:
                raise
        else:
            return
