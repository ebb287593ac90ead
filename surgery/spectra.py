"""How low-rank is each matrix, for the inputs that it gets? Spectra of W C^(1/2), C = E[x xᵀ].

The best rank-r stand-in for W on inputs with second moment C keeps the top r of the eigenvalues of W C Wᵀ (SVD-LLM,
CARE): of the energy E||W x||² = tr(W C Wᵀ) their share is retained. C = I gives the plain singular values. No stock
class holds two factors in place of one matrix; the figures say what compressing the cache, pruning or an adapter could
gain.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

_FRACTIONS = (16, 8, 4, 2)
_SHARES = (0.9, 0.95, 0.99, 0.999)
_PROFILE = 17  # singular values that stand for a spectrum, at evenly spaced ranks


class SpectraSettings(BaseModel):
    """What is looked at."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    activations: bool = Field(True, description="weigh by the calibration text's activations; false: the weights alone")
    ranks: list[int] | None = Field(
        None,
        min_length=1,
        description="ranks whose retained energy is reported; default 1/16, 1/8, 1/4, 1/2 of the full",
    )


def energies(weight: Tensor, moment: Tensor | None) -> Tensor:
    """Eigenvalues of W C Wᵀ, largest first, float64: weight [out, in], moment [in, in] (None: identity)."""
    w = weight.double()
    if moment is None:
        return torch.linalg.svdvals(w).square()
    c = moment.double()
    if w.shape[0] <= w.shape[1]:
        gram = w @ c @ w.T
    else:  # the same eigenvalues from the smaller side
        values, vectors = torch.linalg.eigh(c)
        root = vectors * values.clamp_min(0).sqrt()
        gram = root.T @ (w.T @ w) @ root
    return torch.linalg.eigvalsh((gram + gram.T) / 2).clamp_min(0).flip(0)


def described(spectrum: Tensor, shape: tuple[int, int], ranks: list[int] | None) -> dict[str, Any]:
    """The spectrum in a few numbers. `rank_for`: smallest rank that retains the share of energy; `singular_values`: 17 of
    them at evenly spaced ranks, first and last included."""
    total = spectrum.sum()
    full = min(shape)
    kept = spectrum.cumsum(0) / total if bool(total > 0) else torch.ones_like(spectrum)
    wanted = ranks or sorted({max(1, full // part) for part in _FRACTIONS})
    share = spectrum / total if bool(total > 0) else spectrum
    entropy = -(share[share > 0] * share[share > 0].log()).sum()
    return {
        "retained_energy": {str(r): _short(float(kept[min(r, full) - 1])) for r in wanted},
        "rank_for": {f"{s:g}": int((kept < s - 1e-12).sum()) + 1 for s in _SHARES},
        "effective_rank": _short(float(entropy.exp())),
        "stable_rank": _short(float(total / spectrum[0])) if bool(total > 0) else 0.0,
        "largest": _short(float(spectrum[0].sqrt())),
        "singular_values": profile(spectrum),
    }


def profile(spectrum: Tensor) -> list[float]:
    """Singular values at 17 evenly spaced ranks, first and last included, of energies in falling order."""
    places = torch.linspace(0, spectrum.numel() - 1, _PROFILE, dtype=torch.float64).round().long()
    return [_short(float(x)) for x in spectrum[places].clamp_min(0).sqrt()]


def break_even(shape: tuple[int, int]) -> int:
    """Rank below which two factors hold fewer numbers than the matrix."""
    return -(-shape[0] * shape[1] // (shape[0] + shape[1])) - 1


def _short(value: float) -> float:
    return float(f"{value:.5g}")
