"""The latent of MLA: one low-rank factorization of all KV heads' keys without rotation and values together.

Y = [K; V] (rows of all heads) maps the block's normed input x to keys and values. A latent c = W_a x of r numbers stands
for them, Y x ≈ W_b c. With metrics P (left: how much an error of a row matters) and C = E[x xᵀ] (right: which inputs
occur), the best pair is W_a = Eᵀ P^½ Y, W_b = P^{−½} E, E the top r eigenvectors of P^½ Y C Yᵀ P^½; the error is the sum
of the other eigenvalues.

- `two-sided`: P_K of a head = E[q qᵀ] of the queries that read it, P_V = Σ W_oᵀ W_o of the heads that write it, each side
  divided by its total so that keys and values weigh the same (λ: `value_weight` times as much for values).
- `balanced`: TransMLA: P = 1/ρ² for keys and 1 for values, ρ = mean norm of the keys' rows over the values'.
- `plain`: MHA2MLA's joint SVD of the weights: P = C = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FLOOR = 1e-9  # of P's largest eigenvalue: directions that nothing reads get finite rows
_DAMP = 1e-6  # of the mean of diag C, added to it: inputs that the text did not show count a little


@dataclass(frozen=True)
class Latent:
    """Float64. `encoder` [r, D]; `decoder` [2, heads, d, r]: keys, values."""

    encoder: Tensor
    decoder: Tensor
    key_energy: float  # share of the keys' energy in the metric that the latent keeps
    value_energy: float
    energies: Tensor  # of all directions, largest first, in the metric; the first r are kept


def two_sided_metric(y: Tensor, c: Tensor, queries: Tensor, outputs: Tensor, value_weight: float) -> Tensor:
    """P [2, heads, d, d] from P_K and P_V [heads, d, d] each, sides divided by their energy in Y [2, heads, d, D]."""
    scaled = []
    for side, part, weight in ((queries, y[0], 1.0), (outputs, y[1], value_weight)):
        energy = float(((side @ part @ c) * part).sum())
        scaled.append(side * (weight / energy if energy > 0 else weight))
    return torch.stack(scaled)


def scaled_metric(y: Tensor, key_scale: float) -> Tensor:
    """P [2, heads, d, d]: key_scale² for keys, 1 for values."""
    eye = torch.eye(y.shape[2], dtype=y.dtype).expand(y.shape[1], -1, -1)
    return torch.stack([eye * key_scale**2, eye])


def damped(c: Tensor) -> Tensor:
    return c + torch.eye(len(c), dtype=c.dtype) * (_DAMP * float(c.diagonal().mean()))


def joint_latent(y: Tensor, c: Tensor, metric: Tensor, rank: int) -> Latent:
    """y: [2, heads, d, D] float64, keys and values; c: [D, D]; metric: P as blocks [2, heads, d, d]."""
    half, inverse = _roots(metric)
    weighted = (half @ y).flatten(0, 2)  # P^½ Y
    rows, inputs = weighted.shape
    if rows <= inputs:
        energies, directions = torch.linalg.eigh(weighted @ c @ weighted.T)
        vectors = directions.flip(1)[:, :rank]
    else:  # the same vectors from the smaller problem: P^½ Y C^½ = E S Fᵀ
        root = _roots(c[None])[0][0]
        product = weighted @ root
        energies, directions = torch.linalg.eigh(product.T @ product)
        vectors = torch.linalg.qr(product @ directions.flip(1)[:, :rank])[0]
    encoder = vectors.T @ weighted
    per_head = vectors.reshape(*y.shape[:3], -1)
    size = float(((encoder @ c) * encoder).sum() / rank) ** 0.5 or 1.0  # latent numbers of about 1
    decoder = inverse @ per_head * size
    kept = [_kept(half[side], y[side], c, decoder[side] @ (encoder / size)) for side in (0, 1)]
    return Latent(encoder / size, decoder, kept[0], kept[1], energies.clamp_min(0).flip(0))


def _kept(half: Tensor, y: Tensor, c: Tensor, approximation: Tensor) -> float:
    def energy(rows: Tensor) -> float:
        weighted = (half @ rows).flatten(0, 1)
        return float(((weighted @ c) * weighted).sum())

    total = energy(y)
    return 1 - energy(y - approximation) / total if total > 0 else 1.0


def _roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """P^½ and P^{−½} of symmetric blocks [..., d, d]."""
    values, vectors = torch.linalg.eigh(metric)
    values = values.clamp_min(float(values.max()) * _FLOOR).clamp_min(torch.finfo(metric.dtype).tiny)
    half = vectors * values.sqrt()[..., None, :] @ vectors.mT
    return half, vectors * values.rsqrt()[..., None, :] @ vectors.mT
