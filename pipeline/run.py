"""Run a recipe: plan, preflight, steps, verification, report, manifest, and one rename at the end."""

from __future__ import annotations

import hashlib
import html
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from .. import __version__
from ..calibrate.tokens import TokenBlocks
from ..checkpoint.errors import SutureError
from ..checkpoint.families import family_of
from ..checkpoint.layout import text_config
from ..checkpoint.manifest import (
    MANIFEST,
    SCHEMA,
    account_for,
    chain_accounts,
    file_hashes,
    read_manifest,
    sha256_file,
    to_json,
)
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.staging import Staging, open_staging, write_whole
from ..checkpoint.writer import ShardPlan, plan_shards
from ..quant.decode import DenseView, open_decoded
from ..quant.scheme import STORAGE
from ..report.card import KEPT, card, is_ours
from ..report.document import REPORT_FILES, Report, make_report, write_report
from ..report.windows import Windows
from .cache import CacheSize, measure_cache
from .costs import cost_of
from .plan import Plan, PlannedStep, make_plan, probe_ids, settled, tokens_after
from .progress import Progress, Silent
from .recipe import Recipe
from .scoring import score_set
from .step import Prepared, StepKind, StepResult, StepRun
from .steps import STEPS
from .task_runs import run_tasks
from .verify import check_reload, first_blocks, read_back, reload_and_compare, reload_here, reopen, shortened

README = "README.md"


@dataclass(frozen=True)
class Run:
    """A finished run."""

    output: Path
    plan: Plan
    report: Report | None
    manifest: dict[str, Any]
    seconds: dict[str, float]  # by part; never written into the output, which is the same at any speed

    def _repr_html_(self) -> str:
        """In a notebook: the report, or what was written where."""
        if self.report is not None:
            return self.report._repr_html_()
        return f"<p><code>{html.escape(str(self.output))}</code>: written and verified; the recipe has no report.</p>"

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
) -> Run:
    """Carry out a recipe. Raises SutureError, with nothing under the output's name, when any part of it fails."""
    progress = progress or Silent()
    clock = _Clock()
    plan = make_plan(recipe, device, overwrite, resume)
    clock.lap("plan")
    hashes = {path.name: sha256_file(path) for path in plan.checkpoint.weight_files}
    clock.lap("hashes")
    with open_staging(plan.output, fingerprint(plan, hashes), overwrite, resume) as staging:
        plan = _begin(plan, staging, progress)
        clock.lap("preflight")
        plan, results = _run_steps(plan, staging, progress)
        clock.lap("steps")
        progress.say("verify: reloading with stock transformers")
        verification = _verify(plan, staging, results[-1])
        clock.lap("verify")
        cache = _cache_sizes(plan)
        report = _report(plan, staging, results, cache, progress)
        clock.lap("report")
        check_gate(recipe.gate, report)
        _write_card(plan, staging, verification, report)
        manifest = _finish(plan, staging, results, hashes, verification, cache)
        staging.commit()
    return Run(plan.output, plan, report, manifest, clock.laps)


class _Clock:
    def __init__(self) -> None:
        import time

        self._now, self.laps = time.perf_counter, {}
        self._last = self._now()

    def lap(self, name: str) -> None:
        now = self._now()
        self.laps[name] = now - self._last
        self._last = now


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


def _run_steps(plan: Plan, staging: Staging, progress: Progress) -> tuple[Plan, list[StepResult]]:
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
        results.append(step.kind.run(replace(work, directory=directory), step.prepared, step.settings))
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
        if side.name not in _superseded() and side.name not in prepared.side_files:
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
        budget=plan.estimate.available_memory // 4,
        probe=probe_ids(plan, number - 1),
        verify_blocks=plan.verify_blocks,
        progress=progress,
        device=plan.device,
        rounded_later=any(step.kind.rounds for step in plan.steps[number:]),
    )


def _text_after(plan: Plan, n_steps: int) -> TokenBlocks | None:
    """Calibration text as the output of the first `n_steps` steps numbers its tokens."""
    if plan.calibration is None:
        return None
    blocks = plan.calibration.blocks
    return replace(blocks, ids=tokens_after(plan.steps[:n_steps], torch.from_numpy(blocks.ids)).numpy())


# -- after the steps ---------------------------------------------------------------------------------------------------


def _verify(plan: Plan, staging: Staging, result: StepResult) -> dict[str, Any]:
    written = reopen(staging.model)
    prepared = plan.steps[-1].prepared
    account_for(plan.checkpoint.tensors, written.tensors, _accounts(plan))
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
    record = reload_and_compare(directory, staging.work, probe, result.expected, allowed)
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


