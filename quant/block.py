"""Quantize one block of a model in place: the shell between the algorithms and transformers' modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..calibrate.crew import ALONE, Crew
from ..calibrate.memory import trim_memory
from ..calibrate.relay import Held, relay
from ..calibrate.replay import Stream, Window, staged_block
from ..calibrate.skeleton import Skeleton
from ..calibrate.statistics import CHUNK, EXPERT_CHUNK, Deviation, SecondMoment
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from .awq import clipped_grid
from .gptq import GPTQOptions, GPTQResult, gptq, output_error, relative_error, row_energies
from .grid import Search, find_grid
from .learn import LearnOptions, Start, learn
from .rtn import round_to_grid, rtn
from .scheme import Quantized, Scheme, row_pieces, split_rows
from .settings import GPTQSettings, LearnSettings, RTNSettings

_ROWS = 32  # a process rounds a multiple of so many: what is left over by vectors may be computed otherwise


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
    block_error: tuple[float, float] | None = None  # of its block's outputs on held-out text, before and after training


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
) -> Iterator[QuantizedLayer]:
    """Round the chosen layers of a loaded block one after another; its modules then hold the dequantized weights.

    `schemes`: layer -> its format, where it is not the settings' own.
    """
    for linear in chosen:
        weight = weight_of(skeleton, linear)
        quantized = rtn(weight, _scheme(linear, settings, schemes), storage, search=settings.range_search)
        layer = QuantizedLayer(linear, quantized, ModuleRecord("rtn", put_rows(skeleton, linear, quantized)))
        del quantized  # the codes are the caller's, who packs them before the next layer's come
        yield layer
        del layer
        trim_memory(weight.nbytes)


def clipped_block(
    skeleton: Skeleton,
    chosen: Sequence[Linear],
    schemes: Mapping[str, Scheme],
    search: Search | None,
    storage: torch.dtype,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor | None],
) -> list[QuantizedLayer]:
    """Round the chosen layers to nearest, their ranges searched by what they cost the layer's output.

    Keys are module names. `inputs`: a sample of the layer's inputs [tokens, in]. `outputs`: the rows whose ranges may be cut
    so, None: all; for what makes queries and keys the softmax lies between the cost and the outputs, and ranges are
    searched by the weights' own error.
    """
    layers = []
    for linear in chosen:
        weight, x = weight_of(skeleton, linear), inputs[linear.module]
        scheme = schemes[linear.module]
        grid = find_grid(weight, scheme, storage, None, search)
        rows = outputs.get(linear.module, torch.empty(0, dtype=torch.int64))
        if search is not None and (rows is None or len(rows)):
            at = slice(None) if rows is None else rows.to(weight.device)
            clipped = clipped_grid(weight[at], scheme, storage, x, search)
            grid.scale[at], grid.zero[at] = clipped.scale, clipped.zero
        quantized = round_to_grid(weight, grid)
        dense = quantized.dequantize()
        wanted, found = x @ weight.T, x @ dense.float().T
        error = weight_error(wanted, found) if x.shape[0] else None
        record = ModuleRecord("rtn", weight_error(weight, dense), error, x.shape[0])
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
    reference: tuple[Skeleton, Stream] | None = None,
    crew: Crew = ALONE,
) -> list[QuantizedLayer]:
    """GPTQ on a loaded block, stage by stage; the stream then holds the quantized block's outputs.

    `schemes`: layer -> its format, where it is not the settings' own. `reference`: the original model with its own stream
    over the same tokens, for asymmetric calibration; its stream then holds its outputs. Experts are calibrated
    symmetrically: the two models send other tokens to them. `crew`: the processes that do this together, each with its
    part of the text in its streams; all then have the quantized block.
    """
    names = {linear.name for linear in chosen}
    stages = [
        wanted
        for group in skeleton.layout.blocks[index]
        if (wanted := tuple(linear for linear in group if linear.name in names))
    ]
    layers: list[QuantizedLayer] = []
    inputs: dict[int | None, _Inputs] = {}  # of the stage in hand, by expert

    def of(stage: int, expert: int | None) -> _Inputs:
        if expert not in inputs:
            width, dtype = stages[stage][0].in_features, getattr(torch, settings.hessian)
            paired = reference is not None and expert is None
            chunk = CHUNK if expert is None else EXPERT_CHUNK
            owner = None if expert is None else expert % crew.size
            inputs[expert] = _Inputs.zeros(width, dtype, skeleton.device, paired, chunk, owner)
        return inputs[expert]

    def observe(stage: int, x: Any, original: Any = None) -> None:
        by_expert = enumerate(x) if isinstance(x, list) else [(None, x)]
        for expert, part in by_expert:
            of(stage, expert).add(part, original, hold=crew.size > 1)

    def change(stage: int) -> None:
        together: dict[int | None, dict[Scheme, list[Linear]]] = {}
        freed = 0
        for linear in stages[stage]:
            sharing = together.setdefault(linear.expert, {})
            sharing.setdefault(_scheme(linear, settings, schemes), []).append(linear)
        if crew.size > 1:
            relay(crew, [held for expert in together for held in of(stage, expert).held()])
        rounded: dict[int, _SomeRows] = {}  # what this process does of a stage that all do together
        alike = [linears for sharing in together.values() for linears in sharing.values()]
        for expert, sharing in together.items():
            seen = inputs.pop(expert)
            freed += seen.moment.total.nbytes
            if seen.owner not in (None, crew.rank):
                continue
            hessian, deviation = seen.moment.into_hessian(), seen.deviation and seen.deviation.mean()
            _check_finite(hessian, together[expert])
            for scheme, linears in sharing.items():
                known = (hessian, deviation, seen.moment.tokens)
                if crew.size == 1:
                    layers.extend(_gptq_sharing_inputs(skeleton, linears, known, settings, scheme, storage))
                else:
                    part = (crew.rank, crew.size) if seen.owner is None else (0, 1)
                    found = _gptq_rows(skeleton, linears, known, settings, scheme, storage, part)
                    rounded |= {alike.index(linears): found} if found is not None else {}
        if crew.size > 1:
            layers.extend(_joined(skeleton, alike, crew.gather(rounded)))
        inputs.clear()
        trim_memory(freed)

    staged_block(skeleton, index, stream, stages, observe, change, paused, reference)
    return layers


@dataclass
class _Inputs:
    """Statistics of what reaches a stage."""

    moment: SecondMoment
    deviation: Deviation | None  # from the original model's
    owner: int | None  # the process that rounds what has these inputs; None: each takes some rows
    waiting: list[tuple[Tensor, Any]]  # inputs, of this process alone, that are not added up yet

    @classmethod
    def zeros(
        cls, width: int, dtype: torch.dtype, device: torch.device, paired: bool, chunk: int, owner: int | None
    ) -> _Inputs:
        deviation = Deviation.zeros(width, dtype, device) if paired else None
        return cls(SecondMoment.zeros(width, dtype, device, chunk), deviation, owner, [])

    def add(self, x: Tensor, original: Any, hold: bool) -> None:
        """`hold`: they are added up by `relay`."""
        if hold:
            self.waiting.append((x, original))
            return
        self.moment.add(x)
        if self.deviation is not None:
            self.deviation.add(x, original)

    def held(self) -> list[Held]:
        """For `relay`."""
        sums = [Held(self.moment, self.owner, [(x,) for x, _ in self.waiting])]
        if self.deviation is not None:
            sums.append(Held(self.deviation, self.owner, list(self.waiting)))
        self.waiting.clear()
        return sums


def _check_finite(hessian: Tensor, sharing: Mapping[Scheme, Sequence[Linear]]) -> None:
    if not bool(torch.isfinite(hessian.diagonal()).all()):  # an entry is at most the root of its two diagonals' product
        first = next(iter(sharing.values()))[0]
        raise SutureError(
            f"{first.name}: its inputs on the calibration text hold NaN or values too large for float32",
            "a layer before it overflows: check the checkpoint",
        )


def _options(settings: GPTQSettings, scheme: Scheme) -> GPTQOptions:
    return GPTQOptions(
        scheme,
        settings.damp,
        actorder=settings.actorder,
        search=settings.range_search,
        asymmetric="none" if settings.asymmetric == "auto" else settings.asymmetric,
        alpha=settings.alpha,
    )


def _gptq_sharing_inputs(
    skeleton: Skeleton,
    linears: Sequence[Linear],
    known: tuple[Tensor, Tensor | None, int],
    settings: GPTQSettings,
    scheme: Scheme,
    storage: torch.dtype,
) -> list[QuantizedLayer]:
    """Layers with the same inputs share H, so their rows go through GPTQ together; rows do not feel one another.

    `known`: H, D if there is one, and the tokens that they are of.
    """
    weights = [weight_of(skeleton, linear) for linear in linears]
    hessian, deviation, tokens = known
    stacked = torch.cat(weights) if len(weights) > 1 else weights[0]
    result = gptq(stacked, hessian, _options(settings, scheme), storage, deviation)
    parts = split_rows(result.quantized, [linear.out_features for linear in linears])
    error_of = lambda weight, dense: output_error(weight, dense, hessian)  # noqa: E731
    return [
        _gptq_layer(skeleton, linear, part, result, tokens, error_of)
        for linear, part in zip(linears, parts, strict=True)
    ]


def _gptq_layer(
    skeleton: Skeleton,
    linear: Linear,
    quantized: Quantized,
    result: GPTQResult,
    tokens: int,
    error_of: Callable[[Tensor, Tensor], float],
) -> QuantizedLayer:
    """Put what GPTQ found into the module. error_of: (weight, dense) -> error of the layer's outputs."""
    weight, dense = weight_of(skeleton, linear), quantized.dequantize()
    error = error_of(weight, dense) if tokens else None
    record = _gptq_record(result, weight_error(weight, dense), error, tokens)
    return _finish(skeleton, linear, quantized, dense, record)


