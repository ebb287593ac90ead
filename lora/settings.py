"""What a recipe may say about adapters."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AdapterShare(_Strict):
    """One adapter of several."""

    adapter: str = Field(min_length=1, description="directory that PEFT's save_pretrained wrote")
    weight: float = Field(1.0, description="what its change is multiplied by", allow_inf_nan=False)


class MergeSettings(_Strict):
    """Merge one adapter, or a weighted sum of several, into the model's weights."""

    adapter: str | list[AdapterShare] = Field(description="a directory, or a list of {adapter: DIR, weight: NUMBER}")
    base: Literal["original", "dequantized"] = Field(
        "original",
        description="what the change is added to: the model as it is, or what NF4 (blocks of 64) makes of its linear "
        "layers, which is what a QLoRA run saw",
    )
    base_is_residual: bool = Field(
        False, description="the model is the changed base that PiSSA, OLoRA, CorDA, LoRA-GA or LoftQ saved for training"
    )
    expert_layout: Literal["peft", "expert-major"] = Field(
        "peft", description="order of lora_B's columns for experts in one parameter; nothing in the file tells it"
    )
    check_base: bool = Field(
        True,
        description="refuse a model other than the one whose fingerprint suture stored in the adapter, or of another "
        "type or depth than the one that the adapter names, where that lies on this machine",
    )
    tokenizer: Literal["auto", "base", "adapter"] = Field(
        "auto", description="whose tokenizer files the output gets; auto: the adapter's when the vocabulary grew"
    )

    compare_bases: bool | None = Field(
        None,
        description="in the report: the perplexity of a merge into the original and into what NF4 makes of it, each against "
        "the adapter on the NF4 weights that a QLoRA run saw; by itself with base: dequantized as the first step",
    )
    allow_vanishing: bool = Field(False, description="go on when a later step rounds most of the change away again")

    @field_validator("adapter")
    @classmethod
    def _at_least_one(cls, value: str | list[AdapterShare]) -> str | list[AdapterShare]:
        if not value:
            raise ValueError("at least one adapter is needed")
        return value

    @property
    def compares(self) -> bool:
        """Whether a report is to compare both bases."""
        return self.base == "dequantized" if self.compare_bases is None else self.compare_bases

    @property
    def shares(self) -> tuple[AdapterShare, ...]:
        """The adapters with their weights."""
        return (
            (AdapterShare(adapter=self.adapter, weight=1.0),) if isinstance(self.adapter, str) else tuple(self.adapter)
        )


class RoundingSettings(_Strict):
    """A format to round to nearest to, as the step rtn does it."""

    bits: int = Field(4, ge=2, le=8, description="bits per weight")
    group_size: int = Field(128, description="inputs that share a scale; -1: one scale per output channel")
    symmetric: bool = Field(True, description="no zero points")
    search: bool = Field(True, description="search each group's range instead of taking it whole")


Method = Literal["blocks", "lora", "full"]


