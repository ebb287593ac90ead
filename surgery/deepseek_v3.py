"""MLA weights as the tensors and the config of a stock dense `deepseek_v3`, which needs no code of ours to load.

What the class insists on, and how it is met exactly:
- an RMSNorm on the latent (and on q_a, which exists where queries have a bias): pinned to a constant (eps_pin.py);
- that norm's ε is 1e-6 in transformers but `rms_norm_eps` in vLLM: the residual stream is scaled by
  β = sqrt(1e-6 / ε) so that `rms_norm_eps` can be 1e-6 everywhere;
- softmax scale 1/sqrt(nope + rope): the keys make up for it; query rows stay the source's own bits;
- interleaved rotary rows; a head of its own; no bias but on q_a, kv_a and o.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError
from .eps_pin import EPS, pin
from .mla import AttentionWeights, Heads, MLASettings, MLAWeights


def attention_shapes(sizes: Heads, settings: MLASettings, bias: bool) -> dict[str, tuple[int, ...]]:
    """Tensors of one block's self_attn, by name within it."""
    heads, dim, width, rank = sizes.heads, sizes.dim, sizes.width, settings.rank
    queries = heads * (dim + settings.rope_dim)
    shapes: dict[str, tuple[int, ...]] = {}
    if bias:
        inner = heads * dim
        shapes |= {"q_a_proj.weight": (inner, width), "q_a_proj.bias": (inner,), "q_a_layernorm.weight": (inner,)}
        shapes["q_b_proj.weight"] = (queries, inner)
    else:
        shapes["q_proj.weight"] = (queries, width)
    shapes["kv_a_proj_with_mqa.weight"] = (rank + settings.rope_dim, width)
    if bias:
        shapes["kv_a_proj_with_mqa.bias"] = (rank + settings.rope_dim,)
    shapes["kv_a_layernorm.weight"] = (rank,)
    shapes["kv_b_proj.weight"] = (heads * 2 * dim, rank)
    shapes["o_proj.weight"] = (width, heads * dim)
    if bias:
        shapes["o_proj.bias"] = (width,)
    return shapes


