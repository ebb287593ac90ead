"""What a recipe will do, found out before any of it is done: refusals, shapes, sizes, memory, time.

Everything that can be known from names, shapes, text and the machine is checked here; `preflight` then takes the first
block through rounding, packing, writing and reloading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from ..calibrate.skeleton import Skeleton, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.source import TensorSource
from ..checkpoint.staging import check_output
from ..checkpoint.writer import plan_shards
from ..lora.settings import MergeSettings
from ..quant.decode import dense_view
from .estimate import Estimate, estimated
from .generation_runs import GenerationPlan, plan_generation, refuse_models_beyond_memory
from .leaks import leakage, refuse_training_on
from .recipe import Recipe
from .step import PlannedStep, planned_output
from .steps import STEPS
from .task_runs import TaskPlan, plan_tasks
from .texts import (
    Calibration,
    Evaluation,
    TextModel,
    calibration_text,
    evaluation_text,
    text_model,
)

_BATCH_TOKENS = 1024  # per forward: their activations stay near the processor, and products are no slower


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    checkpoint: Checkpoint
    skeleton: Skeleton  # of the input, for shapes
    steps: tuple[PlannedStep, ...]
    text: TextModel
    calibration: Calibration | None
    evaluations: tuple[Evaluation, ...]  # the main one first
    tasks: tuple[TaskPlan, ...]
    generation: tuple[GenerationPlan, ...]
    device: torch.device
    batch: int
    estimate: Estimate
    warnings: tuple[str, ...]
    verify_blocks: int  # blocks that verification reloads

    @property
    def evaluation(self) -> Evaluation | None:
        return self.evaluations[0] if self.evaluations else None

    @property
    def output(self) -> Path:
        return Path(self.recipe.output)


def make_plan(
    recipe: Recipe, device: str = "auto", overwrite: bool = False, resume: bool = False, must_be_free: bool = True
) -> Plan:
    """Raises SutureError for everything that can be refused now. Reads no weights, writes nothing."""
    resolved = recipe.resolved_steps()
    _check_order([name for name, _ in resolved])
    for (name, settings), following in zip(resolved, [*resolved[1:], None], strict=True):
        check = STEPS[name].check_next
        if check is not None:
            check(settings, following)
    needy = [name for name, settings in resolved if STEPS[name].needs_text(settings)]
    if needy and recipe.calibration is None:
        raise SutureError(f"calibration: missing, but {needy[0]} needs text", "add calibration: {data: builtin:novels}")
    checkpoint = open_checkpoint(recipe.model, download=recipe.download, revision=recipe.revision)
    if must_be_free:
        check_output(Path(recipe.output), checkpoint.path, overwrite, resume)
    if checkpoint.quantization is not None and not STEPS[resolved[0][0]].reads_quantized:
        method = checkpoint.quantization.get("quant_method")
        raise SutureError(
            f"{recipe.model}: already quantized ({method})",
            "give the unquantized checkpoint, or let the step dequantize come first",
        )
    _refuse_rounding_twice(checkpoint, resolved)
    if recipe.report is not None:
        dense_view(checkpoint)  # that it can be scored
    skeleton = open_skeleton(dense_view(checkpoint, weights_alone=True))
    steps = plan_steps(
        recipe, checkpoint, resolved
    )  # before the text is read: what names and shapes refuse comes first
    max_positions = getattr(skeleton.hf_config, "max_position_embeddings", None)
    text = text_model(checkpoint, skeleton.source.shapes[skeleton.layout.embedding][0], max_positions)
    calibration = None
    if recipe.calibration and needy:
        answers = any(step.kind.on_answers(step.settings) for step in steps)
        calibration = calibration_text(recipe.calibration, text, answers)
    if calibration and any(step.kind.decide for step in steps):
        steps = plan_steps(recipe, checkpoint, resolved, calibration)
    evaluations = tuple(evaluation_text(one, text) for one in recipe.report.all_sets()) if recipe.report else ()
    for step in steps:
        if step.kind.check_text is not None and calibration is not None:
            step.kind.check_text(step.settings, calibration.blocks)
            refuse_training_on(evaluations, calibration, step.name)
    _refuse_bases(recipe, steps)
    _refuse_dropped_tokens(steps, calibration, evaluations)
    if recipe.report and (recipe.report.tasks or recipe.report.generation):
        _refuse_tasks_of_other_tokens(steps, skeleton)
    if recipe.report and recipe.report.generation:
        _refuse_answers_of_what_stock_does_not_load(steps)
        refuse_models_beyond_memory([skeleton])
    chosen = choose_device(device)
    batch = max(1, _BATCH_TOKENS // calibration.blocks.ids.shape[1]) if calibration else 1
    estimate = estimated(recipe, skeleton, steps, calibration, evaluations, batch)
    warnings = [*checkpoint.notes, *(note for step in steps for note in step.prepared.notes)]
    tasks = plan_tasks(recipe.report.tasks, text) if recipe.report else ()
    generation = plan_generation(recipe.report.generation, text) if recipe.report else ()
    warnings += _warnings(recipe, skeleton, steps, calibration, needy, estimate)
    warnings += [note for scored in (*evaluations, *tasks, *generation) for note in scored.warnings]
    warnings += leakage(calibration, evaluations, [*tasks, *generation])
    return Plan(
        recipe=recipe,
        checkpoint=checkpoint,
        skeleton=skeleton,
        steps=steps,
        text=text,
        calibration=calibration,
        evaluations=evaluations,
        tasks=tasks,
        generation=generation,
        device=chosen,
        batch=batch,
        estimate=estimate,
        warnings=tuple(dict.fromkeys(warnings)),
        verify_blocks=estimate.verify_blocks,
    )


def choose_device(name: str) -> torch.device:
    """auto: CUDA when it is there. Raises SutureError when CUDA is asked for and is not."""
    if name not in ("auto", "cpu", "cuda"):
        raise SutureError(f"--device {name}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise SutureError("--device cuda: torch sees no CUDA device", "use --device auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _refuse_bases(recipe: Recipe, steps: Sequence[PlannedStep]) -> None:
    for number, step in enumerate(steps):
        if not (isinstance(step.settings, MergeSettings) and step.settings.compare_bases):
            continue
        if recipe.report is None:
            raise SutureError("lora.merge: compare_bases needs a text to score", "add report: {data: ...}")
        if number:
            raise SutureError(
                f"lora.merge: compare_bases is about merging into the recipe's own model, but {steps[0].name} comes before",
                "put lora.merge first, or leave compare_bases out",
            )


def _check_order(names: list[str]) -> None:
    for i, name in enumerate(names[:-1]):
        if STEPS[name].rounds and not STEPS[names[i + 1]].reads_quantized:
            raise SutureError(
                f"steps[{i + 1}].{names[i + 1]}: comes after {name}, whose output is quantized",
                f"put {name} last: what follows would need full precision",
            )


def _refuse_rounding_twice(checkpoint: Checkpoint, steps: Sequence[tuple[str, BaseModel]]) -> None:
    """`dequantize` gives what an adapter on the quantized model saw; NF4 would round that once more, unless it was NF4."""
    entry = checkpoint.quantization or {}
    if entry.get("bnb_4bit_quant_type") == "nf4":
        return
    names = [name for name, _ in steps]
    for number, (name, settings) in enumerate(steps):
        if name == "lora.merge" and "dequantize" in names[:number] and getattr(settings, "base", "") == "dequantized":
            raise SutureError(
                "lora.merge: base: dequantized after dequantize: the weights are what the adapter saw already, and would go "
                "through NF4 as well",
                "use base: original",
            )


def plan_steps(
    recipe: Recipe,
    checkpoint: Checkpoint,
    resolved: Sequence[tuple[str, BaseModel]],
    calibration: Calibration | None = None,
) -> tuple[PlannedStep, ...]:
    """Each step's plan, made from the planned output of the one before it."""
    source: TensorSource = checkpoint
    steps: list[PlannedStep] = []
    for name, settings in resolved:
        kind = STEPS[name]
        if kind.decide is not None and calibration is not None:
            settings = kind.decide(source, settings, calibration.blocks.ids.size)
        prepared = kind.prepare(source, settings)
        shards = plan_shards(prepared.specs, prepared.shard_bytes or recipe.max_shard_size)
        steps.append(PlannedStep(name, settings, kind, prepared, shards))
        source = planned_output(f"{checkpoint.source} after {name}", prepared, source)
    return tuple(steps)


