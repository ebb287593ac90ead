"""Calibration blocks and evaluation windows of a recipe, tokenized with the model's own tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..calibrate.documents import DataSpec, Documents, read_documents
from ..calibrate.overlap import leakage_warnings, ngram_overlap
from ..calibrate.tokens import (
    TokenBlocks,
    document_bytes,
    encode_documents,
    load_tokenizer,
    pack_calibration,
    prefix_id,
)
from ..checkpoint.errors import SutureError
from ..checkpoint.reader import Checkpoint
from ..report.windows import Windows, gptq_windows, rolling_windows
from .recipe import CalibrationSettings, ReportSettings, TextSettings


@dataclass(frozen=True)
class TextModel:
    """What tokenizing needs to know of a model."""

    vocabulary: int
    max_positions: int | None
    tokenizer: Any  # None: token ids can still be used
    missing: str = ""  # why there is no tokenizer
    bos_id: int | None = None


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
            "notes": list(blocks.notes),
        }


@dataclass(frozen=True)
class Evaluation:
    documents: Documents
    windows: Windows
    bos_id: int | None  # the token put before each document or window, never scored

    def describe(self) -> dict[str, Any]:
        """The identity to print beside every figure."""
        return {
            "data": self.documents.source,
            "documents": len(self.documents),
            "documents_skipped": dict(self.documents.skipped),
            "content_sha256": self.documents.sha256,
            "unscored": dict(self.windows.n_unscored),
            "bos_id": self.bos_id,
            **self.windows.protocol(),
        }


def text_model(checkpoint: Checkpoint, vocabulary: int, max_positions: int | None) -> TextModel:
    """Load the checkpoint's tokenizer; a missing one matters only when there is text to tokenize."""
    try:
        tokenizer = load_tokenizer(checkpoint.path)
    except SutureError as error:
        bos = checkpoint.config.get("bos_token_id")
        return TextModel(vocabulary, max_positions, None, str(error), bos if isinstance(bos, int) else None)
    return TextModel(vocabulary, max_positions, tokenizer, bos_id=prefix_id(tokenizer))


def calibration_text(settings: CalibrationSettings, model: TextModel) -> Calibration:
    documents, ids = _read(settings, model)
    blocks = pack_calibration(
        ids,
        samples=settings.samples,
        length=settings.length,
        bos_id=model.bos_id,
        seed=settings.seed,
        order=settings.order,
        max_positions=model.max_positions,
    )
    return Calibration(documents, blocks)


def evaluation_text(settings: ReportSettings, model: TextModel) -> Evaluation:
    window = settings.window or min(2048, model.max_positions or 2048)
    if settings.protocol == "gptq-2048":
        return _joined(settings, model, window)
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
    return Evaluation(documents, windows, model.bos_id)


def leakage(calibration: Calibration | None, evaluation: Evaluation | None) -> tuple[str, ...]:
    """Warnings when the text that tuned a model also scores it."""
    if calibration is None or evaluation is None:
        return ()
    overlap = ngram_overlap(calibration.blocks.ids, evaluation.windows.ids)
    return leakage_warnings(calibration.documents, evaluation.documents, overlap)


def _read(settings: TextSettings, model: TextModel) -> tuple[Documents, list[list[int]]]:
    documents = read_documents(DataSpec(settings.data, settings.column, settings.split))
    if documents.kind != "ids" and model.tokenizer is None:
        raise SutureError(model.missing)
    return documents, encode_documents(documents, model.tokenizer, model.vocabulary, bos_id=model.bos_id)


def _joined(settings: ReportSettings, model: TextModel, window: int) -> Evaluation:
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
    windows = gptq_windows(
        ids,
        documents=labels if len(documents) > 1 else None,
        window=window,
        bos_id=model.bos_id,
        n_bytes=n_bytes,
        max_windows=settings.max_windows,
        max_positions=model.max_positions,
    )
    return Evaluation(documents, windows, model.bos_id)