@dataclass(frozen=True)
class _SomeRows:
    """What one process made of some rows; on the CPU."""

    result: GPTQResult
    energies: tuple[Tensor, Tensor]  # `row_energies`
    tokens: int


def _gptq_rows(
    skeleton: Skeleton,
    linears: Sequence[Linear],
    known: tuple[Tensor, Tensor | None, int],
    settings: GPTQSettings,
    scheme: Scheme,
    storage: torch.dtype,
    part: tuple[int, int],
) -> _SomeRows | None:
    """`_gptq_sharing_inputs` of part k of n of the rows; None when there are not so many."""
    rows = torch.cat([weight_of(skeleton, linear) for linear in linears])
    (k, n), hessian, tokens = part, known[0], known[2]
    size = -(-len(rows) // (n * _ROWS)) * _ROWS
    mine = rows[k * size : (k + 1) * size]
    if not len(mine):
        return None
    result = gptq(mine, hessian, _options(settings, scheme), storage, known[1])
    energies = row_energies(mine, result.quantized.dequantize(), hessian)
    on_cpu = replace(result, quantized=_moved(result.quantized, torch.device("cpu")))
    return _SomeRows(on_cpu, (energies[0].cpu(), energies[1].cpu()), tokens)


def _joined(
    skeleton: Skeleton, alike: Sequence[Sequence[Linear]], found: Sequence[Mapping[int, _SomeRows]]
) -> list[QuantizedLayer]:
    """Layers from the rows that the processes found. alike: layers with the same inputs; found: by their place there."""
    layers = []
    for place, linears in enumerate(alike):
        parts = [one[place] for one in found if place in one]
        result, sizes = parts[0].result, [linear.out_features for linear in linears]
        quantized = split_rows(_stacked([part.result.quantized for part in parts]), sizes)
        costs, wholes = (torch.cat([part.energies[side] for part in parts]).split(sizes) for side in (0, 1))
        for linear, one, cost, whole in zip(linears, quantized, costs, wholes, strict=True):
            error = relative_error(cost, whole) if parts[0].tokens else 0.0
            moved = _moved(one, skeleton.device)
            layers.append(_gptq_layer(skeleton, linear, moved, result, parts[0].tokens, lambda *_, e=error: e))
    return layers


def _moved(quantized: Quantized, device: torch.device) -> Quantized:
    zero = None if quantized.zero is None else quantized.zero.to(device)
    return replace(quantized, codes=quantized.codes.to(device), scale=quantized.scale.to(device), zero=zero)


def _stacked(parts: Sequence[Quantized]) -> Quantized:
    """One above the other; undone by `split_rows`."""
    zeros = [part.zero for part in parts if part.zero is not None]
    codes, scale = torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts])
    return replace(parts[0], codes=codes, scale=scale, zero=torch.cat(zeros) if zeros else None)


