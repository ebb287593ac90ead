"""What a GGUF file says of a model beside its weights: names, hyperparameters and tokenizer, as llama.cpp reads them.

llama.cpp rotates neighbouring pairs for architecture `llama`, so the rows of q and k are permuted there; it adds no 1 to
the weights of Gemma's norms, so they are stored with it; the head of a tied model is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError

_TOKENIZER = "tokenizer.json"
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}  # model_type -> llama.cpp's name
PERMUTED = ("llama",)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)  # Llama 3 cuts numbers after three digits, Qwen after each
_SPLITS = {_SPLIT % "{1,3}": "llama-bpe", _SPLIT % "": "qwen2"}


def permute_rows(heads: int, out: int) -> Tensor:
    """Row order of q or k for llama.cpp: in each head, row i of the first half, then row i of the second."""
    half = out // heads // 2
    return torch.arange(out).view(heads, 2, half).transpose(1, 2).reshape(-1)


# ---- hyperparameters


def check_config(config: Any, model_type: str) -> None:
    """Refuse what llama.cpp would compute otherwise. `config`: transformers' config object."""
    rope = rope_settings(config)
    for kind, one in rope.items():
        name = one.get("rope_type", "default")
        known = (
            ("default", "linear", "llama3", "yarn")
            if model_type in ("llama", "qwen2", "qwen3")
            else ("default", "linear")
        )
        if name not in (("default", "longrope") if model_type == "phi3" else known):
            raise SutureError(f"gguf: {model_type} with rope_type {name} ({kind}) is not supported")
    act = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    wanted = "gelu_pytorch_tanh" if model_type.startswith("gemma") else "silu"
    if act != wanted:
        raise SutureError(f"gguf: llama.cpp computes {model_type} with {wanted}, this model has {act}")
    if model_type == "gemma3_text":
        pattern = [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(config.num_hidden_layers)
        ]
        if list(config.layer_types) != pattern:
            raise SutureError(
                "gguf: llama.cpp takes every sixth layer of gemma3 as global, which this model does not have so"
            )
    if model_type == "gemma2":
        pattern = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.num_hidden_layers)]
        if list(config.layer_types) != pattern:
            raise SutureError(
                "gguf: llama.cpp takes every second layer of gemma2 as global, which this model does not have so"
            )


def rope_settings(config: Any) -> dict[str, dict[str, Any]]:
    """RoPE's parameters by kind of layer; one kind, `all`, for most."""
    found = dict(config.rope_parameters)
    nested = {kind: dict(one) for kind, one in found.items() if isinstance(one, dict)}
    return nested or {"all": found}


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def add_hyperparameters(writer: Any, config: Any, model_type: str, vocabulary: int) -> None:
    """Keys of `config`, transformers' config object, in a `gguf.GGUFWriter`."""
    import gguf

    heads, dim = int(config.num_attention_heads), head_dim(config)
    writer.add_context_length(int(config.max_position_embeddings))
    writer.add_embedding_length(int(config.hidden_size))
    writer.add_block_count(int(config.num_hidden_layers))
    writer.add_feed_forward_length(int(config.intermediate_size))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(getattr(config, "num_key_value_heads", None) or heads))
    writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_vocab_size(vocabulary)
    rope = rope_settings(config)
    main = rope.get("full_attention") or rope["all"]
    writer.add_rope_dimension_count(int(dim * float(main.get("partial_rotary_factor", 1.0))))
    writer.add_rope_freq_base(float(main["rope_theta"]))
    kind = main.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(main["factor"]))
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(main["factor"]))
        writer.add_rope_scaling_orig_ctx_len(int(main["original_max_position_embeddings"]))
    elif kind == "longrope":
        original = int(main["original_max_position_embeddings"])
        writer.add_rope_scaling_orig_ctx_len(original)
        factor = float(main.get("factor") or config.max_position_embeddings / original)
        attention = main.get("attention_factor")
        if attention is None:
            import math

            attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        writer.add_rope_scaling_attn_factors(float(attention))
    if model_type == "phi3" or (model_type.startswith("gemma") and config.sliding_window):
        writer.add_sliding_window(int(config.sliding_window or 0))
    if model_type == "gemma2":
        writer.add_attn_logit_softcapping(float(config.attn_logit_softcapping or 0.0))
        writer.add_final_logit_softcapping(float(config.final_logit_softcapping or 0.0))
    if model_type == "gemma3_text" and getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(float(config.final_logit_softcapping))


