"""Run a recipe: plan, preflight, steps, verification, report, manifest, and one rename at the end."""

from __future__ import annotations

import hashlib
import html
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from .. import __version__
from ..calibrate.crew import ALONE, Crew
from ..calibrate.memory import release_memory
from ..calibrate.tokens import TokenBlocks
from ..checkpoint.families import family_of
from ..checkpoint.layout import text_config
from ..checkpoint.manifest import (
    MANIFEST,
    account_for,
    read_manifest,
    sha256_file,
    to_json,
)
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.staging import Staging, clean_committed, open_staging, write_whole
from ..checkpoint.writer import ShardPlan, plan_shards
from ..quant.decode import DenseView
from ..report.document import Report
from .estimate import hidden_budget
from .plan import Plan, make_plan, probe_ids, settled, tokens_after
from .process import imports_done
from .progress import LOG, Logged, Progress, Silent, default_progress
from .recipe import Recipe
from .run_manifest import accounts_of, superseded, write_manifest
from .run_report import cache_sizes, check_gate, report_of, write_card
from .step import PlannedStep, Prepared, StepKind, StepResult, StepRun
from .steps import STEPS
from .usage import forget_peak, peak_memory
from .verify import FreshLoader, check_reload, check_room, first_blocks, read_back, reload_here, reopen, shortened


@dataclass(frozen=True)
class Run:
    """A finished run."""

    output: Path
    plan: Plan
    report: Report | None
    manifest: dict[str, Any]
    seconds: dict[str, float]  # by part; never written into the output, which is the same at any speed
    memory: dict[str, int]  # bytes at most, by part; "reload": the process that loads the output
    disk: int  # bytes at most

    def _repr_html_(self) -> str:
        """In a notebook: the report, or what was written where."""
        if self.report is not None:
            return self.report._repr_html_()
        return f"<p><code>{html.escape(str(self.output))}</code>: written and verified; the recipe has no report.</p>"

    @property
    def predicted(self) -> dict[str, Any]:
        """What the plan said of memory by part and disk (bytes), and of the steps' seconds."""
        estimate = self.plan.estimate
        return {"memory": dict(estimate.memory), "disk": estimate.disk, "seconds": round(estimate.seconds, 1)}

    @property
    def fallbacks(self) -> dict[str, str]:
        """Layers that are not what was asked for, and why."""
        return dict(self.manifest["fallbacks"])


def run(
    recipe: Recipe,
    *,
    device: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    crew: Crew = ALONE,
) -> Run:
    """Carry out a recipe. Raises SutureError, with nothing under the output's name, when any part of it fails.

    `crew`: the processes that work together, of which this one is the first.
    """
    progress = progress or default_progress()
    clock = _Clock()
    with FreshLoader() as loader:
        clean_committed(Path(recipe.output))
        plan = make_plan(recipe, device, overwrite, resume)
        imports_done()
        clock.lap("plan")
        hashes = {path.name: sha256_file(path) for path in plan.checkpoint.weight_files}
        clock.lap("hashes")
        with (
            open_staging(plan.output, fingerprint(plan, hashes), overwrite, resume) as staging,
            Logged(progress, staging.work / LOG) as progress,
        ):
            progress.say(f"log: {staging.work / LOG}; suture watch {plan.output} follows it")
            plan = _begin(plan, staging, progress)
            clock.lap("preflight")
            plan, results = _run_steps(plan, staging, progress, crew)
            clock.lap("steps")
            progress.say("verify: reloading with stock transformers")
            verification = _verify(plan, staging, results[-1], loader)
            clock.lap("verify")
            cache = cache_sizes(plan)
            report = report_of(plan, staging, results, cache, progress, crew)
            clock.lap("report")
            disk = staging.measured()
            check_gate(recipe.gate, report)
            write_card(plan, staging, verification, report)
            manifest = write_manifest(plan, staging, results, hashes, verification, cache)
            staging.commit()
    memory = clock.memory | ({"reload": loader.peak_memory} if loader.peak_memory else {})
    return Run(plan.output, plan, report, manifest, clock.laps, memory, disk)


