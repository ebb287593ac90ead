"""What a recipe may say about adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


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
        True, description="refuse a model other than the one whose fingerprint suture stored in the adapter"
    )
    tokenizer: Literal["auto", "base", "adapter"] = Field(
        "auto", description="whose tokenizer files the output gets; auto: the adapter's when the vocabulary grew"
    )

    allow_vanishing: bool = Field(False, description="go on when a later step rounds most of the change away again")

    @field_validator("adapter")
    @classmethod
    def _at_least_one(cls, value: str | list[AdapterShare]) -> str | list[AdapterShare]:
        if not value:
            raise ValueError("at least one adapter is needed")
        return value

    @property
    def shares(self) -> tuple[AdapterShare, ...]:
        """The adapters with their weights."""
        return (
            (AdapterShare(adapter=self.adapter, weight=1.0),) if isinstance(self.adapter, str) else tuple(self.adapter)
        )
