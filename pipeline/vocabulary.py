"""The step `vocabulary`: rows of the embedding and the head, the tokenizer's files, and every id that a config names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..calibrate.documents import DataSpec, read_documents
from ..calibrate.skeleton import open_layout
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import text_config, with_text_config
from ..checkpoint.manifest import Account
from ..checkpoint.source import TensorSource, side_file
from ..quant.scheme import STORAGE
from ..surgery import vocabulary as core
from ..surgery.vocabulary import Rows, VocabularySettings
from .derive import copied, most_made, run_derived
from .step import Prepared, StepResult, StepRun

GENERATION = "generation_config.json"
_FILES = ("tokenizer_config.json", "added_tokens.json", "vocab.json", "merges.txt", *core.OTHER_VOCABULARIES)
_PIECE = 8192  # rows read together


@dataclass(frozen=True)
class VocabularyPlan(Prepared):
    rows: Rows
    tables: tuple[str, ...]  # the tensors with one row per token
    numbers: dict[str, Any]


def prepare(source: TensorSource, settings: VocabularySettings) -> VocabularyPlan:
    """Raises SutureError for a tokenizer that is not BPE, and when the new one does not encode the texts as the old."""
    layout = open_layout(source)
    tables = tuple(
        name for name in (layout.embedding, layout.head, layout.head_duplicate, layout.head_bias) if name is not None
    )
    size = source.shapes[layout.embedding][0]
    generation = side_file(source, GENERATION)
    side_files: dict[str, bytes | None] = {}
    config, notes = dict(source.config), list[str]()
    numbers: dict[str, Any] = {"rows": {"before": size}}
    kept = list(range(size))
    averaged: list[tuple[int, tuple[int, ...]]] = []
    tokens = kept
    if settings.trim is not None or settings.extend is not None:
        content = core.parse_tokenizer(side_file(source, core.TOKENIZER))
        tokens = sorted(i for i in core.all_tokens(content).values() if i < size)
        old = content
        new_id: dict[int, int] | None = None
        if settings.trim is not None:
            texts = _texts(settings)
            used = _used(old, texts)
            named = core.named_ids(config, size)
            named |= core.named_ids(json.loads(generation), size) if generation is not None else set()
            kept = sorted(i for i in core.ids_to_keep(content, used, named) if i < size)
            new_id = {i: new for new, i in enumerate(kept)}
            content = core.trimmed_tokenizer(content, new_id)
            _check_same_encoding(old, content, new_id, texts)
            config = core.renumbered_config(config, new_id, size)
            if generation is not None:
                renumbered = core.renumbered_config(json.loads(generation), new_id, size)
                side_files[GENERATION] = (json.dumps(renumbered, indent=2, ensure_ascii=False) + "\n").encode()
            numbers |= {"used_by_the_texts": len(used), "kept": len(kept), "dropped": size - len(kept)}
        if settings.extend is not None:
            plain = content
            content = core.extended_tokenizer(content, settings.extend, settings.special)
            known = core.all_tokens(content)
            for token in settings.extend:
                pieces = _encode(plain, [token])[0] if settings.initial == "pieces" else []
                averaged.append((known[token], tuple(kept[i] for i in pieces)))
            numbers["added"] = {token: known[token] for token in settings.extend}
        _check_ids(content)
        present = {name: raw for name in _FILES if (raw := side_file(source, name)) is not None}
        side_files |= core.tokenizer_files(content, present, new_id)
        notes += [
            f"vocabulary: {name} is left out, {core.TOKENIZER} counts"
            for name, raw in side_files.items()
            if raw is None
        ]
    n = max(len(kept), *(position + 1 for position, _ in averaged)) if averaged else len(kept)
    multiple = settings.pad_to_multiple or 1
    n = -(-n // multiple) * multiple
    if n == size and kept == list(range(size)) and not averaged:
        raise SutureError(f"vocabulary: {size} rows are what the settings ask for already", "remove the step")
    rows = Rows(tuple(kept), tuple(averaged), n, tuple(tokens))
    specs, accounts = copied(source, layout)
    specs = tuple(replace(spec, shape=(n, *spec.shape[1:])) if spec.name in tables else spec for spec in specs)
    how = f"{len(kept)} of {size} rows kept, {n - len(kept)} added"
    accounts |= {name: Account("changed", (name,), how) for name in tables}
    config = with_text_config(config, {**text_config(config), "vocab_size": n})
    if "vocab_size" in source.config:
        config["vocab_size"] = n
    token_map = None
    if kept != list(range(size)) or any(position < len(kept) for position, _ in averaged):
        renumbered = rows.token_map + [-1] * (size - len(rows.token_map))
        taken = {position for position, _ in averaged}  # rows of padding that new tokens take are no old token's
        token_map = tuple(-1 if new in taken else new for new in renumbered)
    numbers["rows"]["after"] = n
    return VocabularyPlan(
        by_tensor=True,
        working=most_made(spec for spec in specs if spec.name in tables),
        specs=specs,
        config=config,
        accounts=accounts,
        notes=tuple(notes),
        n_blocks=len(layout.blocks),
        side_files=side_files,
        token_map=token_map,
        rows=rows,
        tables=tables,
        numbers=numbers,
    )


def _texts(settings: VocabularySettings) -> tuple[list[str], list[Sequence[int]]]:
    """(texts, token ids) of the data under trim."""
    texts: list[str] = []
    ids: list[Sequence[int]] = []
    for data in settings.trim or ():
        documents = read_documents(DataSpec(data, settings.column, None))
        if documents.kind == "chats":
            raise SutureError(
                f"vocabulary: {documents.source} holds chat messages, which only a chat template makes text of",
                "give the rendered text, or token ids (column input_ids)",
            )
        texts += documents.texts
        ids += documents.ids
    return texts, ids


def _tokenizer(content: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # what Rust raises is a plain Exception
        raise SutureError(
            f"{core.TOKENIZER}: the tokenizers library refuses it: {error}", "restore the file"
        ) from error


def _encode(content: dict[str, Any], texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in _tokenizer(content).encode_batch(texts, add_special_tokens=False)]


def _used(content: dict[str, Any], texts: tuple[list[str], list[Sequence[int]]]) -> set[int]:
    return {i for ids in (*_encode(content, texts[0]), *texts[1]) for i in ids}


def _check_same_encoding(
    old: dict[str, Any], new: dict[str, Any], new_id: dict[int, int], texts: tuple[list[str], list[Sequence[int]]]
) -> None:
    before, after = _encode(old, texts[0]), _encode(new, texts[0])
    for text, a, b in zip(texts[0], before, after, strict=True):
        if [new_id[i] for i in a] != b:
            raise SutureError(
                f"vocabulary: the trimmed tokenizer does not encode {text[:40]!r}... as the original does",
                "please report this",
            )


def _check_ids(content: dict[str, Any]) -> None:
    """The tokenizers library, which numbers added tokens itself, must agree with the file."""
    tokenizer = _tokenizer(content)
    for token, i in core.all_tokens(content).items():
        if tokenizer.token_to_id(token) != i:
            raise SutureError(
                f"vocabulary: {token!r} should be token {i}, but the tokenizers library makes it "
                f"{tokenizer.token_to_id(token)}",
                "the added tokens' ids have gaps: this tokenizer cannot be changed",
            )


def run(work: StepRun, plan: VocabularyPlan, settings: VocabularySettings) -> StepResult:
    """Gather rows; rows of new tokens are means, those of padding the mean of all tokens."""
    n = len(plan.rows.kept)

    def derive(name: str) -> Tensor | str:
        return _gathered(work, plan.rows, name) if name in plan.tables else name

    def compared(original: Tensor, changed: Tensor) -> tuple[Tensor, Tensor]:
        replaced = {position for position, _ in plan.rows.overwritten}
        columns = [new for new in range(n) if new not in replaced]
        return original[..., [plan.rows.kept[new] for new in columns]], changed[..., columns]

    result = run_derived(work, plan, derive, exact=True, compared=compared)
    return StepResult({}, result.expected, {**result.receipt, **plan.numbers})


def _gathered(work: StepRun, rows: Rows, name: str) -> Tensor:
    checkpoint = work.checkpoint
    shape, dtype = checkpoint.shapes[name], STORAGE[checkpoint.dtypes[name]]
    out = torch.empty((rows.size, *shape[1:]), dtype=dtype)
    for start in range(0, len(rows.kept), _PIECE):
        part = rows.kept[start : start + _PIECE]
        out[start : start + len(part)] = _rows(checkpoint, name, part)
    mean = _mean(work, name, rows.tokens) if rows.overwritten or rows.size > len(rows.kept) else None
    if mean is not None:
        out[len(rows.kept) :] = mean.to(dtype)
    for position, pieces in rows.overwritten:
        wanted = _mean(work, name, pieces) if pieces else mean
        assert wanted is not None
        out[position] = wanted.to(dtype)
    return out


def _mean(work: StepRun, name: str, rows: Sequence[int]) -> Tensor:
    """Mean of some rows, float64."""
    total = torch.zeros(work.checkpoint.shapes[name][1:], dtype=torch.float64)
    for start in range(0, len(rows), _PIECE):
        total += _rows(work.checkpoint, name, rows[start : start + _PIECE]).double().sum(0)
    return total / len(rows)


def _rows(checkpoint: TensorSource, name: str, rows: Sequence[int]) -> Tensor:
    """Rows of a matrix, or numbers of a bias."""
    matrix = len(checkpoint.shapes[name]) > 1
    return checkpoint.read_rows(name, list(rows)) if matrix else checkpoint.read(name)[list(rows)]
