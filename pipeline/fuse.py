"""The steps `fuse` and `unfuse`: matrices joined or cut by rows, and the config of the class that reads them so."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibrate.skeleton import Skeleton, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import text_config
from ..checkpoint.manifest import Account
from ..checkpoint.source import TensorSource
from ..checkpoint.writer import TensorSpec
from ..surgery.fuse import (
    FuseSettings,
    Rows,
    UnfuseSettings,
    check_fusable,
    converted_config,
    fused_rows,
    unfused_type,
)
from .derive import copied, run_derived
from .step import Prepared, StepResult, StepRun


@dataclass(frozen=True)
class FusePlan(Prepared):
    pieces: dict[str, tuple[tuple[str, int, int], ...]]  # output -> (input, first row, end) of what it is joined from


def prepare_unfuse(source: TensorSource, settings: UnfuseSettings) -> FusePlan:
    """Raises SutureError when no stock class reads the parts."""
    skeleton = open_skeleton(source)
    model_type = unfused_type(skeleton.family, skeleton.hf_config)
    rows = fused_rows(skeleton.hf_config)
    pieces: dict[str, tuple[tuple[str, int, int], ...]] = {}
    for prefix in _prefixes(skeleton):
        for part in rows:
            pieces[f"{prefix}{part.part}.weight"] = ((f"{prefix}{part.fused}.weight", part.start, part.stop),)
    return _plan(source, skeleton, model_type, pieces, "cut into its parts")


def prepare_fuse(source: TensorSource, settings: FuseSettings) -> FusePlan:
    """Raises SutureError when no stock class reads the model fused."""
    skeleton = open_skeleton(source)
    check_fusable(skeleton.family, skeleton.hf_config)
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
    return FusePlan(
        specs=tuple(spec for new in kept.values() for spec in new),
        config=converted_config(source.config, skeleton.hf_config, model_type),
        accounts=accounts,
        notes=(f"the output is a {model_type} model",),
        n_blocks=skeleton.n_blocks,
        pieces=pieces,
    )


def run(work: StepRun, plan: FusePlan, settings: FuseSettings | UnfuseSettings) -> StepResult:
    def derive(name: str) -> Tensor | str:
        parts = plan.pieces.get(name)
        if parts is None:
            return name
        return torch.cat([work.checkpoint.read(old)[start:stop] for old, start, stop in parts])

    return run_derived(work, plan, derive, exact=True)
