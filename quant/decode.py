"""See a quantized checkpoint as dense tensors, one at a time: for scoring it, comparing it and taking it apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..calibrate.activations import quantize_inputs
from ..calibrate.skeleton import Skeleton, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.reader import Checkpoint
from ..checkpoint.source import TensorSource
from .compressed_tensors import from_tensors, parse_config, stored_transposed
from .int_quantized import FORMAT as INT_QUANTIZED
from .int_quantized import IntegerView

if TYPE_CHECKING:
    import torch

_PACKED = ".weight_packed"
_PARTS = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point")


@dataclass(frozen=True)
class DenseView:
    """A compressed-tensors checkpoint whose packed weights read as dense ones, in their scales' dtype."""

    checkpoint: Checkpoint

    @property
    def source(self) -> str:
        return self.checkpoint.source

    @property
    def config(self) -> dict[str, Any]:
        """The raw config without its `quantization_config`."""
        return {key: value for key, value in self.checkpoint.config.items() if key != "quantization_config"}

    @cached_property
    def packed(self) -> frozenset[str]:
        """Modules whose weight is packed."""
        return frozenset(name.removesuffix(_PACKED) for name in self.checkpoint.tensors if name.endswith(_PACKED))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the dense tensors."""
        return self._shapes

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: shape for name, shape in self.checkpoint.shapes.items() if not self._is_part(name)}
        for module in self.packed:
            shapes[f"{module}.weight"] = tuple(self.checkpoint.read(f"{module}.weight_shape").tolist())
        return shapes

    @property
    def dtypes(self) -> dict[str, str]:
        """Of the dense tensors: a packed weight reads in its scales' dtype."""
        dtypes = {name: dtype for name, dtype in self.checkpoint.dtypes.items() if not self._is_part(name)}
        return dtypes | {f"{m}.weight": self.checkpoint.dtypes[f"{m}.weight_scale"] for m in self.packed}

    def read(self, name: str) -> torch.Tensor:
        module = name.removesuffix(".weight")
        if module not in self.packed:
            return self.checkpoint.read(name)
        config = self.checkpoint.config["quantization_config"]
        scheme = parse_config(config, module, self.checkpoint.source)
        stored = {
            f"{module}{part}": self.checkpoint.read(f"{module}{part}")
            for part in _PARTS
            if f"{module}{part}" in self.checkpoint.tensors
        }
        transposed = stored_transposed(config)
        dense = from_tensors(module, stored, scheme, transposed).dequantize()
        return dense.T.contiguous() if transposed else dense

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        if name.removesuffix(".weight") in self.packed:
            return self.read(name)[list(rows)]
        return self.checkpoint.read_rows(name, rows)

    def _is_part(self, name: str) -> bool:
        module, _, part = name.rpartition(".")
        return module in self.packed and f".{part}" in _PARTS


def dense_view(checkpoint: Checkpoint) -> TensorSource:
    """The checkpoint itself, or a view that dequantizes it. Raises SutureError for a method that it cannot read."""
    quantization = checkpoint.quantization
    if quantization is None:
        return checkpoint
    method, form = quantization.get("quant_method"), quantization.get("format")
    if method == "compressed-tensors" and form == INT_QUANTIZED and "detected" not in quantization:
        return IntegerView.of(checkpoint)
    if method != "compressed-tensors" or form != "pack-quantized" or "detected" in quantization:
        raise SutureError(
            f"{checkpoint.source}: already quantized with {method} ({form or 'no format given'}), which cannot be read",
            "give the unquantized checkpoint, or one in compressed-tensors' pack-quantized or int-quantized format",
        )
    return DenseView(checkpoint)


def open_decoded(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> Skeleton:
    """The model that a loader makes of a checkpoint: weights dense, and inputs rounded where the file says so."""
    view = dense_view(checkpoint)
    skeleton = open_skeleton(view, device=device)
    if isinstance(view, IntegerView):
        linears = [linear for linear in skeleton.layout.linears if linear.name in view.modules]
        quantize_inputs(skeleton, {linear.module: view.input_scale(linear.name) for linear in linears})
    return skeleton
