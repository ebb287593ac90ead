"""Which tokens are scored, in which windows, with which context: the plan of a perplexity, without a model.

The same model and text give perplexities far apart under different plans (Llama-2-7B on WikiText-2: 5.47, 5.12, 5.79),
so a plan is explicit, hashed, and accounts for every token. Four protocols:

`doc-rolling` (`rolling_windows`, ours): each document alone. Windows of W positions; when the model wants BOS it takes
the first position of *every* window and is never scored. The first window scores all its tokens; each later one moves
on by `stride` (default W/2) and scores only the new tokens, so each token is scored once and, after the first window,
behind at least W - stride positions. Without BOS the first token of a document has nothing before it: unscored.

`gptq-2048` (`gptq_windows`): what the GPTQ and AWQ papers print. One sequence (documents joined by a blank line, BOS at
most at its very start), windows of 2048 that do not overlap, the tail dropped, 2047 targets per window
(IST-DASLab/gptq `llama.py`, AutoAWQ `eval_utils.py`).

`llamacpp-512` (`llamacpp_windows`): what `llama-perplexity` prints. One sequence, chunks of 512, BOS in the place of each
chunk's first token when the model wants BOS, and only the second half of a chunk is scored (255 targets of 512 tokens).

`lm-eval` (`rolling_windows(protocol="lm-eval")`): what lm-evaluation-harness does for its WikiText task. Each document
behind one prefix token; windows of W inputs side by side, each but the last with a single token of context; the
log-likelihoods of all tokens, over words or bytes of the original document.

In every window the targets are the positions from `score_from` to the end; the logits at p - 1 predict position p.

Where the text has no documents the clusters are contiguous blocks of at least 2048 tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..checkpoint.errors import SutureError

BLOCK_TOKENS = 2048  # size of the clusters where the documents are unknown

FIRST_OF_DOCUMENT = "first token of a document, nothing before it"
FIRST_OF_WINDOW = "first token of a window, nothing before it"
TAIL = "tail shorter than a window"
BEYOND_DOCUMENT_CAP = "beyond max_tokens_per_document"
BEYOND_WINDOW_CAP = "beyond max_windows"
FIRST_HALF = "first half of a chunk, context only"
OUTSIDE_SAMPLE = "not in the sample of windows"

Protocol = Literal["doc-rolling", "lm-eval"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Windows:
    """A plan. Construction checks that inputs, targets and the accounting agree (RuntimeError: a bug here)."""

    protocol_id: str
    ids: tuple[
        IntArray, ...
    ]  # per window: (length,) model inputs, BOS and context included, length <= window (lm-eval: + 1)
    score_from: IntArray  # (n_windows,) first scored position of each window, at least 1
    document: IntArray  # (n_scored,) document or block of each target, in the order of windows and positions
    token: IntArray  # (n_scored,) index of each target in its document (doc-rolling) or in the sequence (gptq)
    window: int
    stride: int
    add_bos: Literal["none", "once", "per_document", "per_window"]
    cluster: Literal["document", "block"]
    n_tokens_in: int  # tokens given, BOS that we add not counted
    n_unscored: dict[str, int]  # reason -> tokens
    n_bytes: FloatArray | float | None  # bytes of the scored tokens: (n_clusters,) or in all; goes into `perplexity`
    bytes_exact: bool  # False: some given tokens are unscored and n_bytes is their share of the bytes
    max_windows: int | None
    max_tokens_per_document: int | None
    n_words: FloatArray | float | None = None  # words of the scored documents, (n_clusters,) or in all: lm-eval only

    def __post_init__(self) -> None:
        _check(self)

    @property
    def n_windows(self) -> int:
        return len(self.ids)

    @property
    def n_scored(self) -> int:
        return self.document.size

    @cached_property
    def clusters(self) -> IntArray:
        """(n_clusters,) the documents or blocks with at least one target, ascending."""
        return np.unique(self.document)

    @cached_property
    def tokens_sha256(self) -> str:
        """Hash of every window's inputs and of where its targets start: equal hashes, equal predictions asked for."""
        digest = hashlib.sha256()
        for ids, start in zip(self.ids, self.score_from, strict=True):
            digest.update(np.array([ids.size, start], dtype="<i8").tobytes())
            digest.update(ids.astype("<i8").tobytes())
        return digest.hexdigest()

    def protocol(self) -> dict[str, Any]:
        """The identity to print beside any number: two numbers compare only when these are equal."""
        return {
            "id": self.protocol_id,
            "window": self.window,
            "stride": self.stride,
            "min_context": self._min_context,
            "add_bos": self.add_bos,
            "first_scored": self.window // 2 + 1 if self.protocol_id.startswith("llamacpp") else 1,
            "max_windows": self.max_windows,
            "max_tokens_per_document": self.max_tokens_per_document,
            "n_scored": self.n_scored,
            "tokens_sha256": self.tokens_sha256,
            "cluster": self.cluster,
        }

    @property
    def _min_context(self) -> int:
        if self.protocol_id == "doc-rolling":
            return self.window - self.stride
        return self.window // 2 if self.protocol_id.startswith("llamacpp") else 1

    def sample(self, limit: int) -> Windows:
        """At most `limit` of the windows, spread evenly over the plan, as a plan of their own (its clusters too)."""
        numbers = np.unique(np.linspace(0, self.n_windows - 1, min(limit, self.n_windows)).round().astype(np.int64))
        sizes = np.array([ids.size for ids in self.ids]) - self.score_from
        kept = np.repeat(np.isin(np.arange(self.n_windows), numbers), sizes)
        left = self.n_scored - int(kept.sum())
        return replace(
            self,
            ids=tuple(self.ids[n] for n in numbers),
            score_from=self.score_from[numbers],
            document=self.document[kept],
            token=self.token[kept],
            n_unscored=self.n_unscored | ({OUTSIDE_SAMPLE: left} if left else {}),
            n_bytes=None,
            n_words=None,
        )

    def by_document(self, values: npt.ArrayLike) -> list[FloatArray]:
        """Split one value per target, (n_scored,) in the plan's order, into one array per entry of `clusters`."""
        flat = np.asarray(values, dtype=np.float64)
        if flat.shape != self.document.shape:
            raise ValueError(f"expected {self.n_scored} values, one per target; found shape {flat.shape}")
        order = np.argsort(self.document, kind="stable")
        ends = np.cumsum(np.unique(self.document, return_counts=True)[1])
        return np.split(flat[order], ends[:-1])

    def locate(self, target: int) -> tuple[int, int, int]:
        """(window, position in it, document) of the target with this index in the plan's order."""
        ends = np.cumsum([ids.size - start for ids, start in zip(self.ids, self.score_from, strict=True)])
        w = int(np.searchsorted(ends, target, side="right"))
        return w, int(self.ids[w].size - (ends[w] - target)), int(self.document[target])


