"""The steps `nf4`, `fp4` and `int8`: bitsandbytes' formats, written without bitsandbytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..calibrate.memory import trim_memory
from ..calibrate.skeleton import Skeleton, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear, ModelLayout
from ..checkpoint.source import TensorSource
from ..quant import bitsandbytes as bnb
from ..quant.block import Rounded, put_rows, weight_of
from ..quant.compressed_tensors import Spec
from ..quant.export import check_replaceable
from ..quant.scheme import STORAGE
from ..quant.settings import FourBitSettings, Int8Settings
from ..quant.targets import Selection, select
from .quantize import notes_of, planned_tensors
from .step import Prepared, StepResult, StepRun
from .walk import BlockStreams, Made, round_blocks

_INT8_INPUTS = (
    "loaded by transformers, these layers round their inputs to int8 as well (but for outliers); the report and the "
    "verified logits are of the weights with unrounded inputs, and verification.max_difference_in_stored_dtype is what "
    "the loader's own arithmetic adds"
)


@dataclass(frozen=True)
class BitsandbytesPlan(Prepared):
    """What the step will write, and of which layers."""

    layout: ModelLayout
    chosen: frozenset[str]


def prepare_nf4(source: TensorSource, settings: FourBitSettings) -> BitsandbytesPlan:
    """Raises SutureError for everything that can be refused from names and shapes."""
    return _prepare_4bit("nf4", source, settings)


def prepare_fp4(source: TensorSource, settings: FourBitSettings) -> BitsandbytesPlan:
    """Raises SutureError for everything that can be refused from names and shapes."""
    return _prepare_4bit("fp4", source, settings)


def _prepare_4bit(kind: bnb.FourBit, source: TensorSource, settings: FourBitSettings) -> BitsandbytesPlan:
    skeleton = open_skeleton(source)
    selection = _selection(skeleton, settings)
    dtype = source.dtypes[selection.chosen[0].place.tensor]
    config = bnb.config_4bit(kind, settings.double_quant, dtype, _left_alone(skeleton, selection))

    def specs_of(linear: Linear, dtype: str) -> list[Spec]:
        return bnb.specs_4bit(linear, kind, settings.block_size, settings.double_quant)

    return _plan(skeleton, selection, specs_of, f"quantized to {kind}", config, passes=400)


def prepare_int8(source: TensorSource, settings: Int8Settings) -> BitsandbytesPlan:
    """Raises SutureError for everything that can be refused from names and shapes."""
    skeleton = open_skeleton(source)
    selection = _selection(skeleton, settings)
    config = bnb.config_int8(settings.threshold, _left_alone(skeleton, selection))
    plan = _plan(
        skeleton, selection, lambda linear, dtype: bnb.specs_int8(linear), "quantized to int8", config, passes=200
    )
    return replace(plan, notes=(*plan.notes, _INT8_INPUTS))


def _plan(
    skeleton: Skeleton,
    selection: Selection,
    specs_of: Callable[[Linear, str], list[Spec]],
    how: str,
    config: dict[str, Any],
    passes: int,
) -> BitsandbytesPlan:
    """`passes`: over each weight, for the time that it takes."""
    layout, source = skeleton.layout, skeleton.source
    specs, accounts = planned_tensors(source, layout, selection, specs_of, lambda linears: how)
    numels = [[x.numel for group in groups for x in group if x.name in selection.names] for groups in layout.blocks]
    return BitsandbytesPlan(
        specs=specs,
        config={**source.config, "quantization_config": config},
        accounts=accounts,
        notes=notes_of(layout, selection),
        n_blocks=len(layout.blocks),
        skipped=selection.skipped,
        weight_passes=passes * sum(map(sum, numels)),
        working=max(sum(block) + 6 * max(block, default=0) for block in numels),  # made so far, and the layer in hand
        not_stock="" if find_spec("bitsandbytes") else "transformers needs bitsandbytes for it, which is not installed",
        layout=layout,
        chosen=selection.names,
    )


def _selection(skeleton: Skeleton, settings: FourBitSettings | Int8Settings) -> Selection:
    """The layers that bitsandbytes has modules for: transformers keeps experts in fused parameters, which have none."""
    check_replaceable(skeleton.layout, "bitsandbytes' format")
    selection = select(skeleton.layout, settings.targets, settings.ignore, settings.layers)
    experts = [linear for linear in selection.chosen if linear.expert is not None]
    if not experts:
        return selection
    why = "transformers keeps experts in fused parameters, for which bitsandbytes has no module"
    chosen = tuple(linear for linear in selection.chosen if linear.expert is None)
    if settings.targets != ["all-linear"] or not chosen:
        raise SutureError(
            f"targets: {experts[0].name} is an expert; {why}", "use rtn or gptq for the experts, or leave them out"
        )
    return Selection(chosen, selection.skipped | {linear.name: why for linear in experts})


def _left_alone(skeleton: Skeleton, selection: Selection) -> list[str]:
    """`llm_int8_skip_modules`: every linear module that stays as it is, as transformers' loader matches names.

    The loader skips its own default (the head, and what is tied to it) only when the list is absent, so all are named.
    """
    from transformers.pytorch_utils import Conv1D

    layout = skeleton.layout
    chosen = {linear.module for linear in selection.chosen}
    unfused = f".{layout.family.experts.module}." if layout.family.experts else None
    names = [
        name
        for name, module in skeleton.model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name not in chosen and not (unfused and unfused in name)
    ]
    if "language_model." in layout.disk_stem:  # the wrapper's names; its vision tower's layers are linear too
        names = [f"model.language_model.{n.removeprefix(layout.family.stem)}" if "." in n else n for n in names]
        outside = [name.removeprefix("model.").split(".")[0] for name in layout.unknown]
        names += [rf"(model\.)?{re.escape(p)}" for p in dict.fromkeys(outside) if p != "language_model"]
    return names


def rehearsal_nf4(plan: BitsandbytesPlan, settings: FourBitSettings) -> tuple[str, FourBitSettings]:
    """The first block's layers alone."""
    return "nf4", settings.model_copy(update=_first_block(plan))


