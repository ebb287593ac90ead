"""The step `layers`: each output layer is a copy of an input layer under its new number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calibrate.replay import Stream
from ..calibrate.skeleton import Skeleton, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import ModelLayout, text_config, with_text_config
from ..checkpoint.manifest import Account
from ..checkpoint.source import TensorSource
from ..checkpoint.writer import TensorSpec
from ..quant.scheme import STORAGE
from ..surgery.layers import LayersSettings, copies, influence_sum, new_order, reordered_config
from .derive import copied, run_derived
from .step import Prepared, StepResult, StepRun


@dataclass(frozen=True)
class LayersPlan(Prepared):
    order: tuple[int, ...]
    origin: dict[str, str]  # output tensor -> input tensor
    silent: frozenset[str]  # output tensors that are zero


def needs_text(settings: LayersSettings) -> bool:
    return settings.needs_scores


def prepare(source: TensorSource, settings: LayersSettings) -> LayersPlan:
    skeleton = open_skeleton(source)
    layout, n = skeleton.layout, skeleton.n_blocks
    order = new_order(settings, n)
    if settings.drop_least is not None and settings.influence is None:
        _same_shapes(source, layout)
    origin, silent = _renamed(source, layout, order, settings.silent_copies)
    specs = tuple(TensorSpec(name, source.dtypes[old], source.shapes[old]) for name, old in origin.items())
    names: dict[str, list[str]] = {}
    for name, old in origin.items():
        names.setdefault(old, []).append(name)
    accounts = copied(source, layout)[1]
    accounts |= {old: _account(old, names.get(old, []), silent) for old in accounts if old not in layout.stale}
    text = text_config(source.config)
    dense = None
    if layout.family.experts is not None:
        dense = [not any(linear.expert is not None for group in block for linear in group) for block in layout.blocks]
    config = with_text_config(source.config, reordered_config(text, skeleton.hf_config, order, dense))
    return LayersPlan(
        by_tensor=True,
        specs=specs,
        config=config,
        accounts=accounts,
        notes=(f"layers: the output's {len(order)} layers are the input's {_ranges(order)}",)
        if not needs_text(settings) or settings.drop_least is None
        else (f"layers: {settings.drop_least} of {n} are dropped, chosen when their influence is measured",),
        n_blocks=len(order),
        order=tuple(order),
        origin=origin,
        silent=silent,
    )


def _renamed(
    source: TensorSource, layout: ModelLayout, order: list[int], silent_copies: bool
) -> tuple[dict[str, str], frozenset[str]]:
    """(output tensor -> input tensor, output tensors that are zero)."""
    stem = f"{layout.disk_stem}{layout.family.blocks}."
    by_layer: dict[int, list[str]] = {}
    origin: dict[str, str] = {}
    for name in source.shapes:
        if name in layout.stale:
            continue
        number = name.removeprefix(stem).split(".")[0]
        if name.startswith(stem) and number.isdigit():
            by_layer.setdefault(int(number), []).append(name)
        else:
            origin[name] = name
    beyond = sorted(set(by_layer) - set(range(len(layout.blocks))))
    if beyond:
        raise SutureError(
            f"{source.source}: tensors of layer {beyond[0]}, beyond the model's {len(layout.blocks)} layers",
            "remove them first: their number would be another layer's",
        )
    writers = _writers(layout) if silent_copies else frozenset()
    silent: set[str] = set()
    for position, (old, copy) in enumerate(zip(order, copies(order), strict=True)):
        for name in by_layer[old]:
            new = f"{stem}{position}.{name.removeprefix(f'{stem}{old}.')}"
            origin[new] = name
            if copy and name in writers:
                silent.add(new)
    return origin, frozenset(silent)


def _writers(layout: ModelLayout) -> frozenset[str]:
    """Tensors through which a layer writes to the residual stream: weights and biases of its output matrices."""
    family = layout.family
    ends = [linear for linear in layout.linears if linear.role in (family.attention_out, family.mlp_out)]
    ends += [linear for linear in layout.linears if linear.expert is not None and linear.role.endswith("down_proj")]
    return frozenset(name for linear in ends for name in (linear.place.tensor, linear.bias) if name is not None)


def _account(old: str, names: list[str], silent: frozenset[str]) -> Account:
    if not names:
        return Account("dropped", reason="its layer is dropped")
    if names == [old]:
        return Account("copied", (old,))
    how = "its layer is renumbered" if len(names) == 1 else f"its layer comes {len(names)} times"
    return Account("changed", tuple(names), how + (", copies zero" if silent & set(names) else ""))


def _same_shapes(source: TensorSource, layout: ModelLayout) -> None:
    def of(index: int) -> dict[str, tuple[tuple[int, ...], str]]:
        prefix = layout.block_prefix(index)
        return {
            name.removeprefix(prefix): (source.shapes[place.tensor], source.dtypes[place.tensor])
            for name, place in layout.block_tensors(index).items()
        }

    different = next((i for i in range(1, len(layout.blocks)) if of(i) != of(0)), None)
    if different is not None:
        raise SutureError(
            f"layers: layers 0 and {different} hold tensors of different shapes, so what dropping by influence leaves "
            "cannot be planned",
            "measure the influence with scores: true, then name layers under drop",
        )


def _ranges(order: list[int]) -> str:
    """[0, 1, 2, 5, 5] as `0-2, 5, 5`."""
    runs: list[list[int]] = []
    for i in order:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@torch.no_grad()
def settle(work: StepRun, plan: LayersPlan, settings: LayersSettings) -> LayersSettings | None:
    """The settings with block influence measured on the calibration text; None when it is not needed."""
    if not settings.needs_scores:
        return None
    assert work.text is not None
    skeleton = open_skeleton(work.checkpoint, device=work.device)
    ids, positions = work.text.batches(work.batch)
    spill = work.staging.work / f"{work.key}-influence.bin"
    stream = Stream.start(skeleton, ids, work.budget, spill, positions)
    scores: list[float] = []
    for index in work.progress.track(range(skeleton.n_blocks), skeleton.n_blocks, f"{work.label}: influence"):
        skeleton.load_block(index)
        total, tokens = 0.0, 0
        for batch, hidden in enumerate(stream.hidden):
            out = stream.through(skeleton, index, batch)
            part, count = influence_sum(hidden, out.cpu())
            total, tokens = total + part, tokens + count
            stream.replace(batch, out)
        skeleton.free_block(index)
        scores.append(float(f"{total / tokens:.6g}"))
    return settings.model_copy(update={"influence": scores})


def run(work: StepRun, plan: LayersPlan, settings: LayersSettings) -> StepResult:
    skeleton = open_skeleton(work.checkpoint)

    def derive(name: str) -> Tensor | str:
        old = plan.origin[name]
        if name not in plan.silent:
            return old
        return torch.zeros(skeleton.source.shapes[old], dtype=STORAGE[skeleton.source.dtypes[old]])

    exact = _is_exact(skeleton, plan, settings)
    whole = work.verify_blocks >= plan.n_blocks
    result = run_derived(work, plan, derive, exact=exact, measure=whole)
    receipt: dict[str, Any] = {**result.receipt, "order": list(plan.order)}
    if settings.influence is not None:
        receipt["block_influence"] = list(settings.influence)
        receipt["dropped"] = sorted(set(range(skeleton.n_blocks)) - set(plan.order))
    return StepResult({}, result.expected, receipt)


def _is_exact(skeleton: Skeleton, plan: LayersPlan, settings: LayersSettings) -> bool:
    """Whether every layer comes once in its place, and copies are silent."""
    firsts = [i for i, copy in zip(plan.order, copies(plan.order), strict=True) if not copy]
    return firsts == list(range(skeleton.n_blocks)) and (settings.silent_copies or len(plan.order) == len(firsts))


def rehearsal(plan: LayersPlan, settings: LayersSettings) -> tuple[str, LayersSettings]:
    """The one layer of the preflight's model, as often as the first one comes."""
    n = max(1, plan.order.count(0)) if settings.repeat or settings.order else 1
    return "layers", LayersSettings.model_validate({"order": [0] * n, "silent_copies": settings.silent_copies})
