"""`suture lora ...`: commands whose input or output is an adapter. Each parses, calls one function and prints."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .messages import messages
from .options import Json, Overwrite

app = typer.Typer(no_args_is_help=True, help="LoRA adapters: look at them, begin, extract, add and carry them over.")


class InitName(StrEnum):
    """How A and B begin."""

    default = "default"
    gaussian = "gaussian"
    orthogonal = "orthogonal"
    pissa = "pissa"
    loftq = "loftq"
    eora = "eora"


class SumMethod(StrEnum):
    """How several changes become one."""

    sum = "sum"
    ties = "ties"
    dare = "dare"


class EmbeddingChoice(StrEnum):
    """What becomes of embeddings and head that differ."""

    full = "full"
    skip = "skip"


Output = Annotated[Path, typer.Argument(help="directory to write")]
AdapterDir = Annotated[Path, typer.Argument(help="directory with adapter_config.json")]


@app.command()
def inspect(
    adapter: AdapterDir,
    base: Annotated[str | None, typer.Option(help="the model it is for: also compare sizes with its weights")] = None,
    as_json: Json = False,
) -> None:
    """Say what an adapter is: modules, scales, norms, effective ranks, parameters and the memory training it takes."""
    with messages():
        from ..pipeline.adapters import inspect_adapter
        from .tables import print_adapter

        facts = inspect_adapter(adapter, base)
        print(json.dumps(facts, indent=1)) if as_json else print_adapter(facts)


@app.command()
def attach(
    model: Annotated[str, typer.Argument(help="the base, may be quantized: directory, hub id, builtin:tiny")],
    output: Output,
    r: Annotated[int, typer.Option("--r", help="rank", min=1)] = 16,
    alpha: Annotated[float, typer.Option(help="the change is alpha / r times B A")] = 32.0,
    targets: Annotated[list[str] | None, typer.Option(help="Layers; may be given again. Default: all-linear.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Layers to leave; may be given again.")] = None,
    rslora: Annotated[bool, typer.Option("--rslora", help="alpha / sqrt(r) instead of alpha / r.")] = False,
    dora: Annotated[bool, typer.Option("--dora", help="A magnitude per output.")] = False,
    init: Annotated[
        InitName, typer.Option(help="How A and B begin; loftq and eora need --original.")
    ] = InitName.default,
    original: Annotated[str | None, typer.Option(help="The unquantized model that MODEL was made from.")] = None,
    calibration: Annotated[str | None, typer.Option(help="Text for eora: builtin:novels, or a file.")] = None,
    samples: Annotated[int, typer.Option(help="calibration sequences")] = 128,
    length: Annotated[int, typer.Option(help="tokens per calibration sequence")] = 512,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Begin an adapter for a model; PEFT trains it."""
    with messages():
        from ..pipeline.adapters import attach as attach_adapter
        from .console import TerminalProgress

        text = {"data": calibration, "samples": samples, "length": length, "seed": seed} if calibration else None
        settings: dict[str, Any] = {"r": r, "alpha": alpha, "rslora": rslora, "dora": dora, "init": init.value}
        settings |= {"targets": targets or ["all-linear"], "ignore": ignore or []}
        settings |= {"original": original, "calibration": text, "seed": seed, "overwrite": overwrite}
        _say(attach_adapter(model, output, progress=TerminalProgress(), **settings))


@app.command()
def heal(
    model: Annotated[str, typer.Argument(help="the model to heal, may be quantized")],
    output: Output,
    teacher: Annotated[str, typer.Option(help="the model that MODEL was made from")],
    data: Annotated[str, typer.Option(help="text to train on: builtin:novels, or a file; not the one to score on")],
    samples: Annotated[int, typer.Option(help="sequences of text")] = 128,
    length: Annotated[int, typer.Option(help="tokens per sequence")] = 512,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the step heal, for example r=32 or tokens=200000."),
    ] = None,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
) -> None:
    """Train an adapter beside a quantized model towards the original; kept only when held-out text says it is better."""
    with messages("; --resume goes on with what is done"):
        from ..pipeline.adapters import heal as heal_beside
        from ..pipeline.launch import together
        from ..pipeline.recipe import parse_values
        from .console import TerminalProgress

        wrong = [pair for pair in set_ or [] if "=" not in pair]
        if wrong:
            raise typer.BadParameter(f"{wrong[0]}: expected KEY=VALUE, for example --set r=32")
        pairs = dict(pair.split("=", 1) for pair in set_ or [])
        text = {"data": data, "samples": samples, "length": length}
        options: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "progress": TerminalProgress()}
        options |= {"teacher": teacher, "calibration": text, **parse_values(pairs)}
        written = together(lambda crew: heal_beside(model, output, crew=crew, **options))
        if written is not None:
            _say(written)


