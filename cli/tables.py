"""Results as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..report.figures import number_text, seconds_text
from .console import Level, level

if TYPE_CHECKING:
    from ..pipeline.inspect import Inspection
    from ..pipeline.run import Run

_WIDTH = 100  # of tables that go to a file or a pipe


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _pairs(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def print_plan(plan: dict[str, Any]) -> None:
    rows = [("model", f"{plan['model']} ({plan['family']}, {plan['blocks']} blocks)")]
    for step in plan["steps"]:
        settings = ", ".join(f"{key} {value}" for key, value in step["settings"].items())
        counts = f"{step['changed']} tensors changed, {step['copied']} copied, {step['dropped']} dropped"
        rows.append((step["step"], f"{settings}\n{counts}"))
    if plan["calibration"]:
        text = plan["calibration"]
        rows.append(("calibration", f"{text['samples']} × {text['length']} tokens of {text['source']}"))
    if plan["evaluation"]:
        text = plan["evaluation"]
        rows.append(("report", f"{text['id']}, window {text['window']}, {text['n_scored']:,} tokens of {text['data']}"))
    rows += [
        ("weights", f"{megabytes(plan['bytes_in'])} → {megabytes(plan['bytes_out'])}"),
        ("peak memory", f"about {megabytes(plan['peak_memory'])}"),
        ("disk", megabytes(plan["disk"])),
        ("time", f"about {seconds_text(plan['seconds'])} on {plan['device']}, verification and report not counted"),
        ("output", plan["output"]),
    ]
    _pairs("plan", rows)
    for step in plan["steps"]:
        _print_portability(step["step"], step["portability"])
    _warn(plan["warnings"])


def _print_portability(step: str, matrix: list[dict[str, str]]) -> None:
    """What becomes of each of the source's features, by target."""
    if not matrix:
        return
    table = Table(title=f"where the output of {step} runs", title_justify="left")
    for heading in matrix[0]:
        table.add_column(heading.replace("_", " "), overflow="fold")
    for row in matrix:
        table.add_row(*row.values())
    _console().print(table)


def print_steps(content: dict[str, Any]) -> None:
    """The steps, or one step's settings."""
    if "steps" in content:
        table = Table(title="steps of a recipe; `suture steps NAME` shows one's settings", title_justify="left")
        for heading in ("step", "what it does", "calibration text", "rounds"):
            table.add_column(heading)
        for name, step in content["steps"].items():
            table.add_row(name, step["summary"], step["needs_text"], "yes" if step["rounds"] else "")
    else:
        table = Table(title=f"{content['step']}: {content['summary']}", title_justify="left")
        for heading in ("setting", "type", "default", "meaning"):
            table.add_column(heading)
        for name, setting in content["settings"].items():
            default = "required" if setting["required"] else str(setting["default"])
            table.add_row(name, escape(setting["type"]), escape(default), escape(setting["description"]))
    _console().print(table)


def print_recipes(found: dict[str, dict[str, str]]) -> None:
    table = Table(title="recipes; `suture recipes show NAME > FILE` writes one down", title_justify="left")
    table.add_column("recipe", no_wrap=True)
    table.add_column("what for")
    for name, one in found.items():
        table.add_row(name, escape(one["summary"]))
    _console().print(table)


def run_facts(run: Run) -> dict[str, Any]:
    """A finished run as plain data."""
    return {
        "output": str(run.output.absolute()),
        "bytes": {"before": run.plan.checkpoint.nbytes, "after": run.plan.steps[-1].shards.nbytes},
        "seconds": {part: round(seconds, 3) for part, seconds in run.seconds.items()},
        "memory": run.memory,
        "disk": run.disk,
        "predicted": run.predicted,
        **{key: run.manifest[key] for key in ("verification", "receipts", "fallbacks", "modules", "kv_cache")},
        "report": run.report.content if run.report is not None else None,
    }


def _beside_predicted(run: Run) -> str:
    """What the run took at most, and what `suture plan` had predicted."""
    memory = f"{megabytes(max(run.memory.values()))} of memory (predicted {megabytes(run.plan.estimate.peak_memory)})"
    disk = f"{megabytes(run.disk)} of disk ({megabytes(run.plan.estimate.disk)})"
    steps = f"{_seconds(run.seconds['steps'])} for the steps ({_seconds(run.plan.estimate.seconds)})"
    return f"{memory}, {disk}, {steps}"


