"""See a quantized checkpoint as dense tensors, one at a time: for scoring it, comparing it and taking it apart.

Reads compressed-tensors (pack-, int-, naive- and float-quantized, several groups), GPTQ (both formats, act-order), AWQ
gemm, bitsandbytes (NF4, FP4, int8) and block-scaled float8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ..calibrate.activations import quantize_inputs
from ..calibrate.skeleton import Skeleton, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.families import FAMILIES
from ..checkpoint.reader import Checkpoint
from ..checkpoint.source import PlannedSource, ReadsAhead, Settled, TensorSource
from .bitsandbytes import RowWise, blockwise_from, state_of
from .compressed_tensors import from_tensors, group_of, parse_config, stored_transposed
from .int_quantized import FORMAT as INT_QUANTIZED
from .int_quantized import IntegerView
from .qweight import awq_dense, gptq_dense, gptq_shape
from .scaled import scaled_dense
from .scheme import STORAGE, Quantized, Scheme

if TYPE_CHECKING:
    import torch

Quantization = Mapping[str, Any]  # the checkpoint's `quantization_config`
_CODES = {str(dtype).removeprefix("torch."): code for code, dtype in STORAGE.items()}


@dataclass(frozen=True)
class Packed:
    """One dense tensor that is stored as several others."""

    parts: tuple[str, ...]  # their names
    shape: tuple[int, ...]
    dtype: str  # safetensors code of the dense tensor
    read: Callable[[], torch.Tensor]
    scheme: Scheme | None = None  # when it is a uniform grid of whole groups:
    codes: Callable[[], Quantized] | None = None


@dataclass(frozen=True)
class DenseView:
    """A quantized checkpoint whose packed weights read as dense ones, in their scales' dtype or the config's."""

    checkpoint: TensorSource
    packed: Mapping[str, Packed]  # by the dense tensor's name

    @property
    def settled(self) -> bool:
        return isinstance(self.checkpoint, Settled) and self.checkpoint.settled

    @property
    def source(self) -> str:
        return self.checkpoint.source

    @property
    def config(self) -> dict[str, Any]:
        """The raw config without its `quantization_config`, also not in a text_config."""
        return unquantized(self.checkpoint.config)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the dense tensors, in the checkpoint's order."""
        return self._shapes

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self._dense(self.checkpoint.shapes, {name: packed.shape for name, packed in self.packed.items()})

    @property
    def dtypes(self) -> dict[str, str]:
        """Of the dense tensors."""
        return self._dtypes

    @cached_property
    def _dtypes(self) -> dict[str, str]:
        return self._dense(self.checkpoint.dtypes, {name: packed.dtype for name, packed in self.packed.items()})

    def _dense(self, stored: Mapping[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
        owner = {part: name for name, packed in self.packed.items() for part in packed.parts}
        result: dict[str, Any] = {}
        for name, value in stored.items():
            mine = owner.get(name)
            result[mine or name] = dense[mine] if mine else value
        return result

    def parts(self, name: str) -> tuple[str, ...]:
        """Names on disk of what makes up the dense tensor `name`."""
        return self.packed[name].parts if name in self.packed else (name,)

    def expect(self, names: Iterable[str]) -> None:
        if isinstance(self.checkpoint, ReadsAhead):
            self.checkpoint.expect(part for name in names for part in self.parts(name))

    def read(self, name: str) -> torch.Tensor:
        return self.packed[name].read() if name in self.packed else self.checkpoint.read(name)

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        return self.read(name)[list(rows)] if name in self.packed else self.checkpoint.read_rows(name, rows)


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """A raw config without what says that its weights are quantized, also inside a text_config."""
    result = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    if isinstance(result.get("text_config"), dict):
        result["text_config"] = unquantized(result["text_config"])
    return result


def dense_view(checkpoint: Checkpoint | PlannedSource, weights_alone: bool = False) -> TensorSource:
    """The checkpoint itself, or a view that dequantizes it. Raises SutureError for a method that it cannot read.

    `weights_alone`: also see the weights of a checkpoint whose loaders round activations as well, which no weight shows.
    """
    quantization = quantization_of(checkpoint)
    if quantization is None:
        return checkpoint
    method = str(quantization.get("quant_method"))
    groups = quantization.get("config_groups", {}).values()
    rounds_inputs = quantization.get("format") == INT_QUANTIZED and any(g.get("input_activations") for g in groups)
    if method == "compressed-tensors" and rounds_inputs and isinstance(checkpoint, Checkpoint) and not weights_alone:
        return IntegerView.of(checkpoint)
    finder = _FINDERS.get(method)
    if finder is None or "detected" in quantization:
        how = f"{method} ({quantization.get('format') or 'no format given'})"
        if "detected" in quantization:
            how = f"{method}, as its tensors' names say, but config.json does not say how"
        raise SutureError(
            f"{checkpoint.source}: already quantized with {how}, which cannot be read",
            f"give the unquantized checkpoint, or one of {', '.join(_FINDERS)} with its quantization_config",
        )
    packed = finder(checkpoint, quantization, weights_alone)
    if not packed:
        raise SutureError(
            f"{checkpoint.source}: config.json says {method}, but no tensor is packed that way",
            "remove quantization_config from config.json if these are plain weights",
        )
    if _conv1d(checkpoint.config) and method != "compressed-tensors":
        packed = {name: _transposed(one) for name, one in packed.items()}
    return DenseView(checkpoint, packed)


def open_decoded(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> Skeleton:
    """The model that a loader makes of a checkpoint: weights dense, and inputs rounded where the file says so."""
    view = dense_view(checkpoint)
    skeleton = open_skeleton(view, device=device)
    if isinstance(view, IntegerView):
        linears = [linear for linear in skeleton.layout.linears if linear.name in view.modules]
        quantize_inputs(skeleton, {linear.module: view.input_scale(linear.name) for linear in linears})
    return skeleton


def quantization_of(source: TensorSource) -> Quantization | None:
    """How the weights are quantized, or None."""
    if isinstance(source, Checkpoint):
        return source.quantization
    return source.config.get("quantization_config")


def _conv1d(config: Mapping[str, Any]) -> bool:
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and family.conv1d


def _transposed(packed: Packed) -> Packed:
    """For GPT-2, whose dense tensors are [in, out], in formats that store every matrix as [out, in]."""
    return Packed(packed.parts, packed.shape[::-1], packed.dtype, lambda: packed.read().T.contiguous())


def model_dtype(config: Mapping[str, Any]) -> str | None:
    """safetensors code of the dtype that config.json names."""
    found = config.get("text_config")
    inner: Mapping[str, Any] = found if isinstance(found, dict) else {}
    named = config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype")
    return _CODES.get(str(named))


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The raw config naming `dtype` (safetensors code) wherever it named one, and at the top."""
    name = str(STORAGE[dtype]).removeprefix("torch.")
    result: dict[str, Any] = {key: name if key in ("dtype", "torch_dtype") else value for key, value in config.items()}
    inner = config.get("text_config")
    if isinstance(inner, dict) and {"dtype", "torch_dtype"} & set(inner):
        result["text_config"] = with_dtype(inner, dtype)
    return result if {"dtype", "torch_dtype"} & set(result) else {**result, "dtype": name}


def _modules(source: TensorSource, ending: str) -> list[str]:
    return [name.removesuffix(ending) for name in source.shapes if name.endswith(ending)]


def _present(source: TensorSource, module: str, endings: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{module}{ending}" for ending in endings if f"{module}{ending}" in source.shapes)


def _stored(source: TensorSource, names: Sequence[str]) -> dict[str, torch.Tensor]:
    return {name: source.read(name) for name in names}


# ---- one finder per method


def _compressed(source: TensorSource, config: Quantization, weights_alone: bool) -> dict[str, Packed]:
    found: dict[str, Packed] = {}
    transposed = stored_transposed(config)
    for module in _modules(source, ".weight_packed"):
        scheme = parse_config(config, module, source.source)
        parts = _present(source, module, (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point"))
        shape = _packed_shape(source, module, scheme, transposed)
        dtype = source.dtypes[f"{module}.weight_scale"]
        codes = partial(_read_codes, source, module, scheme, parts, transposed)
        read = partial(_read_packed, source, module, scheme, parts, transposed)
        plain = None if transposed else scheme
        found[f"{module}.weight"] = Packed(parts, shape, dtype, read, plain, None if transposed else codes)
    endings = (".weight", ".weight_scale", ".weight_zero_point", ".input_scale", ".input_zero_point")
    for module in _modules(source, ".weight_scale"):
        if f"{module}.weight" in found or source.dtypes.get(f"{module}.weight") not in ("I8", "F8_E4M3"):
            continue
        group = group_of(config, module, source.source)
        if group.get("input_activations") and not weights_alone:
            raise SutureError(
                f"{source.source}: {module} rounds its inputs as well as its weight, which scoring cannot do yet",
                "the step dequantize makes a plain checkpoint of its weights",
            )
        block = (group.get("weights") or {}).get("block_structure")
        scale = f"{module}.weight_scale"
        dtype = source.dtypes[scale] if source.dtypes[scale] != "F32" else model_dtype(source.config) or "F32"
        parts = _present(source, module, endings)
        read = partial(_read_scaled, source, module, ".weight_scale", dtype, tuple(block) if block else None)
        found[f"{module}.weight"] = Packed(parts, source.shapes[f"{module}.weight"], dtype, read)
    return found


def _packed_shape(source: TensorSource, module: str, scheme: Scheme, transposed: bool) -> tuple[int, ...]:
    rows, cols = source.shapes[f"{module}.weight_scale"]
    if scheme.group_size > 0:  # known without reading
        return (rows * scheme.group_size, cols) if transposed else (rows, cols * scheme.group_size)
    return tuple(source.read(f"{module}.weight_shape").tolist())


def _read_packed(
    source: TensorSource, module: str, scheme: Scheme, parts: Sequence[str], transposed: bool
) -> torch.Tensor:
    dense = _read_codes(source, module, scheme, parts, transposed).dequantize()
    return dense.T.contiguous() if transposed else dense


def _read_codes(source: TensorSource, module: str, scheme: Scheme, parts: Sequence[str], transposed: bool) -> Quantized:
    return from_tensors(module, _stored(source, parts), scheme, transposed)


def _read_scaled(
    source: TensorSource, module: str, ending: str, dtype: str, block: tuple[int, int] | None
) -> torch.Tensor:
    zero = f"{module}.weight_zero_point"
    return scaled_dense(
        f"{source.source}: {module}",
        source.read(f"{module}.weight"),
        source.read(f"{module}{ending}"),
        STORAGE[dtype],
        source.read(zero) if zero in source.shapes else None,
        block,
    )


def _gptq(source: TensorSource, config: Quantization, weights_alone: bool) -> dict[str, Packed]:
    bits = config.get("bits")
    if bits not in (2, 3, 4, 8) or config.get("pack_dtype", "int32") not in ("int32", None):
        raise SutureError(
            f"{source.source}: gptq with {bits} bits in {config.get('pack_dtype', 'int32')} words cannot be read"
        )
    overridden = [key for key, value in (config.get("dynamic") or {}).items() if value and key.startswith("+")]
    if overridden:
        raise SutureError(f"{source.source}: gptq with other settings for some layers ({overridden[0]}) cannot be read")
    found: dict[str, Packed] = {}
    for module in _modules(source, ".qweight"):
        parts = _present(source, module, (".qweight", ".qzeros", ".scales", ".g_idx"))
        shape = gptq_shape(source.shapes, module, bits)
        found[f"{module}.weight"] = Packed(
            parts, shape, source.dtypes[f"{module}.scales"], partial(_read_gptq, source, module, config, parts)
        )
    return found


def _read_gptq(source: TensorSource, module: str, config: Quantization, parts: Sequence[str]) -> torch.Tensor:
    return gptq_dense(_stored(source, parts), module, config, source.source)


def _awq(source: TensorSource, config: Quantization, weights_alone: bool) -> dict[str, Packed]:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm" or config.get("bits", 4) != 4:
        raise SutureError(
            f"{source.source}: awq {version} with {config.get('bits')} bits cannot be read", "only gemm with 4 bits can"
        )
    found: dict[str, Packed] = {}
    for module in _modules(source, ".qweight"):
        parts = _present(source, module, (".qweight", ".qzeros", ".scales"))
        in_features, _ = source.shapes[f"{module}.qweight"]
        _, out = source.shapes[f"{module}.scales"]
        found[f"{module}.weight"] = Packed(
            parts, (out, in_features), source.dtypes[f"{module}.scales"], partial(_read_awq, source, module, parts)
        )
    return found


def _read_awq(source: TensorSource, module: str, parts: Sequence[str]) -> torch.Tensor:
    return awq_dense(_stored(source, parts), module)


def _bitsandbytes(source: TensorSource, config: Quantization, weights_alone: bool) -> dict[str, Packed]:
    found: dict[str, Packed] = {}
    endings = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
    for weight in _modules(source, ".absmax"):
        states = [name for name in source.shapes if name.startswith(f"{weight}.quant_state.")]
        parts = (*_present(source, weight, endings), *states)
        state = state_of(_stored(source, states), weight, source.source)
        shape, dtype = tuple(int(n) for n in state["shape"]), _CODES[state["dtype"]]
        found[weight] = Packed(parts, shape, dtype, partial(_read_4bit, source, weight, parts))
    for module in _modules(source, ".SCB"):
        weight = f"{module}.weight"
        parts = _present(source, module, (".weight", ".SCB", ".weight_format"))
        found[weight] = Packed(parts, source.shapes[weight], "F32", partial(_read_int8, source, module))
    return found


def _read_4bit(source: TensorSource, weight: str, parts: Sequence[str]) -> torch.Tensor:
    return blockwise_from(_stored(source, parts), weight, source.source).dequantize()


def _read_int8(source: TensorSource, module: str) -> torch.Tensor:
    layout = f"{module}.weight_format"
    if layout in source.shapes and int(source.read(layout)) != 0:
        raise SutureError(
            f"{source.source}: {module} is in a column layout of old bitsandbytes", "save it again with a newer one"
        )
    return RowWise(source.read(f"{module}.weight"), source.read(f"{module}.SCB")).dequantize()


def _fp8(source: TensorSource, config: Quantization, weights_alone: bool) -> dict[str, Packed]:
    size = config.get("weight_block_size")
    block = (int(size[0]), int(size[1])) if size else None
    dtype = model_dtype(source.config) or "BF16"
    found: dict[str, Packed] = {}
    for module in _modules(source, ".weight_scale_inv"):
        parts = _present(source, module, (".weight", ".weight_scale_inv", ".input_scale", ".activation_scale"))
        read = partial(_read_scaled, source, module, ".weight_scale_inv", dtype, block)
        found[f"{module}.weight"] = Packed(parts, source.shapes[f"{module}.weight"], dtype, read)
    return found


_FINDERS: dict[str, Callable[[TensorSource, Quantization, bool], dict[str, Packed]]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
}
