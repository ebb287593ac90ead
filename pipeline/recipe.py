"""The recipe: one YAML file, one model. A key is a field; an unknown one is an error that names its line.

The same `Recipe` is built from YAML, from command-line options and from Python keywords; `to_yaml` prints one that runs
the same. Relative paths in a file are relative to the file.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from ..checkpoint.errors import SutureError, did_you_mean
from ..report.generation import Match
from ..report.task_forms import Form
from .step import StepKind, always, never
from .steps import STEPS


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TextSettings(_Strict):
    """Where text comes from."""

    data: str = Field(min_length=1, description="builtin:NAME, a file (.txt .jsonl .parquet), hf:OWNER/NAME:SPLIT")
    column: str | None = Field(None, description="column of the text; default: text, messages, content, input_ids")
    split: str | None = Field(None, description="regular expression that begins a document in a plain text file")


class CalibrationSettings(TextSettings):
    """The text that data-driven steps see."""

    samples: int = Field(128, ge=1, description="sequences")
    length: int = Field(512, ge=2, description="tokens per sequence; packed, no padding")
    seed: int = Field(0, ge=0, description="which pieces of the text are taken")
    order: Literal["shuffled", "sequential"] = Field(
        "shuffled", description="pieces from all documents, or the first tokens of the text as they come"
    )
    packing: Literal["joined", "isolated"] = Field(
        "joined",
        description="pieces of several documents in one sequence see each other; or isolated: none sees another, each "
        "begins with BOS, and positions start again",
    )

    @model_validator(mode="after")
    def _pieces_in_order_are_joined(self) -> CalibrationSettings:
        if self.packing == "isolated" and self.order == "sequential":
            raise ValueError("packing: isolated goes with order: shuffled; sequential puts documents end to end")
        return self


class SetSettings(TextSettings):
    """Held-out text, and how it is scored."""

    name: str | None = Field(None, min_length=1, description="what the report calls this text; default: its data")
    protocol: Literal["doc-rolling", "gptq-2048", "llamacpp-512", "lm-eval"] = Field(
        "doc-rolling", description="how tokens are cut into windows and which are scored"
    )
    window: int | None = Field(
        None, ge=2, description="tokens per window; default 2048 (llamacpp-512: 512), at most the model's context"
    )
    stride: int | None = Field(None, ge=1, description="tokens between windows (doc-rolling); default window / 2")
    max_windows: int | None = Field(None, ge=1, description="score only so many windows")
    max_tokens_per_document: int | None = Field(None, ge=2, description="score only the beginning of each document")
    detokenize: Literal["none", "wikitext"] = Field(
        "none", description="lm-eval only: undo WikiText's spacing first, as its wikitext task does"
    )

    @model_validator(mode="after")
    def _only_what_the_protocol_uses(self) -> SetSettings:
        if self.protocol != "doc-rolling" and (self.stride or self.max_tokens_per_document):
            raise ValueError(f"stride and max_tokens_per_document belong to doc-rolling; {self.protocol} has neither")
        if self.detokenize != "none" and self.protocol != "lm-eval":
            raise ValueError("detokenize belongs to the protocol lm-eval")
        return self


class TaskSettings(_Strict):
    """A task by log-likelihood from a local file."""

    name: str | None = Field(None, min_length=1, description="what the report calls it; default: the file's name")
    data: str = Field(min_length=1, description="a file (.jsonl, .jsonl.gz, .json, .parquet) or hf:OWNER/NAME:SPLIT")
    form: Form = Field("auto", description="whose columns the file has; auto: found from them")
    limit: int | None = Field(None, ge=1, description="the first so many items")


class GenerationSettings(_Strict):
    """A task answered in words, from a local file. Answers are compared as text and never run."""

    name: str | None = Field(None, min_length=1, description="what the report calls it; default: the file's name")
    data: str = Field(min_length=1, description="a file (.jsonl, .jsonl.gz, .json, .parquet) or hf:OWNER/NAME:SPLIT")
    template: str | None = Field(
        None,
        min_length=1,
        description="the prompt made of columns: 'Q: {question}'; default: the prompt column as it is",
    )
    chat: bool = Field(
        False, description="each prompt, or the column messages, goes through the tokenizer's chat template"
    )
    system: str | None = Field(None, min_length=1, description="chat: the system message before every prompt")
    match: Match = Field("exact", description="the answer equals a right one, or contains it; capitals do not count")
    extract: str | None = Field(
        None, min_length=1, description="regular expression whose last match, or its first group, is the answer"
    )
    samples: int = Field(1, ge=1, description="answers per item")
    temperature: float = Field(0.0, ge=0, description="0: greedy; above: sampled from the whole distribution")
    k: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=lambda: [1], min_length=1, description="pass@k: that one of k answers is right"
    )
    max_new_tokens: int = Field(64, ge=1, description="tokens of an answer, at most")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="strings that end an answer"
    )
    seed: int = Field(0, ge=0, description="of the sampling; both models draw with the same numbers")
    limit: int | None = Field(None, ge=1, description="the first so many items")

    @model_validator(mode="after")
    def _samples_that_differ(self) -> GenerationSettings:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("samples: greedy answers are all the same; set a temperature above 0, such as 0.8")
        if max(self.k) > self.samples:
            raise ValueError(f"k: pass@{max(self.k)} needs at least as many samples; there are {self.samples}")
        if self.system is not None and not self.chat:
            raise ValueError("system: only a chat has a system message; set chat: true")
        try:
            re.compile(self.extract or "")
        except re.error as error:
            raise ValueError(f"extract: {self.extract!r} is no regular expression: {error}") from None
        return self


class ReportSettings(SetSettings):
    """What the report measures. Several texts: a list of them, or more under `sets`."""

    level: float = Field(0.95, gt=0.5, lt=1, description="confidence level of intervals")
    margin: float = Field(
        0.02, gt=0, lt=1, description="perplexity ratio that still counts as equivalent (0.02: up to x 1.02)"
    )
    fidelity: bool = Field(True, description="also measure KL divergence, agreement and flips against the base")
    sets: list[SetSettings] = Field(
        default_factory=list, description="more texts (languages, code, domains); they take over the settings above"
    )

    @model_validator(mode="before")
    @classmethod
    def _first_set_is_the_main_one(cls, content: Any) -> Any:
        """A list, or sets alone, as the first text with the others under `sets`, which take over how it is scored."""
        if isinstance(content, list):
            content = {"sets": content}
        if not isinstance(content, Mapping) or not isinstance(content.get("sets"), list):
            return content
        content, sets = dict(content), content["sets"]
        if "data" not in content and sets and isinstance(sets[0], Mapping):
            content |= sets[0]
            sets = sets[1:]
        shared = {key: content[key] for key in _SCORING if key in content}
        content["sets"] = [_inherit(one, shared) for one in sets]
        return content

    tasks: list[TaskSettings] = Field(default_factory=list, description="multiple choice and cloze by log-likelihood")
    generation: list[GenerationSettings] = Field(
        default_factory=list, description="tasks answered in words by stock transformers, which holds one whole model"
    )
    gpus: dict[str, tuple[PositiveFloat, PositiveFloat]] = Field(
        default_factory=dict, description="more rows of the roofline: name -> [bytes per second, FLOPs per second]"
    )

    def all_sets(self) -> list[SetSettings]:
        """Every text with its settings, the main one first."""
        return [SetSettings(**{key: getattr(self, key) for key in SetSettings.model_fields}), *self.sets]


_SCORING = ("protocol", "window", "stride", "max_windows", "max_tokens_per_document", "detokenize")


def _inherit(one: Any, shared: Mapping[str, Any]) -> Any:
    """A set with the main text's settings where it has none; another protocol takes over only what all have."""
    if not isinstance(one, Mapping):
        return one
    other = "protocol" in one and one["protocol"] != shared.get("protocol", "doc-rolling")
    keys = [key for key in shared if not other or key in ("window", "max_windows")]
    return {**{key: shared[key] for key in keys}, **one}


