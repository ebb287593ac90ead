"""How a report tells which base a QLoRA adapter was better merged into."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from .figures import number_text


def rounded_bases(found: Mapping[str, Any]) -> dict[str, Any]:
    """The section `qlora_bases` with figures of seven digits."""
    rows = [{key: value if key == "model" else _number(value) for key, value in row.items()} for row in found["merged"]]
    return dict(found) | {"adapter_on_nf4_ppl": _number(found["adapter_on_nf4_ppl"]), "merged": rows}


def bases_lines(content: Mapping[str, Any]) -> list[str]:
    """Sentences on the section; none where nothing was compared."""
    found = content.get("qlora_bases")
    if found is None:
        return []
    lines = [
        f"the adapter on the NF4 base: perplexity {_shown(found['adapter_on_nf4_ppl'])} ({found['text']}, "
        f"{found['tokens']:,} tokens)"
    ]
    for row in found["merged"]:
        bounds = (
            "" if row["low"] is None else f" [{row['low']:.4f}, {row['high']:.4f}] ({100 * found['level']:g} %, paired)"
        )
        times = "" if row["ratio"] is None else f", × {row['ratio']:.4f}{bounds} of the adapter's on NF4"
        lines.append(f"{row['model'].replace('_', ' ')}: perplexity {_shown(row['ppl'])}{times}")
    return lines


def _shown(value: float | None) -> str:
    return "not finite" if value is None else number_text(value)


def _number(value: float | None) -> float | None:
    return None if value is None or not isfinite(value) else float(f"{value:.7g}")
