"""The command `suture`. Each command parses, calls one function and prints its result; heavy imports wait until then."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..pipeline.process import own_process
from . import lora, measure, recipes
from .messages import messages as _messages
from .options import Device, DeviceName, Download, Json, Overwrite, Quiet, Resume, Verbose

app = typer.Typer(
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    help="Operate on Hugging Face LLM checkpoints; every tensor accounted for, every number with its error bar.",
)
app.add_typer(lora.app, name="lora")
app.add_typer(recipes.app, name="recipes")
app.command()(recipes.init)
app.command()(measure.report)
app.command()(measure.power)


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="YAML file")],
    output: Annotated[Path | None, typer.Option(help="Directory to write, instead of the recipe's.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key.")] = None,
    gate: Annotated[float | None, typer.Option(help="Refuse to write past this perplexity ratio.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = DeviceName.auto,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a recipe: read, change, write, verify, report."""
    with _messages(_RESUME):
        from ..pipeline.recipe import load_recipe

        overrides = _overrides(set_, output) | ({} if gate is None else {"gate": str(gate)})
        _run(load_recipe(recipe, overrides), device, overwrite, resume, as_json)


@app.command()
def plan(
    recipe: Annotated[Path, typer.Argument(help="YAML file")],
    output: Annotated[Path | None, typer.Option(help="Directory to write, instead of the recipe's.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key.")] = None,
    device: Device = DeviceName.auto,
    as_json: Json = False,
) -> None:
    """Say what a recipe will do, with sizes, memory, time and refusals; do nothing."""
    with _messages():
        from ..pipeline.plan import describe, make_plan
        from ..pipeline.recipe import load_recipe
        from .tables import print_plan

        loaded = load_recipe(recipe, _overrides(set_, output))
        _show(describe(make_plan(loaded, device, overwrite=True)), as_json, print_plan)


