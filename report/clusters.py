"""Means of per-token values whose tokens come in documents, with the interval that respects the documents.

Tokens of one document resemble each other, so the token count overstates what was learnt: on WikiText-2 the standard
error from documents is five times the one from tokens. Every number here therefore takes its error bar from whole
documents (clusters). With S_g the sum and n_g the count of the values of document g, G documents, N values:

    m       = sum S_g / N                                       token-weighted mean
    e_g     = S_g - m n_g
    se_J    = sqrt( (G-1)/G  sum (m_(g) - m)^2 ),  m_(g) - m = -e_g / (N - n_g)     delete-one-document jackknife (CV3)
    se_CR1  = sqrt( G/(G-1)  sum e_g^2 ) / N                                        sandwich, as a check
    se_tok  = s / sqrt(N)                                                           what most tools print
    DEFF    = (se_J / se_tok)^2,   n_eff = N / DEFF,   G* = N^2 / sum n_g^2

Intervals are m +- t_{G-1} se_J on the log scale, exponentiated for perplexity and for ratios of perplexities:
asymmetric, never negative. Two models are compared token by token (d = new - base, identical tokens), which removes
most of the document effect. All arithmetic is float64.

Sources: Cameron & Miller 2015, "A practitioner's guide to cluster-robust inference"; MacKinnon, Nielsen & Webb 2023,
"Cluster-robust inference: a guide to empirical practice" (the jackknife with few, uneven clusters); Miller 2024
(arXiv 2411.00640) on paired, clustered evaluation of language models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..checkpoint.errors import SutureError

FEW_CLUSTERS = 20  # effective clusters below which an interval is printed with a warning
MIN_CLUSTERS = 5  # clusters below which no interval is printed at all: its real coverage is unknown

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClusterMean:
    """A token-weighted mean over clusters. Standard errors and `low`, `high` are on the scale of the values.

    None means "not defined here": standard errors with one cluster or with infinite values, `deff` and `n_eff` also
    when every value is equal, `low` and `high` also with fewer than 5 clusters.
    """

    mean: float
    n_clusters: int  # G, clusters that hold at least one value
    n_values: int  # N
    se_jackknife: float | None
    se_cr1: float | None
    se_token: float | None
    deff: float | None
    n_eff: float | None
    g_star: float
    df: int  # G - 1
    level: float
    low: float | None
    high: float | None
    cluster: str  # what a cluster is: "document" or "block"
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood, and bits per byte when the bytes are known.

    `se` is the delta-method value PPL * se_J, for a "+-" in a table; the interval is the exponentiated one.
    """

    ppl: float
    low: float | None
    high: float | None
    se: float | None
    bits_per_byte: float | None
    bits_per_byte_low: float | None  # only when bytes were given per document
    bits_per_byte_high: float | None
    log: ClusterMean  # of the negative log-likelihoods, nats per token


@dataclass(frozen=True)
class Paired:
    """New model against base on identical tokens: ratio = PPL_new / PPL_base = exp(mean of nll_new - nll_base)."""

    ratio: float
    low: float | None
    high: float | None
    se: float | None  # delta method: ratio * se_J
    p_value: float | None  # two-sided t test of ratio 1; None where no interval is given
    delta_ppl: float
    delta_ppl_se: float | None  # CR1
    delta_ppl_low: float | None  # jackknife of the difference itself
    delta_ppl_high: float | None
    correlation: float | None  # of the two models' token NLLs
    log: ClusterMean  # of the differences, nats per token
    base: Perplexity
    new: Perplexity

    def upper_bound(self, level: float = 0.95) -> float | None:
        """One-sided upper confidence bound of the ratio; None where no interval is given."""
        _check_level(level)
        if self.log.low is None or self.log.se_jackknife is None:
            return None
        return _exp(self.log.mean + _t_quantile(level, self.log.df) * self.log.se_jackknife)

    def non_inferior(self, margin: float, level: float = 0.95) -> bool | None:
        """Whether the one-sided bound of the ratio lies under 1 + margin (0.01 = one percent); None without a bound."""
        bound = self.upper_bound(level)
        return None if bound is None else bound < 1 + margin


