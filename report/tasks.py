"""Multiple choice and cloze by log-likelihood, from local files: prompts, scoring and comparison, without a model.

A file is JSON Lines, one item or one request a line, in one of the forms that `read_items` knows: requests as
lm-evaluation-harness logs them or as OLMo's evaluation ships them (several lines of one `doc_id` are one item), the data
sets' own columns (HellaSwag, ARC, PIQA, WinoGrande, BoolQ, LAMBADA, MMLU, OpenBookQA), and ready prompts (`query`,
`choices`, `gold`). Prompts of the data sets' columns are those of lm-eval's tasks, zero-shot.

Scores are lm-eval's: `acc` takes the choice of highest log-likelihood, `acc_norm` that of highest log-likelihood per
character; a cloze item is right when every token of the continuation is the model's first guess. Beside them stands the
margin, log p(gold) - max log p(other): its mean difference between two models tells far smaller changes apart than
accuracy does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..checkpoint.errors import SutureError
from .grouped import clustered, difference, labels_of, share
from .pairs import paired_proportions
from .power import power_of
from .windows import Windows

CONTEXT = "context of a request"
TRUNCATED = "context beyond the window"

Form = Literal[
    "auto", "requests", "prompts", "hellaswag", "arc", "piqa", "winogrande", "boolq", "lambada", "mmlu", "openbookqa"
]


@dataclass(frozen=True)
class Item:
    """One question: a (context, continuation) per choice. A cloze item has one, and no choice to be right about."""

    requests: tuple[tuple[str, str], ...]
    gold: int
    group: str | None = None  # what it shares with others: a passage, a subject

    @property
    def cloze(self) -> bool:
        return len(self.requests) == 1


@dataclass(frozen=True)
class Answers:
    """What one model did, item by item."""

    right: npt.NDArray[np.bool_]  # acc, or the cloze's greedy match
    right_norm: npt.NDArray[np.bool_]  # acc_norm; the same as `right` for a cloze
    margin: npt.NDArray[np.float64]  # nats; log-likelihood of the continuation for a cloze
    choice: npt.NDArray[np.int64]  # what it chose, by log-likelihood
    choice_norm: npt.NDArray[np.int64]  # ... per character


def read_items(rows: Sequence[Mapping[str, Any]], form: Form = "auto", source: str = "tasks") -> list[Item]:
    """Items of a file's rows. Raises SutureError naming the row whose columns are of no known form."""
    if not rows:
        raise SutureError(f"{source}: no items", "give a file with one item or request a line")
    found = _form(rows[0], source) if form == "auto" else form
    if found == "requests":
        return _grouped_requests(rows, source)
    items = []
    for number, row in enumerate(rows):
        try:
            items.append(_READERS[found](row))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            problem = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise SutureError(
                f"{source}: row {number + 1} is not of the form {found}: {problem}; columns: {', '.join(row)}",
                "name the form with the setting form",
            ) from None
    for number, item in enumerate(items):
        if not 0 <= item.gold < len(item.requests):
            raise SutureError(f"{source}: row {number + 1}: answer {item.gold} of {len(item.requests)} choices")
    return items


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
    sums = -np.array([part.sum() for part in windows.by_document(nll)])
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
            lengths = np.array([max(1, len(continuation.lstrip())) for _, continuation in item.requests])
            others = np.delete(scores, item.gold)
            right.append(int(scores.argmax()) == item.gold)
            choice_norm.append(int((scores / lengths).argmax()))
            right_norm.append(choice_norm[-1] == item.gold)
            margin.append(scores[item.gold] - others.max())
            choice.append(int(scores.argmax()))
        start += len(item.requests)
    chosen = (np.array(numbers, dtype=np.int64) for numbers in (choice, choice_norm))
    return Answers(np.array(right), np.array(right_norm), np.array(margin), *chosen)


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


# -- forms of items ----------------------------------------------------------------------------------------------------


def _form(row: Mapping[str, Any], source: str) -> str:
    """The form that a row's columns are of."""
    columns = set(row)
    for form, needed in _COLUMNS:
        if needed <= columns:
            return form
    raise SutureError(
        f"{source}: no known task has the columns {', '.join(row)}",
        f"known forms: {', '.join(dict.fromkeys(form for form, _ in _COLUMNS))}",
    )


