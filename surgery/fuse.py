"""Fuse q, k, v and gate, up into one matrix each, or take them apart: rows move, nothing is computed.

Which stock classes that is possible between:

Phi-3 is Llama (Mistral, with a sliding window) with fused rows in blocks [q; k; v] and [gate; up].

GPT-NeoX with its parallel residual is Phi with rows interleaved head by head: q, k, v of head 0, of head 1, ... Falcon is
Phi with rows interleaved group by group: the queries that read key-value head 0, its k, its v, ... Two norms of GPT-NeoX or
of Falcon 40B normalize the same input and differ in weight and bias alone, y = W (g n(x) + c) + b = (W diag g) n(x) +
(W c + b), so folded into what reads them they become the one norm that Phi has; with one norm, as in Falcon 7B, or two that
are equal, only rows move. Phi's head has a bias: 0. A GPT-NeoX whose attention and MLP follow one another is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.families import Family, key_value_heads
from .heads import HeadCounts

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
_PARTS = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phi": "PhiForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "falcon": "FalconForCausalLM",
}
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
    """model_type that reads a fused model's parts. Raises SutureError with the reason when no stock class does."""
    if family.model_type == "gpt_neox":
        if not config.use_parallel_residual:
            raise SutureError(
                "unfuse: its MLP reads what attention has added (use_parallel_residual false), where phi, the class that "
                "reads q, k and v apart, runs both side by side",
                "leave it fused",
            )
        return "phi"
    if family.model_type == "falcon":
        return "phi"
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
    """Raises SutureError with the reason when no class with fused matrices (phi3, gpt_neox, falcon) can hold the model."""
    hint = "leave it as it is"
    if family.model_type == "phi":
        twin = twin_of(config).model_type
        rotated = config.rope_parameters.get("partial_rotary_factor", 1.0)
        if config.qk_layernorm:
            raise SutureError(f"fuse: {twin} has no norms of queries and keys", hint)
        if twin == "falcon" and rotated != 1.0:
            raise SutureError(
                "fuse: gpt_neox gives every query head a key and a value head of its own, and falcon rotates whole heads, "
                f"where this model rotates {rotated:g} of each",
                hint,
            )
        return
    if family.model_type not in ("llama", "mistral"):
        reason = "holds its matrices fused already" if family.fused else "is not llama, mistral or phi with other names"
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


# -- Phi, and the classes that have its q, k and v in one matrix -------------------------------------------------------

_PHI_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
PHI_HEAD_BIAS = "lm_head.bias"


@dataclass(frozen=True)
class Twin:
    """How another class calls what Phi has. Names under a block but for `outside`, which are under the stem."""

    model_type: str
    qkv: str
    norms: tuple[str, str]  # what attention reads, what the MLP reads; twice the same, or two that Phi has as one
    linears: Mapping[str, str]  # -> Phi's
    outside: Mapping[str, str]  # -> Phi's
    keys: Mapping[str, str]  # of the config, Phi's -> its own, where they differ


_MLP = {"mlp.dense_h_to_4h": "mlp.fc1", "mlp.dense_4h_to_h": "mlp.fc2"}
_GPT_NEOX = Twin(
    "gpt_neox",
    "attention.query_key_value",
    ("input_layernorm", "post_attention_layernorm"),
    {"attention.dense": "self_attn.dense", **_MLP},
    {"embed_in": "embed_tokens", "final_layer_norm": "final_layernorm"},
    {},
)
_FALCON = Twin(
    "falcon",
    "self_attention.query_key_value",
    ("input_layernorm", "input_layernorm"),
    {"self_attention.dense": "self_attn.dense", **_MLP},
    {"word_embeddings": "embed_tokens", "ln_f": "final_layernorm"},
    {"hidden_act": "activation", "intermediate_size": "ffn_hidden_size", "layer_norm_eps": "layer_norm_epsilon"},
)


