"""What trainings recorded, as a section of report.json and as a part of the page: their curves, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .charts import progress
from .figures import number_text

_LOSS, _HELD = "training loss", "divergence, held out"


def healing_section(steps: Sequence[tuple[str, Any]], receipts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per step that trained as a whole model: its curve as it was recorded, and which model was kept."""
    return [
        {
            "step": number + 1,
            "name": name,
            "steps": receipt["steps"],
            "tokens": receipt["tokens"],
            "kept": receipt["kept"],
            "held_out": dict(receipt["held_out"]),
            "curve": [dict(point) for point in receipt["curve"]],
        }
        for number, ((name, _), receipt) in enumerate(zip(steps, receipts, strict=False))
        if "curve" in receipt
    ]


def healing_view(healing: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the page's template shows of the section."""
    return [_view(found) for found in healing]


def _view(found: Mapping[str, Any]) -> dict[str, Any]:
    curve = found["curve"]
    loss = [(point["step"], point["loss"]) for point in curve if "loss" in point]
    held = [(point["step"], point["held_out_kl"]) for point in curve]
    lines = [(label, points) for label, points in ((_LOSS, loss), (_HELD, held)) if points]
    mean, low, high = found["held_out"]["kl_change_low_high"]
    trained = f"{found['steps']:,} steps, {found['tokens']:,} tokens" if found["steps"] else "no step was needed"
    change = f"{number_text(mean)} [{number_text(low)}, {number_text(high)}] nats per token"
    title = f"Training of step {found['step']}, {found['name']}"
    return {
        "title": title,
        "chart": progress(title, lines, "step", "nats per token"),
        "text": f"{trained}; kept: {found['kept']}; change of the divergence from the original on held-out sequences: {change}",
        "rows": [
            (
                f"{point['step']:,}",
                number_text(point["loss"]) if "loss" in point else "",
                number_text(point["held_out_kl"]),
            )
            for point in _spread(curve)
        ],
    }


def _spread(curve: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most eleven points, the first and the last among them."""
    last = len(curve) - 1
    return [curve[i] for i in sorted({round(last * k / 10) for k in range(11)})]
