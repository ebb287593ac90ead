"""How a process of suture's own (a command, the loader that verifies) starts and ends; a notebook's is not touched."""

from __future__ import annotations

import atexit
import gc
import os
from pathlib import Path

_USUAL = gc.get_threshold()
_IMPORTING = (50_000, 20, 100)


def own_process() -> None:
    """To be called before torch is imported.

    torch and transformers make 400,000 objects that stay. Looking through them again and again takes a fifth of the time
    of their imports, and once more two seconds when the interpreter ends.

    In a container that may use less time than its machine has processors, threads are as many as it may use, unless
    OMP_NUM_THREADS says otherwise: torch's wait for one another in a loop, and each that is held back holds back all.
    """
    gc.set_threshold(*_IMPORTING)
    atexit.register(gc.freeze)
    quota = processor_quota()
    if quota is not None and quota < _processors():
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(quota))))


def imports_done() -> None:
    """Collect as Python usually does from here on: what refers to itself may hold a block's weights.

    What the imports made stays, and need not be looked through (a third of a second) whenever memory is given back.
    """
    if gc.get_threshold() == _IMPORTING:
        gc.freeze()
        gc.set_threshold(*_USUAL)


def _processors() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that this process's control groups (Linux, both versions) let it have; None: no limit."""
    found = [quota for quota in map(_quota_of, _groups(root)) if quota is not None]
    return min(found, default=None)


def _groups(root: Path) -> list[Path]:
    """Directories of the control groups that this process is in, and of those around them."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        inside = Path(path.lstrip("/"))
        groups += [top / part for part in (inside, *inside.parents)]
    return groups


def _quota_of(group: Path) -> float | None:
    """Of one control group."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            numbers = " ".join((group / name).read_text(encoding="utf-8") for name in names).split()
            quota, period = float(numbers[0]), float(numbers[1])
        except (OSError, ValueError, IndexError):  # no such file, or "max"
            continue
        return quota / period if quota > 0 and period > 0 else None
    return None
