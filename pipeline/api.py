"""The calls that notebooks and scripts need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..calibrate.crew import ALONE, Crew
from ..checkpoint.errors import SutureError
from ..checkpoint.manifest import MANIFEST, read_manifest, to_json
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.staging import write_whole
from ..report.document import (
    SCHEMA_VERSION,
    Report,
    adjusted_together,
    framed,
    make_report,
    rounded_weights,
    write_report,
)
from ..report.layers import layers_section
from ..report.page import render
from ..report.score import KeptStates
from .costs import cost_of
from .generation_runs import plan_generation, refuse_models_beyond_memory, run_generation
from .leaks import leaks_recorded
from .plan import choose_device
from .progress import Progress, default_progress
from .recipe import Recipe, ReportSettings, load_recipe, make_recipe
from .run import Run
from .run import run as _run
from .scoring import Scorer, score_set
from .task_runs import plan_tasks, run_tasks
from .texts import Evaluation, TextModel, evaluation_text, text_model
from .timing import time_models


def run(recipe: str | Path | Recipe | Mapping[str, Any], **options: Any) -> Run:
    """Run a recipe: a YAML file, a `Recipe`, or its content as a mapping.

    Options: device ("auto"), overwrite, resume, progress. Raises SutureError; then nothing is under the output's name.

    >>> made = run({"model": "builtin:tiny", "steps": [{"cast": {"dtype": "float32"}}], "output": "in-float32"})
    >>> made.output.name, sorted({info.dtype for info in open_checkpoint(made.output).tensors.values()})
    ('in-float32', ['F32'])
    """
    if isinstance(recipe, str | Path):
        recipe = load_recipe(Path(recipe))
    elif not isinstance(recipe, Recipe):
        recipe = make_recipe(recipe)
    return _run(recipe, **options)


def apply(
    model: str,
    output: str | Path,
    steps: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    calibration: str | Mapping[str, Any] | None = None,
    report: str | Mapping[str, Any] | None = None,
    device: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Apply steps to a model: `{name: {settings}}`, in order, or a list of such when one comes twice.

    `calibration` and `report` are text (`builtin:novels`, a file) or a mapping of their recipe keys; there is no hidden
    default, so a step that needs text says so.

    >>> made = apply("builtin:tiny", "halved", {"gqa": {"kv_heads": 4, "method": "mean"}})
    >>> open_checkpoint("halved").config["num_key_value_heads"]
    4
    """
    listed = [{name: settings} for name, settings in steps.items()] if isinstance(steps, Mapping) else list(steps)
    content: dict[str, Any] = {"model": str(model), "steps": listed, "output": str(output)}
    for key, text in (("calibration", calibration), ("report", report)):
        if text is not None:
            content[key] = dict(text) if isinstance(text, Mapping) else {"data": text}
    return _run(make_recipe(content), device=device, overwrite=overwrite, resume=resume, progress=progress)


