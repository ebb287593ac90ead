"""Steps that rewrite tensors in place: names, shapes and dtypes stay, the float32 logits stay, and that is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calibrate.observe import observe_inputs
from ..calibrate.replay import Stream
from ..calibrate.skeleton import Skeleton, open_layout, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import ModelLayout, text_config, with_text_config
from ..checkpoint.source import TensorSource
from ..surgery import fold_norms as folding
from ..surgery import permute as permuting
from ..surgery import rescale_residual as rescaling
from ..surgery import rotary
from ..surgery.fold_norms import FoldNormsSettings
from ..surgery.heads import head_counts
from ..surgery.permute import PermuteSettings
from ..surgery.rescale_residual import RescaleResidualSettings
from ..surgery.rotary import RotarySettings
from .derive import changed_in_place
from .step import Prepared, StepResult, StepRun
from .walk import CONVERTING, convert_blocks


@dataclass(frozen=True)
class RewritePlan(Prepared):
    layout: ModelLayout


def rewrite_plan(
    source: TensorSource,
    layout: ModelLayout,
    changed: Mapping[str, str],
    config: dict[str, Any] | None = None,
    notes: tuple[str, ...] = (),
) -> RewritePlan:
    """A plan in which the tensors `changed` (disk name -> how) change and all others are copied.

    Raises SutureError when there is nothing to change, or for a tensor of a dtype that is not plain floating point.
    """
    if not changed:
        raise SutureError(f"{source.source}: no tensor that this step changes", "remove the step")
    specs, accounts = changed_in_place(source, layout, changed)
    return RewritePlan(
        specs=specs,
        config=dict(source.config) if config is None else config,
        accounts=accounts,
        notes=(*(f"{name} dropped: {reason}" for name, reason in layout.stale.items()), *notes),
        n_blocks=len(layout.blocks),
        working_blocks=CONVERTING,
        layout=layout,
    )


def in_receipt(result: StepResult, parts: Mapping[str, Any]) -> StepResult:
    """The result with records of its parts in its receipt; a part's `fallback`, if any, counts as the run's."""
    fallbacks = {name: record["fallback"] for name, record in parts.items() if record.get("fallback")}
    return StepResult({}, result.expected, result.receipt | {"parts": dict(parts), "fallbacks": fallbacks})


# -- fold_norms --------------------------------------------------------------------------------------------------------


def prepare_fold_norms(source: TensorSource, settings: FoldNormsSettings) -> RewritePlan:
    """Raises SutureError when the last norm is to be folded into a tied head."""
    layout = open_layout(source)
    names = layout.places
    changed: dict[str, str] = {}
    for index in range(len(layout.blocks)):
        for norm, readers in folding.block_readers(layout.family, names, layout.block_prefix(index)).items():
            for name in folding.changed_names(norm, readers, layout.block_tensors(index)):
                changed[names[name].tensor] = "norm weights folded into what reads them"
    if settings.final_norm:
        if layout.head is None:
            raise SutureError(
                "fold_norms: the last norm is read by the head, which this model ties to its embedding",
                "put `- untie: {}` before it, or set final_norm: false",
            )
        for name in folding.changed_names(*_final(layout), names):
            changed[names[name].tensor] = "norm weights folded into the head"
    return rewrite_plan(source, layout, changed)


def _final(layout: ModelLayout) -> tuple[str, list[str]]:
    return f"{layout.family.stem}{layout.family.final_norm}", [f"{layout.family.head}.weight"]


@torch.no_grad()
def run_fold_norms(work: StepRun, plan: RewritePlan, settings: FoldNormsSettings) -> StepResult:
    def convert(skeleton: Skeleton, index: int, _: Stream | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        parameters, family = skeleton.block_parameters(index), skeleton.family
        changed, records = {}, {}
        for norm, readers in folding.block_readers(family, parameters, skeleton.layout.block_prefix(index)).items():
            made, kept = folding.fold(family.norm_kind, norm, readers, parameters, family.conv1d)
            changed |= _as_planned(norm, readers, parameters, made)
            records[norm] = {"method": "kept" if kept else "folded", "readers": len(readers), "fallback": kept or None}
        return skeleton.on_disk(index, changed), records

    outside, records = _folded_head(work, plan.layout) if settings.final_norm else ({}, {})
    result = convert_blocks(work, plan, plan.layout, convert, calibrated=False, outside=outside, exact=True)
    return in_receipt(result, result.modules | records)


def _folded_head(work: StepRun, layout: ModelLayout) -> tuple[dict[str, Tensor], dict[str, Any]]:
    skeleton = open_skeleton(work.checkpoint, device=work.device)
    skeleton.load_head()
    norm, readers = _final(layout)
    parameters = skeleton.head_parameters()
    changed, kept = folding.fold(layout.family.norm_kind, norm, readers, parameters)
    record = {"method": "kept" if kept else "folded", "readers": len(readers), "fallback": kept or None}
    written = _as_planned(norm, readers, parameters, changed)
    return {layout.places[name].tensor: value for name, value in written.items()}, {norm: record}


def _as_planned(
    norm: str, readers: list[str], parameters: Mapping[str, Tensor], made: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What was planned as changed is written even when it stays."""
    return {name: made.get(name, parameters[name]) for name in folding.changed_names(norm, readers, parameters)}


