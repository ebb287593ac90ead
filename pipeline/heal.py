"""The step `heal`: the model, by now changed, is trained towards the original, and kept only when that made it better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor

from ..calibrate.replay import Stream
from ..calibrate.skeleton import Skeleton, open_skeleton
from ..calibrate.tokens import TokenBlocks
from ..checkpoint.layout import Linear, ModelLayout
from ..checkpoint.manifest import to_json
from ..checkpoint.reader import open_checkpoint
from ..checkpoint.source import TensorSource
from ..checkpoint.staging import write_whole
from ..lora.settings import HealSettings
from .derive import changed_in_place
from .frame import frame_factor
from .heal_blocks import heal_blocks
from .heal_rounding import round_in_loop, rounded_layers
from .heal_whole import STATE_BYTES, Desk, costs_of, linears_of, merged_weight, notes_of, same_vocabulary, train_whole
from .judge import Split, Verdict, judge, restore_input, split, why_not
from .step import Prepared, StepResult, StepRun
from .walk import convert_blocks, copy_blocks, probe_logits


@dataclass(frozen=True)
class HealPlan(Prepared):
    layout: ModelLayout
    trained: tuple[tuple[str, ...], ...]  # block -> parameters (module names) that change
    linears: tuple[Linear, ...]  # lora: that get factors


def prepare(source: TensorSource, settings: HealSettings) -> HealPlan:
    """Plan the step from names and shapes. Raises SutureError when nothing can be trained."""
    skeleton = open_skeleton(source)
    layout = skeleton.layout
    linears = linears_of(layout, settings) if settings.method == "lora" else ()
    rounded_layers(skeleton, settings.rounding)
    trained = [_parameters(layout, index, settings, linears) for index in range(len(layout.blocks))]
    tensors = {layout.places[name].tensor for names in trained for name in names}
    how = f"trained towards the original: {settings.method}"
    specs, accounts = changed_in_place(
        source, layout, dict.fromkeys(sorted(tensors), how), verb="trained", hint="heal before the step that quantizes"
    )
    plan = HealPlan(
        specs=specs,
        config=source.config,
        accounts=accounts,
        notes=(),
        n_blocks=len(layout.blocks),
        layout=layout,
        trained=tuple(trained),
        linears=linears,
    )
    return _with_costs(plan, source, settings)


def _parameters(layout: ModelLayout, index: int, settings: HealSettings, linears: Sequence[Linear]) -> tuple[str, ...]:
    """Names, in the module, of what changes in a block."""
    names = tuple(layout.block_tensors(index))
    if settings.method == "lora":
        return tuple(f"{linear.module}.weight" for linear in linears if linear.block == index)
    if settings.method == "blocks" and settings.value("parts") == "attention":
        attention = f"{layout.block_prefix(index)}{layout.family.attention_out.rpartition('.')[0]}."
        return tuple(name for name in names if name.startswith(attention))
    return names


def _with_costs(plan: HealPlan, source: TensorSource, settings: HealSettings) -> HealPlan:
    """The plan with what training takes."""
    layout = plan.layout
    places = [{layout.places[n].tensor for n in names} for names in plan.trained]
    sizes = [sum(prod(source.shapes[t]) for t in names) for names in places]
    if settings.method == "blocks":
        epochs, most = settings.value("epochs"), max(sizes)
        note = (
            f"heal: trains {most:,} parameters at a time, {STATE_BYTES} bytes each ({STATE_BYTES * most / 1e6:,.0f} MB), "
            f"beside the activations of one sequence in one block; {epochs} passes over the text per block"
        )
        return replace(plan, notes=(note, *notes_of(settings)), streams=2, forwards=4 + 3 * epochs, working_blocks=4)
    costs = costs_of(source, layout, plan.linears, sum(sizes), settings)
    notes = (costs.note, *notes_of(settings))
    return replace(plan, notes=notes, flops=costs.flops, resident=costs.resident, token_bytes=costs.token_bytes)


def rehearsal(plan: HealPlan, settings: HealSettings) -> tuple[str, HealSettings]:
    """Without text the step copies."""
    return "heal", settings


def check_text(settings: HealSettings, text: TokenBlocks) -> None:
    """Raises SutureError when the text cannot be divided."""
    split(text, settings, "heal")


def run(work: StepRun, plan: HealPlan, settings: HealSettings) -> StepResult:
    """Train, write, and judge on the sequences held out; what is not better is replaced by the step's input."""
    if settings.method == "blocks":
        frame_factor("heal", work.original, work.checkpoint, work.probe)
    else:
        same_vocabulary(open_skeleton(work.original), open_skeleton(work.checkpoint))
    if work.text is None:
        return copy_blocks(work, plan, plan.layout)
    parts = split(work.text, settings, "heal")
    for note in plan.notes:
        work.progress.say(note)
    heal = heal_blocks if settings.method == "blocks" else heal_whole
    result = heal(work, plan, settings, parts)
    verdict = _verdict(work, plan, settings, parts)
    receipt = {"compared_with": "the original", "text": parts.describe(), "held_out": verdict, **result.receipt}
    if verdict["better"]:
        return replace(result, receipt=receipt | {"kept": "healed"})
    restore_input(work)
    why = why_not(verdict)
    expected = probe_logits(open_skeleton(work.checkpoint, device=work.device), work.probe, work.verify_blocks)
    notes = [f"heal: {why}; the model before the step was kept"]
    modules = {name: {"method": "unchanged", "tried": record} for name, record in result.modules.items()}
    kept = {"kept": "the step's input", "fallbacks": {work.label: f"not healed: {why}"}, "notes": notes}
    return StepResult(modules, expected, receipt | kept)