def print_run(run: Run) -> None:
    """The closing table of a run: the figure with its interval, sizes, what was verified; -v: each layer's record."""
    verification = run.manifest["verification"]
    if run.report is not None:
        table = Table(title="perplexity on identical held-out tokens", title_justify="left")
        for heading in ("", "base", "quantized" if _quantized(run) else "output", "ratio"):
            table.add_column(heading, no_wrap=True)
        compared = run.report.perplexity
        row = [interval(x.ppl, x.low, x.high, 2) for x in (compared.base, compared.new)]
        table.add_row("per token", *row, interval(compared.ratio, compared.low, compared.high, 4))
        protocol = run.report.content["protocol"]
        table.caption = (
            f"{protocol['id']}, window {protocol['window']}, {compared.log.n_values:,} tokens, {compared.log.n_clusters} "
            f"{compared.log.cluster}s, paired {100 * compared.log.level:g} % interval"
        )
        _console().print(table)
    rows = [
        ("weights", f"{megabytes(run.plan.checkpoint.nbytes)} → {megabytes(run.plan.steps[-1].shards.nbytes)}"),
        (
            "layers",
            f"{_quantized(run)} quantized, {len(run.manifest['skipped_layers'])} left, {len(run.fallbacks)} fallbacks",
        ),
        *([("KV cache", kv_cache(run.manifest["kv_cache"]))] if run.manifest["kv_cache"] else []),
        ("time", ", ".join(f"{part} {_seconds(seconds)}" for part, seconds in run.seconds.items())),
        ("took", _beside_predicted(run)),
        ("output", str(run.output)),
        (
            "verified",
            f"{_how_loaded(verification)}, {verification['blocks']} of {verification['of_blocks']} blocks; logits differ by "
            f"at most {verification['max_difference']}",
        ),
    ]
    _pairs("run", [*rows, *_receipts(run)])
    if level() is Level.verbose:
        _print_modules(run.manifest["modules"])
    _warn(run.plan.warnings)
    _warn(note for receipt in run.manifest["receipts"] for note in receipt.get("notes", ()))
    _warn([verification["note"]] if "note" in verification else [])
    _warn([f"fallback: {name}: {reason}" for name, reason in run.fallbacks.items()])


def _print_modules(modules: dict[str, Any]) -> None:
    """A row per layer, its single figures."""
    table = Table(title="layers", title_justify="left")
    table.add_column("layer")
    table.add_column("record", overflow="fold")
    for name, record in modules.items():
        shown = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in record.items()
            if isinstance(value, str | int | float) and value != ""
        )
        table.add_row(escape(name), escape(", ".join(shown)))
    _console().print(table)


def _receipts(run: Run) -> list[tuple[str, str]]:
    """Step -> what it proved or measured of itself, the single figures; lists and tables are in the manifest."""
    rows = []
    for receipt in run.manifest["receipts"]:
        figures = [
            (key if value is True else f"not {key}" if value is False else f"{key.replace('_', ' ')} {value}")
            for key, value in receipt.items()
            if key != "step" and isinstance(value, bool | int | float)
        ]
        if figures:
            rows.append((f"{receipt['step']} receipt", ", ".join(figures)))
    return rows


def _quantized(run: Run) -> int:
    return sum("bits" in record for record in run.manifest["modules"].values())


def _how_loaded(verification: dict[str, Any]) -> str:
    if "not_stock" in verification:
        return f"read back as {verification['loaded_as']}, not loaded by others ({verification['not_stock']})"
    return f"reloaded by transformers as {verification['loaded_as']}"


def print_inspection(found: Inspection) -> None:
    """A table per budget, a column per model."""
    for section in found.sections():
        table = Table(title=section.title, show_header=False, title_justify="left")
        table.add_column(no_wrap=len(found.models) == 1)
        for _ in found.models:
            table.add_column(overflow="fold")
        for row in section.rows:
            table.add_row(*map(escape, row))
        _console().print(table)
    _warn(dict.fromkeys(note for model in found.models for note in model["notes"]))


