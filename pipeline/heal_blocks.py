"""`heal`, block by block: each is trained to put out what the original's did, one in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..calibrate.replay import Stream, Window, run_block
from ..calibrate.skeleton import Skeleton
from ..lora.settings import HealSettings
from ..quant.scheme import STORAGE
from ..surgery.heal import HealOptions, heal_block
from .frame import frame_factor
from .heal_train import arithmetic
from .judge import Split
from .step import StepResult, StepRun
from .walk import convert_blocks

if TYPE_CHECKING:
    from .heal import HealPlan


def heal_blocks(work: StepRun, plan: HealPlan, settings: HealSettings, parts: Split) -> StepResult:
    """Inputs come from the healed blocks before, targets from the original ones; the held-out sequences choose epochs."""
    factor = frame_factor("heal", work.original, work.checkpoint, work.probe)

    def refine(
        before: Skeleton, after: Skeleton, index: int, teacher: Stream, student: Stream
    ) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        run_block(before, index, teacher)
        prefix = after.layout.block_prefix(index)
        names = [name.removeprefix(prefix) for name in plan.trained[index]]
        weights = {name: after.model.get_parameter(prefix + name).detach() for name in names}
        places = after.layout.block_tensors(index)
        dtypes = {name: STORAGE[after.source.dtypes[places[prefix + name].tensor]] for name in names}

        def forward(changed: Mapping[str, Tensor], window: Window) -> Tensor:
            with arithmetic(settings, after.device):
                return after.block_forward(index, window[0].to(after.device), changed, window[1]).float()

        targets = [hidden for hidden, _ in teacher.windows()]
        fitted = heal_block(
            forward,
            weights,
            dtypes,
            student.windows(),
            [factor * target.to(after.device) for target in targets] if factor != 1 else targets,
            parts.n_held,
            HealOptions(settings.value("epochs"), settings.value("rate"), settings.seed + index),
        )
        for name, tensor in fitted.state.items():
            after.model.get_parameter(prefix + name).data.copy_(tensor)
        run_block(after, index, student)
        made = after.on_disk(index, {prefix + name: tensor for name, tensor in fitted.state.items()})
        record = {
            "method": "heal blocks",
            "block_error_before": round(fitted.before, 8),
            "block_error_after": round(fitted.after, 8),
            "epoch": fitted.epoch,
        }
        block = f"{after.layout.disk_stem}{after.family.blocks}.{index}"
        return {name: tensor.cpu() for name, tensor in made.items()}, {block: record}

    result = convert_blocks(
        work,
        plan,
        plan.layout,
        lambda *_: ({}, {}),
        calibrated=False,
        measured=True,
        refine=refine,
        teacher=work.original,
    )
    errors = [(record["block_error_before"], record["block_error_after"]) for record in result.modules.values()]
    mean = [round(sum(pair[i] for pair in errors) / len(errors), 8) for i in (0, 1)]
    summary = {"block_error_before": mean[0], "block_error_after": mean[1]}
    return replace(result, receipt={**summary, **result.receipt})
