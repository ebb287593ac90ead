"""Give memory back to the system: what was freed in pieces, and pages of mapped files."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def trim_memory() -> None:
    """Give freed pieces back where the C library can (glibc; Windows and macOS do it their own way)."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_memory() -> None:
    """The same, after collecting what only refers to itself (a model does)."""
    gc.collect()
    trim_memory()
