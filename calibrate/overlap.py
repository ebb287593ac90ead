"""Does the calibration data contain the text that the result is scored on?

Calibrating on the evaluation text flatters the result. Three signs, from plain to fine: the same source (equal hash of
all documents), shared documents (equal hash of one), and the share of the evaluation's 13-grams of tokens that occur in
the calibration blocks (13 as in the contamination analysis of GPT-3, Brown et al. 2020, arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .documents import Documents

NGRAM = 13
NOTABLE_SHARE = 0.01  # of n-grams; common phrases alone stay well under it

UIntArray = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Overlap:
    """n-grams of the evaluation tokens (positions, repeats counted) and how many of them calibration contains."""

    n: int
    n_evaluation: int
    n_shared: int

    @property
    def share(self) -> float:
        return self.n_shared / self.n_evaluation if self.n_evaluation else 0.0


def ngram_overlap(
    calibration: Sequence[npt.ArrayLike] | npt.NDArray[np.int64],
    evaluation: Sequence[npt.ArrayLike],
    n: int = NGRAM,
) -> Overlap:
    """Count the evaluation's n-grams that occur in calibration.

    calibration: rows of token ids, e.g. `TokenBlocks.ids` (samples, length); evaluation: token ids of each document.
    n-grams do not cross rows or documents. They are compared by a 64-bit hash: a false match is as good as impossible.
    """
    known = [_hashes(row, n) for row in calibration]
    asked = [_hashes(row, n) for row in evaluation]
    if not known or not asked:
        return Overlap(n, sum(a.size for a in asked), 0)
    table, wanted = np.unique(np.concatenate(known)), np.concatenate(asked)
    return Overlap(n, wanted.size, int(np.isin(wanted, table).sum()))


def items_seen(
    calibration: Sequence[npt.ArrayLike] | npt.NDArray[np.int64],
    items: Sequence[Sequence[npt.ArrayLike]],
    n: int = NGRAM,
) -> tuple[int, int]:
    """(items of a task that have an n-gram of the calibration, all items); an item is several rows of token ids."""
    known = [_hashes(row, n) for row in calibration]
    table = np.unique(np.concatenate(known)) if known else np.zeros(0, dtype=np.uint64)
    seen = sum(any(bool(np.isin(_hashes(row, n), table).any()) for row in rows) for rows in items)
    return seen, len(items)


def shared_documents(calibration: Documents, evaluation: Documents) -> int:
    """How many evaluation documents occur, content for content, among the calibration documents."""
    known = set(calibration.hashes)
    return sum(digest in known for digest in evaluation.hashes)


def leakage_warnings(calibration: Documents, evaluation: Documents, overlap: Overlap | None = None) -> tuple[str, ...]:
    """What a report must say about calibration and evaluation text, most serious first; empty when they are apart."""
    if calibration.sha256 == evaluation.sha256:
        return (f"calibration and evaluation are the same text ({evaluation.source}): the result is flattered",)
    warnings = []
    shared = shared_documents(calibration, evaluation)
    if shared:
        warnings.append(f"{shared} of {len(evaluation)} evaluation documents are also in the calibration data")
    if overlap is not None and overlap.share > NOTABLE_SHARE:
        warnings.append(
            f"{overlap.share:.1%} of the evaluation's {overlap.n}-grams occur in the calibration blocks"
            f" ({overlap.n_shared} of {overlap.n_evaluation})"
        )
    return tuple(warnings)


def _hashes(row: npt.ArrayLike, n: int) -> UIntArray:
    """(max(0, tokens - n + 1),) hash of each n-gram: a polynomial in scrambled ids, modulo 2^64."""
    tokens = np.asarray(row, dtype=np.int64).astype(np.uint64)
    count = tokens.size - n + 1
    if count < 1:
        return np.zeros(0, dtype=np.uint64)
    scrambled = _splitmix64(tokens)
    total = np.zeros(count, dtype=np.uint64)
    for k in range(n):
        total = total * np.uint64(0x9E3779B97F4A7C15) + scrambled[k : k + count]
    return _splitmix64(total)


def _splitmix64(x: UIntArray) -> UIntArray:
    """The finalizer of SplitMix64 (Steele, Lea & Flood 2014): a bijection that spreads every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
