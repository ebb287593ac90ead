"""What a recipe says about a quantization step. A field is a recipe key, a CLI option and a Python keyword."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from .grid import Search
from .scheme import Scheme


class Rule(BaseModel):
    """Another format for some of the layers: what is not given is the step's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str = Field(description="layers, in the patterns of targets", min_length=1)
    bits: int | None = Field(None, ge=2, le=8, description="bits per weight")
    group_size: int | None = Field(None, description="inputs that share a scale; -1: one scale per output channel")
    symmetric: bool | None = Field(None, description="no zero points")


class RTNSettings(BaseModel):
    """Round to nearest: needs no data."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bits: int = Field(4, ge=2, le=8, description="bits per weight")
    group_size: int = Field(128, description="inputs that share a scale; -1: one scale per output channel")
    symmetric: bool = Field(True, description="no zero points; what every loader reads")
    search: bool = Field(True, description="search each group's range instead of taking it whole")
    targets: list[str] = Field(
        ["all-linear"], description="layers to quantize: name, end of name, glob, or re:REGEX", min_length=1
    )
    ignore: list[str] = Field([], description="layers to leave as they are, in the same patterns")
    rules: list[Rule] = Field(
        [], description="other formats for some layers; the first rule that matches a layer counts"
    )

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.bits, self.group_size, self.symmetric)

    def ruled(self, rule: Rule) -> Scheme:
        """The scheme of the layers that `rule` is for."""
        return Scheme(
            self.bits if rule.bits is None else rule.bits,
            self.group_size if rule.group_size is None else rule.group_size,
            self.symmetric if rule.symmetric is None else rule.symmetric,
        )

    @property
    def range_search(self) -> Search | None:
        return Search() if self.search else None


class GPTQSettings(RTNSettings):
    """GPTQ: needs calibration text."""

    damp: float = Field(0.01, gt=0, lt=1, description="share of the mean of diag H added to it; doubled on failure")
    actorder: Literal["static", "none"] = Field(
        "static", description="visit columns by falling diag H, with group scales fixed before"
    )
    hessian: Literal["float32", "float64"] = Field("float32", description="precision of H and of the rounding loop")
