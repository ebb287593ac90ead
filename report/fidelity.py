"""How far a candidate's predictions are from the base's, token by token, whatever the text says.

For one position let p be the base's distribution over the vocabulary, q the candidate's and d = log p - log q:

    KL(p||q) = sum p d          = sum p (d + exp(-d) - 1)      the candidate's error as the base sees it
    KL(q||p) = sum q (-d)       = sum q (exp(d) - d - 1)       the reverse: mass that the candidate invents

The right-hand forms are equal because p and q sum to 1. Their terms are never negative and of second order in d, so that
float32 resolves divergences far below 1e-7 where the plain sums would cancel; identical predictions give exactly 0.

Beside them, in llama.cpp's terms: delta-p, the change of the probability of the token that really follows, its mean and
root mean square; top-1 agreement; flips, tokens that the base's first guess had right and the candidate's has wrong, and
the reverse (Dutta et al. 2024, arXiv 2407.09141). Every mean is clustered by document (`clusters.py`); a quantile takes
its interval from the clustered interval of the share of tokens below it (Woodruff 1952, JASA 47, 635-646).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .clusters import ClusterMean, cluster_mean, t_interval
from .windows import Windows

TOKEN_FIELDS = np.dtype(
    [
        ("nll_base", "<f4"),
        ("nll_candidate", "<f4"),
        ("kl", "<f4"),  # of the candidate from the base, nats
        ("kl_reverse", "<f4"),
        ("top_p_base", "<f4"),  # probability of the base's first guess
        ("same_top", "u1"),  # both have the same first guess
        ("right_base", "u1"),  # the first guess is the token that follows
        ("right_candidate", "u1"),
    ]
)
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
CONFIDENCE = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # edges of the buckets of the base's highest probability
BINS_PER_DECADE, LOWEST, HIGHEST = 4, -10, 2  # of the histogram of KL, powers of ten

FloatArray = npt.NDArray[np.float64]


def token_fidelity(p: Tensor, q: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """`TOKEN_FIELDS` of n positions: logits of base and candidate [n, V] float32, the tokens that follow [n] int64.

    A logit of -inf is a probability of 0; where only the candidate gives 0 the divergence is infinite.
    """
    log_p, log_q = torch.log_softmax(p, dim=1), torch.log_softmax(q, dim=1)
    right = targets[:, None]
    kl, reverse = _divergences(log_p, log_q)
    top_p, guess_p = log_p.max(dim=1)
    guess_q = log_q.argmax(dim=1)
    return {
        "nll_base": -log_p.gather(1, right)[:, 0],
        "nll_candidate": -log_q.gather(1, right)[:, 0],
        "kl": kl,
        "kl_reverse": reverse,
        "top_p_base": top_p.exp(),
        "same_top": guess_p == guess_q,
        "right_base": guess_p == targets,
        "right_candidate": guess_q == targets,
    }


def _divergences(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p||q) and KL(q||p), each [n], of log-probabilities [n, V].

    With e = exp(-d) - 1 the terms of the form without cancellation are p (d + e) and -p (d + e + e d): one exponential
    for both. It holds where |d| <= 1; the few entries beyond, and where both are -inf, are gathered and done by themselves.
    """
    d = log_p - log_q
    far = (~(d.abs() <= 1)).view(-1).nonzero()[:, 0]  # NaN, from two -inf, is not <= 1 either
    if len(far):
        d.view(-1)[far] = 0
    p = log_p.exp()
    e = torch.expm1(-d)
    second_order = d + e
    forward = (p * second_order).sum(dim=1)
    reverse = -(p * e.mul_(d).add_(second_order)).sum(dim=1)
    if len(far):
        row = far // log_p.shape[1]
        log_p, log_q = log_p.reshape(-1)[far], log_q.reshape(-1)[far]
        forward.index_add_(0, row, _far_terms(log_p, log_q))
        reverse.index_add_(0, row, _far_terms(log_q, log_p))
    return forward, reverse


def _far_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p d - p + q of single entries; 0 where both are impossible."""
    p, d = log_p.exp(), log_p - log_q
    zero = torch.zeros((), device=d.device)
    terms = torch.where(p == 0, zero, p * d) - p + log_q.exp()
    return torch.where(log_p == log_q, zero, terms)


def summarize(windows: Windows, tokens: npt.NDArray[Any], level: float) -> dict[str, Any]:
    """The section `fidelity` of the report, from (n_scored,) rows of `TOKEN_FIELDS` in the plan's order."""
    kl, dp = tokens["kl"].astype(np.float64), delta_p(tokens)
    lost, won = _flips(tokens)

    rows = {
        "kl": (kl, "lower_is_better", "nats per token", _at_least_0),
        "kl_reverse": (tokens["kl_reverse"], "lower_is_better", "nats per token", _at_least_0),
        "same_top": (tokens["same_top"], "higher_is_better", "share of tokens", _share),
        "delta_p": (dp, "higher_is_better", "probability", float),
        "delta_p_rms": (np.square(dp), "lower_is_better", "probability", _root),
        "right_to_wrong": (lost, "lower_is_better", "share of tokens", _share),
        "wrong_to_right": (won, "higher_is_better", "share of tokens", _share),
    }
    return {
        "metrics": [
            _row(name, _mean(windows, values, level), direction, scale) | {"unit": unit}
            for name, (values, direction, unit, scale) in rows.items()
        ],
        "kl_quantiles": [_quantile(windows, kl, q, level) for q in QUANTILES],
        "kl_max": _number(float(kl.max())),
        "confidence": _buckets(windows, tokens, kl, level),
        "kl_histogram": histogram(kl),
    }


