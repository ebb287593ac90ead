"""The compressed-tensors `int-quantized` format, written and read: 8-bit weights for layers whose inputs are 8-bit too.

For a weight X [out, in] with one scale per output:

| tensor | dtype, shape | content |
|---|---|---|
| X.weight | int8 [out, in] | codes, -128..127 |
| X.weight_scale | storage dtype [out, 1] | |
| X.input_scale | storage dtype [1] | static inputs only |

Stock transformers with `compressed-tensors` rounds the inputs in its forward (`calibrate/activations.py` has the same
arithmetic). It keeps experts in fused parameters, and leaves Conv1D alone, so that neither can have integer inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear, ModelLayout
from ..checkpoint.reader import Checkpoint
from .compressed_tensors import Spec
from .export import check_replaceable
from .scheme import Activations, Quantized, Scheme
from .targets import Selection

FORMAT = "int-quantized"


def check_inputs(layout: ModelLayout, selection: Selection) -> None:
    """Refuse layers whose inputs a loader would not round."""
    if any(linear.expert is not None for linear in selection.chosen):
        raise SutureError(
            "8-bit inputs are not possible for mixtures of experts: transformers computes experts in fused parameters, "
            "whose inputs its loader leaves in full precision",
            "quantize the weights alone: gptq or awq with bits: 8",
        )
    check_replaceable(layout, "8-bit inputs")
    if layout.family.conv1d:
        raise SutureError(
            "8-bit inputs are not possible for GPT-2's Conv1D layers: loaders leave their inputs in full precision",
            "quantize the weights alone: gptq or awq with bits: 8",
        )


_PER_SEQUENCE: dict[str, tuple[str, ...]] = {"deepseek_v3": ("self_attn.kv_b_proj",)}


def kept_inputs(layout: ModelLayout, inputs: Activations) -> dict[str, str]:
    """Layers that stay in full precision -> why.

    transformers gives DeepSeek's `kv_b_proj` its latents as [batch, 1, tokens, rank], which compressed-tensors takes for
    one token: its dynamic scale would be the whole sequence's, and depend on tokens to come.
    """
    if not inputs.dynamic:
        return {}
    roles = _PER_SEQUENCE.get(layout.family.model_type, ())
    reason = "its 4-D inputs would get one dynamic scale per sequence; activations: static quantizes it"
    return {linear.name: reason for linear in layout.linears if linear.role in roles}


def tensor_specs(linear: Linear, scale_dtype: str, inputs: Activations) -> list[Spec]:
    """Names, dtypes and shapes of what `tensors` will return."""
    specs: list[Spec] = [
        (f"{linear.name}.weight", "I8", (linear.out_features, linear.in_features)),
        (f"{linear.name}.weight_scale", scale_dtype, (linear.out_features, 1)),
    ]
    return specs if inputs.dynamic else [*specs, (f"{linear.name}.input_scale", scale_dtype, (1,))]


def tensors(name: str, quantized: Quantized, input_scale: Tensor | None) -> dict[str, Tensor]:
    """The tensors on disk of module `name`; `input_scale` [1] of static inputs."""
    codes = (quantized.codes.to(torch.int16) - quantized.scheme.middle).to(torch.int8)
    made = {f"{name}.weight": codes, f"{name}.weight_scale": quantized.scale}
    return made if input_scale is None else made | {f"{name}.input_scale": input_scale}


def from_tensors(name: str, stored: Mapping[str, Tensor], scheme: Scheme) -> Quantized:
    """Inverse of `tensors`, for the weight."""
    codes = (stored[f"{name}.weight"].to(torch.int16) + scheme.middle).to(torch.uint8)
    return Quantized(codes, stored[f"{name}.weight_scale"], None, scheme)


def with_inputs(config: Mapping[str, Any], inputs: Activations) -> dict[str, Any]:
    """A `quantization_config` for packed weights as one for int8 weights and inputs."""
    made: dict[str, Any] = copy.deepcopy(dict(config))
    made["format"] = FORMAT
    args = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token" if inputs.dynamic else "tensor",
        "dynamic": inputs.dynamic,
    }
    for group in made["config_groups"].values():
        group |= {"format": FORMAT, "input_activations": args}
    return made


@dataclass(frozen=True)
class IntegerView:
    """An `int-quantized` checkpoint whose weights read as dense ones, in their scales' dtype.

    What it computes also depends on its inputs being rounded: `quant.decode.open_decoded` sees to that.
    """

    checkpoint: Checkpoint
    scheme: Scheme
    inputs: Activations

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> IntegerView:
        """Raises SutureError for several groups, or weights or inputs of another kind than this file's."""
        groups = list(checkpoint.config["quantization_config"].get("config_groups", {}).values())
        weights = (groups[0].get("weights") or {}) if groups else {}
        known = (weights.get("num_bits"), weights.get("type", "int"), weights.get("symmetric", True))
        if len(groups) != 1 or known != (8, "int", True) or weights.get("strategy") != "channel":
            raise SutureError(
                f"{checkpoint.source}: its {FORMAT} weights are not one group of symmetric 8-bit channels, which is "
                "all that suture reads of this format"
            )
        return cls(checkpoint, Scheme(8, -1), parse_inputs(groups[0], checkpoint.source))

    @property
    def source(self) -> str:
        return self.checkpoint.source

    @property
    def config(self) -> dict[str, Any]:
        """The raw config without its `quantization_config`."""
        return {key: value for key, value in self.checkpoint.config.items() if key != "quantization_config"}

    @cached_property
    def modules(self) -> frozenset[str]:
        """Layers whose weight is int8."""
        ends = (name.removesuffix(".weight") for name, dtype in self.checkpoint.dtypes.items() if dtype == "I8")
        return frozenset(name for name in ends if f"{name}.weight_scale" in self.checkpoint.tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self.checkpoint.shapes.items() if not self._is_scale(name)}

    @property
    def dtypes(self) -> dict[str, str]:
        """Of the dense tensors: an int8 weight reads in its scales' dtype."""
        dtypes = {name: dtype for name, dtype in self.checkpoint.dtypes.items() if not self._is_scale(name)}
        return dtypes | {f"{m}.weight": self.checkpoint.dtypes[f"{m}.weight_scale"] for m in self.modules}

    def read(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if module not in self.modules:
            return self.checkpoint.read(name)
        stored = {f"{module}.{part}": self.checkpoint.read(f"{module}.{part}") for part in ("weight", "weight_scale")}
        return from_tensors(module, stored, self.scheme).dequantize()

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        if name.removesuffix(".weight") in self.modules:
            return self.read(name)[list(rows)]
        return self.checkpoint.read_rows(name, rows)

    def input_scale(self, module: str) -> Tensor | None:
        """The stored scale [1] of a layer's inputs; None: one per token, found at run time."""
        return None if self.inputs.dynamic else self.checkpoint.read(f"{module}.input_scale")

    def _is_scale(self, name: str) -> bool:
        module, _, part = name.rpartition(".")
        return module in self.modules and part in ("weight_scale", "input_scale")


def parse_inputs(group: Mapping[str, Any], source: str) -> Activations:
    """How a config group says that inputs are rounded. Raises SutureError for what suture does not compute."""
    args = group.get("input_activations") or {}
    dynamic = args.get("dynamic") is True
    known = (args.get("num_bits"), args.get("type", "int"), args.get("symmetric", True), args.get("strategy"))
    if known != (8, "int", True, "token" if dynamic else "tensor"):
        raise SutureError(
            f"{source}: inputs of {args.get('num_bits')} bits with strategy {args.get('strategy')} "
            f"(dynamic: {args.get('dynamic')}), which suture does not compute"
        )
    return Activations(dynamic)
