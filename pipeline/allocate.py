"""The step `allocate`: measure what each width costs each layer, choose widths within a budget, then GPTQ.

Measured is the block's output: for each group of layers that share their input, and each width, the group alone is
quantized by GPTQ and the block's outputs on a part of the calibration text are compared with the original's, relative to
their size. Layers that share an input get one width, as servers fuse them into one matrix. The widths are decided after the
first plan is made, which counts all layers at the most bits; the plan with them replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..calibrate.replay import staged_block
from ..calibrate.skeleton import Skeleton, open_skeleton
from ..calibrate.statistics import SecondMoment
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from ..checkpoint.source import TensorSource
from ..quant.allocate import allocate
from ..quant.gptq import GPTQOptions, gptq
from ..quant.learn import relative_error
from ..quant.scheme import STORAGE, Scheme, split_rows
from ..quant.settings import AllocateSettings
from . import quantize
from .quantize import QuantizePlan
from .step import StepResult, StepRun
from .walk import CALIBRATION, BlockStreams

_TOKENS = 2048  # of the calibration text on which a block's outputs are compared


@dataclass(frozen=True)
class Unit:
    """Layers of one block that share their input, without a rule of their own."""

    linears: tuple[Linear, ...]

    @property
    def name(self) -> str:
        return self.linears[0].name

    def cost(self, scheme: Scheme, scale_bits: int) -> int:
        """Bits of storage, scales included."""
        return round(sum(x.numel * scheme.bits_per_weight(x.in_features, scale_bits) for x in self.linears))


def prepare(source: TensorSource, settings: AllocateSettings) -> QuantizePlan:
    """The plan with the widths chosen, or with all layers at the most bits. Raises SutureError for a budget that cannot be
    kept."""
    if not settings.symmetric:
        raise SutureError("allocate: several widths need symmetric: true, which loaders read", "use symmetric: true")
    plan = quantize.prepare(source, settings)
    family = plan.layout.family
    if family.experts is not None or family.conv1d or family.own_linear:
        raise SutureError(
            f"allocate: transformers reads one format only of {family.model_type} layers", "use gptq, with one width"
        )
    units, costs, fixed = _costs(plan, settings, source)
    if not units:
        raise SutureError("allocate: every layer has a rule, so nothing is left to choose", "use gptq")
    if settings.chosen:
        free = {linear.name for unit in units for linear in unit.linears}
        if free != settings.chosen.keys():
            odd = sorted(free ^ settings.chosen.keys())
            raise SutureError(f"chosen: {odd[0]} is not in both the layers without a rule and chosen", "remove chosen")
        schemes = {name: replace(settings.scheme, bits=bits) for name, bits in settings.chosen.items()}
        return replace(quantize.prepare(source, settings, plan.schemes | schemes), ruled=plan.ruled)
    least, budget = sum(row[0] for row in costs) + fixed, _budget(plan, settings)
    if least > budget:
        weights = sum(linear.numel for linear in plan.selection.chosen)
        raise SutureError(
            f"average_bits: {settings.average_bits} is below what {settings.fewest} bits need with their scales, "
            f"{least / weights:.3f}",
            "raise average_bits, or lower fewest",
        )
    note = (
        f"widths are decided after {len(units)} groups of layers are measured; sizes here are for {settings.bits} bits"
    )
    return replace(plan, notes=(*plan.notes, note), forwards=4.0)


def _units(plan: QuantizePlan, settings: AllocateSettings) -> list[Unit]:
    """In forward order; layers with a rule are not among them."""
    free = {name for name, scheme in plan.schemes.items() if name not in plan.ruled}
    groups = [tuple(x for x in group if x.name in free) for block in plan.layout.blocks for group in block]
    return [Unit(group) for group in groups if group]


def _costs(
    plan: QuantizePlan, settings: AllocateSettings, source: TensorSource
) -> tuple[list[Unit], list[list[int]], int]:
    """The units, what each width costs each, and what the layers with rules cost. Bits of storage."""
    units = _units(plan, settings)
    bits = _scale_bits(plan, source)
    costs = [[unit.cost(replace(settings.scheme, bits=b), bits) for b in settings.widths] for unit in units]
    ruled = [linear for linear in plan.selection.chosen if linear.name in plan.ruled]
    fixed = sum(Unit((linear,)).cost(plan.schemes[linear.name], bits) for linear in ruled)
    return units, costs, fixed


def _scale_bits(plan: QuantizePlan, source: TensorSource) -> int:
    return 8 * STORAGE[source.dtypes[plan.selection.chosen[0].place.tensor]].itemsize


def _budget(plan: QuantizePlan, settings: AllocateSettings) -> int:
    return int(settings.average_bits * sum(linear.numel for linear in plan.selection.chosen))


@torch.no_grad()
def settle(work: StepRun, plan: QuantizePlan, settings: AllocateSettings) -> AllocateSettings | None:
    """The settings with the widths chosen: measured block by block, resuming after a kill. None when they are."""
    if settings.chosen:
        return None
    units, costs, fixed = _costs(plan, settings, work.checkpoint)
    measured = _measure(replace(work, key=_measuring(work)), plan, units, settings)
    losses = [[measured[unit.name][str(bits)] for bits in settings.widths] for unit in units]
    choice = allocate(costs, losses, _budget(plan, settings) - fixed)
    chosen = {x.name: settings.widths[c] for unit, c in zip(units, choice, strict=True) for x in unit.linears}
    return settings.model_copy(update={"chosen": chosen})


def _measuring(work: StepRun) -> str:
    """Key of the measurements in the journal."""
    return f"{work.key}-measure"


def run(work: StepRun, plan: QuantizePlan, settings: AllocateSettings) -> StepResult:
    """GPTQ with the chosen widths; the receipt says what was measured and what was spent."""
    result = quantize.run(work, plan, settings)
    units, _, _ = _costs(plan, settings, work.checkpoint)
    scale_bits = _scale_bits(plan, work.checkpoint)
    chosen = plan.selection.chosen
    spent = sum(x.numel * plan.schemes[x.name].bits_per_weight(x.in_features, scale_bits) for x in chosen)
    entries = [work.staging.find(step=_measuring(work), block=index) for index in range(plan.n_blocks)]
    errors = {unit: row for entry in entries if entry is not None for unit, row in entry["errors"].items()}
    receipt = {
        "average_bits": round(spent / sum(linear.numel for linear in chosen), 4),
        "budget": settings.average_bits,
        "allocation": [
            {
                "layers": [linear.name for linear in unit.linears],
                "bits": plan.schemes[unit.name].bits,
                "block_errors": errors.get(unit.name),
            }
            for unit in units
        ],
    }
    return replace(result, receipt=receipt)


def _measure(
    work: StepRun, plan: QuantizePlan, units: Sequence[Unit], settings: AllocateSettings
) -> dict[str, dict[str, float]]:
    """Unit -> width -> relative error of its block's outputs."""
    skeleton = open_skeleton(work.checkpoint, device=work.device)
    streams = BlockStreams(work, skeleton, (CALIBRATION,))
    measured: dict[str, dict[str, float]] = {}
    label = f"{work.label}: measure"
    for index in work.progress.track(range(skeleton.n_blocks), skeleton.n_blocks, label):
        entry = work.staging.find(step=work.key, block=index)
        if entry is None:
            streams.resume_after(index - 1)
            mine = [unit for unit in units if unit.linears[0].block == index]
            skeleton.load_block(index)
            errors = _measure_block(work, skeleton, index, streams, mine, settings)
            skeleton.free_block(index)
            entry = {"step": work.key, "block": index, "errors": errors}
            streams.save(index, None, entry)
        measured |= entry["errors"]
    streams.wait()
    return measured


