"""MHA or GQA to multi-head latent attention (MLA), from one block's weights and the second moments of its inputs.

1. All KV heads share one rotary key of `rope_dim` numbers (partial_rope.py); queries take the conjugate maps.
2. What the keys have beyond it loses its rotation, and goes with the values into one latent of `rank` numbers (latent.py).
3. A constant in a key without rotation shifts all scores of a query alike, so its bias is dropped; attention sums to 1,
   so the values' bias is a constant of the output. Both are exact.

Cached per token: rank + rope_dim numbers, where grouped-query attention has 2 · kv_heads · head_dim. Nothing is lost when
there is one KV head, rope_dim = head_dim and rank = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..checkpoint.errors import SutureError
from .latent import damped, joint_latent, scaled_metric, two_sided_metric
from .partial_rope import Fold, Mixture, plan_folds, share_rotary
from .spectra import described

Method = Literal["complex", "transmla", "mha2mla"]
Metric = Literal["two-sided", "balanced", "plain"]
_MIXTURE: dict[Method, Mixture] = {"complex": "complex", "transmla": "real", "mha2mla": "heads"}
_METRIC: dict[Method, Metric] = {"complex": "two-sided", "transmla": "balanced", "mha2mla": "plain"}


class MLASettings(BaseModel):
    """Multi-head latent attention, written as a stock dense deepseek_v3."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(ge=1, description="numbers of the latent that keys and values share, per token and layer")
    rope_dim: int = Field(ge=2, description="numbers of the rotary key that all heads share, per token and layer")
    method: Method = Field(
        "complex", description="how heads share it: unitary mixtures, TransMLA's, or MHA2MLA's choice"
    )
    rope: Literal["uniform", "high", "low"] = Field(
        "uniform", description="which frequencies keep their rotation: every k-th, the highest, the lowest"
    )
    fold: int = Field(1, ge=1, description="neighbouring frequencies mixed as one (FreqFold); 1: none")
    metric: Metric | None = Field(
        None, description="what the latent preserves: two-sided | balanced | plain; default: the method's own"
    )
    value_weight: float = Field(1.0, gt=0, description="two-sided: weight of the values' side beside the keys'")
    dtype: Literal["source", "float32", "bfloat16"] = Field("source", description="dtype of the output's weights")

    @property
    def resolved_metric(self) -> Metric:
        return self.metric or _METRIC[self.method]

    @property
    def mixture(self) -> Mixture:
        return _MIXTURE[self.method]

    @property
    def needs_text(self) -> bool:
        """Whether it takes second moments of the inputs; without, they count as white."""
        return self.resolved_metric != "plain"


@dataclass(frozen=True)
class Heads:
    """Sizes of the source's attention: `heads` query heads, `kv_heads` KV heads of `dim` numbers, inputs of `width`."""

    heads: int
    kv_heads: int
    dim: int
    width: int


@dataclass(frozen=True)
class AttentionWeights:
    """Float64, half-split rotary rows. q: [H, d, D]; k, v: [n, d, D]; o: [D, H, d]; biases [H or n, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor
    k_bias: Tensor
    v_bias: Tensor


@dataclass(frozen=True)
class MLAWeights:
    """Float64. Rotary rows are interleaved: (real, imaginary) of slot 0, of slot 1, ...

    The query of head h is [q_h, query_rope_h q_h] with the source's own q_h = W_q x + b_q; it scores against
    [key_up_i c, rope_key x + rope_bias] with c = encoder x, and reads value_up_i c; i: its KV head.
    """

    query_rope: Tensor  # [n, dr, d]: the same for all query heads of a KV head
    rope_key: Tensor  # [dr, D]
    rope_bias: Tensor  # [dr]
    encoder: Tensor  # [r, D]
    key_up: Tensor  # [n, d, r]
    value_up: Tensor  # [n, d, r]
    output_bias: Tensor  # [D]: W_o b_v
    record: dict[str, Any]


def folds_of(settings: MLASettings, sizes: Heads) -> tuple[Fold, ...]:
    """The settings' partial RoPE for these heads. Raises SutureError for sizes that cannot be."""
    if settings.rope_dim % 2 or sizes.dim % 2:
        raise SutureError(f"mla: rope_dim {settings.rope_dim} of heads of {sizes.dim}: rotary dimensions come in pairs")
    most = sizes.dim * (sizes.kv_heads if settings.mixture == "heads" else 1)
    if settings.rope_dim > most:
        raise SutureError(
            f"mla: rope_dim {settings.rope_dim} is more than the {most} dimensions that the source rotates",
            f"choose at most {most}",
        )
    if settings.fold > 1 and settings.mixture == "heads":
        raise SutureError("mla: fold: method mha2mla mixes no frequencies", "remove fold")
    full = full_rank(settings, sizes)
    if settings.rank > full:
        raise SutureError(
            f"mla: rank {settings.rank} is more than full rank: {full} numbers hold all keys without rotation and values",
            f"choose at most {full}",
        )
    pairs, slots = sizes.dim // 2, settings.rope_dim // 2
    return plan_folds(settings.rope, pairs, slots, settings.fold, sizes.kv_heads, settings.mixture)


