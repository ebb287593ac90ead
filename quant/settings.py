"""What a recipe says about a quantization step. A field is a recipe key, a CLI option and a Python keyword."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .grid import Search
from .scheme import Activations, Scheme
from .smoothquant import W8

# What asymmetric calibration corrects is a regression of the inputs' deviation on the inputs: with few tokens for each
# input it fits noise. Measured in docs/steps/quantization.md.
TOKENS_PER_INPUT = 32


class Rule(BaseModel):
    """Another format for some of the layers: what is not given is the step's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str = Field(description="layers, in the patterns of targets", min_length=1)
    bits: int | None = Field(None, ge=2, le=8, description="bits per weight")
    group_size: int | None = Field(None, description="inputs that share a scale; -1: one scale per output channel")
    symmetric: bool | None = Field(None, description="no zero points")


class Chosen(BaseModel):
    """Which layers a step rounds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    targets: list[str] = Field(
        ["all-linear"], description="layers to quantize: name, end of name, glob, or re:REGEX", min_length=1
    )
    ignore: list[str] = Field([], description="layers to leave as they are, in the same patterns")
    layers: int | str | None = Field(
        None, description="blocks to quantize: the first N, or FROM-TO counted from 0; the others stay as they are"
    )


class RTNSettings(Chosen):
    """Round to nearest: needs no data."""

    bits: int = Field(4, ge=2, le=8, description="bits per weight")
    group_size: int = Field(128, description="inputs that share a scale; -1: one scale per output channel")
    symmetric: bool = Field(True, description="no zero points; what every loader reads")
    search: bool = Field(True, description="search each group's range instead of taking it whole")
    format: Literal["pack-quantized", "gptq", "awq"] = Field(
        "pack-quantized",
        description="how it is stored; gptq (symmetric) and awq (4 bits) for loaders with their kernels",
    )
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
    actorder: Literal["static", "group", "none"] = Field(
        "static",
        description="columns by falling diag H, group scales fixed before; group: groups by their largest diag H, each "
        "scale found when its group is reached; none: as they come",
    )
    hessian: Literal["float32", "float64"] = Field("float32", description="precision of H and of the rounding loop")
    asymmetric: Literal["auto", "none", "gptaq", "qronos"] = Field(
        "auto",
        description="aim at the outputs that the original model's inputs would give, by GPTAQ or Qronos; auto: GPTAQ "
        f"from {TOKENS_PER_INPUT} calibration tokens per input of the widest layer on",
    )
    alpha: float = Field(
        1.0, gt=0, le=1, description="share of the inputs' deviation that asymmetric calibration counts"
    )

    def decided(self, tokens: int, widest: int) -> Self:
        """With `asymmetric: auto` decided. widest: most inputs of a layer whose two models' inputs are compared, or 0."""
        if self.asymmetric != "auto":
            return self
        enough = 0 < widest * TOKENS_PER_INPUT <= tokens
        return self.model_copy(update={"asymmetric": "gptaq" if enough else "none"})


class LearnSettings(GPTQSettings):
    """GPTQ, then training of each block's rounding and scales towards the original block's outputs."""

    asymmetric: Literal["auto", "none", "gptaq", "qronos"] = Field(
        "none", description="where GPTQ starts from: aimed at the outputs that the original model's inputs would give"
    )  # measured at 2 bits on builtin:tiny: training ends no lower from GPTAQ
    epochs: int | None = Field(
        None, ge=1, description="passes over the calibration text in each block; default 4, with bits: 2 twice as many"
    )  # builtin:tiny at 2 bits: excess log-perplexity 0.045 to 0.051 after 4 (three seeds), 0.037 and 0.043 after 8 (two)
    rate: float = Field(0.02, gt=0, description="learning rate of the weights, in codes per step")
    scale_rate: float = Field(
        0.005, gt=0, description="learning rate of the scales, each relative to its start, per step"
    )
    lean: float = Field(
        0.5, ge=0, lt=1, description="how far weights start from GPTQ's codes towards the original ones"
    )
    held_out: float = Field(0.125, gt=0, lt=1, description="share of the calibration sequences that choose the epoch")
    seed: int = Field(0, ge=0, description="order of the sequences")

    @property
    def passes(self) -> int:
        """Over the text."""
        return self.epochs or (8 if self.bits == 2 else 4)


class AllocateSettings(GPTQSettings):
    """Widths per layer under a budget, by measured sensitivity; then GPTQ. Layers with a rule keep its format."""

    average_bits: float = Field(gt=2, le=9, description="budget: bits per quantized weight, scales counted")
    bits: int = Field(8, ge=2, le=8, description="most bits that a layer may get")
    fewest: int = Field(2, ge=2, le=8, description="fewest bits that a layer may get")
    chosen: dict[str, int] = Field({}, description="bits by layer, as an earlier run chose them; empty: measure")

    @model_validator(mode="after")
    def _a_range(self) -> AllocateSettings:
        if self.fewest >= self.bits:
            raise ValueError(f"fewest ({self.fewest}) must be below bits ({self.bits}), the most")
        return self

    @property
    def widths(self) -> list[int]:
        """Bits to choose from: the ends, and 3, 4 and 6 between them."""
        return sorted({self.fewest, self.bits} | {bits for bits in (3, 4, 6) if self.fewest < bits < self.bits})


