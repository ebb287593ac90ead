"""Fewer key-value heads: groups of heads are merged into one, and W_q and W_o take up what merging must undo.

Keys are merged RoPE pair by RoPE pair as complex numbers, keys that RoPE leaves alone and values as whole vectors; how, is
in merge.py. With k_i ≈ a k̄ the query reads conj(a) q_i, with v_i ≈ B v̄ the output matrix W_o,i B. What is lost is
measured as a reader feels it: an error of a key by the energy of the queries that meet it, E|conj(q)(k − a k̄)|² with
query and key taken as independent, an error of a value by W_o,i. Both need only C = E[x xᵀ] of the attention's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from .grouping import Grouping, Groups, contiguous, group_by_cost
from .heads import Attention, HeadCounts
from .merge import Merged, Method, merge

DAMP = 1e-6  # of C's mean diagonal, added to it: directions that the text never took are kept by their weights

Refit = Literal["none", "attention", "stream"]

# Families whose class cannot have fewer key-value than query heads, and why.
NOT_GROUPED: dict[str, str] = {
    "gpt2": "its class gives every query head a key and a value head of its own",
    "gpt_neox": "its class gives every query head a key and a value head of its own",
    "falcon": "its q, k and v lie in one matrix, group by group; `unfuse` makes it a phi model, which can",
    "deepseek_v3": "it caches one latent for all heads (multi-head latent attention), so there are none to merge",
}


class GQASettings(BaseModel):
    """Settings of `gqa`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_heads: int = Field(ge=1, description="key-value heads to keep; must divide the model's")
    method: Method = Field(
        "pca",
        description="how a group is merged: mean (no text needed), procrustes (aligned, then mean), pca (loses least)",
    )
    grouping: Grouping | None = Field(
        None,
        description="which heads are merged: contiguous (neighbours) or similar (those whose merge loses least); null: "
        "similar, but contiguous with mean, which then touches no query and no output",
    )
    refit: Refit = Field(
        "none",
        description="then fit W_o by ridge regression: attention (to the original attention output), stream (so that it "
        "also undoes the drift of the residual stream)",
    )
    ridge: float = Field(
        0.01, gt=0, description="of the refit: pull towards the W_o it starts from, in mean squared inputs"
    )

    @property
    def grouped(self) -> Grouping:
        """`grouping`, or what is best for the method."""
        return self.grouping or ("contiguous" if self.method == "mean" else "similar")


@dataclass(frozen=True)
class Moments:
    """What merging needs to know of a block's attention; float64 and complex128."""

    key_pairs: Tensor  # [h, n, 1, n, 1] E[k kᴴ] of each RoPE pair
    query_pairs: Tensor  # [h, n, 1, 1] E|q|² of the pair, summed over the query heads that read the key head
    key_rest: Tensor  # [n, r, n, r] of the numbers that RoPE leaves alone
    query_rest: Tensor  # [n, r, r]
    value: Tensor  # [n, d, n, d]
    out: Tensor  # [n, d, d] Σ W_oᵀ W_o over the query heads


@dataclass(frozen=True)
class Regrouped:
    """A block's attention with fewer key-value heads."""

    attention: Attention
    groups: Groups  # key-value heads of the original that became one
    score_energy: float  # share kept
    value_energy: float


def regroup(
    attention: Attention, C: Tensor, pairs: tuple[Tensor, Tensor], kv_heads: int, method: Method, grouping: Grouping
) -> Regrouped:
    """Merge to `kv_heads` heads. C [D + 1, D + 1] = E[x xᵀ] with the constant input; `pairs`: rotary_pairs' positions.

    The query heads are reordered with their groups, and the columns of W_o with them.
    """
    n = attention.k.shape[0]
    moments = _moments(attention, C, pairs)
    groups = contiguous(n, kv_heads)
    if grouping == "similar" and kv_heads > 1:
        groups = group_by_cost(_pair_costs(moments, method), kv_heads)
    parts = [_merge_group(attention, moments, pairs, group, method) for group in groups]
    merged = Attention(
        q=torch.cat([part.attention.q for part in parts]),
        k=torch.cat([part.attention.k for part in parts]),
        v=torch.cat([part.attention.v for part in parts]),
        o=torch.cat([part.attention.o for part in parts], dim=1),
    )
    lost, total = (torch.tensor([getattr(part, name) for part in parts]).sum(0) for name in ("lost", "total"))
    score, value = (1 - lost / total.clamp_min(torch.finfo(torch.float64).tiny)).tolist()
    return Regrouped(merged, groups, score, value)


