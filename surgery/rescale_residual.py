"""Multiply the residual stream by a constant β and the norms' epsilon by β²: the model computes the same.

norm(βx; β²ε) = norm(x; ε), so everything that writes to the stream is scaled and nothing that reads it: embeddings,
output matrices of attention and MLP with their biases; a norm over such an output (Gemma 2 and 3) gains the factor,
and the output itself is scaled because that norm's epsilon changed too; so are queries and keys before norms over
heads. A tied head was scaled as the embedding: the last norm is divided. Use: to give a model the epsilon that another
class or server has built in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.families import Family, NormKind

Kind = Literal["times", "gain times", "gain over", "over"]


class RescaleResidualSettings(BaseModel):
    """The new epsilon, or the factor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eps: float | None = Field(None, gt=0, description="epsilon of the output's norms")
    factor: float | None = Field(
        None, gt=0, description="of the residual stream; the epsilon is multiplied by its square"
    )

    @model_validator(mode="after")
    def _one_of(self) -> RescaleResidualSettings:
        if (self.eps is None) == (self.factor is None):
            raise ValueError("give one of eps and factor")
        return self


def eps_key(config: Any) -> str:
    """The config's name for the norms' epsilon."""
    for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"):
        if hasattr(config, key):
            return key
    raise SutureError(f"rescale_residual: {config.model_type}: the norms' epsilon is not in config.json")


def factor_and_eps(settings: RescaleResidualSettings, before: float) -> tuple[float, float]:
    """(β, new epsilon). Raises SutureError when nothing would change."""
    beta = settings.factor if settings.factor is not None else (settings.eps or 0.0) ** 0.5 / before**0.5
    eps = settings.eps if settings.eps is not None else before * beta * beta
    if beta == 1.0:
        raise SutureError(f"rescale_residual: the norms' epsilon is {before:g} already", "remove the step")
    return beta, eps


def scaled_in_block(family: Family, names: Iterable[str], prefix: str) -> dict[str, Kind]:
    """Parameters of the block that begin with `prefix` which change, and how."""
    known = set(names)
    paths = [family.attention_out, family.mlp_out]
    if any(norm.rsplit(".", 1)[-1] in ("q_norm", "k_norm") for norm in family.head_norms):
        paths += ["self_attn.q_proj", "self_attn.k_proj"]
    found: dict[str, Kind] = {f"{prefix}{path}.{leaf}": "times" for path in paths for leaf in ("weight", "bias")}
    if family.experts is not None:
        inside = f"{prefix}{family.experts.module}."
        found |= {name: "times" for name in known if name.startswith(inside) and name.endswith(".down_proj.weight")}
    read = {norm for norm, _ in family.readers}
    found |= {f"{prefix}{norm}.weight": "gain times" for norm in family.norms if norm not in read}
    return {name: kind for name, kind in found.items() if name in known}


def scaled_outside(family: Family, names: Iterable[str], tied: bool) -> dict[str, Kind]:
    """Parameters outside the blocks which change, and how."""
    found: dict[str, Kind] = {f"{family.stem}{family.embedding}.weight": "times"}
    if family.positions is not None:
        found[f"{family.stem}{family.positions}.weight"] = "times"
    if tied:
        found[f"{family.stem}{family.final_norm}.weight"] = "gain over"
        found[f"{family.stem}{family.final_norm}.bias"] = "over"
    known = set(names)
    return {name: kind for name, kind in found.items() if name in known}


def rescaled(tensor: Tensor, kind: Kind, beta: float, norm_kind: NormKind) -> Tensor:
    """The parameter for a stream that is β times as large."""
    if kind == "times":
        return tensor * beta
    if kind == "over":
        return tensor / beta
    factor = beta if kind == "gain times" else 1 / beta
    return (1 + tensor) * factor - 1 if norm_kind == "1+w" else tensor * factor
