"""Token ids of documents, and calibration blocks of equal length cut from them.

Two rules decide whether calibration sees what the model will see. BOS: documents are encoded without special tokens,
and each block gets exactly one BOS at its start if the tokenizer prepends one; a rendered chat template that brings its
own loses it first. Length: no document is dropped for being too long or too short. With `order="shuffled"`

    1. documents are put in a random order, each cut into pieces of a block's size, the pieces in random order too;
    2. pieces are taken in turn, one per document and round, so that few blocks still see many documents;
    3. a full piece is a block; shorter ones are joined, without padding, until they fill one.

`order="sequential"` is what benchmarks do: the first samples * length tokens of the documents put end to end.

Pieces that share a block see each other, unless they are isolated: then each begins with the BOS, positions start again
with it, and nothing attends to another piece. `TokenBlocks.segments` says which piece each token is of.
Randomness is a hash of (seed, document, piece): the same blocks on every machine and with every library version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ..checkpoint.errors import SutureError
from .documents import Conversation, Documents

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

# Without any of these, transformers 5 builds an empty tokenizer for several families instead of failing.
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """Calibration input: `ids` (samples, length) int64, and where its tokens came from."""

    ids: IntArray
    sha256: str  # of shape and ids, and of segments and answers where there are any
    n_tokens_kept: int  # of documents, without the BOS that blocks add
    n_tokens_dropped: int
    tokens_per_document: IntArray  # (n_documents,) kept tokens
    notes: tuple[str, ...]
    n_joined: int = 0  # blocks that hold pieces of several documents, which see each other
    segments: IntArray | None = None  # (samples, length): 0, 1, ... by isolated piece of a block; None: one piece each
    answers: BoolArray | None = None  # (samples, length): the tokens that the assistant wrote, of chats

    @property
    def n_documents_used(self) -> int:
        return int((self.tokens_per_document > 0).sum())

    @property
    def positions(self) -> IntArray | None:
        """(samples, length): each token's place in its piece; None when blocks are not divided."""
        if self.segments is None:
            return None
        at = np.broadcast_to(np.arange(self.ids.shape[1]), self.ids.shape)
        begins = np.diff(self.segments, axis=1, prepend=-1) > 0
        return at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)

    def only(self, kept: BoolArray) -> TokenBlocks:
        """The blocks for which `kept` (samples,) is true; the accounting stays that of all."""
        parts = {"ids": self.ids, "segments": self.segments, "answers": self.answers}
        return replace(self, **{name: part[kept] for name, part in parts.items() if part is not None})

    def batches(self, size: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """(ids, positions), both by batches of `size` sequences."""
        import torch  # here, since reading text needs none

        ids = list(torch.from_numpy(self.ids).split(size))
        positions = self.positions
        return ids, [None] * len(ids) if positions is None else list(torch.from_numpy(positions).split(size))


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; no network, no code from the directory.

    Raises SutureError: no vocabulary there, or one that does not load.
    """
    from transformers import AutoTokenizer

    path = Path(directory)
    hint = "copy the tokenizer files of the base model there, or give data that is token ids already (column input_ids)"
    if not any((path / name).is_file() for name in VOCABULARY_FILES) and not list(path.glob("*.tiktoken")):
        raise SutureError(f"{path} has no tokenizer (none of {', '.join(VOCABULARY_FILES)})", hint)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        found = tokenizer.encode("a", add_special_tokens=False)
        prefix_id(tokenizer)
    except BaseException as error:  # of any kind, a panic from Rust among them, which is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        raise SutureError(f"the tokenizer in {path} does not load: {type(error).__name__}: {reason}", hint) from error
    if not found:
        raise SutureError(f"the tokenizer in {path} gives no token for 'a': its vocabulary is missing", hint)
    return tokenizer


def wants_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its BOS before a text (Llama, Mistral, Gemma: yes; Qwen, GPT-2: no)."""
    return prefix_id(tokenizer) is not None


def prefix_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS id that the tokenizer puts before a text, or None; found by encoding one."""
    bos = tokenizer.bos_token_id
    return bos if isinstance(bos, int) and tokenizer.encode("a", add_special_tokens=True)[:1] == [bos] else None


def render_chats(documents: Documents, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Each conversation as the text that the model's chat template makes of it.

    Raises SutureError: no template, or one that refuses a conversation (named).
    """
    _need_template(tokenizer, documents.source)
    return [render_chat(chat, documents.name(i), tokenizer) for i, chat in enumerate(documents.chats)]


def render_questions(
    chats: Sequence[Sequence[dict[str, Any]]], tokenizer: PreTrainedTokenizerBase, source: str
) -> list[str]:
    """Each conversation, its last message the user's, up to where the assistant's answer begins."""
    _need_template(tokenizer, source)
    return [render_chat(list(chat), f"{source}: row {i + 1}", tokenizer, answer=True) for i, chat in enumerate(chats)]


def _need_template(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    if tokenizer.chat_template is None:
        raise SutureError(
            f"{source} holds chat messages, but the tokenizer has no chat template",
            "add chat_template.jinja beside the tokenizer, or name a text column with the setting column: NAME",
        )


def document_bytes(documents: Documents, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int] | None:
    """UTF-8 bytes of each document's text, for bits per byte; of chats as rendered. None for token ids."""
    if documents.kind == "ids":
        return None
    texts = documents.texts or render_chats(documents, _needed(tokenizer, documents))
    return [len(text.encode()) for text in texts]


def encode_documents(
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    *,
    bos_id: int | None = None,
) -> list[list[int]]:
    """Token ids of each document, without special tokens around them and of any length.

    tokenizer: None will do for documents that are token ids. vocab_size: rows of the model's embedding.
    bos_id: the BOS that blocks and windows will add; found from the tokenizer when there is one. Documents that begin
    with it (chat templates, ids made elsewhere) lose it, so that it is not doubled.
    Raises SutureError: an id outside [0, vocab_size), texts without a tokenizer, chats without a template.
    """
    if documents.kind == "ids":
        encoded = [list(ids) for ids in documents.ids]
    else:
        tokenizer = _needed(tokenizer, documents)
        texts = documents.texts or render_chats(documents, tokenizer)
        # verbose=False: no "longer than the maximum" from transformers, since blocks and windows are cut later
        encoded = list(tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"])
    if bos_id is None and tokenizer is not None:
        bos_id = prefix_id(tokenizer)
    encoded = [ids[_leading(ids, bos_id) :] for ids in encoded]
    _check_ids(encoded, documents, vocab_size)
    return encoded


def doubled_bos(documents: Sequence[Sequence[int]], bos_id: int | None) -> list[int]:
    """Indices of the documents that begin with two or more BOS: made by a template and a tokenizer that both add it."""
    return [i for i, ids in enumerate(documents) if _leading(ids, bos_id) > 1]


def pack_calibration(
    documents: Sequence[Sequence[int]],
    *,
    samples: int,
    length: int,
    bos_id: int | None,
    seed: int = 0,
    order: Literal["shuffled", "sequential"] = "shuffled",
    max_positions: int | None = None,
    isolated: bool = False,
    answers: Sequence[Sequence[bool]] | None = None,
) -> TokenBlocks:
    """Blocks of `length` tokens, `samples` of them or as many as the documents fill.

    documents: token ids without BOS; one that begins with `bos_id` loses it (in the notes).
    bos_id: starts every block, and every isolated piece; None for a model that wants no BOS. max_positions: the model's
    longest context. isolated: pieces of one block are told apart (`segments`). answers: per token of each document.
    Raises SutureError: settings out of range, too few tokens for one block.
    """
    _check_settings(samples, length, order, max_positions)
    if isolated and order == "sequential":
        raise SutureError("isolated pieces have no order: sequential puts documents end to end", "leave order out")
    lead = [_leading(ids, bos_id) for ids in documents]
    arrays = [np.asarray(ids, dtype=np.int64)[n:] for ids, n in zip(documents, lead, strict=True)]
    first = int(bos_id is not None)
    body = length - first
    found = sum(array.size for array in arrays)
    if found < body:
        raise SutureError(
            f"the calibration data has {found} tokens in {len(arrays)} documents; "
            f"one block of length {length} needs {body}",
            "give more text" + (f", or a length of at most {found + length - body}" if found > 1 else ""),
        )
    sizes = [array.size for array in arrays]
    pieces = _sequential(sizes, body) if order == "sequential" else _shuffled(sizes, body, seed)
    blocks = _fill(pieces, length, first, isolated, samples)
    kept = np.zeros(len(arrays), dtype=np.int64)
    for piece in (piece for block in blocks for piece in block):
        kept[piece.document] += piece.size
    leading = np.full(first, -1 if bos_id is None else bos_id, dtype=np.int64)
    ids = _assemble(blocks, arrays, leading, isolated)
    segments = _segments(blocks, first) if isolated else None
    marks = None
    if answers is not None:
        written = [np.asarray(row, dtype=np.bool_)[n:] for row, n in zip(answers, lead, strict=True)]
        marks = _assemble(blocks, written, np.zeros(first, dtype=np.bool_), isolated)
    joined = 0 if isolated else sum(len({piece.document for piece in block}) > 1 for block in blocks)
    return TokenBlocks(
        ids=ids,
        sha256=_sha256(ids, segments, marks),
        n_tokens_kept=int(kept.sum()),
        n_tokens_dropped=sum(lead) + found - int(kept.sum()),
        tokens_per_document=kept,
        notes=_notes(arrays, lead, body, len(blocks), samples, "isolated piece" if isolated else "block"),
        n_joined=joined,
        segments=segments,
        answers=marks,
    )


@dataclass(frozen=True)
class _Piece:
    """Contiguous tokens of one document, at most a block's worth."""

    document: int
    start: int
    size: int


Blocks = list[list[_Piece]]


def _shuffled(sizes: list[int], body: int, seed: int) -> Iterator[_Piece]:
    """One piece of each document per round, documents and their pieces in an order drawn from `seed`."""
    order = sorted((d for d, size in enumerate(sizes) if size), key=lambda d: _draw(seed, d, -1))
    waiting = []
    for d in order:
        starts = range(0, sizes[d], body)
        drawn = sorted(starts, key=lambda start: _draw(seed, d, start)) if len(starts) > 1 else starts
        waiting.append((d, iter(drawn)))
    while waiting:
        still = []
        for d, starts in waiting:
            start = next(starts, None)
            if start is not None:
                yield _Piece(d, start, min(body, sizes[d] - start))
                still.append((d, starts))
        waiting = still


def _sequential(sizes: list[int], body: int) -> Iterator[_Piece]:
    """Pieces end to end, cut where blocks end."""
    room = body
    for d, size in enumerate(sizes):
        at = 0
        while at < size:
            piece = _Piece(d, at, min(room, size - at))
            yield piece
            at += piece.size
            room = room - piece.size or body


def _fill(pieces: Iterator[_Piece], length: int, first: int, isolated: bool, samples: int) -> Blocks:
    """Each block's pieces, from pieces in order; one that fills a block is a block by itself.

    `first`: tokens (0 or 1) that every block begins with, or when isolated every piece.
    """
    room, each = (length, first) if isolated else (length - first, 0)
    blocks: Blocks = []
    short: list[_Piece] = []
    for piece in pieces:
        if piece.size + each == room:
            blocks.append([piece])
        else:
            short.append(piece)
        if sum(p.size + each for p in short) >= room:
            taken, short = _cut(short, room, each)
            blocks.append(taken)
        if len(blocks) == samples:
            break
    return blocks


def _cut(pieces: list[_Piece], room: int, each: int) -> tuple[list[_Piece], list[_Piece]]:
    """The pieces that fill `room`, and the rest of the last one."""
    last = pieces[-1]
    left = room - sum(p.size + each for p in pieces[:-1]) - each
    rest = [_Piece(last.document, last.start + left, last.size - left)] if last.size > left else []
    return [*pieces[:-1], _Piece(last.document, last.start, left)], rest


def _assemble(
    blocks: Blocks, arrays: Sequence[npt.NDArray[Any]], leading: npt.NDArray[Any], isolated: bool
) -> npt.NDArray[Any]:
    """(blocks, length) of what `arrays` have for each piece, `leading` before every block or isolated piece."""
    rows = []
    for block in blocks:
        parts = [arrays[p.document][p.start : p.start + p.size] for p in block]
        rows.append(np.concatenate([x for part in parts for x in (leading, part)] if isolated else [leading, *parts]))
    return np.stack(rows)


def _segments(blocks: Blocks, first: int) -> IntArray:
    """(blocks, length): which piece of its block each token is of."""
    return np.stack([np.repeat(np.arange(len(block)), [p.size + first for p in block]) for block in blocks])


def _draw(seed: int, document: int, start: int) -> bytes:
    return hashlib.sha256(f"{seed} {document} {start}".encode()).digest()


def _sha256(ids: IntArray, segments: IntArray | None, answers: BoolArray | None) -> str:
    content = f"{ids.shape}".encode() + ids.astype("<i8").tobytes()
    for name, extra in (("segments", segments), ("answers", answers)):
        content += name.encode() + extra.astype("<i8").tobytes() if extra is not None else b""
    return hashlib.sha256(content).hexdigest()


def _leading(ids: Sequence[int], bos_id: int | None) -> int:
    """How many BOS a document begins with."""
    n = 0
    while bos_id is not None and n < len(ids) and ids[n] == bos_id:
        n += 1
    return n


def _notes(
    arrays: list[IntArray], lead: list[int], body: int, n_blocks: int, samples: int, unit: str
) -> tuple[str, ...]:
    notes = []
    if n_blocks < samples:
        total = sum(array.size for array in arrays)
        notes.append(f"{n_blocks} blocks instead of {samples}: the documents have {total} tokens, {body} to a block")
    cut = sum(array.size > body for array in arrays)
    if cut:
        notes.append(f"{cut} of {len(arrays)} documents are longer than a block and were cut into pieces")
    with_bos, doubled = sum(n > 0 for n in lead), sum(n > 1 for n in lead)
    if with_bos:
        notes.append(
            f"{with_bos} documents began with BOS ({doubled} of them doubled); each {unit} has one, at its start"
        )
    return tuple(notes)


def _check_settings(samples: int, length: int, order: str, max_positions: int | None) -> None:
    if samples < 1:
        raise SutureError(f"samples = {samples}: expected at least 1", "use 128")
    if length < 2:
        raise SutureError(f"length = {length}: expected at least 2 tokens", "use 512 or 2048")
    if order not in ("shuffled", "sequential"):
        raise SutureError(f"order = '{order}': expected shuffled or sequential", "leave it out for shuffled")
    if max_positions is not None and length > max_positions:
        raise SutureError(
            f"length = {length} is longer than the model's context of {max_positions} positions",
            f"use a length of at most {max_positions}",
        )


def _check_ids(encoded: list[list[int]], documents: Documents, vocab_size: int) -> None:
    for i, ids in enumerate(encoded):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            bad = next(token for token in ids if not 0 <= token < vocab_size)
            raise SutureError(
                f"{documents.source}: {documents.name(i)} has the token id {bad}, "
                f"the model's vocabulary is 0 to {vocab_size - 1}",
                "use ids, or a tokenizer, made for this model",
            )


def _needed(tokenizer: PreTrainedTokenizerBase | None, documents: Documents) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise SutureError(
            f"{documents.source} holds {documents.kind}, and the model has no tokenizer",
            "copy the base model's tokenizer files beside it, or give token ids (column input_ids)",
        )
    return tokenizer


def render_chat(chat: Conversation, name: str, tokenizer: PreTrainedTokenizerBase, answer: bool = False) -> str:
    """A conversation as text; with `answer` up to where the assistant's next one begins. `name`: for messages."""
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answer))
    except Exception as error:  # the template is a program of its own: TemplateError, TypeError, KeyError, ...
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SutureError(
            f"{name}: the chat template refuses it: {reason}",
            "correct the conversation's roles and contents, or remove it",
        ) from error