Calibration = Annotated[str | None, typer.Option(help="Text for steps that need it: builtin:novels, or a file.")]
Samples = Annotated[int, typer.Option(help="calibration sequences")]
Length = Annotated[int, typer.Option(help="tokens per calibration sequence")]
Seed = Annotated[int, typer.Option(help="which pieces of the calibration text are taken")]
HeldOut = Annotated[str | None, typer.Option("--report", help="Held-out text to score base and output on.")]
Show = Annotated[bool, typer.Option("--show-recipe", help="Print the recipe that does the same, and stop.")]


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="directory, hub id, or builtin:tiny")],
    output: Annotated[Path, typer.Argument(help="directory to write")],
    method: Annotated[
        str,
        typer.Option(help="How to round: a step that `suture steps` lists as rounding.", autocompletion=recipes.steps),
    ] = "gptq",
    bits: Annotated[int | None, typer.Option(help="bits per weight, for methods that have them [4]")] = None,
    group_size: Annotated[int | None, typer.Option(help="inputs per scale; -1: one per channel [128]")] = None,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="With zero points.")] = False,
    targets: Annotated[list[str] | None, typer.Option(help="Layers to quantize; may be given again.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Layers to leave; may be given again.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="Blocks to quantize: the first N, or FROM-TO counted from 0; the rest stay. All.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the step.")] = None,
    calibration: Calibration = None,
    samples: Samples = 128,
    length: Length = 512,
    seed: Seed = 0,
    report: HeldOut = None,
    show_recipe: Show = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = DeviceName.auto,
    download: Download = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Quantize a model in one step."""
    with _messages(_RESUME):
        from ..pipeline.recipe import parse_values

        given = {"bits": bits, "group_size": group_size, "symmetric": False if asymmetric else None}
        given |= {"targets": targets or None, "ignore": ignore or None, "layers": layers}
        settings = {key: value for key, value in given.items() if value is not None}
        settings |= parse_values(_pairs(set_, "bits=3"))
        _check_rounds(method)
        text = _text(calibration, samples, length, seed, report)
        content = {"model": model, "steps": [{method: settings}], "output": str(output), "download": download, **text}
        _run_content(content, show_recipe, device, overwrite, resume, as_json)


@app.command()
def apply(
    model: Annotated[str, typer.Argument(help="directory, hub id, or builtin:tiny")],
    output: Annotated[Path, typer.Argument(help="directory to write")],
    step: Annotated[
        list[str], typer.Option(metavar="'NAME: {KEY: VALUE}'", help="A step as in a recipe; may be given again.")
    ],
    calibration: Calibration = None,
    samples: Samples = 128,
    length: Length = 512,
    seed: Seed = 0,
    report: HeldOut = None,
    show_recipe: Show = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = DeviceName.auto,
    download: Download = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Apply any steps to a model; `suture steps` lists them."""
    with _messages(_RESUME):
        from ..pipeline.recipe import parse_step

        text = _text(calibration, samples, length, seed, report)
        steps = [parse_step(one) for one in step]
        content = {"model": model, "steps": steps, "output": str(output), "download": download, **text}
        _run_content(content, show_recipe, device, overwrite, resume, as_json)


@app.command()
def steps(
    name: Annotated[
        str | None, typer.Argument(help="one step, with its settings", autocompletion=recipes.steps)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the steps of recipes, or the settings of one."""
    with _messages():
        from ..pipeline.recipe import describe_steps
        from .tables import print_steps

        _show(describe_steps(name), as_json, print_steps)


@app.command()
def inspect(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="directory, config.json, hub id, builtin:tiny, or an adapter"),
    ],
    context: Annotated[int | None, typer.Option(help="tokens per sequence [the model's, at most 8192]", min=1)] = None,
    batch: Annotated[int, typer.Option(help="sequences decoded together", min=1)] = 1,
    cache_bits: Annotated[int, typer.Option(help="bits of a cached number: 4, 8, 16 or 32")] = 16,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=BANDWIDTH,FLOPS,MEMORY]", help="GPU of the rooflines; may be given again. All."),
    ] = None,
    rank: Annotated[list[int] | None, typer.Option(help="LoRA rank; may be given again. 8, 16, 64.", min=1)] = None,
    targets: Annotated[list[str] | None, typer.Option(help="LoRA's layers; may be given again.")] = None,
    as_json: Json = False,
    download: Annotated[
        bool, typer.Option("--download", help="Allow the network for a hub id's config.json; weights are not fetched.")
    ] = False,
) -> None:
    """Read models as budgets: dimensions, compute and cache, update. config.json is enough; several go side by side."""
    with _messages():
        from ..pipeline.inspect import RANKS
        from ..pipeline.inspect import inspect as inspect_models
        from .tables import print_adapter, print_inspection

        found = inspect_models(
            models[0],
            *models[1:],
            context=context,
            batch=batch,
            cache_bits=cache_bits,
            gpus=gpu or (),
            ranks=rank or RANKS,
            targets=targets or (),
            download=download,
        )
        if as_json:
            print(found.to_json())
        elif "adapter" in found.facts:
            print_adapter(found.facts)
        else:
            print_inspection(found)


@app.command()
def check(
    directory: Annotated[Path, typer.Argument(help="a directory that suture wrote")],
    no_load: Annotated[bool, typer.Option("--no-load", help="Compare files and tensors only.")] = False,
    as_json: Json = False,
) -> None:
    """Verify an output: hashes, tensors, and that stock transformers loads it."""
    with _messages():
        from ..pipeline.check import check as check_output

        result = check_output(directory, load=not no_load)
        if as_json:
            print(json.dumps(result, indent=1))
            return
        loaded = ", loads in stock transformers" if result["loaded"] else ""
        print(f"{directory}: {result['files']} files and {result['tensors']} tensors as recorded{loaded}")


@app.command()
def watch(
    output: Annotated[Path, typer.Argument(help="the directory that a run, started elsewhere, will write")],
) -> None:
    """Follow a run's log until it has finished (exit code 0) or its process is gone (1)."""
    with _messages():
        from ..pipeline.watch import follow

        for seen in follow(output):
            print(seen.text, flush=True)
            if seen.ended == "died":
                raise typer.Exit(1)


def version(value: bool) -> None:
    if value:
        from importlib.metadata import version as installed

        print(f"suture {installed('suture')}")
        raise typer.Exit


_FIRST_STEPS = """\
suture operates on Hugging Face LLM checkpoints; every tensor is accounted for, every number has its error bar.

Commands, with an example each:
  inspect    what a model is and what it costs     suture inspect builtin:tiny
  init       write a first recipe                  suture init --goal w4-vllm --model builtin:tiny
  recipes    the recipes that ship                 suture recipes show gqa-heal
  plan       what a recipe would do                suture plan recipe.yaml
  run        do it, verify it, score it            suture run recipe.yaml
  watch      follow a run from elsewhere           suture watch out/w4-vllm
  quantize   one step without a recipe             suture quantize builtin:tiny out/w4 --method rtn --group-size 64
  apply      any steps without a recipe            suture apply builtin:tiny out/gqa --step 'gqa: {kv_heads: 4, method: mean}'
  report     score models on identical tokens      suture report builtin:tiny out/w4 --data builtin:holmes
  power      how much text shows a difference      suture power out/w4 --ratio 1.005
  lora       adapters: inspect, attach, extract    suture lora attach builtin:tiny out/adapter
  check      is an output what was written?        suture check out/w4

suture COMMAND --help says all of one; suture --help lists all; suture steps lists what recipes can do."""


@app.callback()
def root(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print it.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Keeps `--version` beside the commands."""
    if context.invoked_subcommand is None:
        print(_FIRST_STEPS, file=sys.stderr)
        raise typer.Exit(2)


def _check_rounds(method: str) -> None:
    from ..checkpoint.errors import SutureError, did_you_mean
    from ..pipeline.steps import STEPS

    rounding = [name for name, kind in STEPS.items() if kind.rounds]
    if method not in rounding:
        other = "; `suture apply --step` runs it" if method in STEPS else did_you_mean(method, rounding)
        raise SutureError(f"--method {method}: not a step that quantizes{other}", f"known: {', '.join(rounding)}")


def _text(calibration: str | None, samples: int, length: int, seed: int, report: str | None) -> dict[str, Any]:
    """The recipe's sections of text."""
    sections: dict[str, Any] = {}
    if calibration is not None:
        sections["calibration"] = {"data": calibration, "samples": samples, "length": length, "seed": seed}
    if report is not None:
        sections["report"] = {"data": report}
    return sections


def _run_content(
    content: dict[str, Any], show: bool, device: str, overwrite: bool, resume: bool, as_json: bool
) -> None:
    from ..pipeline.recipe import make_recipe

    recipe = make_recipe(content)
    if show:
        print(recipe.to_yaml(), end="")
    else:
        _run(recipe, device, overwrite, resume, as_json)


def _run(recipe: Any, device: str, overwrite: bool, resume: bool, as_json: bool) -> None:
    from ..pipeline.launch import together
    from ..pipeline.run import run as run_recipe
    from .console import TerminalProgress
    from .tables import print_run, run_facts

    options: dict[str, Any] = {"device": device, "overwrite": overwrite, "resume": resume}
    finished = together(lambda crew: run_recipe(recipe, progress=TerminalProgress(), crew=crew, **options))
    if finished is None:  # a launcher started several processes, of which this one is not the first
        return
    if as_json:
        print(json.dumps(run_facts(finished), indent=1))
    else:
        print_run(finished)
    if finished.fallbacks:
        raise typer.Exit(3)


def _overrides(pairs: list[str] | None, output: Path | None) -> dict[str, str]:
    overrides = _pairs(pairs, "steps.0.gptq.bits=3")
    if output is not None:
        overrides["output"] = json.dumps(str(output.absolute()))
    return overrides


def _pairs(pairs: list[str] | None, example: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"{pair}: expected KEY=VALUE, for example --set {example}")
        found[key] = value
    return found


def _show(content: dict[str, Any], as_json: bool, printer: Callable[[dict[str, Any]], None]) -> None:
    if as_json:
        print(json.dumps(content, indent=1))
    else:
        printer(content)


_RESUME = "; --resume goes on with what is done"


def main() -> None:
    """Entry point of the console script."""
    own_process()
    _speak_utf8()
    app()


def _speak_utf8() -> None:
    """Files and pipes get UTF-8 whatever the system's code page is (Windows), and no terminal ends a run for a letter."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
            if not stream.isatty() and "PYTHONIOENCODING" not in os.environ:
                stream.reconfigure(encoding="utf-8")
