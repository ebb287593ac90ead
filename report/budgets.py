"""A model as three budgets, from its shapes alone: what it spends on representation, on serving, and on being changed.

    dimensions   parameters by part and layer, widths, heads
    compute      FLOPs per token, bytes cached per token, arithmetic intensity, the batch at which decoding turns compute-bound
    update       parameters that LoRA trains, and the memory of training them or everything

Conventions: a multiply-add is 2 FLOPs. Decoding one token multiplies every active matrix once, 2 FLOPs per parameter, and
per token of context 2 * heads * (score width + value width) more in each layer. Attention over a prompt is causal. The
backward pass costs twice the forward; training one parameter with Adam in mixed precision takes 16 bytes: weight and
gradient in 16 bits, the float32 master copy and two moments (2 + 2 + 4 + 4 + 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..calibrate.blueprint import PARTS, Blueprint, Matrix
from .cost import GPU, decode_roofline

TRAINING_BYTES = 16  # per trained parameter


# ---- dimensions


def parameters_by_part(model: Blueprint) -> dict[str, int]:
    """Parameters of each part that the model has; a tied head is the embedding."""
    parts = dict.fromkeys(PARTS, 0)
    for matrix in model.matrices:
        parts[matrix.part] += matrix.numel
    parts["norms and biases"] = sum(model.others.values())
    return {part: count for part, count in parts.items() if count}


def parameters_by_layer(model: Blueprint) -> list[int]:
    """Parameters of each block."""
    layers = [model.others.get(index, 0) for index in range(model.layers)]
    for matrix in model.matrices:
        if matrix.block is not None:
            layers[matrix.block] += matrix.numel
    return layers


def active_parameters(model: Blueprint) -> int:
    """Parameters that one token can meet: all, less the experts that it is not sent to."""
    unused = sum(m.numel - m.active for m in model.matrices if m.part == "experts")
    return model.total - round(unused)


# ---- compute


def weight_flops(model: Blueprint) -> int:
    """FLOPs per decoded token in products with weights, the head's included; looking an embedding up costs none."""
    active = sum(matrix.active for matrix in model.matrices if matrix.part != "embedding")
    return round(2 * (active + (model.head.numel if model.tied else 0)))


def attention_flops(model: Blueprint, context: int) -> int:
    """FLOPs of one decoded token's products with the keys and values of `context` tokens; sliding windows cut them.

    MLA decodes over its latent, with the up-projections absorbed in queries and outputs.
    """
    return sum(
        2 * one.heads * (one.score_width + one.value_width) * _kept(one.window, context) for one in model.attention
    )


def prefill_flops(model: Blueprint, tokens: int) -> int:
    """FLOPs of a prompt: every token through the blocks, causal attention, and the head for the last one."""
    head = 2 * model.head.numel
    return tokens * (weight_flops(model) - head) + head + _causal_flops(model, tokens)


def training_flops(model: Blueprint, tokens: int, recompute: bool = False) -> int:
    """FLOPs of a training step on one sequence: forward and a backward of twice that; `recompute`: the forward twice."""
    forward = tokens * weight_flops(model) + _causal_flops(model, tokens)
    return (4 if recompute else 3) * forward


def _causal_flops(model: Blueprint, tokens: int) -> int:
    """Token t meets min(t, window) tokens."""
    total = 0
    for one in model.attention:
        width = min(one.window or tokens, tokens)
        met = width * (width + 1) // 2 + (tokens - width) * width
        total += 2 * one.heads * one.prefill_width * met
    return total


def _kept(window: int | None, context: int) -> int:
    return context if window is None else min(window, context)


# ---- cache


def cache_numbers_per_token(model: Blueprint) -> int:
    """Numbers that one more token adds to the cache over all layers, before any sliding window cuts it."""
    return sum(one.numbers for one in model.attention)


def cache_bytes(model: Blueprint, context: int, bits: int = 16, windows: bool = True) -> int:
    """Bytes of the cache of one sequence of `context` tokens; `windows`: local layers keep only their window."""
    kept = sum(one.numbers * _kept(one.window if windows else None, context) for one in model.attention)
    return kept * bits // 8


def cache_alternatives(model: Blueprint, latent: int = 512, rope: int = 64) -> dict[str, int]:
    """Numbers cached per token and layer with this model's heads under each kind of attention."""
    heads, head_dim = model.heads, model.head_dim
    kinds = {f"MHA, {heads} heads": 2 * heads * head_dim}
    kinds |= {f"GQA-{n}": 2 * n * head_dim for n in (16, 8, 4, 2) if n < heads and heads % n == 0}
    kinds |= {"MQA": 2 * head_dim, f"MLA, latent {latent}": latent}
    return kinds | {f"MLA, latent {latent} + rotary {rope}": latent + rope}


