"""The step `refit`, and what `gqa` shares with it: W_o, and the layer that ends the block, fitted by ridge regression.

One forward of the original block and one of the changed one, whose layers are fitted as it passes them.

`attention`: W_o is fitted to put out what it puts out in the original. `stream`: the residual stream is to be the
original's once the layer's outputs are added to it, so the layer also makes up for what went wrong in the blocks before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..calibrate.replay import Stream, staged_block
from ..calibrate.skeleton import Skeleton, open_layout
from ..checkpoint.errors import SutureError
from ..checkpoint.families import Family
from ..checkpoint.layout import Linear, ModelLayout
from ..checkpoint.source import TensorSource
from ..quant.scheme import STORAGE
from ..surgery.ridge import RefitSettings, Ridge
from .derive import changed_in_place
from .frame import frame_factor
from .step import Prepared, StepResult, StepRun
from .walk import CONVERTING, convert_blocks, copy_blocks

Toward = Literal["attention", "stream"]

OUT, DOWN = "self_attn.o_proj", "mlp.down_proj"
_ADDED = ("input_layernorm", "post_attention_layernorm")  # what W_o and down_proj put out is added as it is


def adds_outputs(family: Family) -> bool:
    """Whether what W_o and down_proj put out is added to the residual stream, one after the other and without a norm."""
    return family.norms == _ADDED and family.norm_kind != "layernorm"


@torch.no_grad()
def refit_block(
    before: Skeleton,
    after: Skeleton,
    index: int,
    teacher: Stream,
    student: Stream,
    linears: Sequence[Linear],
    toward: Toward,
    ridge: float,
    paused: bool,
    factor: float = 1.0,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Fit `linears` of the loaded block, in forward order: W_o `toward` its target, down_proj to the block's output.
    `factor`: how many times larger the changed model's residual stream is.

    Each is fitted when those before it are, and rounded to its stored dtype at once. Takes both streams through the
    block. Returns the new weights by disk name and, for each layer, the share of the target's energy that was missing on
    the calibration tokens before and after.
    """
    made: dict[str, Tensor] = {}
    notes: dict[str, Any] = {}
    sums = [Ridge.zeros(linear.in_features, linear.out_features, after.device) for linear in linears]
    seen = [0] * len(linears)
    middle: dict[str, Tensor] = {}

    def observe(stage: int, inputs: Any) -> None:
        batch, module = seen[stage], _module(after, linears[stage])
        seen[stage] += 1
        old = teacher.hidden[batch].to(after.device, copy=True)  # the next line writes there
        put_out = _advance(before, index, teacher, batch) if stage == 0 else None
        if linears[stage].role == DOWN:
            wanted = factor * teacher.hidden[batch].to(after.device) - middle.pop("stream")
        else:
            assert put_out is not None
            stream = student.hidden[batch].to(after.device)
            wanted = factor * put_out if toward == "attention" else factor * (old + put_out) - stream
        missing = wanted - module.forward(inputs)  # not module(): the hook that stops the block's forward would stop it
        sums[stage].add(inputs.flatten(0, -2), missing.flatten(0, -2), wanted)

    def change(stage: int) -> None:
        linear, found = linears[stage], sums[stage].solve(ridge)
        parameter = _module(after, linear).get_parameter("weight")
        name = linear.place.tensor
        new = (parameter.double() + found.delta).to(STORAGE[after.source.dtypes[name]])
        parameter.data.copy_(new)
        made[name] = new.cpu()
        notes[linear.name] = {
            "method": "ridge",
            "missing_before": round(found.before, 6),
            "missing_after": round(found.after, 6),
        }

    def remember(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        middle["stream"] = inputs[0]

    second_norm = after.model.get_submodule(f"{after.layout.block_prefix(index)}{after.family.norms[1]}")
    handle = second_norm.register_forward_pre_hook(remember)
    try:
        staged_block(after, index, student, [[linear] for linear in linears], observe, change, paused)
    finally:
        handle.remove()
    return made, notes


def _advance(before: Skeleton, index: int, teacher: Stream, batch: int) -> Tensor:
    """Take one batch through the original block; what its W_o put out."""
    found: list[Tensor] = []

    def see(module: nn.Module, inputs: Any, output: Tensor) -> None:
        found.append(output)

    layer = before.model.get_submodule(f"{before.layout.block_prefix(index)}{OUT}")
    handle = layer.register_forward_hook(see)
    try:
        teacher.replace(batch, teacher.through(before, index, batch))
    finally:
        handle.remove()
    return found[0]


def _module(skeleton: Skeleton, linear: Linear) -> nn.Module:
    return skeleton.model.get_submodule(linear.module)


# ---- the step


@dataclass(frozen=True)
class RefitPlan(Prepared):
    layout: ModelLayout
    chosen: frozenset[str]  # names of the layers to fit


def prepare(source: TensorSource, settings: RefitSettings) -> RefitPlan:
    """Plan the step from names and shapes. Raises SutureError when no layer can be fitted."""
    layout = open_layout(source)
    roles = {OUT if name == "o_proj" else DOWN for name in settings.layers}
    chosen = [linear for linear in layout.linears if linear.role in roles]
    model_type = layout.family.model_type
    if not adds_outputs(layout.family):
        raise SutureError(
            f"refit: {model_type} does not add what W_o and down_proj put out to the residual stream as it is, one after "
            "the other",
            "remove the step; gqa's own refit: attention may be possible",
        )
    if not chosen:
        raise SutureError(f"refit: no layer of this {model_type} is one of {', '.join(settings.layers)}", "remove it")
    tensors = {linear.place.tensor for linear in chosen}
    how = "fitted to the original by ridge regression"
    specs, accounts = changed_in_place(
        source, layout, dict.fromkeys(sorted(tensors), how), verb="fitted", hint="refit before the step that quantizes"
    )
    return RefitPlan(
        specs=specs,
        config=source.config,
        accounts=accounts,
        notes=(),
        n_blocks=len(layout.blocks),
        working_blocks=CONVERTING,
        layout=layout,
        chosen=frozenset(linear.name for linear in chosen),
    )


def rehearsal(plan: RefitPlan, settings: RefitSettings) -> tuple[str, RefitSettings]:
    """Without text the step copies."""
    return "refit", settings


def run(work: StepRun, plan: RefitPlan, settings: RefitSettings) -> StepResult:
    """Fit each block to the recipe's model, whose residual stream it is to restore."""
    factor = frame_factor("refit", work.original, work.checkpoint, work.probe)
    if work.text is None:
        return copy_blocks(work, plan, plan.layout)

    def convert(skeleton: Skeleton, index: int, stream: Stream | None) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        return {}, {}

    def refine(
        before: Skeleton, after: Skeleton, index: int, teacher: Stream, student: Stream
    ) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        linears = [x for group in after.layout.blocks[index] for x in group if x.name in plan.chosen]
        return refit_block(
            before, after, index, teacher, student, linears, "stream", settings.ridge, work.paused, factor
        )

    result = convert_blocks(
        work,
        plan,
        plan.layout,
        convert,
        calibrated=False,
        measured=True,
        refine=refine,
        teacher=work.original,
    )
    notes = result.modules.values()
    share = {key: round(sum(note[key] for note in notes) / max(len(notes), 1), 6) for key in _SHARES}
    return replace(result, receipt={"compared_with": "the original", **share, **result.receipt})


_SHARES = ("missing_before", "missing_after")  # of the targets' energy, mean over the layers