def full_rank(settings: MLASettings, sizes: Heads) -> int:
    """Rank at which the latent loses nothing."""
    return min(sizes.width, 2 * sizes.kv_heads * sizes.dim - settings.rope_dim)


def is_exact(settings: MLASettings, sizes: Heads) -> bool:
    """Whether sizes alone make the conversion exact: every pair keeps its rotation, and the latent its full rank."""
    slots = sizes.kv_heads * sizes.dim
    return settings.rope_dim == slots and settings.fold == 1 and settings.rank == full_rank(settings, sizes)


def convert_attention(
    source: AttentionWeights,
    moment: Tensor,
    folds: tuple[Fold, ...],
    settings: MLASettings,
    *,
    scale: float = 1.0,
    rotary_factor: float = 1.0,
) -> MLAWeights:
    """moment: E[x̃ x̃ᵀ], x̃ = [x, 1], [D + 1, D + 1] float64.

    `scale`: factor on all keys that makes up for another softmax scale; `rotary_factor`: what RoPE itself multiplies
    scores with (YaRN), and what has lost its rotation must therefore be given. `record` holds the shares of energy
    that are kept, each in its own metric.
    """
    heads, dim, width = source.q.shape
    n, pairs = source.k.shape[0], dim // 2
    moment = damped(moment)
    q = torch.cat([source.q, source.q_bias[..., None]], dim=2)  # with the bias as an input column
    k = _pairs(torch.cat([source.k, source.k_bias[..., None]], dim=2))
    queries = (q @ moment @ q.mT).view(n, heads // n, dim, dim).sum(1)  # [n, d, d]: E[q qᵀ] over the head's readers
    energy = queries.diagonal(dim1=1, dim2=2)
    rotary = share_rotary(k, moment, energy[:, :pairs] + energy[:, pairs:], folds, settings.mixture)
    rope_key = torch.einsum("sif,ifx->sx", rotary.encode, k)
    stays = k[..., :width] - torch.einsum("sif,sx->ifx", rotary.decode, rope_key[:, :width])
    y = torch.stack([torch.cat([stays.real, stays.imag], dim=1), source.v])
    latent = joint_latent(y, *_metric(y, moment, queries, rotary.rest, source, settings), settings.rank)
    bias = torch.einsum("xhd,hd->x", source.o, source.v_bias.repeat_interleave(heads // n, dim=0))
    rope_key = _interleaved(rope_key, axis=0) * scale
    return MLAWeights(
        query_rope=_real_map(rotary.decode.conj().transpose(0, 1)),
        rope_key=rope_key[:, :width],
        rope_bias=rope_key[:, width],
        encoder=latent.encoder,
        key_up=latent.decoder[0] * (scale * rotary_factor),
        value_up=latent.decoder[1],
        output_bias=bias,
        record={
            "rotary_energy": rotary.energy,
            "key_energy": latent.key_energy,
            "value_energy": latent.value_energy,
            "latent_spectrum": _spectrum(latent.energies, settings.rank),
        },
    )


def _spectrum(energies: Tensor, rank: int) -> dict[str, Any]:
    """Energies of all directions that the latent could hold, in a few numbers, and the rank that was kept."""
    kept = ("rank_for", "effective_rank", "singular_values")
    found = described(energies, (len(energies), len(energies)), None)
    return {"full_rank": len(energies), "kept_rank": rank, **{key: found[key] for key in kept}}


def _metric(
    y: Tensor, moment: Tensor, queries: Tensor, rest: Tensor, source: AttentionWeights, settings: MLASettings
) -> tuple[Tensor, Tensor]:
    """(C, P) of the latent."""
    width = y.shape[3]
    c = moment[:width, :width]
    if settings.resolved_metric == "plain":
        return torch.eye(width, dtype=y.dtype), scaled_metric(y, 1.0)
    if settings.resolved_metric == "balanced":
        return c, scaled_metric(y, _balance(rest, y[1].flatten(0, 1), c))
    o = source.o.permute(1, 2, 0)  # [H, d, D]
    outputs = (o @ o.mT).unflatten(0, (y.shape[1], -1)).sum(1)
    return c, two_sided_metric(y, c, queries, outputs, settings.value_weight)


def _balance(rest: Tensor, values: Tensor, c: Tensor) -> float:
    """TransMLA's 1/ρ: mean norm of the rows of values over that of the keys' components without rotation."""
    keys = float((rest / 2).sqrt().mean()) if rest.numel() else 0.0  # a complex component is two rows
    return float(((values @ c) * values).sum(1).clamp_min(0).sqrt().mean()) / keys if keys > 0 else 1.0


def _pairs(rows: Tensor) -> Tensor:
    """Half-split rows [..., d, E] as complex pairs [..., d/2, E]."""
    half = rows.shape[-2] // 2
    return torch.complex(rows[..., :half, :], rows[..., half:, :])


def _interleaved(z: Tensor, axis: int) -> Tensor:
    """Complex along `axis` as real and imaginary parts in turn."""
    return torch.stack([z.real, z.imag], dim=axis + 1).flatten(axis, axis + 1)


def _real_map(z: Tensor) -> Tensor:
    """Complex maps [n, s, f] as real ones [n, 2s, 2f] from half-split vectors to interleaved ones."""
    return torch.cat([_interleaved(z, 1), _interleaved(1j * z, 1)], dim=2)
