"""Stretch rotary position embeddings to a longer context: only config.json changes; the receipt explains the numbers.

Pair f of d/2 turns by θ_f = base^(-2f/d) per position; its wavelength is 2π/θ_f. With s = factor and L = the context
of pretraining:

    linear   θ_f / s for all pairs: positions are squeezed into the known range (PI, Chen et al. 2023)
    ntk      base ← base · s^(d/(d-2)): the fastest pair stays, the slowest is divided by s (NTK-aware)
    dynamic  ntk with s growing with the sequence once it is longer than L; shorter ones are computed as before
    yarn     θ_f / s for pairs with fewer than β_slow turns in L, as before with more than β_fast, a ramp between;
             queries and keys times 0.1 ln s + 1 (Peng et al. 2023, eq. 23)
    llama3   the same idea by wavelength: longer than L / low_freq_factor ÷ s, shorter than L / high_freq_factor as
             before, smooth between
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.families import Family

_ONLY = {"yarn": ("beta_fast", "beta_slow", "attention_factor"), "llama3": ("low_freq_factor", "high_freq_factor")}


class RopeScalingSettings(BaseModel):
    """How positions are stretched."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["linear", "ntk", "dynamic", "yarn", "llama3"] = Field(description="the rule, by its usual name")
    factor: float = Field(gt=1, description="context of the output / context of pretraining")
    original_context: int | None = Field(
        None, ge=1, description="context of pretraining; default: config.json's max_position_embeddings"
    )
    beta_fast: float | None = Field(None, gt=0, description="yarn: pairs with more turns stay; default 32")
    beta_slow: float | None = Field(None, gt=0, description="yarn: pairs with fewer turns are divided; default 1")
    attention_factor: float | None = Field(None, gt=0, description="yarn: of cos and sin; default 0.1 ln(factor) + 1")
    low_freq_factor: float | None = Field(None, gt=0, description="llama3: default 1")
    high_freq_factor: float | None = Field(None, gt=0, description="llama3: default 4")

    @model_validator(mode="after")
    def _only_what_the_type_uses(self) -> RopeScalingSettings:
        for kind, keys in _ONLY.items():
            given = [key for key in keys if getattr(self, key) is not None]
            if given and self.type != kind:
                raise ValueError(f"{given[0]} belongs to type: {kind}")
        if self.fast <= self.slow or self.high <= self.low:
            raise ValueError("beta_fast must be above beta_slow, and high_freq_factor above low_freq_factor")
        return self

    @property
    def fast(self) -> float:
        return self.beta_fast or 32.0

    @property
    def slow(self) -> float:
        return self.beta_slow or 1.0

    @property
    def low(self) -> float:
        return self.low_freq_factor or 1.0

    @property
    def high(self) -> float:
        return self.high_freq_factor or 4.0


def current_rope(family: Family, resolved: Any) -> dict[str, Any]:
    """transformers' rope_parameters of an unscaled model. Raises SutureError for one that cannot be scaled like this."""
    parameters = getattr(resolved, "rope_parameters", None)
    if family.rope == "none" or not parameters:
        raise SutureError(
            f"rope_scaling: {family.model_type} has no rotary embedding", "its learned positions end where they end"
        )
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise SutureError(
            f"rope_scaling: {family.model_type} has another rotary embedding for each kind of layer",
            "edit rope_parameters in config.json by hand",
        )
    if parameters.get("rope_type", "default") != "default":
        raise SutureError(
            f"rope_scaling: the model is scaled already ({parameters['rope_type']})",
            "give the checkpoint from before, or remove its scaling from config.json",
        )
    return dict(parameters)


def scaled_config(
    text: Mapping[str, Any], rope: Mapping[str, Any], context: int, settings: RopeScalingSettings, d: int
) -> dict[str, Any]:
    """The raw text config with scaled positions, in the form (4.x or 5.x keys) that it has.

    rope: from `current_rope`. context: of pretraining. d: rotary dimensions of a head.
    """
    base = float(rope["rope_theta"])
    entries: dict[str, Any] = {"rope_type": settings.type, "factor": settings.factor}
    if settings.type == "ntk":
        base, entries = ntk_base(base, settings.factor, d), {"rope_type": "default"}
    if settings.type == "yarn":
        entries |= {"original_max_position_embeddings": context, "beta_fast": settings.fast, "beta_slow": settings.slow}
        entries["attention_factor"] = attention_factor(settings)
    if settings.type == "llama3":
        entries |= {"original_max_position_embeddings": context}
        entries |= {"low_freq_factor": settings.low, "high_freq_factor": settings.high}
    result = dict(text)
    if text.get("rope_parameters") or "rope_theta" not in text:
        kept = {key: value for key, value in rope.items() if key not in ("rope_type", "type", "rope_theta")}
        result["rope_parameters"] = {**entries, "rope_theta": base, **kept}
        result.pop("rope_scaling", None)
        if "rope_theta" in text:
            result["rope_theta"] = base
    else:
        result["rope_theta"] = base
        result["rope_scaling"] = None if settings.type == "ntk" else entries
    if settings.type != "dynamic":
        result["max_position_embeddings"] = round(context * settings.factor)
    return result


