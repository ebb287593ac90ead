"""Drop, repeat or reorder decoder layers. Weights travel as they are; numbers and every per-layer setting follow.

Which layers matter least: block influence, BI = 1 - E cos(h_in, h_out) over tokens (ShortGPT, Men et al. 2024): a layer
whose output points where its input did changes little. A repeated layer whose copy writes nothing (output matrices 0)
leaves the function exactly as it was: room to train into (LLaMA-Pro, Wu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from ..checkpoint.errors import SutureError


class LayersSettings(BaseModel):
    """Which layers the output has, counted from 0. One of order, drop, repeat and drop_least."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    order: list[int] | None = Field(None, min_length=1, description="the output's layers by their number in the input")
    drop: list[int] | None = Field(None, min_length=1, description="layers to leave out")
    repeat: list[int] | None = Field(None, min_length=1, description="layers to follow with a copy of themselves")
    drop_least: int | None = Field(None, ge=1, description="leave out so many layers, those of least block influence")
    silent_copies: bool = Field(False, description="copies write nothing to the residual, so that the function stays")
    scores: bool = Field(False, description="measure block influence on the calibration text for the manifest")
    influence: list[float] | None = Field(
        None, description="block influence by layer; default: measured on the calibration text when it is needed"
    )

    @model_validator(mode="after")
    def _one_of(self) -> LayersSettings:
        given = [key for key in ("order", "drop", "repeat", "drop_least") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of order, drop, repeat and drop_least (found {', '.join(given) or 'none'})")
        if self.silent_copies and given[0] not in ("repeat", "order"):
            raise ValueError("silent_copies belongs to repeat and order: nothing else makes copies")
        return self

    @property
    def needs_scores(self) -> bool:
        return self.influence is None and (self.scores or self.drop_least is not None)


def new_order(settings: LayersSettings, n: int) -> list[int]:
    """Input layer of every output layer. Without scores, `drop_least` gives the first layers: right in number only.

    Raises SutureError for a layer that the model of `n` layers does not have, or when none would be left.
    """
    named = settings.order or settings.drop or settings.repeat or []
    outside = [i for i in named if not 0 <= i < n]
    if outside:
        raise SutureError(f"layers: there is no layer {outside[0]}", f"this model has layers 0 to {n - 1}")
    if settings.influence is not None and len(settings.influence) != n:
        raise SutureError(f"layers: {len(settings.influence)} influence scores for {n} layers", "give one per layer")
    if settings.order is not None:
        return list(settings.order)
    if settings.repeat is not None:
        return [i for i in range(n) for _ in range(1 + settings.repeat.count(i))]
    if settings.drop_least is not None:
        if settings.drop_least >= n:
            raise SutureError(f"layers: drop_least {settings.drop_least} of {n} layers leaves none", "drop fewer")
        ranking = sorted(range(n), key=lambda i: (settings.influence or range(n, 0, -1))[i])
        dropped = set(ranking[: settings.drop_least])
    else:
        dropped = set(settings.drop or [])
    kept = [i for i in range(n) if i not in dropped]
    if not kept:
        raise SutureError(f"layers: dropping all {n} layers leaves none", "drop fewer")
    return kept


def copies(order: Sequence[int]) -> list[bool]:
    """For every output layer, whether an earlier one came from the same input layer."""
    return [source in order[:position] for position, source in enumerate(order)]


def influence_sum(before: Tensor, after: Tensor) -> tuple[float, int]:
    """(sum of 1 - cos(h_in, h_out) over tokens, tokens) for hidden states [..., hidden]."""
    x, y = before.reshape(-1, before.shape[-1]).double(), after.reshape(-1, after.shape[-1]).double()
    return float((1 - torch.nn.functional.cosine_similarity(x, y, dim=-1)).sum()), x.shape[0]


def reordered_config(
    text: Mapping[str, Any], resolved: Any, order: Sequence[int], dense: Sequence[bool] | None
) -> dict[str, Any]:
    """The raw text config for layers in `order`.

    resolved: transformers' config object of the input, which has derived what `text` leaves out. dense: of a
    mixture-of-experts model, which input layers have no experts. Raises SutureError for a model whose layers do not
    compute the same at another number.
    """
    n = int(resolved.num_hidden_layers)
    if getattr(resolved, "scale_attn_by_inverse_layer_idx", False):
        raise SutureError(
            "layers: scale_attn_by_inverse_layer_idx scales attention by a layer's number",
            "set it to false in config.json and fold 1 / (number + 1) into each layer's query weights first",
        )
    result = dict(text)
    key = getattr(resolved, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    result[key] = len(order)
    for name, value in text.items():
        if isinstance(value, list) and len(value) == n and "layer" in name and name != "mlp_only_layers":
            result[name] = [value[i] for i in order]
    types = getattr(resolved, "layer_types", None)
    if types is not None and ("layer_types" in text or len(set(types)) > 1):
        result["layer_types"] = [types[i] for i in order]
    if isinstance(text.get("max_window_layers"), int):
        result["max_window_layers"] = min(text["max_window_layers"], len(order))
    if hasattr(resolved, "first_k_dense_replace"):
        result["first_k_dense_replace"] = len(order)  # only dense ones are supported
    if dense is not None and (any(dense) or "mlp_only_layers" in text):
        result["mlp_only_layers"] = [position for position, i in enumerate(order) if dense[i]]
        if int(text.get("decoder_sparse_step", 1)) != 1:
            result["decoder_sparse_step"] = 1
    return result
