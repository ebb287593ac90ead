"""Where a factor per channel can move from a matrix into what produces its inputs, and the move itself.

If y = W x and x is made by a norm's weight or by rows of another matrix, then W diag(s) and x / s give the same y, and
x / s is made by dividing that weight, or those rows and their bias. Quantization gains by it: a large column of W is
worth protecting (AWQ), and a large channel of x is hard to round (SmoothQuant). The places where this can be done are a
table of plain data; a family's other matrices have something between them and their producer that no factor passes.

A norm's new weight is rounded to its stored dtype first, and the factor that it really took is moved: so storing it
costs nothing. Everything here is float32; a move changes no output beyond float32 rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..calibrate.skeleton import Skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.families import key_value_heads
from .scheme import STORAGE

Outputs = Literal["all", "v", "v of qkv", "v of each group", "v of each latent head", "up of gate and up"]


@dataclass(frozen=True)
class Pair:
    """Paths under a block. What a block lacks is passed over; `{e}` stands for each expert's number in turn where the
    producer has one too, else for all experts'."""

    producer: str
    consumers: tuple[str, ...]
    parent: str  # the module whose output shows what rounding the consumers costs; "" is the block itself
    outputs: Outputs = "all"  # of the producer: those that reach the consumers


_INTO_ATTENTION = Pair("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn")
_VALUES = Pair("self_attn.v_proj", ("self_attn.o_proj",), "self_attn", "v")
_UP = Pair("mlp.up_proj", ("mlp.down_proj",), "mlp")
_ROUTED = ("mlp.gate", "mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj", "mlp.gate_proj", "mlp.up_proj")


def _llama(norm: str = "post_attention_layernorm", readers: tuple[str, ...] = _ROUTED[3:]) -> tuple[Pair, ...]:
    return (_INTO_ATTENTION, _VALUES, Pair(norm, readers, "mlp"), _UP)


_MOE = (*_llama(readers=_ROUTED), Pair("mlp.experts.{e}.up_proj", ("mlp.experts.{e}.down_proj",), "mlp"))

PAIRS: dict[str, tuple[Pair, ...]] = {
    "llama": _llama(),
    "mistral": _llama(),
    "qwen2": _llama(),
    "qwen3": _llama(),
    "gemma": _llama(),
    "gemma2": _llama("pre_feedforward_layernorm"),
    "gemma3_text": _llama("pre_feedforward_layernorm"),
    "phi3": (
        Pair("input_layernorm", ("self_attn.qkv_proj",), "self_attn"),
        Pair("self_attn.qkv_proj", ("self_attn.o_proj",), "self_attn", "v of qkv"),
        Pair("post_attention_layernorm", ("mlp.gate_up_proj",), "mlp"),
        Pair("mlp.gate_up_proj", ("mlp.down_proj",), "mlp", "up of gate and up"),
    ),
    "gpt2": (
        Pair("ln_1", ("attn.c_attn",), "attn"),
        Pair("attn.c_attn", ("attn.c_proj",), "attn", "v of qkv"),
        Pair("ln_2", ("mlp.c_fc",), "mlp"),
    ),
    "gpt_neox": (
        Pair("input_layernorm", ("attention.query_key_value",), "attention"),
        Pair("attention.query_key_value", ("attention.dense",), "attention", "v of each group"),
        Pair("post_attention_layernorm", ("mlp.dense_h_to_4h",), "mlp"),
    ),
    "falcon": (
        Pair("input_layernorm", ("self_attention.query_key_value", "mlp.dense_h_to_4h"), ""),
        Pair("ln_attn", ("self_attention.query_key_value",), "self_attention"),
        Pair("self_attention.query_key_value", ("self_attention.dense",), "self_attention", "v of each group"),
        Pair("ln_mlp", ("mlp.dense_h_to_4h",), "mlp"),
    ),
    "phi": (
        Pair("input_layernorm", (*_INTO_ATTENTION.consumers, "mlp.fc1"), ""),
        Pair("self_attn.v_proj", ("self_attn.dense",), "self_attn", "v"),
    ),
    "mixtral": _MOE,
    "qwen3_moe": _MOE,
    "deepseek_v3": (
        Pair(
            "input_layernorm",
            ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
            "self_attn",
        ),
        Pair("self_attn.q_a_layernorm", ("self_attn.q_b_proj",), "self_attn"),
        Pair("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",), "self_attn"),
        Pair("self_attn.kv_b_proj", ("self_attn.o_proj",), "self_attn", "v of each latent head"),
        Pair("post_attention_layernorm", _ROUTED[3:], "mlp"),
        _UP,
    ),
}
NO_PLACE: dict[str, dict[str, str]] = {
    "gpt2": {"mlp.c_proj": "GELU lies between it and c_fc, and lets no factor through"},
    "gpt_neox": {"mlp.dense_4h_to_h": "GELU lies between it and dense_h_to_4h, and lets no factor through"},
    "falcon": {"mlp.dense_4h_to_h": "GELU lies between it and dense_h_to_4h, and lets no factor through"},
    "phi": {"mlp.fc2": "GELU lies between it and fc1, and lets no factor through"},
}


