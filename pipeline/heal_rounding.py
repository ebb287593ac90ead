"""Rounding in the loop: while a model trains, its layers compute with what `rtn` would make of their weights.

    y = Q(W + scale · B A) x,   the gradient as if Q were not there

Q finds ranges and codes anew whenever the weights have changed, by the very function that the step uses. So what is merged
and then rounded is what was trained, and nothing is lost by it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from ..calibrate.fit import stored
from ..calibrate.skeleton import Skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from ..lora.settings import HealSettings, RoundingSettings
from ..quant.export import check_divisible, scheme_groups
from ..quant.rtn import rtn
from ..quant.scheme import STORAGE, Scheme
from ..quant.settings import RTNSettings
from ..quant.targets import select


def check_next(settings: HealSettings, following: tuple[str, BaseModel] | None) -> None:
    """Raises SutureError unless what is trained for is what the next step does."""
    if settings.rounding is None:
        return
    wanted = RTNSettings(**settings.rounding.model_dump())
    if following is None or following[0] != "rtn" or following[1] != wanted:
        said = ", ".join(f"{key}: {str(value).lower()}" for key, value in settings.rounding.model_dump().items())
        raise SutureError(
            f"heal: rounding: trains for what rtn will do, so the next step must be rtn: {{{said}}} and nothing else; found "
            f"{following[0] + ' with other settings' if following else 'no step'}",
            "add that step, or leave rounding out",
        )


def rounded_layers(skeleton: Skeleton, rounding: RoundingSettings | None) -> tuple[Linear, ...]:
    """The layers that `rtn` would round. Raises SutureError for a format that some of them cannot have."""
    if rounding is None:
        return ()
    selection = select(skeleton.layout, ["all-linear"], [])
    scheme = _scheme(rounding)
    check_divisible(scheme_groups(selection, {linear.name: scheme for linear in selection.chosen}))
    if any(linear.expert is not None for linear in selection.chosen):
        raise SutureError("heal: rounding: experts cannot be rounded in the loop", "leave rounding out")
    return selection.chosen


def round_in_loop(
    skeleton: Skeleton,
    rounding: RoundingSettings,
    factors: Mapping[str, Sequence[Tensor]] | None = None,
    scale: float = 0.0,
) -> list[Rounded]:
    """Let layers compute with rounded weights, of those in `factors` (module -> A [r, in], B [out, r]) with the change
    merged; handles to undo it."""
    layers = []
    for linear in rounded_layers(skeleton, rounding):
        own = STORAGE[skeleton.source.dtypes[linear.place.tensor]]
        pair = (factors or {}).get(linear.module)
        layers.append(Rounded(skeleton, linear, rounding, own, tuple(pair) if pair else None, scale))
    return layers


def _scheme(rounding: RoundingSettings) -> Scheme:
    return Scheme(rounding.bits, rounding.group_size, rounding.symmetric)


@dataclass(eq=False)
class Rounded:
    """A layer whose forward sees rounded weights."""

    skeleton: Skeleton
    linear: Linear
    rounding: RoundingSettings
    dtype: torch.dtype  # of the stored weight, and of the scales
    factors: tuple[Tensor, ...] | None  # A, B
    scale: float

    def __post_init__(self) -> None:
        self.module = self.skeleton.model.get_submodule(self.linear.module)
        self.module.forward = self._forward
        self._known: tuple[Any, tuple[int, ...]] | None = None  # of which weights `_dense` was made
        self._dense = torch.empty(0)

    def remove(self) -> None:
        """Let the layer be itself again."""
        del self.module.forward

    def _forward(self, x: Tensor) -> Tensor:
        parameter = self.module.get_parameter("weight")
        weight = parameter.T if self.linear.conv1d else parameter
        if self.factors is not None:
            A, B = self.factors
            weight = stored(weight + self.scale * (B @ A), self.dtype)
        dense = self._rounded(parameter, weight.detach())
        bias = self.module._parameters.get("bias")
        if torch.is_grad_enabled():
            dense = weight + (dense - weight).detach()
        return torch.nn.functional.linear(x, dense, bias)

    @torch.no_grad()
    def _rounded(self, parameter: Tensor, weight: Tensor) -> Tensor:
        """Q(weight) [out, in] float32, made again when the loaded weight or the factors have changed."""
        versions = (parameter._version, *(factor._version for factor in self.factors or ()))
        if self._known is None or self._known[0]() is not parameter or self._known[1] != versions:
            search = RTNSettings(**self.rounding.model_dump()).range_search
            self._dense = rtn(weight.float(), _scheme(self.rounding), self.dtype, search=search).dequantize().float()
            self._known = (weakref.ref(parameter), versions)
        return self._dense
