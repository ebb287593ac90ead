"""The three budgets of `suture inspect` as sections of text, and as a notebook's picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from .charts import bars
from .figures import bytes_text, count_text, flops_text, seconds_text

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """Rows of a label and one text per model; an empty text where a model has no such row."""

    title: str
    rows: tuple[tuple[str, ...], ...]


def sections(models: Sequence[Facts]) -> list[Section]:
    """One model's budgets, or several side by side, row by row."""
    if "adapter" in models[0]:
        return [Section("adapter", tuple(_adapter(models[0])))]
    makers = (("model", _model), ("dimensions", _dimensions), ("compute and cache", _compute))
    makers += (("weights by format, linear layers so and the rest in 16 bits", _formats), ("update", _update))
    return [Section(title, _beside([make(facts) for facts in models])) for title, make in makers]


def _beside(columns: Sequence[Sequence[tuple[str, str]]]) -> tuple[tuple[str, ...], ...]:
    labels = list(dict.fromkeys(label for column in columns for label, _ in column))
    found = [dict(column) for column in columns]
    return tuple((label, *(column.get(label, "") for column in found)) for label in labels)


def text(models: Sequence[Facts]) -> str:
    """Plain text, aligned."""
    lines: list[str] = []
    for section in sections(models):
        widths = [max(len(row[i]) for row in section.rows) for i in range(len(section.rows[0]))]
        lines += [
            section.title,
            *("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in section.rows),
        ]
        lines.append("")
    return "\n".join(lines)


# ---- rows


def _adapter(facts: Facts) -> list[tuple[str, str]]:
    return [
        ("adapter", str(facts["adapter"])),
        ("kind", ", ".join(facts["kind"])),
        ("trained on", str(facts["trained_on"])),
        ("rank, alpha", f"{facts['r']}, {facts['alpha']:g}"),
        ("modules", f"{facts['low_rank_modules']} ({', '.join(facts['targets'])})"),
        ("parameters", f"{facts['parameters']:,} ({bytes_text(facts['bytes'])})"),
        ("training", f"{bytes_text(16 * facts['parameters'])} beside the frozen base and its activations"),
    ]


def _model(facts: Facts) -> list[tuple[str, str]]:
    rows = [
        ("model", f"{facts['model']} ({facts['family']})"),
        ("bytes", f"{bytes_text(facts['bytes'])}{_dtypes(facts)}"),
        ("quantization", _quantization(facts["quantization"])),
    ]
    return rows + [(f"made by, run {i}", steps) for i, steps in enumerate(_history(facts), start=1)]


def _dtypes(facts: Facts) -> str:
    found = ", ".join(f"{dtype} {bytes_text(size)}" for dtype, size in facts["dtypes"].items())
    return f" ({found})" if found else " at 16 bits per parameter"


def _quantization(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none"
    what = ", ".join(str(found[key]) for key in ("method", "format") if found.get(key))
    if "bits_per_weight" not in found:
        return what
    return (
        f"{what}: {found['layers']} layers, {count_text(found['parameters'])} weights in {bytes_text(found['bytes'])}, "
        f"{found['bits_per_weight']:.3f} bits each with scales"
    )


def _history(facts: Facts) -> list[str]:
    return [
        " → ".join(f"{name}{_settings(settings)}" for step in steps for name, settings in step.items())
        for steps in facts["history"]
    ]


_TELLING = (
    "bits",
    "group_size",
    "kv_heads",
    "rank",
    "rope_dim",
    "method",
    "type",
    "factor",
    "dtype",
    "adapter",
    "trim",
    "drop",
)


def _settings(settings: Mapping[str, Any]) -> str:
    """The settings that say most; all are in suture.json."""
    shown = ", ".join(f"{key} {settings[key]}" for key in _TELLING if settings.get(key) not in (None, "", []))
    return f" ({shown})" if shown else ""


def _dimensions(facts: Facts) -> list[tuple[str, str]]:
    d = facts["dimensions"]
    rows = [("parameters", f"{d['parameters']:,}")]
    if d["active_parameters"] != d["parameters"]:
        rows.append(("active per token", f"{d['active_parameters']:,}"))
    rows.append(("without embedding", f"{d['non_embedding']:,}"))
    rows += [(f"  {part}", f"{n:,} ({100 * n / d['parameters']:.3g} %)") for part, n in d["by_part"].items()]
    rows.append(("per layer", _layers(d["by_layer"])))
    rows += [
        ("width", f"hidden {d['hidden_size']}, MLP {', '.join(map(str, d['mlp_widths'])) or 'none'}"),
        (
            "attention",
            f"{d['attention']}: {d['heads']} query heads of {d['head_dim']}, {d['kv_heads']} for keys and values",
        ),
    ]
    across = d["heads"] * d["head_dim"]
    if d["heads"] and across != d["hidden_size"] and d["attention"] != "MLA":
        rows.append(
            (
                "",
                f"heads × head size = {across}, not the hidden size: {d['head_dim']} ≠ {d['hidden_size']} / {d['heads']}",
            )
        )
    if d["attention_scale"]:
        rows.append(("attention scale", f"{d['attention_scale']:.5g} = 1/√{1 / d['attention_scale'] ** 2:.5g}"))
    if d["experts"]:
        rows.append(("experts", f"{d['experts']['number']}, {d['experts']['per_token']} per token"))
    rows += [
        ("vocabulary", f"{d['vocabulary']:,}, head {'tied' if d['tied_head'] else 'of its own'}"),
        ("context", "not given" if d["context"] is None else f"{d['context']:,} tokens"),
    ]
    return rows


def _layers(counts: Sequence[int]) -> str:
    """`46 × 566.2 M`, or runs of alike layers."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    if len(runs) > 6:
        return f"{count_text(min(counts))} to {count_text(max(counts))}"
    return ", ".join(f"{n} × {count_text(count)}" for count, n in runs)


def _compute(facts: Facts) -> list[tuple[str, str]]:
    c = facts["compute"]
    flops, cache, context, batch = c["flops"], c["cache"], c["context"], c["batch"]
    at = f"at {context:,} tokens"
    rows = [
        ("decode", f"{flops_text(flops['decode_per_token'])} per token with the weights"),
        ("decode, attention", f"{flops_text(flops['decode_attention_at_context'])} more {at}"),
        ("prefill", f"{flops_text(flops['prefill_of_context'])} for {context:,} tokens"),
        ("training", f"{flops_text(flops['training_per_token'])} per token of {context:,}"),
        (
            "KV cache",
            f"{cache['bytes_per_token']:,} B per token ({cache['bytes_per_token'] / 1024:.4g} KiB) at {c['cache_bits']} bits",
        ),
        (
            "numbers cached",
            f"{', '.join(map(str, cache['numbers_per_token_and_layer'])) or 'none'} per token and layer",
        ),
        ("one sequence", f"{bytes_text(cache['bytes_per_sequence'])} {at}"),
    ]
    if cache["windows"]:
        layers = ", ".join(f"{n} layers keep {w}" for w, n in cache["windows"].items())
        rows.append(
            ("sliding windows", f"{layers}; {bytes_text(cache['bytes_per_sequence_without_windows'])} without them")
        )
    rows += [
        (f"  with {kind}", f"{numbers:,} numbers per token and layer")
        for kind, numbers in cache["alternatives"].items()
    ]
    sequences = f"{batch} sequence{'s' if batch > 1 else ''} {at}"
    rows.append(("intensity", f"{c['intensity']['decode_flops_per_byte']:g} FLOP per byte, decoding {sequences}"))
    if c["intensity"]["attention_flops_per_byte"]:
        rows.append(("  of attention", f"{c['intensity']['attention_flops_per_byte']:g} FLOP per byte of cache"))
    mla = facts["dimensions"]["attention"] == "MLA"
    return rows + [row for gpu in c["gpus"] for row in _gpu(gpu, batch, context, mla)]


def _gpu(gpu: Mapping[str, Any], batch: int, context: int, mla: bool) -> list[tuple[str, str]]:
    """Bounds, labelled so."""
    turn, bare, name = gpu["compute_bound_from_batch"], gpu["compute_bound_from_batch_without_cache"], gpu["gpu"]
    step, prefill = seconds_text(gpu["decode_seconds_per_step"]), seconds_text(gpu["prefill_seconds"])
    which = f"a step of {batch} sequences" if batch > 1 else "a token"
    rows = [
        (f"{name}, at best", f"{step} {which} ({gpu['decode_bound']}-bound), prefill {prefill}"),
        (
            f"  compute-bound ({name})",
            f"from batch {turn:,}" if turn else f"at no batch; from {bare:,} if there were no cache",
        ),
    ]
    if gpu["tokens_beside_weights"] is not None:
        fits = gpu["tokens_beside_weights"]
        shown = f"{fits:,} tokens of cache" if fits else "nothing: the weights alone do not fit"
        rows.append((f"  beside weights ({name})", shown))
    if mla:
        rows.append((f"  MLA turns ({name})", f"compute-bound from {gpu['mla_heads_to_turn']:.0f} query heads on"))
    return rows


def _formats(facts: Facts) -> list[tuple[str, str]]:
    return [
        (
            row["format"],
            f"{row['bits_per_weight']:.3f} bits ({row['overhead_bits']:.3f} overhead): {bytes_text(row['bytes'])}, "
            f"all weights so {bytes_text(row['all_weights'])}",
        )
        for row in facts["formats"]
    ]


def _update(facts: Facts) -> list[tuple[str, str]]:
    rows = []
    for row in facts["update"]:
        shown = f"{count_text(row['parameters'])} ({100 * row['share']:.3g} %): {bytes_text(row['training_bytes'])}"
        over = "".join(f", over {base} {bytes_text(size)}" for base, size in row["with_base"].items())
        rows.append((row["what"], shown + over))
    return [*rows, ("", "16 bytes a trained parameter (weights, gradients, Adam); activations not counted")]


# ---- a picture


_STYLE = """
.suture-budgets { font: 14px/1.45 system-ui, sans-serif; max-width: 72rem; }
.suture-budgets h3 { margin: 1em 0 .3em; font-size: 1.05em; }
.suture-budgets table { border-collapse: collapse; }
.suture-budgets td { text-align: left; vertical-align: top; padding: .15em 1em .15em 0; }
.suture-budgets figure { display: inline-block; width: 24rem; margin: .3em 2em .3em 0; vertical-align: top; }
.suture-budgets svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.suture-budgets svg .strong { font-weight: 600; }
.suture-budgets svg .end { text-anchor: end; }
.suture-budgets .fill-0 { fill: #1f6fb2; } .suture-budgets .fill-1 { fill: #c2571a; } .suture-budgets .fill-2 { fill: #2b8a5b; }
.suture-budgets .fill-3 { fill: #8a4fa3; } .suture-budgets .fill-4 { fill: #a88a12; } .suture-budgets .fill-5 { fill: #77736c; }
"""


def page(models: Sequence[Facts]) -> str:
    """HTML for a notebook's cell: bars of the three budgets, then the rows. Its styles touch nothing else."""
    drawn = "".join(_figures(facts) for facts in models) if "adapter" not in models[0] else ""
    tables = "".join(_table(section) for section in sections(models))
    return f'<div class="suture-budgets"><style>{_STYLE}</style>{drawn}{tables}</div>'


def _figures(facts: Facts) -> str:
    parts = [(part, float(n), i) for i, (part, n) in enumerate(facts["dimensions"]["by_part"].items())]
    cached = [(kind, float(n), 1) for kind, n in facts["compute"]["cache"]["alternatives"].items()]
    sizes = [(row["format"], float(row["bytes"]), 2) for row in facts["formats"]]
    training = [(row["what"], float(row["training_bytes"]), 3) for row in facts["update"]]
    drawn = {
        "parameters": bars("parameters", parts, count_text),
        "numbers cached per token and layer, by kind of attention": bars("cache", cached, lambda n: f"{n:,.0f}")
        if cached
        else "",
        "weights by format": bars("weights by format", sizes),
        "memory of training, without activations": bars("memory of training", training),
    }
    name = escape(str(facts["model"]))
    return "".join(
        f"<figure><figcaption>{name}: {title}</figcaption>{svg}</figure>" for title, svg in drawn.items() if svg
    )


def _table(section: Section) -> str:
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in section.rows)
    return f"<h3>{escape(section.title)}</h3><table>{rows}</table>"