def learned_block(
    skeleton: Skeleton,
    index: int,
    layers: Sequence[QuantizedLayer],
    original: Skeleton,
    inputs: Stream,
    targets: Stream,
    settings: LearnSettings,
) -> list[QuantizedLayer]:
    """Train the rounding of a block that GPTQ has been through; its modules then hold the trained weights.

    `original`: the model with the block's original weights loaded. `inputs`: the calibration text before the block, from
    the quantized blocks before it; `targets`: the original block's outputs. Every sequence is a step.
    """
    prefix = skeleton.layout.block_prefix(index)
    by_name = {layer.linear.name: layer.linear for layer in layers}

    def forward(weights: Mapping[str, Tensor], window: Window) -> Tensor:
        dense = {
            f"{by_name[name].module.removeprefix(prefix)}.weight": weight.T if by_name[name].conv1d else weight
            for name, weight in weights.items()
        }
        return skeleton.block_forward(index, window[0], dense, window[1])

    starts = {layer.linear.name: Start(weight_of(original, layer.linear), layer.quantized) for layer in layers}
    options = LearnOptions(
        settings.passes, settings.rate, settings.scale_rate, settings.lean, settings.held_out, settings.seed + index
    )
    learned = learn(forward, starts, inputs.windows(), [hidden for hidden, _ in targets.windows()], options)
    trained = []
    for layer in layers:
        quantized = learned.quantized[layer.linear.name]
        dense = quantized.dequantize()
        record = replace(
            layer.record,
            method="learn" if layer.record.fallback is None else layer.record.method,
            weight_error=weight_error(starts[layer.linear.name].weight, dense),
            output_error=None,  # GPTQ's was of other codes; what was trained for is the block's
            block_error=(learned.before, learned.after),
        )
        trained.append(_finish(skeleton, layer.linear, quantized, dense, record))
    return trained


