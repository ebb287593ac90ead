"""Where each model family keeps its parts: one table of plain data.

A family is found by `model_type`; nothing is guessed. Two name spaces meet here: *module* names, which transformers' own
classes use (`model.layers.0.mlp.experts`), and *disk* names, which checkpoints use
(`model.layers.0.block_sparse_moe.experts.3.w1.weight`). They differ only where this table says so.

The linear layers of a block are listed in the order in which the forward reaches them, grouped by the input they share:
the order in which true-sequential quantization visits them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .errors import SutureError, did_you_mean

NormKind = Literal["w", "1+w", "layernorm"]
RopeLayout = Literal["half", "interleaved", "none"]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: on disk one matrix per expert, in the module one 3-D parameter for all of them."""

    module: str  # under the block: the module with gate_up_proj [E, 2I, H] and down_proj [E, H, I]
    disk: str  # under the block, per expert: "{e}" is the expert's number, "{p}" the projection
    projections: tuple[str, str, str]  # names on disk of (gate, up, down)
    renames: tuple[tuple[str, str], ...] = ()  # other (module, disk) prefixes under the block that differ


@dataclass(frozen=True)
class Fused:
    """A linear layer that holds several projections in its rows (outputs)."""

    linear: str
    parts: tuple[str, ...]  # "q", "k", "v", "gate", "up" in row order
    layout: Literal["blocks", "per group"]  # "per group": of each key-value head (its query heads' q, k, v) x head_dim


@dataclass(frozen=True)
class Family:
    """One row of the table. Paths of linears and norms are relative to a block, module names without `.weight`."""

    model_type: str
    groups: tuple[tuple[str, ...], ...]
    norms: tuple[str, ...]
    stem: str = "model."
    blocks: str = "layers"
    embedding: str = "embed_tokens"
    positions: str | None = None  # learned position embedding, if any
    final_norm: str = "norm"
    head: str = "lm_head"
    head_on_disk: str = "lm_head"
    norm_kind: NormKind = "w"
    rope: RopeLayout = "half"
    fused: tuple[Fused, ...] = ()
    experts: Experts | None = None
    conv1d: bool = False  # weights stored [in, out]
    disk_stems: tuple[str, ...] = ("model.", "language_model.model.", "model.language_model.")
    head_norms: tuple[str, ...] = ()  # norms over head_dim (QK norm) or over a latent: never folded with hidden size
    readers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(norm, what reads its output) within a block; the experts' module stands for every expert's gate and up, and a
    path or norm that a block lacks is passed over. Norms over a sublayer's output (sandwich norms) are read by the residual."""
    attention_out: str = "self_attn.o_proj"
    mlp_in: tuple[str, ...] = (
        "mlp.gate_proj",
        "mlp.up_proj",
    )  # their rows are neurons (those of a fused one: gate, up)
    mlp_out: str = "mlp.down_proj"
    tuples: bool = False  # a block returns (hidden states, ...)
    own_linear: str = (
        ""  # a class of its own in nn.Linear's place, whose forward takes `weight`: loaders put nothing there
    )
    keep: tuple[str, ...] = ()  # linears left in full precision unless named outright, with the reason in `keep_reason`
    keep_reason: str = ""