def _measure_block(
    work: StepRun, skeleton: Skeleton, index: int, streams: BlockStreams, units: list[Unit], settings: AllocateSettings
) -> dict[str, dict[str, float]]:
    stream = streams[CALIBRATION]
    some = max(1, _TOKENS // stream.ids[0].numel())
    inputs = [
        (hidden.clone(), positions)
        for hidden, positions in zip(stream.hidden[:some], stream.positions[:some], strict=True)
    ]
    moments = [
        SecondMoment.zeros(unit.linears[0].in_features, getattr(torch, settings.hessian), skeleton.device)
        for unit in units
    ]
    stages = [unit.linears for unit in units]
    staged_block(skeleton, index, stream, stages, lambda k, x: moments[k].add(x), lambda k: None, work.paused)
    outputs = stream.hidden[:some]
    found: dict[str, dict[str, float]] = {}
    for unit, moment in zip(units, moments, strict=True):
        hessian = moment.hessian()
        found[unit.name] = {
            str(bits): float(f"{_error_at(skeleton, index, unit, hessian, bits, settings, inputs, outputs):.6g}")
            for bits in settings.widths
        }
    return found


def _error_at(
    skeleton: Skeleton,
    index: int,
    unit: Unit,
    hessian: Tensor,
    bits: int,
    settings: AllocateSettings,
    inputs: list[tuple[Tensor, Tensor | None]],
    outputs: list[Tensor],
) -> float:
    """Relative error of the block's outputs with this unit alone at `bits`."""
    parameters = [skeleton.model.get_submodule(linear.module).get_parameter("weight") for linear in unit.linears]
    originals = [parameter.data for parameter in parameters]
    storage = STORAGE[skeleton.source.dtypes[unit.linears[0].place.tensor]]
    options = GPTQOptions(replace(settings.scheme, bits=bits), settings.damp, search=settings.range_search)
    found = gptq(torch.cat(originals), hessian, options, storage).quantized
    parts = split_rows(found, [linear.out_features for linear in unit.linears])
    try:
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part.dequantize().to(parameter.dtype)
        errors = [
            float(relative_error(skeleton.run_block(index, hidden.to(skeleton.device), positions).cpu(), out))
            for (hidden, positions), out in zip(inputs, outputs, strict=True)
        ]
    finally:
        for parameter, original in zip(parameters, originals, strict=True):
            parameter.data = original
    return sum(errors) / len(errors)


def rehearsal(plan: QuantizePlan, settings: AllocateSettings) -> tuple[str, Any]:
    """The first block at the fewest and the most bits in turn, so that a file of several formats is tried."""
    schemes = dict(plan.schemes)
    for i, unit in enumerate(unit for unit in _units(plan, settings) if unit.linears[0].block == 0):
        bits = settings.widths[-1 if i % 2 else 0]
        schemes |= {linear.name: replace(settings.scheme, bits=bits) for linear in unit.linears}
    return quantize.rehearsal(replace(plan, schemes=schemes), settings)