def delta_p(tokens: npt.NDArray[Any]) -> FloatArray:
    """Candidate's probability of the token that follows, less the base's."""
    return np.exp(-tokens["nll_candidate"].astype(np.float64)) - np.exp(-tokens["nll_base"].astype(np.float64))


def noise_floor(windows: Windows, tokens: npt.NDArray[Any], level: float, what: str) -> dict[str, Any]:
    """The base against itself: what arithmetic alone does to the figures, on some of the windows."""
    measured, agreed = (_mean(windows, tokens[name], level) for name in ("kl", "same_top"))
    return {
        "what": what,
        "windows": windows.n_windows,
        "metrics": [
            _row("kl", measured, "lower_is_better", _at_least_0) | {"unit": "nats per token"},
            _row("same_top", agreed, "higher_is_better", _share) | {"unit": "share of tokens"},
        ],
        "kl_histogram": histogram(tokens["kl"]),
    }


def histogram(values: npt.NDArray[Any]) -> dict[str, Any]:
    """Shares of tokens by decimal logarithm of the divergence; what is below the lowest bin, zeros too, by itself."""
    edges = np.linspace(LOWEST, HIGHEST, (HIGHEST - LOWEST) * BINS_PER_DECADE + 1)
    with np.errstate(divide="ignore"):
        logs = np.log10(np.maximum(values.astype(np.float64), 0))
    inside = np.clip(logs[logs >= LOWEST], LOWEST, HIGHEST)
    counts = np.histogram(inside, edges)[0]
    return {
        "log10_edges": [round(float(edge), 4) for edge in edges],
        "shares": [round(float(count) / values.size, 8) for count in counts],
        "below": round(float((logs < LOWEST).mean()), 8),
    }


def _flips(tokens: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    base, candidate = tokens["right_base"].astype(bool), tokens["right_candidate"].astype(bool)
    return base & ~candidate, ~base & candidate


def _quantile(windows: Windows, values: FloatArray, q: float, level: float) -> dict[str, Any]:
    """A quantile and its Woodruff interval."""
    value = float(np.quantile(values, q, method="inverted_cdf"))
    below = _mean(windows, values <= value, level)
    bounds = None
    if below.low is not None and below.se_jackknife is not None:
        shares = np.clip(t_interval(q, below.se_jackknife, below.df, level), 0, 1)
        bounds = [_number(float(x)) for x in np.quantile(values, shares, method="inverted_cdf")]
    return {"quantile": q, "value": _number(value), "ci": bounds}


def _buckets(windows: Windows, tokens: npt.NDArray[Any], kl: FloatArray, level: float) -> list[dict[str, Any]]:
    """Tokens by how sure the base is: where a small change of the distribution costs an answer, and where it does not."""
    rows = []
    top = tokens["top_p_base"]
    for low, high in itertools.pairwise(CONFIDENCE):
        inside = (top >= low) & ((top < high) | (high == 1.0))
        row: dict[str, Any] = {"from": low, "to": high, "n_tokens": int(inside.sum())}
        for name, values, scale in (("kl", kl, _at_least_0), ("same_top", tokens["same_top"], _share)):
            row[name] = _in_bucket(windows, values, inside, level, scale)
        rows.append(row)
    return rows


def _in_bucket(
    windows: Windows, values: npt.NDArray[Any], inside: npt.NDArray[Any], level: float, scale: Callable[[float], float]
) -> dict[str, Any] | None:
    if not inside.any():
        return None
    members = [part.astype(bool) for part in windows.by_document(inside)]
    parts = [part[member] for part, member in zip(windows.by_document(values), members, strict=True)]
    mean = cluster_mean(parts, level=level, cluster=windows.cluster)
    bounds = None
    if mean.low is not None and mean.high is not None:
        bounds = [_number(scale(mean.low)), _number(scale(mean.high))]
    return {"value": _number(mean.mean), "ci": bounds, "n_clusters": mean.n_clusters}


def _mean(windows: Windows, values: npt.NDArray[Any], level: float) -> ClusterMean:
    return cluster_mean(windows.by_document(values), level=level, cluster=windows.cluster)


def _at_least_0(x: float) -> float:
    return max(x, 0.0)


def _share(x: float) -> float:
    return min(max(x, 0.0), 1.0)


def _root(x: float) -> float:
    return math.sqrt(max(x, 0.0))


def _row(name: str, mean: ClusterMean, direction: str, scale: Callable[[float], float]) -> dict[str, Any]:
    bounds = None
    if mean.low is not None and mean.high is not None:
        bounds = [_number(scale(mean.low)), _number(scale(mean.high))]
    return {
        "name": name,
        "value": _number(scale(mean.mean)),
        "ci": bounds,
        "level": mean.level,
        "cluster": mean.cluster,
        "n_clusters": mean.n_clusters,
        "n_clusters_eff": mean.g_star,
        "df": mean.df,
        "n_tokens": mean.n_values,
        "deff": _number(mean.deff),
        "direction": direction,
    }


def _number(value: float | None) -> float | str | None:
    """JSON has no infinity; it is written as a string, never dropped."""
    if value is None or math.isnan(value):
        return None
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
