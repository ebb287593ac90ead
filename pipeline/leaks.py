"""Did a model see, when it was tuned, what it is scored on? Texts, and items of tasks, against calibration text.

Signs, from plain to fine: the same text, shared documents, shared 13-grams (`calibrate.overlap`). An item of a task counts
as seen when 13 of its tokens in a row are in the calibration text, as in GPT-3's analysis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from ..calibrate.overlap import NGRAM, NOTABLE_SHARE, items_seen, leakage_warnings, ngram_overlap, shared_documents
from ..checkpoint.errors import SutureError
from .generation_runs import GenerationPlan
from .recipe import CalibrationSettings
from .task_runs import TaskPlan
from .texts import Calibration, Evaluation, TextModel, calibration_text

Asked = Sequence[TaskPlan | GenerationPlan]


def leakage(calibration: Calibration | None, evaluations: Sequence[Evaluation], asked: Asked) -> Iterator[str]:
    """Warnings when the text that tunes a model also scores it."""
    if calibration is None:
        return
    rows = calibration.blocks.ids
    for evaluation in evaluations:
        overlap = ngram_overlap(rows, evaluation.windows.ids)
        yield from leakage_warnings(calibration.documents, evaluation.documents, overlap)
    for plan in asked:
        seen, items = items_seen(rows, _items(plan))
        if seen > NOTABLE_SHARE * items:
            yield f"{plan.name}: {seen} of {items} items have {NGRAM} tokens in a row that are in the calibration text"


def _items(plan: TaskPlan | GenerationPlan) -> list[list[npt.ArrayLike]]:
    """Token ids of each item's requests, or of its prompt."""
    if isinstance(plan, GenerationPlan):
        return [[row] for row in plan.ids]
    windows = iter(plan.windows.ids)
    return [[next(windows) for _ in item.requests] for item in plan.items]


def refuse_training_on(evaluations: Sequence[Evaluation], calibration: Calibration, step: str) -> None:
    """Raise SutureError when a document that scores the result is, content for content, one to train on."""
    for evaluation in evaluations:
        shared = shared_documents(calibration.documents, evaluation.documents)
        if shared:
            raise SutureError(
                f"{step}: {shared} of the {len(evaluation.documents)} documents of {evaluation.documents.source}, which the "
                "report scores, are also in the text to train on",
                "train on other text than the report's",
            )


def leaks_recorded(
    record: Mapping[str, Any], text: TextModel, evaluations: Sequence[Evaluation], asked: Asked
) -> list[str]:
    """Warnings when the candidate, or what it was made from, was calibrated on what scores it. `record`: its manifest.

    The calibration text is read again from where the manifest says; when it is not there, only its hash is compared.
    """
    made = [*record.get("history", []), record]
    notes = [note for one in made for note in _leaks_of(one, text, evaluations, asked)]
    return list(dict.fromkeys(notes))


def _leaks_of(
    record: Mapping[str, Any], text: TextModel, evaluations: Sequence[Evaluation], asked: Asked
) -> Iterator[str]:
    described = record.get("calibration")
    if described is None:
        return
    known = _calibration(record["recipe"].get("calibration") or {}, described, text)
    others = []
    for evaluation in evaluations:
        if described.get("content_sha256") == evaluation.documents.sha256:
            source = evaluation.documents.source
            yield f"the candidate was calibrated on this very text ({source}): the result is flattered"
        else:
            others.append(evaluation)
    if known is not None:
        yield from leakage(known, others, asked)
    elif others or asked:
        yield (
            f"the candidate's calibration text ({described['source']}) is not here as it was: whether it shares passages "
            "with the evaluation was not checked"
        )


def _calibration(settings: Mapping[str, Any], described: Mapping[str, Any], text: TextModel) -> Calibration | None:
    """The calibration blocks that a manifest tells of; None when they cannot be had again without the network."""
    if str(settings.get("data", "hf:")).startswith("hf:"):
        return None
    try:
        found = calibration_text(CalibrationSettings.model_validate(settings), text)
    except (SutureError, ValueError):
        return None
    return found if found.blocks.sha256 == described["tokens_sha256"] else None
