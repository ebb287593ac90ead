"""How often do nominal 95 % intervals cover? By simulation, with documents sized like WikiText-2's test articles.

usage: python benchmarks/coverage.py [--repetitions 2000] [--seed 0]

A repetition draws G documents: sizes from WikiText-2's range (26 to 14,299 words, the log of the size normal around
2,700), a skewed effect per document, one per window of 512 tokens, and one per token. `absolute` imitates a perplexity
(effects 0.30, 0.20, 2.3 nats), `paired` a difference between two models (0.010, 0.010, 0.30 around 0.04). Only sums per
document matter to the clustered interval, and only sums and squares to the token's, so the tokens of a window are drawn
through their mean and variance. Prints the coverage of the interval that suture reports (delete-one-document jackknife,
t with G - 1), of the sandwich with z, and of the token-by-token interval that most tools print.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np

from suture.report.clusters import cr1_se, jackknife_se, t_interval

WINDOW = 512


@dataclass(frozen=True)
class Effects:
    mean: float
    document: float
    window: float
    token: float


KINDS = {"absolute": Effects(3.0, 0.30, 0.20, 2.3), "paired": Effects(0.04, 0.010, 0.010, 0.30)}


def sizes(rng: np.random.Generator, G: int) -> np.ndarray:
    """Tokens of each document."""
    return np.clip(np.exp(rng.normal(math.log(2700), 0.95, G)), 26, 14299).astype(np.int64)


def documents(rng: np.random.Generator, n: np.ndarray, effects: Effects) -> tuple[np.ndarray, float]:
    """(sum of each document's values, sum of squared deviations of all values from their mean)."""
    skewed = (rng.gamma(4.0, 1.0, n.size) - 4.0) / 2.0  # mean 0, variance 1, skewness 1
    sums, squares = np.zeros(n.size), 0.0
    for g, tokens in enumerate(n):
        full, rest = divmod(int(tokens), WINDOW)
        m = np.array([WINDOW] * full + ([rest] if rest else []), dtype=np.float64)
        level = effects.mean + effects.document * skewed[g] + effects.window * rng.normal(size=m.size)
        mean = level + effects.token * rng.normal(size=m.size) / np.sqrt(m)
        within = effects.token**2 * rng.chisquare(np.maximum(m - 1, 1e-9))
        sums[g] = (m * mean).sum()
        squares += (within + m * mean**2).sum()
    return sums, squares - sums.sum() ** 2 / n.sum()


def covered(rng: np.random.Generator, G: int, effects: Effects) -> dict[str, bool]:
    """Whether each interval of one repetition holds the true mean."""
    n = sizes(rng, G)
    S, squares = documents(rng, n, effects)
    N = int(n.sum())
    m = S.sum() / N
    e = S - m * n
    jackknife, sandwich = jackknife_se(e, n.astype(np.float64)), cr1_se(e, N)
    assert jackknife is not None and sandwich is not None
    low, high = t_interval(m, jackknife, G - 1)
    token = math.sqrt(squares / (N - 1) / N)
    return {
        "jackknife, t": low <= effects.mean <= high,
        "sandwich, z": abs(m - effects.mean) <= 1.959964 * sandwich,
        "token by token": abs(m - effects.mean) <= 1.959964 * token,
    }


def coverage(kind: str, G: int, repetitions: int, seed: int) -> dict[str, float]:
    """Share of repetitions that each interval covers."""
    rng = np.random.default_rng([seed, G, list(KINDS).index(kind)])
    found = [covered(rng, G, KINDS[kind]) for _ in range(repetitions)]
    return {name: sum(row[name] for row in found) / repetitions for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, nargs="+", default=[5, 10, 20, 62])
    given = parser.parse_args()
    print(f"coverage of nominal 95 % intervals, {given.repetitions} repetitions")
    for kind in KINDS:
        for G in given.documents:
            row = coverage(kind, G, given.repetitions, given.seed)
            print(
                f"{kind:9} {G:3} documents  " + "  ".join(f"{name} {100 * share:5.1f} %" for name, share in row.items())
            )


if __name__ == "__main__":
    main()
