"""What an adapter is: modules, scales, norms, effective ranks, the memory that training it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..calibrate.skeleton import cut
from ..lora.adapter import EXPERTS, Adapter, Part, open_adapter
from ..lora.config import matches
from ..lora.delta import effective_rank, norm, singular_values
from .adapter_files import match_weighted, open_dense, short


def inspect_adapter(adapter: str | Path, base: str | Path | None = None) -> dict[str, Any]:
    """What an adapter is, as plain data; with `base`, also how large its changes are beside the weights.

    Raises SutureError for an adapter that does not open, or that does not fit `base`.
    """
    opened = open_adapter(adapter)
    config = opened.config
    modules = {_name(opened, part): _inspect_part(opened, part) for part in opened.parts if part.low_rank}
    facts: dict[str, Any] = {
        "adapter": opened.source,
        "kind": _kind(opened),
        "trained_on": config.base,
        "r": config.r,
        "alpha": config.alpha,
        "init": config.init,
        "targets": sorted({path.rpartition(".")[2] for path in modules}),
        "low_rank_modules": len(modules),
        "other_parts": {p.path: sorted(set(p.keys) - {"A", "B"}) for p in opened.parts if not p.low_rank},
        "parameters": opened.n_parameters,
        "bytes": sum(info.nbytes for info in opened.tensors.values()),
        "training_bytes": {
            "weights, gradients and Adam's two moments in float32": 16 * opened.n_parameters,
            "note": "beside the frozen base and its activations",
        },
        "changes_nothing": bool(modules) and all(m["norm"] == 0 for m in modules.values()),
        "notes": list(opened.notes),
        "modules": modules,
    }
    if base is not None:
        facts |= _beside(opened, base, modules)
    return facts


def _kind(adapter: Adapter) -> list[str]:
    config = adapter.config
    traits = {
        "rsLoRA": config.rslora,
        "DoRA": config.dora,
        "per-module ranks": bool(config.rank_pattern),
        "per-module alphas": bool(config.alpha_pattern),
        "lora bias": config.lora_bias,
        f"bias {config.bias}": config.bias != "none",
        "modules saved in full": bool(config.modules_to_save),
        "trained tokens": bool(config.token_indices),
        "experts' parameters": bool(config.target_parameters),
        "stacked layers": bool(config.layer_replication),
        "tied embeddings": config.tied,
        f"base changed by {config.init}": config.init != "plain",
    }
    return ["LoRA", *(name for name, present in traits.items() if present)]


def _name(adapter: Adapter, part: Part) -> str:
    """The module; of experts in two parameters the parameter, whose wrappers PEFT nests, the module's first innermost."""
    wanted = adapter.config.target_parameters
    own = [name for name in EXPERTS if part.path.endswith(".experts") and matches(wanted, f"{part.path}.{name}")]
    return f"{part.path}.{own[-1 - part.level]}" if part.level < len(own) else part.path


def _inspect_part(adapter: Adapter, part: Part) -> dict[str, Any]:
    A, B = (adapter.read(part.keys[k]) for k in (("A", "B") if "A" in part.keys else ("embedding A", "embedding B")))
    path = f"{part.path}.weight" if adapter.config.is_parameter(part.path) else _name(adapter, part)
    scale = adapter.config.scale(path)
    values = singular_values(B, A) * abs(scale)
    return {
        "r": A.shape[0],
        "alpha": adapter.config.alpha_of(path),
        "scale": short(scale),
        "shape": [B.shape[0], A.shape[1]],
        "norm": short(norm(B, A) * abs(scale)),
        "largest_singular_value": short(float(values[0])),
        "effective_rank": short(effective_rank(values)),
    }


def _beside(adapter: Adapter, base: str | Path, modules: dict[str, Any]) -> dict[str, Any]:
    checkpoint, skeleton = open_dense(base)
    matched = match_weighted(adapter, skeleton)
    weights = {}
    for parameter, change in matched.changes.items():
        if not change.low_rank:
            continue
        place = skeleton.layout.places[parameter]
        W = cut(skeleton.source.read(place.tensor), place).float()
        for low in change.low_rank:
            weights.setdefault(_name(adapter, low.part), []).append(float(W.square().sum()))
    for path, squares in weights.items():
        size = sum(squares) ** 0.5
        modules[path] |= {"weight_norm": short(size), "relative": short(modules[path]["norm"] / size if size else 0)}
    change = sum(m["norm"] ** 2 for m in modules.values()) ** 0.5
    whole = sum(sum(squares) for squares in weights.values()) ** 0.5
    return {
        "base": checkpoint.source,
        "relative_delta": short(change / whole) if whole else None,
        "training_bytes_with_base": 16 * adapter.n_parameters + checkpoint.nbytes,
        "keys": matched.keys[adapter.source],
    }