def twin_of(config: Any) -> Twin:
    """For transformers' config of a GPT-NeoX or Falcon: itself; of a Phi: the class that `fuse` makes it.

    GPT-NeoX gives every query head a key head, Falcon has fewer.
    """
    if config.model_type == "falcon" or key_value_heads(config) < config.num_attention_heads:
        two = getattr(config, "num_ln_in_parallel_attn", None)
        if getattr(config, "new_decoder_architecture", False) and two in (None, 2):
            return replace(_FALCON, norms=("ln_attn", "ln_mlp"))
        return _FALCON
    return _GPT_NEOX


def separate_heads(fused: Tensor, kv_heads: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (q of each head that reads it, k, v) of key-value head 0, of head 1, ... [(heads + 2 kv_heads) d, ...] -> the
    rows of all q, of all k, of all v."""
    q, k, v = fused.unflatten(0, (kv_heads, -1, d)).split([fused.shape[0] // (kv_heads * d) - 2, 1, 1], dim=1)
    return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)


def interleave_heads(q: Tensor, k: Tensor, v: Tensor, kv_heads: int, d: int) -> Tensor:
    """The inverse of `separate_heads`."""
    return torch.cat([part.unflatten(0, (kv_heads, -1, d)) for part in (q, k, v)], 1).flatten(0, 2)


def phi_names(twin: Twin, name: str) -> tuple[str, ...]:
    """Parameters of a Phi block that the other class's parameter `name` has a part in."""
    path, _, leaf = name.rpartition(".")
    both = ("weight", "bias")
    if path == twin.qkv:
        return tuple(f"{part}.{leaf}" for part in _PHI_QKV)
    if path in twin.norms and twin.norms[0] == twin.norms[1]:
        return (f"input_layernorm.{leaf}",)
    if path == twin.norms[0]:
        return (
            f"input_layernorm.{leaf}",
            *(f"{part}.{end}" for part in _PHI_QKV for end in (both if leaf == "weight" else ("bias",))),
        )
    if path == twin.norms[1]:
        return ("mlp.fc1.weight", "mlp.fc1.bias") if leaf == "weight" else ("mlp.fc1.bias",)
    return (f"{twin.linears[path]}.{leaf}",)


def phi_block(twin: Twin, block: Mapping[str, Tensor], counts: HeadCounts) -> dict[str, Tensor]:
    """The other class's block (names under the block, any float dtype) as Phi's.

    Where its two norms are one or equal, bits are kept; else what reads them comes back in float32.
    """
    first, second = ((block[f"{norm}.weight"], block[f"{norm}.bias"]) for norm in twin.norms)
    made: dict[str, Tensor] = {}
    for old, new in twin.linears.items():
        for leaf in ("weight", "bias"):
            made[f"{new}.{leaf}"] = block.get(f"{old}.{leaf}", torch.zeros(len(block[f"{old}.weight"])))
    fused = block[f"{twin.qkv}.weight"]
    rows = separate_heads(fused, counts.key_value, counts.dim)
    biases = separate_heads(block.get(f"{twin.qkv}.bias", torch.zeros(len(fused))), counts.key_value, counts.dim)
    for name, weight, b in zip(_PHI_QKV, rows, biases, strict=True):
        made |= {f"{name}.weight": weight, f"{name}.bias": b}
    made |= {"input_layernorm.weight": first[0], "input_layernorm.bias": first[1]}
    if all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        return made
    for name, (gain, c) in [*((name, first) for name in _PHI_QKV), ("mlp.fc1", second)]:
        weight, gain, c = made[f"{name}.weight"].double(), gain.double(), c.double()
        made[f"{name}.bias"] = (made[f"{name}.bias"].double() + weight @ c).float()
        made[f"{name}.weight"] = (weight * gain).float()
    made |= {"input_layernorm.weight": torch.ones_like(first[0]), "input_layernorm.bias": torch.zeros_like(first[1])}
    return made


def fused_names(twin: Twin, name: str) -> tuple[str, ...]:
    """Parameters of the other class's block that a Phi block's parameter `name` becomes, or becomes part of."""
    path, _, leaf = name.rpartition(".")
    if path in _PHI_QKV:
        return (f"{twin.qkv}.{leaf}",)
    if path == "input_layernorm":
        return tuple(f"{norm}.{leaf}" for norm in dict.fromkeys(twin.norms))
    return tuple(f"{old}.{leaf}" for old, new in twin.linears.items() if new == path)


def fused_block(twin: Twin, block: Mapping[str, Tensor], counts: HeadCounts) -> dict[str, Tensor]:
    """A Phi block's parameters as the other class's, every bit kept."""
    made = {new: t for name, t in block.items() for new in fused_names(twin, name) if not new.startswith(twin.qkv)}
    for leaf in ("weight", "bias"):
        q, k, v = (block[f"{part}.{leaf}"] for part in _PHI_QKV)
        made[f"{twin.qkv}.{leaf}"] = interleave_heads(q, k, v, counts.key_value, counts.dim)
    return made


def phi_config(twin: Twin, text: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The raw config of the other class's model for Phi's class."""
    dropout = float(config.hidden_dropout)
    common = {key: getattr(config, twin.keys.get(key, key), None) for key in _OF_PHI}
    return (
        _between(text, config, "phi")
        | common
        | {
            "num_key_value_heads": key_value_heads(config),
            "resid_pdrop": dropout,
            "embd_pdrop": dropout,
            "qk_layernorm": False,
        }
    )


def fused_config(twin: Twin, text: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The raw config of a Phi model for the other class."""
    common = {twin.keys.get(key, key): getattr(config, key, None) for key in _OF_PHI}
    made = _between(text, config, twin.model_type) | common | {"hidden_dropout": float(config.resid_pdrop)}
    if twin.model_type == "falcon":
        one = key_value_heads(config) == 1
        rope = {key: value for key, value in config.rope_parameters.items() if key != "partial_rotary_factor"}
        return {key: value for key, value in made.items() if key != "partial_rotary_factor"} | {
            "rope_parameters": rope,
            "num_kv_heads": key_value_heads(config),
            "new_decoder_architecture": not one,  # which caches keys and values once for each query head
            "multi_query": one,
            "parallel_attn": True,
            "num_ln_in_parallel_attn": 1,
            "alibi": False,
            "bias": True,
        }
    return made | {
        "use_parallel_residual": True,
        "attention_bias": True,
        "rotary_pct": config.rope_parameters["partial_rotary_factor"],
    }


_OF_PHI = tuple(key for key in (*_COMMON, "layer_norm_eps") if key not in ("rms_norm_eps", "num_key_value_heads"))
_OF_ONE_TWIN = (
    "activation",
    "alibi",
    "attention_bias",
    "auto_map",
    "bias",
    "classifier_dropout",
    "embd_pdrop",
    "ffn_hidden_size",
    "head_dim",
    "hidden_act",
    "hidden_dropout",
    "intermediate_size",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "multi_query",
    "new_decoder_architecture",
    "num_key_value_heads",
    "num_kv_heads",
    "num_ln_in_parallel_attn",
    "parallel_attn",
    "partial_rotary_factor",
    "qk_layernorm",
    "resid_pdrop",
    "rope_scaling",
    "rope_theta",
    "rotary_emb_base",
    "rotary_pct",
    "use_parallel_residual",
)


def _between(text: Mapping[str, Any], config: Any, model_type: str) -> dict[str, Any]:
    """What is no class's own; the rotary settings as transformers 5 spells them, and as it did before."""
    rope = {"partial_rotary_factor": 1.0, **config.rope_parameters}
    return {key: value for key, value in text.items() if key not in _OF_ONE_TWIN} | {
        "model_type": model_type,
        "architectures": [_CLASSES[model_type]],
        "rope_parameters": rope,
        "partial_rotary_factor": rope["partial_rotary_factor"],
    }