def heal_whole(work: StepRun, plan: HealPlan, settings: HealSettings, parts: Split) -> StepResult:
    """Train the model as a whole, and write what that changed block by block."""
    original = open_skeleton(work.original, device=work.device)
    student = open_skeleton(work.checkpoint, device=work.device)
    names = [name for block in plan.trained for name in block]
    desk = Desk(work.staging, work.key, work.label, work.progress, work.budget, work.checkpoint.path, work.crew)
    trained = train_whole(student, original, parts, settings, plan.linears, names, desk)

    def convert(before: Skeleton, index: int, stream: Stream | None) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        mine = [linear for linear in plan.linears if linear.block == index]
        scale = settings.value("alpha") / settings.value("r") if mine else 0.0
        changed = {x.module: merged_weight(before, x, trained.factors[x.module], scale) for x in mine}
        weights = {f"{module}.weight": weight for module, weight in changed.items()}
        weights |= {name: trained.weights[name] for name in plan.trained[index] if name in trained.weights}
        block = f"{before.layout.disk_stem}{before.family.blocks}.{index}"
        return before.on_disk(index, weights), {block: {"method": f"heal {settings.method}"}}

    result = convert_blocks(work, plan, plan.layout, convert, calibrated=False)
    receipt = {"steps": trained.steps, "tokens": trained.tokens, "curve": trained.curve}
    return replace(result, receipt={**receipt, **result.receipt})


def _verdict(work: StepRun, plan: HealPlan, settings: HealSettings, parts: Split) -> dict[str, Any]:
    """Found once, and journalled before anything is replaced for it."""
    entry = work.staging.find(step=work.key, unit="judged")
    if entry is None:
        write_whole(work.directory / "config.json", to_json(plan.config))
        written = open_checkpoint(work.directory)
        original, before, healed = (
            open_skeleton(source, device=work.device) for source in (work.original, work.checkpoint, written)
        )
        for skeleton in (before, healed):  # judged as the next step will leave them
            if settings.rounding is not None:
                round_in_loop(skeleton, settings.rounding)
        found: Verdict = judge(original, before, healed, parts, work.progress.track, work.budget)
        entry = {"step": work.key, "unit": "judged", "verdict": found.describe()}
        work.staging.record(entry)
    return entry["verdict"]
