"""Streaming statistics of a linear layer's inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PANEL = 256  # columns per panel of the symmetric product: only the upper panels are computed


@dataclass
class SecondMoment:
    """H = (1/n) sum over tokens of x xᵀ, [in, in]; GPTQ's Hessian up to a factor that it does not feel.

    Sequences are added one at a time, so the sum does not depend on how they were batched.
    """

    total: Tensor  # [in, in]: upper panels of sum x xᵀ
    tokens: int = 0

    @classmethod
    def zeros(
        cls, in_features: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> SecondMoment:
        return cls(torch.zeros(in_features, in_features, dtype=dtype, device=device))

    def add(self, x: Tensor) -> None:
        """x: [tokens, in], or [batch, ..., in]: what is between counts as tokens."""
        sequences = x[None] if x.dim() == 2 else x.reshape(x.shape[0], -1, x.shape[-1])
        for sequence in sequences.to(self.total.dtype):
            if sequence.shape[0] == 0:
                continue
            for start in range(0, sequence.shape[1], _PANEL):
                left = sequence[:, start : start + _PANEL]
                self.total[start : start + _PANEL, start:].addmm_(left.T, sequence[:, start:])
            self.tokens += sequence.shape[0]

    def merge(self, other: SecondMoment) -> SecondMoment:
        """The statistic of both token sets."""
        return SecondMoment(self.total + other.total, self.tokens + other.tokens)

    def hessian(self) -> Tensor:
        """H [in, in], symmetric; zeros when no token was seen."""
        whole = self.total.triu()
        whole.add_(self.total.triu(1).T)
        return whole.div_(max(self.tokens, 1))


@dataclass
class Deviation:
    """D = (1/n) sum over tokens of (x̃ - x) xᵀ, [in, in]: how inputs x miss those of another model, x̃, along themselves."""

    total: Tensor
    tokens: int = 0

    @classmethod
    def zeros(
        cls, in_features: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Deviation:
        return cls(torch.zeros(in_features, in_features, dtype=dtype, device=device))

    def add(self, x: Tensor, other: Tensor) -> None:
        """x, other: [batch, ..., in], the same tokens through either model."""
        width = x.shape[-1]
        for one, two in zip(x.reshape(x.shape[0], -1, width), other.reshape(x.shape[0], -1, width), strict=True):
            one = one.to(self.total.dtype)
            self.total.addmm_((two.to(self.total.dtype) - one).T, one)
            self.tokens += one.shape[0]

    def mean(self) -> Tensor:
        """D [in, in]; zeros when no token was seen."""
        return self.total / max(self.tokens, 1)
