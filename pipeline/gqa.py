"""The step `gqa`: fewer key-value heads, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..calibrate.replay import Stream, observe_inputs
from ..calibrate.skeleton import Skeleton, open_skeleton
from ..calibrate.statistics import SecondMoment
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import ModelLayout
from ..checkpoint.source import TensorSource
from ..surgery.gqa import GQASettings, refusal, regroup, with_kv_heads
from ..surgery.heads import (
    HeadCounts,
    attention_linears,
    attention_shapes,
    attention_tensors,
    first_linear,
    head_counts,
    out_linear,
    read_attention,
    rotary_pairs,
)
from .derive import changed_in_place
from .refit import Toward, adds_outputs, refit_block
from .step import Prepared, StepResult, StepRun
from .walk import CONVERTING, convert_blocks


@dataclass(frozen=True)
class GQAPlan(Prepared):
    layout: ModelLayout
    counts: HeadCounts
    qk_norm: bool


def prepare(source: TensorSource, settings: GQASettings) -> GQAPlan:
    """Plan the step from names and shapes. Raises SutureError for a model that cannot be converted so."""
    skeleton = open_skeleton(source)
    layout, counts = skeleton.layout, head_counts(skeleton.hf_config)
    model_type = layout.family.model_type
    ends = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
    qk_norm = any(
        role.endswith(ends) and f"{layout.block_prefix(0)}{role}.weight" in layout.places
        for role in layout.family.head_norms
    )
    refused = refusal(model_type, counts, qk_norm, settings)
    if refused is None and settings.refit == "stream" and not adds_outputs(layout.family):
        refused = (
            f"refit stream cannot be used with {model_type}: a norm stands between W_o and the residual stream",
            "use refit: attention",
        )
    if refused is not None:
        raise SutureError(f"gqa: {refused[0]}", refused[1])
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(len(layout.blocks)):
        shapes |= attention_shapes(layout, index, counts, settings.kv_heads, source.shapes)
    how = f"{counts.key_value} key-value heads merged to {settings.kv_heads} by {settings.method}"
    specs, accounts = changed_in_place(source, layout, dict.fromkeys(shapes, how), verb="merged", shapes=shapes)
    return GQAPlan(
        specs=specs,
        config=with_kv_heads(source.config, settings.kv_heads),
        accounts=accounts,
        notes=_notes(counts, qk_norm, settings),
        n_blocks=len(layout.blocks),
        working_blocks=CONVERTING,
        layout=layout,
        counts=counts,
        qk_norm=qk_norm,
    )


def _notes(counts: HeadCounts, qk_norm: bool, settings: GQASettings) -> tuple[str, ...]:
    if not qk_norm:
        return ()
    return (
        "gqa: QK norms allow mean pooling and reordering of heads only: keys are not aligned before they are merged",
    )


def needs_text(settings: GQASettings) -> bool:
    """Mean pooling goes by the weights alone."""
    return settings.method != "mean" or settings.refit != "none"


def rehearsal(plan: GQAPlan, settings: GQASettings) -> tuple[str, GQASettings]:
    """The same shapes without text."""
    return "gqa", settings.model_copy(update={"method": "mean", "grouping": "contiguous", "refit": "none"})


def run(work: StepRun, plan: GQAPlan, settings: GQASettings) -> StepResult:
    """Merge, refit when asked for, write and journal one block after another."""
    calibrated = needs_text(settings)

    def convert(skeleton: Skeleton, index: int, stream: Stream | None) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        attention = read_attention(skeleton.source, plan.layout, index, plan.counts)
        inputs = attention.q.shape[-1]
        C = torch.eye(inputs, dtype=torch.float64) if stream is None else _second_moment(skeleton, index, stream)
        pairs = rotary_pairs(_rotated(skeleton, index), plan.layout.family.rope)
        made = regroup(attention, C, pairs, settings.kv_heads, settings.method, settings.grouped)
        record = {
            "method": settings.method,
            "kv_heads": [plan.counts.key_value, settings.kv_heads],
            "groups": [list(group) for group in made.groups],
            "score_energy": None if plan.qk_norm else round(made.score_energy, 6),  # of scores before any norm
            "value_energy": round(made.value_energy, 6),
            "energy_of": "the calibration tokens" if calibrated else "the weights, every input counting the same",
        }
        return attention_tensors(plan.layout, index, made.attention), {_name(plan.layout, index): record}

    def refine(
        before: Skeleton, after: Skeleton, index: int, teacher: Stream, student: Stream
    ) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        out = out_linear(after.layout, index)
        toward: Toward = "attention" if settings.refit == "attention" else "stream"
        made, notes = refit_block(before, after, index, teacher, student, [out], toward, settings.ridge, work.paused)
        return made, {_name(plan.layout, index): {"refit": notes[out.name]}}

    refining = settings.refit != "none"
    result = convert_blocks(
        work,
        plan,
        plan.layout,
        convert,
        calibrated=calibrated,
        converted_inputs=False,  # measured: statistics of the original blocks merge better than those of drifted ones
        measured=True,
        refine=refine if refining else None,
    )
    return replace(result, receipt={**_summary(result.modules), **result.receipt})


def _name(layout: ModelLayout, index: int) -> str:
    """The attention's name on disk."""
    return next(iter(attention_linears(layout, index).values())).name.rpartition(".")[0]


def _rotated(skeleton: Skeleton, index: int) -> int:
    """How many of a head's numbers RoPE turns in this block: as many as the cosines that the model's forward gives it."""
    given = skeleton.arguments(index, 1, 2).kwargs.get("position_embeddings")
    assert given is not None, "a family without RoPE is refused"
    return int(given[0].shape[-1])


@torch.no_grad()
def _second_moment(skeleton: Skeleton, index: int, stream: Stream) -> Tensor:
    """E[x xᵀ] [D + 1, D + 1] of the attention's inputs with the constant 1 as the last; float64."""
    linear = first_linear(skeleton.layout, index)
    moment = SecondMoment.zeros(linear.in_features + 1, torch.float64, skeleton.device)

    def observe(x: Tensor) -> None:
        moment.add(torch.cat([x, torch.ones_like(x[..., :1])], dim=-1))

    observe_inputs(skeleton, index, stream, linear, observe)
    found = moment.hessian().cpu()
    if not bool(torch.isfinite(found).all()):
        raise SutureError(
            f"{linear.name}: its inputs on the calibration text hold NaN or values too large for float32",
            "a layer before it overflows: check the checkpoint",
        )
    return found


def _summary(modules: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and least retained energies over the blocks."""
    summary: dict[str, Any] = {}
    for kind in ("score_energy", "value_energy"):
        kept = [record[kind] for record in modules.values() if record[kind] is not None]
        if kept:
            summary |= {kind: round(sum(kept) / len(kept), 6), f"{kind}_least": min(kept)}
    return summary