_COLUMNS: tuple[tuple[str, frozenset[str]], ...] = (
    ("requests", frozenset({"request", "doc_id"})),
    ("requests", frozenset({"arguments", "doc_id"})),
    ("requests", frozenset({"context", "continuation", "doc_id"})),
    ("hellaswag", frozenset({"ctx_a", "ctx_b", "endings", "activity_label", "label"})),
    ("arc", frozenset({"question", "choices", "answerKey"})),
    ("openbookqa", frozenset({"question_stem", "choices", "answerKey"})),
    ("piqa", frozenset({"goal", "sol1", "sol2", "label"})),
    ("winogrande", frozenset({"sentence", "option1", "option2", "answer"})),
    ("boolq", frozenset({"passage", "question"})),
    ("mmlu", frozenset({"question", "choices", "answer"})),
    ("prompts", frozenset({"context_options", "continuation", "gold"})),
    ("prompts", frozenset({"query", "choices", "gold"})),
    ("prompts", frozenset({"context", "continuation"})),
    ("lambada", frozenset({"text"})),
)


def _prompts(row: Mapping[str, Any]) -> Item:
    """Ready prompts; contexts may differ instead of continuations."""
    group = None if row.get("group") is None else str(row["group"])
    if "context_options" in row:
        ending = " " + str(row["continuation"]).lstrip()
        return Item(tuple((context, ending) for context in row["context_options"]), int(row["gold"]), group)
    if "choices" not in row:
        return Item(((str(row["context"]), " " + str(row["continuation"]).lstrip()),), 0, group)
    prompt = str(row["query"])  # as it is, also where it ends with a line break: lm-eval scores that as the choice's
    return Item(tuple((prompt, f" {choice}") for choice in row["choices"]), int(row["gold"]), group)


def _hellaswag(row: Mapping[str, Any]) -> Item:
    context = _cleaned(f"{row['activity_label']}: {row['ctx_a']} {str(row['ctx_b']).capitalize()}")
    return Item(tuple((context, f" {_cleaned(ending)}") for ending in row["endings"]), int(row["label"]))


