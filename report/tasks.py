"""Multiple choice and cloze by log-likelihood: requests, scoring and comparison, without a model.

Scores are lm-eval's: `acc` takes the choice of highest log-likelihood, `acc_norm` that of highest log-likelihood per
character; a cloze item is right when every token of the continuation is the model's first guess. Beside them stands the
margin, log p(gold) - max log p(other): its mean difference between two models tells far smaller changes apart than
accuracy does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoint.errors import SutureError
from .grouped import clustered, difference, labels_of, share
from .pairs import paired_proportions
from .power import power_of
from .task_forms import Item
from .windows import Windows

CONTEXT = "context of a request"
TRUNCATED = "context beyond the window"


@dataclass(frozen=True)
class Answers:
    """What one model did, item by item."""

    right: npt.NDArray[np.bool_]  # acc, or the cloze's greedy match
    right_norm: npt.NDArray[np.bool_]  # acc_norm; the same as `right` for a cloze
    margin: npt.NDArray[np.float64]  # nats; log-likelihood of the continuation for a cloze
    choice: npt.NDArray[np.int64]  # what it chose, by log-likelihood
    choice_norm: npt.NDArray[np.int64]  # ... per character


def request_windows(
    items: Sequence[Item],
    tokenizer: Any,
    *,
    window: int,
    bos_id: int | None,
    source: str = "tasks",
) -> Windows:
    """One window per request; its targets are the continuation's tokens, its "document" is the request.

    Context and continuation are tokenized together, as lm-eval does, so that a word is not cut where they meet; a
    context that does not fit loses its beginning. Raises SutureError for a continuation without a token of its own.
    """
    ids: list[npt.NDArray[np.int64]] = []
    starts: list[int] = []
    n_in = lost = 0
    requests = [request for item in items for request in item.requests]
    whole, before = _encode_pairs(tokenizer, requests)
    for number, (joined, context) in enumerate(zip(whole, before, strict=True)):
        first = min(len(context), len(joined))
        if len(joined) == first:
            raise SutureError(f"{source}: request {number + 1}: its continuation has no token", "remove the item")
        lead = [] if bos_id is None else [bos_id]
        row = [*lead, *joined]
        cut = max(0, len(row) - window)
        row = [*lead, *row[len(lead) + cut :]] if cut else row
        start = first + len(lead) - cut
        if start < 1:
            raise SutureError(
                f"{source}: request {number + 1}: needs more than the window of {window} tokens, or has nothing before it",
                "use a longer window, or a model whose tokenizer adds BOS",
            )
        ids.append(np.array(row, dtype=np.int64))
        starts.append(start)
        n_in += len(joined)
        lost += cut
    sizes = np.array([row.size for row in ids]) - np.array(starts)
    context_tokens = n_in - lost - int(sizes.sum())
    unscored = {reason: count for reason, count in ((CONTEXT, context_tokens), (TRUNCATED, lost)) if count}
    return Windows(
        protocol_id="requests",
        ids=tuple(ids),
        score_from=np.array(starts, dtype=np.int64),
        document=np.repeat(np.arange(len(ids)), sizes),
        token=np.concatenate([np.arange(size) for size in sizes]),
        window=window,
        stride=window,
        add_bos="none" if bos_id is None else "per_window",
        cluster="document",
        n_tokens_in=n_in,
        n_unscored=unscored,
        n_bytes=None,
        bytes_exact=False,
        max_windows=None,
        max_tokens_per_document=None,
    )


def answers(items: Sequence[Item], windows: Windows, nll: npt.ArrayLike, greedy: npt.ArrayLike) -> Answers:
    """From each scored token's NLL and whether it is the model's first guess, in the plan's order."""
    sums = log_likelihoods(windows, nll)
    matched = np.array([bool(part.all()) for part in windows.by_document(greedy)])
    right, right_norm, margin, choice, choice_norm = [], [], [], [], []
    start = 0
    for item in items:
        scores = sums[start : start + len(item.requests)]
        if item.cloze:
            right.append(matched[start])
            right_norm.append(matched[start])
            margin.append(scores[0])
            choice.append(int(matched[start]))
            choice_norm.append(int(matched[start]))
        else:
            others = np.delete(scores, item.gold)
            right.append(int(scores.argmax()) == item.gold)
            choice_norm.append(int((scores / characters(item)).argmax()))
            right_norm.append(choice_norm[-1] == item.gold)
            margin.append(scores[item.gold] - others.max())
            choice.append(int(scores.argmax()))
        start += len(item.requests)
    chosen = (np.array(numbers, dtype=np.int64) for numbers in (choice, choice_norm))
    return Answers(np.array(right), np.array(right_norm), np.array(margin), *chosen)