class HealSettings(_Strict):
    """Train the model towards the original. Keys that are left out take the method's own value."""

    method: Method = Field(
        "blocks", description="each block by itself; or the whole model, by LoRA that is merged, or its blocks' weights"
    )
    parts: Literal["attention", "block"] | None = Field(
        None, description="blocks: which parameters of each block are trained; default attention"
    )
    epochs: int | None = Field(None, ge=1, description="blocks: passes over the text in each block; default 4")
    tokens: int | None = Field(None, ge=1, description="lora, full: tokens to train on, in all; default 500000")
    batch: int | None = Field(None, ge=1, description="lora, full: sequences per step; default 8")
    warmup: float | None = Field(None, ge=0, lt=1, description="lora, full: share of the steps; default 0.05")
    top_k: int | None = Field(
        None, ge=1, description="lora, full: tokens of the original's predictions that are kept; default 64"
    )
    next_token: float | None = Field(
        None, ge=0, description="lora, full: weight of the text's own next tokens in the loss; default 0"
    )
    loss_on: Literal["all", "answers"] | None = Field(
        None, description="lora, full: tokens whose prediction counts: all, or of chats the assistant's; default all"
    )
    checkpoint: int | None = Field(
        None, ge=1, description="lora, full: steps between checkpoints and points of the curve; default 25"
    )
    recompute: bool | None = Field(
        None,
        description="lora, full: run blocks and the head again in the backward pass, for less memory; default true with "
        "weights: stored, else false",
    )
    optimizer: Literal["adamw", "adamw8bit"] | None = Field(
        None, description="lora, full: AdamW, or with 8-bit moments by bitsandbytes, for less memory; default adamw"
    )
    precision: Literal["float32", "bf16"] = Field(
        "float32", description="of the training's arithmetic; bf16: autocast, while weights and sums stay float32"
    )
    r: int | None = Field(None, ge=1, description="lora: rank; default 16")
    alpha: float | None = Field(None, gt=0, description="lora: the change is alpha / r times B A; default 32")
    targets: list[str] | None = Field(None, min_length=1, description="lora: layers; default [all-linear]")
    weights: Literal["float32", "stored"] | None = Field(
        None,
        description="lora: the model's own: in float32 in memory; or as they are stored, each layer's unpacked whenever it "
        "multiplies, for less memory; default stored where the model is quantized and no rounding is given",
    )
    rounding: RoundingSettings | None = Field(
        None, description="lora: train with weights rounded as the next step, rtn with these settings, will round them"
    )
    rate: float | None = Field(
        None,
        gt=0,
        description="learning rate; default 0.001 (lora). For blocks and full it is a share of each tensor's root mean "
        "square; default 0.01 and 0.005",
    )
    held_out: float = Field(0.125, gt=0, lt=1, description="share of the sequences that only judge; at least 5 of them")
    seed: int = Field(0, ge=0, description="order of the sequences, and where LoRA starts")

    @model_validator(mode="after")
    def _only_what_the_method_uses(self) -> HealSettings:
        for methods, keys in _OF_METHOD.items():
            given = [key for key in keys if getattr(self, key) is not None]
            if given and self.method not in methods:
                raise ValueError(f"{given[0]} belongs to method: {' or '.join(methods)}, not to {self.method}")
        if self.weights == "stored" and self.rounding is not None:
            raise ValueError("weights: stored cannot go with rounding, which makes new weights of them at every step")
        return self

    def value(self, key: str) -> Any:
        """The setting, or the method's own value for it."""
        given = getattr(self, key)
        if given is None and key == "recompute":
            return self.weights == "stored"
        return _DEFAULTS[self.method][key] if given is None else given

    def beside(self, quantized: bool) -> HealSettings:
        """With the value that depends on whether the model is quantized."""
        stored = quantized and self.rounding is None
        return self.model_copy(update={"weights": self.weights or ("stored" if stored else "float32")})

    @property
    def on_answers(self) -> bool:
        """Whether it has to be known which tokens the assistant wrote."""
        return self.loss_on == "answers"

    def held(self, windows: int) -> int:
        """How many of so many sequences, the last ones, are held out."""
        return max(FEWEST_HELD, round(self.held_out * windows))


FEWEST_HELD = 5  # below, there is no interval
_OF_METHOD: dict[tuple[Method, ...], tuple[str, ...]] = {
    ("blocks",): ("parts", "epochs"),
    ("lora", "full"): (
        "tokens",
        "batch",
        "warmup",
        "top_k",
        "next_token",
        "loss_on",
        "optimizer",
        "checkpoint",
        "recompute",
    ),
    ("lora",): ("r", "alpha", "targets", "weights", "rounding"),
}
_WHOLE: dict[str, Any] = {
    "tokens": 500_000,
    "batch": 8,
    "warmup": 0.05,
    "top_k": 64,
    "next_token": 0.0,
    "loss_on": "all",
    "optimizer": "adamw",
    "checkpoint": 25,
    "weights": "float32",
}
_DEFAULTS: dict[Method, dict[str, Any]] = {
    "blocks": {"parts": "attention", "epochs": 4, "rate": 0.01},
    "lora": {**_WHOLE, "r": 16, "alpha": 32.0, "targets": ["all-linear"], "rate": 1e-3},
    "full": {**_WHOLE, "rate": 0.005},
}