def cluster_mean(values: Sequence[npt.ArrayLike], *, level: float = 0.95, cluster: str = "document") -> ClusterMean:
    """The mean of all values with its standard errors and t interval.

    values: one 1-D array per cluster (any lengths; a cluster without values does not count).
    Infinite values are kept: the mean is then infinite and there is no interval.
    Raises SutureError: a NaN (named by cluster and position), no values at all, `level` outside (0, 1).
    """
    _check_level(level)
    checked = [_checked(array, g, cluster) for g, array in enumerate(values)]
    kept = [array for array in checked if array.size]
    if not kept:
        raise SutureError(f"no values in any {cluster}", "score at least one token")
    pooled = np.concatenate(kept)
    sizes = np.array([array.size for array in kept], dtype=np.float64)
    infinite = _infinite_note(checked, cluster)
    N, G = pooled.size, len(kept)
    mean = float(pooled.mean())
    se_jackknife, se_cr1, se_token = (None, None, None) if infinite else _standard_errors(kept, pooled, mean, sizes)
    deff = (se_jackknife / se_token) ** 2 if se_jackknife is not None and se_token else None
    g_star = float(N**2 / np.square(sizes).sum())
    low, high = (None, None)
    if G >= MIN_CLUSTERS and se_jackknife is not None:
        low, high = t_interval(mean, se_jackknife, G - 1, level)
    return ClusterMean(
        mean=mean,
        n_clusters=G,
        n_values=N,
        se_jackknife=se_jackknife,
        se_cr1=se_cr1,
        se_token=se_token,
        deff=deff,
        n_eff=N / deff if deff else None,
        g_star=g_star,
        df=G - 1,
        level=level,
        low=low,
        high=high,
        cluster=cluster,
        warnings=(*infinite, *_few_clusters(G, g_star, cluster)),
    )


def perplexity(
    nll: Sequence[npt.ArrayLike],
    *,
    n_bytes: float | Sequence[float] | FloatArray | None = None,
    level: float = 0.95,
    cluster: str = "document",
) -> Perplexity:
    """Perplexity per token, with its interval, and bits per byte.

    nll: negative log-likelihoods in nats, one 1-D array per document.
    n_bytes: UTF-8 bytes of the text that was scored, in all or per document (then bits per byte has an interval too).
    Raises SutureError: as `cluster_mean`; bytes that do not match the documents.
    """
    log = cluster_mean(nll, level=level, cluster=cluster)
    bpb, bpb_low, bpb_high = _bits_per_byte(nll, n_bytes, log) if n_bytes is not None else (None, None, None)
    ppl = _exp(log.mean)
    return Perplexity(
        ppl=ppl,
        low=_exp(log.low) if log.low is not None else None,
        high=_exp(log.high) if log.high is not None else None,
        se=ppl * log.se_jackknife if log.se_jackknife is not None else None,
        bits_per_byte=bpb,
        bits_per_byte_low=bpb_low,
        bits_per_byte_high=bpb_high,
        log=log,
    )


def paired(
    base: Sequence[npt.ArrayLike],
    new: Sequence[npt.ArrayLike],
    *,
    n_bytes: float | Sequence[float] | FloatArray | None = None,
    level: float = 0.95,
    cluster: str = "document",
) -> Paired:
    """Compare two models on the same tokens.

    base, new: negative log-likelihoods in nats, one 1-D array per document, token by token the same targets.
    Where both are the same infinity the difference is 0. Identical inputs give ratio 1, standard error 0, p = 1.
    Raises SutureError: unequal shapes, a NaN (named by model, document and token), infinities of both signs.

    >>> base = [[2.1, 1.9], [2.0, 2.2, 1.8], [2.3], [1.7, 2.0], [2.4, 1.6]]
    >>> found = paired(base, [[x + 0.01 for x in document] for document in base])
    >>> round(found.ratio, 4), found.log.n_clusters, found.log.n_values
    (1.0101, 5, 10)
    """
    _check_same_shape(base, new, cluster)
    x = [_checked(array, g, cluster, "base: ") for g, array in enumerate(base)]
    y = [_checked(array, g, cluster, "new: ") for g, array in enumerate(new)]
    d = [_difference(b, n) for b, n in zip(x, y, strict=True)]
    log = cluster_mean(d, level=level, cluster=cluster)
    base_ppl = perplexity(x, n_bytes=n_bytes, level=level, cluster=cluster)
    new_ppl = perplexity(y, n_bytes=n_bytes, level=level, cluster=cluster)
    ratio = _exp(log.mean)
    identical = all(not array.any() for array in d)
    delta_low, delta_high = _delta_ppl_interval(x, y, base_ppl, new_ppl, log)
    return Paired(
        ratio=ratio,
        low=_exp(log.low) if log.low is not None else None,
        high=_exp(log.high) if log.high is not None else None,
        se=ratio * log.se_jackknife if log.se_jackknife is not None else None,
        p_value=1.0 if identical else _p_value(log),
        delta_ppl=0.0 if identical else new_ppl.ppl - base_ppl.ppl,
        delta_ppl_se=0.0 if identical else _delta_ppl_se(x, y, base_ppl, new_ppl),
        delta_ppl_low=delta_low,
        delta_ppl_high=delta_high,
        correlation=_correlation(np.concatenate(x), np.concatenate(y)),
        log=log,
        base=base_ppl,
        new=new_ppl,
    )