def log_likelihoods(windows: Windows, nll: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """(requests,) of each request's continuation, nats."""
    return -np.array([part.sum() for part in windows.by_document(nll)], dtype=np.float64)


def item_records(
    name: str, items: Sequence[Item], sums: Mapping[str, npt.NDArray[np.float64]], found: Mapping[str, Answers]
) -> list[dict[str, Any]]:
    """What each model (`base`, `candidate`) did with each item, enough to compute every figure of the task again.

    `sums`: `log_likelihoods`. Items are numbered from 0 in the file's order; `characters` are what acc_norm divides by.
    """
    records = []
    start = 0
    for i, item in enumerate(items):
        end = start + len(item.requests)
        models = {
            model: {
                "log_likelihoods": sums[model][start:end].tolist(),
                "right": bool(answered.right[i]),
                "right_norm": bool(answered.right_norm[i]),
            }
            for model, answered in found.items()
        }
        about = {"task": name, "item": i, "group": item.group, "gold": None if item.cloze else item.gold}
        records.append(about | {"characters": characters(item).tolist(), **models})
        start = end
    return records


def characters(item: Item) -> npt.NDArray[np.int64]:
    """Of each continuation, without the space that begins it."""
    return np.array([max(1, len(continuation.lstrip())) for _, continuation in item.requests])


def compare_answers(
    name: str, items: Sequence[Item], base: Answers, candidate: Answers, *, level: float, protocol: str
) -> list[dict[str, Any]]:
    """Rows of the report's `tasks`: accuracy, and for multiple choice accuracy per character."""
    cloze = all(item.cloze for item in items)
    pairs = [("acc", base.right, candidate.right, base.choice != candidate.choice)]
    if not cloze:
        pairs.append(("acc_norm", base.right_norm, candidate.right_norm, base.choice_norm != candidate.choice_norm))
    labels, grouped = labels_of([item.group for item in items])
    moved = clustered(candidate.margin - base.margin, labels, level)
    rows = []
    for metric, ours, theirs, chosen in pairs:
        x, y = ours.astype(np.float64), theirs.astype(np.float64)
        counts = paired_proportions(ours, theirs, level)
        rows.append(
            {
                "name": name,
                "metric": metric,
                "protocol": protocol,
                "n_items": len(items),
                "n_groups": len(set(labels)) if grouped else None,
                "level": level,
                "base": share(x, labels, level) | {"right": int(ours.sum())},
                "candidate": share(y, labels, level) | {"right": int(theirs.sum())},
                "paired": {
                    **difference(x, y, labels, level),
                    "both": counts.both,
                    "base_only": counts.base_only,
                    "candidate_only": counts.candidate_only,
                    "neither": counts.neither,
                    "p_exact": None if grouped else counts.p_exact,  # as if items were independent
                    "p_holm": None,
                    "flips": _share_of(ours != theirs, labels, level),
                    "changed": float(chosen.mean()),
                    "power": power_of(clustered(y - x, labels).se_jackknife, len(items), level),
                },
                "margin_drift": {
                    "value": moved.mean,
                    "ci": None if moved.low is None or moved.high is None else [moved.low, moved.high],
                },
            }
        )
    return rows


def _share_of(flags: npt.NDArray[np.bool_], labels: Sequence[str], level: float) -> dict[str, Any]:
    found = share(flags.astype(np.float64), labels, level)
    return {"value": found["value"], "ci": found["ci"]}


def _encode_pairs(tokenizer: Any, requests: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]]]:
    """(tokens of context + continuation, tokens of context), spaces at a context's end given to the continuation."""
    contexts = [context.rstrip() for context, _ in requests]
    texts = [context + continuation for context, continuation in requests]
    whole = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    before = tokenizer(contexts, add_special_tokens=False, verbose=False)["input_ids"]
    return whole, before
