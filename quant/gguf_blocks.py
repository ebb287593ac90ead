"""Codes and scales in the blocks of llama.cpp: 32 weights of a row with their scales, in float16.

| type | block | weight |
|---|---|---|
| Q4_0 | d, 16 bytes: code j in the low, code j + 16 in the high nibble | (code - 8) * d |
| Q4_1 | d, m, 16 bytes | code * d + m |
| Q8_0 | d, 32 int8 | code * d |

A symmetric weight of up to 4 bits goes into Q4_0 and of up to 8 bits into Q8_0 as it is, when its groups are whole blocks:
the same integers times the same scales. Zero points go into Q4_1, whose m = -zero * scale is rounded to float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError
from .scheme import Quantized, Scheme

BLOCK = 32


def block_type(scheme: Scheme, in_features: int) -> str | None:
    """The type that holds such codes; None when none does."""
    if in_features % BLOCK or scheme.width(in_features) % BLOCK:
        return None
    if scheme.symmetric:
        return "Q4_0" if scheme.bits <= 4 else "Q8_0"
    return "Q4_1" if scheme.bits <= 4 else None


@dataclass(frozen=True)
class Blocks:
    """A weight in blocks."""

    type: str
    rows: Tensor  # uint8 [out, bytes of a row]


def to_blocks(quantized: Quantized, name: str) -> Blocks:
    """Carry codes over. Raises SutureError for a scale that float16 cannot hold."""
    scheme, (out, in_features) = quantized.scheme, quantized.codes.shape
    kind = block_type(scheme, in_features)
    if kind is None:
        raise SutureError(f"{name}: no GGUF type holds {scheme}")
    scale = quantized.scale.float()
    d = scale.half()
    lost = int((d.float() != scale).sum())
    if lost:
        raise SutureError(
            f"{name}: {lost} of {scale.numel()} scales, such as {float(scale[d.float() != scale][0]):.3g}, are no float16 "
            "numbers",
            "round a bfloat16 or float16 checkpoint, or give the gguf step codes: round",
        )
    repeat = scheme.width(in_features) // BLOCK
    blocks = in_features // BLOCK
    parts = [_bytes(d, repeat)]
    if kind == "Q4_1":
        assert quantized.zero is not None
        parts.append(_bytes((-quantized.zero.float() * scale).half(), repeat))
    codes = quantized.codes.view(out, blocks, BLOCK)
    if kind == "Q8_0":
        parts.append((codes.to(torch.int16) - scheme.middle).to(torch.int8).view(torch.uint8))
    else:
        shifted = codes if kind == "Q4_1" else codes + (8 - scheme.middle)
        parts.append(shifted[:, :, : BLOCK // 2] | (shifted[:, :, BLOCK // 2 :] << 4))
    return Blocks(kind, torch.cat(parts, dim=2).reshape(out, -1).contiguous())


def _bytes(halves: Tensor, repeat: int) -> Tensor:
    """float16 [out, groups] as bytes [out, blocks, 2]."""
    spread = halves.repeat_interleave(repeat, 1).contiguous()
    return spread.view(torch.uint8).view(*spread.shape, 2)


def exact_values(quantized: Quantized) -> Tensor:
    """The weight [out, in] in float32, unrounded: what llama.cpp computes from the same codes and scales."""
    out, in_features = quantized.codes.shape
    zero = quantized.scheme.middle if quantized.zero is None else quantized.zero.float()[..., None]
    codes = quantized.codes.view(out, quantized.scale.shape[1], -1).float()
    return ((codes - zero) * quantized.scale.float()[..., None]).view(out, in_features)
