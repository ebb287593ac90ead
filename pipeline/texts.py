"""Calibration blocks and evaluation windows of a recipe, tokenized with the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..calibrate.answers import answer_masks
from ..calibrate.documents import DataSpec, Documents, read_documents
from ..calibrate.tokens import (
    TokenBlocks,
    document_bytes,
    encode_documents,
    load_tokenizer,
    pack_calibration,
    prefix_id,
)
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import text_config
from ..checkpoint.reader import Checkpoint
from ..report.detokenize import count_words, wikitext
from ..report.windows import Windows, gptq_windows, llamacpp_windows, rolling_windows
from .recipe import CalibrationSettings, SetSettings, TextSettings


@dataclass(frozen=True)
class TextModel:
    """What tokenizing needs to know of a model."""

    vocabulary: int
    max_positions: int | None
    tokenizer: Any  # None: token ids can still be used
    missing: str = ""  # why there is no tokenizer
    bos_id: int | None = None
    family: str = ""  # its model_type

    @property
    def lost_without_bos(self) -> bool:
        return self.family in _LOST_WITHOUT_BOS

    def warn_without_bos(self, name: str, ids: Iterable[Sequence[int] | npt.NDArray[np.int64]]) -> Iterator[str]:
        """When requests or prompts of a task begin without the BOS that the model is lost without."""
        if self.lost_without_bos and (
            missing := sum(len(row) == 0 or int(row[0]) not in self._begins() for row in ids)
        ):
            yield (
                f"{name}: {missing} prompts without BOS, and {self.family} models are lost without it: the answers say "
                "little; use a tokenizer that adds BOS"
            )

    def _begins(self) -> set[int]:
        """BOS, whether or not the tokenizer adds it by itself: a chat template writes it."""
        own = getattr(self.tokenizer, "bos_token_id", None)
        return {i for i in (self.bos_id, own) if i is not None}


_LOST_WITHOUT_BOS = ("gemma", "gemma2", "gemma3", "gemma3_text")  # perplexity in the millions (gemma-7b: 1e13)


@dataclass(frozen=True)
class Calibration:
    documents: Documents
    blocks: TokenBlocks

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        blocks = self.blocks
        return {
            "source": self.documents.source,
            "documents": len(self.documents),
            "documents_used": blocks.n_documents_used,
            "documents_skipped": dict(self.documents.skipped),
            "content_sha256": self.documents.sha256,
            "samples": int(blocks.ids.shape[0]),
            "length": int(blocks.ids.shape[1]),
            "tokens_kept": blocks.n_tokens_kept,
            "tokens_dropped": blocks.n_tokens_dropped,
            "tokens_sha256": blocks.sha256,
            "packing": "joined" if blocks.segments is None else "isolated",
            "sequences_of_several_documents": blocks.n_joined,
            "notes": list(blocks.notes),
        }


@dataclass(frozen=True)
class Evaluation:
    documents: Documents
    windows: Windows
    bos_id: int | None  # the token put before each document or window, never scored
    name: str = ""  # in the report
    detokenize: str = "none"
    warnings: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """The identity to print beside every figure."""
        return {
            "data": self.documents.source,
            "documents": len(self.documents),
            "documents_skipped": dict(self.documents.skipped),
            "content_sha256": self.documents.sha256,
            "unscored": dict(self.windows.n_unscored),
            "bos_id": self.bos_id,
            **({"detokenize": self.detokenize} if self.detokenize != "none" else {}),
            **self.windows.protocol(),
        }


def text_model(checkpoint: Checkpoint, vocabulary: int, max_positions: int | None) -> TextModel:
    """Load the checkpoint's tokenizer; a missing one matters only when there is text to tokenize."""
    family = str(text_config(checkpoint.config).get("model_type", ""))
    try:
        tokenizer = load_tokenizer(checkpoint.path)
    except SutureError as error:
        bos = checkpoint.config.get("bos_token_id")
        return TextModel(vocabulary, max_positions, None, str(error), bos if isinstance(bos, int) else None, family)
    return TextModel(vocabulary, max_positions, tokenizer, bos_id=prefix_id(tokenizer), family=family)


def calibration_text(settings: CalibrationSettings, model: TextModel, answers: bool = False) -> Calibration:
    """`answers`: which tokens the assistant wrote is wanted too. Raises SutureError for text that cannot be read so."""
    documents, ids = _read(settings, model)
    written = _written(documents, ids, model) if answers else None
    blocks = pack_calibration(
        ids,
        samples=settings.samples,
        length=settings.length,
        bos_id=model.bos_id,
        seed=settings.seed,
        order=settings.order,
        max_positions=model.max_positions,
        isolated=settings.packing == "isolated",
        answers=written,
    )
    return Calibration(documents, blocks)