def tokens_beside(memory: float, weight_bytes: float, cache_bytes_per_token: float) -> int:
    """Tokens whose cache fits beside the weights, of all sequences together; 0 when the weights alone do not fit."""
    free = memory - weight_bytes
    if free <= 0:
        return 0
    return int(free / cache_bytes_per_token) if cache_bytes_per_token else 0


# ---- when decoding turns compute-bound


def weight_bytes_read(model: Blueprint, bits_of_linear: float = 16.0, batch: int = 1) -> float:
    """Bytes of weights that one decoding step of `batch` sequences reads; embedding, head and norms in 16 bits.

    An embedding of its own is read a row at a time. Of E experts, tokens that choose k each, evenly, meet
    E (1 - (1 - k / E)^batch).
    """
    total = 2.0 * sum(model.others.values())
    for matrix in model.matrices:
        if matrix.part == "embedding":
            total += 2.0 * (matrix.numel if model.tied and matrix is model.head else matrix.in_features * batch)
            continue
        share = matrix.used / matrix.copies
        met = 1.0 if share == 1.0 else 1.0 - (1.0 - share) ** batch
        total += matrix.numel * met * (bits_of_linear if matrix.linear and not matrix.kept else 16.0) / 8
    return total


def turning_batch(weight_seconds: float, compute_seconds: float, cache_seconds: float) -> float | None:
    """Sequences from which on decoding is bound by arithmetic: B* = t_weights / (t_compute - t_cache); None: never.

    Reading the weights takes the same time at any batch; each sequence adds its arithmetic and the reading of its cache,
    and when the second takes longer, a larger batch only moves further into the memory bound.
    """
    gain = compute_seconds - cache_seconds
    return weight_seconds / gain if gain > 0 else None


def batch_of(
    model: Blueprint, gpu: GPU, context: int, bits_of_linear: float = 16.0, cache_bits: int = 16
) -> float | None:
    """`turning_batch` of decoding at `context` tokens on a GPU, every expert read; None: at no batch."""
    weights = weight_bytes_read(model, bits_of_linear, batch=1_000_000) - _embedding_rows(model, 1_000_000)
    compute = (weight_flops(model) + attention_flops(model, context)) / gpu.flops
    cache = cache_bytes(model, context, cache_bits) / gpu.bandwidth
    return turning_batch(weights / gpu.bandwidth, compute, cache)


def _embedding_rows(model: Blueprint, batch: int) -> float:
    return 0.0 if model.tied else sum(2.0 * m.in_features * batch for m in model.matrices if m.part == "embedding")


def attention_intensity(model: Blueprint, cache_bits: int = 16) -> float | None:
    """FLOPs per byte of decoding's attention over the cache, the same at any context: n_heads / n_kv_heads for GQA in
    16 bits. None without a cache."""
    full = [one for one in model.attention if one.numbers]
    if not full:
        return None
    one = full[-1]
    return 2 * one.heads * (one.score_width + one.value_width) / (one.numbers * cache_bits / 8)


def heads_to_turn(gpu: GPU, latent: int = 512, rope: int = 0, cache_bits: int = 16) -> float:
    """Query heads from which on absorbed MLA's attention is bound by arithmetic on a GPU.

    n_h > peak / bandwidth * bytes (d_c + d_r) / (2 (2 d_c + d_r)); with d_r = 0, as the simplified derivation has it,
    peak * bytes / (4 bandwidth): about 101 on an RTX A6000, which DeepSeek's 128 heads pass and 32 do not.
    """
    traffic = (latent + rope) * cache_bits / 8
    arithmetic = 2 * (2 * latent + rope)  # per head: the score over latent and rotary part, the sum over the latent
    return gpu.flops / gpu.bandwidth * traffic / arithmetic


# ---- update

QUERY_VALUE = ("q_proj", "v_proj")


def lora_targets(model: Blueprint, targets: Sequence[str] = ("all-linear",)) -> tuple[Matrix, ...]:
    """Matrices named by the end of their name; `all-linear`: every linear layer of the blocks (not experts in one
    tensor, which PEFT reaches by parameter, and not routers)."""
    linears = [m for m in model.matrices if m.linear and m.copies == 1]
    if "all-linear" in targets:
        return tuple(linears)
    return tuple(m for m in linears if any(m.name == t or m.name.endswith(f".{t}") for t in targets))


def lora_parameters(matrices: Iterable[Matrix], rank: int) -> int:
    """r (in + out) for each matrix: A is [r, in], B is [out, r]."""
    return sum(rank * (matrix.in_features + matrix.out_features) for matrix in matrices)


@dataclass(frozen=True)
class Update:
    """One way to train: how many parameters, and bytes for weights, gradients and Adam; activations are not counted."""

    what: str
    parameters: int
    training_bytes: int  # of what is trained
    with_base: dict[str, int]  # frozen base stored as -> bytes with it