def _known_step(step: Any) -> Any:
    if isinstance(step, str):
        raise ValueError(f"write '- {step}: {{}}'")
    if not isinstance(step, Mapping) or len(step) != 1:
        raise ValueError("one step is one {name: {settings}}")
    name = next(iter(step))
    if name not in STEPS:
        raise ValueError(f"unknown step '{name}'{did_you_mean(str(name), STEPS)}; known: {', '.join(STEPS)}")
    return step


class Recipe(_Strict):
    """What to do to which model, from reading to report."""

    model: str = Field(min_length=1, description="directory, hub id, or builtin:tiny")
    revision: str | None = Field(None, description="commit, branch or tag of a hub id")
    download: bool = Field(False, description="allow the network for a hub id that is not in the cache")
    calibration: CalibrationSettings | None = None
    steps: list[Annotated[dict[str, Any], BeforeValidator(_known_step)]] = Field(
        min_length=1, description="one entry per step: {name: {settings}}"
    )
    report: ReportSettings | None = None
    gate: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="refuse an output whose perplexity ratio on report's text is larger",
    )
    output: str = Field(min_length=1, description="directory to write; must not exist")
    max_shard_size: int = Field(5_000_000_000, ge=1_000, description="bytes per weight file")
    verify: Literal["auto", "full", "blocks"] = Field(
        "auto",
        description="reload all of the output, or only as many blocks as are no larger than the memory that the run takes; "
        "auto: all when it is smaller than an eighth of the memory at hand",
    )

    @model_validator(mode="after")
    def _gate_needs_a_ratio(self) -> Recipe:
        if self.gate is not None and self.report is None:
            raise ValueError(
                "gate: needs a perplexity ratio; add report: {data: builtin:holmes} or your own held-out text"
            )
        return self

    def resolved_steps(self) -> list[tuple[str, BaseModel]]:
        """Each step's name and validated settings."""
        resolved = []
        for i, step in enumerate(self.steps):
            name, settings = next(iter(step.items()))
            resolved.append((name, _validate(STEPS[name].settings, settings, "recipe", None, f"steps[{i}].{name}")))
        return resolved

    def to_yaml(self) -> str:
        """A recipe with every setting written out."""
        content = self.model_dump()
        content["steps"] = [{name: settings.model_dump()} for name, settings in self.resolved_steps()]
        return _dump({key: value for key, value in content.items() if value is not None})


