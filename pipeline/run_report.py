"""What a run says of its output: scores, live cache, gate, model card."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..calibrate.crew import ALONE, Crew
from ..checkpoint.errors import SutureError
from ..checkpoint.staging import Staging, write_whole
from ..quant.scheme import STORAGE
from ..report.card import KEPT, card, is_ours
from ..report.document import REPORT_FILES, SAMPLES, Report, make_report, write_report
from ..report.windows import Windows
from .cache import CacheSize, measure_cache
from .costs import cost_of
from .generation_runs import run_generation
from .plan import Plan, tokens_after
from .progress import Progress
from .qlora_bases import compare_bases
from .run_manifest import README, config_edits, plain_sizes
from .scoring import Scorer, score_set
from .step import StepResult
from .task_runs import run_tasks
from .verify import reopen


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


def cache_sizes(plan: Plan) -> dict[str, CacheSize] | None:
    """The live KV cache before and after, when a step changed more of the config than its quantization."""
    before, after = plan.checkpoint.config, plan.steps[-1].prepared.config
    if all(edit["key"] == "quantization_config" for edit in config_edits(before, after)):
        return None
    dtype = STORAGE.get(plan.checkpoint.dtypes[plan.skeleton.layout.embedding], torch.bfloat16)
    return {"before": measure_cache(before, dtype), "after": measure_cache(after, dtype)}


def report_of(
    plan: Plan,
    staging: Staging,
    results: list[StepResult],
    cache: dict[str, CacheSize] | None,
    progress: Progress,
    crew: Crew = ALONE,
) -> Report | None:
    for name in (*REPORT_FILES, SAMPLES):  # of the run that is resumed, whose report may have been another
        for stale in (staging.model / name, staging.model / f"{name}.tmp"):
            stale.unlink(missing_ok=True)
    wanted = plan.recipe.report
    if wanted is None:
        return None
    written = reopen(staging.model)
    scorer = Scorer.of(plan.checkpoint, written, plan.device, progress.track, crew)
    budget = plan.estimate.available_memory // 3
    sets = [
        score_set(
            evaluation,
            scorer,
            fidelity=wanted.fidelity,
            level=wanted.level,
            budget=budget,
            staging=staging,
            renumbered=_renumbered(plan, evaluation.windows),
        )
        for evaluation in plan.evaluations
    ]
    tasks, records = run_tasks(plan.tasks, scorer, level=wanted.level, budget=budget, staging=staging)
    generation, samples = run_generation(
        plan.generation,
        plan.checkpoint.path,
        staging.model,
        plan.device,
        progress.track,
        level=wanted.level,
        staging=staging,
    )
    bases = compare_bases(plan, plan.checkpoint, plan.evaluations[0], progress.track, wanted.level, budget, staging)
    report = make_report(
        base=plan.checkpoint,
        candidate=written,
        sets=sets,
        name=" → ".join(step.name for step in plan.steps),  # not the output's place, on which nothing may depend
        level=wanted.level,
        margin=wanted.margin,
        tasks=tasks,
        generation=generation,
        samples=[*records, *samples],
        cost=cost_of(plan.checkpoint, written, wanted.gpus),
        warnings=plan.warnings,
        calibration=plan.calibration.describe() if plan.calibration else None,
        modules={name: record for result in results for name, record in result.modules.items()},
        receipts=[result.receipt for result in results],
        steps=[(step.name, step.settings.model_dump()) for step in plan.steps],
        parameters=sum(math.prod(shape) for shape in plan.skeleton.source.shapes.values()),
        kv_cache=plain_sizes(cache),
        qlora_bases=bases,
    )
    write_report(report, staging.model)
    return report


def _renumbered(plan: Plan, windows: Windows) -> Windows | None:
    """The same windows in the output's token ids; None when it numbers tokens as its input does."""
    if all(step.prepared.token_map is None for step in plan.steps):
        return None
    return replace(windows, ids=tuple(tokens_after(plan.steps, torch.from_numpy(ids)).numpy() for ids in windows.ids))


def write_card(plan: Plan, staging: Staging, verification: dict[str, Any], report: Report | None) -> None:
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