@app.command()
def extract(
    base: Annotated[str, typer.Argument(help="the model before fine-tuning")],
    tuned: Annotated[str, typer.Argument(help="the model after it")],
    output: Output,
    rank: Annotated[int | None, typer.Option(help="of every layer", min=1)] = None,
    energy: Annotated[float | None, typer.Option(help="share of each layer's squared change to keep")] = None,
    budget: Annotated[int | None, typer.Option(help="parameters of all layers together", min=1)] = None,
    max_rank: Annotated[int, typer.Option(help="of any layer, for --energy and --budget", min=1)] = 256,
    targets: Annotated[list[str] | None, typer.Option(help="Layers; may be given again. Default: all-linear.")] = None,
    embeddings: Annotated[
        EmbeddingChoice, typer.Option(help="Store them in full, or not at all.")
    ] = EmbeddingChoice.full,
    overwrite: Overwrite = False,
) -> None:
    """The difference of two checkpoints as a low-rank adapter of the first."""
    with messages():
        from ..pipeline.adapters import extract as extract_adapter
        from .console import TerminalProgress

        settings: dict[str, Any] = {"rank": rank, "energy": energy, "budget": budget, "max_rank": max_rank}
        settings |= {"targets": targets or ["all-linear"], "embeddings": embeddings.value, "overwrite": overwrite}
        _say(extract_adapter(base, tuned, output, progress=TerminalProgress(), **settings))


@app.command()
def curve(
    base: Annotated[str, typer.Argument(help="the model before fine-tuning")],
    tuned: Annotated[str, typer.Argument(help="the model after it")],
    adapter: AdapterDir,
    data: Annotated[str, typer.Option(help="held-out text: builtin:holmes, a file, hf:NAME:SPLIT")],
    ranks: Annotated[list[int] | None, typer.Option(help="May be given again. Default: 1, 2, 4 ... 64.")] = None,
    window: Annotated[int | None, typer.Option(help="tokens per window")] = None,
    max_windows: Annotated[int | None, typer.Option(help="score only so many windows")] = None,
    as_json: Json = False,
) -> None:
    """Perplexity by rank: how much of a fine-tuning an extracted adapter carries at each rank."""
    with messages():
        from ..pipeline.adapters import extraction_curve
        from .console import TerminalProgress
        from .tables import print_curve

        chosen = {"ranks": ranks} if ranks else {}
        settings = {"window": window, "max_windows": max_windows, "progress": TerminalProgress()}
        rows = extraction_curve(base, tuned, adapter, data, **chosen, **settings)  # type: ignore[arg-type]
        print(json.dumps(rows, indent=1)) if as_json else print_curve(rows)


@app.command()
def combine(
    output: Output,
    adapters: Annotated[list[str], typer.Argument(metavar="ADAPTER[=WEIGHT]...", help="adapters and their weights")],
    method: Annotated[SumMethod, typer.Option(help="sum is exact; ties and dare need --rank.")] = SumMethod.sum,
    rank: Annotated[int | None, typer.Option(help="truncate the result to it", min=1)] = None,
    density: Annotated[float, typer.Option(help="share of each change that ties and dare keep")] = 0.5,
    seed: Annotated[int, typer.Option(help="of what dare drops")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """One adapter whose change is the weighted sum of several."""
    with messages():
        from ..pipeline.adapters import combine as combine_adapters
        from .console import TerminalProgress

        pairs = [_with_weight(text) for text in adapters]
        settings: dict[str, Any] = {"method": method.value, "rank": rank, "density": density, "seed": seed}
        _say(combine_adapters(pairs, output, overwrite=overwrite, progress=TerminalProgress(), **settings))


@app.command()
def transport(
    adapter: AdapterDir,
    base: Annotated[str, typer.Argument(help="the model that the adapter is for")],
    converted: Annotated[str, typer.Argument(help="the model that was made from it")],
    output: Output,
    overwrite: Overwrite = False,
) -> None:
    """Carry an adapter over to a model that linear surgery made from its base; exact, or refused."""
    with messages():
        from ..pipeline.adapters import transport as transport_adapter
        from .console import TerminalProgress

        _say(transport_adapter(adapter, base, converted, output, overwrite=overwrite, progress=TerminalProgress()))


def _with_weight(text: str) -> tuple[str, float]:
    """`DIR=0.5` as ("DIR", 0.5); a directory whose own name has a = in it is taken as it is."""
    path, equals, weight = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, 1.0
    try:
        return path, float(weight)
    except ValueError:
        raise typer.BadParameter(f"{text}: {weight} is not a number; expected ADAPTER=WEIGHT") from None


def _say(written: Any) -> None:
    for note in written.notes:
        print(f"note: {note}")
    print(f"{written.output}: {written.n_parameters:,} parameters in {len(written.record['modules'])} modules")
