"""The steps `awq` and `smoothquant`: move factors between a block's matrices, prove that nothing changed, then round.

The factors are moved in float32 and go straight into the codes: no scaled copy of the model is ever written. Before a
block is rounded, the probe goes through it as it was and as it is now; the two must agree, block by block and in the
logits at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..calibrate.activations import ChannelRanges, peak_ratio, quantize_inputs, static_scale
from ..calibrate.replay import Stream, run_block
from ..calibrate.skeleton import Skeleton, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear, ModelLayout
from ..checkpoint.manifest import Account
from ..checkpoint.source import TensorSource
from ..checkpoint.writer import ShardWriter, TensorSpec
from ..quant import int_quantized
from ..quant.block import QuantizedLayer, clipped_block, gptq_block, rtn_block
from ..quant.export import FORMATS
from ..quant.fold import Fold, apply_fold, block_folds, round_to_stored, touched, value_rows
from ..quant.rescale import BlockInputs, Choice, choose_awq, choose_smoothing, observe_block
from ..quant.scheme import STORAGE, Scheme
from ..quant.settings import AWQSettings, GPTQSettings, SmoothQuantSettings
from ..quant.targets import select
from . import quantize
from .quantize import QuantizePlan
from .step import StepResult, StepRun
from .walk import CALIBRATION, EXACT, ORIGINAL, UNROUNDED, BlockStreams, advance_probe, check_exact, copy_rest

Settings = AWQSettings | SmoothQuantSettings
WIDE = 100.0  # a channel so many times the median leaves static scales few steps for the rest
_SHOWN = 10  # widest inputs listed in the receipt


@dataclass(frozen=True)
class ScalePlan(QuantizePlan):
    """Also where factors may move."""

    folds: tuple[tuple[Fold, ...], ...] = ()  # by block
    unreached: dict[str, str] = field(default_factory=dict)  # layers that no factor reaches -> why
    dense: tuple[tuple[str, ...], ...] = ()  # by block: parameters that change and stay in full precision


def needs_text(settings: Settings) -> bool:
    return isinstance(settings, AWQSettings) or settings.needs_text


def prepare(source: TensorSource, settings: Settings) -> ScalePlan:
    """Plan the step from names and shapes alone. Raises SutureError for everything that could fail later."""
    skeleton = open_skeleton(source)
    if isinstance(settings, SmoothQuantSettings):
        base = _with_integer_inputs(source, skeleton.layout, settings)
    else:
        base = quantize.prepare(source, settings.weights())
    modules = {linear.module: linear for linear in base.selection.chosen}
    folds: list[tuple[Fold, ...]] = []
    dense: list[tuple[str, ...]] = []
    unreached: dict[str, str] = {}
    if isinstance(settings, AWQSettings) or settings.alpha != "none":
        for index in range(base.n_blocks):
            found, missed = block_folds(skeleton, index, frozenset(modules))
            folds.append(tuple(found))
            unreached |= missed
            names = dict.fromkeys(name for fold in found for name in touched(skeleton, fold))
            dense.append(tuple(name for name in names if name.removesuffix(".weight") not in modules))
    accounts = dict(base.accounts)
    rounded = {linear.place.tensor for linear in base.selection.chosen}
    for tensor in {
        skeleton.layout.places[name].tensor for block in folds for f in block for name in touched(skeleton, f)
    }:
        if tensor in rounded:
            accounts[tensor] = replace(accounts[tensor], reason=f"scaled per channel, {accounts[tensor].reason}")
            continue
        if source.dtypes[tensor] not in STORAGE:
            raise SutureError(f"{source.source}: {tensor} is {source.dtypes[tensor]}, which cannot take a factor")
        accounts[tensor] = Account("changed", (tensor,), "scaled per channel; what reads or makes it takes the inverse")
    fields = {name: getattr(base, name) for name in type(base).__dataclass_fields__}
    searching = 3.0 if isinstance(settings, AWQSettings) else 2.5  # what factors are tried for costs, in forwards
    return ScalePlan(
        **fields | {"accounts": accounts, "notes": (*base.notes, *_notes(settings, unreached)), "forwards": searching},
        folds=tuple(folds),
        unreached=unreached,
        dense=tuple(dense),
    )


def _with_integer_inputs(source: TensorSource, layout: ModelLayout, settings: SmoothQuantSettings) -> QuantizePlan:
    """The plan for packed 8-bit weights, changed into one for int8 weights with rounded inputs."""
    int_quantized.check_inputs(layout, select(layout, settings.targets, settings.ignore, settings.layers))
    kept = int_quantized.kept_inputs(layout, settings.inputs)
    weights = settings.weights()
    base = quantize.prepare(source, weights.model_copy(update={"ignore": [*weights.ignore, *kept]}))
    base = replace(base, skipped={name: kept.get(name, reason) for name, reason in base.skipped.items()})
    chosen = {linear.place.tensor: linear for linear in base.selection.chosen}
    specs: list[TensorSpec] = []
    accounts = dict(base.accounts)
    planned = {spec.name: spec for spec in base.specs}
    for name, account in base.accounts.items():
        if name not in chosen:
            specs += [planned[output] for output in account.outputs]
            continue
        made = [TensorSpec(*s) for s in int_quantized.tensor_specs(chosen[name], source.dtypes[name], settings.inputs)]
        specs += made
        how = f"quantized to 8 bits, with {settings.activations} 8-bit inputs"
        accounts[name] = Account("changed", tuple(spec.name for spec in made), how)
    entry = int_quantized.with_inputs(base.config["quantization_config"], settings.inputs)
    return replace(base, specs=tuple(specs), accounts=accounts, config={**base.config, "quantization_config": entry})


def _notes(settings: Settings, unreached: Mapping[str, str]) -> list[str]:
    notes = []
    if isinstance(settings, AWQSettings) and settings.bits == 2:
        notes.append("awq at 2 bits: scaling alone is published to collapse there; use rounding: gptq, and compare")
    if unreached:
        first, reason = next(iter(unreached.items()))
        notes.append(f"{len(unreached)} layers are rounded without scaling, first {first} ({reason})")
    return notes


# -- the run -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def run(work: StepRun, plan: ScalePlan, settings: Settings) -> StepResult:
    """Scale, check, round, write and journal one block after another."""
    skeleton = open_skeleton(work.checkpoint, device=work.device)
    probes = (ORIGINAL, UNROUNDED) if plan.folds else ()
    streams = BlockStreams(work, skeleton, (CALIBRATION,) if needs_text(settings) else (), probes)
    done: dict[str, dict[str, Any]] = {"modules": {}, "folds": {}, "blocks": {}}
    with ShardWriter(work.directory, work.shards) as writer:
        copy_rest(work, plan, plan.layout, writer)
        for index in work.progress.track(range(skeleton.n_blocks), skeleton.n_blocks, work.label):
            entry = work.staging.find(step=work.key, block=index)
            if entry is None:
                if index > plan.last_block:
                    streams.end_text()
                streams.resume_after(index - 1)
                skeleton.load_block(index)
                entry = _convert(work, plan, settings, skeleton, index, streams, writer)
                skeleton.free_block(index)
                streams.save(index, writer, {"step": work.key, "block": index, **entry})
            for part, records in done.items():
                records |= entry[part]
        streams.wait()
    receipt = _receipt(plan, settings, done)
    if plan.folds:
        verified = min(work.verify_blocks, plan.n_blocks)
        logits = [streams.logits(name, skeleton, verified) for name in probes]
        exact = check_exact(f"{work.label}: scaling", logits[0], logits[1])
        work.progress.say(
            f"{work.label}: scaling moved float32 logits by at most {exact['max_logit_difference']} "
            f"(largest {exact['largest_logit']})"
        )
        receipt = {**exact, **receipt}
    return StepResult(done["modules"], streams.expected(plan.n_blocks), receipt)


def _convert(
    work: StepRun,
    plan: ScalePlan,
    settings: Settings,
    skeleton: Skeleton,
    index: int,
    streams: BlockStreams,
    writer: ShardWriter,
) -> dict[str, dict[str, Any]]:
    """Scale, round and write the loaded block; what the journal keeps of it."""
    names = plan.selection.names
    mine = [linear for group in skeleton.layout.blocks[index] for linear in group if linear.name in names]
    own = work.checkpoint.dtypes[(mine or plan.selection.chosen)[0].place.tensor]
    form = settings.format if isinstance(settings, AWQSettings) else "pack-quantized"
    storage = STORAGE[FORMATS[form].scale_dtype or own]
    folds = plan.folds[index] if plan.folds else ()
    seen = None
    if needs_text(settings) and index <= plan.last_block:
        sample = settings.search_tokens if isinstance(settings, AWQSettings) or settings.alpha == "auto" else 0
        seen = observe_block(skeleton, index, streams[CALIBRATION], folds, mine, sample)
    schemes = {linear.module: plan.schemes[linear.name] for linear in mine}
    choices = _choose(skeleton, folds, seen, schemes, settings, storage) if seen is not None else []
    blocks: dict[str, Any] = {}
    columns: dict[str, Tensor] = {}
    if plan.folds:
        moved, difference = _move(skeleton, index, choices, streams[ORIGINAL], streams[UNROUNDED])
        columns = {name: fold.columns(s) for fold, s in zip(folds, moved, strict=True) for name in fold.consumers}
        blocks[str(index)] = difference
        round_to_stored(skeleton, plan.dense[index])
    ranges = _scaled_ranges(mine, seen, columns)
    scales: dict[str, Tensor | None] = {}
    if isinstance(settings, SmoothQuantSettings):
        for linear in mine:
            static = None if settings.inputs.dynamic else static_scale(float(ranges[linear.module].max()), storage)
            scales[linear.module] = static
        quantize_inputs(skeleton, scales)
    layers = _round(work, plan, skeleton, index, mine, settings, storage, seen, columns, streams)
    advance_probe(skeleton, index, streams.probe)
    _write_block(work, plan, skeleton, index, layers, scales, settings, writer)
    made = {choice.fold.name: choice.record for choice in choices}
    modules = {layer.linear.name: _record(layer, settings, made, seen, ranges, scales, choices) for layer in layers}
    return {"modules": modules, "folds": made, "blocks": blocks}


def _choose(
    skeleton: Skeleton,
    folds: Sequence[Fold],
    seen: BlockInputs,
    schemes: Mapping[str, Scheme],
    settings: Settings,
    storage: torch.dtype,
) -> list[Choice]:
    if isinstance(settings, AWQSettings):
        return choose_awq(skeleton, folds, seen, schemes, storage, settings.grid)
    alpha = None if isinstance(settings.alpha, str) else settings.alpha
    return choose_smoothing(skeleton, folds, seen, schemes, settings.inputs, storage, alpha)


def _move(
    skeleton: Skeleton, index: int, choices: Sequence[Choice], original: Stream, unrounded: Stream
) -> tuple[list[Tensor], dict[str, float]]:
    """Move the chosen factors. Raises SutureError unless the block still computes what it did, on the probe."""
    run_block(skeleton, index, original)
    moved = [apply_fold(skeleton, choice.fold, choice.s) for choice in choices]
    run_block(skeleton, index, unrounded)
    difference = float((original.hidden[0] - unrounded.hidden[0]).abs().max())
    scale = float(original.hidden[0].abs().max())
    if not difference <= EXACT * scale:
        raise SutureError(
            f"block {index}: scaling should leave its outputs as they are, but values up to {scale:.3g} move by "
            f"{difference:.3g}",
            "nothing was written; please report this",
        )
    return moved, {"max_difference": float(f"{difference:.3g}"), "largest": float(f"{scale:.3g}")}


def _scaled_ranges(
    mine: Sequence[Linear], seen: BlockInputs | None, columns: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Module -> max |x| per input [in] after scaling."""
    if seen is None:
        return {}
    largest = {linear.module: seen.range_of(linear.module).largest for linear in mine}
    return {name: range_ / columns[name] if name in columns else range_ for name, range_ in largest.items()}