def jackknife_se(e: FloatArray, sizes: FloatArray) -> float | None:
    """Delete-one-cluster standard error, centred at the full mean, of a ratio of sums.

    e: (G,) residual sums S_g - m n_g; sizes: (G,) the n_g. None with one cluster.
    """
    G = e.size
    if G < 2:
        return None
    deviations = e / (sizes.sum() - sizes)
    return float(np.sqrt((G - 1) / G * np.square(deviations).sum()))


def cr1_se(e: FloatArray, total: float) -> float | None:
    """Sandwich standard error with the G/(G-1) correction. e: (G,) residual sums; total: N. None with one cluster."""
    G = e.size
    return float(np.sqrt(G / (G - 1) * np.square(e).sum()) / total) if G > 1 else None


def t_interval(mean: float, se: float, df: int, level: float = 0.95) -> tuple[float, float]:
    """mean +- t_{df, 1 - (1-level)/2} * se, for any `df` of at least 1."""
    half = _t_quantile(0.5 + level / 2, df) * se
    return mean - half, mean + half


def t_test(mean: float, se: float, df: int) -> float:
    """Two-sided p-value of mean 0. A zero standard error gives 1 for a zero mean and 0 for any other."""
    from scipy import stats

    if se == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(mean / se), df))


def _t_quantile(probability: float, df: int) -> float:
    from scipy import stats

    return float(stats.t.ppf(probability, df))


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise SutureError(f"level = {level}: expected a number between 0 and 1", "use 0.95")


def _checked(array: npt.ArrayLike, index: int, cluster: str, model: str = "") -> FloatArray:
    """The array as float64, 1-D, without NaN."""
    values = np.asarray(array, dtype=np.float64)
    if values.ndim != 1:
        raise SutureError(f"{model}{cluster} {index}: expected a 1-D array of token values, found shape {values.shape}")
    bad = np.flatnonzero(np.isnan(values))
    if bad.size:
        raise SutureError(
            f"{model}{cluster} {index}, token {bad[0]}: the value is NaN ({bad.size} of {values.size} tokens here)",
            "a layer produced NaN or overflowed; find the first layer with non-finite output, or run in float32",
        )
    return values


def _standard_errors(
    kept: list[FloatArray], pooled: FloatArray, mean: float, sizes: FloatArray
) -> tuple[float | None, float | None, float | None]:
    """(se_J, se_CR1, se_token) of finite values."""
    N = pooled.size
    e = np.array([(array - mean).sum() for array in kept])
    se_token = float(pooled.std(ddof=1) / math.sqrt(N)) if N > 1 else None
    return jackknife_se(e, sizes), cr1_se(e, N), se_token


def _infinite_note(checked: list[FloatArray], cluster: str) -> tuple[str, ...]:
    """One warning that counts and places the infinite values, or none. Both signs together have no mean: refused."""
    found = [(g, np.flatnonzero(np.isinf(array))) for g, array in enumerate(checked)]
    found = [(g, at) for g, at in found if at.size]
    if not found:
        return ()
    g, at = found[0]
    where = f"the first in {cluster} {g} at token {at[0]}"
    if len({float(np.sign(checked[g][i])) for g, at in found for i in at}) == 2:
        raise SutureError(
            f"infinite values of both signs, {where}: their mean is undefined",
            "each model gives probability zero to some token; find the layer whose output overflows",
        )
    return (f"{sum(at.size for _, at in found)} infinite values, {where}: no standard error, no interval",)


def _few_clusters(n_clusters: int, g_star: float, cluster: str) -> tuple[str, ...]:
    if n_clusters < MIN_CLUSTERS:
        return (f"{n_clusters} {cluster}(s): no interval; at least {MIN_CLUSTERS} are needed",)
    if g_star < FEW_CLUSTERS:
        return (
            f"{g_star:.1f} effective {cluster}s of {n_clusters} (under {FEW_CLUSTERS}): "
            "the interval covers less often than it says",
        )
    return ()