def rehearsal_fp4(plan: BitsandbytesPlan, settings: FourBitSettings) -> tuple[str, FourBitSettings]:
    """The first block's layers alone."""
    return "fp4", settings.model_copy(update=_first_block(plan))


def rehearsal_int8(plan: BitsandbytesPlan, settings: Int8Settings) -> tuple[str, Int8Settings]:
    """The first block's layers alone."""
    return "int8", settings.model_copy(update=_first_block(plan))


def _first_block(plan: BitsandbytesPlan) -> dict[str, Any]:
    """Targets that match in a model of one block."""
    block = [linear.name for group in plan.layout.blocks[0] for linear in group if linear.expert is None]
    return {"targets": [name for name in block if name in plan.chosen] or block, "ignore": [], "layers": None}


def run_nf4(work: StepRun, plan: BitsandbytesPlan, settings: FourBitSettings) -> StepResult:
    """Quantize and write block by block."""
    return _run_4bit("nf4", work, plan, settings)


def run_fp4(work: StepRun, plan: BitsandbytesPlan, settings: FourBitSettings) -> StepResult:
    """Quantize and write block by block."""
    return _run_4bit("fp4", work, plan, settings)


def _run_4bit(kind: bnb.FourBit, work: StepRun, plan: BitsandbytesPlan, settings: FourBitSettings) -> StepResult:
    def encode(name: str, weight: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], bnb.Blockwise]:
        quantized = bnb.quantize_4bit(weight, kind, settings.block_size, settings.double_quant, dtype)
        return bnb.tensors_4bit(name, quantized), quantized

    record = {"method": kind, "bits": 4, "group_size": settings.block_size, "double_quant": settings.double_quant}
    return _run(work, plan, encode, record)


def run_int8(work: StepRun, plan: BitsandbytesPlan, settings: Int8Settings) -> StepResult:
    """Quantize and write block by block."""

    def encode(name: str, weight: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], bnb.RowWise]:
        try:
            quantized = bnb.quantize_int8(weight.to(dtype))
        except SutureError as error:
            raise SutureError(f"{name}: {error.problem}", error.hint) from None
        return bnb.tensors_int8(name, quantized), quantized

    return _run(work, plan, encode, {"method": "int8", "bits": 8, "group_size": -1})


def _run(
    work: StepRun,
    plan: BitsandbytesPlan,
    encode: Callable[[str, Tensor, torch.dtype], tuple[dict[str, Tensor], Rounded]],
    record: dict[str, Any],
) -> StepResult:
    def make(skeleton: Skeleton, index: int, _: BlockStreams) -> Iterator[Made]:
        for linear in (x for group in plan.layout.blocks[index] for x in group if x.name in plan.chosen):
            weight = weight_of(skeleton, linear)
            stored = STORAGE[work.checkpoint.dtypes[linear.place.tensor]]
            tensors, rounded = encode(linear.name, weight.cpu(), stored)
            error = put_rows(skeleton, linear, rounded)
            del rounded
            shape = [linear.out_features, linear.in_features]
            own = {"weight_error": error, "output_error": None, "shape": shape, "fallback": None}
            yield Made(linear, tensors, {**record, **own})
            del tensors
            trim_memory(weight.nbytes)

    return round_blocks(work, plan, plan.layout, make)