def settled(plan: Plan, number: int, checkpoint: Checkpoint, settings: BaseModel) -> Plan:
    """The plan once step `number` (from 1), which reads `checkpoint`, has `settings` that data decided."""
    rest = [(step.name, step.settings) for step in plan.steps[number:]]
    steps = plan_steps(plan.recipe, checkpoint, [(plan.steps[number - 1].name, settings), *rest], plan.calibration)
    return replace(plan, steps=(*plan.steps[: number - 1], *steps))


def _refuse_dropped_tokens(
    steps: Sequence[PlannedStep], calibration: Calibration | None, evaluations: Sequence[Evaluation]
) -> None:
    """Text that a step or the report needs must keep all its tokens through the steps before."""
    readers = [(f"steps[{i}].{step.name}", i) for i, step in enumerate(steps) if step.kind.needs_text(step.settings)]
    texts = [("calibration", [calibration.blocks.ids], *readers[-1])] if calibration and readers else []
    scored = [ids for evaluation in evaluations for ids in evaluation.windows.ids]
    texts += [("report", scored, "the report", len(steps))] if scored else []
    for key, parts, reader, n_steps in texts:
        seen = np.unique(np.concatenate([part.reshape(-1) for part in parts]))
        lost = int((tokens_after(steps[:n_steps], torch.from_numpy(seen)) < 0).sum())
        if lost:
            raise SutureError(
                f"{key}: {reader} needs this text, and {lost} of its {len(seen)} distinct tokens are dropped before",
                f"add {key}'s data to what the vocabulary is trimmed to",
            )


