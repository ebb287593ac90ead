"""What config.json alone says of a model: every matrix with its part and block, and what each layer caches.

The model is built by transformers on torch's `meta` device, where a parameter has a shape and no memory, so counts are
those of the class that loads it and DeepSeek-V3 takes a fifth of a second. Any causal language model that transformers
knows can be read, also of a family that suture's steps cannot change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..checkpoint.errors import SutureError, did_you_mean
from ..checkpoint.families import FAMILIES, WRAPPERS
from ..checkpoint.layout import text_config
from .skeleton import transformers_config

Part = Literal["embedding", "attention", "mlp", "experts", "router", "norms and biases", "head"]
PARTS: tuple[Part, ...] = ("embedding", "attention", "mlp", "experts", "router", "norms and biases", "head")
_ATTENTION = ("self_attn", "attn", "attention", "self_attention", "linear_attn", "mixer")
_ROUTERS = ("gate", "router", "shared_expert_gate")
_FUSED_QKV = ("qkv_proj", "c_attn", "query_key_value", "Wqkv")


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [out, in], or `copies` alike of which a token passes through `used` (experts)."""

    name: str  # in the transformers model, without `.weight`
    part: Part
    block: int | None
    out_features: int
    in_features: int
    copies: int = 1
    used: float = 1.0
    linear: bool = True  # a module that LoRA and quantization know; not an embedding or a router
    kept: bool = False  # suture's rounding steps leave it unless it is named

    @property
    def numel(self) -> int:
        return self.out_features * self.in_features * self.copies

    @property
    def active(self) -> float:
        """Parameters that one token's forward multiplies with."""
        return self.out_features * self.in_features * self.used


@dataclass(frozen=True)
class LayerAttention:
    """One layer's cache and products with it, per token of context."""

    numbers: int  # cached
    window: int | None  # tokens kept; None: all
    heads: int
    score_width: int  # numbers per head of a query-key product as decoding does it (for MLA: over the latent)
    value_width: int  # ... and of the weighted sum
    prefill_width: int  # score and value widths together over whole keys and values


@dataclass(frozen=True)
class Blueprint:
    """A model's shapes."""

    model_type: str
    family: bool  # whether suture's steps know it
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    kind: Literal["MHA", "GQA", "MQA", "MLA", "other"]
    vocabulary: int
    context: int | None
    tied: bool
    scaling: float | None  # what attention scores are multiplied by
    matrices: tuple[Matrix, ...]
    others: Mapping[int | None, int]  # block -> parameters of norms and biases; None: outside of blocks
    attention: tuple[LayerAttention, ...]
    experts: int
    experts_used: int
    notes: tuple[str, ...]

    @property
    def total(self) -> int:
        """Parameters, a tied head counted once."""
        return sum(matrix.numel for matrix in self.matrices) + sum(self.others.values())

    @property
    def embedding(self) -> int:
        return sum(matrix.numel for matrix in self.matrices if matrix.part == "embedding")

    @property
    def head(self) -> Matrix:
        """The matrix that gives logits, the embedding when tied."""
        wanted = "embedding" if self.tied else "head"
        return next(matrix for matrix in self.matrices if matrix.part == wanted)


