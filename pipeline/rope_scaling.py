"""The step `rope_scaling`: every tensor is copied, positions are stretched in config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..calibrate.skeleton import Skeleton, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import text_config, with_text_config
from ..checkpoint.source import TensorSource
from ..surgery.rope_scaling import (
    RopeScalingSettings,
    attention_factor,
    current_rope,
    explained,
    frequencies,
    scaled_config,
)
from .derive import copied, run_derived
from .step import Prepared, StepResult, StepRun, planned_output


@dataclass(frozen=True)
class RopePlan(Prepared):
    numbers: dict[str, Any]


def prepare(source: TensorSource, settings: RopeScalingSettings) -> RopePlan:
    """Raises SutureError for a model without rotary embedding, with one per kind of layer, or scaled already; and when
    transformers' class does not compute what the settings mean."""
    skeleton = open_skeleton(source)
    layout = skeleton.layout
    rope = current_rope(layout.family, skeleton.hf_config)
    text = text_config(source.config)
    stated = getattr(skeleton.hf_config, "max_position_embeddings", None)
    context = settings.original_context or stated
    if context is None:
        raise SutureError("rope_scaling: config.json has no max_position_embeddings", "give original_context")
    if settings.type == "dynamic" and settings.original_context not in (None, stated):
        raise SutureError(
            f"rope_scaling: dynamic scaling starts at max_position_embeddings, which is {stated}",
            "leave original_context out, or correct config.json",
        )
    inv_freq, _ = _rotary(skeleton)
    d, base = 2 * inv_freq.numel(), float(rope["rope_theta"])
    config = with_text_config(source.config, scaled_config(text, rope, context, settings, d))
    specs, accounts = copied(source, layout)
    plan = RopePlan(
        by_tensor=True,
        specs=specs,
        config=config,
        accounts=accounts,
        notes=(),
        n_blocks=len(layout.blocks),
        numbers=explained(base, d, context, settings),
    )
    found, scale = _rotary(open_skeleton(planned_output(source.source, plan, source)))
    wanted = frequencies(base, d, context, settings)
    if not torch.allclose(found.double(), wanted, rtol=1e-4, atol=0) or abs(scale - attention_factor(settings)) > 1e-6:
        raise SutureError(
            f"rope_scaling: transformers' {layout.family.model_type} does not rotate as type: {settings.type} means",
            "choose another type",
        )
    return plan


def _rotary(skeleton: Skeleton) -> tuple[torch.Tensor, float]:
    """(frequencies of the pairs, factor of cos and sin) as transformers computes them."""
    for module in skeleton.backbone.modules():
        inv_freq = getattr(module, "inv_freq", None)
        if isinstance(inv_freq, torch.Tensor):
            return inv_freq, float(getattr(module, "attention_scaling", 1.0))
    raise SutureError(f"rope_scaling: {skeleton.family.model_type}: its rotary embedding is not where it is expected")


def run(work: StepRun, plan: RopePlan, settings: RopeScalingSettings) -> StepResult:
    result = run_derived(work, plan, lambda name: name)
    return StepResult({}, result.expected, {**result.receipt, **plan.numbers})
