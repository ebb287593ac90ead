"""The report: every figure with its interval and its protocol, as data (`report.json`) and as pages.

`report.json` follows `report/schema.json`; `report.html` and `report.md` are made from it alone. `report-tokens.npy`
holds what was measured of every scored token, from which each interval can be computed again (of bits per byte: with
the texts' bytes); `report-samples.jsonl` what both models did with every item of a task. Nothing in them depends on the
time or the place of the run.
"""

from __future__ import annotations

import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoint.manifest import to_json
from ..checkpoint.reader import Checkpoint
from ..checkpoint.staging import write_whole
from .clusters import ClusterMean, Paired, Perplexity, nats_per_unit, paired
from .fidelity import summarize
from .healing import healing_section
from .layers import layers_section
from .markdown import markdown
from .multiplicity import adjusted
from .page import render
from .power import detectable_ratio, tokens_needed
from .qlora_bases import rounded_bases
from .windows import Windows

SCHEMA_VERSION = "1.3"
REPORT_FILES = ("report.json", "report.md", "report.html", "report-tokens.npy")
SAMPLES = "report-samples.jsonl"  # only with tasks
METHOD = "delete-one-cluster jackknife on the log scale, t with G-1 degrees of freedom"
METHOD_DELTA = "delete-one-cluster jackknife of the difference, t with G-1; se: cluster-robust (CR1) delta method"
METHOD_PER_BYTE = "delete-one-cluster jackknife of bits over bytes, t with G-1 degrees of freedom"


@dataclass(frozen=True)
class ScoredSet:
    """One text, scored under both models."""

    name: str
    windows: Windows
    tokens: npt.NDArray[Any]  # (n_scored,) in the plan's order: nll_base, nll_candidate or all of `TOKEN_FIELDS`
    protocol: Mapping[str, Any]
    floor: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """One candidate against its base."""

    perplexity: Paired  # on the main text
    content: dict[str, Any]  # report.json
    latency: dict[str, Any] | None = field(default=None, kw_only=True)  # latency.json; no second run gives the same
    samples: tuple[Mapping[str, Any], ...] = field(
        default=(), kw_only=True
    )  # every item of a task, what both models did
    tokens: npt.NDArray[Any]  # per scored token: set, document, nll_base, nll_candidate, ... (`fidelity.TOKEN_FIELDS`)

    def to_markdown(self) -> str:
        return markdown(self.content)

    def to_html(self) -> str:
        """The page: one self-contained file."""
        return render([self.content], [self.latency])

    def _repr_html_(self) -> str:
        return framed(self.to_html())