@dataclass(frozen=True)
class _Span:
    """Tokens start..end of a document are the window's content; those from `first` are scored."""

    start: int
    end: int
    first: int


def rolling_windows(
    documents: Sequence[Sequence[int] | IntArray],
    *,
    protocol: Protocol = "doc-rolling",
    window: int,
    stride: int | None = None,
    bos_id: int | None = None,
    n_bytes: Sequence[float] | None = None,
    n_words: Sequence[float] | None = None,
    max_windows: int | None = None,
    max_tokens_per_document: int | None = None,
    max_positions: int | None = None,
) -> Windows:
    """Plan `doc-rolling` or `lm-eval`, which score documents one by one.

    documents: token ids without BOS, one sequence each; bos_id: the model's BOS, None for a model that wants none
    (lm-eval: its prefix token, which it cannot do without).
    n_bytes, n_words: UTF-8 bytes and words of each document.
    max_windows: windows in all, taken from the documents in turn (their first windows, then their second ones, ...), so
    that a small budget still sees many documents.
    max_positions: the model's longest context. Raises SutureError: settings out of range, nothing to score.
    """
    harness = protocol == "lm-eval"
    if harness and (bos_id is None or stride is not None):
        raise SutureError("lm-eval windows lie side by side behind one prefix token", "give the prefix and no stride")
    stride = max(1, window // 2) if stride is None else stride
    _check_settings(window, stride, max_windows, max_tokens_per_document, max_positions)
    arrays = [np.asarray(ids, dtype=np.int64) for ids in documents]
    _check_documents(arrays, bos_id, n_bytes)
    used = [a.size if max_tokens_per_document is None else min(a.size, max_tokens_per_document) for a in arrays]
    plans = [_harness_spans(n, window) if harness else _spans(n, window, stride, bos_id is not None) for n in used]
    quota = _share_windows([len(plan) for plan in plans], max_windows)
    kept = [(d, span) for d, plan in enumerate(plans) for span in plan[: quota[d]]]
    if not kept:
        raise SutureError(
            f"nothing to score in {len(arrays)} documents of {sum(a.size for a in arrays)} tokens",
            "give longer documents",
        )
    prefix = np.array([] if bos_id is None else [bos_id], dtype=np.int64)
    scored = [sum(s.end - s.first for s in plan[:q]) for plan, q in zip(plans, quota, strict=True)]
    prefixed = [prefix if s.first == 0 or not harness else prefix[:0] for _, s in kept]
    document = np.repeat([d for d, _ in kept], [s.end - s.first for _, s in kept]).astype(np.int64)
    token = np.concatenate([np.arange(s.first, s.end) for _, s in kept])
    no_documents = len(documents) == 1
    if no_documents:
        document = _token_blocks(token)
    bytes_, words = (_by_cluster(_rolling_share(arrays, scored, x), no_documents) for x in (n_bytes, n_words))
    return Windows(
        protocol_id=protocol,
        ids=tuple(
            np.concatenate([lead, arrays[d][s.start : s.end]]) for lead, (d, s) in zip(prefixed, kept, strict=True)
        ),
        score_from=np.array(
            [s.first - s.start + lead.size for lead, (_, s) in zip(prefixed, kept, strict=True)], dtype=np.int64
        ),
        document=document,
        token=token,
        window=window,
        stride=window if harness else stride,
        add_bos="none" if bos_id is None else "per_document" if harness else "per_window",
        cluster="block" if no_documents else "document",
        n_tokens_in=sum(a.size for a in arrays),
        n_unscored=_rolling_unscored(arrays, used, scored, plans, quota, bos_id is not None),
        n_bytes=bytes_,
        n_words=words,
        bytes_exact=all(a.size == n for a, n in zip(arrays, scored, strict=True) if n),
        max_windows=max_windows,
        max_tokens_per_document=max_tokens_per_document,
    )


def gptq_windows(
    ids: Sequence[int] | IntArray,
    *,
    documents: Sequence[int] | IntArray | None = None,
    window: int = 2048,
    bos_id: int | None = None,
    n_bytes: float | None = None,
    max_windows: int | None = None,
    max_positions: int | None = None,
) -> Windows:
    """Plan `gptq-2048` (or `gptq-WINDOW`) over one sequence.

    ids: (n,) as the tokenizer gives them for the joined text, with BOS at the start if it adds one (recorded here).
    documents: (n,) document of each token; without it the clusters are blocks of at least 2048 tokens.
    n_bytes: UTF-8 bytes of the whole text. max_windows: the first so many windows.
    Raises SutureError: settings out of range, fewer tokens than one window, labels that do not match.
    """
    _check_settings(window, 1, max_windows, None, max_positions)
    sequence = np.asarray(ids, dtype=np.int64)
    n_full = sequence.size // window
    if n_full == 0:
        raise SutureError(
            f"the text has {sequence.size} tokens, fewer than one window of {window}",
            "give more text or a smaller window; doc-rolling has no such minimum",
        )
    n = n_full if max_windows is None else min(n_full, max_windows)
    labels = _blocks(sequence.size, window, n) if documents is None else np.asarray(documents, dtype=np.int64)
    if labels.shape != sequence.shape:
        raise SutureError(
            f"document labels have shape {labels.shape}, tokens {sequence.shape}", "give one label per token"
        )
    n_scored = n * (window - 1)
    unscored = {
        FIRST_OF_WINDOW: n,
        TAIL: sequence.size - n_full * window,
        BEYOND_WINDOW_CAP: (n_full - n) * window,
    }
    return Windows(
        protocol_id=f"gptq-{window}",
        ids=tuple(sequence[: n * window].reshape(n, window)),
        score_from=np.ones(n, dtype=np.int64),
        document=labels[: n * window].reshape(n, window)[:, 1:].ravel(),
        token=np.arange(n * window).reshape(n, window)[:, 1:].ravel(),
        window=window,
        stride=window,
        add_bos="once" if bos_id is not None and sequence[0] == bos_id else "none",
        cluster="block" if documents is None else "document",
        n_tokens_in=sequence.size,
        n_unscored={reason: count for reason, count in unscored.items() if count},
        n_bytes=None if n_bytes is None else n_bytes * n_scored / sequence.size,
        bytes_exact=False,
        max_windows=max_windows,
        max_tokens_per_document=None,
    )


def llamacpp_windows(
    ids: Sequence[int] | IntArray,
    *,
    documents: Sequence[int] | IntArray | None = None,
    window: int = 512,
    bos_id: int | None = None,
    n_bytes: float | None = None,
    max_windows: int | None = None,
    max_positions: int | None = None,
) -> Windows:
    """Plan `llamacpp-512` (or `llamacpp-WINDOW`) over one sequence; arguments as `gptq_windows`.

    The sequence's own BOS at its start belongs to it, as llama.cpp tokenizes; `bos_id` then replaces the first token of
    every chunk (`tools/perplexity/perplexity.cpp`). Raises SutureError as `gptq_windows`.
    """
    plan = gptq_windows(
        ids, documents=documents, window=window, n_bytes=None, max_windows=max_windows, max_positions=max_positions
    )
    if window < 4:
        raise SutureError(f"window = {window}: expected at least 4 tokens, half of which are scored", "use 512")
    n, half = plan.n_windows, window // 2 + 1
    rows = np.stack(plan.ids)
    if bos_id is not None:
        rows[:, 0] = bos_id
    n_scored = n * (window - half)
    unscored = {reason: count for reason, count in plan.n_unscored.items() if reason != FIRST_OF_WINDOW}
    return replace(
        plan,
        protocol_id=f"llamacpp-{window}",
        ids=tuple(rows),
        score_from=np.full(n, half, dtype=np.int64),
        document=plan.document.reshape(n, -1)[:, half - 1 :].ravel(),
        token=plan.token.reshape(n, -1)[:, half - 1 :].ravel(),
        add_bos="none" if bos_id is None else "per_window",
        n_unscored={FIRST_HALF: n * half} | unscored,
        n_bytes=None if n_bytes is None else n_bytes * n_scored / plan.n_tokens_in,
    )


def _harness_spans(n: int, window: int) -> list[_Span]:
    """lm-eval's `get_rolling_token_windows` with context_len=1 after `make_disjoint_window`, last target included.

    The first window is the prefix and W tokens; each later one W + 1 tokens that end with its targets.
    """
    spans = [_Span(0, min(n, window), 0)]
    while spans[-1].end < n:
        first = spans[-1].end
        end = min(n, first + window)
        spans.append(_Span(max(0, end - window - 1), end, first))
    return [span for span in spans if span.first < span.end]


def _spans(n: int, window: int, stride: int, has_bos: bool) -> list[_Span]:
    """Windows of a document of n tokens. A later window is filled up to its capacity with context on the left."""
    capacity = window - has_bos
    end = min(n, capacity)
    spans = [_Span(0, end, 0 if has_bos else 1)]
    while end < n:
        first, end = end, min(n, end + stride)
        spans.append(_Span(max(0, end - capacity), end, first))
    return [span for span in spans if span.first < span.end]


def _share_windows(counts: list[int], limit: int | None) -> list[int]:
    """How many of its windows each document keeps: one each in turn until `limit` is used up."""
    if limit is None or sum(counts) <= limit:
        return counts
    level = 0
    while sum(min(c, level + 1) for c in counts) <= limit:
        level += 1
    quota = [min(c, level) for c in counts]
    spare = limit - sum(quota)
    for d, count in enumerate(counts):
        if spare and count > level:
            quota[d], spare = quota[d] + 1, spare - 1
    return quota


def _rolling_unscored(
    arrays: list[IntArray],
    used: list[int],
    scored: list[int],
    plans: list[list[_Span]],
    quota: list[int],
    has_bos: bool,
) -> dict[str, int]:
    """Reason -> tokens, without the reasons that do not occur."""
    first = [int(not has_bos and n > 0 and (q > 0 or not plan)) for n, q, plan in zip(used, quota, plans, strict=True)]
    unscored = {
        FIRST_OF_DOCUMENT: sum(first),
        BEYOND_DOCUMENT_CAP: sum(a.size for a in arrays) - sum(used),
        BEYOND_WINDOW_CAP: sum(used) - sum(scored) - sum(first),
    }
    return {reason: count for reason, count in unscored.items() if count}


def _rolling_share(arrays: list[IntArray], scored: list[int], sizes: Sequence[float] | None) -> FloatArray | None:
    """Bytes or words of each scored document, scaled by the share of its tokens that is scored."""
    if sizes is None:
        return None
    given = np.asarray(sizes, dtype=np.float64)
    return np.array([b * n / a.size for b, n, a in zip(given, scored, arrays, strict=True) if n])


def _by_cluster(sizes: FloatArray | None, in_all: bool) -> FloatArray | float | None:
    return float(sizes.sum()) if sizes is not None and in_all else sizes


def _token_blocks(token: IntArray) -> IntArray:
    """(n,) blocks of 2048 neighbouring tokens, the rest with the last whole one."""
    last = max(0, int(token[-1] + 1) // BLOCK_TOKENS - 1)
    return np.minimum(token // BLOCK_TOKENS, last)


def _blocks(n_tokens: int, window: int, n_windows: int) -> IntArray:
    """(n_tokens,) labels of contiguous blocks of whole windows, each of at least 2048 tokens unless it is the only."""
    per_block = -(-BLOCK_TOKENS // window)
    last = max(0, n_windows // per_block - 1)
    return np.minimum(np.arange(n_tokens) // (per_block * window), last)


def _check_settings(
    window: int, stride: int, max_windows: int | None, max_tokens: int | None, max_positions: int | None
) -> None:
    if window < 2:
        raise SutureError(f"window = {window}: expected at least 2 tokens", "use 512 or 2048")
    if max_positions is not None and window > max_positions:
        raise SutureError(
            f"window = {window} is longer than the model's context of {max_positions} positions",
            f"use a window of at most {max_positions}",
        )
    if not 1 <= stride < window:
        raise SutureError(f"stride = {stride}: expected 1 to window - 1 = {window - 1}", "leave it out for window / 2")
    for name, value in (("max_windows", max_windows), ("max_tokens_per_document", max_tokens)):
        if value is not None and value < 1:
            raise SutureError(f"{name} = {value}: expected at least 1", "leave it out for no limit")


def _check_documents(arrays: list[IntArray], bos_id: int | None, n_bytes: Sequence[float] | None) -> None:
    for d, array in enumerate(arrays):
        if array.ndim != 1:
            raise SutureError(f"document {d}: expected a 1-D sequence of token ids, found shape {array.shape}")
        if bos_id is not None and array.size and array[0] == bos_id:
            raise SutureError(
                f"document {d} begins with the BOS id {bos_id}, which would be doubled and scored",
                "give documents without BOS: encode_documents(..., bos_id=...) removes it",
            )
    if n_bytes is not None and len(n_bytes) != len(arrays):
        raise SutureError(f"bytes of {len(n_bytes)} documents given for {len(arrays)} documents")


def _check(plan: Windows) -> None:
    """Each window fits, each target is scored once in order, and every token given is scored or has a reason."""
    targets = [ids.size - start for ids, start in zip(plan.ids, plan.score_from, strict=True)]
    by_sequence = plan.protocol_id.startswith(("gptq", "llamacpp"))
    same_document = by_sequence | (np.diff(plan.document) == 0)
    new_document = np.diff(plan.document) > 0
    facts = {
        "a window is longer than allowed": all(
            ids.size <= plan.window + (plan.protocol_id == "lm-eval") for ids in plan.ids
        ),
        "a window scores nothing or its first position": min(targets) > 0 and plan.score_from.min() > 0,
        "targets and labels differ in number": sum(targets) == plan.document.size == plan.token.size,
        "a token is scored twice": bool(np.where(same_document, np.diff(plan.token) > 0, new_document).all()),
        "tokens are unaccounted for": plan.n_scored + sum(plan.n_unscored.values()) == plan.n_tokens_in,
        "a count is negative": all(count > 0 for count in plan.n_unscored.values()),
    }
    broken = [what for what, holds in facts.items() if not holds]
    if broken:
        raise RuntimeError(f"window plan is inconsistent: {'; '.join(broken)}")
