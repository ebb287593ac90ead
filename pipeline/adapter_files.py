"""What the adapter commands share: models opened dense, and an adapter written as a whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from .. import __version__
from ..calibrate.skeleton import Skeleton, cut, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from ..checkpoint.manifest import MANIFEST, SCHEMA, file_hashes, to_json
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.source import TensorSource
from ..checkpoint.staging import Staging, open_staging, write_whole
from ..lora.adapter import WEIGHTS, Adapter, open_adapter
from ..lora.compose import NewAdapter, runtime_names
from ..lora.config import CONFIG
from ..lora.match import Matched, Weighted, match
from ..quant.decode import dense_view

# Architectures in which PEFT takes these names for experts' parameters, also in a block without experts.
_WITH_EXPERTS = ("deepseek_v3", "qwen3_moe")
_EXPERTS_NAMES = (".gate_proj", ".up_proj", ".down_proj")


@dataclass(frozen=True)
class Written:
    """An adapter that was written."""

    output: Path
    record: dict[str, Any]  # its manifest's `recipe` and `modules`
    n_parameters: int
    notes: tuple[str, ...] = field(default=())


def write_adapter(
    new: NewAdapter,
    output: Path,
    command: str,
    settings: Mapping[str, Any],
    source: Mapping[str, Any],
    modules: Mapping[str, Any],
    notes: Sequence[str],
    overwrite: bool,
) -> Written:
    """Stage, reopen with every check that a stranger's adapter gets, and rename into place."""
    with open_staging(output, {"command": command}, overwrite, False) as staging:
        return commit_adapter(staging, new, {"command": command, **settings}, source, modules, notes)


def commit_adapter(
    staging: Staging,
    new: NewAdapter,
    recipe: Mapping[str, Any],
    source: Mapping[str, Any],
    modules: Mapping[str, Any],
    notes: Sequence[str],
    receipts: Sequence[Mapping[str, Any]] = (),
) -> Written:
    """`write_adapter` into a staging that is open already."""
    write_whole(staging.model / CONFIG, to_json(new.config))
    write_whole(staging.model / WEIGHTS, save(new.tensors, metadata=new.metadata))
    reopened = open_adapter(staging.model)
    for key, tensor in new.tensors.items():
        if not torch.equal(reopened.read(key), tensor):
            raise SutureError(f"{staging.output}: {key} reads back with other values", "please report this")
    manifest = {
        "suture": __version__,
        "schema": SCHEMA,
        "recipe": dict(recipe),
        "source": dict(source),
        "history": [],
        "inputs": {},
        "outputs": {k: {"dtype": "F32", "shape": list(t.shape)} for k, t in sorted(new.tensors.items())},
        "receipts": list(receipts),
        "modules": dict(modules),
        "fallbacks": {},
        "notes": list(notes),
        "files": file_hashes(staging.model),
    }
    if not receipts:
        del manifest["receipts"]
    write_whole(staging.model / MANIFEST, to_json(manifest))
    staging.commit()
    return Written(
        staging.output, {"recipe": manifest["recipe"], "modules": dict(modules)}, new.n_parameters, tuple(notes)
    )


def open_dense(model: str | Path) -> tuple[Checkpoint, Skeleton]:
    checkpoint = open_checkpoint(model)
    return checkpoint, open_skeleton(dense_view(checkpoint))


def stored_weight(source: TensorSource, linear: Linear) -> Tensor:
    """[out, in], in its stored dtype."""
    stored = cut(source.read(linear.place.tensor), linear.place)
    return (stored.T if linear.conv1d else stored).contiguous()


def runtime_path(skeleton: Skeleton, linear: Linear) -> str:
    stem = runtime_names(skeleton.layout, skeleton.source.config)
    return stem + linear.module.removeprefix(skeleton.family.stem)


def taken_for_experts(skeleton: Skeleton, linears: Sequence[Linear]) -> list[Linear]:
    """Those of `linears` for which PEFT loads no factors: it looks for experts' parameters under their names."""
    if skeleton.family.model_type not in _WITH_EXPERTS:
        return []
    return [linear for linear in linears if linear.expert is None and linear.role.endswith(_EXPERTS_NAMES)]


def match_weighted(adapter: Adapter, skeleton: Skeleton) -> Matched:
    if adapter.config.layer_replication:
        raise SutureError(
            f"{adapter.source}: stacks layers of its base (layer_replication), which has fewer of them",
            "merge it with the step lora.merge",
        )
    shapes = {name: tuple(p.shape) for name, p in skeleton.model.named_parameters(remove_duplicate=False)}
    return match([Weighted(adapter)], skeleton.layout, shapes)


def short(value: float) -> float:
    return float(f"{value:.4g}")
