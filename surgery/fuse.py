"""Fuse q, k, v and gate, up into one matrix each, or take them apart: rows move, nothing is computed.

Which stock classes that is possible between: Phi-3 is Llama (Mistral, with a sliding window) with fused rows in blocks
[q; k; v] and [gate; up]. GPT-NeoX's rows (q, k, v of head 0, of head 1, ...) and Falcon's (the queries, the key and the
value of a group) have no class that reads them apart: both are refused with that reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from ..checkpoint.errors import SutureError
from ..checkpoint.families import Family

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
_PARTS = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
}
_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "phi3": "Phi3ForCausalLM"}
_COMMON = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "tie_word_embeddings",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_OF_ONE_CLASS = (
    "attention_bias",
    "auto_map",
    "embd_pdrop",
    "head_dim",
    "mlp_bias",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "pretraining_tp",
    "resid_pdrop",
    "sliding_window",
)


class FuseSettings(BaseModel):
    """No settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class UnfuseSettings(BaseModel):
    """No settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Rows:
    """Rows of the matrix `fused` that are the matrix `part`; names under a block, without `.weight`."""

    fused: str
    part: str
    start: int
    stop: int


def fused_rows(config: Any) -> tuple[Rows, ...]:
    """Where each part lies in Phi-3's fused matrices."""
    d = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    kv = int(config.num_key_value_heads or config.num_attention_heads) * d
    sizes = {QKV: (int(config.num_attention_heads) * d, kv, kv), GATE_UP: (int(config.intermediate_size),) * 2}
    rows = []
    for fused, parts in _PARTS.items():
        at = 0
        for part, size in zip(parts, sizes[fused], strict=True):
            rows.append(Rows(fused, part, at, at + size))
            at += size
    return tuple(rows)


def unfused_type(family: Family, config: Any) -> str:
    """model_type that reads a Phi-3 model's parts. Raises SutureError with the reason when no stock class does."""
    if family.model_type == "gpt_neox":
        raise SutureError(
            "unfuse: GPT-NeoX's query_key_value holds (q, k, v) head by head, and no stock class with its two parallel "
            "norms reads them apart",
            "leave it fused",
        )
    if family.model_type == "gpt2":
        raise SutureError("unfuse: no stock class reads GPT-2's c_attn in three parts", "leave it fused")
    if family.model_type != "phi3":
        raise SutureError(f"unfuse: {family.model_type} has no fused matrices", "remove the step")
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise SutureError(
            f"unfuse: only Phi-3's own class switches its rotary embedding as {rope['rope_type']} does",
            "leave it fused",
        )
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise SutureError(
            f"unfuse: it rotates {rope['partial_rotary_factor']:g} of each head, where llama and mistral rotate all",
            "leave it fused",
        )
    return "llama" if config.sliding_window is None else "mistral"


def check_fusable(family: Family, config: Any) -> None:
    """Raises SutureError with the reason when Phi-3's class cannot hold the model."""
    hint = "leave it as it is"
    if family.model_type not in ("llama", "mistral"):
        reason = "holds its matrices fused already" if family.fused else "is not llama or mistral with other names"
        raise SutureError(f"fuse: {family.model_type} {reason}: no stock class reads it fused", hint)
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise SutureError("fuse: it has biases, and phi3, the class with fused matrices, has none", hint)
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        raise SutureError(f"fuse: phi3, the class with fused matrices, does not know rope_type {kind}", hint)


def converted_config(text: Mapping[str, Any], config: Any, model_type: str) -> dict[str, Any]:
    """The raw text config for another class; what classes have different defaults for is written out."""
    result = {key: value for key, value in text.items() if key not in _OF_ONE_CLASS}
    result |= {key: getattr(config, key, None) for key in _COMMON}
    result |= {"model_type": model_type, "architectures": [_CLASSES[model_type]]}
    if text.get("rope_parameters") or "rope_theta" not in text:
        rope = {key: value for key, value in config.rope_parameters.items() if key != "partial_rotary_factor"}
        result["rope_parameters"] = rope
    d = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if model_type != "phi3" or d * config.num_attention_heads != config.hidden_size:
        result["head_dim"] = d
    if model_type == "llama":
        result |= {"attention_bias": False, "mlp_bias": False}
    else:
        result["sliding_window"] = getattr(config, "sliding_window", None)
    if model_type == "phi3":
        result["original_max_position_embeddings"] = config.max_position_embeddings
    return result
