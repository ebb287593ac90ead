"""A low-rank adapter out of two checkpoints: D = W_tuned - W_base of each layer, truncated to the rank that is asked for.

The singular values come from a randomized SVD with power iterations (Halko, Martinsson & Tropp 2011, algorithm 5.1) in
twice as many dimensions as are asked for; small matrices take a full SVD. Shares are of ||D||^2 itself, so what the
iterations miss counts as not kept. Ranks are fixed, chosen
per layer to keep a share of ||D||^2, or chosen over all layers within a budget of parameters: singular values of all
layers in order of what one parameter buys, sigma^2 / (out + in).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .compose import Factors

_FULL = 512  # a matrix with no more rows or columns than this takes a full SVD


@dataclass(frozen=True, eq=False)
class Spectrum:
    """D ~ U diag(S) V^T, float64, and ||D||^2, of which S may miss a part."""

    U: Tensor  # [out, k]
    S: Tensor  # [k], descending
    Vh: Tensor  # [k, in]
    energy: float

    def truncated(self, r: int) -> Factors:
        """B A = the first r components, split evenly."""
        root = self.S[:r].sqrt()
        return Factors(root[:, None] * self.Vh[:r], self.U[:, :r] * root)

    def kept(self, r: int) -> float:
        """Share of ||D||^2 in the first r components."""
        return float(self.S[:r].square().sum()) / self.energy if self.energy else 1.0

    @property
    def cost(self) -> int:
        """Parameters of one rank."""
        return self.U.shape[0] + self.Vh.shape[1]


def spectrum(D: Tensor, most: int, seed: int = 0, power: int = 4) -> Spectrum:
    """The `most` largest singular values of D [out, in] with their vectors."""
    D = D.double()
    energy, smaller = float(D.square().sum()), min(D.shape)
    if smaller <= _FULL or 2 * most >= smaller:
        U, S, Vh = torch.linalg.svd(D, full_matrices=False)
    else:
        width = min(smaller, most + max(10, most))
        generator = torch.Generator().manual_seed(seed)
        Y = D @ torch.randn(D.shape[1], width, dtype=D.dtype, generator=generator)
        for _ in range(power):
            Y, _ = torch.linalg.qr(D @ (D.T @ torch.linalg.qr(Y)[0]))
        Q, _ = torch.linalg.qr(Y)
        U, S, Vh = torch.linalg.svd(Q.T @ D, full_matrices=False)
        U = Q @ U
    return Spectrum(U[:, :most], S[:most], Vh[:most], energy)


def rank_for_energy(found: Spectrum, share: float) -> int:
    """The least rank that keeps `share` of ||D||^2, at least 1; all there is when the spectrum holds less."""
    sums = found.S.square().cumsum(0)
    enough = torch.nonzero(sums >= share * found.energy)
    return int(enough[0]) + 1 if len(enough) else found.S.shape[0]


def ranks_for_budget(spectra: Mapping[str, Spectrum], budget: int) -> dict[str, int]:
    """Ranks whose parameters fit into `budget` and whose kept energy is the most a greedy choice finds; 0 is possible."""
    ranks = dict.fromkeys(spectra, 0)
    queue = [(-(float(s.S[0]) ** 2) / s.cost, name) for name, s in spectra.items() if s.S.shape[0] and s.energy]
    heapq.heapify(queue)
    while queue:
        _, name = heapq.heappop(queue)
        found = spectra[name]
        if found.cost > budget:
            continue
        budget -= found.cost
        ranks[name] += 1
        if ranks[name] < found.S.shape[0]:
            heapq.heappush(queue, (-(float(found.S[ranks[name]]) ** 2) / found.cost, name))
    return ranks
