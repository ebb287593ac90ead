"""The report: every figure with its interval and its protocol, as data (`report.json`) and as a page (`report.md`).

`report.json` follows `report/schema.json`; the page is made from it alone. `report-tokens.npy` holds the NLL of every
scored token under both models, from which each interval can be computed again (of bits per byte: with the texts'
bytes). Nothing in them depends on the time or the place of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoint.manifest import to_json
from ..checkpoint.reader import Checkpoint
from ..checkpoint.staging import write_whole
from .clusters import ClusterMean, Paired, Perplexity, paired
from .windows import Windows

REPORT_FILES = ("report.json", "report.md", "report-tokens.npy")
METHOD = "delete-one-cluster jackknife on the log scale, t with G-1 degrees of freedom"
METHOD_PER_BYTE = "delete-one-cluster jackknife of bits over bytes, t with G-1 degrees of freedom"


@dataclass(frozen=True)
class Report:
    """One candidate against its base."""

    perplexity: Paired
    content: dict[str, Any]  # report.json
    tokens: npt.NDArray[Any]  # per scored token: document, nll_base, nll_candidate

    def to_markdown(self) -> str:
        return markdown(self.content)

    def _repr_markdown_(self) -> str:
        return self.to_markdown()


def make_report(
    *,
    base: Checkpoint,
    candidate: Checkpoint,
    windows: Windows,
    nll: Mapping[str, npt.NDArray[np.float64]],
    protocol: Mapping[str, Any],
    level: float,
    warnings: Sequence[str],
    calibration: Mapping[str, Any] | None,
    modules: Mapping[str, Mapping[str, Any]],
    steps: Sequence[tuple[str, Mapping[str, Any]]],
    parameters: int | None = None,
) -> Report:
    """`nll`: base and candidate, (n_scored,) in the plan's order, from identical tokens.

    `parameters`: the base's; to be given when its tensors are packed, else counted.
    """
    compared = paired(
        windows.by_document(nll["base"]),
        windows.by_document(nll["candidate"]),
        n_bytes=windows.n_bytes,
        level=level,
        cluster=windows.cluster,
    )
    own = [*_hopeless(compared), *compared.log.warnings, *compared.base.log.warnings, *compared.new.log.warnings]
    own += warnings
    content = {
        "schema_version": "1.0",
        "base": base.source,
        "steps": [{"step": name, "settings": dict(settings)} for name, settings in steps],
        "protocol": dict(protocol),
        "calibration": None if calibration is None else dict(calibration),
        "metrics": _metrics(compared, windows.bytes_exact),
        "sizes": _sizes(base, candidate, modules, parameters),
        "layers": _layers(modules),
        "warnings": list(dict.fromkeys(own)),
    }
    tokens = np.zeros(windows.n_scored, dtype=[("document", "<i4"), ("nll_base", "<f4"), ("nll_candidate", "<f4")])
    tokens["document"], tokens["nll_base"], tokens["nll_candidate"] = windows.document, nll["base"], nll["candidate"]
    return Report(compared, content, tokens)


_GUESSING = 50_000.0  # above this a model does worse than a uniform guess over an ordinary vocabulary


def _hopeless(compared: Paired) -> list[str]:
    """A perplexity that no working model has on its own kind of text: a wrong BOS, a wrong tokenizer, a broken layer."""
    broken = [name for name, x in (("base", compared.base), ("candidate", compared.new)) if x.ppl > _GUESSING]
    return [f"the {name}'s perplexity is worse than guessing: check its tokenizer and BOS" for name in broken]


def write_report(report: Report, directory: Path) -> None:
    """Write the report's three files."""
    import io

    buffer = io.BytesIO()
    np.save(buffer, report.tokens)
    contents = (to_json(report.content), report.to_markdown().encode(), buffer.getvalue())
    for name, content in zip(REPORT_FILES, contents, strict=True):
        write_whole(directory / name, content)


def _metrics(compared: Paired, bytes_exact: bool) -> list[dict[str, Any]]:
    ratio = _row("ppl_ratio", compared.ratio, compared.low, compared.high, compared.log)
    ratio |= {"paired_with": "base", "p_value": _number(compared.p_value)}
    ratio["estimand"] = "candidate's perplexity over the base's on identical tokens, token-weighted over documents"
    excess = _row("excess_log_ppl", compared.log.mean, compared.log.low, compared.log.high, compared.log)
    delta = {
        "name": "delta_ppl",
        "value": _number(compared.delta_ppl),
        "se": _number(compared.delta_ppl_se),
        "method": "cluster-robust (CR1) delta method",
        "paired_with": "base",
        "direction": "lower_is_better",
    }
    rows = [ratio, excess | {"paired_with": "base", "unit": "nats per token"}, delta]
    for name, measured in (("base", compared.base), ("candidate", compared.new)):
        rows += _absolute(name, measured, bytes_exact)
    return rows


def _absolute(model: str, measured: Perplexity, bytes_exact: bool) -> list[dict[str, Any]]:
    rows = [_row("ppl", measured.ppl, measured.low, measured.high, measured.log) | {"model": model}]
    if measured.bits_per_byte is not None:
        low, high = measured.bits_per_byte_low, measured.bits_per_byte_high
        row = _row("bits_per_byte", measured.bits_per_byte, low, high, measured.log)
        of_tokens = {"se_log": None, "deff": None}  # say nothing of bytes
        rows.append(row | of_tokens | {"method": METHOD_PER_BYTE, "bytes_exact": bytes_exact, "model": model})
    return rows


