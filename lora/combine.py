"""Sums of adapters, exact: the sum of changes is the change of concatenated factors.

sum w_i s_i B_i A_i = [B_1 ... B_n] [w_1 s_1 A_1; ...; w_n s_n A_n], of rank sum r_i; `reduce` then truncates it by the SVD
of an r x r core, without forming a matrix of the layer's size. Adding A's and B's separately, as is often done, adds
cross terms that none of the adapters has. TIES (arXiv 2306.01708) and DARE (arXiv 2311.03099) are not sums: they act on
the changes themselves, whose result is then truncated to the rank asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .compose import Factors
from .delta import reduce
from .extract import spectrum


def concatenated(parts: Sequence[tuple[float, Tensor, Tensor]]) -> Factors:
    """(w s, A, B) of each adapter -> factors of scale 1 whose change is the exact weighted sum."""
    A = torch.cat([scale * A.double() for scale, A, _ in parts])
    return Factors(A, torch.cat([B.double() for _, _, B in parts], 1))


def reduced(factors: Factors, rank: int) -> tuple[Factors, float]:
    """The nearest factors of rank `rank`, and the share of the change's energy that they keep."""
    B, A, kept = reduce(factors.B, factors.A, rank)
    return Factors(A, B), kept


def ties(deltas: Sequence[Tensor], density: float) -> Tensor:
    """Trim, elect sign, merge: of each change its largest `density` share by magnitude; the sign with the larger sum at
    each place; the mean of the changes that agree with it. Weights are folded into `deltas` [out, in]."""
    trimmed = torch.stack([_largest(delta, density) for delta in deltas])
    sign = trimmed.sum(0).sign()
    agree = (trimmed.sign() == sign) & (trimmed != 0)
    return (trimmed * agree).sum(0) / agree.sum(0).clamp_min(1)


def _largest(delta: Tensor, density: float) -> Tensor:
    keep = max(1, round(density * delta.numel()))
    if keep >= delta.numel():
        return delta
    threshold = delta.abs().flatten().kthvalue(delta.numel() - keep + 1).values
    return torch.where(delta.abs() >= threshold, delta, 0)


def dare(deltas: Sequence[Tensor], density: float, generator: torch.Generator) -> Tensor:
    """Sum of changes, each with its numbers dropped at random and the rest divided by `density`: right on average."""
    total = torch.zeros_like(deltas[0])
    for delta in deltas:
        kept = torch.rand(delta.shape, generator=generator, dtype=torch.float32) < density
        total += torch.where(kept, delta / density, 0)
    return total


def truncated(delta: Tensor, rank: int) -> tuple[Factors, float]:
    """A dense change as factors of rank `rank`, and the share of its energy that they keep."""
    found = spectrum(delta, rank)
    return found.truncated(rank), found.kept(rank)
