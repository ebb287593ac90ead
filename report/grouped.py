"""Right and wrong answers to items, some of which may share a passage or a subject: then whole groups are what varies.

Shares get Wilson's interval, pairs of models Bonett and Price's and McNemar's test, where each item stands for itself; else
the jackknife and a t test over groups. One group for all says nothing about how groups vary, and counts as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .clusters import ClusterMean, cluster_mean, t_test
from .pairs import bonett_price, mcnemar, paired_proportions
from .proportions import wilson

Values = npt.NDArray[np.float64]


def labels_of(groups: Sequence[str | None]) -> tuple[list[str], bool]:
    """(what each item belongs to, itself where it has no group; whether any share one)."""
    labels = [group if group is not None else f"item {i}" for i, group in enumerate(groups)]
    n = len(set(labels))
    return (labels, True) if 1 < n < len(labels) else ([f"item {i}" for i in range(len(labels))], False)


def clustered(values: npt.ArrayLike, labels: Sequence[str], level: float = 0.95) -> ClusterMean:
    """Mean of `values`, one per item, with the interval of whole groups."""
    groups: dict[str, list[float]] = {}
    for value, label in zip(np.asarray(values, dtype=np.float64), labels, strict=True):
        groups.setdefault(label, []).append(float(value))
    return cluster_mean(list(groups.values()), level=level, cluster="item" if len(groups) == len(labels) else "group")


def share(values: Values, labels: Sequence[str], level: float) -> dict[str, Any]:
    """Mean of values in 0..1 with its interval: Wilson's where each item is right or wrong, else the jackknife.

    Items that are all alike have no spread to take an interval from: right or wrong all of them, they get Wilson's too.
    """
    single = len(set(labels)) == len(labels) and bool(np.isin(values, (0.0, 1.0)).all())
    if single or values.min() == values.max() in (0.0, 1.0):
        n = len(set(labels))
        found = wilson(round(float(values.mean()) * n), n, level)
        return {"value": float(values.mean()), "ci": [found.low, found.high], "method": "Wilson"}
    mean = clustered(values, labels, level)
    bounds = None if mean.low is None or mean.high is None else [max(0.0, mean.low), min(1.0, mean.high)]
    return {"value": mean.mean, "ci": bounds, "method": f"jackknife over {mean.n_clusters} {mean.cluster}s"}


def difference(ours: Values, theirs: Values, labels: Sequence[str], level: float) -> dict[str, Any]:
    """Theirs less ours: pairs of right and wrong where items are that, the jackknife over items or groups otherwise."""
    moved = clustered(theirs - ours, labels, level)
    n = moved.n_clusters
    found: dict[str, Any] = {"difference": moved.mean}
    whole = bool(np.isin(ours, (0.0, 1.0)).all() and np.isin(theirs, (0.0, 1.0)).all())
    if whole and moved.cluster == "item":
        compared = paired_proportions(ours, theirs, level)
        found |= {"ci": [compared.low, compared.high], "method": "Bonett-Price"}
        return found | {"p": compared.p_mid, "test": "mid-p McNemar"}
    if moved.se_jackknife == 0 and moved.mean in (-1.0, 0.0, 1.0):  # no spread: all of them moved alike, or none
        lost, won = n * (moved.mean == -1), n * (moved.mean == 1)
        found |= {"ci": list(bonett_price(lost, won, n, level)[1:]), "method": "Bonett-Price"}
        return found | {"p": mcnemar(lost, won)[1], "test": "mid-p McNemar"}
    known = moved.low is not None and moved.high is not None and moved.se_jackknife is not None
    found |= {"ci": [moved.low, moved.high] if known else None, "method": f"jackknife over {n} {moved.cluster}s"}
    found |= {"p": t_test(moved.mean, moved.se_jackknife or 0.0, moved.df) if known else None}
    return found | {"test": f"t over {moved.cluster}s"}