def make_recipe(content: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """A validated recipe from plain data. Raises SutureError naming each wrong key."""
    recipe = _validate(Recipe, dict(content), where, content)
    assert isinstance(recipe, Recipe)
    recipe.resolved_steps()
    return recipe


M = TypeVar("M", bound=BaseModel)


def make_settings(model: type[M], content: Mapping[str, Any], where: str) -> M:
    """Validated settings from plain data. Raises SutureError naming each wrong key."""
    settings = _validate(model, dict(content), where, None)
    assert isinstance(settings, model)
    return settings


def parse_step(text: str) -> dict[str, Any]:
    """A step written on a command line: `NAME`, or `NAME: {KEY: VALUE, ...}`. Raises SutureError."""
    content = _parse_value(text, f"--step {text}")
    if isinstance(content, str) and content:
        return {content: {}}
    if not isinstance(content, Mapping) or len(content) != 1:
        raise SutureError(f"--step {text}: not one step", "write for example --step 'gptq: {bits: 4, group_size: 64}'")
    return {name: {} if settings is None else settings for name, settings in content.items()}


def parse_task(text: str, option: str) -> dict[str, Any]:
    """A task written on a command line: `NAME=FILE`, or its keys as `{data: FILE, ...}`. Raises SutureError."""
    name, equals, file = text.partition("=")
    if equals and re.fullmatch(r"[\w.-]+", name) and file:
        return {"name": name, "data": file}
    content = _parse_value(text, f"{option} {text}")
    if not isinstance(content, Mapping) or "data" not in content:
        raise SutureError(
            f"{option} {text}: expected NAME=FILE or {{data: FILE, ...}}", f"for example {option} piqa=piqa.jsonl"
        )
    return dict(content)


def parse_values(pairs: Mapping[str, str]) -> dict[str, Any]:
    """Settings of one step from a command line's KEY=VALUE, the values YAML."""
    return {key: _parse_value(text, f"--set {key}") for key, text in pairs.items()}


def _parse_value(text: str, where: str) -> Any:
    """Any YAML value, a mapping or not."""
    indented = "\n  ".join(text.splitlines())
    return _plain(_parse(f"value:\n  {indented}".encode(), where)["value"])


def describe_steps(name: str | None = None) -> dict[str, Any]:
    """Every step with its summary, or one with its settings, as plain data. Raises SutureError for an unknown name."""
    if name is None:
        return {
            "steps": {
                key: {"summary": kind.summary, "rounds": kind.rounds, "needs_text": _needs_text(kind)}
                for key, kind in STEPS.items()
            }
        }
    if name not in STEPS:
        raise SutureError(f"{name}: unknown step{did_you_mean(name, STEPS)}", f"known: {', '.join(STEPS)}")
    kind = STEPS[name]
    return {"step": name, "summary": kind.summary, "settings": describe_settings(kind.settings)}


def _needs_text(kind: StepKind) -> str:
    """always, never, or by settings."""
    return "always" if kind.needs_text is always else "never" if kind.needs_text is never else "by settings"


def describe_settings(model: type[BaseModel]) -> dict[str, Any]:
    """Per setting: its type, default and description."""
    described = {}
    for key, entry in model.model_fields.items():
        kind = entry.annotation
        shown = kind.__name__ if isinstance(kind, type) and not get_args(kind) else _type_text(str(kind))
        required = entry.is_required()
        default = None if required else entry.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            default = default.model_dump()
        described[key] = {
            "type": shown,
            "required": required,
            "default": default,
            "description": entry.description or "",
        }
    return described


def _type_text(text: str) -> str:
    for noise in ("typing.", "types.", "<class '", "'>"):
        text = text.replace(noise, "")
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)  # a class without its module


