"""Where it hurts: what the steps measured of each layer, as a section of report.json and as a part of its pages.

Nothing here is measured again: errors, energies, ranges, spectra and token counts are those of the steps' own records.
They are values on the calibration text, one a layer, and have no intervals.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from .charts import Curve, curves, heatmap
from .figures import finite, number_text

Records = Mapping[str, Mapping[str, Any]]

_SHOWN = 10
_ENERGY = "0.99"  # share of energy whose rank the heat map shows


def layers_section(modules: Records, receipts: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The section `layers`. `modules`: layer -> its record, of all steps; `receipts`: of each step."""
    methods: dict[str, int] = {}
    for record in modules.values():
        method = record.get("method", "changed")
        methods[method] = methods.get(method, 0) + 1
    errors = _of(modules, "output_error")
    return {
        "by_method": methods,
        "fallbacks": {name: record["fallback"] for name, record in modules.items() if record.get("fallback")},
        "worst_output_errors": {name: errors[name] for name in _largest(errors)},
        "output_errors": errors,
        "weight_errors": _of(modules, "weight_error"),
        "retained_energy": _energies(modules),
        "input_ranges": _of(modules, "inputs"),
        "spectra": _spectra(modules, receipts),
        "coverage": _coverage(modules),
    }


def _of(modules: Records, key: str) -> dict[str, Any]:
    return {name: modules[name][key] for name in sorted(modules) if modules[name].get(key) is not None}


def _largest(values: Mapping[str, float]) -> list[str]:
    return sorted(values, key=lambda name: -values[name])[:_SHOWN]


def _energies(modules: Records) -> dict[str, dict[str, float]]:
    """Kind of energy (key_energy, value_energy, ...) -> layer -> the share of it that a step kept."""
    kinds: dict[str, dict[str, float]] = {}
    for name, record in modules.items():
        for key, value in record.items():
            if key.endswith("_energy") and isinstance(value, int | float):
                kinds.setdefault(key, {})[name] = float(value)
    return {key: kinds[key] for key in sorted(kinds)}


