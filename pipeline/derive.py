"""Steps whose every output tensor is a copy of one input tensor, or made from it alone: written one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..calibrate.skeleton import finite, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.families import family_of
from ..checkpoint.layout import ModelLayout, text_config
from ..checkpoint.manifest import Account
from ..checkpoint.source import DerivedSource, TensorSource
from ..checkpoint.writer import ShardWriter, TensorSpec
from ..quant.scheme import STORAGE
from .step import Prepared, StepResult, StepRun
from .walk import check_exact, distance, planned_source, probe_logits

Derive = Callable[[str], Tensor | str]
"""Name of an output tensor -> the tensor in its planned dtype, or the name of the input tensor that it is a copy of."""


def copied(source: TensorSource, layout: ModelLayout) -> tuple[tuple[TensorSpec, ...], dict[str, Account]]:
    """Specs and accounts of an output that copies all tensors but the stale ones."""
    specs = tuple(
        TensorSpec(name, source.dtypes[name], shape)
        for name, shape in source.shapes.items()
        if name not in layout.stale
    )
    accounts = {spec.name: Account("copied", (spec.name,)) for spec in specs}
    return specs, accounts | {name: Account("dropped", reason=reason) for name, reason in layout.stale.items()}


def changed_in_place(
    source: TensorSource,
    layout: ModelLayout,
    changed: Mapping[str, str],
    *,
    verb: str = "changed",
    hint: str = "give the unquantized checkpoint",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[tuple[TensorSpec, ...], dict[str, Account]]:
    """Specs and accounts when the tensors `changed` (disk name -> how) change and all others are copied.

    `shapes`: of those whose shape changes. Raises SutureError for a tensor of a dtype that is not plain floating point.
    """
    for name in changed:
        if source.dtypes[name] not in STORAGE:
            raise SutureError(
                f"{source.source}: {name} is {source.dtypes[name]}; only {', '.join(STORAGE)} weights can be {verb}",
                hint,
            )
    specs, accounts = copied(source, layout)
    if shapes is not None:
        specs = tuple(TensorSpec(spec.name, spec.dtype, shapes.get(spec.name, spec.shape)) for spec in specs)
    return specs, accounts | {name: Account("changed", (name,), how) for name, how in changed.items()}


def most_made(specs: Iterable[TensorSpec]) -> int:
    """Bytes of the largest of new tensors, which is in memory beside what it is made of."""
    return max((spec.nbytes for spec in specs), default=0)


@torch.no_grad()
def run_derived(
    work: StepRun,
    plan: Prepared,
    derive: Derive,
    *,
    exact: bool = False,
    measure: bool = True,
    unrounded: Derive | None = None,
    compared: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    record: Callable[[tuple[str, ...]], dict[str, Any]] | None = None,
) -> StepResult:
    """Write every tensor as `derive` makes it; resumes after a kill.

    `record(names)`: what to keep of tensors that were just written, by name; comes back in the result's `modules`.
    The receipt says how far the probe's logits moved; with `exact`, SutureError when that is more than float32
    rounding; with `measure` false it says nothing.
    `unrounded`: `derive` in float32, for steps that compute: the receipt is of that, while the result's logits are of
    what is written.
    `compared`: (original logits, logits) -> what of them is compared, for outputs whose vocabulary differs.
    """
    parts: dict[str, Any] = {}
    with ShardWriter(work.directory, work.shards) as writer:
        groups = list(_groups(plan))
        for number, specs in work.progress.track(list(enumerate(groups)), len(groups), work.label):
            entry = work.staging.find(step=work.key, group=number)
            if entry is None:
                for spec in specs:
                    _write(work, writer, spec, derive(spec.name))
                writer.sync()
                names = tuple(spec.name for spec in specs)
                entry = {"step": work.key, "group": number, "parts": record(names) if record is not None else {}}
                work.staging.record(entry)
            parts |= entry["parts"]
    output = open_skeleton(DerivedSource(planned_source(work, plan), work.checkpoint, derive), device=work.device)
    n_blocks = min(work.verify_blocks, plan.n_blocks)
    expected = probe_logits(output, plan.probe_after(work.probe), n_blocks)
    if not measure:
        return StepResult(parts, expected)
    original = open_skeleton(work.checkpoint, device=work.device)
    whole = n_blocks == plan.n_blocks
    reference = probe_logits(original, _input_probe(plan, work.probe), original.n_blocks if whole else n_blocks)
    made = expected
    if unrounded is not None:
        proof = open_skeleton(DerivedSource(planned_source(work, plan), work.checkpoint, unrounded), device=work.device)
        made = probe_logits(proof, plan.probe_after(work.probe), n_blocks)
    pair = compared(reference, made) if compared is not None else (reference, made)
    return StepResult(parts, expected, check_exact(work.label, *pair) if exact else distance(*pair))


def _input_probe(plan: Prepared, probe: Tensor) -> Tensor:
    """The probe's tokens that the output has, as the input numbers them."""
    if plan.token_map is None:
        return probe
    back = {new: old for old, new in enumerate(plan.token_map) if new >= 0}
    return plan.probe_after(probe).apply_(lambda new: back[new])


def _write(work: StepRun, writer: ShardWriter, spec: TensorSpec, made: Tensor | str) -> None:
    if isinstance(made, str):
        if work.checkpoint.dtypes[made] in STORAGE:
            finite(work.checkpoint.read(made), made, work.checkpoint.source)
        writer.write_bytes(spec.name, work.checkpoint.read_bytes(made))
    else:
        writer.write(spec.name, finite(made, spec.name, work.checkpoint.source))


def _groups(plan: Prepared) -> Iterator[list[TensorSpec]]:
    """Tensors outside the blocks, then each block's: what is journaled as one."""
    family = family_of(str(text_config(plan.config)["model_type"]))
    inside: dict[str, int] = {}
    for index in range(plan.n_blocks):
        beginnings = tuple(f"{stem}{family.blocks}.{index}." for stem in {family.stem, *family.disk_stems})
        inside |= {spec.name: index for spec in plan.specs if spec.name.startswith(beginnings)}
    yield [spec for spec in plan.specs if spec.name not in inside]
    for index in range(plan.n_blocks):
        yield [spec for spec in plan.specs if inside.get(spec.name) == index]