def _round(
    work: StepRun,
    plan: ScalePlan,
    skeleton: Skeleton,
    index: int,
    mine: Sequence[Linear],
    settings: Settings,
    storage: torch.dtype,
    seen: BlockInputs | None,
    columns: Mapping[str, Tensor],
    streams: BlockStreams,
) -> list[QuantizedLayer]:
    """Round the scaled layers; a calibration stream then holds the block's outputs."""
    if index > plan.last_block:
        return []
    weights = settings.weights()
    if isinstance(weights, GPTQSettings):
        return gptq_block(skeleton, index, streams[CALIBRATION], mine, weights, storage, work.paused, plan.schemes)
    if isinstance(settings, AWQSettings):
        assert seen is not None
        inputs = {name: seen.sample(name) / columns.get(name, torch.ones(())) for name in seen.first}
        schemes = {linear.module: plan.schemes[linear.name] for linear in mine}
        layers = clipped_block(
            skeleton, mine, schemes, weights.range_search, storage, inputs, value_rows(skeleton, index)
        )
    else:
        layers = list(rtn_block(skeleton, mine, weights, storage, plan.schemes))
    if seen is not None:
        run_block(skeleton, index, streams[CALIBRATION])
    return layers


def _write_block(
    work: StepRun,
    plan: ScalePlan,
    skeleton: Skeleton,
    index: int,
    layers: Sequence[QuantizedLayer],
    scales: Mapping[str, Tensor | None],
    settings: Settings,
    writer: ShardWriter,
) -> None:
    for layer in layers:
        linear = layer.linear
        if isinstance(settings, SmoothQuantSettings):
            made = int_quantized.tensors(linear.name, layer.quantized, scales[linear.module])
        else:
            made = FORMATS[settings.format].tensors(linear, layer.quantized)
        for name, tensor in made.items():
            writer.write(name, tensor)
    written = {layer.linear.place.tensor for layer in layers}
    dense = set(plan.dense[index]) if plan.dense else set()
    for name, place in skeleton.layout.block_tensors(index).items():
        if place.tensor in written:
            continue
        written.add(place.tensor)
        if name in dense:
            stored = skeleton.model.get_parameter(name).data.to(STORAGE[work.checkpoint.dtypes[place.tensor]])
            writer.write(place.tensor, stored.cpu())
        else:
            writer.write_bytes(place.tensor, work.checkpoint.read_bytes(place.tensor))