def _cleaned(text: str) -> str:
    """WikiHow's markup out."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _arc(row: Mapping[str, Any]) -> Item:
    labels, texts = row["choices"]["label"], row["choices"]["text"]
    prompt = f"Question: {row['question']}\nAnswer:"
    return Item(tuple((prompt, f" {text}") for text in texts), list(labels).index(row["answerKey"]))


def _openbookqa(row: Mapping[str, Any]) -> Item:
    labels, texts = row["choices"]["label"], row["choices"]["text"]
    return Item(
        tuple((row["question_stem"], f" {text}") for text in texts), list(labels).index(str(row["answerKey"]).strip())
    )


def _piqa(row: Mapping[str, Any]) -> Item:
    prompt = f"Question: {row['goal']}\nAnswer:"
    return Item(((prompt, f" {row['sol1']}"), (prompt, f" {row['sol2']}")), int(row["label"]))


def _winogrande(row: Mapping[str, Any]) -> Item:
    """The sentence with each name in its gap; what is scored is the rest of it (partial evaluation)."""
    gap = row["sentence"].index("_")
    before, rest = row["sentence"][:gap], " " + row["sentence"][gap + 1 :].strip()
    return Item(((before + row["option1"], rest), (before + row["option2"], rest)), int(row["answer"]) - 1)


def _boolq(row: Mapping[str, Any]) -> Item:
    answer = row["label"] if "label" in row else row["answer"]
    prompt = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return Item(((prompt, " no"), (prompt, " yes")), int(answer), group=str(row["passage"]))


def _lambada(row: Mapping[str, Any]) -> Item:
    context, last = str(row["text"]).rsplit(" ", 1)
    return Item(((context, f" {last}"),), 0)


def _mmlu(row: Mapping[str, Any]) -> Item:
    letters = "ABCDEFGHIJ"[: len(row["choices"])]
    subject = row.get("subject")
    lines = [f"{letter}. {choice}" for letter, choice in zip(letters, row["choices"], strict=True)]
    head = ""
    if subject:
        about = " ".join(str(subject).split("_"))
        head = f"The following are multiple choice questions (with answers) about {about}.\n\n"
    prompt = head + "\n".join([str(row["question"]).strip(), *lines, "Answer:"])
    gold = letters.index(row["answer"]) if isinstance(row["answer"], str) else int(row["answer"])
    return Item(tuple((prompt, f" {letter}") for letter in letters), gold, None if subject is None else str(subject))


_READERS = {
    "prompts": _prompts,
    "hellaswag": _hellaswag,
    "arc": _arc,
    "openbookqa": _openbookqa,
    "piqa": _piqa,
    "winogrande": _winogrande,
    "boolq": _boolq,
    "lambada": _lambada,
    "mmlu": _mmlu,
}

_UNCONDITIONAL = 1_000_000  # OLMo numbers its requests without a question ("Answer:") from here on


def _grouped_requests(rows: Sequence[Mapping[str, Any]], source: str) -> list[Item]:
    """Requests of one `doc_id` are the choices of one item, in the order of their `idx` or of the lines."""
    by_item: dict[Any, list[tuple[int, tuple[str, str]]]] = {}
    labels: dict[Any, tuple[Any, str]] = {}  # item -> what is right, and where it says so
    for number, row in enumerate(rows):
        where = f"{source}: line {number + 1}"
        key = row.get("doc_id")
        key = row.get("native_id") if key is None else key
        if key is None or isinstance(key, list | dict):
            raise SutureError(f"{where}: its doc_id is {key!r}", "give each item a number or a name")
        if isinstance(key, int) and key >= _UNCONDITIONAL:
            continue
        pairs = _pairs_of(row, where)
        found = by_item.setdefault(key, [])
        for pair in pairs:
            at = int(row["idx"]) if len(pairs) == 1 and isinstance(row.get("idx"), int) else len(found)
            found.append((at, pair))
        labels[key] = (_label(row, pairs), where)
    items = []
    for key, found in by_item.items():
        pairs = [pair for _, pair in sorted(found)]
        label, where = labels[key]
        gold = _gold(label, pairs, where)
        if not 0 <= gold < len(pairs):
            raise SutureError(f"{where}: the right choice is {label!r}, of {len(pairs)} choices numbered from 0")
        items.append(Item(tuple(pairs), gold))
    return items


def _label(row: Mapping[str, Any], pairs: Sequence[tuple[str, str]]) -> Any:
    """What a row says is right. Where contexts differ instead of continuations (WinoGrande), lm-eval's `target` is the
    continuation that all share; the data set's own answer, numbered from 1, tells which context."""
    for name in ("label", "gold"):
        if name in row:
            return row[name]
    target, document = row.get("target"), row.get("doc")
    if len(pairs) > 1 and isinstance(target, str) and len({continuation for _, continuation in pairs}) == 1:
        answer = str(document.get("answer", "")) if isinstance(document, Mapping) else ""
        return int(answer) - 1 if answer.isdigit() else target
    return target


def _pairs_of(row: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """(context, continuation) of a row: one, or all of an item in lm-eval's log of samples."""
    request = row.get("request", row)
    given: Any = [request]
    if "arguments" in row:
        given = list(row["arguments"].values()) if isinstance(row["arguments"], Mapping) else row["arguments"]
    pairs = [_pair(call) for call in given] if isinstance(given, list) else []
    whole = [pair for pair in pairs if pair is not None]
    if not whole or len(whole) < len(pairs):
        raise SutureError(f"{where}: no context and continuation", "only log-likelihood requests can be scored")
    return whole


def _pair(call: Any) -> tuple[str, str] | None:
    """By name, or in this order."""
    if isinstance(call, Mapping):
        named = "context" in call and "continuation" in call
        call = [call["context"], call["continuation"]] if named else list(call.values())
    if not isinstance(call, list | tuple) or len(call) < 2 or not all(isinstance(text, str) for text in call[:2]):
        return None
    return call[0], call[1]


def _gold(label: Any, pairs: Sequence[tuple[str, str]], where: str) -> int:
    if len(pairs) == 1:
        return 0  # a cloze
    if isinstance(label, bool | int):
        return int(label)
    text = str(label).strip()
    if text.isdigit():
        return int(text)
    matching = [i for i, (_, continuation) in enumerate(pairs) if continuation.strip() == text]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise SutureError(
            f"{where}: the right choice is {label!r}, which {len(matching)} of its continuations are", "add a `label`"
        )
    raise SutureError(f"{where}: the right choice is {label!r}, neither a number nor one of the continuations")
