"""One block's attention as heads: its four matrices read from a checkpoint of any family, and put back.

Biases are kept as one more input that is always 1, so that what is done to a matrix is done to its bias too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.families import RopeLayout, key_value_heads
from ..checkpoint.layout import Linear, ModelLayout
from ..checkpoint.source import TensorSource

_QUERY, _KEY, _VALUE = (f"self_attn.{name}_proj" for name in ("q", "k", "v"))


@dataclass(frozen=True)
class Attention:
    """float64. D inputs and the constant; H query heads, n key-value heads of d numbers."""

    q: Tensor  # [H, d, D + 1]
    k: Tensor  # [n, d, D + 1]
    v: Tensor  # [n, d, D + 1]
    o: Tensor  # [out, H, d]; its bias is not of the heads


@dataclass(frozen=True)
class HeadCounts:
    """Of every block."""

    query: int
    key_value: int
    dim: int


def head_counts(hf_config: Any) -> HeadCounts:
    """From transformers' config object of the text model."""
    query = int(hf_config.num_attention_heads)
    return HeadCounts(
        query, key_value_heads(hf_config), int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // query)
    )


def attention_linears(layout: ModelLayout, index: int) -> dict[str, Linear]:
    """Block `index`'s linear layers by path under the block. Raises SutureError when it has no q, k, v of its own."""
    found = {linear.role: linear for group in layout.blocks[index] for linear in group}
    fused = _fused(layout)
    wanted = (fused, layout.family.attention_out) if fused else (_QUERY, _KEY, _VALUE, layout.family.attention_out)
    absent = [role for role in wanted if role not in found]
    if absent:
        raise SutureError(f"{layout.family.model_type}: its blocks have no {absent[0]}", "this family is not supported")
    return {role: found[role] for role in wanted}


def _fused(layout: ModelLayout) -> str | None:
    """The linear layer that holds q, k and v in blocks of rows, if there is one."""
    rows = [f.linear for f in layout.family.fused if f.parts == ("q", "k", "v") and f.layout == "blocks"]
    return rows[0] if rows and not layout.family.conv1d else None


def first_linear(layout: ModelLayout, index: int) -> Linear:
    """The layer whose inputs are the attention's."""
    return attention_linears(layout, index)[_fused(layout) or _QUERY]


def out_linear(layout: ModelLayout, index: int) -> Linear:
    """The layer that mixes the heads' outputs."""
    return attention_linears(layout, index)[layout.family.attention_out]


def read_attention(source: TensorSource, layout: ModelLayout, index: int, counts: HeadCounts) -> Attention:
    """Block `index`'s matrices."""
    linears = attention_linears(layout, index)
    d, fused = counts.dim, _fused(layout)
    rows = [counts.query * d, counts.key_value * d, counts.key_value * d]
    if fused:
        q, k, v = _with_bias(source, linears[fused]).split(rows)
    else:
        q, k, v = (_with_bias(source, linears[role]) for role in (_QUERY, _KEY, _VALUE))
    o = source.read(linears[layout.family.attention_out].place.tensor).double()
    heads = [part.unflatten(0, (-1, d)) for part in (q, k, v)]
    return Attention(*heads, o=o.unflatten(1, (-1, d)))


def attention_tensors(layout: ModelLayout, index: int, attention: Attention) -> dict[str, Tensor]:
    """The block's tensors by disk name, float64; a bias only where the layer has one."""
    linears, fused = attention_linears(layout, index), _fused(layout)
    q, k, v = (part.flatten(0, 1) for part in (attention.q, attention.k, attention.v))
    parts = {fused: torch.cat([q, k, v])} if fused else {_QUERY: q, _KEY: k, _VALUE: v}
    made = {linears[layout.family.attention_out].place.tensor: attention.o.flatten(1)}
    for role, matrix in parts.items():
        linear = linears[role]
        made[linear.place.tensor] = matrix[:, :-1]
        if linear.bias:
            made[linear.bias] = matrix[:, -1]
    return made


def attention_shapes(
    layout: ModelLayout, index: int, counts: HeadCounts, key_value: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the same tensors once there are `key_value` key-value heads."""
    linears, fused = attention_linears(layout, index), _fused(layout)
    narrow = key_value * counts.dim
    rows = {fused: counts.query * counts.dim + 2 * narrow} if fused else {_KEY: narrow, _VALUE: narrow}
    made = {}
    for role, linear in linears.items():
        for name in (linear.place.tensor, linear.bias if role != layout.family.attention_out else None):
            if name:
                made[name] = (rows.get(role, shapes[name][0]), *shapes[name][1:])
    return made


def _with_bias(source: TensorSource, linear: Linear) -> Tensor:
    """[out, in + 1], the bias (or 0) in the last column."""
    weight = source.read(linear.place.tensor).double()
    bias = source.read(linear.bias).double() if linear.bias else torch.zeros(weight.shape[0], dtype=torch.float64)
    return torch.cat([weight, bias[:, None]], dim=1)


def rotary_pairs(rotated: int, layout: RopeLayout) -> tuple[Tensor, Tensor]:
    """Positions in a head of the two numbers of each RoPE pair, which turn as (first + i second) e^{imθ}.

    `rotated`: how many of the head's first numbers RoPE turns.
    """
    numbers = torch.arange(rotated)
    if layout == "interleaved":
        return numbers[0::2], numbers[1::2]
    return numbers[: rotated // 2], numbers[rotated // 2 :]