def blueprint_of(config: Mapping[str, Any], source: str) -> Blueprint:
    """The blueprint of a raw config.json; `source` is for messages.

    Raises SutureError for a model_type that transformers does not know, or a config that it refuses.
    """
    text, notes = _text_part(config)
    hf_config = _config(text, source)
    model = _on_meta(hf_config, source)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise SutureError(f"{source}: {text['model_type']} has no token embedding and head", "give a language model")
    layers = int(hf_config.num_hidden_layers)
    tied = head.weight is embedding.weight or bool(getattr(hf_config, "tie_word_embeddings", False))
    experts = int(_first(hf_config, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts") or 0)
    used = int(_first(hf_config, "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts") or 0)
    matrices, others = _count(model, str(text["model_type"]), hf_config, layers, tied, experts, used)
    attention = _attention(matrices, hf_config, layers, notes)
    heads = int(getattr(hf_config, "num_attention_heads", 0) or 0)
    kv_heads = _kv_heads(attention, hf_config, heads)
    if text.get("num_nextn_predict_layers"):
        notes.append("the multi-token prediction layers are not counted: transformers does not build them")
    if text["model_type"] == "falcon" and getattr(hf_config, "new_decoder_architecture", False):
        notes.append(
            "transformers caches Falcon's keys and values once for each query head; servers, as counted, for each group"
        )
    if experts and not used:
        notes.append("config.json does not say how many experts a token uses: all are counted")
    return Blueprint(
        model_type=str(text["model_type"]),
        family=str(text["model_type"]) in FAMILIES,
        layers=layers,
        hidden=int(hf_config.hidden_size),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(hf_config, heads),
        kind=_kind(hf_config, heads, kv_heads),
        vocabulary=int(embedding.weight.shape[0]),
        context=getattr(hf_config, "max_position_embeddings", None),
        tied=tied,
        scaling=_scaling(model),
        matrices=matrices,
        others=others,
        attention=attention,
        experts=experts,
        experts_used=used or experts,
        notes=tuple(notes),
    )


def _text_part(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The language model's config, and a note when there is more around it."""
    kind = str(config.get("model_type", ""))
    if kind not in WRAPPERS and kind not in FAMILIES and isinstance(config.get("text_config"), dict):
        text = dict(config["text_config"])
        text.setdefault("model_type", f"{kind}_text")
    else:
        text = text_config(config)
    text = {key: value for key, value in text.items() if key not in ("quantization_config", "compression_config")}
    if text.get("model_type") != kind:
        return text, [f"the language model inside a {kind} alone; its other parts are not counted"]
    return text, []


def _config(text: Mapping[str, Any], source: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(text.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise SutureError(
            f"{source}: transformers knows no model_type '{kind}'{did_you_mean(kind, CONFIG_MAPPING)}",
            "code that comes with a checkpoint is not run; a newer transformers may know it",
        )
    return transformers_config(text, source)


def _on_meta(hf_config: Any, source: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise SutureError(
            f"{source}: transformers builds no language model from config.json: {reason}",
            "give the config of a causal language model",
        ) from error


def _count(
    model: nn.Module, kind: str, hf_config: Any, layers: int, tied: bool, experts: int, used: int
) -> tuple[tuple[Matrix, ...], dict[int | None, int]]:
    """Every parameter as a matrix, or in the count of norms and biases."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    stem = next(
        (name for name, child in model.named_modules() if isinstance(child, nn.ModuleList) and len(child) == layers), ""
    )
    keep = FAMILIES[kind].keep if kind in FAMILIES else ()
    matrices: list[Matrix] = []
    others: dict[int | None, int] = {}
    for name, module in model.named_modules():
        found = re.match(rf"{re.escape(stem)}\.(\d+)\.", name + ".") if stem else None
        block = int(found[1]) if found else None
        for leaf, parameter in module.named_parameters(recurse=False):
            if module is head and leaf == "weight":
                if not tied:
                    matrices.append(Matrix(name, "head", None, *parameter.shape, linear=False))
            elif isinstance(module, nn.Embedding):
                per_token = 1.0 / parameter.shape[0]  # a row is read, nothing multiplied
                matrices.append(Matrix(name, "embedding", block, *parameter.shape, used=per_token, linear=False))
            elif parameter.ndim == 3 and experts and parameter.shape[0] == experts:
                matrices += _experts(name, leaf, block, parameter.shape, int(hf_config.hidden_size), used or experts)
            elif parameter.ndim == 2 and leaf == "weight":
                matrices.append(_matrix(name, module, block, parameter.shape, keep, experts, used or experts))
            else:
                others[block] = others.get(block, 0) + parameter.numel()
    if not any(module is embedding for module in model.modules()):
        raise SutureError(f"{kind}: its token embedding is not a part of the model", "please report this")
    return tuple(matrices), others


def _experts(name: str, leaf: str, block: int | None, shape: torch.Size, hidden: int, used: int) -> tuple[Matrix, ...]:
    """Experts in one 3-D parameter, [E, out, in] or [E, in, out]: the residual stream is what gate and up read."""
    copies, first, second = shape
    into = not leaf.startswith("down")
    in_features, out_features = (second, first) if (second == hidden) == into else (first, second)
    if not leaf.startswith("gate_up"):
        return (Matrix(f"{name}.{leaf}", "experts", block, out_features, in_features, copies, used),)
    halves = (leaf.replace("gate_up", "gate"), leaf.replace("gate_up", "up"))
    return tuple(Matrix(f"{name}.{h}", "experts", block, out_features // 2, in_features, copies, used) for h in halves)


def _matrix(
    name: str, module: nn.Module, block: int | None, shape: torch.Size, keep: tuple[str, ...], experts: int, used: int
) -> Matrix:
    parts = name.split(".")
    conv1d = type(module).__name__ == "Conv1D"
    out_features, in_features = (shape[1], shape[0]) if conv1d else (shape[0], shape[1])
    share = used / experts if "experts" in parts and experts else 1.0
    part: Part = "mlp"
    if parts[-1] in _ROUTERS:
        part = "router"
    elif "experts" in parts:
        part = "experts"
    elif any(part in _ATTENTION for part in parts):
        part = "attention"
    known = (isinstance(module, nn.Linear) or conv1d) and part != "router" and block is not None
    kept = any(name.endswith(role) for role in keep)
    return Matrix(name, part, block, out_features, in_features, used=share, linear=known, kept=kept)


# ---- attention


def _attention(
    matrices: tuple[Matrix, ...], hf_config: Any, layers: int, notes: list[str]
) -> tuple[LayerAttention, ...]:
    by_block: dict[int, dict[str, Matrix]] = {}
    for matrix in matrices:
        if matrix.part == "attention" and matrix.block is not None:
            by_block.setdefault(matrix.block, {})[matrix.name.rpartition(".")[2]] = matrix
    kinds = getattr(hf_config, "layer_types", None) or [None] * layers
    shared = int(getattr(hf_config, "num_kv_shared_layers", 0) or 0)
    found = []
    for index in range(layers):
        one = _layer_attention(by_block.get(index, {}), hf_config, kinds[index])
        if index >= layers - shared:  # they read an earlier layer's cache
            one = LayerAttention(0, one.window, one.heads, one.score_width, one.value_width, one.prefill_width)
        found.append(one)
    without = sum(one.heads == 0 for one in found)
    if without:
        notes.append(
            f"{without} of {layers} layers keep no keys and values per token; a state of fixed size is not counted"
        )
    return tuple(found)


def _layer_attention(linears: Mapping[str, Matrix], hf_config: Any, kind: str | None) -> LayerAttention:
    window = _window(hf_config, kind)
    heads = int(getattr(hf_config, "num_attention_heads", 0) or 0)
    output = list(linears.values())[-1] if linears else None
    if "kv_a_proj_with_mqa" in linears:
        latent, rope = int(hf_config.kv_lora_rank), int(hf_config.qk_rope_head_dim)
        whole = int(hf_config.qk_nope_head_dim) + rope + int(hf_config.v_head_dim)
        return LayerAttention(latent + rope, window, heads, latent + rope, latent, whole)
    if output is None or kind == "linear_attention":
        return LayerAttention(0, None, 0, 0, 0, 0)
    fused = next((linears[name] for name in _FUSED_QKV if name in linears), None)
    if "k_proj" in linears:
        keys = linears["k_proj"].out_features
        numbers = keys + (linears["v_proj"].out_features if "v_proj" in linears else keys)
    elif fused is not None:
        numbers = fused.out_features - output.in_features
    else:
        return LayerAttention(0, None, 0, 0, 0, 0)
    width = output.in_features // heads
    return LayerAttention(numbers, window, heads, width, width, 2 * width)


def _window(hf_config: Any, kind: str | None) -> int | None:
    if kind == "chunked_attention":
        return int(hf_config.attention_chunk_size)
    if kind == "full_attention" or getattr(hf_config, "use_sliding_window", True) is False:
        return None
    window = getattr(hf_config, "sliding_window", None)
    return int(window) if window else None


def _kv_heads(attention: tuple[LayerAttention, ...], hf_config: Any, heads: int) -> int:
    """Counted from what is cached, because families spell the setting differently; for MLA, the config's."""
    if getattr(hf_config, "kv_lora_rank", None):
        return int(getattr(hf_config, "num_key_value_heads", heads) or heads)
    return next((one.numbers // one.prefill_width for one in attention if one.numbers), heads)


def _kind(hf_config: Any, heads: int, kv_heads: int) -> Literal["MHA", "GQA", "MQA", "MLA", "other"]:
    if getattr(hf_config, "kv_lora_rank", None):
        return "MLA"
    if not heads:
        return "other"
    return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"


def _head_dim(hf_config: Any, heads: int) -> int:
    """Numbers per head of a query; of MLA, the part without and with position together."""
    if getattr(hf_config, "kv_lora_rank", None):
        return int(hf_config.qk_nope_head_dim) + int(hf_config.qk_rope_head_dim)
    return int(getattr(hf_config, "head_dim", None) or (int(hf_config.hidden_size) // heads if heads else 0))


def _scaling(model: nn.Module) -> float | None:
    for module in model.modules():
        for name in ("scaling", "softmax_scale"):
            value = getattr(module, name, None)
            if isinstance(value, float):
                return value
    return None


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
