"""`suture recipes` and `suture init`: the recipes that ship, and a first one of one's own."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from .messages import messages
from .options import Json

app = typer.Typer(help="Recipes that ship with suture: list them, print one.")


def names(incomplete: str = "") -> list[str]:
    """Shipped recipes, for the shell's completion; nothing heavy is imported."""
    found = files(__name__.partition(".")[0]).joinpath("recipes").iterdir()
    ends = sorted(entry.name.rpartition(".")[0] for entry in found if entry.name.endswith((".yaml", ".sh")))
    return [name for name in ends if name.startswith(incomplete)]


def steps(incomplete: str = "") -> list[str]:
    """Steps, as the shipped schema lists them."""
    schema = files(__name__.partition(".")[0]).joinpath("recipes", "recipe.schema.json")
    found = json.loads(schema.read_text(encoding="utf-8"))["$defs"]
    ends = [key.removeprefix("step ") for key in found if key.startswith("step ")]
    return [name for name in ends if name.startswith(incomplete)]


@app.callback(invoke_without_command=True)
def listed(context: typer.Context, as_json: Json = False) -> None:
    """List the recipes that ship with suture; `suture recipes show NAME` prints one."""
    if context.invoked_subcommand is not None:
        return
    with messages():
        from ..pipeline.recipes import examples
        from .tables import print_recipes

        found = {one.name: {"file": one.file, "summary": one.summary} for one in examples().values()}
        print(json.dumps(found, indent=1)) if as_json else print_recipes(found)


@app.command()
def show(name: Annotated[str, typer.Argument(help="a name that `suture recipes` lists", autocompletion=names)]) -> None:
    """Print a recipe as for a file here: suture recipes show w4-vllm > w4.yaml"""
    with messages():
        from ..pipeline.recipes import example, shown

        print(shown(example(name)), end="")


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, for editors; the file is installed with suture."""
    with messages():
        from ..pipeline.recipe_schema import schema_text

        print(schema_text(), end="")


def init(
    file: Annotated[Path, typer.Argument(help="the recipe to write")] = Path("recipe.yaml"),
    goal: Annotated[
        str | None, typer.Option(help="a name that `suture recipes` lists [w4-vllm]", autocompletion=names)
    ] = None,
    model: Annotated[str | None, typer.Option(help="directory, hub id, or builtin:tiny")] = None,
    calibration: Annotated[str | None, typer.Option(help="text for steps that need it: builtin:novels, a file")] = None,
    report: Annotated[str | None, typer.Option(help="held-out text to score on: builtin:holmes, a file")] = None,
    output: Annotated[str | None, typer.Option(help="directory that the recipe will write")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write a first recipe, by options or, on a terminal, by a few questions."""
    with messages():
        from ..checkpoint.errors import SutureError
        from ..pipeline.recipes import example, examples, first_recipe, takes_text

        if file.exists() and not overwrite:
            raise SutureError(f"{file} exists", "--overwrite replaces it, or give another name")
        asks = sys.stdin.isatty() and sys.stdout.isatty()
        if asks and goal is None:
            for one in examples().values():
                if not one.is_script:
                    print(f"  {one.name:20} {one.summary}", file=sys.stderr)
            goal = typer.prompt("what for", default="w4-vllm", err=True)
        goal = example(goal or "w4-vllm").name
        if asks:
            model = model or typer.prompt("model (directory, hub id, builtin:tiny)", default="builtin:tiny", err=True)
            if calibration is None and takes_text(goal):
                calibration = typer.prompt("calibration text", default="builtin:novels", err=True)
            report = report or typer.prompt("held-out text for the report", default="builtin:holmes", err=True)
            output = output or typer.prompt("output directory", default=f"out/{goal}", err=True)
        text = first_recipe(goal, model=model, calibration=calibration, report=report, output=output)
        file.write_text(text, encoding="utf-8")
        print(f"{file}: written; next: suture plan {file}, then suture run {file}")
