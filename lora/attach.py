"""Begin an adapter: A and B for every targeted layer, so that training starts from the model as it is.

default      A uniform in +-1/sqrt(in), B = 0                                   (arXiv 2106.09685)
gaussian     A normal with variance 1/r^2 as PEFT draws it, B = 0
orthogonal   A and B random with B A = 0: disjoint halves of one r x r rotation, r even
pissa        A and B are the principal components of W, which a loader takes out of W (arXiv 2404.02948)
loftq        on a quantized base: s B A is the best approximation of rank r of what quantizing took from W (arXiv 2310.08659)
eora         the same, with the error weighted by the layer's inputs: min ||(E - s B A) X|| (arXiv 2410.21271)
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError
from .compose import Factors

Init = Literal["default", "gaussian", "orthogonal", "pissa", "loftq", "eora"]
FROM_WEIGHTS: tuple[Init, ...] = ("pissa",)
FROM_ERROR: tuple[Init, ...] = ("loftq", "eora")


def draw(init: Init, out_features: int, in_features: int, r: int, generator: torch.Generator) -> Factors:
    """Factors with B A = 0, float32."""
    if init == "orthogonal":
        if r % 2:
            raise SutureError(f"r: {r} is odd, the orthogonal initialization needs an even rank", f"use {r + 1}")
        Q, _ = torch.linalg.qr(torch.randn(r, r, generator=generator))
        A = torch.randn(in_features, r // 2, generator=generator) @ Q[0::2] / 10
        B = torch.randn(out_features, r // 2, generator=generator) @ Q[1::2] / 10
        return Factors(A.T.contiguous(), B)
    A = torch.empty(r, in_features)
    if init == "gaussian":
        A.normal_(std=1 / r, generator=generator)
    else:
        bound = 1 / math.sqrt(in_features)
        A.uniform_(-bound, bound, generator=generator)
    return Factors(A, torch.zeros(out_features, r))


def principal(W: Tensor, r: int, scale: float) -> Factors:
    """PiSSA's start for W [out, in]: scale B A is W's best approximation of rank r, split evenly."""
    U, S, Vh = torch.linalg.svd(W.double(), full_matrices=False)
    root = (S[:r] / scale).sqrt()
    return Factors(root[:, None] * Vh[:r], U[:, :r] * root)


def from_error(E: Tensor, r: int, scale: float, H: Tensor | None = None) -> tuple[Factors, float]:
    """scale B A nearest to the error E [out, in], and the share of the error's energy that it takes away.

    With H [in, in], the second moment of the layer's inputs, energy is that of the outputs: ||E X||^2 = tr(E H E^T).
    EoRA: with H = Q L Q^T, truncate E Q L^(1/2) and project back by L^(-1/2) Q^T.
    """
    E = E.double()
    if H is None:
        root, back = None, None
    else:
        values, Q = torch.linalg.eigh(H.double())
        values = values.clamp_min(float(values.max()) * 1e-10)
        root, back = Q * values.sqrt(), (Q / values.sqrt()).T
    U, S, Vh = torch.linalg.svd(E if root is None else E @ root, full_matrices=False)
    half = (S[:r] / scale).sqrt()
    A = half[:, None] * Vh[:r]
    energy = float(S.square().sum())
    taken = float(S[:r].square().sum()) / energy if energy else 1.0
    return Factors(A if back is None else A @ back, U[:, :r] * half), taken