@dataclass(frozen=True)
class Fold:
    """One place of one block. Module names are the model's; `channels` are the factors' number."""

    producer: str
    norm: bool  # the producer is a norm
    consumers: tuple[str, ...]
    parent: str
    channels: int
    rows: Tensor | None  # int64 [channels]: the producer's outputs that are scaled; None: all, in order
    expand: Tensor | None  # int64 [inputs of a consumer] -> channel; None: one to one
    expert: int | None = None

    @property
    def name(self) -> str:
        ends = [name.removeprefix(_stem(self.producer)) for name in self.consumers]
        shown = ", ".join(ends[:4]) + (f" and {len(ends) - 4} more" if len(ends) > 4 else "")
        return f"{self.producer} -> {shown}"

    def columns(self, s: Tensor) -> Tensor:
        """Factors [channels] as one per input of a consumer."""
        return s if self.expand is None else s[self.expand.to(s.device)]

    def per_channel(self, inputs: Tensor, reduce: Literal["mean", "max"]) -> Tensor:
        """Statistics [inputs of a consumer] as one per channel, over the inputs that share it."""
        if self.expand is None:
            return inputs
        found = torch.zeros(self.channels, dtype=inputs.dtype, device=inputs.device)
        how = "amax" if reduce == "max" else "mean"
        return found.scatter_reduce(0, self.expand.to(inputs.device), inputs, how, include_self=False)


def _stem(name: str) -> str:
    """`model.layers.3.` of a name in block 3."""
    parts = name.split(".")
    number = next(i for i, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[: number + 1]) + "."


def block_folds(skeleton: Skeleton, index: int, chosen: frozenset[str]) -> tuple[list[Fold], dict[str, str]]:
    """(places of block `index`, layers to be quantized that have none -> why). `chosen`: module names of the layers.

    A place none of whose consumers is quantized is left out: nothing would be gained.
    """
    layout, prefix = skeleton.layout, skeleton.layout.block_prefix(index)
    linears = {linear.module: linear for group in layout.blocks[index] for linear in group}
    experts = sorted({linear.expert for linear in linears.values() if linear.expert is not None})
    folds: list[Fold] = []
    for pair in PAIRS[layout.family.model_type]:
        for expert in experts if "{e}" in pair.producer else [None]:
            producer = prefix + pair.producer.format(e=expert)
            numbers = experts if expert is None else [expert]
            consumers = [
                prefix + path.format(e=e)
                for path in pair.consumers
                for e in (numbers if "{e}" in path else [0])
                if f"{prefix}{path.format(e=e)}.weight" in layout.places
            ]
            if f"{producer}.weight" not in layout.places or not any(name in chosen for name in consumers):
                continue
            inputs = next(linears[name].in_features for name in consumers if name in linears)
            rows, expand, channels = _geometry(skeleton, pair.outputs, inputs, producer)
            folds.append(
                Fold(
                    producer,
                    producer not in linears,
                    tuple(consumers),
                    (prefix + pair.parent).rstrip("."),
                    channels,
                    rows,
                    expand,
                    expert,
                )
            )
    served = {name for fold in folds for name in fold.consumers}
    reasons = NO_PLACE.get(layout.family.model_type, {})
    missed = {
        linears[name].name: reasons.get(linears[name].role, "nothing before it can take the factors")
        for name in linears
        if name in chosen and name not in served
    }
    return folds, missed


def value_rows(skeleton: Skeleton, index: int) -> dict[str, Tensor | None]:
    """Linear module -> its outputs that no softmax lies behind (None: all), for what is in block `index`.

    Projections into attention make queries and keys, values, or all in one matrix.
    """
    layout, prefix = skeleton.layout, skeleton.layout.block_prefix(index)
    linears = {linear.module: linear for group in layout.blocks[index] for linear in group}
    rows: dict[str, Tensor | None] = dict.fromkeys(linears)
    pairs = PAIRS[layout.family.model_type]
    attention = layout.family.attention_out.rpartition(".")[0] + "."
    for pair in pairs:
        if pair.outputs == "all":
            into = [name for name in pair.consumers if name.startswith(attention)]
            rows |= {prefix + name: torch.empty(0, dtype=torch.int64) for name in into}
    for pair in pairs:
        if pair.outputs.startswith("v"):
            inputs = linears[prefix + pair.consumers[0]].in_features
            rows[prefix + pair.producer] = _geometry(skeleton, pair.outputs, inputs, prefix + pair.producer)[0]
    return {name: found for name, found in rows.items() if name in linears}