def _gptq_record(result: GPTQResult, weight_error: float, error: float | None, tokens: int) -> ModuleRecord:
    fallback = None
    if result.method == "rtn":
        fallback = "no calibration token reached it" if tokens == 0 else "H is not positive definite at any damping"
    return ModuleRecord(
        result.method,
        weight_error,
        error,
        tokens,
        result.damp,
        result.retries,
        result.dead,
        fallback,
    )


def weight_error(weight: Tensor, dense: Tensor) -> float:
    """||W - Ŵ|| / ||W||."""
    difference = size = 0.0
    for some in row_pieces(*weight.shape):
        w = weight[some]
        difference += float(torch.linalg.vector_norm(w - dense[some].float(), dtype=torch.float64)) ** 2
        size += float(torch.linalg.vector_norm(w, dtype=torch.float64)) ** 2
    return math.sqrt(difference / size) if size else 0.0


def _scheme(linear: Linear, settings: RTNSettings, schemes: Mapping[str, Scheme] | None) -> Scheme:
    return settings.scheme if schemes is None else schemes[linear.name]


def _module(skeleton: Skeleton, linear: Linear) -> nn.Module:
    return skeleton.model.get_submodule(linear.module)


def weight_of(skeleton: Skeleton, linear: Linear) -> Tensor:
    """The layer's weight [out, in] in a loaded block, float32."""
    weight = _module(skeleton, linear).get_parameter("weight").detach()
    return weight.T.contiguous() if linear.conv1d else weight


def _finish(
    skeleton: Skeleton, linear: Linear, quantized: Quantized, dense: Tensor, record: ModuleRecord
) -> QuantizedLayer:
    put_weight(skeleton, linear, dense)
    return QuantizedLayer(linear, quantized, record)


class Rounded(Protocol):
    """A weight [out, in] that some of its rows can be had of."""

    def rows(self, some: slice) -> Tensor: ...


def put_rows(skeleton: Skeleton, linear: Linear, rounded: Rounded) -> float:
    """Put the dequantized weight into the module some rows at a time; ||W - Ŵ|| / ||W||."""
    parameter = _module(skeleton, linear).get_parameter("weight").data
    weight = parameter.T if linear.conv1d else parameter
    difference = size = 0.0
    for some in row_pieces(*weight.shape):
        dense = rounded.rows(some).to(weight.device).float()
        size += float(torch.linalg.vector_norm(weight[some], dtype=torch.float64)) ** 2
        difference += float(torch.linalg.vector_norm(weight[some] - dense, dtype=torch.float64)) ** 2
        weight[some] = dense
    return math.sqrt(difference / size) if size else 0.0


def put_weight(skeleton: Skeleton, linear: Linear, dense: Tensor) -> None:
    """Put a dequantized weight [out, in] into the module: what follows sees what a loader will see."""
    parameter = _module(skeleton, linear).get_parameter("weight")
    parameter.data.copy_(dense.T if linear.conv1d else dense)
