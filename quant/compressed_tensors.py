"""The compressed-tensors `pack-quantized` format, written and read.

For a weight X [out, in] of b bits in groups of g:

| tensor | dtype, shape | content |
|---|---|---|
| X.weight_packed | int32 [out, words(in)] | codes along `in`, unsigned: signed value + 2^(b-1) |
| X.weight_scale | storage dtype [out, in / g] | |
| X.weight_shape | int64 [2] | (out, in) |
| X.weight_zero_point | int32 [words(out), in / g] | asymmetric only: packed along `out` |

Stock transformers reads it with `compressed-tensors` installed. Asymmetric files and mixtures of experts say
`"dequantize": true`: releases 0.18 to 0.20 cannot build the packed module for zero points, and transformers keeps experts
in fused parameters that have no packed form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from .pack import pack, unpack, words
from .scheme import Quantized, Scheme

if TYPE_CHECKING:
    from ..checkpoint.reader import Checkpoint

Spec = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape


def tensor_specs(linear: Linear, scheme: Scheme, scale_dtype: str) -> list[Spec]:
    """Names, dtypes and shapes of what `tensors` will return, before any work is done."""
    out, groups = linear.out_features, scheme.groups(linear.in_features)
    specs: list[Spec] = [
        (f"{linear.name}.weight_packed", "I32", (out, words(linear.in_features, scheme.bits))),
        (f"{linear.name}.weight_scale", scale_dtype, (out, groups)),
        (f"{linear.name}.weight_shape", "I64", (2,)),
    ]
    if not scheme.symmetric:
        specs.append((f"{linear.name}.weight_zero_point", "I32", (words(out, scheme.bits), groups)))
    return specs


def tensors(name: str, quantized: Quantized) -> dict[str, Tensor]:
    """The tensors on disk of the quantized weight of module `name`."""
    bits = quantized.scheme.bits
    result = {
        f"{name}.weight_packed": pack(quantized.codes, bits, dim=1),
        f"{name}.weight_scale": quantized.scale.contiguous(),
        f"{name}.weight_shape": torch.tensor(quantized.codes.shape, dtype=torch.int64),
    }
    if quantized.zero is not None:
        result[f"{name}.weight_zero_point"] = pack(quantized.zero, bits, dim=0)
    return result


def from_tensors(name: str, stored: Mapping[str, Tensor], scheme: Scheme) -> Quantized:
    """Inverse of `tensors`."""
    out, in_features = stored[f"{name}.weight_shape"].tolist()
    zero = stored.get(f"{name}.weight_zero_point")
    return Quantized(
        unpack(stored[f"{name}.weight_packed"], scheme.bits, in_features, dim=1),
        stored[f"{name}.weight_scale"],
        None if zero is None else unpack(zero, scheme.bits, out, dim=0),
        scheme,
    )


def quantization_config(scheme: Scheme, ignore: Sequence[str], dequantize: bool) -> dict[str, Any]:
    """The `quantization_config` of config.json. The loader forbids unknown keys inside a group."""
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group_size == -1 else "group",
        "group_size": None if scheme.group_size == -1 else scheme.group_size,
        "dynamic": False,
    }
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
    }
    if dequantize:
        config["dequantize"] = True
    return config
