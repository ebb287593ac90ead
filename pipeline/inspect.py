"""What a model is: parameters by part, bytes, cache and arithmetic per token, and how it was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..calibrate.skeleton import Skeleton, open_skeleton
from ..checkpoint.manifest import MANIFEST, read_manifest
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..quant.decode import dense_view


def inspect_model(source: str | Path, download: bool = False) -> dict[str, Any]:
    """Facts as plain data. Raises SutureError for a checkpoint that does not open."""
    checkpoint = open_checkpoint(source, download=download)
    skeleton = open_skeleton(dense_view(checkpoint))
    config = skeleton.hf_config
    heads = int(config.num_attention_heads)
    parameters = _parameters(skeleton)
    linear = sum(linear.numel for linear in skeleton.layout.linears if linear.expert is None)
    active_experts = _active_expert_parameters(skeleton)
    head = _numel(skeleton.source.shapes[skeleton.layout.head or skeleton.layout.embedding])
    return {
        "model": checkpoint.source,
        "family": skeleton.family.model_type,
        "blocks": skeleton.n_blocks,
        "hidden_size": int(config.hidden_size),
        "heads": heads,
        "kv_heads": int(getattr(config, "num_key_value_heads", heads) or heads),
        "head_dim": _head_dim(config),
        "vocabulary": skeleton.source.shapes[skeleton.layout.embedding][0],
        "context": getattr(config, "max_position_embeddings", None),
        "tied_head": skeleton.layout.head is None,
        "norm": skeleton.family.norm_kind,
        "parameters": parameters | {"total": sum(parameters.values())},
        "bytes": checkpoint.nbytes,
        "dtypes": _dtypes(checkpoint),
        "kv_cache_bytes_per_token": _cache_numbers_per_token(skeleton) * 2,
        "kv_cache_dtype": "16 bits",
        "flops_per_token": 2 * (linear + active_experts + head),
        "flops_note": "products with weights only; attention adds 4 * heads * head_dim * context per block",
        "quantization": _quantization(checkpoint),
        "unknown_tensors": len(skeleton.layout.unknown),
        "stale_buffers": len(skeleton.layout.stale),
        "notes": list(checkpoint.notes),
        "history": _history(checkpoint),
    }


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _parameters(skeleton: Skeleton) -> dict[str, int]:
    parts = {"embedding": 0, "attention": 0, "mlp": 0, "experts": 0, "norms and others": 0, "head": 0}
    layout, shapes = skeleton.layout, skeleton.source.shapes
    parts["embedding"] = _numel(shapes[layout.embedding])
    parts["head"] = _numel(shapes[layout.head]) if layout.head else 0
    for linear in layout.linears:
        attention = any(part.startswith(("self_attn", "attn", "attention")) for part in linear.role.split("."))
        parts["experts" if linear.expert is not None else "attention" if attention else "mlp"] += linear.numel
    used = {place.tensor for place in layout.places.values()}
    parts["norms and others"] = sum(_numel(shapes[name]) for name in used) - sum(parts.values())
    return parts


def _active_expert_parameters(skeleton: Skeleton) -> int:
    experts = [linear for linear in skeleton.layout.linears if linear.expert is not None]
    if not experts:
        return 0
    number = max(linear.expert or 0 for linear in experts) + 1
    return sum(linear.numel for linear in experts) * int(skeleton.hf_config.num_experts_per_tok) // number


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _cache_numbers_per_token(skeleton: Skeleton) -> int:
    """Numbers cached per token over all blocks, before any sliding window cuts the sequence."""
    config = skeleton.hf_config
    if getattr(config, "kv_lora_rank", None):
        return skeleton.n_blocks * (config.kv_lora_rank + config.qk_rope_head_dim)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return skeleton.n_blocks * 2 * kv_heads * _head_dim(config)


def _dtypes(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes by stored dtype."""
    total: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        total[info.dtype] = total.get(info.dtype, 0) + info.nbytes
    return dict(sorted(total.items()))


def _quantization(checkpoint: Checkpoint) -> dict[str, Any] | None:
    found = checkpoint.quantization
    if found is None:
        return None
    groups = found.get("config_groups", {})
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    return {"method": found.get("quant_method"), "format": found.get("format"), "weights": weights}


def _history(checkpoint: Checkpoint) -> list[Any]:
    if not (checkpoint.path / MANIFEST).is_file():
        return []
    manifest = read_manifest(checkpoint.path)
    return [*(entry["recipe"]["steps"] for entry in manifest["history"]), manifest["recipe"]["steps"]]