def _refuse_tasks_of_other_tokens(steps: Sequence[PlannedStep], skeleton: Skeleton) -> None:
    """Tasks compare the models' predictions, for which they must have one vocabulary."""
    name = skeleton.layout.embedding
    rows = {spec.name: spec.shape[0] for spec in steps[-1].prepared.specs if spec.name == name}
    if any(step.prepared.token_map is not None for step in steps) or rows.get(name) not in (
        None,
        skeleton.source.shapes[name][0],
    ):
        raise SutureError(
            "report: the recipe changes the vocabulary, and tasks need the same one before and after",
            "remove tasks and generation from the recipe",
        )


def _refuse_answers_of_what_stock_does_not_load(steps: Sequence[PlannedStep]) -> None:
    reason = steps[-1].prepared.not_stock
    if reason:
        raise SutureError(
            f"report.generation: answers come from stock transformers, which is not asked to load the output: {reason}",
            "remove generation from the recipe, or compare with `suture report` where it loads",
        )


def tokens_after(steps: Sequence[PlannedStep], ids: torch.Tensor) -> torch.Tensor:
    """Token ids of the input as the output of the last of `steps` numbers them; -1 for dropped ones."""
    for step in steps:
        kept = ids >= 0
        ids = torch.where(kept, step.prepared.tokens_after(ids.clamp_min(0)), ids)
    return ids


def _warnings(
    recipe: Recipe,
    skeleton: Skeleton,
    steps: tuple[PlannedStep, ...],
    calibration: Calibration | None,
    needy: list[str],
    estimate: Estimate,
) -> list[str]:
    warnings: list[str] = []
    if recipe.calibration is not None and not needy:
        warnings.append("calibration: no step of this recipe uses it")
    if calibration is not None:
        warnings += calibration.blocks.notes
        training = [step.name for step in steps if step.kind.check_text is not None]
        if training and calibration.blocks.n_joined:
            warnings.append(
                f"{training[0]}: trains on {calibration.blocks.n_joined} sequences in which pieces of several documents see "
                "each other; calibration: packing: isolated keeps them apart"
            )
        widest = max(linear.in_features for linear in skeleton.layout.linears)
        tokens = calibration.blocks.ids.size
        if tokens < widest:
            warnings.append(f"{tokens} calibration tokens cannot determine layers of {widest} inputs; give more text")
    if estimate.peak_memory > estimate.available_memory:
        warnings.append(
            f"the run may need {estimate.peak_memory / 1e9:.1f} GB of memory; {estimate.available_memory / 1e9:.1f} are free"
        )
    return warnings


def probe_ids(plan: Plan, n_steps: int = 0) -> torch.Tensor:
    """Token ids [B, T] whose logits verification compares: calibration text, else ids spread over the vocabulary.

    As the output of the first `n_steps` steps numbers them; one that is dropped becomes one that is not.
    Never the report's text: a resumed run may have another report, and must find the same probe.
    """
    length = min(128, plan.text.max_positions or 128)
    if plan.calibration is not None:
        ids = torch.from_numpy(plan.calibration.blocks.ids[:1, :length].copy())
    else:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, plan.text.vocabulary, (1, length), generator=generator)
    for step in plan.steps[:n_steps]:
        ids = step.prepared.probe_after(ids)
    return ids


def describe(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, for printing and `--json`."""
    estimate = plan.estimate
    return {
        "model": plan.checkpoint.source,
        "family": plan.skeleton.family.model_type,
        "blocks": plan.skeleton.n_blocks,
        "steps": [
            {
                "step": step.name,
                "settings": step.settings.model_dump(),
                "changed": sum(a.action == "changed" for a in step.prepared.accounts.values()),
                "copied": sum(a.action == "copied" for a in step.prepared.accounts.values()),
                "dropped": sum(a.action == "dropped" for a in step.prepared.accounts.values()),
                "bytes": step.shards.nbytes,
                "portability": list(step.prepared.portability),
            }
            for step in plan.steps
        ],
        "calibration": plan.calibration.describe() if plan.calibration else None,
        "evaluation": plan.evaluation.describe() if plan.evaluation else None,
        "bytes_in": plan.checkpoint.nbytes,
        "bytes_out": plan.steps[-1].shards.nbytes,
        "peak_memory": estimate.peak_memory,
        "memory": estimate.memory,
        "disk": estimate.disk,
        "seconds": round(estimate.seconds, 1),
        "device": str(plan.device),
        "warnings": list(plan.warnings),
        "output": plan.recipe.output,
    }
