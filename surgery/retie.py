"""Tie the head to the embedding again: for a model that stores both with the same values."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ..checkpoint.errors import SutureError

_ROWS = 8192


class RetieSettings(BaseModel):
    """No settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def check_equal(embedding: Tensor, head: Tensor, names: tuple[str, str]) -> None:
    """Raises SutureError with the difference unless both [vocab, hidden] hold the same values."""
    different, largest, rows = 0, 0.0, 0
    for a, b in zip(embedding.split(_ROWS), head.split(_ROWS), strict=True):
        gap = (a.float() - b.float()).abs()
        different += int((gap != 0).sum())
        rows += int((gap != 0).any(1).sum())
        largest = max(largest, float(gap.max()))
    if different or not bool(torch.isfinite(torch.tensor(largest))):
        raise SutureError(
            f"retie: {names[1]} and {names[0]} differ in {different} of {embedding.numel()} values, in {rows} of "
            f"{embedding.shape[0]} rows, by up to {largest:.3g}",
            "one of them would be lost: leave the step out",
        )


def tied_config(config: dict[str, Any]) -> dict[str, Any]:
    """The raw config with `tie_word_embeddings` true, also inside a vision wrapper's text_config."""
    result = {**config, "tie_word_embeddings": True}
    if isinstance(config.get("text_config"), dict):
        result["text_config"] = {**config["text_config"], "tie_word_embeddings": True}
    return result