def _moments(attention: Attention, C: Tensor, pairs: tuple[Tensor, Tensor]) -> Moments:
    first, second = pairs
    n, d = attention.k.shape[:2]
    G = attention.q.shape[0] // n
    rest = torch.arange(2 * len(first), d)
    constant = torch.zeros(C.shape[0], dtype=C.dtype)
    constant[:-1] = DAMP * C.diagonal()[:-1].mean()
    C = C + constant.diag()
    key, value = (_covariance(heads, C) for heads in (attention.k, attention.v))
    by_pair = torch.complex(
        _pairwise(key, first, first) + _pairwise(key, second, second),
        _pairwise(key, second, first) - _pairwise(key, first, second),
    )
    energy = ((attention.q @ C) * attention.q).sum(-1)  # [H, d]
    q_rest = attention.q[:, rest]
    return Moments(
        key_pairs=by_pair[:, :, None, :, None],
        query_pairs=(energy[:, first] + energy[:, second]).unflatten(0, (n, G)).sum(1).T[..., None, None].to(by_pair),
        key_rest=key[:, rest][:, :, :, rest],
        query_rest=(q_rest @ C @ q_rest.mT).unflatten(0, (n, G)).sum(1),
        value=value,
        out=torch.einsum("ohd,ohe->hde", attention.o, attention.o).unflatten(0, (n, G)).sum(1),
    )


def _covariance(heads: Tensor, C: Tensor) -> Tensor:
    """E[y yᵀ] [n, d, n, d] of the outputs of heads [n, d, D + 1]."""
    flat = heads.flatten(0, 1)
    return (flat @ C @ flat.T).unflatten(1, heads.shape[:2]).unflatten(0, heads.shape[:2])


