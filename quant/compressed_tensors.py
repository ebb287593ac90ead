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

GPT-2's Conv1D stores [in, out], and loaders do not transpose. Its tensors are therefore the transposed matrix's: codes
packed along `out`, and scales [in / g, out] as blocks of g inputs by one output (strategy `block`), also dequantized at
load; so are Falcon's, whose FalconLinear would multiply with the weight that is gone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from .pack import pack, unpack, words
from .scheme import Quantized, Scheme

Spec = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape


def tensor_specs(linear: Linear, scheme: Scheme, scale_dtype: str) -> list[Spec]:
    """Names, dtypes and shapes of what `tensors` will return, before any work is done."""
    out, in_features, groups = linear.out_features, linear.in_features, scheme.groups(linear.in_features)
    packed = (in_features, words(out, scheme.bits)) if linear.conv1d else (out, words(in_features, scheme.bits))
    specs: list[Spec] = [
        (f"{linear.name}.weight_packed", "I32", packed),
        (f"{linear.name}.weight_scale", scale_dtype, (groups, out) if linear.conv1d else (out, groups)),
        (f"{linear.name}.weight_shape", "I64", (2,)),
    ]
    if not scheme.symmetric:
        specs.append((f"{linear.name}.weight_zero_point", "I32", (words(out, scheme.bits), groups)))
    return specs


def tensors(name: str, quantized: Quantized, transposed: bool = False) -> dict[str, Tensor]:
    """The tensors on disk of the quantized weight of module `name`; `transposed`: as [in, out]."""
    bits = quantized.scheme.bits
    codes, scale = (quantized.codes.T, quantized.scale.T) if transposed else (quantized.codes, quantized.scale)
    result = {
        f"{name}.weight_packed": pack(codes, bits, dim=1),
        f"{name}.weight_scale": scale.contiguous(),
        f"{name}.weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }
    if quantized.zero is not None:
        result[f"{name}.weight_zero_point"] = pack(quantized.zero, bits, dim=0)
    return result


def from_tensors(name: str, stored: Mapping[str, Tensor], scheme: Scheme, transposed: bool = False) -> Quantized:
    """Inverse of `tensors`."""
    rows, cols = stored[f"{name}.weight_shape"].tolist()
    zero = stored.get(f"{name}.weight_zero_point")
    codes, scale = unpack(stored[f"{name}.weight_packed"], scheme.bits, cols, dim=1), stored[f"{name}.weight_scale"]
    return Quantized(
        codes.T.contiguous() if transposed else codes,
        scale.T.contiguous() if transposed else scale,
        None if zero is None else unpack(zero, scheme.bits, rows, dim=0),
        scheme,
    )


@dataclass(frozen=True)
class ConfigGroup:
    """An entry of `config_groups`: a format, and which modules have it."""

    scheme: Scheme
    targets: Sequence[str]
    conv1d_inputs: int | None = None  # for [in, out] storage, the inputs per block


def quantization_config(groups: Sequence[ConfigGroup], ignore: Sequence[str], dequantize: bool) -> dict[str, Any]:
    """The `quantization_config` of config.json. The loader forbids unknown keys inside a group."""
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            f"group_{i}": {
                "targets": list(group.targets),
                "format": "pack-quantized",
                "weights": _weights_entry(group),
                "input_activations": None,
                "output_activations": None,
            }
            for i, group in enumerate(groups)
        },
    }
    if dequantize:
        config["dequantize"] = True
    return config


def _weights_entry(group: ConfigGroup) -> dict[str, Any]:
    scheme = group.scheme
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group_size == -1 else "group",
        "group_size": None if scheme.group_size == -1 else scheme.group_size,
        "dynamic": False,
    }
    if group.conv1d_inputs is not None:
        weights |= {"strategy": "block", "group_size": None, "block_structure": [group.conv1d_inputs, 1]}
    return weights


def group_of(config: Mapping[str, Any], module: str, source: str) -> Mapping[str, Any]:
    """The config group of `module`. Raises SutureError when there is none or more than one."""
    groups = list(config.get("config_groups", {}).values())
    fitting = [group for group in groups if _targets(group, module)]
    if len(fitting) != 1:
        raise SutureError(f"{source}: {len(fitting)} of {len(groups)} config_groups fit {module}, where one should")
    return fitting[0]


def parse_config(config: Mapping[str, Any], module: str, source: str) -> Scheme:
    """The scheme of `module` according to a `quantization_config`. Raises SutureError for what suture does not read."""
    group = group_of(config, module, source)
    weights = group.get("weights") or {}
    strategy, kind = weights.get("strategy"), weights.get("type", "int")
    if strategy not in ("group", "channel", "block") or kind != "int" or group.get("input_activations"):
        raise SutureError(f"{source}: {module} has {kind} weights with strategy {strategy}, which suture does not read")
    size = weights["block_structure"][0] if strategy == "block" else weights.get("group_size")
    return Scheme(
        int(weights["num_bits"]), -1 if size in (None, 0) else int(size), bool(weights.get("symmetric", True))
    )


def stored_transposed(config: Mapping[str, Any]) -> bool:
    """Whether the weights are stored [in, out] (Conv1D): their scales are per block of inputs by one output."""
    groups = config.get("config_groups", {}).values()
    return any((group.get("weights") or {}).get("strategy") == "block" for group in groups)


def _targets(group: Mapping[str, Any], module: str) -> bool:
    """A group without name patterns is for every linear layer."""
    patterns = [target for target in group.get("targets", []) if "." in target or target.startswith("re:")]
    return not patterns or any(
        re.match(target.removeprefix("re:"), module) if target.startswith("re:") else target == module
        for target in patterns
    )
