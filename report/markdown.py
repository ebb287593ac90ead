"""report.json as one Markdown page: `report.md`, and what a terminal prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .figures import HUGE, figure_text, interval_text, number_text
from .layers import layer_lines
from .page import metric, protocol_text
from .qlora_bases import bases_lines


def markdown(content: Mapping[str, Any]) -> str:
    """The page. Every figure in it is one of report.json's."""
    protocol, sizes = content["protocol"], content["sizes"]
    rows = {(m["name"], m.get("model")): m for m in content["metrics"]}
    ratio = rows["ppl_ratio", None]
    found = content["verdict"]
    lines = [
        f"# {content['base']}: {' → '.join(step['step'] for step in content['steps']) or 'compared'}",
        "",
        f"**{found['word'].capitalize()}** within a margin of {_percent(found['margin'])}: {found['why']}.",
        "",
        f"**Perplexity × {_shown(ratio)}** "
        f"({_percent(ratio['level'])}, {ratio['n_clusters']} {ratio['cluster']}s, {ratio['n_tokens']:,} tokens, paired). "
        f"Weights {sizes['bytes_base'] / 1e6:,.1f} → {sizes['bytes_candidate'] / 1e6:,.1f} MB.",
        "",
        "| figure | base | candidate |",
        "|---|---|---|",
    ]
    for name, title in (("ppl", "perplexity per token"), ("bits_per_byte", "bits per byte")):
        if (name, "base") in rows:
            note = "" if rows[name, "base"].get("bytes_exact", True) else ", bytes by the share of tokens scored"
            lines.append(f"| {title}{note} | {_shown(rows[name, 'base'])} | {_shown(rows[name, 'candidate'])} |")
    excess, delta = rows["excess_log_ppl", None], rows["delta_ppl", None]
    lines += [
        f"| excess log-perplexity, nats | | {_shown(excess, 5)} |",
        f"| difference of perplexities | | {_shown(delta)} |",
        f"| weights, bytes | {sizes['bytes_base']:,} | {sizes['bytes_candidate']:,} |",
        f"| bits per parameter, all tensors | | {sizes['bits_per_parameter']} |",
    ]
    if content["kv_cache"]:
        before, after = content["kv_cache"]["before"], content["kv_cache"]["after"]
        title = f"KV cache, bytes per token ({after['dtype']}, live {after['kind']})"
        lines.append(f"| {title} | {before['bytes_per_token']:,} | {after['bytes_per_token']:,} |")
    if sizes["bits_per_quantized_weight"] is not None:
        lines.append(f"| bits per quantized weight, scales included | | {sizes['bits_per_quantized_weight']} |")
    lines += _fidelity_lines(content)
    lines += _set_lines(content["sets"])
    lines += task_lines(content)
    if bases := bases_lines(content):
        lines += ["", "## Where the adapter is merged", "", *(f"- {line}" for line in bases)]
    lines += ["", f"Intervals: {ratio['method']}; a cluster is one {ratio['cluster']}.", "", "## Protocol", ""]
    lines += [f"- {key}: `{value}`" for key, value in protocol.items()]
    if content["calibration"]:
        lines += ["", "## Calibration", ""]
        lines += [f"- {key}: `{value}`" for key, value in content["calibration"].items()]
    lines += ["", "## Steps", ""]
    lines += [f"- `{step['step']}`: `{step['settings']}`" for step in content["steps"]]
    lines += layer_lines(content["layers"])
    if content["warnings"]:
        lines += ["", "## Warnings", "", *(f"- {warning}" for warning in content["warnings"])]
    return "\n".join(lines) + "\n"


def _fidelity_lines(content: Mapping[str, Any]) -> list[str]:
    if content["fidelity"] is None:
        return []
    floor = content["noise_floor"]
    lines = ["", "| fidelity to the base | value | noise of arithmetic |", "|---|---|---|"]
    for row in content["fidelity"]["metrics"]:
        noise = metric(floor["metrics"], row["name"]) if floor is not None else None
        shown = figure_text(noise) if noise is not None else ""
        lines.append(f"| {row['name']}, {row['unit']} | {figure_text(row)} | {shown} |")
    return lines


def _set_lines(sets: Sequence[Mapping[str, Any]]) -> list[str]:
    if not sets:
        return []
    lines = ["", "| other texts | perplexity ratio | verdict | protocol |", "|---|---|---|---|"]
    for row in sets:
        ratio, protocol = metric(row["metrics"], "ppl_ratio"), row["protocol"]
        assert ratio is not None
        lines.append(f"| {row['name']} | {_shown(ratio)} | {row['verdict']['word']} | {protocol_text(protocol)} |")
    return lines


def task_lines(content: Mapping[str, Any]) -> list[str]:
    """A table of tasks, by log-likelihood and in words; empty without any."""
    rows = [*content["tasks"], *content["generation"]]
    if not rows:
        return []
    lines = ["", "| task | items | base | candidate | difference, paired | p, Holm | protocol |", "|---" * 7 + "|"]
    for row in rows:
        pair = row["paired"]
        cells = [
            f"{row['name']}, {row['metric']}",
            str(row["n_items"]),
            *(figure_text(row[model], percent=True) for model in ("base", "candidate")),
            interval_text(pair["difference"], pair["ci"], percent=True),
            number_text(pair["p_holm"], 2),
            row["protocol"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _shown(row: Mapping[str, Any], digits: int = 4) -> str:
    interval = row["ci"]
    bounds = "no interval" if interval is None else f"[{_fixed(interval[0], digits)}, {_fixed(interval[1], digits)}]"
    return f"{_fixed(row['value'], digits)} {bounds}"


def _fixed(value: float | str | None, digits: int = 4) -> str:
    if value is None or isinstance(value, str):
        return "—" if value is None else value
    return f"{value:.2e}" if abs(value) >= HUGE else f"{value:.{digits}f}"


def _percent(level: float) -> str:
    return f"{100 * level:g} %"