def framed(page: str) -> str:
    """A page inside a notebook's, whose styles it must not touch."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" style="width:100%;height:42rem;border:0" title="suture report"></iframe>'
    )


def make_report(
    *,
    base: Checkpoint,
    candidate: Checkpoint,
    sets: Sequence[ScoredSet],
    level: float,
    warnings: Sequence[str],
    calibration: Mapping[str, Any] | None,
    modules: Mapping[str, Mapping[str, Any]],
    steps: Sequence[tuple[str, Mapping[str, Any]]],
    receipts: Sequence[Mapping[str, Any]] = (),
    parameters: int | None = None,
    margin: float = 0.02,
    name: str | None = None,
    tasks: Sequence[Mapping[str, Any]] = (),
    generation: Sequence[Mapping[str, Any]] = (),
    samples: Sequence[Mapping[str, Any]] = (),
    cost: Mapping[str, Any] | None = None,
    kv_cache: Mapping[str, Mapping[str, Any]] | None = None,
    qlora_bases: Mapping[str, Any] | None = None,
) -> Report:
    """`sets`: at least one, the main one first. `margin`: perplexity ratio less 1 that counts as equivalent.

    `name`: the candidate's; default where it is. `parameters`: the base's; to be given when its tensors are packed, else
    counted. `modules`, `receipts`: what the steps recorded of layers and of themselves. `kv_cache`: what one token takes
    in the live cache, `before` and `after`, when a step changed it. `qlora_bases`: both merges of a QLoRA adapter against
    the adapter on its 4-bit base.
    """
    pairs = [_pair(scored, level) for scored in sets]
    several = len(sets) > 1
    rows = [_set_row(scored, compared, level, margin, several) for scored, compared in zip(sets, pairs, strict=True)]
    main = rows[0]
    content = {
        "schema_version": SCHEMA_VERSION,
        "base": base.source,
        "candidate": name or candidate.source,
        "steps": [{"step": name, "settings": dict(settings)} for name, settings in steps],
        "verdict": main["verdict"],
        "name": main["name"],
        "protocol": main["protocol"],
        "calibration": None if calibration is None else dict(calibration),
        "metrics": main["metrics"],
        "fidelity": main["fidelity"],
        "noise_floor": main["noise_floor"],
        "sets": rows[1:],
        "tasks": [dict(row) for row in tasks],
        "generation": [dict(row) for row in generation],
        "cost": None if cost is None else dict(cost),
        "sizes": _sizes(base, candidate, modules, parameters),
        "layers": layers_section(modules, receipts),
        "healing": healing_section(steps, receipts),
        "kv_cache": None if kv_cache is None else {when: dict(size) for when, size in kv_cache.items()},
        **({} if qlora_bases is None else {"qlora_bases": rounded_bases(qlora_bases)}),
        "warnings": list(dict.fromkeys([*(warning for row in rows for warning in row.pop("warnings")), *warnings])),
    }
    return Report(pairs[0], adjusted([content])[0], _sidecar(sets), samples=tuple(samples))


def adjusted_together(reports: Sequence[Report]) -> list[Report]:
    """Reports of several candidates with their p-values adjusted for all of them."""
    contents = adjusted([report.content for report in reports])
    return [replace(report, content=content) for report, content in zip(reports, contents, strict=True)]


def _pair(scored: ScoredSet, level: float) -> Paired:
    windows, tokens = scored.windows, scored.tokens
    return paired(
        windows.by_document(tokens["nll_base"]),
        windows.by_document(tokens["nll_candidate"]),
        n_bytes=windows.n_bytes,
        level=level,
        cluster=windows.cluster,
    )


def _set_row(scored: ScoredSet, compared: Paired, level: float, margin: float, several: bool) -> dict[str, Any]:
    """Everything about one text; the main one's is spread over the top of the report."""
    prefix = f"{scored.name}: " if several else ""
    found = [*_hopeless(compared), *compared.log.warnings, *compared.base.log.warnings, *compared.new.log.warnings]
    measured = "kl" in (scored.tokens.dtype.names or ())
    return {
        "name": scored.name,
        "protocol": dict(scored.protocol),
        "verdict": verdict(compared, margin),
        "metrics": _metrics(compared, scored),
        "fidelity": summarize(scored.windows, scored.tokens, level) if measured else None,
        "noise_floor": scored.floor,
        "warnings": [prefix + text for text in dict.fromkeys(found)] + list(scored.warnings),
    }


def verdict(compared: Paired, margin: float) -> dict[str, Any]:
    """One word from the interval against the margin; never from a p-value, and never without an interval."""
    low, high = compared.low, compared.high
    if low is None or high is None:
        word, why = "inconclusive", "there is no interval"
    elif high < 1 / (1 + margin):
        word, why = "better", "the whole interval lies below the margin"
    elif low > 1 + margin:
        word, why = "worse", "the whole interval lies above the margin"
    elif low >= 1 / (1 + margin) and high <= 1 + margin:
        word, why = "equivalent", "the whole interval lies within the margin"
    else:
        word, why = "inconclusive", "the interval reaches over an edge of the margin"
    found: dict[str, Any] = {"word": word, "why": why, "margin": margin, "of": "ppl_ratio"}
    se = compared.log.se_jackknife
    if word == "inconclusive" and low is not None and se and math.isfinite(compared.ratio):
        found["detectable_ratio"] = _number(detectable_ratio(se, level=compared.log.level))
        found["tokens_for_margin"] = tokens_needed(1 + margin, se, compared.log.n_values, level=compared.log.level)
    return found


def _sidecar(sets: Sequence[ScoredSet]) -> npt.NDArray[Any]:
    """One row per scored token of every set: set (number), document, and what was measured of it."""
    fields = [
        ("set", "<u2"),
        ("document", "<i4"),
        *((n, sets[0].tokens.dtype[n]) for n in sets[0].tokens.dtype.names or ()),
    ]
    rows = np.zeros(sum(scored.windows.n_scored for scored in sets), dtype=fields)
    start = 0
    for number, scored in enumerate(sets):
        part = rows[start : start + scored.windows.n_scored]
        part["set"], part["document"] = number, scored.windows.document
        for name in scored.tokens.dtype.names or ():
            part[name] = scored.tokens[name]
        start += scored.windows.n_scored
    return rows


_GUESSING = 50_000.0  # above this a model does worse than a uniform guess over an ordinary vocabulary


def _hopeless(compared: Paired) -> list[str]:
    """A perplexity that no working model has on its own kind of text: a wrong BOS, a wrong tokenizer, a broken layer."""
    broken = [name for name, x in (("base", compared.base), ("candidate", compared.new)) if x.ppl > _GUESSING]
    return [f"the {name}'s perplexity is worse than guessing: check its tokenizer and BOS" for name in broken]