class _Clock:
    """Seconds and peak memory of each part of a run."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.memory: dict[str, int] = {}
        self._begin()

    def _begin(self) -> None:
        forget_peak()
        self._held = peak_memory()
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        self.laps[name], self.memory[name] = time.perf_counter() - self._last, peak_memory()
        release_memory(self.memory[name] - self._held)  # what one part leaves must not stand beside the next one
        self._begin()


def fingerprint(plan: Plan, weights: dict[str, str]) -> dict[str, str]:
    """What must be equal for a run to be resumed. The output's place, the report and progress are not part of it."""
    content = plan.recipe.model_dump(exclude={"output", "steps", "report", "gate"})
    content["steps"] = [{step.name: step.settings.model_dump()} for step in plan.steps]
    return {
        "suture": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "recipe": _digest(content),
        "model": _digest([sorted(weights.items()), plan.checkpoint.config]),
        "trimmed vocabulary": _digest([step.prepared.token_map for step in plan.steps if step.prepared.token_map]),
        "calibration text": plan.calibration.blocks.sha256 if plan.calibration else "none",
        "device": plan.device.type,
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# -- preflight ---------------------------------------------------------------------------------------------------------


def _begin(plan: Plan, staging: Staging, progress: Progress) -> Plan:
    """Preflight, unless the run that is resumed has passed it. The plan, with what that run had decided."""
    begun = staging.find(unit="begun")
    if begun is None:
        progress.say(f"preflight: block 0 of {plan.checkpoint.source} through rounding, writing and reloading")
        try:
            preflight(plan, staging.work / "preflight")
        except BaseException:
            staging.discard()
            raise
        begun = {"unit": "begun", "verify_blocks": plan.verify_blocks}
        staging.record(begun)
    return replace(plan, verify_blocks=begun["verify_blocks"])


def preflight(plan: Plan, scratch: Path) -> None:
    """Take the first block through all steps, data-free: rounding, packing, writing and a reload, before the hours."""
    shutil.rmtree(scratch, ignore_errors=True)
    original = source = _one_block(plan)
    probe, expected = probe_ids(plan)[:1, :16], torch.empty(0)
    with open_staging(scratch / "out", {"preflight": "1"}, False, False) as staging:
        for number, step in enumerate(plan.steps, start=1):
            kind, settings = _data_free(step)
            prepared = kind.prepare(source, settings)
            directory = staging.model if number == len(plan.steps) else staging.work / f"after-step-{number}"
            shards = plan_shards(prepared.specs)
            work = _step_run(plan, staging, f"step-{number}", number, source, original, shards, Silent())
            work = replace(work, directory=directory, text=None, probe=probe, verify_blocks=1)
            expected = kind.run(work, prepared, settings).expected
            _write_beside(directory, source, prepared)
            probe = prepared.probe_after(probe)
            if directory != staging.model:
                source = open_checkpoint(directory)
        not_stock = plan.steps[-1].prepared.not_stock
        if not_stock:
            read_back(staging.model, probe, expected, 1, not_stock)
        else:
            check_reload(reload_here(staging.model, probe), probe, expected, plan.skeleton.layout.unknown)
    shutil.rmtree(scratch)


def _data_free(step: PlannedStep) -> tuple[StepKind, BaseModel]:
    """The step as the preflight runs it."""
    if step.kind.rehearsal is None:
        return step.kind, step.settings
    name, settings = step.kind.rehearsal(step.prepared, step.settings)
    return STEPS[name], settings


def _one_block(plan: Plan) -> Checkpoint:
    layout = plan.skeleton.layout
    later = _tensors_from(plan, 1)
    dropped = later | set(layout.stale)
    kept = {name: info for name, info in plan.checkpoint.tensors.items() if name not in dropped}
    return replace(plan.checkpoint, tensors=kept, config=shortened(plan.checkpoint.config, 1))


# -- steps -------------------------------------------------------------------------------------------------------------


def _run_steps(plan: Plan, staging: Staging, progress: Progress, crew: Crew) -> tuple[Plan, list[StepResult]]:
    """The plan, with what data decided, and each step's result."""
    results: list[StepResult] = []
    source = plan.checkpoint
    for number in range(1, len(plan.steps) + 1):
        last = number == len(plan.steps)
        directory = staging.model if last else staging.work / f"after-step-{number}"
        key = f"step-{number}"
        plan = _settle(plan, number, source, staging, progress)
        step = plan.steps[number - 1]
        done = None if last else staging.find(step=key, unit="done")
        if done is not None:
            source = open_checkpoint(directory)
            results.append(StepResult(done["modules"], torch.empty(0), done["receipt"]))
            continue
        work = _step_run(plan, staging, key, number, source, plan.checkpoint, step.shards, progress)
        work = replace(work, directory=directory, crew=crew)
        results.append(step.kind.run(work, step.prepared, step.settings))
        _write_beside(directory, source, step.prepared)
        if not last:
            result = results[-1]
            staging.record({"step": key, "unit": "done", "modules": result.modules, "receipt": result.receipt})
            source = open_checkpoint(directory)
    return plan, results


def _settle(plan: Plan, number: int, source: Checkpoint, staging: Staging, progress: Progress) -> Plan:
    """The plan after step `number`, if its kind asks for that, has decided from data what prepare could not know."""
    step, key = plan.steps[number - 1], f"step-{number}"
    if step.kind.settle is None:
        return plan
    entry = staging.find(step=key, unit="settled")
    if entry is None:
        work = _step_run(plan, staging, key, number, source, plan.checkpoint, step.shards, progress)
        chosen = step.kind.settle(work, step.prepared, step.settings)
        entry = {"step": key, "unit": "settled", "settings": chosen.model_dump() if chosen is not None else None}
        staging.record(entry)
    if entry["settings"] is None:
        return plan
    return settled(plan, number, source, step.kind.settings.model_validate(entry["settings"]))


def _write_beside(directory: Path, source: Checkpoint, prepared: Prepared) -> None:
    """config.json, and the files that travel with the weights, as the step leaves them."""
    write_whole(directory / "config.json", to_json(prepared.config))
    for side in source.side_files:
        if side.name not in superseded() and side.name not in prepared.side_files:
            write_whole(directory / side.name, side.read_bytes())
    for name, content in prepared.side_files.items():
        if content is not None:
            write_whole(directory / name, content if isinstance(content, bytes) else content.read_bytes())


def _step_run(
    plan: Plan,
    staging: Staging,
    key: str,
    number: int,
    source: Checkpoint,
    original: Checkpoint,
    shards: ShardPlan,
    progress: Progress,
) -> StepRun:
    name, of = plan.steps[number - 1].name, len(plan.steps)
    return StepRun(
        key=key,
        label=f"{name} ({number}/{of})" if of > 1 else name,
        checkpoint=source,
        original=original,
        directory=staging.model,
        shards=shards,
        staging=staging,
        text=_text_after(plan, number - 1),
        batch=plan.batch,
        paused=plan.estimate.paused,
        budget=hidden_budget(plan.estimate.available_memory),
        probe=probe_ids(plan, number - 1),
        verify_blocks=plan.verify_blocks,
        progress=progress,
        device=plan.device,
        rounded_by=next(((step.name, step.settings) for step in plan.steps[number:] if step.kind.rounds), None),
        unpacked="dequantize" in [*_steps_before(original), *(step.name for step in plan.steps[: number - 1])],
    )


def _steps_before(original: Checkpoint) -> list[str]:
    """Names of the steps that made the recipe's model, when suture did."""
    if not (original.path / MANIFEST).is_file():
        return []
    manifest = read_manifest(original.path)
    recipes = [*(entry.get("recipe") or {} for entry in manifest["history"]), manifest["recipe"]]
    return [name for recipe in recipes for step in recipe.get("steps") or [] for name in step]


def _text_after(plan: Plan, n_steps: int) -> TokenBlocks | None:
    """Calibration text as the output of the first `n_steps` steps numbers its tokens."""
    if plan.calibration is None:
        return None
    blocks = plan.calibration.blocks
    return replace(blocks, ids=tokens_after(plan.steps[:n_steps], torch.from_numpy(blocks.ids)).numpy())


# -- after the steps ---------------------------------------------------------------------------------------------------


def _verify(plan: Plan, staging: Staging, result: StepResult, loader: FreshLoader) -> dict[str, Any]:
    written = reopen(staging.model)
    prepared = plan.steps[-1].prepared
    account_for(plan.checkpoint.tensors, written.tensors, accounts_of(plan))
    n = min(plan.verify_blocks, prepared.n_blocks)
    later = tuple(_later_blocks(prepared, n))
    directory = staging.model
    if n < prepared.n_blocks:
        first = frozenset(name for name in written.tensors if not name.startswith(later))
        directory = first_blocks(written, n, first, staging.work / "first-blocks")
    allowed = (*plan.skeleton.layout.unknown, *later)
    probe = probe_ids(plan, len(plan.steps))
    if prepared.not_stock:
        record = read_back(directory, probe, result.expected, n, prepared.not_stock)
        return {"blocks": n, "of_blocks": prepared.n_blocks, **record}
    check_room(staging.work, probe, result.expected)
    record = check_reload(loader.load(directory, staging.work, probe), probe, result.expected, allowed)
    return {"blocks": n, "of_blocks": prepared.n_blocks, **record}


def _later_blocks(prepared: Prepared, n: int) -> Iterator[str]:
    """How the names of the output's tensors of blocks from `n` on begin, on disk and (a loader speaks of those) in the
    module; files hold them beside earlier ones."""
    family = family_of(str(text_config(prepared.config)["model_type"]))
    for index in range(n, prepared.n_blocks):
        for stem in {family.stem, *family.disk_stems}:
            yield f"{stem}{family.blocks}.{index}."


def _tensors_from(plan: Plan, first: int) -> set[str]:
    """The input's tensors of blocks from `first` on; of packed weights, all that they consist of."""
    layout, source = plan.skeleton.layout, plan.skeleton.source
    names = {p.tensor for i in range(first, len(layout.blocks)) for p in layout.block_tensors(i).values()}
    return {part for name in names for part in (source.parts(name) if isinstance(source, DenseView) else (name,))}