def quantize(
    model: str,
    output: str | Path,
    method: str = "gptq",
    *,
    calibration: str | Mapping[str, Any] | None = None,
    report: str | Mapping[str, Any] | None = None,
    device: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Run:
    """Quantize a model in one step. `settings` are the step's keys (bits, group_size, ...); the rest is as in `apply`.

    >>> made = quantize("builtin:tiny", "rounded", "rtn", bits=4, group_size=64)
    >>> made.manifest["verification"]["loaded_as"], len(made.fallbacks)
    ('LlamaForCausalLM', 0)
    """
    options: dict[str, Any] = {"device": device, "overwrite": overwrite, "resume": resume, "progress": progress}
    return apply(model, output, {method: settings}, calibration=calibration, report=report, **options)


def compare(
    base: str | Path,
    candidate: str | Path,
    data: str,
    *,
    output: str | Path | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    latency: bool = False,
    crew: Crew = ALONE,
    **settings: Any,
) -> Report:
    """Score two checkpoints on identical tokens. `settings` are the keys of a recipe's `report`; `crew`: the processes
    that share the scoring, of which this one is the first.

    The base's tokenizer is used for both; models of different vocabularies are refused. With `output`, the report's
    files are written there. `latency`: both are also loaded by transformers and timed, interleaved; the figures, which
    no second run repeats, go to latency.json and to the page, never into report.json.

    >>> quick = {"max_tokens_per_document": 32, "window": 32}
    >>> found = compare("builtin:tiny", "builtin:tiny", "builtin:holmes", **quick).perplexity
    >>> found.ratio, found.low, found.high  # a model against itself
    (1.0, 1.0, 1.0)
    """
    return _compare(base, candidate, data, output, device, progress, latency, crew, None, settings)


def _compare(
    base: str | Path,
    candidate: str | Path,
    data: str,
    output: str | Path | None,
    device: str,
    progress: Progress | None,
    latency: bool,
    crew: Crew,
    kept: KeptStates | None,
    settings: dict[str, Any],
) -> Report:
    progress = progress or default_progress()
    wanted = make_recipe(
        {"model": str(base), "steps": [{"rtn": {}}], "output": "unused", "report": {"data": data, **settings}}, "report"
    ).report
    assert isinstance(wanted, ReportSettings)
    checkpoints = {"base": open_checkpoint(base), "candidate": open_checkpoint(candidate)}
    scorer = Scorer.of(checkpoints["base"], checkpoints["candidate"], choose_device(device), progress.track, crew, kept)
    skeletons = scorer.models
    rows = {name: s.source.shapes[s.layout.embedding][0] for name, s in skeletons.items()}
    if rows["base"] != rows["candidate"]:
        raise SutureError(
            f"{base} has a vocabulary of {rows['base']}, {candidate} of {rows['candidate']}: their tokens are not the same",
            "compare models with one tokenizer",
        )
    contexts = [getattr(skeleton.hf_config, "max_position_embeddings", None) for skeleton in skeletons.values()]
    text = text_model(checkpoints["base"], rows["base"], min((n for n in contexts if n is not None), default=None))
    evaluations = [evaluation_text(one, text) for one in wanted.all_sets()]
    _same_tokens(checkpoints["candidate"], text, wanted, evaluations)
    tasks, asked = plan_tasks(wanted.tasks, text), plan_generation(wanted.generation, text)
    if asked:
        refuse_models_beyond_memory(skeletons.values())
    record = _manifest(checkpoints["candidate"])
    sets = [
        score_set(
            evaluation,
            scorer,
            fidelity=wanted.fidelity,
            level=wanted.level,
        )
        for evaluation in evaluations
    ]
    scored, records = run_tasks(tasks, scorer, level=wanted.level)
    before, after = checkpoints["base"].path, checkpoints["candidate"].path
    generation, samples = run_generation(
        asked, before, after, choose_device(device), progress.track, level=wanted.level
    )
    report = make_report(
        base=checkpoints["base"],
        candidate=checkpoints["candidate"],
        sets=sets,
        level=wanted.level,
        margin=wanted.margin,
        tasks=scored,
        generation=generation,
        samples=[*records, *samples],
        cost=cost_of(checkpoints["base"], checkpoints["candidate"], wanted.gpus),
        warnings=[
            *(note for plan in (*tasks, *asked) for note in plan.warnings),
            *leaks_recorded(record, text, evaluations, [*tasks, *asked]),
        ],
        calibration=record.get("calibration"),
        modules=record.get("modules", {}),
        receipts=record.get("receipts", []),
        steps=[("compare", {"candidate": checkpoints["candidate"].source})],
        parameters=sum(math.prod(shape) for shape in skeletons["base"].source.shapes.values()),
    )
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
        write_report(report, Path(output))
    if latency:
        progress.say("latency: timing both models in turn")
        report = replace(report, latency=_timed(before, after, choose_device(device), output))
        if output is not None:
            write_report(report, Path(output))
    return report


def _timed(base: Path, candidate: Path, device: Any, output: str | Path | None) -> dict[str, Any]:
    try:
        return time_models(base, candidate, device)
    except Exception as error:  # of transformers, of a format's own package, of memory: the figures so far are kept
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        kept = "" if output is None else f"; the report without it is in {output}"
        raise SutureError(
            f"latency: stock transformers cannot time both models: {reason}{kept}", "leave --latency out"
        ) from error


@dataclass(frozen=True)
class Comparison:
    """Several candidates against one base."""

    reports: dict[str, Report]  # by the candidate's path or name as given

    @property
    def contents(self) -> list[dict[str, Any]]:
        return [report.content for report in self.reports.values()]

    def to_html(self) -> str:
        """One page with all candidates: ratios, bytes against divergence, and each one's own report."""
        return render(self.contents, [report.latency for report in self.reports.values()])

    def _repr_html_(self) -> str:
        return framed(self.to_html())


def compare_all(
    base: str | Path,
    candidates: Sequence[str | Path],
    data: str,
    *,
    output: str | Path | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    latency: bool = False,
    crew: Crew = ALONE,
    **settings: Any,
) -> Comparison:
    """`compare` for each candidate on the same tokens. `output` gets one page, and each candidate's files below it."""
    if not candidates:
        raise SutureError("no candidate to compare", "give at least one model beside the base")
    if len({str(candidate) for candidate in candidates}) < len(candidates):
        raise SutureError("a candidate is given twice", "give each model once")
    kept = KeptStates() if len(candidates) > 1 else None
    targets = [
        None if output is None else Path(output) / f"{number + 1}-{Path(candidate).name.replace(':', '-')}"
        for number, candidate in enumerate(candidates)
    ]
    alone = [
        _compare(base, candidate, data, target, device, progress, latency, crew, kept, settings)
        for candidate, target in zip(candidates, targets, strict=True)
    ]
    reports = adjusted_together(alone)
    comparison = Comparison({str(candidate): report for candidate, report in zip(candidates, reports, strict=True)})
    if output is not None:
        for report, target in zip(reports, targets, strict=True):
            assert target is not None
            write_report(report, target)  # again: its p-values now allow for the other candidates
        content = {"schema_version": SCHEMA_VERSION, "reports": comparison.contents}
        write_whole(Path(output) / "comparison.json", to_json(content))
        write_whole(Path(output) / "report.html", comparison.to_html().encode())
    return comparison


def _same_tokens(
    candidate: Checkpoint, base: TextModel, wanted: ReportSettings, evaluations: Sequence[Evaluation]
) -> None:
    """Refuse a candidate whose own tokenizer, when it has one, cuts the text into other tokens than the base's."""
    own = text_model(candidate, base.vocabulary, base.max_positions)
    if own.tokenizer is None or base.tokenizer is None:
        return
    for settings, evaluation in zip(wanted.all_sets(), evaluations, strict=True):
        if evaluation.documents.kind == "ids":
            continue
        if evaluation_text(settings, own).windows.tokens_sha256 != evaluation.windows.tokens_sha256:
            raise SutureError(
                f"{candidate.source}: its tokenizer gives other tokens on {evaluation.documents.source} than the base's",
                "compare models with one tokenizer",
            )


def _manifest(checkpoint: Checkpoint) -> dict[str, Any]:
    """What suture wrote down when it made the checkpoint; empty when something else made it.

    Raises SutureError for one whose records the report could not be made of, before anything is scored.
    """
    path = checkpoint.path / MANIFEST
    if not path.is_file():
        return {}
    record = read_manifest(checkpoint.path)
    try:
        layers_section(record["modules"], record.get("receipts", []))
        rounded_weights(record["modules"])
        [one.get("calibration") for one in (*record["history"], record)]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise SutureError(
            f"{path}: damaged: its records of layers are not what a step writes ({error!r})",
            "restore the file, or take it away: the report then goes without what it tells",
        ) from None
    return record