def _exp(x: float) -> float:
    """exp that gives infinity instead of OverflowError."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _bits_per_byte(
    nll: Sequence[npt.ArrayLike], n_bytes: float | Sequence[float] | FloatArray, log: ClusterMean
) -> tuple[float, float | None, float | None]:
    """sum S_g / (ln 2 * bytes), and its jackknife interval when the bytes are given per document."""
    found = nats_per_unit(nll, n_bytes, log)
    return tuple(None if x is None else x / math.log(2) for x in found)  # type: ignore[return-value]


def nats_per_unit(
    nll: Sequence[npt.ArrayLike], n_bytes: float | Sequence[float] | FloatArray, log: ClusterMean
) -> tuple[float, float | None, float | None]:
    """sum S_g / sum of units (bytes, words), and its jackknife interval when the units are given per document. `log`: of
    the same documents' tokens."""
    sums = np.array([np.asarray(array, dtype=np.float64).sum() for array in nll])
    sizes = np.atleast_1d(np.asarray(n_bytes, dtype=np.float64))
    per_document = np.ndim(n_bytes) > 0
    if per_document and sizes.size != sums.size:
        raise SutureError(f"bytes of {sizes.size} documents given for {sums.size} documents of values")
    if not sizes.sum() > 0 or (sizes < 0).any():
        raise SutureError(f"n_bytes sums to {sizes.sum():g}: expected the positive number of bytes scored")
    mean = float(sums.sum() / sizes.sum())
    if not per_document or log.low is None:
        return mean, None, None
    kept = np.array([np.size(array) > 0 for array in nll])
    se = jackknife_se(sums[kept] - mean * sizes[kept], sizes[kept])
    low, high = t_interval(mean, se, log.df, log.level) if se is not None else (None, None)
    return mean, low, high


def _check_same_shape(base: Sequence[npt.ArrayLike], new: Sequence[npt.ArrayLike], cluster: str) -> None:
    hint = "score both models on the same tokens"
    if len(base) != len(new):
        raise SutureError(f"base has {len(base)} {cluster}s and new has {len(new)}", hint)
    for g, (b, n) in enumerate(zip(base, new, strict=True)):
        if np.shape(b) != np.shape(n):
            raise SutureError(f"{cluster} {g}: base has {np.size(b)} tokens and new has {np.size(n)}", hint)


def _difference(base: FloatArray, new: FloatArray) -> FloatArray:
    """new - base, and 0 where they are equal (also at the same infinity)."""
    with np.errstate(invalid="ignore"):
        return np.where(new == base, 0.0, new - base)


def _p_value(log: ClusterMean) -> float | None:
    if log.low is None or log.se_jackknife is None:
        return None
    return t_test(log.mean, log.se_jackknife, log.df)


def _delta_ppl_se(x: list[FloatArray], y: list[FloatArray], base: Perplexity, new: Perplexity) -> float | None:
    """CR1 standard error of PPL_new - PPL_base from g_g = PPL_new e_new,g - PPL_base e_base,g."""
    if not (math.isfinite(base.ppl) and math.isfinite(new.ppl)):
        return None
    e_base = np.array([(a - base.log.mean).sum() for a in x if a.size])
    e_new = np.array([(a - new.log.mean).sum() for a in y if a.size])
    return cr1_se(new.ppl * e_new - base.ppl * e_base, base.log.n_values)


def _delta_ppl_interval(
    x: list[FloatArray], y: list[FloatArray], base: Perplexity, new: Perplexity, log: ClusterMean
) -> tuple[float | None, float | None]:
    """PPL_new - PPL_base +- t_{G-1} se_J, se_J from the differences that are left when each document is left out."""
    if log.low is None or not (math.isfinite(base.ppl) and math.isfinite(new.ppl)):
        return None, None
    sizes = np.array([a.size for a in x if a.size])
    left = sizes.sum() - sizes
    with np.errstate(over="ignore", invalid="ignore"):
        without = [np.exp((np.concatenate(z).sum() - np.array([a.sum() for a in z if a.size])) / left) for z in (y, x)]
        deviations = without[0] - without[1] - (new.ppl - base.ppl)
    if not np.isfinite(deviations).all():
        return None, None
    G = sizes.size
    se = float(np.sqrt((G - 1) / G * np.square(deviations).sum()))
    return t_interval(new.ppl - base.ppl, se, log.df, log.level)


def _correlation(x: FloatArray, y: FloatArray) -> float | None:
    """Pearson correlation; None for constant or infinite values."""
    if x.size < 2 or not (np.isfinite(x).all() and np.isfinite(y).all()) or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])
