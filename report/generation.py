"""Tasks answered in words: items, extraction and scoring of answers, and what two models' answers say. No model here.

A file is a table with a prompt and one or several right answers a row; a `template` makes the prompt of other columns.
An answer is right when, after extraction, it equals or contains one of them. No answer is ever run as code.

With K answers sampled per item, the mean of pass@1 varies with the items and with the sampling; `split_variance` says by
how much each, and pass@k is the unbiased estimate of Chen et al. 2021. With one greedy answer per item the comparison is
that of right and wrong pairs (McNemar, Bonett-Price).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..checkpoint.errors import SutureError
from .grouped import clustered, difference, labels_of, share
from .power import power_of
from .proportions import pass_at_k, split_variance

Match = Literal["exact", "contains"]

_PROMPTS = ("prompt", "question", "query", "problem", "input")
_ANSWERS = ("answers", "answer", "target", "targets", "reference", "output")


@dataclass(frozen=True)
class Question:
    """One item: what the model reads, and what counts as right."""

    prompt: str
    answers: tuple[str, ...]
    group: str | None = None  # what it shares with others: a passage, a subject
    chat: tuple[dict[str, Any], ...] = ()  # the conversation that a chat template renders; its last message is a user's


@dataclass(frozen=True)
class Scorer:
    """When a text is right."""

    match: Match = "exact"
    extract: str | None = None  # regular expression; its last match, or that one's first group, is the answer

    def answer(self, text: str) -> str | None:
        """What the text answers, normalized; None where nothing matches."""
        if self.extract is None:
            return normalized(text)
        found = list(re.finditer(self.extract, text))
        return normalized(found[-1][1 if found[-1].re.groups else 0] or "") if found else None

    def right(self, text: str, answers: Sequence[str]) -> bool:
        """The right answers are extracted by the same rule where it matches them, and taken whole otherwise."""
        given = self.answer(text)
        if given is None:
            return False
        wanted = [found if (found := self.answer(answer)) is not None else normalized(answer) for answer in answers]
        return given in wanted if self.match == "exact" else any(answer in given for answer in wanted)


def normalized(text: str) -> str:
    """One space between words, none around; no full stop at the end, no comma between thousands, no capitals."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", " ".join(text.split()))
    return text.removesuffix(".").strip().casefold()


def read_questions(
    rows: Sequence[Mapping[str, Any]],
    template: str | None = None,
    source: str = "generation",
    *,
    chat: bool = False,
    system: str | None = None,
) -> list[Question]:
    """With `chat` every prompt becomes a conversation: the column `messages`, whose last message may be the assistant's and
    is then the right answer, or else the prompt as a user's message, after `system` if there is one.

    Raises SutureError naming the row without a prompt, or without an answer.
    """
    if not rows:
        raise SutureError(f"{source}: no items", "give a file with one item a line")
    questions = []
    for number, row in enumerate(rows):
        where = f"{source}: row {number + 1}"
        answers = next((row[key] for key in _ANSWERS if row.get(key) not in (None, "", [])), None)
        messages: list[dict[str, Any]] = []
        if chat:
            messages, said = _messages(row, template, where, system)
            answers = said if answers is None else answers
        if answers is None:
            raise SutureError(
                f"{where}: no right answer; columns: {', '.join(row)}", f"name a column one of {', '.join(_ANSWERS)}"
            )
        listed = list(answers) if isinstance(answers, list | tuple) else [answers]
        group = row.get("group")
        prompt = str(messages[-1]["content"]) if chat else _prompt(row, template, where)
        group = None if group is None else str(group)
        questions.append(Question(prompt, tuple(map(str, listed)), group, tuple(messages)))
    return questions


def _messages(
    row: Mapping[str, Any], template: str | None, where: str, system: str | None
) -> tuple[list[dict[str, Any]], str | None]:
    """(the conversation up to the user's last message, what the assistant said to it when the row has that)."""
    given = row.get("messages")
    if template is not None or not isinstance(given, list) or not given:
        messages, said = [{"role": "user", "content": _prompt(row, template, where)}], None
    else:
        messages = [dict(one) for one in given if isinstance(one, Mapping)]
        said = messages.pop()["content"] if messages and messages[-1].get("role") == "assistant" else None
        if not messages or messages[-1].get("role") != "user" or not isinstance(messages[-1].get("content"), str):
            raise SutureError(
                f"{where}: messages: no user's message to answer", "end them with a user's, or its answer"
            )
    if system is not None and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages, None if said is None else str(said)


def _prompt(row: Mapping[str, Any], template: str | None, where: str) -> str:
    if template is not None:
        try:
            return template.format_map(row)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise SutureError(
                f"{where}: template: {error} does not fit its columns {', '.join(row)}",
                "write columns as {name}, and a brace itself as {{",
            ) from None
    for key in _PROMPTS:
        if isinstance(row.get(key), str) and row[key].strip():
            return str(row[key])
    if isinstance(row.get("messages"), list):
        raise SutureError(f"{where}: messages are a chat's", "set chat: true")
    raise SutureError(
        f"{where}: no prompt; columns: {', '.join(row)}", f"name a column one of {', '.join(_PROMPTS)}, or set template"
    )


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the strings that end an answer."""
    ends = [text.index(mark) for mark in stop if mark in text]
    return text[: min(ends)] if ends else text


def compare_generations(
    name: str,
    questions: Sequence[Question],
    base: npt.ArrayLike,
    candidate: npt.ArrayLike,
    *,
    ks: Sequence[int],
    level: float,
    protocol: str,
) -> list[dict[str, Any]]:
    """Rows of the report's `generation`, one per k. `base`, `candidate`: (items, samples), whether each answer is right."""
    x, y = np.asarray(base).astype(bool), np.asarray(candidate).astype(bool)
    labels, grouped = labels_of([q.group for q in questions])
    rows = []
    for k in ks:
        ours, theirs = (_pass_of_items(right, k) for right in (x, y))
        rows.append(
            {
                "name": name,
                "metric": f"pass@{k}",
                "protocol": protocol,
                "n_items": len(questions),
                "n_groups": len(set(labels)) if grouped else None,
                "samples": x.shape[1],
                "level": level,
                "base": share(ours, labels, level),
                "candidate": share(theirs, labels, level),
                "paired": {
                    **difference(ours, theirs, labels, level),
                    "p_holm": None,
                    "power": power_of(clustered(theirs - ours, labels).se_jackknife, len(labels), level),
                },
                "variance": {"base": _split(x), "candidate": _split(y)} if k == 1 else None,
            }
        )
    return rows


def _pass_of_items(right: npt.NDArray[np.bool_], k: int) -> npt.NDArray[np.float64]:
    return np.array([pass_at_k(right.shape[1], int(row.sum()), k) for row in right])


def _split(right: npt.NDArray[np.bool_]) -> dict[str, Any] | None:
    """Standard errors of the mean from either source; None with one answer per item, or one item."""
    if right.shape[0] < 2 or right.shape[1] < 2:
        return None
    found = split_variance(list(right))
    return {"se": found.se, "se_items": math.sqrt(found.items), "se_samples": math.sqrt(found.samples)}
