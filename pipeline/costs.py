"""What base and candidate cost to serve: bytes by dtype, cache, arithmetic, roofline; from files and configs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.reader import Checkpoint
from ..report.cost import GPU, GPUS, cost_section
from .inspect import inspect_model


def cost_of(base: Checkpoint, candidate: Checkpoint, gpus: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """The report's section `cost`; `gpus`: rows beside the built-in ones, (bytes per second, FLOPs per second)."""
    own = {name: GPU(bandwidth, flops) for name, (bandwidth, flops) in gpus.items()}
    return cost_section({"base": _facts(base), "candidate": _facts(candidate)}, GPUS | own)


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    facts = inspect_model(str(checkpoint.path))
    table = 0  # an embedding of its own is not read whole: one row a token
    if not facts["tied_head"]:
        sizes = [
            info.nbytes
            for name, info in checkpoint.tensors.items()
            if name.endswith(("embed_tokens.weight", "embed_in.weight", "wte.weight"))
        ]
        table = sum(sizes)
    return {
        "bytes_by_dtype": facts["dtypes"],
        "bytes_read": facts["bytes"] - table,
        "flops_per_token": facts["flops_per_token"],
        "cache": {
            "bytes_per_token": facts["kv_cache_bytes_per_token"],
            "how": f"counted from the config at {facts['kv_cache_dtype']}",
        },
    }
