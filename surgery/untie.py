"""Give a model with tied embeddings a head of its own: an exact copy, so every logit stays what it was.

Needed before anything may change one of the two (quantizing the head, training it, folding a norm into it).
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from ..checkpoint.errors import SutureError
from ..checkpoint.layout import ModelLayout


class UntieSettings(BaseModel):
    """No settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def head_to_add(layout: ModelLayout) -> str:
    """Disk name of the head that untying adds. Raises SutureError when the model is not tied."""
    if layout.head is not None:
        raise SutureError("untie: this model's head is not tied to its embedding", "remove the step")
    if layout.head_duplicate is not None:
        return layout.head_duplicate
    outer = layout.disk_stem.removesuffix("model.") if layout.disk_stem.endswith(".model.") else ""
    return f"{outer}{layout.family.head_on_disk}.weight"


def untied_config(config: dict[str, Any]) -> dict[str, Any]:
    """The raw config with `tie_word_embeddings` false, also inside a vision wrapper's text_config."""
    result = {**config, "tie_word_embeddings": False}
    if isinstance(config.get("text_config"), dict):
        result["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return result