def attention_tensors(
    source: AttentionWeights, made: MLAWeights, gain: Tensor, beta: float, output_bias: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """One block's self_attn tensors but `o_proj.weight`, which stays, in float32, and the exponents of its pins.

    gain: [D], weight of the norm before attention; `beta` scales what the block adds to the residual stream (through
    the values); output_bias: [D] of the source's o_proj where biases are written, else None.
    """
    heads, dim, _ = source.q.shape
    group = heads // source.k.shape[0]
    rank = made.encoder.shape[0]
    rope = made.query_rope.repeat_interleave(group, dim=0)  # [H, dr, d]
    latent = pin(made.encoder, torch.zeros(rank, dtype=torch.float64), gain)
    tensors: dict[str, Tensor] = {}
    pins = {"kv_a_layernorm": latent.exponent}
    if output_bias is None:
        tensors["q_proj.weight"] = torch.cat([source.q, rope @ source.q], dim=1).flatten(0, 1)
    else:
        inner, bias = source.q.flatten(0, 1), source.q_bias.flatten()
        queries = pin(inner, bias, gain)
        pins["q_a_layernorm"] = queries.exponent
        tensors["q_a_proj.weight"], tensors["q_a_proj.bias"] = inner * queries.down, bias * queries.down
        tensors["q_a_layernorm.weight"] = torch.full((heads * dim,), queries.gain)
        own = torch.eye(dim, dtype=torch.float64).expand(heads, -1, -1)
        tensors["q_b_proj.weight"] = torch.block_diag(*torch.cat([own, rope], dim=1)) * queries.up
        tensors["kv_a_proj_with_mqa.bias"] = torch.cat([torch.zeros(rank), made.rope_bias])
        tensors["o_proj.bias"] = beta * (output_bias + made.output_bias)
    tensors["kv_a_proj_with_mqa.weight"] = torch.cat([made.encoder * latent.down, made.rope_key])
    tensors["kv_a_layernorm.weight"] = torch.full((rank,), latent.gain)
    up = torch.cat([made.key_up, made.value_up * beta], dim=1).repeat_interleave(group, dim=0)
    tensors["kv_b_proj.weight"] = up.flatten(0, 1) * latent.up
    return {name: tensor.float() for name, tensor in tensors.items()}, pins


def residual_scale(eps: float) -> float:
    """β: residual stream × β with ε × β² computes the same norms."""
    return math.sqrt(EPS / eps)


def deepseek_config(
    hf_config: Any, sizes: Heads, settings: MLASettings, rope: dict[str, Any], bias: bool, dtype: str
) -> dict[str, Any]:
    """config.json of the output. `hf_config`: the source's transformers config; `rope`: its rotary keys (see
    `rotary_config`)."""
    layers = int(hf_config.num_hidden_layers)
    special = {key: getattr(hf_config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": int(hf_config.vocab_size),
        "hidden_size": sizes.width,
        "intermediate_size": int(hf_config.intermediate_size),
        "hidden_act": hf_config.hidden_act,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "q_lora_rank": sizes.heads * sizes.dim if bias else None,
        "kv_lora_rank": settings.rank,
        "qk_nope_head_dim": sizes.dim,
        "qk_rope_head_dim": settings.rope_dim,
        "v_head_dim": sizes.dim,
        "first_k_dense_replace": layers,
        "moe_layer_freq": 1,
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": int(hf_config.intermediate_size),
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": EPS,
        **rope,
        "rope_interleave": True,
        "attention_bias": bias,
        "max_position_embeddings": int(hf_config.max_position_embeddings),
        "tie_word_embeddings": False,
        "initializer_range": float(getattr(hf_config, "initializer_range", 0.02)),
        "torch_dtype": dtype,
        **special,
    }


def rotary_config(
    parameters: dict[str, Any], frequencies: Sequence[float], factor: float, dim: int, positions: int
) -> dict[str, Any]:
    """Config keys with which stock classes rotate slot s by `frequencies[s]` per position.

    `parameters`: the source's `rope_parameters`, for heads of `dim`; `factor`: its attention factor. The plainest form
    that gives these very frequencies is chosen: a base alone; the source's own scaling with that base; otherwise a list
    of them, for which the form that stock configs know is `longrope`.
    """
    slots = len(frequencies)
    base = float(parameters["rope_theta"])
    kind = str(parameters.get("rope_type", "default"))
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "rope_type")}
    stride = dim / (2 * slots)
    for step in dict.fromkeys((stride, 1.0)):
        theta = base if step == stride else base ** (2 * slots / dim)  # every k-th frequency; the first ones
        for rope in ({"rope_type": "default"}, {"rope_type": kind, **scaling}):
            found = _frequencies({"rope_theta": theta, **rope}, 2 * slots, positions)
            if found is not None and factor == found[1] and _close(found[0], frequencies):
                return {"rope_theta": theta} | ({} if rope["rope_type"] == "default" else {"rope_scaling": rope})
    plain = [base ** (-s / slots) for s in range(slots)]
    factors = [p / f for p, f in zip(plain, frequencies, strict=True)]
    listed = {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": positions,
        "factor": 1.0,
        "attention_factor": factor,
    }
    return {"rope_theta": base, "rope_scaling": listed}


def source_frequencies(hf_config: Any, dim: int) -> tuple[list[float], float]:
    """Rotation per position of each pair, and the factor on cos and sin, as transformers computes them."""
    found = _frequencies(dict(hf_config.rope_parameters), dim, int(hf_config.max_position_embeddings))
    if found is None:
        raise SutureError(
            f"mla: transformers cannot compute rope_parameters {hf_config.rope_parameters} for heads of {dim}",
            "correct config.json",
        )
    return found


def _frequencies(parameters: dict[str, Any], dim: int, positions: int) -> tuple[list[float], float] | None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    try:
        config = DeepseekV3Config(rope_parameters=parameters, qk_rope_head_dim=dim, max_position_embeddings=positions)
        rotary = DeepseekV3RotaryEmbedding(config)
    except (KeyError, ValueError, TypeError, ZeroDivisionError):
        return None
    frequencies = rotary.get_buffer("original_inv_freq").double().tolist()
    return (frequencies, float(rotary.attention_scaling)) if len(frequencies) == dim // 2 else None


def _close(found: Sequence[float], wanted: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(found, wanted, strict=True))
