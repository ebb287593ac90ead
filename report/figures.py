"""Figures as text: as many decimals as the interval justifies, byte counts in the units of the Hub."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Figure = float | str | None  # report.json writes infinities as strings


def finite(value: Figure) -> float | None:
    """The number, or None for what is undefined or infinite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def figure_text(row: Mapping[str, Any] | None, *, percent: bool = False) -> str:
    """`1.0142 [1.0117, 1.0167]`, or the value and "no interval"."""
    return "—" if row is None else interval_text(row["value"], row["ci"], percent=percent)


HUGE = 1e7  # from here on numbers are shown by their powers of ten


def interval_text(value: Figure, ci: Sequence[Figure] | None, *, percent: bool = False) -> str:
    """Two significant digits of the interval's half width decide the decimals."""
    scale = 100.0 if percent else 1.0
    number = finite(value)
    if number is None:
        return "—" if value is None else str(value).replace("Infinity", "∞")
    unit = " %" if percent else ""
    if ci is None:
        return f"{number_text(number * scale)}{unit}, no interval"
    low, high = finite(ci[0]), finite(ci[1])
    if low is None or high is None:
        return f"{number_text(number * scale)}{unit} [{ci[0]}, {ci[1]}]"
    half = (high - low) * scale / 2
    if max(abs(low), abs(high), abs(number)) * scale >= HUGE:
        return f"{number * scale:.2e}{unit} [{low * scale:.2e}, {high * scale:.2e}]"
    if half == 0:
        shown = number_text(number * scale)
        return f"{shown}{unit} [{shown}, {shown}]"
    decimals = 1 - math.floor(math.log10(half))
    if decimals > 6 and abs(number * scale) < 1e-2:
        return f"{number * scale:.2e}{unit} [{low * scale:.2e}, {high * scale:.2e}]"
    if decimals > 9:  # too narrow to be read off two ends
        return f"{number_text(number * scale)}{unit} ± {half:.1e}"
    decimals = min(max(decimals, 0), 8)
    return f"{number * scale:.{decimals}f}{unit} [{low * scale:.{decimals}f}, {high * scale:.{decimals}f}]"


def number_text(value: Figure, digits: int = 4) -> str:
    number = finite(value)
    if number is None:
        return "—" if value is None else str(value).replace("Infinity", "∞")
    if number == 0:
        return "0"
    return f"{number:.2e}" if abs(number) < 1e-4 or abs(number) >= HUGE else f"{number:.{digits}g}"


def bytes_text(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,.0f} B"


def count_text(count: float) -> str:
    """`27.23 B` for parameters and tokens."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{_four(count / size)} {unit}"
    return f"{count:,.0f}"


def flops_text(count: float) -> str:
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= size:
            return f"{_four(count / size)} {unit}"
    return f"{count:,.0f} FLOP"


def seconds_text(seconds: float) -> str:
    """`27.2 ms`, `8.3 s`, `2 min 5 s`, `3 h 20 min`."""
    if seconds < 60:
        for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
            if seconds >= size:
                return f"{seconds / size:.3g} {unit}"
        return f"{seconds / 1e-9:.3g} ns"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _four(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}".rstrip(".")