def _row(name: str, value: float, low: float | None, high: float | None, log: ClusterMean) -> dict[str, Any]:
    return {
        "name": name,
        "value": _number(value),
        "ci": None if low is None or high is None else [_number(low), _number(high)],
        "level": log.level,
        "se_log": _number(log.se_jackknife),
        "method": METHOD,
        "cluster": log.cluster,
        "n_clusters": log.n_clusters,
        "n_clusters_eff": _number(log.g_star),
        "df": log.df,
        "n_tokens": log.n_values,
        "deff": _number(log.deff),
        "direction": "lower_is_better",
    }


def _number(value: float | None) -> float | str | None:
    """JSON has no infinity; it is written as a string, never dropped. Undefined (inf - inf) is null."""
    if value is None or math.isnan(value):
        return None
    if math.isfinite(value):
        return value
    return "Infinity" if value > 0 else "-Infinity"


def _sizes(
    base: Checkpoint, candidate: Checkpoint, modules: Mapping[str, Mapping[str, Any]], parameters: int | None
) -> dict[str, Any]:
    weights = sum(record["shape"][0] * record["shape"][1] for record in modules.values())
    # what a quantized module occupies on disk: name.weight_packed, name.weight_scale, ...
    stored = sum(info.nbytes for name, info in candidate.tensors.items() if name.rpartition(".")[0] in modules)
    if parameters is None:
        parameters = sum(info.numel for info in base.tensors.values())
    return {
        "bytes_base": base.nbytes,
        "bytes_candidate": candidate.nbytes,
        "parameters": parameters,
        "quantized_parameters": weights,
        "bits_per_quantized_weight": round(8 * stored / weights, 4) if weights else None,
        "bits_per_parameter": round(8 * candidate.nbytes / parameters, 4),
    }


def _layers(modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How many layers each method took, which fell back, and the worst output errors."""
    methods: dict[str, int] = {}
    for record in modules.values():
        methods[record["method"]] = methods.get(record["method"], 0) + 1
    errors = {name: record["output_error"] for name, record in modules.items() if record["output_error"] is not None}
    worst = sorted(errors, key=lambda name: -errors[name])[:10]
    return {
        "by_method": methods,
        "fallbacks": {name: record["fallback"] for name, record in modules.items() if record["fallback"]},
        "worst_output_errors": {name: errors[name] for name in worst},
    }


def markdown(content: Mapping[str, Any]) -> str:
    """The page. Every figure in it is one of report.json's."""
    protocol, sizes = content["protocol"], content["sizes"]
    rows = {(m["name"], m.get("model")): m for m in content["metrics"]}
    ratio = rows["ppl_ratio", None]
    lines = [
        f"# {content['base']}: {' → '.join(step['step'] for step in content['steps']) or 'compared'}",
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
        f"| difference of perplexities | | {_fixed(delta['value'])} (standard error {_fixed(delta['se'])}) |",
        f"| weights, bytes | {sizes['bytes_base']:,} | {sizes['bytes_candidate']:,} |",
        f"| bits per parameter, all tensors | | {sizes['bits_per_parameter']} |",
    ]
    if sizes["bits_per_quantized_weight"] is not None:
        lines.append(f"| bits per quantized weight, scales included | | {sizes['bits_per_quantized_weight']} |")
    lines += ["", f"Intervals: {ratio['method']}; a cluster is one {ratio['cluster']}.", "", "## Protocol", ""]
    lines += [f"- {key}: `{value}`" for key, value in protocol.items()]
    if content["calibration"]:
        lines += ["", "## Calibration", ""]
        lines += [f"- {key}: `{value}`" for key, value in content["calibration"].items()]
    lines += ["", "## Steps", ""]
    lines += [f"- `{step['step']}`: `{step['settings']}`" for step in content["steps"]]
    lines += _layer_lines(content["layers"])
    if content["warnings"]:
        lines += ["", "## Warnings", "", *(f"- {warning}" for warning in content["warnings"])]
    return "\n".join(lines) + "\n"


def _layer_lines(layers: Mapping[str, Any]) -> list[str]:
    if not layers["by_method"]:
        return []
    lines = ["", "## Layers", ""]
    lines += [f"- {count} by {method}" for method, count in layers["by_method"].items()]
    lines += [f"- **fallback** {name}: {reason}" for name, reason in layers["fallbacks"].items()]
    if layers["worst_output_errors"]:
        lines += ["", "| largest relative output errors on the calibration tokens | |", "|---|---|"]
        lines += [f"| {name} | {error:.4f} |" for name, error in layers["worst_output_errors"].items()]
    return lines


def _shown(row: Mapping[str, Any], digits: int = 4) -> str:
    interval = row["ci"]
    bounds = "no interval" if interval is None else f"[{_fixed(interval[0], digits)}, {_fixed(interval[1], digits)}]"
    return f"{_fixed(row['value'], digits)} {bounds}"


def _fixed(value: float | str | None, digits: int = 4) -> str:
    return "—" if value is None else value if isinstance(value, str) else f"{value:.{digits}f}"


def _percent(level: float) -> str:
    return f"{100 * level:g} %"
