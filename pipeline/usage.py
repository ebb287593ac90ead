"""What this process takes of the machine: its peak memory since a moment."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak() -> None:
    """Let `peak_memory` speak of what comes from now on, where the system can (Linux); else it is of the process's life."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")


def peak_memory() -> int:
    """Bytes of memory that this process had at most (resident, pages of mapped files among them)."""
    if _STATUS.exists():  # getrusage would also count what the parent had when it started this process
        line = next(line for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
