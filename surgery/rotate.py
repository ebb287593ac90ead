"""Rotate the residual stream, so that low-bit rounding hurts less (QuaRot, arXiv 2404.00456; SpinQuant's R1 and R2).

A few hidden dimensions of a trained model carry far larger values and weights than the rest; a group of weights that holds
one has its scale set by it. After h → h R, R a random orthogonal matrix, every dimension is a mixture of all.

RMSNorm without weights commutes with a rotation, so with the norm's weight γ folded into what reads it, and row vectors:

    embedding E          → E R
    reader    W          → W diag(γ) R      q, k, v, gate, up, router; the head with the final norm's γ
    writer    W, bias b  → Rᵀ W, Rᵀ b       o, down
    norm      γ          → 1                (0 where the model multiplies by 1 + w)

R is a randomized Hadamard matrix where one of the order exists by these constructions, diag(±1) H / √n: Sylvester's for
powers of two, Paley's for p + 1 and 2 (p + 1), and their Kronecker products (576 = 16 · 36). Else a Kronecker product of
Sylvester's with a random orthogonal matrix for the odd rest.

Within attention the values of each key-value head may be rotated too, S orthogonal of the head's size: v → v S, which the
output projection undoes: W_v → Sᵀ W_v, b_v → Sᵀ b_v for the head's rows, and W_o → W_o S for the columns of each query
head that reads it.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

F64 = torch.float64


class RotateSettings(BaseModel):
    """A random rotation of the residual stream."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    heads: bool = Field(False, description="also rotate each head's values, which the output projection undoes")
    seed: int = Field(0, ge=0, description="of the random signs")


def rotation(n: int, seed: int) -> Tensor:
    """A random orthogonal matrix [n, n], float64: a Hadamard matrix with random signs where one can be made."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (n,), generator=generator).to(F64) * 2 - 1
    rest, twos = n, 0
    while hadamard(rest) is None and rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    core = hadamard(rest)
    if core is None:  # odd: an orthogonal matrix by QR, unique with a positive diagonal
        Q, upper = torch.linalg.qr(torch.randn(rest, rest, generator=generator, dtype=F64))
        core = (Q * upper.diagonal().sign() * rest**0.5).contiguous()
    return signs[:, None] * torch.kron(_sylvester(twos), core) / n**0.5


def hadamard(n: int) -> Tensor | None:
    """H [n, n] of ±1 with H Hᵀ = n I by Sylvester's or Paley's construction, float64; None where they give none."""
    if n > 0 and n & (n - 1) == 0:
        return _sylvester(n.bit_length() - 1)
    if n % 4 == 0 and _is_prime(n - 1):  # p = n - 1 = 3 mod 4
        S = torch.zeros(n, n, dtype=F64)
        S[0, 1:], S[1:, 0] = 1, -1
        S[1:, 1:] = _jacobsthal(n - 1)
        return S + torch.eye(n, dtype=F64)
    p = n // 2 - 1
    if n % 4 == 0 and p % 4 == 1 and _is_prime(p):
        S = torch.zeros(p + 1, p + 1, dtype=F64)
        S[0, 1:], S[1:, 0] = 1, 1
        S[1:, 1:] = _jacobsthal(p)
        zero, one = torch.tensor([[1, -1], [-1, -1]], dtype=F64), torch.tensor([[1, 1], [1, -1]], dtype=F64)
        return torch.kron(S, one) + torch.kron(torch.eye(p + 1, dtype=F64), zero)
    return None


def _sylvester(twos: int) -> Tensor:
    H = torch.ones(1, 1, dtype=F64)
    for _ in range(twos):
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H


def _jacobsthal(p: int) -> Tensor:
    """Q_ij = 1, -1 or 0 as i - j is a square modulo p, is none, or is 0."""
    character = torch.full((p,), -1.0, dtype=F64)
    character[[i * i % p for i in range(1, p)]] = 1
    character[0] = 0
    index = torch.arange(p)
    return character[(index[:, None] - index[None]) % p]


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def rotate_reader(weight: Tensor, norm: Tensor, R: Tensor) -> Tensor:
    """W diag(γ) R for weight [out, hidden], in float64; `norm`: what the model multiplies by, [hidden]."""
    return (weight.to(R.dtype) * norm.to(R.dtype)) @ R


def rotate_writer(weight: Tensor, R: Tensor) -> Tensor:
    """Rᵀ W for weight [hidden, in] or a bias [hidden], in float64."""
    return R.T @ weight.to(R.dtype)


def rotate_heads(weight: Tensor, S: Tensor, starts: list[int]) -> Tensor:
    """Sᵀ W for the rows (or a bias's entries) of each head, which begin at `starts`; the rest as it was. float64."""
    result = weight.to(S.dtype).clone()
    for start in starts:
        result[start : start + len(S)] = S.T @ result[start : start + len(S)]
    return result


def unrotate_heads(weight: Tensor, S: Tensor) -> Tensor:
    """W_o S for the columns of each query head, [out, heads * head size]; float64."""
    out = weight.to(S.dtype).view(len(weight), -1, len(S))
    return (out @ S).reshape(weight.shape)
