"""Which tokens of a conversation the assistant wrote, so that training can leave the others out of its loss.

A template says so itself when it marks what is generated (`{% generation %}`). Of any other one the answers are found by
difference of prefixes: what message i adds to the rendered messages before it, the prompt for an answer included. That
needs a template that renders a conversation's beginning as it stands in the whole; one that does not (it drops earlier
thoughts, or closes the last turn differently) is refused. The end of the assistant's turn counts as written by it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..checkpoint.errors import SutureError
from .documents import Conversation, Documents
from .tokens import render_chat, render_chats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_HINT = "use a template that marks answers with {% generation %}, or loss_on: all"

Span = tuple[int, int]  # characters of the rendered conversation, the second one excluded


def answer_masks(documents: Documents, tokenizer: PreTrainedTokenizerBase | None) -> list[list[bool]]:
    """Per token of each conversation, as `render_chats` and the tokenizer without special tokens give them: whether the
    assistant wrote it.

    Raises SutureError: documents that are no chats; a tokenizer that cannot say which characters a token is of; a template
    by which answers cannot be told from the rest.
    """
    if documents.kind != "chats":
        raise SutureError(
            f"{documents.source} holds {documents.kind}, of which nothing is an answer",
            "give conversations (column messages), or use loss_on: all",
        )
    if tokenizer is None or not tokenizer.is_fast:
        raise SutureError(
            f"{documents.source}: the model's tokenizer does not say which characters its tokens are of",
            "add tokenizer.json to the model, or use loss_on: all",
        )
    texts = render_chats(documents, tokenizer)
    if _MARKED.search(tokenizer.get_chat_template()):
        return [_marked(chat, tokenizer) for chat in documents.chats]
    masks = []
    offsets = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    for i, (chat, text) in enumerate(zip(documents.chats, texts, strict=True)):
        spans = answer_spans(chat, text, documents.name(i), tokenizer)
        masks.append([any(start < to and end > at for at, to in spans) for start, end in offsets[i]])
    return masks


def _marked(chat: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    found: Any = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    return [bool(x) for x in found["assistant_masks"]]


def answer_spans(chat: Conversation, text: str, name: str, tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """Characters of `text`, the rendered conversation, that the assistant's messages add. Raises SutureError when what
    comes before or with one of them is rendered otherwise alone."""
    spans = []
    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = render_chat(chat[:i], name, tokenizer, answer=True) if i else ""
        after = text if i + 1 == len(chat) else render_chat(chat[: i + 1], name, tokenizer)
        if not (text.startswith(after) and after.startswith(before)):
            raise SutureError(
                f"{name}: the chat template renders the conversation up to message {i + 1} otherwise than in the whole, so "
                "the assistant's tokens cannot be told from the rest",
                _HINT,
            )
        spans.append((len(before), len(after)))
    return spans
