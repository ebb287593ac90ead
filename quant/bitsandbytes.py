"""The formats of bitsandbytes, written and read without it: NF4, FP4 (QLoRA, arXiv 2305.14314) and int8 (LLM.int8(),
arXiv 2208.07339). The same bytes as bitsandbytes 0.50 makes on a CPU.

4 bits. The weight [out, in] is one row-major run of numbers in blocks of 64 (blocks cross rows; the last may be short).
A block stores absmax = max |w|; each w / absmax becomes the nearest of 16 code points, two codes a byte, the even one high.

| tensor (of X.weight) | dtype, shape | content |
|---|---|---|
| X.weight | uint8 [⌈n/2⌉, 1] | codes |
| .absmax | float32 [blocks]; uint8 with double quantization | |
| .quant_map | float32 [16] | the code points |
| .nested_absmax, .nested_quant_map | float32 [⌈blocks/256⌉], [256] | double quantization only |
| .quant_state.bitsandbytes__nf4 | uint8 | JSON: type, block size, dtype, shape, nested offset |

Double quantization: absmax - mean(absmax), in blocks of 256, on the 256 points of the signed dynamic map
(arXiv 2110.02861). bitsandbytes looks the nearest point up in a table of 65,536 cells, so about one code in a thousand is
the neighbour of the nearest; so it is here. The JSON ends in spaces that pad it to a length known beforehand.

int8. Per row: SCB = max |w|, codes round(127 w / SCB), of the weight in float16 as bitsandbytes casts it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from .compressed_tensors import Spec
from .scheme import STORAGE, row_pieces

FourBit = Literal["nf4", "fp4"]

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(value / 12 for value in (0.0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3))
POINTS: dict[str, tuple[float, ...]] = {"nf4": NF4, "fp4": FP4}
NESTED = 256  # blocks whose absmax share a scale, and points of the dynamic map
_CELLS = 65536  # of the table in which bitsandbytes looks up dynamic codes
_STATE_BYTES = 256  # of the padded JSON
_UNDER_127 = 7.874015718698502e-3  # 1 / 127 as bitsandbytes multiplies by it
_NAMES = {code: str(dtype).removeprefix("torch.") for code, dtype in STORAGE.items()}
_SMALLEST = 1e-38
_PIECE = 1 << 20  # numbers handled at once


# ---- 4 bits


@dataclass(frozen=True)
class Blockwise:
    """A weight [out, in] in 4 bits."""

    kind: FourBit
    codes: Tensor  # uint8 [out * in]
    absmax: Tensor  # float32 [blocks], or uint8 codes of the dynamic map
    block: int
    shape: tuple[int, int]
    dtype: str  # safetensors code of what it dequantizes to
    nested_absmax: Tensor | None = None  # float32
    offset: float | None = None
    points: Tensor | None = None  # float32 [16]; None: the kind's own

    def scales(self, first: int, last: int) -> Tensor:
        """absmax of the blocks first..last - 1, float32."""
        own = self.absmax[first:last]
        if self.nested_absmax is None or self.offset is None:
            return own
        nested = self.nested_absmax[first // NESTED : -(-last // NESTED)].repeat_interleave(NESTED)
        return dynamic_map()[own.long()] * nested[first % NESTED :][: len(own)] + self.offset

    def dequantize(self) -> Tensor:
        """[out, in] in `dtype`: one rounding, after the float32 product."""
        dense = torch.empty(self.shape, dtype=STORAGE[self.dtype])
        for some in row_pieces(*self.shape):
            dense[some] = self.rows(some)
        return dense

    def rows(self, some: slice) -> Tensor:
        """These rows of `dequantize`."""
        first, last = some.start * self.shape[1], some.stop * self.shape[1]
        points = torch.tensor(POINTS[self.kind]) if self.points is None else self.points
        scales = self.scales(first // self.block, -(-last // self.block)).repeat_interleave(self.block)
        codes = points[self.codes[first:last].long()]
        dense = codes.mul_(scales[first % self.block :][: len(codes)])
        return dense.to(STORAGE[self.dtype]).view(-1, self.shape[1])


def quantize_4bit(
    weight: Tensor, kind: FourBit, block: int, double: bool, dtype: torch.dtype | None = None
) -> Blockwise:
    """Quantize weight [out, in] (bfloat16, float16 or float32), as `dtype` when that is not its own. Absmax are of that
    dtype's values, in float32."""
    dtype = dtype or weight.dtype
    flat = weight.contiguous().view(-1)
    codes, absmax = torch.empty(len(flat), dtype=torch.uint8), torch.empty(-(-len(flat) // block))
    for numbers, blocks in _pieces(len(flat), block):
        codes[numbers], absmax[blocks] = _codes_4bit(flat[numbers].to(dtype).float(), kind, block)
    code = next(code for code, known in STORAGE.items() if known == dtype)
    shape = (weight.shape[0], weight.shape[1])
    if not double:
        return Blockwise(kind, codes, absmax, block, shape, code)
    offset = absmax.mean()
    nested, nested_absmax = _dynamic_codes(absmax - offset)
    return Blockwise(kind, codes, nested, block, shape, code, nested_absmax, offset.item())


def _pieces(n: int, block: int) -> Iterator[tuple[slice, slice]]:
    """n numbers some whole blocks at a time: (numbers, their blocks). On the way a number takes 20 bytes and more."""
    blocks = max(1, _PIECE // block)
    for first in range(0, -(-n // block), blocks):
        last = min(first + blocks, -(-n // block))
        yield slice(first * block, min(last * block, n)), slice(first, last)


def _codes_4bit(flat: Tensor, kind: FourBit, block: int) -> tuple[Tensor, Tensor]:
    """Codes [n] and absmax [blocks] of float32 numbers [n]; the last block may be short."""
    padded = _in_blocks(flat, block)
    absmax = padded.abs().amax(1)
    if len(flat) % block:
        absmax[-1].clamp_(min=_SMALLEST)  # as bitsandbytes treats a short block, where a whole one of zeros keeps 0
    scaled = padded * (1.0 / absmax.clamp(min=_SMALLEST))[:, None]
    if len(flat) % block:  # and divides where it multiplies elsewhere
        scaled[-1] = padded[-1] / absmax[-1]
    bounds, order = _bounds(kind)
    return order[torch.bucketize(scaled.clamp_(-1, 1).view(-1)[: len(flat)], bounds)], absmax


def _in_blocks(flat: Tensor, block: int) -> Tensor:
    """[blocks, block], zeros at the end."""
    blocks = -(-len(flat) // block)
    padded = torch.zeros(blocks * block, dtype=flat.dtype)
    padded[: len(flat)] = flat
    return padded.view(blocks, block)


@cache
def _bounds(kind: FourBit) -> tuple[Tensor, Tensor]:
    """Midpoints between neighbouring code points, and the code of each interval."""
    points = torch.tensor(POINTS[kind])
    order = torch.argsort(points)
    return (points[order[:-1]] + points[order[1:]]) / 2, order.to(torch.uint8)


@cache
def dynamic_map() -> Tensor:
    """The 256 points of the signed dynamic 8-bit type, ascending: a decade per exponent, 2^i fractions in it."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        means = 10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


@cache
def _dynamic_table() -> Tensor:
    """Cell of [-1, 1] -> code of the point nearest to the cell's middle."""
    points = dynamic_map()
    values = torch.arange(_CELLS) / (_CELLS - 1) * 2 - 1
    right = torch.searchsorted(points, values).clamp_(max=len(points) - 1)
    left = (right - 1).clamp_(min=0)
    return torch.where(points[right] - values < values - points[left], right, left).to(torch.uint8)


def _dynamic_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (uint8) of values [n], and absmax of their blocks of 256."""
    padded = _in_blocks(values, NESTED)
    absmax = padded.abs().amax(1)
    scaled = (padded * (1 / absmax)[:, None]).nan_to_num_().clamp_(-1, 1)
    cells = ((scaled + 1) * 0.5 * (_CELLS - 1) + 0.5).long()
    codes = torch.where(absmax[:, None] > 0, _dynamic_table()[cells], 0).to(torch.uint8)
    return codes.view(-1)[: len(values)].contiguous(), absmax


def specs_4bit(linear: Linear, kind: FourBit, block: int, double: bool) -> list[Spec]:
    """Names, dtypes and shapes of what `tensors_4bit` will return."""
    weight, blocks = f"{linear.name}.weight", -(-linear.numel // block)
    specs: list[Spec] = [
        (weight, "U8", (-(-linear.numel // 2), 1)),
        (f"{weight}.absmax", "U8" if double else "F32", (blocks,)),
        (f"{weight}.quant_map", "F32", (16,)),
    ]
    if double:
        specs += [
            (f"{weight}.nested_absmax", "F32", (-(-blocks // NESTED),)),
            (f"{weight}.nested_quant_map", "F32", (256,)),
        ]
    return [*specs, (f"{weight}.quant_state.bitsandbytes__{kind}", "U8", (_STATE_BYTES,))]


def tensors_4bit(name: str, quantized: Blockwise) -> dict[str, Tensor]:
    """The tensors on disk of module `name`."""
    weight, codes = f"{name}.weight", quantized.codes
    if len(codes) % 2:
        last = quantize_4bit(torch.zeros(1, 1), quantized.kind, 64, False).codes  # bitsandbytes pads with a zero's code
        codes = torch.cat([codes, last])
    state: dict[str, Any] = {
        "quant_type": quantized.kind,
        "blocksize": quantized.block,
        "dtype": _NAMES[quantized.dtype],
        "shape": list(quantized.shape),
    }
    tensors = {
        weight: ((codes[::2] << 4) | codes[1::2])[:, None].contiguous(),
        f"{weight}.absmax": quantized.absmax,
        f"{weight}.quant_map": torch.tensor(POINTS[quantized.kind]),
    }
    if quantized.nested_absmax is not None:
        state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": quantized.offset}
        tensors |= {
            f"{weight}.nested_absmax": quantized.nested_absmax,
            f"{weight}.nested_quant_map": dynamic_map().clone(),
        }
    text = json.dumps(state).encode().ljust(_STATE_BYTES)
    assert len(text) == _STATE_BYTES
    return tensors | {
        f"{weight}.quant_state.bitsandbytes__{quantized.kind}": torch.frombuffer(bytearray(text), dtype=torch.uint8)
    }


def state_of(stored: Mapping[str, Tensor], weight: str, source: str) -> dict[str, Any]:
    """The JSON beside a 4-bit weight. Raises SutureError when it is damaged."""
    keys = [key for key in stored if key.startswith(f"{weight}.quant_state.bitsandbytes__")]
    try:
        (key,) = keys
        state = json.loads(bytes(stored[key].tolist()).decode())
        shape, kind = tuple(state["shape"]), state["quant_type"]
        known = len(shape) == 2 and kind in POINTS and state["dtype"] in _NAMES.values()
    except (ValueError, KeyError, TypeError) as error:
        raise SutureError(f"{source}: {weight}: its quant_state is missing or damaged", "download it again") from error
    if not known or state.get("nested_blocksize", NESTED) != NESTED:
        raise SutureError(f"{source}: {weight}: a quant_state of {state}, which suture does not read")
    return state


def blockwise_from(stored: Mapping[str, Tensor], weight: str, source: str) -> Blockwise:
    """Inverse of `tensors_4bit`."""
    state = state_of(stored, weight, source)
    shape = (int(state["shape"][0]), int(state["shape"][1]))
    packed = stored[weight].contiguous().view(-1).view(torch.uint8)  # quant_storage: the same bytes as another dtype
    codes = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[: shape[0] * shape[1]]
    dtype = next(code for code, name in _NAMES.items() if name == state["dtype"])
    nested = stored.get(f"{weight}.nested_absmax")
    absmax, points = stored[f"{weight}.absmax"], stored[f"{weight}.quant_map"].float()
    if nested is not None and not torch.equal(stored[f"{weight}.nested_quant_map"], dynamic_map()):
        raise SutureError(
            f"{source}: {weight}: its nested_quant_map is not the dynamic map, which suture does not read"
        )
    return Blockwise(
        state["quant_type"],
        codes,
        absmax if nested is not None else absmax.float(),
        int(state["blocksize"]),
        shape,
        dtype,
        nested,
        state.get("nested_offset"),
        points,
    )


# ---- int8


@dataclass(frozen=True)
class RowWise:
    """A weight [out, in] in int8: w = code * scale / 127."""

    codes: Tensor  # int8 [out, in]
    scale: Tensor  # float32 [out]

    def dequantize(self) -> Tensor:
        """[out, in], float32: what bitsandbytes' own dequantization gives."""
        return self.rows(slice(0, len(self.codes)))

    def rows(self, some: slice) -> Tensor:
        """These rows of `dequantize`."""
        return (self.codes[some] * self.scale[some, None]).mul_(_UNDER_127)


def quantize_int8(weight: Tensor) -> RowWise:
    """Quantize weight [out, in], in float16 as bitsandbytes does. Raises SutureError when that overflows."""
    half = weight.half()
    if not bool(torch.isfinite(half).all()):
        raise SutureError(
            f"weights up to {float(weight.abs().max()):.3g} overflow float16, in which LLM.int8() quantizes",
            "list the layer under ignore",
        )
    scale = half.abs().amax(1).float()
    codes = torch.empty(half.shape, dtype=torch.int8)
    for some in row_pieces(*half.shape):
        factor = scale[some, None]
        codes[some] = torch.where(factor > 0, torch.round(half[some] * (127.0 / factor)), 0).to(torch.int8)
    return RowWise(codes, scale)


def specs_int8(linear: Linear) -> list[Spec]:
    """Names, dtypes and shapes of what `tensors_int8` will return."""
    return [
        (f"{linear.name}.weight", "I8", (linear.out_features, linear.in_features)),
        (f"{linear.name}.SCB", "F32", (linear.out_features,)),
        (f"{linear.name}.weight_format", "U8", ()),
    ]


def tensors_int8(name: str, quantized: RowWise) -> dict[str, Tensor]:
    """The tensors on disk of module `name`."""
    return {
        f"{name}.weight": quantized.codes,
        f"{name}.SCB": quantized.scale,
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),  # row-major
    }


# ---- config


def config_4bit(kind: FourBit, double: bool, dtype: str, skipped: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` as transformers writes it. `dtype`: safetensors code of what the layers compute in."""
    return _config(skipped) | {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": _NAMES[dtype],
    }


def config_int8(threshold: float, skipped: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` as transformers writes it; inputs above `threshold` stay in float16."""
    return _config(skipped) | {"load_in_8bit": True, "llm_int8_threshold": threshold}


def _config(skipped: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": False,
        "load_in_8bit": False,
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": list(skipped),
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
    }
