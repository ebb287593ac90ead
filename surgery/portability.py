"""What becomes of each feature of a source when its attention is written as a stock dense `deepseek_v3`, by target.

Targets: transformers; vLLM's own deepseek class; vLLM running transformers' class (`--model-impl transformers`);
llama.cpp's deepseek2. A cell is `exact`, `deviation: ...` or `refused: ...`. transformers' column is proved by every run
that writes such a checkpoint; the others follow from those projects' sources and were not run. A feature that
transformers' class cannot represent is refused before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..checkpoint.errors import SutureError
from ..checkpoint.layout import ModelLayout

TARGETS = ("transformers", "vllm", "vllm_transformers", "llama_cpp")
_EXACT = "exact"
_LLAMA_CPP_DEPTHS = (26, 27)  # at which its loader takes models without q_lora; also 48 with a vocabulary of 128256


@dataclass(frozen=True)
class Row:
    """One feature of the source."""

    feature: str
    transformers: str = _EXACT
    vllm: str = _EXACT
    vllm_transformers: str = _EXACT
    llama_cpp: str = _EXACT
    next_step: str = ""  # when transformers refuses


def portability(hf_config: Any, layout: ModelLayout, config: Mapping[str, Any], dtype: str) -> list[dict[str, str]]:
    """The matrix for an output with `config`, whose weights are `dtype` (safetensors' code); refusals are in it."""
    rows = [*_unrepresentable(hf_config, layout, dtype), *_represented(hf_config, layout, config)]
    return [{key: value for key, value in asdict(row).items() if key != "next_step"} for row in rows]


def refuse_unrepresentable(hf_config: Any, layout: ModelLayout, dtype: str) -> None:
    """Raises SutureError naming every feature that no stock MLA class has."""
    rows = list(_unrepresentable(hf_config, layout, dtype))
    if rows:
        reasons = "; ".join(f"{row.feature}: {row.transformers.removeprefix('refused: ')}" for row in rows)
        raise SutureError(f"mla: this model cannot be a stock deepseek_v3: {reasons}", rows[0].next_step)


def _unrepresentable(hf_config: Any, layout: ModelLayout, dtype: str) -> Iterator[Row]:
    family = layout.family
    for feature, reason, next_step in _reasons(hf_config, layout):
        yield _refused(feature, reason, next_step)
    if family.experts is not None:
        yield _refused("mixture of experts", "deepseek_v3 routes by sigmoid and groups", "use gqa, which keeps the MLP")
    if dtype == "F16":
        yield _refused(
            "float16 weights",
            "the norm on the latent is pinned by factors of about 2^-30, which float16 does not have",
            "set dtype: bfloat16 or float32",
        )


def _reasons(hf_config: Any, layout: ModelLayout) -> Iterator[tuple[str, str, str]]:
    family = layout.family

    def get(key: str) -> Any:
        return getattr(hf_config, key, None)

    if family.model_type == "deepseek_v3":
        yield "latent attention", "it is MLA already", "remove the step"
        return
    if family.norm_kind == "layernorm" or family.rope == "none" or family.conv1d:
        yield f"a {family.model_type} block", "needs RMSNorm, rotary positions and a gated MLP", "use another model"
        return
    if any(name.endswith(("q_norm", "k_norm")) for name in family.head_norms):
        reason = "it stands between the projection and RoPE and is not linear, so nothing can be absorbed"
        yield "QK norm", reason, "use gqa with method mean"
    if get("attn_logit_softcapping") or get("final_logit_softcapping"):
        yield "soft caps", "the class has none", "use gqa"
    if len(family.norms) != 2:
        yield "norms after attention and MLP", "the class has none", "use gqa"
    elif family.norm_kind == "1+w":
        yield "1 + w norms and a scaled embedding", "the class has plain ones", "use gqa"
    if family.fused:
        yield "fused projections", "q, k and v lie in one matrix", "unfuse them first"
    act = get("hidden_act") or get("hidden_activation")
    if act != "silu":
        yield f"activation {act}", "deepseek_v3's MLP is SwiGLU everywhere", "use gqa"
    if get("mlp_bias"):
        yield "MLP bias", "the class has none", "use gqa"
    window = _window(hf_config)
    if window is not None:
        next_step = "use gqa; or set sliding_window to null in config.json, for sequences that never exceed it"
        yield f"sliding window of {window}", "the class attends to everything", next_step
    rope = get("rope_parameters") or {}
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        yield "partial rotary positions", "not supported", "use gqa"
    if rope.get("rope_type") in ("dynamic", "longrope"):
        yield f"rope_type {rope['rope_type']}", "its frequencies change with the sequence's length", "use gqa"


def _window(hf_config: Any) -> int | None:
    """Tokens of a sliding window that can cut a sequence within the model's context."""
    window = getattr(hf_config, "sliding_window", None)
    types = getattr(hf_config, "layer_types", None)
    if not window or window >= int(hf_config.max_position_embeddings):
        return None
    return None if types is not None and "sliding_attention" not in types else int(window)


def _refused(feature: str, reason: str, next_step: str) -> Row:
    cell = f"refused: {reason}"
    return Row(feature, cell, cell, cell, cell, next_step)


def _represented(hf_config: Any, layout: ModelLayout, config: Mapping[str, Any]) -> Iterator[Row]:
    lora = config["q_lora_rank"] is not None
    yield Row(
        "latent attention with a pinned norm",
        llama_cpp=_without_q_lora(config) if not lora else "refused: its loader knows no attention biases",
    )
    eps = float(hf_config.rms_norm_eps)
    yield Row(
        f"RMSNorm ε {eps:g}" + ("" if _is(eps, config["rms_norm_eps"]) else f", residual stream rescaled to {1e-6:g}")
    )
    scaling = config.get("rope_scaling")
    own = (hf_config.rope_parameters or {}).get("rope_type", "default")
    if scaling is None:
        yield Row(f"rope {own}" + ("" if own == "default" else ", its unscaled frequencies alone"))
    else:
        yield Row(
            f"rope {own}" + ("" if own == scaling["rope_type"] else f", frequencies listed as {scaling['rope_type']}"),
            vllm="refused: it turns every rope type but default into DeepSeek's YaRN",
            llama_cpp="refused: not known to read these frequencies",
        )
    if config["attention_bias"]:
        yield Row(
            "biases of q, k and v",
            vllm="refused: its class has no biases and drops them without a word",
            llama_cpp="refused: its deepseek2 has no biases",
        )
    if layout.head is None:
        yield Row("tied head, written as a copy of its own")


def _without_q_lora(config: Mapping[str, Any]) -> str:
    depth, vocabulary = config["num_hidden_layers"], config["vocab_size"]
    if depth in _LLAMA_CPP_DEPTHS or (depth == 48 and vocabulary == 128256):
        return "deviation: not run; its loader infers DeepSeek-V2-Lite from this depth"
    return f"refused: its loader asks for q_lora_rank at {depth} layers"


def _is(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * abs(b)