_ATTENTION = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",))
_GATED_MLP = (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
_PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
_SANDWICH_NORMS = (*_PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_QKV, _GATE_UP = _ATTENTION[0], _GATED_MLP[0]
_READERS = (("input_layernorm", _QKV), ("post_attention_layernorm", _GATE_UP))
_SANDWICH_READERS = (("input_layernorm", _QKV), ("pre_feedforward_layernorm", _GATE_UP))
_MOE_READERS = (("input_layernorm", _QKV), ("post_attention_layernorm", (*_GATE_UP, "mlp.gate", "mlp.experts")))

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", _ATTENTION + _GATED_MLP, _PRE_NORMS, readers=_READERS),
        Family("mistral", _ATTENTION + _GATED_MLP, _PRE_NORMS, readers=_READERS),
        Family("qwen2", _ATTENTION + _GATED_MLP, _PRE_NORMS, readers=_READERS),
        Family("qwen3", _ATTENTION + _GATED_MLP, _PRE_NORMS, head_norms=_QK_NORMS, readers=_READERS),
        Family("gemma", _ATTENTION + _GATED_MLP, _PRE_NORMS, norm_kind="1+w", readers=_READERS),
        Family("gemma2", _ATTENTION + _GATED_MLP, _SANDWICH_NORMS, norm_kind="1+w", readers=_SANDWICH_READERS),
        Family(
            "gemma3_text",
            _ATTENTION + _GATED_MLP,
            _SANDWICH_NORMS,
            norm_kind="1+w",
            head_norms=_QK_NORMS,
            readers=_SANDWICH_READERS,
        ),
        Family(
            "phi3",
            (("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",)),
            _PRE_NORMS,
            fused=(
                Fused("self_attn.qkv_proj", ("q", "k", "v"), "blocks"),
                Fused("mlp.gate_up_proj", ("gate", "up"), "blocks"),
            ),
            readers=(
                ("input_layernorm", ("self_attn.qkv_proj",)),
                ("post_attention_layernorm", ("mlp.gate_up_proj",)),
            ),
            mlp_in=("mlp.gate_up_proj",),
        ),
        Family(
            "gpt2",
            (("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",)),
            ("ln_1", "ln_2"),
            stem="transformer.",
            blocks="h",
            embedding="wte",
            positions="wpe",
            final_norm="ln_f",
            norm_kind="layernorm",
            rope="none",
            fused=(Fused("attn.c_attn", ("q", "k", "v"), "blocks"),),
            conv1d=True,
            readers=(("ln_1", ("attn.c_attn",)), ("ln_2", ("mlp.c_fc",))),
            attention_out="attn.c_proj",
            mlp_in=("mlp.c_fc",),
            mlp_out="mlp.c_proj",
            disk_stems=("transformer.", ""),
        ),
        Family(
            "gpt_neox",
            (
                ("attention.query_key_value",),
                ("attention.dense",),
                ("mlp.dense_h_to_4h",),
                ("mlp.dense_4h_to_h",),
            ),
            _PRE_NORMS,
            stem="gpt_neox.",
            embedding="embed_in",
            final_norm="final_layer_norm",
            head_on_disk="embed_out",
            norm_kind="layernorm",
            fused=(Fused("attention.query_key_value", ("q", "k", "v"), "per group"),),
            readers=(
                ("input_layernorm", ("attention.query_key_value",)),
                ("post_attention_layernorm", ("mlp.dense_h_to_4h",)),
            ),
            attention_out="attention.dense",
            mlp_in=("mlp.dense_h_to_4h",),
            mlp_out="mlp.dense_4h_to_h",
            disk_stems=("gpt_neox.",),
        ),
        Family(
            "phi",
            (
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                ("self_attn.dense",),
                ("mlp.fc1",),  # reads the same norm as q, k and v: attention and MLP lie side by side
                ("mlp.fc2",),
            ),
            ("input_layernorm",),
            final_norm="final_layernorm",
            norm_kind="layernorm",
            head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),  # with qk_layernorm only
            readers=(("input_layernorm", (*_QKV, "mlp.fc1")),),
            attention_out="self_attn.dense",
            mlp_in=("mlp.fc1",),
            mlp_out="mlp.fc2",
            disk_stems=("model.",),
        ),
        Family(
            "falcon",
            (
                ("self_attention.query_key_value",),
                ("self_attention.dense",),
                ("mlp.dense_h_to_4h",),  # attention and MLP lie side by side
                ("mlp.dense_4h_to_h",),
            ),
            ("input_layernorm", "ln_attn", "ln_mlp"),  # the first, or the other two
            stem="transformer.",
            blocks="h",
            embedding="word_embeddings",
            final_norm="ln_f",
            norm_kind="layernorm",
            fused=(Fused("self_attention.query_key_value", ("q", "k", "v"), "per group"),),
            readers=(
                ("input_layernorm", ("self_attention.query_key_value", "mlp.dense_h_to_4h")),
                ("ln_attn", ("self_attention.query_key_value",)),
                ("ln_mlp", ("mlp.dense_h_to_4h",)),
            ),
            attention_out="self_attention.dense",
            mlp_in=("mlp.dense_h_to_4h",),
            mlp_out="mlp.dense_4h_to_h",
            disk_stems=("transformer.",),
            tuples=True,
            own_linear="FalconLinear",
        ),
        Family(
            "mixtral",
            _ATTENTION,
            _PRE_NORMS,
            experts=Experts(
                "mlp.experts",
                "block_sparse_moe.experts.{e}.{p}",
                ("w1", "w3", "w2"),
                renames=(("mlp.gate", "block_sparse_moe.gate"),),
            ),
            readers=_MOE_READERS,
        ),
        Family(
            "qwen3_moe",
            _ATTENTION + _GATED_MLP,  # some blocks may be dense (mlp_only_layers, decoder_sparse_step)
            _PRE_NORMS,
            head_norms=_QK_NORMS,
            experts=Experts("mlp.experts", "mlp.experts.{e}.{p}", ("gate_proj", "up_proj", "down_proj")),
            readers=_MOE_READERS,
        ),
        Family(
            "deepseek_v3",
            (
                ("self_attn.q_proj", "self_attn.q_a_proj"),
                ("self_attn.q_b_proj",),
                ("self_attn.kv_a_proj_with_mqa",),  # shares q_a_proj's input, but comes after q_b_proj in the forward
                ("self_attn.kv_b_proj",),
                ("self_attn.o_proj",),
                *_GATED_MLP,
            ),
            _PRE_NORMS,
            rope="interleaved",
            head_norms=("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
            readers=(
                ("input_layernorm", ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")),
                ("post_attention_layernorm", _GATE_UP),
            ),
            keep=("self_attn.kv_a_proj_with_mqa",),
            keep_reason="its output is the cached latent that every head reads",
        ),
    )
}

# Vision wrappers: the text model inside has its own row above, its tensors a longer prefix.
WRAPPERS: dict[str, str] = {"gemma3": "gemma3_text", "mistral3": "mistral"}

# Buffers that older versions saved although the model recomputes them: dropped, with this note.
STALE_BUFFERS: dict[str, str] = {
    "rotary_emb.inv_freq": "rotary frequencies, recomputed from the config at load",
    "attn.masked_bias": "constant of the causal mask, recomputed at load",
    "attention.masked_bias": "constant of the causal mask, recomputed at load",
    "attn.bias": "causal mask, recomputed at load",
    "attention.bias": "causal mask, recomputed at load",
}


def family_of(model_type: str) -> Family:
    """The family's row. Raises SutureError with the list of families for an unknown `model_type`."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    known = sorted([*FAMILIES, *WRAPPERS])
    raise SutureError(
        f"config.json: unknown model_type '{model_type}'{did_you_mean(model_type, known)}",
        f"supported families: {', '.join(known)}",
    )


def key_value_heads(config: Any) -> int:
    """Of transformers' config of the text model. Falcon says it with three keys."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
    return int(next(value for name in names if (value := getattr(config, name, None)) is not None))


def stale_buffer(name: str) -> str | None:
    """Why the tensor `name` is a stale buffer, or None when it is not one.

    `attn.bias` is GPT-2's causal mask, while `c_attn.bias` is a parameter: whole path components are compared.
    """
    for suffix, reason in STALE_BUFFERS.items():
        if name == suffix or name.endswith("." + suffix):
            return reason
    return None