def updates(
    model: Blueprint, ranks: Sequence[int], targets: Sequence[Sequence[str]], bases: dict[str, int]
) -> list[Update]:
    """LoRA by rank and targets over frozen bases (name -> bytes), then full fine-tuning."""
    rows = []
    for names in targets:
        chosen = lora_targets(model, names)
        for rank in ranks if chosen else ():
            count = lora_parameters(chosen, rank)
            held = TRAINING_BYTES * count
            label = f"LoRA r = {rank}, {', '.join(names)}"
            rows.append(Update(label, count, held, {base: size + held for base, size in bases.items()}))
    return [*rows, Update("full fine-tuning", model.total, TRAINING_BYTES * model.total, {})]


# ---- all of it as plain data


def dimensions_section(model: Blueprint) -> dict[str, Any]:
    embedding = model.embedding
    return {
        "parameters": model.total,
        "active_parameters": active_parameters(model),
        "embedding": embedding,
        "non_embedding": model.total - embedding,
        "by_part": parameters_by_part(model),
        "by_layer": parameters_by_layer(model),
        "layers": model.layers,
        "hidden_size": model.hidden,
        "attention": model.kind,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "attention_scale": model.scaling,
        "mlp_widths": sorted(
            {m.out_features for m in model.matrices if m.part == "mlp" and m.out_features != model.hidden}
        ),
        "experts": {"number": model.experts, "per_token": model.experts_used} if model.experts else None,
        "vocabulary": model.vocabulary,
        "context": model.context,
        "tied_head": model.tied,
    }


def compute_section(
    model: Blueprint,
    gpus: dict[str, GPU],
    *,
    context: int,
    batch: int,
    weight_bytes: float,
    read_bits: float,
    cache_bits: int,
) -> dict[str, Any]:
    """FLOPs, cache and rooflines. `weight_bytes`: of the whole model in memory; `read_bits`: per weight of its linears."""
    flops = weight_flops(model)
    per_token = cache_numbers_per_token(model) * cache_bits // 8
    read = weight_bytes_read(model, read_bits, batch)
    at = flops + attention_flops(model, context)
    cache = cache_bytes(model, context, cache_bits)
    rows = []
    for name, gpu in gpus.items():
        bound = decode_roofline(gpu, read, at, cache_bytes=cache, batch=batch)
        turn = batch_of(model, gpu, context, read_bits, cache_bits)
        bare = batch_of(model, gpu, 0, read_bits, cache_bits)
        prompt = prefill_flops(model, context)
        rows.append(
            {
                "gpu": name,
                "decode_seconds_per_step": _round(batch / bound.tokens_per_second),
                "decode_tokens_per_second": _round(bound.tokens_per_second),
                "decode_bound": bound.bound,
                "prefill_seconds": _round(max(prompt / gpu.flops, read / gpu.bandwidth)),
                "compute_bound_from_batch": None if turn is None else math.ceil(turn),
                "compute_bound_from_batch_without_cache": None if bare is None else math.ceil(bare),
                "tokens_beside_weights": None
                if gpu.memory is None
                else tokens_beside(gpu.memory, weight_bytes, per_token),
                "mla_heads_to_turn": _round(heads_to_turn(gpu, cache_bits=cache_bits)),
            }
        )
    return {
        "context": context,
        "batch": batch,
        "cache_bits": cache_bits,
        "weight_bytes": round(weight_bytes),
        "flops": {
            "decode_per_token": flops,
            "decode_attention_at_context": attention_flops(model, context),
            "prefill_of_context": prefill_flops(model, context),
            "training_per_token": training_flops(model, context) // context,
        },
        "cache": {
            "numbers_per_token_and_layer": sorted({one.numbers for one in model.attention if one.numbers}),
            "bytes_per_token": per_token,
            "bytes_per_sequence": cache,
            "bytes_per_sequence_without_windows": cache_bytes(model, context, cache_bits, windows=False),
            "windows": {str(w): n for w, n in _windows(model).items()},
            "alternatives": cache_alternatives(model) if model.heads else {},
        },
        "intensity": {
            "decode_flops_per_byte": _round(batch * at / (read + batch * cache)),
            "attention_flops_per_byte": _rounded(attention_intensity(model, cache_bits)),
        },
        "gpus": rows,
    }


def update_section(
    model: Blueprint, ranks: Sequence[int], targets: Sequence[Sequence[str]], bases: dict[str, int]
) -> list[dict[str, Any]]:
    return [
        {
            "what": row.what,
            "parameters": row.parameters,
            "share": _round(row.parameters / model.total),
            "training_bytes": row.training_bytes,
            "with_base": row.with_base,
        }
        for row in updates(model, ranks, targets, bases)
    ]


def _windows(model: Blueprint) -> dict[int, int]:
    """Window -> number of layers."""
    found: dict[int, int] = {}
    for one in model.attention:
        if one.window is not None:
            found[one.window] = found.get(one.window, 0) + 1
    return found


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded(value: float | None) -> float | None:
    return None if value is None else _round(value)