def _geometry(
    skeleton: Skeleton, outputs: Outputs, inputs: int, producer: str
) -> tuple[Tensor | None, Tensor | None, int]:
    """(rows, expand, channels) of a place whose consumers have `inputs` inputs."""
    if outputs == "all":
        return None, None, inputs
    if outputs == "up of gate and up":
        return torch.arange(inputs, 2 * inputs), None, inputs
    config = skeleton.hf_config
    heads = int(config.num_attention_heads)
    kv_heads = heads if "latent" in outputs else key_value_heads(config)
    sharing = heads // kv_heads
    size = inputs // heads  # of one head's values
    head, within = torch.arange(kv_heads).repeat_interleave(size), torch.arange(size).repeat(kv_heads)
    rows = {
        "v": head * size + within,
        "v of qkv": (heads + kv_heads) * size + head * size + within,
        "v of each group": head * (sharing + 2) * size + (sharing + 1) * size + within,
        "v of each latent head": (_nope(config) + size) * head + _nope(config) + within,
    }[outputs]
    # head h of the queries reads the values of head h // sharing
    expand = (torch.arange(heads) // sharing).repeat_interleave(size) * size + torch.arange(size).repeat(heads)
    made = skeleton.model.get_parameter(f"{producer}.weight").shape
    outs = int(made[1] if skeleton.family.conv1d else made[0])
    if int(rows.max()) + 1 != outs or heads * size != inputs or sharing * kv_heads != heads:
        raise SutureError(
            f"{producer}: {outs} outputs do not fit {kv_heads} heads of {size} values", "please report this"
        )
    return rows, None if sharing == 1 else expand, kv_heads * size


def _nope(config: object) -> int:
    return int(getattr(config, "qk_nope_head_dim", 0))


# -- the move ----------------------------------------------------------------------------------------------------------


def touched(skeleton: Skeleton, fold: Fold) -> list[str]:
    """Names of the parameters that a move changes."""
    names = [f"{fold.producer}.weight", f"{fold.producer}.bias", *(f"{name}.weight" for name in fold.consumers)]
    return [name for name in names if name in skeleton.layout.places]


@torch.no_grad()
def apply_fold(skeleton: Skeleton, fold: Fold, s: Tensor) -> Tensor:
    """Divide the producer's outputs by s [channels] > 0 and multiply the consumers' columns, in the loaded block.

    Returns the factors that were moved: for a norm, those that its stored dtype can hold.
    """
    s = s.to(skeleton.device, torch.float32)
    producer = skeleton.model.get_submodule(fold.producer)
    weight, bias = producer.get_parameter("weight").data, dict(producer.named_parameters()).get("bias")
    if fold.norm:
        s = _scale_norm(
            weight, s, skeleton.family.norm_kind == "1+w", _stored_dtype(skeleton, f"{fold.producer}.weight")
        )
    else:
        matrix = weight.T if skeleton.family.conv1d else weight
        rows = slice(None) if fold.rows is None else fold.rows.to(weight.device)
        matrix[rows] = matrix[rows] / s[:, None]
    if bias is not None:
        rows = slice(None) if fold.rows is None else fold.rows.to(weight.device)
        bias.data[rows] = bias.data[rows] / s
    for name in fold.consumers:
        matrix = skeleton.model.get_submodule(name).get_parameter("weight").data
        matrix.mul_(fold.columns(s)[:, None] if skeleton.family.conv1d else fold.columns(s))
    return s


def _scale_norm(weight: Tensor, s: Tensor, plus_one: bool, dtype: torch.dtype) -> Tensor:
    """Divide a norm's gain by s in place, in its stored dtype; the factors that this took.

    A channel whose gain would be rounded away keeps the one it has.
    """
    gain = 1 + weight if plus_one else weight
    stored = (gain / s - 1 if plus_one else gain / s).to(dtype).float()
    new = 1 + stored if plus_one else stored
    taken = gain / new
    sound = torch.isfinite(taken) & (new != 0) & (taken > 0.5 * s) & (taken < 2 * s)
    weight.copy_(torch.where(sound, stored, weight))
    return torch.where(sound, taken, torch.ones_like(s))


def _stored_dtype(skeleton: Skeleton, parameter: str) -> torch.dtype:
    return STORAGE[skeleton.source.dtypes[skeleton.layout.places[parameter].tensor]]


@torch.no_grad()
def round_to_stored(skeleton: Skeleton, parameters: Sequence[str]) -> None:
    """Round parameters of the loaded block to the dtype that they are written in."""
    for name in parameters:
        value = skeleton.model.get_parameter(name).data
        value.copy_(value.to(_stored_dtype(skeleton, name)))
