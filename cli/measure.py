"""`suture report` and `suture power`: what two models' difference is, and how much text or how many items show one."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .messages import messages
from .options import Device, DeviceName, Json, Quiet, Verbose


class Protocol(StrEnum):
    """How text is cut into windows."""

    doc_rolling = "doc-rolling"
    gptq_2048 = "gptq-2048"
    llamacpp_512 = "llamacpp-512"
    lm_eval = "lm-eval"


class Detokenize(StrEnum):
    """What is undone of a text's spacing first."""

    none = "none"
    wikitext = "wikitext"


def report(
    base: Annotated[str, typer.Argument(help="the model to compare with")],
    candidates: Annotated[list[str], typer.Argument(help="one or more models to score against it")],
    data: Annotated[str, typer.Option(help="held-out text: builtin:holmes, a file, hf:NAME:SPLIT")],
    output: Annotated[Path | None, typer.Option(help="directory for report.json, report.html and report.md")] = None,
    protocol: Annotated[Protocol, typer.Option(help="How text is cut into windows.")] = Protocol.doc_rolling,
    window: Annotated[int | None, typer.Option(help="tokens per window")] = None,
    stride: Annotated[int | None, typer.Option(help="tokens between windows (doc-rolling) [window / 2]")] = None,
    max_windows: Annotated[int | None, typer.Option(help="score only so many windows")] = None,
    max_tokens_per_document: Annotated[
        int | None, typer.Option(help="score only the beginning of each document (doc-rolling)")
    ] = None,
    detokenize: Annotated[
        Detokenize, typer.Option(help="lm-eval: undo WikiText's spacing first, as its wikitext task does")
    ] = Detokenize.none,
    split: Annotated[str | None, typer.Option(help="regular expression that begins a document")] = None,
    column: Annotated[str | None, typer.Option(help="column of the text")] = None,
    also: Annotated[list[str] | None, typer.Option(help="more texts, each a row; may be given again")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="a task by log-likelihood, or '{data: FILE, ...}'; may be given again"),
    ] = None,
    generation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE", help="a task answered in words, or '{data: FILE, chat: true, ...}'; may be given again"
        ),
    ] = None,
    margin: Annotated[float, typer.Option(help="perplexity ratio less 1 that counts as equivalent")] = 0.02,
    level: Annotated[float, typer.Option(help="confidence level of intervals")] = 0.95,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=BANDWIDTH,FLOPS", help="a GPU of your own for the roofline, in bytes/s and FLOPs/s; again"
        ),
    ] = None,
    no_fidelity: Annotated[bool, typer.Option("--no-fidelity", help="Perplexity only, without KL divergence.")] = False,
    latency: Annotated[
        bool, typer.Option("--latency", help="Also time both models, interleaved; writes latency.json.")
    ] = False,
    device: Device = DeviceName.auto,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Score models against a base on identical tokens, with paired intervals."""
    with messages():
        from ..pipeline.api import compare, compare_all
        from ..pipeline.inspect import parse_gpu
        from ..pipeline.launch import together
        from ..pipeline.recipe import parse_task
        from .console import TerminalProgress

        settings: dict[str, Any] = {"protocol": protocol.value, "window": window, "max_windows": max_windows}
        settings |= {"stride": stride, "max_tokens_per_document": max_tokens_per_document}
        settings |= {"split": split, "column": column, "detokenize": detokenize.value}
        settings |= {"margin": margin, "level": level, "fidelity": not no_fidelity}
        settings |= {"gpus": {name: (one.bandwidth, one.flops) for name, one in map(parse_gpu, gpu or [])}}
        settings |= {
            "sets": [{"data": text} for text in also or []],
            "tasks": [parse_task(one, "--task") for one in task or []],
        }
        settings |= {"generation": [parse_task(one, "--generation") for one in generation or []]}
        common: dict[str, Any] = {"output": output, "device": device, "progress": TerminalProgress()}

        def scored(crew: Any) -> list[Any]:
            options = {"latency": latency, "crew": crew, **common, **settings}
            if len(candidates) == 1:
                return [compare(base, candidates[0], data, **options)]
            return list(compare_all(base, candidates, data, **options).reports.values())

        for compared in together(scored) or ():
            print(json.dumps(compared.content, indent=1) if as_json else compared.to_markdown())


def power(
    report: Annotated[
        Path | None,
        typer.Argument(help="report.json, or a directory with one: what these two models' scores varied by"),
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(help="with a report: of perplexities, that is to be shown [1.01]")
    ] = None,
    points: Annotated[float, typer.Option(help="of accuracy, in percent, that are to be shown")] = 1.0,
    probability: Annotated[float, typer.Option("--power", help="with which it is to be shown")] = 0.8,
    flips: Annotated[
        float | None, typer.Option(help="without a report: share of items whose answer changes between the models")
    ] = None,
    variance: Annotated[
        float | None, typer.Option(help="without a report: variance of the items' differences of expected scores")
    ] = None,
    within: Annotated[
        float | None, typer.Option(help="with --variance: mean variance of one answer given its item [0]")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="with --variance: answers per item [1]", min=1)] = None,
    level: Annotated[
        float | None, typer.Option(help="without a report, which has its own: confidence level of the test [0.95]")
    ] = None,
    as_json: Json = False,
) -> None:
    """How much text, or how many items, show a stated difference between two models."""
    with messages():
        from ..checkpoint.errors import SutureError
        from ..report.power import items_needed, items_needed_from_flips
        from .tables import print_power

        if sum(given is not None for given in (report, flips, variance)) != 1:
            raise SutureError(
                "power: give a report, or --flips, or --variance", "for example suture power out/w4 --ratio 1.005"
            )
        _refuse_unused(
            "a report" if report is not None else "--flips" if flips is not None else "--variance",
            {"--ratio": ratio, "--level": level, "--within": within, "--samples": samples},
        )
        if report is not None:
            rows = _needed_by(report, 1.01 if ratio is None else ratio, points, probability)
            if as_json:
                print(json.dumps({"power": probability, "rows": rows}, indent=1))
            else:
                print_power(rows, probability)
            return
        level = 0.95 if level is None else level
        if flips is not None:
            items = items_needed_from_flips(points / 100, flips, power=probability, level=level)
            of = f"where {100 * flips:g} % of the answers change"
        else:
            assert variance is not None
            within, samples = within or 0.0, samples or 1
            more: dict[str, Any] = {"within_a": within, "within_b": within, "samples": samples}
            items = items_needed(points / 100, variance=variance, power=probability, level=level, **more)
            of = f"under a variance of {variance:g} between items and {within:g} within, {samples} answers an item"
        if as_json:
            print(json.dumps({"power": probability, "level": level, "points": points, "items": items}, indent=1))
        else:
            print(f"{items:,} items show a difference of {points:g} points with {100 * probability:g} % power, {of}")


_USED = {
    "a report": {"--ratio"},
    "--flips": {"--level"},
    "--variance": {"--level", "--within", "--samples"},
}


def _refuse_unused(basis: str, given: dict[str, Any]) -> None:
    """Raises SutureError for an option that what is known of the items does not go with."""
    from ..checkpoint.errors import SutureError

    for option, value in given.items():
        if value is not None and option not in _USED[basis]:
            raise SutureError(f"power: {option} does not go with {basis}", f"leave it out; {_GOES_WITH[option]}")


_GOES_WITH = {
    "--ratio": "it is of a report's texts",
    "--level": "a report has its own level",
    "--within": "it goes with --variance",
    "--samples": "it goes with --variance",
}


def _needed_by(report: Path, ratio: float, points: float, probability: float) -> list[dict[str, Any]]:
    """Rows of a report.json, or of every candidate of a comparison.json."""
    from ..checkpoint.errors import SutureError
    from ..checkpoint.strict_json import strict_json
    from ..report.power import needed

    found = next((path for name in _REPORTS if (path := report / name).is_file()), report)
    if not found.is_file():
        raise SutureError(
            f"{report}: no {' or '.join(_REPORTS)}", "give what suture report or a run with a report wrote"
        )
    content = strict_json(found, 256 << 20)
    try:
        contents: list[Any] = content.get("reports", [content])
        return [
            ({"candidate": one["candidate"]} if len(contents) > 1 else {}) | row
            for one in contents
            for row in needed(one, ratio=ratio, points=points, power=probability)
        ]
    except (AttributeError, KeyError, TypeError, StopIteration) as error:
        raise SutureError(
            f"{found}: not a report of suture's ({error!r} is missing or of another kind)",
            "give the report.json or comparison.json of suture report, or of a run with a report",
        ) from None


_REPORTS = ("report.json", "comparison.json")
