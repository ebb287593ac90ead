"""Items of tasks by log-likelihood, from local files in any of the forms in use.

A file is JSON Lines, one item or one request a line, in one of the forms that `read_items` knows: requests as
lm-evaluation-harness logs them or as OLMo's evaluation ships them (several lines of one `doc_id` are one item), the data
sets' own columns (HellaSwag, ARC, PIQA, WinoGrande, BoolQ, LAMBADA, MMLU, OpenBookQA), and ready prompts (`query`,
`choices`, `gold`). Prompts of the data sets' columns are those of lm-eval's tasks, zero-shot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..checkpoint.errors import SutureError

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