def load_recipe(path: Path, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Read a recipe file; `overrides` are dotted keys (`steps.0.gptq.bits`) with YAML values."""
    if not path.is_file():
        raise SutureError(f"{path}: no such recipe file", "recipes/quickstart.yaml in the repository is a working one")
    content = _parse(path.read_bytes(), str(path))
    _refuse_empty_sections(content, str(path))
    for key, text in (overrides or {}).items():
        _override(content, key, _parse(f"value: {text}".encode(), f"--set {key}")["value"])
    recipe = _validate(Recipe, _plain(content), str(path), content)
    assert isinstance(recipe, Recipe)
    for i, step in enumerate(recipe.steps):  # settings are checked here, where lines are known
        name, settings = next(iter(step.items()))
        source = content["steps"][i]
        _validate(STEPS[name].settings, settings, str(path), source[name], f"steps[{i}].{name}", _line(source, [name]))
    return _relative_to(recipe, path.parent)


def _refuse_empty_sections(content: Any, where: str) -> None:
    """A key with nothing after it is a section whose lines got lost; `--set KEY=null` removes one on purpose."""
    for key, value in content.items():
        if value is None:
            raise SutureError(
                f"{where}: line {_line(content, [key])}: {key}: there is nothing in it",
                "remove the key or give it a value",
            )


def _relative_to(recipe: Recipe, directory: Path) -> Recipe:
    """Paths in a recipe file are relative to the file."""
    changes: dict[str, Any] = {"output": _absolute(directory, recipe.output)}
    if not recipe.model.startswith("builtin:"):
        if recipe.model.startswith((".", "~")) or recipe.model.count("/") > 1 or (directory / recipe.model).is_dir():
            changes["model"] = _absolute(directory, recipe.model)
        elif Path(recipe.model).is_dir():
            raise SutureError(
                f"model: {recipe.model} is a directory here, but not beside the recipe, in {directory.absolute()}",
                "paths in a recipe are relative to it: write the path from there, or an absolute one",
            )
    for key in ("calibration", "report"):
        text = getattr(recipe, key)
        if text is not None:
            changes[key] = _placed(directory, text)
    if recipe.report is not None:
        more = {
            key: [_placed(directory, text) for text in getattr(recipe.report, key)]
            for key in ("sets", "tasks", "generation")
        }
        changes["report"] = changes["report"].model_copy(update={key: found for key, found in more.items() if found})
    changes["steps"] = [
        {name: _paths_from(directory, settings, STEPS[name].paths)}
        for step in recipe.steps
        for name, settings in step.items()
    ]
    return recipe.model_copy(update=changes)


def _paths_from(directory: Path, settings: Any, keys: tuple[str, ...]) -> Any:
    """A step's settings with the paths under `keys` taken from `directory`, also in lists, of paths or of mappings."""
    if isinstance(settings, list):
        return [_paths_from(directory, item, keys) for item in settings]
    if not isinstance(settings, Mapping):
        return settings
    return {key: _path_or_paths(directory, value, keys) if key in keys else value for key, value in settings.items()}


def _path_or_paths(directory: Path, value: Any, keys: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return value if value.startswith(("builtin:", "hf:")) else _absolute(directory, value)
    if isinstance(value, list):
        return [_path_or_paths(directory, item, keys) for item in value]
    return _paths_from(directory, value, keys)


def _placed(directory: Path, text: Any) -> Any:
    """The settings with an absolute path, where `data` is one."""
    if text.data.startswith(("builtin:", "hf:")):
        return text
    return text.model_copy(update={"data": _absolute(directory, text.data)})


def _absolute(directory: Path, path: str) -> str:
    return os.path.abspath(directory / Path(path).expanduser())  # noqa: PTH100  # resolve() would follow links


def _parse(raw: bytes, where: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if len(raw) > _BYTES or _depth(raw) > _DEPTH:  # the parser's time and stack grow with both
        raise SutureError(
            f"{where}: more than {_BYTES:,} bytes, or {_DEPTH} brackets inside one another, are no recipe",
            "correct the file",
        )
    try:
        content = YAML(typ="rt").load(io.BytesIO(raw))
    except MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}:" if mark is not None else ""
        problem = " ".join(str(error.problem).split())
        raise SutureError(f"{where}:{line} {problem}", "correct the YAML") from error
    except RecursionError as error:
        raise SutureError(
            f"{where}: lists or mappings are nested too deeply for a recipe", "correct the file"
        ) from error
    except (YAMLError, UnicodeDecodeError, ValueError) as error:
        raise SutureError(f"{where}: not YAML: {' '.join(str(error).split())[:200]}", "correct the file") from error
    if _written_out(content, {}) > _VALUES:
        raise SutureError(f"{where}: its aliases stand for more than {_VALUES:,} values", "write it without aliases")
    if not isinstance(content, Mapping):
        found = "empty" if content is None else "a list" if isinstance(content, list) else "a single value"
        raise SutureError(f"{where}: a recipe is a mapping of keys, this one is {found}", "begin with `model: ...`")
    return content


_BYTES, _DEPTH = 1_000_000, 64


def _depth(raw: bytes) -> int:
    """Brackets that are open at once, at most, strings not told apart from the rest."""
    depth = most = 0
    for char in raw:
        if char in b"[{":
            depth += 1
            most = max(most, depth)
        elif char in b"]}":
            depth -= 1
    return most


_VALUES = 100_000  # of a recipe at most, aliases written out


def _written_out(value: Any, known: dict[int, float]) -> float:
    """How many values there are with every alias written out; infinite for one that contains itself.

    A few lines of aliases of aliases stand for billions: each is counted once, by its identity in `known`.
    """
    if not isinstance(value, Mapping | list):
        return 1
    if id(value) not in known:
        known[id(value)] = float("inf")  # until it is counted: whoever meets it then is inside it
        parts = value.values() if isinstance(value, Mapping) else value
        known[id(value)] = 1 + sum(_written_out(part, known) for part in parts)
    return known[id(value)]


def _plain(value: Any) -> Any:
    """ruamel's containers, strings and numbers as plain Python."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _override(content: Any, key: str, value: Any) -> None:
    *path, last = _path_of(content, key)
    at = content
    for part in path:
        try:
            at = at[int(part)] if isinstance(at, list) else at[part]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise SutureError(f"--set {key}: the recipe has no '{part}' there", f"there {_holds(at)}") from error
    if not isinstance(at, Mapping):
        raise SutureError(f"--set {key}: no key '{last}' can be there", f"there {_holds(at)}")
    at[last] = value  # type: ignore[index]


def _path_of(content: Any, key: str) -> list[str]:
    """A dotted key's parts; a step's name may have a dot of its own (`lora.merge`)."""
    parts, path = key.split("."), []
    at: Any = content
    while parts:
        n = next((n for n in range(len(parts), 0, -1) if isinstance(at, Mapping) and ".".join(parts[:n]) in at), 1)
        path.append(".".join(parts[:n]))
        parts = parts[n:]
        try:
            at = at[int(path[-1])] if isinstance(at, list) else at[path[-1]]
        except (KeyError, IndexError, ValueError, TypeError):
            at = None
    return path


def _holds(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"are {', '.join(map(str, value))}"
    return f"is a list, 0..{len(value) - 1}" if isinstance(value, list) else f"is {_plain(value)!r}"


def _validate(
    model: type[BaseModel], data: Any, where: str, source: Any, prefix: str = "", line: int | None = None
) -> BaseModel:
    """`data` as `model`. `where`, `prefix` and `line` say in messages whose settings these are."""
    if not isinstance(data, Mapping):
        place = f"{where}: {f'line {line}: ' if line else ''}{prefix}"
        raise SutureError(f"{place}: expected settings, found {_plain(data)!r}", "write {} for the defaults")
    try:
        made = model.model_validate(_plain(data))
        wrong: list[Any] = [
            {"loc": path, "type": "boolean", "msg": "a number was expected", "input": found}
            for path, found in _booleans_read_as_numbers(_plain(data), made)
        ]
    except ValidationError as error:
        made, wrong = None, [_found_in(data, problem) for problem in error.errors()]
    if made is None or wrong:
        problems = [_explain(model, problem, where, source, prefix) for problem in wrong]
        raise SutureError("; ".join(problems), "nothing was read or written")
    return made


def _booleans_read_as_numbers(data: Any, made: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, bool]]:
    """(path, value) of each true or false in `data` that pydantic made 1 or 0 of."""
    if isinstance(data, bool):
        if isinstance(made, int | float) and not isinstance(made, bool):
            yield path, data
    elif isinstance(data, Mapping) and isinstance(made, BaseModel):
        for key, value in data.items():
            yield from _booleans_read_as_numbers(value, getattr(made, key, None), (*path, key))
    elif isinstance(data, list):
        parts = [made, *made.sets] if isinstance(made, ReportSettings) else made  # a report may be a list of texts
        for i, (value, part) in enumerate(zip(data, parts, strict=False) if isinstance(parts, list | tuple) else ()):
            yield from _booleans_read_as_numbers(value, part, (*path, i))


def _found_in(data: Mapping[str, Any], problem: Any) -> dict[str, Any]:
    """The problem where the user wrote it, since a `report` may be a list of texts; true and false are no numbers at all,
    whatever their limits."""
    loc = tuple(problem["loc"])
    if loc[:2] == ("report", "sets") and isinstance(data.get("report"), list) and len(loc) > 2:
        loc = ("report", loc[2] + 1, *loc[3:])
    limits = problem["type"].startswith(("greater_than", "less_than"))
    number = {"msg": "a number was expected"} if limits and isinstance(problem["input"], bool) else {}
    return {**problem, "loc": loc, **number}


def _explain(model: type[BaseModel], problem: Any, where: str, source: Any, prefix: str) -> str:
    path = [part for part in problem["loc"] if not str(part).startswith("function-")]
    key = prefix + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    line = _line(source, path)
    at = f"{where}: {f'line {line}: ' if line else ''}{key.lstrip('.')}".rstrip(": ")
    if problem["type"] == "extra_forbidden":
        known = _fields(model, path[:-1])
        near = did_you_mean(str(path[-1]), known) or _belongs(str(path[-1]))
        return f"{at}: unknown key{near}; known keys: {', '.join(known)}"
    if problem["type"] == "missing":
        return f"{at}: missing"
    message = problem["msg"].removeprefix("Value error, ")
    shown = problem.get("input")
    return f"{at}: {message}" + ("" if isinstance(shown, Mapping | list) else f" (found {shown!r})")


def _fields(model: type[BaseModel], path: list[Any]) -> list[str]:
    """Field names of the model at `path`."""
    for part in (part for part in path if not isinstance(part, int)):
        field = model.model_fields.get(str(part))
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field is not None else []
        inner = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def _belongs(key: str) -> str:
    """` (it belongs to calibration)` for a key written at the wrong level, or an empty string."""
    sections: dict[str, type[BaseModel]] = {"calibration": CalibrationSettings, "report": ReportSettings}
    sections |= {f"steps' {name}": kind.settings for name, kind in STEPS.items()}
    homes = [name for name, model in sections.items() if key in model.model_fields]
    homes += ["the top level"] if key in Recipe.model_fields else []
    return f" (it belongs to {' or '.join(homes)})" if homes else ""


def _line(source: Any, path: list[Any]) -> int | None:
    """Line of the key at `path`, counted from 1; None when the data did not come from a file."""
    line = None
    for part in path:
        lines = getattr(source, "lc", None)
        if lines is None or not lines.data or part not in lines.data:
            return line
        line = lines.data[part][0] + 1
        try:
            source = source[part]
        except (KeyError, IndexError, TypeError):
            return line
    return line


def _dump(content: Any) -> str:
    from ruamel.yaml import YAML

    text = ""
    for as_it_is in (True, False):  # U+0085 and its like are read back as spaces unless they are escaped
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
        yaml.allow_unicode = as_it_is
        stream = io.StringIO()
        yaml.dump(content, stream)
        text = stream.getvalue()
        if YAML(typ="safe", pure=True).load(text) == content:
            break
    return text