def write_report(report: Report, directory: Path) -> None:
    """Write the report's files."""
    buffer = io.BytesIO()
    np.save(buffer, report.tokens)
    # the pages are made of what report.json says when it is read back
    content = json.loads(to_json(report.content))
    pages = (markdown(content).encode(), render([content], [report.latency]).encode())
    contents = (to_json(report.content), *pages, buffer.getvalue())
    for old, kept in ((SAMPLES, bool(report.samples)), ("latency.json", report.latency is not None)):
        if not kept:
            (directory / old).unlink(missing_ok=True)  # of an earlier report in the same place
    if report.samples:
        lines = [json.dumps(sample, ensure_ascii=False) for sample in report.samples]
        write_whole(directory / SAMPLES, ("\n".join(lines) + "\n").encode())
    if report.latency is not None:
        write_whole(directory / "latency.json", to_json(report.latency))
    for name, content in zip(REPORT_FILES, contents, strict=True):
        write_whole(directory / name, content)


def _metrics(compared: Paired, scored: ScoredSet) -> list[dict[str, Any]]:
    windows = scored.windows
    ratio = _row("ppl_ratio", compared.ratio, compared.low, compared.high, compared.log)
    ratio |= {"paired_with": "base", "p_value": _number(compared.p_value)}
    ratio["estimand"] = "candidate's perplexity over the base's on identical tokens, token-weighted over documents"
    excess = _row("excess_log_ppl", compared.log.mean, compared.log.low, compared.log.high, compared.log)
    delta = {
        "name": "delta_ppl",
        "value": _number(compared.delta_ppl),
        "ci": _bounds(compared.delta_ppl_low, compared.delta_ppl_high),
        "level": compared.log.level,
        "se": _number(compared.delta_ppl_se),
        "method": METHOD_DELTA,
        "cluster": compared.log.cluster,
        "n_clusters": compared.log.n_clusters,
        "paired_with": "base",
        "direction": "lower_is_better",
    }
    rows = [ratio, excess | {"paired_with": "base", "unit": "nats per token"}, delta]
    for name, measured in (("base", compared.base), ("candidate", compared.new)):
        rows += _absolute(name, measured, windows.bytes_exact)
        if windows.n_words is not None:
            rows += _per_unit(name, measured, windows, windows.by_document(scored.tokens[f"nll_{name}"]))
    return rows


def _per_unit(
    model: str, measured: Perplexity, windows: Windows, nll: Sequence[npt.NDArray[np.float64]]
) -> list[dict[str, Any]]:
    """lm-eval's figures: exp of the summed NLL over words, and over bytes, of the original text."""
    rows = []
    for name, units, sizes in (("word_ppl", "word", windows.n_words), ("byte_ppl", "byte", windows.n_bytes)):
        if sizes is None:
            continue
        count = float(np.sum(sizes))
        mean, low, high = nats_per_unit(nll, sizes, measured.log)
        ends = [None if end is None else _exp(end) for end in (low, high)]
        rows.append(
            {
                "name": name,
                "value": _number(_exp(mean)),
                "ci": _bounds(*ends),
                "level": measured.log.level,
                "method": f"{METHOD}, of nats over {units}s",
                "cluster": measured.log.cluster,
                "n_clusters": measured.log.n_clusters,
                f"n_{units}s": count,
                "direction": "lower_is_better",
                "model": model,
            }
        )
    return rows


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


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
        "ci": _bounds(low, high),
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


def _bounds(low: float | None, high: float | None) -> list[float | str | None] | None:
    return None if low is None or high is None else [_number(low), _number(high)]


def _number(value: float | None) -> float | str | None:
    """JSON has no infinity; it is written as a string, never dropped. Undefined (inf - inf) is null."""
    if value is None or math.isnan(value):
        return None
    if math.isfinite(value):
        return value
    return "Infinity" if value > 0 else "-Infinity"


def rounded_weights(modules: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Quantized module -> its number of weights."""
    return {name: record["shape"][0] * record["shape"][1] for name, record in modules.items() if "bits" in record}


def _sizes(
    base: Checkpoint, candidate: Checkpoint, modules: Mapping[str, Mapping[str, Any]], parameters: int | None
) -> dict[str, Any]:
    rounded = rounded_weights(modules)
    weights = sum(rounded.values())
    # what a quantized module occupies on disk: name.weight_packed, name.weight_scale, ...
    stored = sum(info.nbytes for name, info in candidate.tensors.items() if name.rpartition(".")[0] in rounded)
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
