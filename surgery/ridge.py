"""Ridge regression of a linear layer on streamed tokens, around the weights that it has.

With inputs Z [T, in] and the residual R = Y − Z Wᵀ that the layer should have put out and did not,

    ΔW = argmin Σ_t |R_t − ΔW z_t|² + λ n tr(Zᵀ Z)/(n in) |ΔW|² = (ZᵀZ + l 1)⁻¹ Zᵀ R,   l = λ mean diag(ZᵀZ)

so that a layer whose outputs are right already stays what it is, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor


class RefitSettings(BaseModel):
    """Settings of `refit`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: list[Literal["o_proj", "down_proj"]] = Field(
        ["o_proj", "down_proj"], min_length=1, description="which layers of each block are fitted"
    )
    ridge: float = Field(0.01, gt=0, description="pull towards the weights as they are, in mean squared inputs")


@dataclass(frozen=True)
class Correction:
    """What was added, and how far it reaches on the tokens it was fitted on."""

    delta: Tensor  # [out, in], float64
    before: float  # sum of squares of R over that of Y
    after: float


@dataclass
class Ridge:
    """Sums over the tokens seen so far; float64."""

    gram: Tensor  # [in, in] Σ z zᵀ
    cross: Tensor  # [in, out] Σ z rᵀ
    residual: float = 0.0  # Σ |r|²
    target: float = 0.0  # Σ |y|²

    @classmethod
    def zeros(cls, in_features: int, out_features: int, device: torch.device | str = "cpu") -> Ridge:
        gram = torch.zeros(in_features, in_features, dtype=torch.float64, device=device)
        return cls(gram, gram.new_zeros(in_features, out_features))

    def add(self, Z: Tensor, R: Tensor, Y: Tensor) -> None:
        """Z [T, in], R [T, out], Y [T, out]: inputs, what was missing, and what was wanted."""
        Z, R = Z.double(), R.double()
        self.gram.addmm_(Z.T, Z)
        self.cross.addmm_(Z.T, R)
        self.residual += float(R.square().sum())
        self.target += float(Y.double().square().sum())

    def solve(self, ridge: float) -> Correction:
        """ΔW; all zeros when no input was ever other than zero."""
        scale = float(self.gram.diagonal().mean())
        if scale == 0.0:
            return Correction(torch.zeros_like(self.cross.T), self._share(self.residual), self._share(self.residual))
        A = self.gram + ridge * scale * torch.eye(len(self.gram), dtype=torch.float64, device=self.gram.device)
        delta = torch.linalg.solve(A, self.cross)  # [in, out]
        after = self.residual - 2 * float((delta * self.cross).sum()) + float((delta * (self.gram @ delta)).sum())
        return Correction(delta.T, self._share(self.residual), self._share(max(after, 0.0)))

    def _share(self, energy: float) -> float:
        return energy / self.target if self.target > 0 else 0.0