def ntk_base(base: float, factor: float, d: int) -> float:
    return base * factor ** (d / (d - 2))


def attention_factor(settings: RopeScalingSettings) -> float:
    """What cos and sin are multiplied by."""
    if settings.type != "yarn":
        return 1.0
    return settings.attention_factor or 0.1 * math.log(settings.factor) + 1.0


def frequencies(base: float, d: int, context: int, settings: RopeScalingSettings | None) -> Tensor:
    """θ_f of the d/2 pairs, float64; unscaled without settings, and for `dynamic`, whose scaling depends on length."""
    f = torch.arange(0, d, 2, dtype=torch.float64)
    theta = base ** (-f / d)
    if settings is None or settings.type == "dynamic":
        return theta
    s = settings.factor
    if settings.type == "linear":
        return theta / s
    if settings.type == "ntk":
        return ntk_base(base, s, d) ** (-f / d)
    if settings.type == "yarn":
        pairs = torch.arange(d // 2, dtype=torch.float64)
        start = max(math.floor(_pair_with_turns(settings.fast, base, d, context)), 0)
        end = min(math.ceil(_pair_with_turns(settings.slow, base, d, context)), d - 1)
        divided = ((pairs - start) / max(end - start, 0.001)).clamp(0, 1)
        return theta / s * divided + theta * (1 - divided)
    wavelength = 2 * math.pi / theta
    smooth = ((context / wavelength - settings.low) / (settings.high - settings.low)).clamp(0, 1)
    return (1 - smooth) * theta / s + smooth * theta


def _pair_with_turns(turns: float, base: float, d: int, context: int) -> float:
    """The (fractional) pair that makes so many turns within the context."""
    return d * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))


def explained(base: float, d: int, context: int, settings: RopeScalingSettings) -> dict[str, Any]:
    """The receipt: what happens to how many pairs, in numbers."""
    before, after = frequencies(base, d, context, None), frequencies(base, d, context, settings)
    ratio = before / after
    same, divided = ratio < 1 + 1e-6, ratio > settings.factor * (1 - 1e-6)
    waves = 2 * math.pi / before
    report: dict[str, Any] = {
        "type": settings.type,
        "factor": settings.factor,
        "context": {"before": context, "after": round(context * settings.factor)},
        "base": {"before": base, "after": ntk_base(base, settings.factor, d) if settings.type == "ntk" else base},
        "rotary_dimensions": d,
        "pairs": {
            "as_before": int(same.sum()),
            "between": int((~same & ~divided).sum()),
            "divided_by_factor": int(divided.sum()),
        },
        "longest_wavelength": {"before": _short(float(waves.max())), "after": _short(float(2 * math.pi / after.min()))},
        "pairs_that_never_turn_fully_in_the_original_context": int((waves > context).sum()),
        "attention_factor": _short(attention_factor(settings)),
        "meaning": _MEANING[settings.type],
    }
    if settings.type == "dynamic":
        grown = ntk_base(base, settings.factor * settings.factor - (settings.factor - 1), d)
        report["pairs"] = {"as_before": d // 2, "between": 0, "divided_by_factor": 0}
        report["base_at_the_longest_context"] = _short(grown)
    return report


_MEANING = {
    "linear": "every position counts 1/factor: all of the longer context falls into the range of pretraining, and near "
    "tokens move closer together",
    "ntk": "a larger base slows pair f by factor^(2f/(d-2)): near tokens stay as far apart as they were, the slowest pair "
    "is slowed by the factor",
    "dynamic": "nothing changes up to max_position_embeddings; past it the base grows with the length of the sequence, "
    "so max_position_embeddings stays the original context",
    "yarn": "fast pairs stay, slow ones are divided by the factor, and attention logits are multiplied by "
    "attention_factor squared against the flatter softmax of long sequences",
    "llama3": "wavelengths up to context / high_freq_factor stay, those above context / low_freq_factor are divided by "
    "the factor, with a smooth passage between",
}


def _short(value: float) -> float:
    return float(f"{value:.6g}")