# -- records -----------------------------------------------------------------------------------------------------------


def _record(
    layer: QuantizedLayer,
    settings: Settings,
    folds: Mapping[str, dict[str, Any]],
    seen: BlockInputs | None,
    ranges: Mapping[str, Tensor],
    scales: Mapping[str, Tensor | None],
    choices: Sequence[Choice],
) -> dict[str, Any]:
    linear, scheme = layer.linear, layer.quantized.scheme
    record = asdict(layer.record)
    scaled = next((choice.label for choice in choices if linear.module in choice.fold.consumers), None)
    if scaled is not None:
        name = "awq" if isinstance(settings, AWQSettings) else "smoothquant"
        record["method"] = f"{name}+{record['method']}"
    record |= {"bits": scheme.bits, "group_size": scheme.group_size, "symmetric": scheme.symmetric}
    record |= {"shape": [linear.out_features, linear.in_features], "scaled": scaled}
    if seen is not None:
        before: ChannelRanges = seen.range_of(linear.module)
        record["tokens"] = before.tokens
        if before.tokens == 0:
            record["fallback"] = "no calibration token reached it"
        record["inputs"] = {
            "max": _rounded(float(before.largest.max())),
            "peak_ratio": _rounded(peak_ratio(before.largest)),
            "max_scaled": _rounded(float(ranges[linear.module].max())),
            "peak_ratio_scaled": _rounded(peak_ratio(ranges[linear.module])),
        }
    if isinstance(settings, SmoothQuantSettings):
        scale = scales[linear.module]
        record["input_bits"] = 8
        record["input_scale"] = None if scale is None else float(scale)
    return record


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _receipt(plan: ScalePlan, settings: Settings, done: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What the manifest keeps of the step as a whole."""
    receipt: dict[str, Any] = {}
    if plan.folds:
        receipt |= {"folds": done["folds"], "blocks": done["blocks"], "without_scaling": plan.unreached}
    if isinstance(settings, SmoothQuantSettings):
        inputs = {name: record["inputs"] for name, record in done["modules"].items() if "inputs" in record}
        widest = sorted(inputs, key=lambda name: -inputs[name]["peak_ratio_scaled"])[:_SHOWN]
        receipt["widest_inputs"] = {name: inputs[name] for name in widest}
        peak = inputs[widest[0]]["peak_ratio_scaled"] if widest else 0
        if not settings.inputs.dynamic and peak > WIDE:
            receipt["notes"] = [
                f"the inputs of {widest[0]} peak at {peak:.0f} times their median: one static scale leaves most of them few "
                "steps; activations: dynamic copes better"
            ]
    return receipt


def rehearsal(plan: ScalePlan, settings: Settings) -> tuple[str, Any]:
    """Plain rounding of the first block's layers to the same format."""
    if isinstance(settings, AWQSettings):
        return quantize.rehearsal(plan, settings.weights())
    _, first = quantize.rehearsal(plan, settings.weights())
    plain = {"alpha": "none", "search": False, "targets": first.targets}
    return "smoothquant", SmoothQuantSettings.model_validate(plain)