# -- permute -----------------------------------------------------------------------------------------------------------


def permute_needs_text(settings: PermuteSettings) -> bool:
    return "importance" in (settings.heads, settings.neurons)


def rehearse_permute(plan: RewritePlan, settings: PermuteSettings) -> tuple[str, PermuteSettings]:
    """In random order what will be in order of importance."""
    free = {"importance": "random"}
    heads, neurons = free.get(settings.heads, settings.heads), free.get(settings.neurons, settings.neurons)
    return "permute", PermuteSettings.model_validate({"heads": heads, "neurons": neurons, "seed": settings.seed})


def prepare_permute(source: TensorSource, settings: PermuteSettings) -> RewritePlan:
    skeleton = open_skeleton(source)
    layout = skeleton.layout
    if settings.heads == settings.neurons == "keep":
        raise SutureError("permute: heads and neurons are both kept", "set one of them to random or importance")
    changed: dict[str, str] = {}
    for index in range(len(layout.blocks)):
        tensors = layout.block_tensors(index)
        parts, _ = _parts(skeleton, index, settings)
        for part in parts:
            for leaf in ("weight", "bias") if part.side == "out" else ("weight",):
                name = f"{layout.block_prefix(index)}{part.path}.{leaf}"
                if name in tensors:
                    changed[tensors[name].tensor] = "heads or neurons in another order"
    return rewrite_plan(source, layout, changed)


def _parts(
    skeleton: Skeleton, index: int, settings: PermuteSettings
) -> tuple[tuple[permuting.Part, ...], dict[str, int]]:
    """(what moves in a block, neurons of each matrix that writes the MLP's output)."""
    layout = skeleton.layout
    experts = layout.family.experts
    sizes = {
        linear.role: linear.in_features
        for group in layout.blocks[index]
        for linear in group
        if linear.role == layout.family.mlp_out
        or (experts is not None and linear.expert is not None and linear.role.endswith(".down_proj"))
    }
    parts: tuple[permuting.Part, ...] = ()
    if settings.heads != "keep":
        parts += permuting.attention_parts(layout.family, skeleton.hf_config)
    if settings.neurons != "keep":
        parts += permuting.neuron_parts(layout.family, layout.block_tensors(index), layout.block_prefix(index), sizes)
    return parts, sizes