def rope_tensors(config: Any) -> dict[str, Tensor]:
    """Factors of rotary frequencies that llama.cpp reads as tensors, float32."""
    import gguf

    main = next(iter(rope_settings(config).values()))
    kind, dim = main.get("rope_type", "default"), head_dim(config)
    if kind == "longrope":
        return {
            f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FACTORS_LONG]}.weight": torch.tensor(main["long_factor"]),
            f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FACTORS_SHORT]}.weight": torch.tensor(main["short_factor"]),
        }
    if kind != "llama3":
        return {}
    base, factor = float(main["rope_theta"]), float(main["factor"])
    low, high = float(main["low_freq_factor"]), float(main["high_freq_factor"])
    context = float(main["original_max_position_embeddings"])
    wavelength = 2 * torch.pi * base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)  # 0: slow frequencies, divided by `factor`
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).float()}


# ---- tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Tokens as GGUF stores them."""

    model: str  # "gpt2": byte-level BPE; "llama": SentencePiece
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    pre: str | None
    space_prefix: bool | None = None


def read_vocabulary(file: bytes, size: int, pre: str | None) -> Vocabulary:
    """The tokens of a tokenizer.json, padded to `size`. Raises SutureError for a tokenizer that llama.cpp does not know."""
    content = json.loads(file)
    model = content["model"]
    if model.get("type") != "BPE":
        raise SutureError(f"{_TOKENIZER}: a {model.get('type')} tokenizer, where llama.cpp's BPE is expected")
    added = {int(token["id"]): token for token in content.get("added_tokens", [])}
    by_id = {int(i): text for text, i in model["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    if max(by_id) >= size:
        raise SutureError(f"{_TOKENIZER}: token id {max(by_id)} is outside the model's vocabulary of {size}")
    spm = bool(model.get("byte_fallback"))
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    types = [_type(i, by_id, added, spm, model.get("unk_token")) for i in range(size)]
    if not spm:
        return Vocabulary("gpt2", tokens, types, None, pre or _pre_tokenizer(content, _TOKENIZER))
    ranks = {"".join(_pair(merge)): -float(rank) for rank, merge in reversed(list(enumerate(model["merges"])))}
    worst = -float(len(model["merges"]))
    scores = [ranks.get(token, worst - i) if types[i] == 1 else 0.0 for i, token in enumerate(tokens)]
    return Vocabulary("llama", tokens, types, scores, None, _prepends_space(content))


def _pair(merge: Any) -> Sequence[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _type(i: int, by_id: dict[int, str], added: dict[int, Any], spm: bool, unknown: str | None) -> int:
    """1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
    if i not in by_id:
        return 5
    if spm and by_id[i] == unknown:
        return 2
    if i in added:
        return 3 if added[i].get("special") else 4
    text = by_id[i]
    return 6 if spm and len(text) == 6 and text.startswith("<0x") and text.endswith(">") else 1


def _pre_tokenizer(content: dict[str, Any], name: str) -> str:
    """llama.cpp's name for how text is cut before merges."""
    whole = content.get("pre_tokenizer") or {}
    parts = whole.get("pretokenizers", [whole])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and parts[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        found = _SPLITS.get(parts[0].get("pattern", {}).get("Regex", ""))
        if found:
            return found
    raise SutureError(
        f"{name}: its pre-tokenizer ({', '.join(map(str, kinds))}) is none that suture knows llama.cpp's name of",
        "name it with pre_tokenizer: NAME; a wrong one cuts text otherwise than this model learned",
    )


def _prepends_space(content: dict[str, Any]) -> bool:
    normalizer = content.get("normalizer") or {}
    parts = normalizer.get("normalizers", [normalizer])
    if any(part.get("type") == "Prepend" for part in parts):
        return True
    before = content.get("pre_tokenizer") or {}
    return before.get("type") == "Metaspace" and before.get("prepend_scheme", "always") != "never"
