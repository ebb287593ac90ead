"""The formats of GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ "gemm"), written and read.

For a weight X [out, in] of b bits in groups of g, codes and zero points unsigned, w = (code - zero) * scale:

| tensor | GPTQ | AWQ gemm (4 bits) |
|---|---|---|
| X.qweight | int32 [in·b/32, out], packed along `in` | int32 [in, out/8], along `out`, eight codes a word in `AWQ_ORDER` |
| X.qzeros | int32 [in/g, out·b/32], along `out` | int32 [in/g, out/8], in the same order |
| X.scales | float16 [in/g, out] | float16 [in/g, out] |
| X.g_idx | int32 [in], group of each input | none |

GPTQ's first format (`checkpoint_format` absent or "gptq") stores zero - 1, the second ("gptq_v2") the zero itself. A zero
of 0 wraps in the first, and loaders differ in how they read that, so only symmetric weights (zero 2^(b-1)) are written;
it is read modulo 2^b.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from .compressed_tensors import Spec
from .pack import deinterleave, interleave, pack, unpack, words
from .scheme import Quantized, Scheme

AWQ_BITS = 4


def gptq_specs(linear: Linear, scheme: Scheme, scale_dtype: str) -> list[Spec]:
    """Names, dtypes and shapes of what `gptq_tensors` will return."""
    out, in_features, groups = linear.out_features, linear.in_features, scheme.groups(linear.in_features)
    return [
        (f"{linear.name}.qweight", "I32", (words(in_features, scheme.bits), out)),
        (f"{linear.name}.qzeros", "I32", (groups, words(out, scheme.bits))),
        (f"{linear.name}.scales", scale_dtype, (groups, out)),
        (f"{linear.name}.g_idx", "I32", (in_features,)),
    ]


def gptq_tensors(name: str, quantized: Quantized) -> dict[str, Tensor]:
    """The tensors on disk of module `name`, in GPTQ's first format."""
    bits, in_features = quantized.scheme.bits, quantized.codes.shape[1]
    zero = zeros_of(quantized).T.to(torch.int64)
    groups = torch.arange(in_features, dtype=torch.int32) // quantized.scheme.width(in_features)
    return {
        f"{name}.qweight": pack(quantized.codes.T, bits, dim=0),
        f"{name}.qzeros": pack((zero - 1) % 2**bits, bits, dim=1),
        f"{name}.scales": quantized.scale.T.contiguous(),
        f"{name}.g_idx": groups.to(torch.int32),
    }


def awq_specs(linear: Linear, scheme: Scheme, scale_dtype: str) -> list[Spec]:
    """Names, dtypes and shapes of what `awq_tensors` will return."""
    out, in_features, groups = linear.out_features, linear.in_features, scheme.groups(linear.in_features)
    return [
        (f"{linear.name}.qweight", "I32", (in_features, words(out, AWQ_BITS))),
        (f"{linear.name}.qzeros", "I32", (groups, words(out, AWQ_BITS))),
        (f"{linear.name}.scales", scale_dtype, (groups, out)),
    ]


def awq_tensors(name: str, quantized: Quantized) -> dict[str, Tensor]:
    """The tensors on disk of module `name`; a symmetric weight gets its middle as zero points."""
    return {
        f"{name}.qweight": pack(interleave(quantized.codes.T), AWQ_BITS, dim=1),
        f"{name}.qzeros": pack(interleave(zeros_of(quantized).T), AWQ_BITS, dim=1),
        f"{name}.scales": quantized.scale.T.contiguous(),
    }


def zeros_of(quantized: Quantized) -> Tensor:
    """Zero points [out, groups], uint8, also of a symmetric weight."""
    if quantized.zero is not None:
        return quantized.zero
    return torch.full(quantized.scale.shape, quantized.scheme.middle, dtype=torch.uint8)


# ---- config


def gptq_config(scheme: Scheme, skipped: Sequence[str]) -> dict[str, Any]:
    """`quantization_config`. `skipped`: modules left in full precision, as GPTQModel and vLLM exclude them."""
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "desc_act": False,
        "sym": True,
        "true_sequential": True,
        "lm_head": False,
        "pack_dtype": "int32",
    }
    if skipped:
        config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in skipped}
    return config


def awq_config(scheme: Scheme, skipped: Sequence[str]) -> dict[str, Any]:
    """`quantization_config`. `skipped`: modules left in full precision; loaders look for these in names."""
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": AWQ_BITS,
        "group_size": scheme.group_size,
        "zero_point": True,
        "modules_to_not_convert": list(skipped),
    }


# ---- reading


def gptq_shape(shapes: Mapping[str, tuple[int, ...]], name: str, bits: int) -> tuple[int, int]:
    """(out, in) of module `name`."""
    rows, out = shapes[f"{name}.qweight"]
    idx = shapes.get(f"{name}.g_idx")
    return out, idx[0] if idx else rows * 32 // bits


def gptq_dense(stored: Mapping[str, Tensor], name: str, config: Mapping[str, Any], source: str) -> Tensor:
    """The weight [out, in] in the scales' dtype, rounded once. Also with desc_act: g_idx says each input's group."""
    bits = int(config["bits"])
    out, in_features = gptq_shape({key: tuple(t.shape) for key, t in stored.items()}, name, bits)
    codes = unpack(stored[f"{name}.qweight"], bits, in_features, dim=0)  # [in, out]
    scales = stored[f"{name}.scales"]  # [groups, out]
    zeros = unpack(stored[f"{name}.qzeros"], bits, out, dim=1).int()
    if config.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = (zeros + 1) % 2**bits
    groups = len(scales)
    g_idx = stored.get(f"{name}.g_idx")
    group = g_idx.long() if g_idx is not None else torch.arange(in_features) // -(-in_features // groups)
    if int(group.min()) < 0 or int(group.max()) >= groups:
        raise SutureError(
            f"{source}: {name}.g_idx names groups outside 0..{groups - 1}", "download the checkpoint again"
        )
    return ((codes.float() - zeros.float()[group]) * scales.float()[group]).to(scales.dtype).T.contiguous()


def awq_dense(stored: Mapping[str, Tensor], name: str) -> Tensor:
    """The weight [out, in] in the scales' dtype, rounded once."""
    scales = stored[f"{name}.scales"]  # [groups, out]
    groups, out = scales.shape
    codes = deinterleave(unpack(stored[f"{name}.qweight"], AWQ_BITS, out, dim=1)).float()  # [in, out]
    zeros = deinterleave(unpack(stored[f"{name}.qzeros"], AWQ_BITS, out, dim=1)).float()
    width = len(codes) // groups
    group = torch.arange(len(codes)) // width
    return ((codes - zeros[group]) * scales.float()[group]).to(scales.dtype).T.contiguous()
