"""Store weights in another dtype, or in files of another size.

bfloat16 has float32's range and 8 bits of precision, float16 has 11 bits and ends at 65504; float32 holds both exactly.
A value that float16 cannot hold is refused; those that become another number, or zero, are counted.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from ..checkpoint.errors import SutureError

DTYPES = {"bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16), "float32": ("F32", torch.float32)}
_PIECE = 1 << 18  # values compared at once, in float32: they stay in the processor's cache
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class CastSettings(BaseModel):
    """The dtype to store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["bfloat16", "float16", "float32"] = Field(description="dtype of every floating-point tensor")


class ReshardSettings(BaseModel):
    """The size of weight files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_shard_size: int = Field(ge=1_000, description="bytes per weight file, or text like 2GB or 500MB")

    @field_validator("max_shard_size", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if found is None or found[2].upper() not in _UNITS:
            raise ValueError("expected bytes, or a number with KB, MB, GB, KiB, MiB or GiB")
        return int(float(found[1]) * _UNITS[found[2].upper()])


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """(the tensor as `dtype`, what the rounding did). Raises SutureError when a finite value becomes infinite.

    Where both dtypes are of one size, what was made is in the place of the tensor, which is lost.
    """
    tensor = tensor.contiguous()
    alike = tensor.element_size() == dtype.itemsize
    made = tensor.view(dtype) if alike else torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    changed = zeroed = 0
    worst = 0.0
    for before, place in zip(tensor.reshape(-1).split(_PIECE), made.reshape(-1).split(_PIECE), strict=True):
        after = before.to(dtype)
        wide, back = before.float(), after.float()  # exact, for every dtype that is stored
        place.copy_(after)
        moved = back != wide
        if not bool(moved.any()):
            continue
        wide, back = wide[moved], back[moved]
        overflow = torch.isfinite(wide) & ~torch.isfinite(back)
        if bool(overflow.any()):
            raise SutureError(
                f"{name}: values up to {float(wide[overflow].abs().max()):.3g} do not fit "
                f"{str(dtype).removeprefix('torch.')}, which ends at {torch.finfo(dtype).max:.5g}",
                "use bfloat16",
            )
        changed += len(wide)
        zeroed += int((back == 0).sum())
        worst = max(worst, float(((back - wide).abs_() / wide.abs_()).max()))
    return made, {
        "values": tensor.numel(),
        "changed": changed,
        "became_zero": zeroed,
        "largest_relative_change": float(f"{worst:.3g}"),
    }


def summary(records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of all tensors together."""
    values = sum(record["values"] for record in records.values())
    changed = sum(record["changed"] for record in records.values())
    return {
        "values": values,
        "changed": changed,
        "share_changed": float(f"{changed / max(values, 1):.6g}"),
        "became_zero": sum(record["became_zero"] for record in records.values()),
        "largest_relative_change": max((record["largest_relative_change"] for record in records.values()), default=0.0),
    }


def cast_config(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The raw config with the dtype it names changed, also in the configs of a wrapper's parts."""
    result = dict(config)
    for key in ("dtype", "torch_dtype"):
        if key in config:
            result[key] = dtype
    if not {"dtype", "torch_dtype"} & set(config):
        result["dtype"] = dtype
    for key in ("text_config", "vision_config"):
        if isinstance(config.get(key), dict) and {"dtype", "torch_dtype"} & set(config[key]):
            result[key] = cast_config(config[key], dtype)
    return result
