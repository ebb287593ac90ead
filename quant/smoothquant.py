"""SmoothQuant: move what makes activations hard to round into the weights, which are easy (arXiv 2211.10438).

A few channels of x are far larger than the rest and set the scale of all. With s_j = max |x_j|^α / max |W_:j|^(1-α),
x / s and W diag(s) share the burden; α says how much of it the weights take. Weights become int8 with one scale per
output, inputs int8 with one scale per token (dynamic) or one for all (static).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..calibrate.activations import through_integers
from .scheme import Scheme

W8 = Scheme(8, -1)
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 1.0)  # tried by the search, beside no smoothing


def smoothing(largest: Tensor, widest: Tensor, alpha: float) -> Tensor:
    """s [channels] for max |x| and max |W| per channel, both [channels]; a dead channel of either gets 1."""
    live = (largest > 0) & (widest > 0)
    s = largest.clamp(min=1e-5) ** alpha / widest.clamp(min=1e-5) ** (1 - alpha)
    # balanced like AWQ's: a common factor changes nothing in exact arithmetic, but would move the norm's weights
    if bool(live.any()):
        s = s / (s[live].max() * s[live].min()).sqrt()
    return torch.where(live & torch.isfinite(s), s, torch.ones_like(s)).clamp(1e-5, 1e5)


def integer_output(x: Tensor, weight: Tensor, s: Tensor, input_scale: Tensor | None) -> Tensor:
    """What x [..., in] gives under a dequantized weight [out, in] of W diag(s), through integers."""
    return through_integers(x / s, input_scale) @ weight.T