def _written(documents: Documents, ids: Sequence[Sequence[int]], model: TextModel) -> list[list[bool]]:
    """Per token of each encoded conversation, whether the assistant wrote it."""
    masks = answer_masks(documents, model.tokenizer)
    return [mask[len(mask) - len(row) :] for mask, row in zip(masks, ids, strict=True)]  # a leading BOS is gone there


def evaluation_text(settings: SetSettings, model: TextModel) -> Evaluation:
    """The windows of one text. Raises SutureError for what cannot be scored so."""
    usual = 512 if settings.protocol == "llamacpp-512" else 2048
    window = settings.window or min(usual, model.max_positions or usual)
    if settings.protocol in ("gptq-2048", "llamacpp-512"):
        found = _joined(settings, model, window)
    elif settings.protocol == "lm-eval":
        found = _by_words(settings, model, window)
    else:
        documents, ids = _read(settings, model)
        windows = rolling_windows(
            ids,
            window=window,
            stride=settings.stride,
            bos_id=model.bos_id,
            n_bytes=document_bytes(documents, model.tokenizer),
            max_windows=settings.max_windows,
            max_tokens_per_document=settings.max_tokens_per_document,
            max_positions=model.max_positions,
        )
        found = Evaluation(documents, windows, model.bos_id)
    named = settings.data.startswith(("builtin:", "hf:"))
    name = settings.name or (settings.data if named else Path(settings.data).name)
    return replace(found, name=name, warnings=tuple(_warnings(found, model, name)))


def _warnings(found: Evaluation, model: TextModel, name: str) -> Iterator[str]:
    bos = found.windows.add_bos
    if model.lost_without_bos and bos in ("none", "once"):
        where = "no BOS at all" if bos == "none" else "BOS only before the first window"
        yield (
            f"{name}: scored with {where}, and {model.family} models are lost without it: the perplexity says little; "
            "use the protocol doc-rolling with a tokenizer that adds BOS"
        )
    if found.windows.cluster == "block":
        yield (
            f"{name}: no documents are known (setting split: REGEX marks where one begins), so clusters are blocks of at "
            "least 2048 tokens; neighbouring blocks resemble each other and the interval is too short"
        )


def _read(settings: TextSettings, model: TextModel) -> tuple[Documents, list[list[int]]]:
    documents = read_documents(DataSpec(settings.data, settings.column, settings.split))
    if documents.kind != "ids" and model.tokenizer is None:
        raise SutureError(model.missing)
    return documents, encode_documents(documents, model.tokenizer, model.vocabulary, bos_id=model.bos_id)


def _by_words(settings: SetSettings, model: TextModel, window: int) -> Evaluation:
    """lm-eval's way: each document behind the BOS, or else the EOS, whatever the tokenizer itself adds."""
    documents = read_documents(DataSpec(settings.data, settings.column, settings.split))
    if documents.kind != "texts" or model.tokenizer is None:
        raise SutureError(
            f"{documents.source}: the protocol lm-eval counts words and bytes of texts, "
            f"found {documents.kind if model.tokenizer is not None else 'no tokenizer'}",
            "give texts and a model with its tokenizer, or use doc-rolling",
        )
    pages = documents.texts
    texts = [wikitext(page) for page in pages] if settings.detokenize == "wikitext" else list(pages)
    tokenizer = model.tokenizer
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    windows = rolling_windows(
        [row[1:] if row[:1] == [prefix] else row for row in ids],
        protocol="lm-eval",
        window=window,
        bos_id=prefix,
        n_bytes=[len(page.encode()) for page in pages],
        n_words=[count_words(page) for page in pages],
        max_windows=settings.max_windows,
        max_positions=model.max_positions,
    )
    return Evaluation(documents, windows, prefix, detokenize=settings.detokenize)


def _joined(settings: SetSettings, model: TextModel, window: int) -> Evaluation:
    """The whole text as one sequence, one tokenizer call, documents marked by where each token's text begins."""
    documents = read_documents(DataSpec(settings.data, settings.column, settings.split))
    if documents.kind == "texts" and model.tokenizer is not None:
        joint = "" if settings.split is not None else "\n\n"  # pieces of one file join as they were
        text = joint.join(documents.texts)
        starts = np.cumsum([0, *(len(piece) + len(joint) for piece in documents.texts[:-1])])
        encoded = model.tokenizer(text, return_offsets_mapping=True, verbose=False)
        ids, n_bytes = encoded["input_ids"], float(len(text.encode()))
        labels = np.searchsorted(starts, [start for start, _ in encoded["offset_mapping"]], side="right") - 1
    else:
        documents, pieces = _read(settings, model)
        ids = [i for piece in pieces for i in piece]
        labels = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        n_bytes = None
    plan = llamacpp_windows if settings.protocol == "llamacpp-512" else gptq_windows
    windows = plan(
        ids,
        documents=labels if len(documents) > 1 else None,
        window=window,
        bos_id=model.bos_id,
        n_bytes=n_bytes,
        max_windows=settings.max_windows,
        max_positions=model.max_positions,
    )
    return Evaluation(documents, windows, model.bos_id)
