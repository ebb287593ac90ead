"""Give memory back to the system: what was freed in pieces, and pages of mapped files."""

from __future__ import annotations

import contextlib
import ctypes
import gc

_WORTH_TRIMMING = 8 << 20
_WORTH_COLLECTING = 32 << 20


def trim_memory(freed: int) -> None:
    """Give freed pieces, `freed` bytes in all, back where the C library can (glibc; Windows and macOS do it their own way).

    Not for a little: what is given back comes again page by page.
    """
    if freed < _WORTH_TRIMMING:
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_memory(freed: int) -> None:
    """The same, after collecting what only refers to itself (a model does), which looks at every object of torch."""
    if freed >= _WORTH_COLLECTING:
        gc.collect()
    trim_memory(freed)
