"""report.json as one HTML file: inline charts, no network, readable without JavaScript, light and dark, on paper too.

`render` takes the contents of one or more report.json files of the same base and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from .charts import Estimate, bars, forest, histogram, pareto
from .figures import bytes_text, figure_text, finite, interval_text, number_text
from .healing import healing_view
from .layers import layers_view
from .qlora_bases import bases_lines

Content = Mapping[str, Any]

_FIDELITY = {
    "kl": ("KL(base ‖ candidate)", False),
    "kl_reverse": ("KL(candidate ‖ base)", False),
    "same_top": ("same first guess", True),
    "delta_p": ("Δp, mean", True),
    "delta_p_rms": ("Δp, root mean square", True),
    "right_to_wrong": ("first guess: right → wrong", True),
    "wrong_to_right": ("first guess: wrong → right", True),
}
_ABSOLUTE = {
    "ppl": "perplexity per token",
    "bits_per_byte": "bits per byte",
    "word_ppl": "perplexity per word",
    "byte_ppl": "perplexity per byte",
}
_WORDS = {"better": "Better", "equivalent": "Equivalent", "worse": "Worse", "inconclusive": "Inconclusive"}
_MARKS = {"better": "▲", "equivalent": "●", "worse": "▼", "inconclusive": "◆"}


def render(contents: Sequence[Content], latencies: Sequence[Content | None] | None = None) -> str:
    """The page of one candidate, or of several beside each other. `latencies`: each one's latency.json, or None."""
    given = latencies or [None] * len(contents)
    names = labels(contents)
    return _template().render(
        base=contents[0]["base"],
        candidates=[_candidate(*row, i) for i, row in enumerate(zip(contents, names, given, strict=True))],
        overview=_overview(contents, names) if len(contents) > 1 else None,
        schema_version=contents[0]["schema_version"],
    )


def labels(contents: Sequence[Content]) -> list[str]:
    """A short name for each candidate, unique on the page."""
    short = [content["candidate"].rstrip("/").rsplit("/", 1)[-1] for content in contents]
    return [name if short.count(name) == 1 else f"{i + 1}. {name}" for i, name in enumerate(short)]


def metric(rows: Sequence[Mapping[str, Any]], name: str, model: str | None = None) -> Mapping[str, Any] | None:
    """The row of this name, or None."""
    return next((row for row in rows if row["name"] == name and row.get("model") == model), None)


def protocol_text(protocol: Mapping[str, Any]) -> str:
    """`doc-rolling, window 512, stride 256, BOS per window, 12,345 tokens, float32`: what stands beside a figure."""
    parts = [str(protocol["id"]), f"window {protocol['window']}"]
    if protocol["id"] == "doc-rolling":
        parts.append(f"stride {protocol['stride']}")
    parts.append(f"BOS {protocol['add_bos'].replace('_', ' ')}")
    if "detokenize" in protocol:
        parts.append(f"detokenized ({protocol['detokenize']})")
    if protocol["max_tokens_per_document"] is not None:
        parts.append(f"the first {protocol['max_tokens_per_document']:,} tokens of a document")
    if protocol["max_windows"] is not None:
        parts.append(f"at most {protocol['max_windows']:,} windows")
    return ", ".join([*parts, f"{protocol['n_scored']:,} tokens", protocol["dtype"]])


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    source = (resources.files(__package__ or "suture.report") / "page.html.j2").read_text(encoding="utf-8")
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        source
    )


def _candidate(content: Content, name: str, latency: Content | None, number: int) -> dict[str, Any]:
    ratio = metric(content["metrics"], "ppl_ratio")
    assert ratio is not None
    sets = [content, *content["sets"]]
    margin = content["verdict"]["margin"]
    return {
        "name": name,
        "anchor": f"candidate-{number + 1}",
        "candidate": content["candidate"],
        "steps": content["steps"],
        "verdict": _verdict(content, ratio),
        "tiles": list(_tiles(content, ratio)),
        "forest": forest("Perplexity of the candidate over the base's", [_ratio(s, number) for s in sets], margin),
        "sets": [_set(s) for s in sets],
        "multiplicity": _multiplicity(content["multiplicity"]),
        "tasks": [_task(task) for task in content.get("tasks", [])],
        "generation": [_generation(row) for row in content["generation"]],
        "sizes": _sizes(content, number),
        "cost": _cost(content.get("cost"), number),
        "latency": None if latency is None else _latency(latency, number),
        "layers": layers_view(content["layers"]),
        "healing": healing_view(content.get("healing", [])),
        "calibration": content["calibration"],
        "bases": bases_lines(content),
        "warnings": content["warnings"],
        "method": ratio["method"],
    }


