"""Merge vectors of several heads into one: three methods of the same shape.

Heads i of a group put out x_i of b numbers. A merge keeps one vector x̄ = Σ_i F_i x_i in their place, and readers of head
i read G_i x̄ instead of x_i. The maps F_i go into the matrix that makes x_i, the maps G_i into those that read it, so a
merged model costs no more than its shape says. What it loses is Σ_i E|P_i^½ (x_i − G_i x̄)|², where P_i says how much of
an error the reader of head i feels.

    mean        F_i = 1/g, G_i = 1                          (Ainslie et al. 2023, GQA)
    procrustes  F_i = R_iᴴ/g, G_i = R_i, R_i unitary        (Jin et al. 2024, align heads before grouping; Gower 1975)
    pca         P^½ E[x xᴴ] P^½ = E Λ Eᴴ, top b of them: F = Eᴴ P^½, G = P^−½ E, which loses least

Each set of maps holds the one before it. The same code merges values (b = head_dim, real), keys without RoPE (b = their
number, real) and the RoPE pairs of keys: a pair is one complex number, and RoPE multiplies it by e^{imθ}, which a complex
factor commutes with and a general 2 × 2 matrix does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Method = Literal["mean", "procrustes", "pca"]

_UNREAD = 1e-10  # of the largest eigenvalue of P: below it a direction counts as barely read, not as unread
_ROUNDS, _STILL = 200, 1e-13  # of the alternation in procrustes: at most, and the relative gain that ends it


@dataclass(frozen=True)
class Merged:
    """Maps of a merge of g heads, for each element of the batch."""

    encode: Tensor  # F [..., b, g*b]
    decode: Tensor  # G [..., g*b, b]
    lost: Tensor  # [...] energy that is not in x̄, as the readers feel it
    total: Tensor  # [...] all of it


def merge(S: Tensor, P: Tensor, method: Method) -> Merged:
    """S [..., g, b, g, b] = E[x xᴴ], P [..., g, b, b] Hermitian and not negative; float64 or complex128."""
    *batch, g, b = S.shape[:-2]
    flat = S.reshape(*batch, g * b, g * b)
    if b == 0 or 0 in batch:  # no such numbers in these heads
        nothing = flat.new_zeros(*batch, b, g * b), flat.new_zeros(*batch, g * b, b)
        return Merged(*nothing, *flat.new_zeros(2, *batch).real)
    encode, decode = _MAPS[method](flat, P)
    rest = torch.eye(g * b, dtype=S.dtype) - decode @ encode
    return Merged(encode, decode, _felt(P, rest @ flat @ rest.mH), _felt(P, flat))


def _felt(P: Tensor, flat: Tensor) -> Tensor:
    """Σ_i tr(P_i E_ii) of a matrix [..., g*b, g*b]."""
    g, b = P.shape[-3:-1]
    blocks = flat.reshape(*flat.shape[:-2], g, b, g, b).diagonal(dim1=-4, dim2=-2)  # [..., b, b, g]
    return torch.einsum("...iab,...bai->...", P, blocks).real


def _mean(S: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
    g, b = P.shape[-3:-1]
    ones = torch.eye(b, dtype=S.dtype).repeat(g, 1).expand(*S.shape[:-1], b)
    return ones.mH / g, ones


def _procrustes(S: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
    """Alternate between the mean of the aligned heads and each head's best alignment with it."""
    g, b = P.shape[-3:-1]
    R = _unitary(S[..., :b].unflatten(-2, (g, b)))  # all aligned with the first
    before = torch.full(S.shape[:-2], -torch.inf, dtype=torch.float64)
    for _ in range(_ROUNDS):
        with_mean = (S @ R.flatten(-3, -2)).unflatten(-2, (g, b)) / g  # E[x_i m^H], m = mean of R_i^H x_i
        R = _unitary(with_mean)
        agreement = (R.conj() * with_mean).sum((-3, -2, -1)).real
        if bool((agreement - before <= _STILL * agreement.abs()).all()):
            break
        before = agreement
    decode = R.flatten(-3, -2)
    return decode.mH / g, decode


def _pca(S: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
    g, b = P.shape[-3:-1]
    values, U = torch.linalg.eigh(P)
    largest = values.amax((-2, -1), keepdim=True)
    root = values.clamp_min(_UNREAD * largest.clamp_min(torch.finfo(values.dtype).tiny)).sqrt().to(U.dtype)
    half, inverse = (U * root[..., None, :]) @ U.mH, (U / root[..., None, :]) @ U.mH  # [..., g, b, b]
    blocks = S.unflatten(-1, (g, b)).unflatten(-3, (g, b))  # [..., g, b, g, b]
    seen = torch.einsum("...iab,...ibjc,...jcd->...iajd", half, blocks, half).flatten(-4, -3).flatten(-2, -1)
    E = torch.linalg.eigh((seen + seen.mH) / 2)[1][..., -b:].unflatten(-2, (g, b))
    return _of_natural_size(S, (half @ E).flatten(-3, -2).mH, (inverse @ E).flatten(-3, -2), g)


_MAPS: dict[Method, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "mean": _mean,
    "procrustes": _procrustes,
    "pca": _pca,
}


def _unitary(M: Tensor) -> Tensor:
    """The unitary matrix nearest to M [..., b, b]."""
    if M.shape[-1] == 1:
        size = M.abs()
        return torch.where(size > 0, M / size.clamp_min(torch.finfo(size.dtype).tiny), torch.ones_like(M))
    U, _, Vh = torch.linalg.svd(M)
    return U @ Vh


def _of_natural_size(S: Tensor, encode: Tensor, decode: Tensor, g: int) -> tuple[Tensor, Tensor]:
    """Turn and scale x̄, which loses nothing: as large as a head's x on average, and turned as the heads are.

    Eigenvectors come with any turn and a size of their own; stored in 16 bits and cached, x̄ should look like what it
    replaces.
    """
    b = decode.shape[-1]
    turn = _unitary(decode.unflatten(-2, (g, b)).mean(-3))
    energy = (encode @ S @ encode.mH).diagonal(dim1=-2, dim2=-1).sum(-1).real
    wanted = S.diagonal(dim1=-2, dim2=-1).sum(-1).real / g
    sound = (energy > 0) & (wanted > 0)
    scale = torch.where(sound, wanted / torch.where(sound, energy, 1.0), 1.0).sqrt()[..., None, None]
    return scale * (turn @ encode), decode @ turn.mH / scale