class Rounding(BaseModel):
    """How a step that scales first then rounds. GPTQ's own settings are taken with `rounding: gptq` only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rounding: Literal["rtn", "gptq"] = Field("rtn", description="how the scaled weights are rounded")
    damp: float = Field(0.01, gt=0, lt=1, description="GPTQ's: share of the mean of diag H added to it")
    actorder: Literal["static", "none"] = Field("static", description="GPTQ's: order of the columns")
    hessian: Literal["float32", "float64"] = Field("float32", description="GPTQ's: precision of H")

    @model_validator(mode="after")
    def _only_what_the_rounding_uses(self) -> Rounding:
        own = ("damp", "actorder", "hessian")
        given = [key for key in own if getattr(self, key) != Rounding.model_fields[key].default]
        if self.rounding != "gptq" and given:
            raise ValueError(f"{', '.join(given)}: belongs to rounding: gptq")
        return self


class AWQSettings(Rounding, RTNSettings):
    """AWQ: scales the columns that matter, then rounds; needs calibration text."""

    grid: int = Field(10, ge=1, le=100, description="steps of the exponent from 0 to 1; plain and duo scaling each")
    search_tokens: int = Field(1024, ge=1, description="calibration tokens on which scales and ranges are compared")

    def weights(self) -> RTNSettings:
        """What becomes of the scaled weights."""
        given = {key: getattr(self, key) for key in GPTQSettings.model_fields if hasattr(self, key)}
        if self.rounding == "gptq":
            return GPTQSettings(**given, asymmetric="none")
        return RTNSettings(**{key: given[key] for key in RTNSettings.model_fields})


class SmoothQuantSettings(Rounding, Chosen):
    """8-bit weights and 8-bit inputs, with what is hard in the inputs moved into the weights."""

    activations: Literal["dynamic", "static"] = Field(
        "dynamic", description="one input scale per token, found at run time, or one per layer, from calibration text"
    )
    alpha: Literal["auto", "none"] | float = Field(
        "auto", description="share of the range that weights take: 0..1, auto: searched per place, none: no smoothing"
    )
    search_tokens: int = Field(1024, ge=1, description="calibration tokens on which values of alpha are compared")
    search: bool = Field(True, description="search each channel's range instead of taking it whole")

    @model_validator(mode="after")
    def _alpha_is_a_share(self) -> SmoothQuantSettings:
        if isinstance(self.alpha, float) and not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha: {self.alpha} is outside 0..1")
        if self.alpha != "auto" and self.search_tokens != type(self).model_fields["search_tokens"].default:
            raise ValueError("search_tokens: belongs to alpha: auto")
        return self

    @property
    def inputs(self) -> Activations:
        return Activations(self.activations == "dynamic")

    @property
    def needs_text(self) -> bool:
        return self.alpha != "none" or self.rounding == "gptq" or self.activations == "static"

    def weights(self) -> RTNSettings:
        """What becomes of the weights alone."""
        own = {"search": self.search, **{key: getattr(self, key) for key in Chosen.model_fields}}
        if self.rounding == "gptq":
            own |= {"damp": self.damp, "actorder": self.actorder, "hessian": self.hessian, "asymmetric": "none"}
        kind = GPTQSettings if self.rounding == "gptq" else RTNSettings
        return kind(bits=W8.bits, group_size=W8.group_size, symmetric=W8.symmetric, **own)


class FourBitSettings(Chosen):
    """bitsandbytes' 4-bit types, as QLoRA uses them; each weight is rounded on its own, without data."""

    double_quant: bool = Field(True, description="quantize the scales too: 4.13 instead of 4.5 bits per weight")
    block_size: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = Field(64, description="weights that share a scale")


class Int8Settings(Chosen):
    """LLM.int8(): one scale per row; the loader also rounds each layer's inputs to int8."""

    threshold: float = Field(
        6.0, ge=0, description="inputs beyond it stay in 16 bits when the loader computes; 0: none"
    )


class DequantizeSettings(BaseModel):
    """Back to plain weights, from any format that suture reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="of the output's weights; auto: what config.json names, else the scales'"
    )


class GGUFSettings(BaseModel):
    """A GGUF file for llama.cpp beside the checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"] = Field(
        "f16", description="of matrices that hold no codes yet; vectors are always f32"
    )
    codes: Literal["carry", "round"] = Field(
        "carry", description="carry a quantized checkpoint's codes over unchanged, or round its weights anew to type"
    )
    pre_tokenizer: str | None = Field(
        None, description="llama.cpp's name of the pre-tokenizer, when it is not recognised"
    )
