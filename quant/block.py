"""Quantize one block of a model in place: the shell between the algorithms and transformers' modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..calibrate.replay import Stream, staged_block
from ..calibrate.skeleton import Skeleton
from ..calibrate.statistics import SecondMoment
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from .gptq import GPTQOptions, GPTQResult, gptq, output_error
from .rtn import rtn
from .scheme import Quantized, Scheme, split_rows
from .settings import GPTQSettings, RTNSettings


@dataclass(frozen=True)
class ModuleRecord:
    """What happened to one layer, for the manifest."""

    method: str
    weight_error: float  # ||W - Ŵ|| / ||W||
    output_error: float | None = None  # relative error of its outputs on the calibration tokens
    tokens: int | None = None  # calibration tokens that reached it
    damp: float | None = None
    damp_retries: int = 0
    dead_columns: int = 0
    fallback: str | None = None  # why it is not what was asked for


@dataclass(frozen=True)
class QuantizedLayer:
    linear: Linear
    quantized: Quantized
    record: ModuleRecord


def rtn_block(
    skeleton: Skeleton,
    chosen: Sequence[Linear],
    settings: RTNSettings,
    storage: torch.dtype,
    schemes: Mapping[str, Scheme] | None = None,
) -> list[QuantizedLayer]:
    """Round the chosen layers of a loaded block; its modules then hold the dequantized weights.

    `schemes`: layer -> its format, where it is not the settings' own.
    """
    layers = []
    for linear in chosen:
        weight = _weight(skeleton, linear)
        quantized = rtn(weight, _scheme(linear, settings, schemes), storage, search=settings.range_search)
        dense = quantized.dequantize()
        record = ModuleRecord("rtn", _weight_error(weight, dense))
        layers.append(_finish(skeleton, linear, quantized, dense, record))
    return layers


def gptq_block(
    skeleton: Skeleton,
    index: int,
    stream: Stream,
    chosen: Sequence[Linear],
    settings: GPTQSettings,
    storage: torch.dtype,
    paused: bool = True,
    schemes: Mapping[str, Scheme] | None = None,
) -> list[QuantizedLayer]:
    """GPTQ on a loaded block, stage by stage; the stream then holds the quantized block's outputs.

    `schemes`: layer -> its format, where it is not the settings' own.
    """
    names = {linear.name for linear in chosen}
    stages = [
        wanted
        for group in skeleton.layout.blocks[index]
        if (wanted := tuple(linear for linear in group if linear.name in names))
    ]
    layers: list[QuantizedLayer] = []
    moments: dict[int | None, SecondMoment] = {}  # of the stage in hand, by expert

    def observe(stage: int, inputs: Any) -> None:
        expected = stages[stage][0].in_features
        by_expert = enumerate(inputs) if isinstance(inputs, list) else [(None, inputs)]
        for expert, x in by_expert:
            if expert not in moments:
                moments[expert] = SecondMoment.zeros(expected, getattr(torch, settings.hessian), skeleton.device)
            moments[expert].add(x)

    def change(stage: int) -> None:
        together: dict[tuple[int | None, Scheme], list[Linear]] = {}
        for linear in stages[stage]:
            together.setdefault((linear.expert, _scheme(linear, settings, schemes)), []).append(linear)
        for (expert, scheme), linears in together.items():
            layers.extend(_gptq_sharing_inputs(skeleton, linears, moments[expert], settings, scheme, storage))
        moments.clear()

    staged_block(skeleton, index, stream, stages, observe, change, paused)
    return layers


def _gptq_sharing_inputs(
    skeleton: Skeleton,
    linears: Sequence[Linear],
    moment: SecondMoment,
    settings: GPTQSettings,
    scheme: Scheme,
    storage: torch.dtype,
) -> list[QuantizedLayer]:
    """Layers with the same inputs share H, so their rows go through GPTQ together; rows do not feel one another."""
    weights = [_weight(skeleton, linear) for linear in linears]
    hessian = moment.hessian()
    if not bool(torch.isfinite(hessian.diagonal()).all()):  # an entry is at most the root of its two diagonals' product
        raise SutureError(
            f"{linears[0].name}: its inputs on the calibration text hold NaN or values too large for float32",
            "a layer before it overflows: check the checkpoint",
        )
    options = GPTQOptions(scheme, settings.damp, actorder=settings.actorder == "static", search=settings.range_search)
    result = gptq(torch.cat(weights), hessian, options, storage)
    parts = split_rows(result.quantized, [linear.out_features for linear in linears])
    layers = []
    for linear, weight, part in zip(linears, weights, parts, strict=True):
        dense = part.dequantize()
        record = _gptq_record(result, weight, dense, hessian, moment.tokens)
        layers.append(_finish(skeleton, linear, part, dense, record))
    return layers


def _gptq_record(result: GPTQResult, weight: Tensor, dense: Tensor, hessian: Tensor, tokens: int) -> ModuleRecord:
    fallback = None
    if result.method == "rtn":
        fallback = "no calibration token reached it" if tokens == 0 else "H is not positive definite at any damping"
    error = output_error(weight, dense, hessian) if tokens else None
    return ModuleRecord(
        result.method,
        _weight_error(weight, dense),
        error,
        tokens,
        result.damp,
        result.retries,
        result.dead,
        fallback,
    )


def _weight_error(weight: Tensor, dense: Tensor) -> float:
    difference = torch.linalg.vector_norm(weight - dense.float(), dtype=torch.float64)
    size = torch.linalg.vector_norm(weight, dtype=torch.float64)
    return float(difference / size) if float(size) else 0.0


def _scheme(linear: Linear, settings: RTNSettings, schemes: Mapping[str, Scheme] | None) -> Scheme:
    return settings.scheme if schemes is None else schemes[linear.name]


def _module(skeleton: Skeleton, linear: Linear) -> nn.Module:
    return skeleton.model.get_submodule(linear.module)


def _weight(skeleton: Skeleton, linear: Linear) -> Tensor:
    """[out, in], float32."""
    weight = _module(skeleton, linear).get_parameter("weight").detach()
    return weight.T.contiguous() if linear.conv1d else weight


def _finish(
    skeleton: Skeleton, linear: Linear, quantized: Quantized, dense: Tensor, record: ModuleRecord
) -> QuantizedLayer:
    """Put the dequantized weight into the module: what follows sees what a loader will see."""
    parameter = _module(skeleton, linear).get_parameter("weight")
    parameter.data.copy_(dense.T if linear.conv1d else dense)
    return QuantizedLayer(linear, quantized, record)
