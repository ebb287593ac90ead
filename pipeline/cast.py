"""The steps `cast` and `reshard`: every tensor by itself, in another dtype or another file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calibrate.skeleton import open_layout
from ..checkpoint.errors import SutureError
from ..checkpoint.manifest import Account
from ..checkpoint.source import TensorSource
from ..checkpoint.writer import TensorSpec
from ..quant.scheme import STORAGE
from ..surgery.cast import DTYPES, CastSettings, ReshardSettings, cast, cast_config, summary
from .derive import copied, most_made, run_derived
from .step import Prepared, StepResult, StepRun


@dataclass(frozen=True)
class CastPlan(Prepared):
    changed: frozenset[str]


def prepare(source: TensorSource, settings: CastSettings) -> CastPlan:
    """Raises SutureError when every tensor has the dtype already."""
    layout = open_layout(source)
    code, _ = DTYPES[settings.dtype]
    changed = frozenset(
        name for name, dtype in source.dtypes.items() if dtype in STORAGE and dtype != code and name not in layout.stale
    )
    if not changed:
        raise SutureError(f"cast: every tensor is {settings.dtype} already", "remove the step")
    others = sorted({dtype for dtype in source.dtypes.values() if dtype not in STORAGE})
    notes = (f"cast: tensors of {', '.join(others)} stay as they are",) if others else ()
    specs, accounts = copied(source, layout)
    specs = tuple(TensorSpec(spec.name, code, spec.shape) if spec.name in changed else spec for spec in specs)
    accounts |= {name: Account("changed", (name,), f"cast from {source.dtypes[name]} to {code}") for name in changed}
    config = cast_config(source.config, settings.dtype)
    apart = [
        spec
        for spec in specs
        if spec.name in changed and STORAGE[source.dtypes[spec.name]].itemsize != STORAGE[code].itemsize
    ]
    return CastPlan(
        by_tensor=True,
        working=most_made(apart),
        specs=specs,
        config=config,
        accounts=accounts,
        notes=notes,
        n_blocks=len(layout.blocks),
        changed=changed,
    )


def run(work: StepRun, plan: CastPlan, settings: CastSettings) -> StepResult:
    dtype = DTYPES[settings.dtype][1]
    records: dict[str, dict[str, Any]] = {}

    def derive(name: str) -> Tensor | str:
        if name not in plan.changed:
            return name
        made, records[name] = cast(name, work.checkpoint.read(name), dtype)
        return made

    def record(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: records[name] for name in names if name in records}

    narrow = dtype != torch.float32
    result = run_derived(work, plan, derive, exact=not narrow, record=record)
    total = summary(result.modules)
    touched = {name: parts for name, parts in result.modules.items() if parts["changed"]}
    worst = sorted(touched, key=lambda name: -touched[name]["changed"])[:10]
    most = {name: touched[name] for name in worst}
    return StepResult({}, result.expected, {**result.receipt, **total, "most_changed": most})


def prepare_reshard(source: TensorSource, settings: ReshardSettings) -> Prepared:
    layout = open_layout(source)
    specs, accounts = copied(source, layout)
    return Prepared(
        by_tensor=True,
        specs=specs,
        config=dict(source.config),
        accounts=accounts,
        notes=(),
        n_blocks=len(layout.blocks),
        shard_bytes=settings.max_shard_size,
    )


def run_reshard(work: StepRun, plan: Prepared, settings: ReshardSettings) -> StepResult:
    result = run_derived(work, plan, lambda name: name, exact=True)
    return StepResult({}, result.expected, {**result.receipt, "files": len(work.shards.shards)})