def _accounts(plan: Plan) -> Any:
    return chain_accounts([step.prepared.accounts for step in plan.steps])


def _side_files(plan: Plan) -> set[str]:
    """Names of the files that came along: the input's, without those that a step left out, and what steps added."""
    names = {path.name for path in plan.checkpoint.side_files if path.name not in _superseded()}
    for step in plan.steps:
        names -= set(step.prepared.side_files)
        names |= {name for name, content in step.prepared.side_files.items() if content is not None}
    return names


def _superseded() -> frozenset[str]:
    """Files of an earlier suture output that speak of that output."""
    return frozenset({MANIFEST, README, *REPORT_FILES})  # the card that is not suture's gets another name


def check_gate(gate: float | None, report: Report | None) -> None:
    """Raises SutureError when the perplexity ratio's point estimate is beyond what the recipe lets through."""
    if gate is None:
        return
    assert report is not None  # the recipe's own rule
    found = report.perplexity
    if not found.ratio <= gate:
        bounds = "" if found.low is None or found.high is None else f" [{found.low:.4f}, {found.high:.4f}]"
        raise SutureError(
            f"gate: the output's perplexity is {found.ratio:.4f}{bounds} times the base's, more than the {gate:g} that "
            "the gate lets through (the point estimate counts)",
            "nothing was put under the final name; change the steps, or give a wider gate with --resume to keep it",
        )


def _cache_sizes(plan: Plan) -> dict[str, CacheSize] | None:
    """The live KV cache before and after, when a step changed more of the config than its quantization."""
    before, after = plan.checkpoint.config, plan.steps[-1].prepared.config
    if all(edit["key"] == "quantization_config" for edit in _config_edits(before, after)):
        return None
    dtype = STORAGE.get(plan.checkpoint.dtypes[plan.skeleton.layout.embedding], torch.bfloat16)
    return {"before": measure_cache(before, dtype), "after": measure_cache(after, dtype)}


def _report(
    plan: Plan,
    staging: Staging,
    results: list[StepResult],
    cache: dict[str, CacheSize] | None,
    progress: Progress,
) -> Report | None:
    for name in REPORT_FILES:  # of the run that is resumed, whose report may have been another
        for stale in (staging.model / name, staging.model / f"{name}.tmp"):
            stale.unlink(missing_ok=True)
    wanted = plan.recipe.report
    if wanted is None:
        return None
    written = reopen(staging.model)
    base, candidate = (open_decoded(checkpoint, plan.device) for checkpoint in (plan.checkpoint, written))
    budget = plan.estimate.available_memory // 3
    sets = [
        score_set(
            evaluation,
            base,
            candidate,
            progress.track,
            fidelity=wanted.fidelity,
            level=wanted.level,
            budget=budget,
            staging=staging,
            renumbered=_renumbered(plan, evaluation.windows),
        )
        for evaluation in plan.evaluations
    ]
    tasks = run_tasks(plan.tasks, base, candidate, progress.track, level=wanted.level, budget=budget, staging=staging)
    report = make_report(
        base=plan.checkpoint,
        candidate=written,
        sets=sets,
        name=" → ".join(step.name for step in plan.steps),  # not the output's place, on which nothing may depend
        level=wanted.level,
        margin=wanted.margin,
        tasks=tasks,
        cost=cost_of(plan.checkpoint, written, wanted.gpus),
        warnings=plan.warnings,
        calibration=plan.calibration.describe() if plan.calibration else None,
        modules={name: record for result in results for name, record in result.modules.items()},
        steps=[(step.name, step.settings.model_dump()) for step in plan.steps],
        parameters=sum(math.prod(shape) for shape in plan.skeleton.source.shapes.values()),
        kv_cache=_plain_sizes(cache),
    )
    write_report(report, staging.model)
    return report


def _renumbered(plan: Plan, windows: Windows) -> Windows | None:
    """The same windows in the output's token ids; None when it numbers tokens as its input does."""
    if all(step.prepared.token_map is None for step in plan.steps):
        return None
    return replace(windows, ids=tuple(tokens_after(plan.steps, torch.from_numpy(ids)).numpy() for ids in windows.ids))