def _verdict(content: Content, ratio: Mapping[str, Any]) -> dict[str, str]:
    found = content["verdict"]
    clusters = _counted(ratio)
    effective = f" ({number_text(ratio['n_clusters_eff'], 3)} effective)"
    more = ""
    if "tokens_for_margin" in found:
        more = (
            f" This measurement can show ratios from × {number_text(found['detectable_ratio'])} on (80 % power); "
            f"a true × {1 + found['margin']:.4g} needs about {found['tokens_for_margin']:,} tokens of such text."
        )
    return {
        "word": _WORDS[found["word"]],
        "kind": found["word"],
        "mark": _MARKS[found["word"]],
        "figure": f"Perplexity × {figure_text(ratio)}",
        "basis": f"{_percent(ratio['level'])} interval, paired on identical tokens, {clusters}{effective}",
        "why": f"Margin ± {_percent(found['margin'])}: {found['why']}.{more}",
        "protocol": protocol_text(content["protocol"]),
    }


def _counted(row: Mapping[str, Any]) -> str:
    return f"{row['n_clusters']} {row['cluster']}{'s' if row['n_clusters'] != 1 else ''}"


def _tiles(content: Content, ratio: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(heading, figure, what it is of)."""
    sizes = content["sizes"]
    if content["fidelity"] is not None:
        rows = content["fidelity"]["metrics"]
        floor = content["noise_floor"]
        noise = f"noise of arithmetic {figure_text(floor['metrics'][0])}" if floor is not None else "nats per token"
        yield "KL divergence", figure_text(metric(rows, "kl")), noise
        yield "Same first guess", figure_text(metric(rows, "same_top"), percent=True), "share of tokens"
    smaller = sizes["bytes_base"] / sizes["bytes_candidate"] if sizes["bytes_candidate"] else 0.0
    yield (
        "Weights",
        f"{bytes_text(sizes['bytes_base'])} → {bytes_text(sizes['bytes_candidate'])}",
        f"÷ {smaller:.2f}; {sizes['bits_per_parameter']:g} bits per parameter, exact",
    )


def _ratio(scored: Content, group: int, label: str | None = None) -> Estimate:
    row = metric(scored["metrics"], "ppl_ratio")
    assert row is not None
    low, high = (None, None) if row["ci"] is None else (finite(row["ci"][0]), finite(row["ci"][1]))
    value = finite(row["value"])
    name = label or _short(scored["name"] or scored["protocol"]["data"])
    return Estimate(name, value if value is not None else float("inf"), low, high, f"× {figure_text(row)}", group)


def _short(name: str) -> str:
    return name if ":" in name or len(name) < 36 else name.rsplit("/", 1)[-1]


def _set(scored: Content) -> dict[str, Any]:
    rows = scored["metrics"]
    fidelity, floor = scored["fidelity"], scored["noise_floor"]
    excess, delta, ratio = metric(rows, "excess_log_ppl"), metric(rows, "delta_ppl"), metric(rows, "ppl_ratio")
    assert excess is not None and delta is not None and ratio is not None
    absolute = [
        {
            "title": title,
            "base": figure_text(metric(rows, name, "base")),
            "candidate": figure_text(metric(rows, name, "candidate")),
            "deff": number_text((metric(rows, name, "candidate") or {}).get("deff"), 3),
        }
        for name, title in _ABSOLUTE.items()
        if metric(rows, name, "base") is not None
    ]
    paired = [
        ("perplexity ratio", figure_text(ratio), number_text(ratio["deff"], 3), _p(ratio)),
        ("excess log-perplexity, nats per token", figure_text(excess), number_text(excess["deff"], 3), ""),
        ("difference of perplexities", figure_text(delta), "", ""),
    ]
    return {
        "name": scored["name"] or scored["protocol"]["data"],
        "verdict": _WORDS[scored["verdict"]["word"]],
        "kind": scored["verdict"]["word"],
        "protocol": protocol_text(scored["protocol"]),
        "identity": scored["protocol"],
        "clusters": f"{_counted(ratio)}, {number_text(ratio['n_clusters_eff'], 3)} effective",
        "absolute": absolute,
        "paired": paired,
        "fidelity": None if fidelity is None else _fidelity(fidelity, floor),
    }


def _p(ratio: Mapping[str, Any]) -> str:
    if ratio["p_value"] is None:
        return ""
    text = f"p = {number_text(ratio['p_value'], 2)}"
    if ratio["p_holm"] is not None and ratio["p_holm"] != ratio["p_value"]:
        text += f", Holm {number_text(ratio['p_holm'], 2)}"
    return text


def _multiplicity(counted: Content) -> str:
    """What the adjusted p-values stand for; empty where there is one test alone."""
    several = [(counted[kind], kind) for kind in ("texts", "tasks") if counted[kind] > 1]
    if not several:
        return ""
    of = f" of all {counted['candidates']} candidates" if counted["candidates"] > 1 else ""
    tests = " and ".join(f"{count} tests on {kind}" for count, kind in several)
    return f"Adjusted p-values ({counted['method']}) allow for {tests}{of}."


def _fidelity(fidelity: Content, floor: Content | None) -> dict[str, Any]:
    noise = {row["name"]: row for row in floor["metrics"]} if floor is not None else {}
    rows = []
    for name, (title, percent) in _FIDELITY.items():
        row = metric(fidelity["metrics"], name)
        of_noise = figure_text(noise[name], percent=percent) if name in noise else ""
        rows.append((title, figure_text(row, percent=percent), of_noise))
    return {
        "rows": rows,
        "floor": floor["what"] if floor is not None else None,
        "floor_windows": floor["windows"] if floor is not None else None,
        "histogram": histogram(
            "KL divergence, token by token",
            fidelity["kl_histogram"],
            floor["kl_histogram"] if floor is not None else None,
        ),
        "quantiles": [
            (f"{100 * q['quantile']:g} %", interval_text(q["value"], q["ci"])) for q in fidelity["kl_quantiles"]
        ]
        + [("largest", number_text(fidelity["kl_max"]))],
        "buckets": [
            {
                "range": f"{bucket['from']:g} – {bucket['to']:g}",
                "tokens": f"{bucket['n_tokens']:,}",
                "kl": figure_text(bucket["kl"]),
                "same": figure_text(bucket["same_top"], percent=True),
            }
            for bucket in fidelity["confidence"]
        ],
    }


def _task(task: Content) -> dict[str, Any]:
    pair = task["paired"]
    return {
        "name": task["name"],
        "metric": task["metric"],
        "count": f"{task['n_items']:,}",
        "base": interval_text(task["base"]["value"], task["base"]["ci"], percent=True),
        "candidate": interval_text(task["candidate"]["value"], task["candidate"]["ci"], percent=True),
        "difference": interval_text(pair["difference"], pair["ci"], percent=True),
        "flips": interval_text(pair["flips"]["value"], pair["flips"]["ci"], percent=True),
        "p": f"{number_text(pair['p'], 2)} (Holm {number_text(pair['p_holm'], 2)}; {pair['test']})",
        "margin": figure_text(task["margin_drift"]),
        "power": _power(pair["power"]),
        "protocol": task["protocol"],
    }


def _generation(row: Content) -> dict[str, Any]:
    pair, variance = row["paired"], row["variance"] or {}
    return {
        "name": row["name"],
        "metric": row["metric"],
        "count": f"{row['n_items']:,} × {row['samples']}",
        "base": figure_text(row["base"], percent=True),
        "candidate": figure_text(row["candidate"], percent=True),
        "difference": interval_text(pair["difference"], pair["ci"], percent=True),
        "p": "—" if pair["p"] is None else f"{number_text(pair['p'], 2)} (Holm {number_text(pair['p_holm'], 2)})",
        "variance": [_variance(model, variance[model]) for model in ("base", "candidate") if variance.get(model)],
        "power": _power(pair["power"]),
        "protocol": f"{row['protocol']}; {row['candidate']['method']}; difference: {pair['method']}, {pair['test']}",
    }


def _variance(model: str, split: Content) -> str:
    total, items, samples = (f"{100 * split[key]:.2g}" for key in ("se", "se_items", "se_samples"))
    return f"{model}: standard error {total} points, {items} from the items and {samples} from the sampling"


def _power(power: Content | None) -> str:
    """What so many items can show."""
    if power is None:
        return "—"
    return f"{100 * power['detectable']:.2g} points; 1 point: {power['items_for_one_point']:,} items"


def _sizes(content: Content, number: int) -> dict[str, Any]:
    sizes = content["sizes"]
    rows = [
        ("bytes of all weights", f"{sizes['bytes_base']:,}", f"{sizes['bytes_candidate']:,}"),
        ("parameters", f"{sizes['parameters']:,}", ""),
        ("bits per parameter, all tensors", "", f"{sizes['bits_per_parameter']:g}"),
    ]
    if sizes["bits_per_quantized_weight"] is not None:
        rows.append(("bits per quantized weight, scales included", "", f"{sizes['bits_per_quantized_weight']:g}"))
    return {
        "rows": rows,
        "bars": bars(
            "Bytes of the weights",
            [("base", sizes["bytes_base"], 5), ("candidate", sizes["bytes_candidate"], number)],
        ),
    }


def _cost(cost: Content | None, number: int) -> dict[str, Any] | None:
    if cost is None:
        return None
    cache_rows = [
        (
            f"{model}: {cost['cache'][model]['bytes_per_token']:,.0f} B per token",
            cost["cache"][model]["bytes_per_token"],
            i,
        )
        for model, i in (("base", 5), ("candidate", number))
        if cost["cache"][model] is not None
    ]
    formats = sorted({f for model in ("base", "candidate") for f in cost["bytes_by_dtype"][model]})
    return {
        "formats": [(f, *(f"{cost['bytes_by_dtype'][m].get(f, 0):,}" for m in ("base", "candidate"))) for f in formats],
        "cache": bars("Cache per token", cache_rows) if cache_rows else None,
        "cache_how": next((cost["cache"][m]["how"] for m in ("base", "candidate") if cost["cache"][m] is not None), ""),
        "flops": [
            (m, f"{cost['flops_per_token'][m]:,}", number_text(cost["intensity"][m])) for m in ("base", "candidate")
        ],
        "roofline": [
            (
                row["gpu"],
                *(f"{row['tokens_per_second'][m]:,.0f}" for m in ("base", "candidate")),
                row["bound"]["candidate"],
            )
            for row in cost["roofline"]
        ],
    }


def _latency(latency: Content, number: int) -> dict[str, Any]:
    rows, table = [], []
    for m in latency["measurements"]:
        low, high = m["ratio"]["ci"]
        text = f"× {interval_text(m['ratio']['value'], m['ratio']['ci'])}"
        rows.append(Estimate(m["name"], m["ratio"]["value"], low, high, text, number))
        control = m["control"]
        low, high = control["ci"]
        name = f"{m['name']}, base against itself"
        rows.append(Estimate(name, control["value"], low, high, f"× {figure_text(control)}", 5))
        for model in ("base", "candidate"):
            seconds = m[model]
            table.append(
                (
                    f"{m['name']}, {model}",
                    f"{1000 * seconds['median']:.4g} ms",
                    f"{1000 * seconds['mad']:.2g} ms",
                    f"{1000 * seconds['p95']:.4g} ms",
                    f"{seconds['tokens_per_second']:,.4g}",
                    f"{seconds['runs']}",
                )
            )
    peak = latency["peak_memory"]
    noisy = [m["name"] for m in latency["measurements"] if m["too_noisy"]]
    return {
        "forest": forest("Candidate's time over the base's", rows, None),
        "table": table,
        "peak": [] if peak is None else [(m, bytes_text(peak[m])) for m in ("base", "candidate")],
        "peak_how": "" if peak is None else peak["how"],
        "noisy": f"Machine too noisy for a verdict: {', '.join(noisy)}." if noisy else "",
        "what": f"{latency['what']}; {latency['device']}, {latency['threads']} threads. {latency['note']}.",
        "method": latency["measurements"][0]["method"],
    }


def _overview(contents: Sequence[Content], names: Sequence[str]) -> dict[str, Any]:
    rows, points = [], []
    for i, (content, name) in enumerate(zip(contents, names, strict=True)):
        ratio = metric(content["metrics"], "ppl_ratio")
        kl = metric(content["fidelity"]["metrics"], "kl") if content["fidelity"] is not None else None
        rows.append(
            {
                "name": name,
                "anchor": f"candidate-{i + 1}",
                "kind": content["verdict"]["word"],
                "verdict": _WORDS[content["verdict"]["word"]],
                "ratio": figure_text(ratio),
                "kl": figure_text(kl),
                "bytes": bytes_text(content["sizes"]["bytes_candidate"]),
                "bits": f"{content['sizes']['bits_per_parameter']:g}",
            }
        )
        value = finite(kl["value"]) if kl is not None else None
        if kl is not None and value is not None:
            low, high = (None, None) if kl["ci"] is None else (finite(kl["ci"][0]), finite(kl["ci"][1]))
            points.append(
                (Estimate(name, value, low, high, figure_text(kl), i), float(content["sizes"]["bytes_candidate"]))
            )
    margin = contents[0]["verdict"]["margin"]
    return {
        "rows": rows,
        "forest": forest(
            "Perplexity of each candidate over the base's",
            [_ratio(content, i, name) for i, (content, name) in enumerate(zip(contents, names, strict=True))],
            margin,
        ),
        "pareto": pareto("KL divergence against bytes", points) if points else None,
        "protocol": protocol_text(contents[0]["protocol"]),
        "data": contents[0]["name"] or contents[0]["protocol"]["data"],
    }


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
