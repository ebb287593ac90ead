"""What base and candidate cost to serve: bytes by dtype, cache, arithmetic, roofline; from files and configs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..calibrate.blueprint import blueprint_of
from ..checkpoint.families import FAMILIES
from ..checkpoint.reader import Checkpoint
from ..quant.decode import unquantized
from ..quant.scheme import STORAGE
from ..report.budgets import weight_flops
from ..report.cost import GPU, GPUS, cost_section
from .cache import measure_cache


def cost_of(base: Checkpoint, candidate: Checkpoint, gpus: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """The report's section `cost`; `gpus`: rows beside the built-in ones, (bytes per second, FLOPs per second)."""
    own = {name: GPU(bandwidth, flops) for name, (bandwidth, flops) in gpus.items()}
    return cost_section({"base": _facts(base), "candidate": _facts(candidate)}, GPUS | own)


_TABLES = tuple(f"{name}.weight" for name in sorted({family.embedding for family in FAMILIES.values()}))


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    model = blueprint_of(unquantized(checkpoint.config), checkpoint.source)
    table, dtype = (
        0,
        torch.bfloat16,
    )  # not read for one token: an embedding of its own but for a row, experts not chosen
    by_dtype: dict[str, int] = {}
    for name, info in checkpoint.tensors.items():
        by_dtype[info.dtype] = by_dtype.get(info.dtype, 0) + info.nbytes
        if name.endswith(_TABLES):
            dtype = STORAGE.get(info.dtype, dtype)
            table += 0 if model.tied else info.nbytes
        elif model.experts and ".experts." in name:
            table += info.nbytes * (model.experts - model.experts_used) // model.experts
    cache = measure_cache(checkpoint.config, dtype)
    return {
        "bytes_by_dtype": dict(sorted(by_dtype.items())),
        "bytes_read": checkpoint.nbytes - table,
        "flops_per_token": weight_flops(model),
        "cache": {
            "bytes_per_token": cache.bytes_per_token,
            "how": f"counted in a live {cache.kind} of {cache.dtype} that stock transformers filled",
        },
    }