@torch.no_grad()
def run_permute(work: StepRun, plan: RewritePlan, settings: PermuteSettings) -> StepResult:
    def convert(skeleton: Skeleton, index: int, stream: Stream | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        prefix, conv1d = skeleton.layout.block_prefix(index), skeleton.family.conv1d
        parameters = skeleton.block_parameters(index)
        parts, sizes = _parts(skeleton, index, settings)
        counts = head_counts(skeleton.hf_config)
        heads, kv = counts.query, counts.key_value
        importance = _importance(skeleton, index, stream, sizes) if stream is not None else {}
        orders: dict[str, list[int]] = {}
        if settings.heads == "random":
            within = [permuting.shuffled(heads // kv, settings.seed, index, 1, g) for g in range(kv)]
            orders["kv"] = permuting.shuffled(kv, settings.seed, index, 0)
            orders["q"] = permuting.group_order(orders["kv"], within)
        elif settings.heads == "importance":
            groups = importance["q"].reshape(kv, heads // kv)
            orders["kv"] = permuting.by_importance(groups.sum(1))
            orders["q"] = permuting.group_order(orders["kv"], [permuting.by_importance(group) for group in groups])
        for number, (out, n) in enumerate(sizes.items()):
            if settings.neurons == "random":
                orders[out] = permuting.shuffled(n, settings.seed, index, 2, number)
            elif settings.neurons == "importance":
                orders[out] = permuting.by_importance(importance[out])
        changed = permuting.permute(parameters, prefix, parts, orders, conv1d)
        records = {f"block {index}": {"heads": orders["q"]}} if settings.heads != "keep" else {}
        return skeleton.on_disk(index, changed), records

    result = convert_blocks(
        work, plan, plan.layout, convert, calibrated=permute_needs_text(settings), converted_inputs=False, exact=True
    )
    return in_receipt(result, result.modules)


def _importance(skeleton: Skeleton, index: int, stream: Stream, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Of query heads ("q") and of each MLP's neurons, over the calibration text."""
    family, prefix = skeleton.family, skeleton.layout.block_prefix(index)
    parameters = skeleton.block_parameters(index)
    heads = int(skeleton.hf_config.num_attention_heads)

    def matrix(path: str) -> Tensor:
        weight = parameters[f"{prefix}{path}.weight"]
        return weight.T if family.conv1d else weight

    head_sums = torch.zeros(heads)
    neuron_sums = {out: torch.zeros(n) for out, n in sizes.items()}

    def look_at_heads(x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1])
        head_sums.add_(permuting.contributions(flat, matrix(family.attention_out), heads).cpu(), alpha=len(flat))

    def look_at_neurons(out: str) -> Any:
        return lambda x: neuron_sums[out].add_(x.reshape(-1, x.shape[-1]).abs().sum(0).cpu())

    watch: dict[str, Any] = {f"{prefix}{family.attention_out}": look_at_heads}
    watch |= {f"{prefix}{out}": look_at_neurons(out) for out in sizes}
    observe_inputs(skeleton, index, stream, watch)
    found = {out: permuting.neuron_importance(total, matrix(out).cpu()) for out, total in neuron_sums.items()}
    return found | {"q": head_sums}


# -- rescale_residual --------------------------------------------------------------------------------------------------


def prepare_rescale_residual(source: TensorSource, settings: RescaleResidualSettings) -> RewritePlan:
    skeleton = open_skeleton(source)
    layout = skeleton.layout
    key = rescaling.eps_key(skeleton.hf_config)
    before = float(getattr(skeleton.hf_config, key))
    beta, eps = rescaling.factor_and_eps(settings, before)
    changed: dict[str, str] = {}
    for index in range(len(layout.blocks)):
        places = layout.block_tensors(index)
        for name in rescaling.scaled_in_block(layout.family, places, layout.block_prefix(index)):
            changed[places[name].tensor] = f"scaled by {beta:.6g}"
    for name in rescaling.scaled_outside(layout.family, layout.places, layout.head is None):
        changed[layout.places[name].tensor] = f"scaled by {beta:.6g}"
    if layout.head_duplicate is not None:
        changed[layout.head_duplicate] = f"scaled by {beta:.6g}"
    config = with_text_config(source.config, {**text_config(source.config), key: eps})
    note = f"rescale_residual: residual stream times {beta:.6g}, {key} {before:.6g} -> {eps:.6g}"
    return rewrite_plan(source, layout, changed, config, (note,))


@torch.no_grad()
def run_rescale_residual(work: StepRun, plan: RewritePlan, settings: RescaleResidualSettings) -> StepResult:
    skeleton = open_skeleton(work.checkpoint, device=work.device)
    layout, family = plan.layout, plan.layout.family
    before = float(getattr(skeleton.hf_config, rescaling.eps_key(skeleton.hf_config)))
    beta, eps = rescaling.factor_and_eps(settings, before)

    def convert(skeleton: Skeleton, index: int, _: Stream | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        parameters = skeleton.block_parameters(index)
        kinds = rescaling.scaled_in_block(family, parameters, layout.block_prefix(index))
        changed = {
            name: rescaling.rescaled(parameters[name], kind, beta, family.norm_kind) for name, kind in kinds.items()
        }
        return skeleton.on_disk(index, changed), {}

    outside: dict[str, Tensor] = {}
    for name, kind in rescaling.scaled_outside(family, layout.places, layout.head is None).items():
        tensor = layout.places[name].tensor
        outside[tensor] = rescaling.rescaled(work.checkpoint.read(tensor).float(), kind, beta, family.norm_kind)
    if layout.head_duplicate is not None:
        outside[layout.head_duplicate] = outside[layout.embedding]
    result = convert_blocks(work, plan, layout, convert, calibrated=False, outside=outside, exact=True)
    return StepResult({}, result.expected, {**result.receipt, "factor": beta, "eps": {"before": before, "after": eps}})


# -- rotary ------------------------------------------------------------------------------------------------------------


def prepare_rotary(source: TensorSource, settings: RotarySettings) -> RewritePlan:
    """Raises SutureError for a class that reads one order only, or when the rows are in that order already."""
    skeleton = open_skeleton(source)
    layout = skeleton.layout
    rotary.check(layout.family, skeleton.hf_config, settings)
    changed: dict[str, str] = {}
    for index in range(len(layout.blocks)):
        places = layout.block_tensors(index)
        for name in rotary.changed_names(skeleton.hf_config, places, layout.block_prefix(index)):
            changed[places[name].tensor] = f"rotary rows in {settings.layout} order"
    text = {**text_config(source.config), rotary.KEY: settings.layout == "interleaved"}
    return rewrite_plan(source, layout, changed, with_text_config(source.config, text))


@torch.no_grad()
def run_rotary(work: StepRun, plan: RewritePlan, settings: RotarySettings) -> StepResult:
    def convert(skeleton: Skeleton, index: int, _: Stream | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        parameters, prefix = skeleton.block_parameters(index), skeleton.layout.block_prefix(index)
        changed = rotary.reordered(skeleton.hf_config, parameters, prefix, settings.layout)
        return skeleton.on_disk(index, changed), {}

    return convert_blocks(work, plan, plan.layout, convert, calibrated=False, exact=True)
