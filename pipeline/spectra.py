"""The step `spectra`: every tensor is copied, and every matrix's spectrum goes into the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calibrate.observe import observe_inputs
from ..calibrate.replay import Stream
from ..calibrate.skeleton import Skeleton, open_layout
from ..calibrate.statistics import CHUNK, EXPERT_CHUNK, SecondMoment
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear, ModelLayout
from ..checkpoint.source import TensorSource
from ..surgery.spectra import SpectraSettings, break_even, described, energies
from .derive import copied
from .step import Prepared, StepResult, StepRun
from .walk import CONVERTING, convert_blocks


@dataclass(frozen=True)
class SpectraPlan(Prepared):
    layout: ModelLayout


def needs_text(settings: SpectraSettings) -> bool:
    return settings.activations


def rehearsal(plan: SpectraPlan, settings: SpectraSettings) -> tuple[str, SpectraSettings]:
    return "spectra", settings.model_copy(update={"activations": False})


def prepare(source: TensorSource, settings: SpectraSettings) -> SpectraPlan:
    """Raises SutureError for a rank that no matrix has."""
    layout = open_layout(source)
    widest = max(min(linear.out_features, linear.in_features) for linear in layout.linears)
    outside = [rank for rank in settings.ranks or () if not 0 < rank <= widest]
    if outside:
        raise SutureError(f"spectra: ranks: {outside[0]} is not between 1 and {widest}, the largest full rank here")
    specs, accounts = copied(source, layout)
    return SpectraPlan(
        specs=specs,
        config=dict(source.config),
        accounts=accounts,
        notes=(),
        n_blocks=len(layout.blocks),
        working_blocks=CONVERTING,
        layout=layout,
    )


@torch.no_grad()
def run(work: StepRun, plan: SpectraPlan, settings: SpectraSettings) -> StepResult:
    def convert(skeleton: Skeleton, index: int, stream: Stream | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        moments = _moments(skeleton, index, stream) if stream is not None else {}
        records = {}
        for group in skeleton.layout.blocks[index]:
            for linear in group:
                weight = skeleton.model.get_parameter(f"{linear.module}.weight").data
                records[linear.name] = _record(linear, weight, moments.get(linear.name), settings)
        return {}, records

    result = convert_blocks(work, plan, plan.layout, convert, calibrated=settings.activations)
    by_role: dict[str, list[dict[str, Any]]] = {}
    for linear in plan.layout.linears:
        role = linear.role.rsplit(".", 1)[-1]
        by_role.setdefault(role, []).append(result.modules[linear.name])
    return StepResult(
        {}, result.expected, {"spectra": result.modules, "by_role": {r: _mean(found) for r, found in by_role.items()}}
    )


def _record(linear: Linear, weight: Tensor, moment: SecondMoment | None, settings: SpectraSettings) -> dict[str, Any]:
    shape = (linear.out_features, linear.in_features)
    matrix = weight.T if linear.conv1d else weight
    record: dict[str, Any] = {"shape": list(shape), "break_even_rank": break_even(shape)}
    record["weights"] = described(energies(matrix, None), shape, settings.ranks)
    if moment is not None:
        if moment.tokens:
            record["outputs"] = described(energies(matrix, moment.hessian()), shape, settings.ranks)
        record["tokens"] = moment.tokens
    return record


def _moments(skeleton: Skeleton, index: int, stream: Stream) -> dict[str, SecondMoment]:
    """Second moment of every linear layer's inputs over the stream; layers that share an input share it."""
    found: dict[str, SecondMoment] = {}
    watch: dict[str, Any] = {}
    for group in skeleton.layout.blocks[index]:
        by_expert: dict[int | None, SecondMoment] = {}
        for linear in group:
            if linear.expert not in by_expert:
                chunk = CHUNK if linear.expert is None else EXPERT_CHUNK
                by_expert[linear.expert] = SecondMoment.zeros(linear.in_features, device=skeleton.device, chunk=chunk)
            found[linear.name] = by_expert[linear.expert]
        watch[_watched(skeleton, index, group[0])] = _adder(by_expert)
    observe_inputs(skeleton, index, stream, watch)
    return found


def _watched(skeleton: Skeleton, index: int, linear: Linear) -> str:
    """The module whose input is that of the linear layer, or of all experts' at once."""
    experts = skeleton.family.experts
    if linear.expert is None or experts is None:
        return linear.module
    kind = "reach_down" if linear.role.endswith("down_proj") else "reach_gate_up"
    return f"{skeleton.layout.block_prefix(index)}{experts.module}.{kind}"


def _adder(by_expert: dict[int | None, SecondMoment]) -> Any:
    def add(x: Any) -> None:
        for expert, moment in by_expert.items():
            moment.add(x if expert is None else x[expert])

    return add


def _mean(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all layers of one role: mean share of the full rank that retains each share of energy."""
    means: dict[str, Any] = {"matrices": len(records)}
    for kind in ("weights", "outputs"):
        kept = [record for record in records if kind in record]
        if kept:
            shares = kept[0][kind]["rank_for"]
            means[kind] = {
                share: float(f"{sum(r[kind]['rank_for'][share] / min(r['shape']) for r in kept) / len(kept):.4g}")
                for share in shares
            }
    return means
