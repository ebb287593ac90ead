"""The recipes that ship with suture: what each is for, its text, and a first recipe made from one."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..checkpoint.errors import SutureError, did_you_mean
from .recipe import make_recipe
from .recipe_schema import SCHEMA_FILE

_SCHEMA_LINE = "# yaml-language-server: $schema="


@dataclass(frozen=True)
class Example:
    """A shipped recipe: YAML for `suture run`, or a shell script for a job of several commands."""

    name: str
    file: str
    summary: str
    text: str

    @property
    def is_script(self) -> bool:
        return self.file.endswith(".sh")


def examples() -> dict[str, Example]:
    """By name, the shortest first job first."""
    found = {}
    for entry in sorted(_folder().iterdir(), key=lambda entry: (entry.name != "quickstart.yaml", entry.name)):
        name, _, kind = entry.name.rpartition(".")
        if kind in ("yaml", "sh"):
            text = entry.read_text(encoding="utf-8")
            found[name] = Example(name, entry.name, _summary(text), text)
    return found


def example(name: str) -> Example:
    """One by name. Raises SutureError with the nearest name."""
    found = examples()
    if name not in found:
        raise SutureError(f"{name}: no such recipe{did_you_mean(name, found)}", f"there are {', '.join(found)}")
    return found[name]


def shown(one: Example) -> str:
    """Its text as for a file in the current directory: it writes to out/, and the editor finds the schema."""
    return one.text.replace("../out/", "out/").replace(f"{_SCHEMA_LINE}{SCHEMA_FILE}", f"{_SCHEMA_LINE}{schema_path()}")


def first_recipe(
    goal: str,
    *,
    model: str | None = None,
    calibration: str | None = None,
    report: str | None = None,
    output: str | None = None,
) -> str:
    """The shipped recipe `goal` with its comments, for this model and these texts; None keeps the recipe's own.

    Raises SutureError for an unknown goal, a script, or a text that the recipe has no use for.
    """
    from ruamel.yaml import YAML

    one = example(goal)
    if one.is_script:
        raise SutureError(
            f"{goal} is a script of several commands, not a recipe", f"`suture recipes show {goal}` prints it"
        )
    yaml = YAML(typ="rt")
    yaml.width = 200
    content: Any = yaml.load(shown(one))
    if calibration is not None and "calibration" not in content:
        raise SutureError(f"calibration: the recipe {goal} needs no text", "leave it out")
    wanted: Mapping[tuple[str, ...], str | None] = {
        ("model",): model,
        ("calibration", "data"): calibration,
        ("report", "data"): report,
        ("output",): output,
    }
    for path, value in wanted.items():
        if value is not None:
            at = content if len(path) == 1 else content[path[0]]
            at[path[-1]] = value
    stream = io.StringIO()
    yaml.dump(content, stream)
    made = stream.getvalue()
    make_recipe(YAML(typ="safe").load(made), "the new recipe")
    return made


def takes_text(goal: str) -> bool:
    """Whether the recipe has calibration text."""
    return "\ncalibration:" in example(goal).text


def schema_path() -> Path:
    """The installed JSON Schema of recipes."""
    return Path(str(_folder() / SCHEMA_FILE))


def _folder() -> Any:
    return files(__name__.partition(".")[0]) / "recipes"


def _summary(text: str) -> str:
    """The first sentence of comment."""
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("# ")]
    return next(line for line in lines if not line.startswith("yaml-language-server"))
