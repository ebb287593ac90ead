"""How many bytes a model's linear layers take in each format that suture writes, counted from the formats' own tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..checkpoint.header import DTYPES
from ..checkpoint.layout import Linear, Place
from . import bitsandbytes, compressed_tensors, int_quantized, qweight
from .bitsandbytes import FourBit
from .compressed_tensors import Spec
from .gguf_blocks import BLOCK
from .scheme import Activations, Scheme


@dataclass(frozen=True)
class StoredAs:
    """A format by the step that writes it."""

    name: str
    step: str  # as in a recipe
    code_bits: float
    specs: Callable[[Linear], list[Spec]]
    divides: Callable[[Linear], bool] = lambda linear: True


def _packed(bits: int, group: int, symmetric: bool = True) -> StoredAs:
    scheme = Scheme(bits, group, symmetric)
    which = "per channel" if group == -1 else f"group {group}"
    zeros = "" if symmetric else ", zero points"
    keys = f"bits: {bits}, group_size: {group}" + ("" if symmetric else ", symmetric: false")
    return StoredAs(
        f"int{bits} {which}{zeros}",
        f"gptq: {{{keys}}}",
        bits,
        lambda linear: compressed_tensors.tensor_specs(linear, scheme, "BF16"),
        lambda linear: scheme.divides(linear.in_features),
    )


def _words(name: str, specs: Callable[[Linear, Scheme, str], list[Spec]]) -> StoredAs:
    scheme = Scheme(4, 128)
    return StoredAs(
        f"int4 group 128, {name.upper()} files",
        f"gptq: {{bits: 4, group_size: 128, format: {name}}}",
        4,
        lambda linear: specs(linear, scheme, "F16"),
        lambda linear: scheme.divides(linear.in_features) and linear.out_features % 8 == 0,
    )


def _four_bit(name: str, kind: FourBit, double: bool) -> StoredAs:
    keys = "{}" if double else "{double_quant: false}"
    label = f"{name}, double quantization" if double else name
    return StoredAs(label, f"{kind}: {keys}", 4, lambda linear: bitsandbytes.specs_4bit(linear, kind, 64, double))


def _gguf(name: str, code_bits: int, block_bytes: int, step: str) -> StoredAs:
    """Blocks of 32 with a float16 scale, Q4_1 with an offset too."""
    return StoredAs(
        f"GGUF {name}",
        step,
        code_bits,
        lambda linear: [(linear.name, "U8", (linear.numel // BLOCK * block_bytes,))],
        lambda linear: linear.in_features % BLOCK == 0,
    )


FORMATS: tuple[StoredAs, ...] = (
    _packed(8, -1),
    StoredAs(
        "int8 weights and inputs",
        "smoothquant: {}",
        8,
        lambda linear: int_quantized.tensor_specs(linear, "BF16", Activations()),
    ),
    StoredAs("int8, bitsandbytes", "int8: {}", 8, bitsandbytes.specs_int8),
    _packed(4, 128),
    _packed(4, 128, symmetric=False),
    _packed(4, 64),
    _packed(4, 32),
    _words("gptq", qweight.gptq_specs),
    _words("awq", qweight.awq_specs),
    _four_bit("NF4", "nf4", True),
    _four_bit("NF4", "nf4", False),
    _gguf("Q8_0", 8, 34, "gguf: {type: q8_0}"),
    _gguf("Q4_1", 4, 20, "gguf: {type: q4_1}"),
    _gguf("Q4_0", 4, 18, "gguf: {type: q4_0}"),
    _packed(3, 128),
    _packed(2, 64),
)


def linear_of(name: str, out_features: int, in_features: int) -> Linear:
    """A layer of which only the shape is known."""
    return Linear(name, name, name, 0, out_features, in_features, Place(f"{name}.weight"))


def bytes_of(stored: StoredAs, linears: Sequence[tuple[Linear, int]]) -> int | None:
    """Bytes of layers, each so many times; None when the format's groups do not divide one of them."""
    if not all(stored.divides(linear) for linear, _ in linears):
        return None
    return sum(copies * sum(_nbytes(spec) for spec in stored.specs(linear)) for linear, copies in linears)


def _nbytes(spec: Spec) -> int:
    _, dtype, shape = spec
    return math.prod(shape) * DTYPES[dtype].bits // 8