def _spectra(modules: Records, receipts: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Layer -> its spectrum: of its outputs where a text was seen, else of its weights; of a latent."""
    found: dict[str, dict[str, Any]] = {}
    for receipt in receipts:
        for name, record in receipt.get("spectra", {}).items():
            of = "outputs" if "outputs" in record else "weights"
            spectrum = record[of]
            found[name] = {
                "of": of,
                "full_rank": min(record["shape"]),
                "rank_for": spectrum["rank_for"],
                "effective_rank": spectrum["effective_rank"],
                "singular_values": spectrum["singular_values"],
            }
    for name, record in modules.items():
        if "latent_spectrum" in record:
            found[f"{name}.latent"] = {"of": "latent", **record["latent_spectrum"]}
    return {name: found[name] for name in sorted(found)}


def _coverage(modules: Records) -> dict[str, dict[str, int]]:
    """Layer -> calibration tokens that reached it, its inputs, and those of them that no token touched."""
    return {
        name: {
            "tokens": int(record["tokens"]),
            "inputs": int(record["shape"][1]),
            "dead": int(record.get("dead_columns", 0)),
        }
        for name, record in sorted(modules.items())
        if record.get("tokens") is not None and "shape" in record
    }


# -- on the page -------------------------------------------------------------------------------------------------------


def layers_view(layers: Mapping[str, Any]) -> dict[str, Any]:
    """What the page's template shows of the section."""
    of = "output" if layers["output_errors"] else "weight"
    errors = layers[f"{of}_errors"]
    ranges = layers["input_ranges"]
    return {
        "by_method": layers["by_method"],
        "fallbacks": layers["fallbacks"],
        "anything": bool(layers["by_method"] or layers["spectra"]),
        "errors_of": of,
        "errors": _map(f"Relative {of} error by layer", errors),
        "worst": [(name, number_text(errors[name])) for name in _largest(errors)],
        "lost": _lost(layers["retained_energy"]),
        "ranges": _map("Inputs' peak by layer", {name: found["peak_ratio"] for name, found in ranges.items()}),
        "widest": [_range_row(name, ranges[name]) for name in widest_inputs(ranges)],
        "spectra": _spectra_view(layers["spectra"]),
        "coverage": _coverage_view(layers["coverage"]),
    }


def widest_inputs(ranges: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Layers by how far the largest channel of their inputs stands above the median one."""
    return _largest({name: found["peak_ratio"] for name, found in ranges.items()})


def _range_row(name: str, found: Mapping[str, float]) -> tuple[str, ...]:
    return (
        name,
        number_text(found["max"]),
        f"{number_text(found['peak_ratio'])} ×",
        number_text(found["max_scaled"]),
        f"{number_text(found['peak_ratio_scaled'])} ×",
    )


def _map(title: str, values: Mapping[str, Any]) -> str | None:
    """Heat map of layers by role and block; the experts of a block share a cell, which shows the worst of them."""
    cells: dict[tuple[str, int], float] = {}
    for name, raw in values.items():
        place, value = place_of(name), finite(raw)
        if place is not None and value is not None:
            cells[place] = max(value, cells.get(place, 0.0))
    return heatmap(title, cells) if cells else None


def _lost(energies: Mapping[str, Mapping[str, float]]) -> str | None:
    lost: dict[tuple[str, int], float] = {}
    for kind, by_layer in energies.items():
        for name, share in by_layer.items():
            place = place_of(name)
            if place is not None:
                lost[kind.removesuffix("_energy"), place[1]] = max(0.0, 1 - share)
    return heatmap("Share of energy lost by layer", lost) if lost else None


def place_of(name: str) -> tuple[str, int] | None:
    """(`gate`, 3) of `model.layers.3.mlp.gate_proj`; experts are one row."""
    found = re.search(r"\.(\d+)(?:\.|$)(?:self_attn\.|attn\.|attention\.|mlp\.|block_sparse_moe\.)?(.*)$", name)
    if found is None:
        return None
    return re.sub(r"experts\.\d+\.", "experts.", found[2]).removesuffix("_proj") or "block", int(found[1])


def _spectra_view(spectra: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    if not spectra:
        return None
    by_role: dict[str, list[Mapping[str, Any]]] = {}
    for name, found in spectra.items():
        place = place_of(name)
        if place is not None:
            by_role.setdefault(place[0], []).append(found)
    lines, rows = [], []
    for role, group in by_role.items():
        shares = [_relative(found["singular_values"]) for found in group]
        middle = [median(values) for values in zip(*shares, strict=True)]
        lines.append(Curve(role, middle))
        needed = [found["rank_for"][_ENERGY] / found["full_rank"] for found in group]
        effective = [found["effective_rank"] / found["full_rank"] for found in group]
        cells = [f"{100 * median(x):.1f} % ({100 * min(x):.1f} to {100 * max(x):.1f})" for x in (needed, effective)]
        kept = {found["kept_rank"] for found in group if "kept_rank" in found}
        rows.append((f"{role}, {max(kept)} kept" if kept else role, str(len(group)), *cells))
    kinds = sorted({str(found["of"]) for found in spectra.values()})
    needed = {name: found["rank_for"][_ENERGY] / found["full_rank"] for name, found in spectra.items()}
    return {
        "of": " and ".join(kinds),
        "curves": curves("Singular values by role", lines, "rank, from the first to the last", "over the largest"),
        "map": _map("Share of the full rank that 99 % of the energy needs", needed),
        "rows": rows,
    }


def _relative(values: list[float]) -> list[float]:
    return [value / values[0] if values[0] else 0.0 for value in values]


def _coverage_view(coverage: Mapping[str, Mapping[str, int]]) -> dict[str, Any] | None:
    if not coverage:
        return None
    tokens = [found["tokens"] for found in coverage.values()]
    short = sum(found["tokens"] < found["inputs"] for found in coverage.values())
    unreached = sum(count == 0 for count in tokens)
    dead = sum(found["dead"] for found in coverage.values())
    least = sorted(coverage, key=lambda name: coverage[name]["tokens"] / max(1, coverage[name]["inputs"]))[:_SHOWN]
    facts = [
        f"calibration tokens per layer: {_span(tokens)}",
        f"{short} of {len(coverage)} layers saw fewer tokens than they have inputs" if short else "",
        f"{unreached} layers were reached by no token" if unreached else "",
        f"{dead} input columns were touched by no token" if dead else "",
    ]
    experts: dict[tuple[str, int], float] = {}
    for name, found in coverage.items():
        place = re.search(r"\.(\d+)\..*experts\.(\d+)\.", name)
        if place is not None:
            experts[f"block {place[1]}", int(place[2])] = float(found["tokens"])
    return {
        "text": "; ".join(fact for fact in facts if fact),
        "least": [(name, f"{coverage[name]['tokens']:,}", f"{coverage[name]['inputs']:,}") for name in least]
        if len(set(tokens)) > 1 or short
        else [],
        "experts": heatmap("Calibration tokens by block and expert", experts, "expert") if experts else None,
    }


def _span(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def layer_lines(layers: Mapping[str, Any]) -> list[str]:
    """The section in report.md."""
    if not layers["by_method"]:
        return []
    lines = ["", "## Layers", ""]
    lines += [f"- {count} by {method}" for method, count in layers["by_method"].items()]
    lines += [f"- **fallback** {name}: {reason}" for name, reason in layers["fallbacks"].items()]
    if layers["worst_output_errors"]:
        lines += ["", "| largest relative output errors on the calibration tokens | |", "|---|---|"]
        lines += [f"| {name} | {error:.4f} |" for name, error in layers["worst_output_errors"].items()]
    ranges = layers["input_ranges"]
    if ranges:
        lines += ["", "| widest inputs | largest, and over the median channel's | after scaling |", "|---|---|---|"]
        lines += [_range_line(name, ranges[name]) for name in widest_inputs(ranges)]
    return lines


def _range_line(name: str, found: Mapping[str, float]) -> str:
    before = f"{found['max']:.4g}, {found['peak_ratio']:.4g} ×"
    return f"| {name} | {before} | {found['max_scaled']:.4g}, {found['peak_ratio_scaled']:.4g} × |"
