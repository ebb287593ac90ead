"""The steps `fuse` and `unfuse`: matrices joined or cut by rows, and the config of the class that reads them so."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..calibrate.skeleton import Skeleton, hf_text_config, meta_model, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.families import family_of
from ..checkpoint.layout import ModelLayout, text_config
from ..checkpoint.manifest import Account
from ..checkpoint.source import TensorSource
from ..checkpoint.writer import TensorSpec
from ..quant.scheme import STORAGE
from ..surgery.fuse import (
    PHI_HEAD_BIAS,
    FuseSettings,
    Rows,
    Twin,
    UnfuseSettings,
    check_fusable,
    converted_config,
    fused_block,
    fused_config,
    fused_names,
    fused_rows,
    phi_block,
    phi_config,
    phi_names,
    twin_of,
    unfused_type,
)
from ..surgery.heads import HeadCounts, head_counts
from .derive import copied, most_made, run_derived
from .step import Prepared, StepResult, StepRun


@dataclass(frozen=True)
class FusePlan(Prepared):
    pieces: dict[str, tuple[tuple[str, int, int], ...]]  # output -> (input, first row, end) of what it is joined from


@dataclass(frozen=True)
class HeadsPlan(Prepared):
    """Between Phi and a class whose rows are heads or groups of (q, k, v)."""

    layout: ModelLayout
    twin: Twin
    counts: HeadCounts
    same: dict[str, str]  # output -> the input that it is a copy of
    block_of: dict[str, tuple[int, str]]  # output -> (block, name under the block)


def prepare_unfuse(source: TensorSource, settings: UnfuseSettings) -> FusePlan | HeadsPlan:
    """Raises SutureError when no stock class reads the parts."""
    skeleton = open_skeleton(source)
    model_type = unfused_type(skeleton.family, skeleton.hf_config)
    if model_type == "phi":
        return _between(source, skeleton, to_phi=True)
    rows = fused_rows(skeleton.hf_config)
    pieces: dict[str, tuple[tuple[str, int, int], ...]] = {}
    for prefix in _prefixes(skeleton):
        for part in rows:
            pieces[f"{prefix}{part.part}.weight"] = ((f"{prefix}{part.fused}.weight", part.start, part.stop),)
    return _plan(source, skeleton, model_type, pieces, "cut into its parts")


def prepare_fuse(source: TensorSource, settings: FuseSettings) -> FusePlan | HeadsPlan:
    """Raises SutureError when no stock class reads the model fused."""
    skeleton = open_skeleton(source)
    check_fusable(skeleton.family, skeleton.hf_config)
    if skeleton.family.model_type == "phi":
        return _between(source, skeleton, to_phi=False)
    by_fused: dict[str, list[Rows]] = {}
    for part in fused_rows(skeleton.hf_config):
        by_fused.setdefault(part.fused, []).append(part)
    pieces = {
        f"{prefix}{fused}.weight": tuple((f"{prefix}{part.part}.weight", 0, part.stop - part.start) for part in parts)
        for prefix in _prefixes(skeleton)
        for fused, parts in by_fused.items()
    }
    return _plan(source, skeleton, "phi3", pieces, "joined with its siblings")


def _prefixes(skeleton: Skeleton) -> list[str]:
    layout = skeleton.layout
    return [f"{layout.disk_stem}{layout.family.blocks}.{index}." for index in range(skeleton.n_blocks)]


def _plan(
    source: TensorSource,
    skeleton: Skeleton,
    model_type: str,
    pieces: dict[str, tuple[tuple[str, int, int], ...]],
    how: str,
) -> FusePlan:
    if text_config(source.config) != source.config:
        raise SutureError(
            f"{source.source}: its text model is part of a {source.config['model_type']} model, which keeps its class",
            "take the text model out first",
        )
    specs, accounts = copied(source, skeleton.layout)
    outputs: dict[str, list[str]] = {}
    for name, parts in pieces.items():
        for old, _, _ in parts:
            outputs.setdefault(old, []).append(name)
    kept = {spec.name: [spec] for spec in specs}
    for old, names in outputs.items():
        kept[old] = [
            TensorSpec(name, source.dtypes[old], (sum(b - a for _, a, b in pieces[name]), *source.shapes[old][1:]))
            for name in names
            if pieces[name][0][0] == old  # a joined one stands where its first part stood
        ]
        accounts[old] = Account("changed", tuple(names), how)
    made = tuple(spec for new in kept.values() for spec in new)
    return FusePlan(
        by_tensor=True,
        working=2 * most_made(spec for spec in made if spec.name in pieces),  # of its parts, then in float32
        specs=made,
        config=converted_config(source.config, skeleton.hf_config, model_type),
        accounts=accounts,
        notes=(f"the output is a {model_type} model",),
        n_blocks=skeleton.n_blocks,
        pieces=pieces,
    )


def _between(source: TensorSource, skeleton: Skeleton, *, to_phi: bool) -> HeadsPlan:
    layout, family, twin = skeleton.layout, skeleton.family, twin_of(skeleton.hf_config)
    config = (phi_config if to_phi else fused_config)(twin, source.config, skeleton.hf_config)
    new_names = phi_names if to_phi else fused_names
    new = family_of(str(config["model_type"]))
    renamed = twin.outside if to_phi else {phi: other for other, phi in twin.outside.items()}
    specs, accounts = copied(source, layout)
    same = {name: name for name in layout.unknown}
    block_of: dict[str, tuple[int, str]] = {}
    made: dict[str, list[str]] = {}  # input -> outputs
    for name, place in layout.places.items():
        rest = name.removeprefix(family.stem)
        path, _, leaf = rest.rpartition(".")
        if place.tensor == layout.head_bias or (name.startswith(f"{family.head}.") and layout.head is None):
            continue
        if rest.startswith(f"{family.blocks}."):
            _, number, local = rest.split(".", 2)
            ends = new_names(twin, local)
            bias = f"{name.removesuffix('weight')}bias"
            if to_phi and leaf == "weight" and bias not in layout.places:
                ends += tuple(f"{end.removesuffix('weight')}bias" for end in ends)  # phi has one everywhere
            into = {f"{new.stem}{new.blocks}.{number}.{end}": end for end in ends}
            block_of |= {output: (int(number), end) for output, end in into.items()}
            made[place.tensor] = list(into)
        else:
            output = (
                f"{new.head_on_disk}.weight" if place.tensor == layout.head else f"{new.stem}{renamed[path]}.{leaf}"
            )
            made[place.tensor], same[output] = [output], place.tensor
    if to_phi:
        made[layout.head or layout.embedding].append(PHI_HEAD_BIAS)
    dtypes = {output: source.dtypes[old] for old, outputs in reversed(made.items()) for output in outputs}
    model = meta_model(hf_text_config(config, source.source), new, skeleton.device)
    shapes = {
        f"{new.head_on_disk}.weight" if name == f"{new.head}.weight" else name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if layout.head or name != f"{new.head}.weight"
    }
    how = f"{new.model_type}'s names; heads and norms as it has them"
    for old, outputs in made.items():
        if source.dtypes[old] not in STORAGE:
            raise SutureError(f"{source.source}: {old} is {source.dtypes[old]}", "give the unquantized checkpoint")
        accounts[old] = Account("changed", tuple(outputs), how)
    if layout.head_duplicate:
        accounts[layout.head_duplicate] = Account("dropped", reason=f"equal to {layout.embedding}")
    if layout.head_bias:
        accounts[layout.head_bias] = Account("dropped", reason=f"0; the head of {new.model_type} has none")
    written = [TensorSpec(name, dtypes[name], shape) for name, shape in shapes.items()]
    return HeadsPlan(
        by_tensor=True,
        working=2 * most_made(written),
        specs=tuple(written + [spec for spec in specs if spec.name in layout.unknown]),
        config=config,
        accounts=accounts,
        notes=(f"the output is a {new.model_type} model",),
        n_blocks=skeleton.n_blocks,
        layout=layout,
        twin=twin,
        counts=head_counts(skeleton.hf_config),
        same=same,
        block_of=block_of,
    )


def _run_between(work: StepRun, plan: HeadsPlan) -> StepResult:
    layout, read = plan.layout, work.checkpoint.read
    dtypes = {spec.name: STORAGE[spec.dtype] for spec in plan.specs}
    shapes = {spec.name: spec.shape for spec in plan.specs}
    if layout.head_bias and bool(read(layout.head_bias).any()):
        raise SutureError(
            f"fuse: {layout.head_bias} is not 0, and {plan.twin.model_type}, the class with q, k and v in one matrix, has no "
            "bias there",
            "leave it as it is",
        )
    convert = fused_block if layout.family.model_type == "phi" else phi_block

    @lru_cache(maxsize=1)
    def block(index: int) -> dict[str, Tensor]:
        prefix = layout.block_prefix(index)
        places = layout.block_tensors(index)
        old = {name.removeprefix(prefix): read(place.tensor) for name, place in places.items()}
        return convert(plan.twin, old, plan.counts)

    def unrounded(name: str) -> Tensor | str:
        if name in plan.same:
            return plan.same[name]
        if name == PHI_HEAD_BIAS:
            return torch.zeros(shapes[name], dtype=dtypes[name])
        index, local = plan.block_of[name]
        return block(index)[local]

    def derive(name: str) -> Tensor | str:
        made = unrounded(name)
        return made if isinstance(made, str) else made.to(dtypes[name])

    return run_derived(work, plan, derive, exact=True, unrounded=unrounded)


def run(work: StepRun, plan: FusePlan | HeadsPlan, settings: FuseSettings | UnfuseSettings) -> StepResult:
    """Raises SutureError for a Phi model whose head has a bias, which the fused classes cannot hold."""
    if isinstance(plan, HeadsPlan):
        return _run_between(work, plan)

    def derive(name: str) -> Tensor | str:
        parts = plan.pieces.get(name)
        if parts is None:
            return name
        return torch.cat([work.checkpoint.read(old)[start:stop] for old, start, stop in parts])

    return run_derived(work, plan, derive, exact=True)