def print_adapter(facts: dict[str, Any]) -> None:
    rows = [
        ("adapter", facts["adapter"]),
        ("kind", ", ".join(facts["kind"])),
        ("trained on", str(facts["trained_on"])),
        ("rank, alpha", f"{facts['r']}, {facts['alpha']:g}"),
        ("modules", f"{facts['low_rank_modules']} low-rank ({', '.join(facts['targets'])})"),
        ("parameters", f"{facts['parameters']:,} ({megabytes(facts['bytes'])})"),
        (
            "training",
            f"{megabytes(16 * facts['parameters'])} for weights, gradients and Adam in float32, beside the base",
        ),
    ]
    if facts["other_parts"]:
        rows.append(
            ("other parts", ", ".join(f"{path} ({', '.join(kinds)})" for path, kinds in facts["other_parts"].items()))
        )
    if facts.get("relative_delta") is not None:
        rows.append(
            ("size", f"{100 * facts['relative_delta']:.3g} % of the weights that it changes in {facts['base']}")
        )
    _pairs("adapter", rows)
    table = Table(title="modules")
    shown = ("r", "scale", "norm", "relative", "largest_singular_value", "effective_rank")
    columns = [key for key in shown if any(key in module for module in facts["modules"].values())]
    for heading in ("module", *(key.replace("_", " ") for key in columns)):
        table.add_column(heading)
    for path, module in facts["modules"].items():
        table.add_row(path, *(f"{module[key]:g}" if key in module else "" for key in columns))
    _console().print(table)
    _warn(["every lora_B is zero: it changes nothing"] if facts["changes_nothing"] else [])
    _warn(facts["notes"])


def print_power(rows: list[dict[str, Any]], power: float) -> None:
    """How much shows a difference, a row per text or task."""
    table = Table(title=f"what shows a difference with {100 * power:g} % power", title_justify="left")
    for heading in ("text or task", "figure", "difference", "needed", "measured", "which can show"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        name = " ".join(part for part in (row.get("candidate", ""), row["name"]) if part)
        shown = [_difference(row, row["difference"]), _needed_of(row)]
        measured = [f"{row['measured']:,} {row['unit']}", _difference(row, row["detectable"])]
        table.add_row(escape(name), row["metric"], *shown, *measured)
    _console().print(table)


def _difference(row: dict[str, Any], value: float | None) -> str:
    if value is None:
        return "unknown: no spread seen, or too few documents"
    return f"× {number_text(value, 5)}" if row["unit"] == "tokens" else f"{number_text(100 * value, 3)} points"


def _needed_of(row: dict[str, Any]) -> str:
    if row["needed"] is None:
        return "—"
    clusters = next((f" in {row[key]:,} {key}" for key in row if key.endswith(("documents", "blocks"))), "")
    return f"{row['needed']:,} {row['unit']}{clusters}"


def print_curve(rows: list[dict[str, Any]]) -> None:
    table = Table(title="perplexity by rank")
    for heading in ("model", "per token", "over the tuned model's, paired 95 % interval", "change kept"):
        table.add_column(heading)
    for row in rows:
        ratio, low, high = row["against_tuned"]
        table.add_row(
            row["model"], f"{row['perplexity']:g}", interval(ratio, low, high, 4), f"{100 * row['kept']:.1f} %"
        )
    _console().print(table)


def _warn(warnings: Any) -> None:
    if level() is Level.quiet:
        return
    console = _console()
    for warning in warnings:
        console.print(f"note: {warning}", markup=False, soft_wrap=True)


def kv_cache(sizes: dict[str, Any]) -> str:
    before, after = (sizes[when]["bytes_per_token"] for when in ("before", "after"))
    return f"{before:,} → {after:,} bytes per token, measured on a live {sizes['after']['kind']} in {sizes['after']['dtype']}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else seconds_text(seconds)


def megabytes(count: int) -> str:
    """In the unit that leaves at most four digits before the point."""
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"


def interval(value: float, low: float | None, high: float | None, digits: int) -> str:
    bounds = "(no interval)" if low is None or high is None else f"[{low:.{digits}f}, {high:.{digits}f}]"
    return f"{value:.{digits}f} {bounds}"