def _pairwise(covariance: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """[h, n, n]: element (rows[f], columns[f]) of every two heads."""
    return covariance[:, rows, :, columns]  # the two index tensors come first


def _of_heads(moments: Moments, heads: Tensor, method: Method) -> tuple[Merged, Merged, Merged]:
    """Merges of the heads [..., g]: of pairs [..., h], of the other key numbers, of values."""
    i, j = heads[..., :, None], heads[..., None, :]
    pairs = moments.key_pairs[:, i, :, j, :]  # [..., g, g, h, 1, 1]
    pairs = pairs.movedim(-3, -5).transpose(-3, -2)  # [..., h, g, 1, g, 1]
    queries = moments.query_pairs[:, heads].movedim(0, -4)  # [..., h, g, 1, 1]
    rest = moments.key_rest[i, :, j, :].transpose(-3, -2)  # [..., g, r, g, r]
    values = moments.value[i, :, j, :].transpose(-3, -2)
    return (
        merge(pairs, queries, method),
        merge(rest, moments.query_rest[heads], method),
        merge(values, moments.out[heads], method),
    )


def _pair_costs(moments: Moments, method: Method) -> Tensor:
    """[n, n] share of the layer's score and value energies that is lost when two heads are merged."""
    n = moments.value.shape[0]
    cost = torch.zeros(n, n, dtype=torch.float64)
    totals = _felt_by_all(moments)
    for first in range(n - 1):
        heads = torch.tensor([pair for pair in combinations(range(n), 2) if pair[0] == first])
        pairs, rest, values = _of_heads(moments, heads, method)
        lost = (pairs.lost.sum(-1) + rest.lost) / totals[0] + values.lost / totals[1]
        cost[heads[:, 0], heads[:, 1]] = cost[heads[:, 1], heads[:, 0]] = lost
    return cost


def _felt_by_all(moments: Moments) -> tuple[Tensor, Tensor]:
    """All of the layer's score and value energy."""
    pairs, rest, values = _of_heads(moments, torch.arange(moments.value.shape[0]), "mean")
    tiny = torch.finfo(torch.float64).tiny
    return (pairs.total.sum() + rest.total).clamp_min(tiny), values.total.clamp_min(tiny)


@dataclass(frozen=True)
class _Part:
    attention: Attention
    lost: tuple[float, float]
    total: tuple[float, float]


def _merge_group(
    attention: Attention, moments: Moments, positions: tuple[Tensor, Tensor], group: tuple[int, ...], method: Method
) -> _Part:
    """One group's key-value head, its query heads and their columns of W_o."""
    first, second = positions
    rest_at = torch.arange(2 * len(first), attention.k.shape[1])
    n, d = attention.k.shape[:2]
    G, g = attention.q.shape[0] // n, len(group)
    heads = torch.tensor(group)
    pairs, rest, values = _of_heads(moments, heads, method)
    k, v = attention.k[heads], attention.v[heads]
    q = attention.q.unflatten(0, (n, G))[heads]  # [g, G, d, D + 1]
    o = attention.o.unflatten(1, (n, G))[:, heads]  # [out, g, G, d]

    key = torch.empty_like(k[0])
    complex_key = torch.einsum("fg,gfx->fx", pairs.encode[:, 0], torch.complex(k[:, first], k[:, second]))
    key[first], key[second] = complex_key.real, complex_key.imag
    key[rest_at] = rest.encode @ k[:, rest_at].flatten(0, 1)

    query = torch.empty_like(q)
    a = pairs.decode[..., 0].T  # [g, h]: k_i ≈ a k̄, and Re conj(q) a k̄ = Re conj(conj(a) q) k̄
    complex_query = a.conj()[:, None, :, None] * torch.complex(q[:, :, first], q[:, :, second])
    query[:, :, first], query[:, :, second] = complex_query.real, complex_query.imag
    query[:, :, rest_at] = torch.einsum("grs,gGrx->gGsx", rest.decode.unflatten(0, (g, -1)), q[:, :, rest_at])

    return _Part(
        Attention(
            q=query.flatten(0, 1),
            k=key[None],
            v=(values.encode @ v.flatten(0, 1))[None],
            o=torch.einsum("ogGd,gde->ogGe", o, values.decode.unflatten(0, (g, d))).flatten(1, 2),
        ),
        (float(pairs.lost.sum() + rest.lost), float(values.lost)),
        (float(pairs.total.sum() + rest.total), float(values.total)),
    )


def refusal(model_type: str, counts: HeadCounts, qk_norm: bool, settings: GQASettings) -> tuple[str, str] | None:
    """What is wrong with converting this model so, and what to do instead; None when nothing is."""
    n, m = counts.key_value, settings.kv_heads
    if model_type in NOT_GROUPED:
        return f"{model_type} cannot have fewer key-value heads: {NOT_GROUPED[model_type]}", "remove the step"
    if n == 1:
        return "the model has one key-value head already (multi-query attention)", "remove the step"
    if m >= n:
        return f"kv_heads {m} is not fewer than the model's {n}", f"give one of {_divisors(n)}"
    if n % m:
        return f"kv_heads {m} does not divide the model's {n}: groups must be equal", f"give one of {_divisors(n)}"
    if qk_norm and settings.method != "mean":
        return (
            f"method {settings.method} cannot be used with {model_type}: its QK norms, shared by all heads, stand between "
            "W_q, W_k and the scores, so W_q cannot take up what aligning the keys would need",
            "use method: mean (grouping: similar is possible too)",
        )
    return None


def _divisors(n: int) -> str:
    return ", ".join(str(m) for m in range(1, n) if n % m == 0)


def with_kv_heads(config: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
    """The raw config of the same class with fewer key-value heads, also inside a vision wrapper's text_config.

    >>> with_kv_heads({"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8}, 2)["num_key_value_heads"]
    2
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        return {**config, "text_config": {**inner, "num_key_value_heads": kv_heads}}
    return {**config, "num_key_value_heads": kv_heads}
