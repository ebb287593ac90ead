"""Give memory back to the system: what was freed in pieces, and pages of mapped files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap

import torch

_WORTH_TRIMMING = 8 << 20
_WORTH_COLLECTING = 32 << 20
_MADV_PAGEOUT = 21  # Linux 5.4; an older kernel refuses it, and nothing happens


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


def let_go(tensor: torch.Tensor) -> None:
    """Tell the system that a tensor's memory will not be used soon (Linux): pages of a mapped file are given back, and come
    again when they are read; other memory stays what it is."""
    if tensor.device.type != "cpu" or tensor.numel() == 0 or not tensor.is_contiguous():
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if end > start:
        with contextlib.suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_PAGEOUT)