def _write_card(plan: Plan, staging: Staging, verification: dict[str, Any], report: Report | None) -> None:
    """README.md; the input's own, unless suture wrote it, is kept beside it."""
    input_card = plan.checkpoint.path / README
    earlier = input_card.read_text(encoding="utf-8", errors="replace") if input_card.is_file() else None
    foreign = earlier is not None and not is_ours(earlier)
    if foreign:
        write_whole(staging.model / _kept_readme(plan), input_card.read_bytes())
    text = card(
        source=plan.checkpoint.source,
        on_hub=plan.checkpoint.revision is not None,
        config=plan.steps[-1].prepared.config,
        steps=[(step.name, step.settings.model_dump()) for step in plan.steps],
        relation="quantized" if any(step.kind.rounds for step in plan.steps) else "finetune",
        content=report.content if report is not None else None,
        earlier=earlier,
        verification=verification,
        kept=_kept_readme(plan) if foreign else KEPT if (staging.model / KEPT).is_file() else None,
    )
    write_whole(staging.model / README, text.encode())


def _kept_readme(plan: Plan) -> str:
    """A name for the input's README.md that no side file of the input has."""
    taken, number = {path.name for path in plan.checkpoint.side_files}, 2
    name = KEPT
    while name in taken:
        name, number = f"README.base-{number}.md", number + 1
    return name


def _finish(
    plan: Plan,
    staging: Staging,
    results: list[StepResult],
    hashes: dict[str, str],
    verification: dict[str, Any],
    cache: dict[str, CacheSize] | None,
) -> dict[str, Any]:
    modules = {name: record for result in results for name, record in result.modules.items()}
    accounts = _accounts(plan)
    origin = {output: name for name, account in accounts.items() for output in account.outputs}
    manifest = {
        "suture": __version__,
        "schema": SCHEMA,
        "recipe": _recipe_record(plan),
        "source": {"model": plan.checkpoint.source, "revision": plan.checkpoint.revision, "weights_sha256": hashes},
        "history": _history(plan.checkpoint),
        "calibration": plan.calibration.describe() if plan.calibration else None,
        "inputs": {name: asdict(account) for name, account in sorted(accounts.items())},
        "outputs": {
            spec.name: {"dtype": spec.dtype, "shape": list(spec.shape), "from": origin[spec.name]}
            for spec in plan.steps[-1].prepared.specs
        },
        "config_edits": _config_edits(plan.checkpoint.config, plan.steps[-1].prepared.config),
        "side_files": sorted(_side_files(plan)),
        "side_file_edits": _side_file_edits(plan),
        "kv_cache": _plain_sizes(cache),
        "receipts": [_receipt(step, result) for step, result in zip(plan.steps, results, strict=True)],
        "modules": modules,
        "skipped_layers": dict(plan.steps[-1].prepared.skipped) if modules else {},
        "fallbacks": {name: record["fallback"] for name, record in modules.items() if record.get("fallback")}
        | {name: reason for result in results for name, reason in result.receipt.get("fallbacks", {}).items()},
        "expert_tokens": _expert_tokens(plan, modules),
        "notes": list(plan.warnings),
        "verification": verification,
        "files": file_hashes(staging.model),
    }
    write_whole(staging.model / MANIFEST, to_json(manifest))
    return manifest


def _receipt(step: PlannedStep, result: StepResult) -> dict[str, Any]:
    """What was proved or measured of a step, and where its output runs as what it is."""
    matrix = step.prepared.portability
    return {"step": step.name, **result.receipt, **({"portability": list(matrix)} if matrix else {})}


def _plain_sizes(cache: dict[str, CacheSize] | None) -> dict[str, Any] | None:
    return None if cache is None else {when: asdict(size) for when, size in cache.items()}


def _recipe_record(plan: Plan) -> dict[str, Any]:
    content = plan.recipe.model_dump(exclude={"output", "steps"})
    content["model"] = plan.checkpoint.source
    return content | {"steps": [{step.name: step.settings.model_dump()} for step in plan.steps]}


def _history(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Steps that made the input, when suture made it."""
    if not (checkpoint.path / MANIFEST).is_file():
        return []
    earlier = read_manifest(checkpoint.path)
    return [*earlier.get("history", []), {"suture": earlier["suture"], "recipe": earlier["recipe"]}]


def _config_edits(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "from": before.get(key), "to": after.get(key)}
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def _side_file_edits(plan: Plan) -> dict[str, str]:
    """File -> which step rewrote it, or left it out; later steps count."""
    return {
        name: f"{'rewritten' if content is not None else 'left out'} by {step.name}"
        for step in plan.steps
        for name, content in sorted(step.prepared.side_files.items())
    }


def _expert_tokens(plan: Plan, modules: dict[str, Any]) -> dict[str, Any]:
    """Calibration tokens that reached each expert, by block."""
    table: dict[str, dict[str, int]] = {}
    for linear in plan.skeleton.layout.linears:
        record = modules.get(linear.name)
        if linear.expert is not None and record is not None and record.get("tokens") is not None:
            table.setdefault(f"block {linear.block}", {})[str(linear.expert)] = record["tokens"]
    return table
