"""The step `dequantize`: a quantized checkpoint back to plain weights, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibrate.skeleton import open_layout
from ..checkpoint.errors import SutureError
from ..checkpoint.manifest import Account
from ..checkpoint.reader import Checkpoint
from ..checkpoint.source import PlannedSource, TensorSource
from ..checkpoint.writer import TensorSpec
from ..quant.decode import DenseView, dense_view, model_dtype, with_dtype
from ..quant.scheme import STORAGE
from ..quant.settings import DequantizeSettings
from .derive import most_made, run_derived
from .step import Prepared, StepResult, StepRun

_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_ACTIVATIONS = ("input_scale", "input_zero_point", "activation_scale")


@dataclass(frozen=True)
class DequantizePlan(Prepared):
    dtype: str  # safetensors code of every floating-point tensor of the output


def prepare(source: TensorSource, settings: DequantizeSettings) -> DequantizePlan:
    """Raises SutureError when the checkpoint is not quantized, or in a way that cannot be read."""
    view = _view(source)
    layout = open_layout(view)
    dtype = _CODES.get(settings.dtype) or model_dtype(source.config) or _commonest(view)
    specs: list[TensorSpec] = []
    accounts: dict[str, Account] = {}
    for name, shape in view.shapes.items():
        if name in layout.stale:
            accounts[name] = Account("dropped", reason=layout.stale[name])
            continue
        stored = view.dtypes[name]
        specs.append(TensorSpec(name, dtype if stored in STORAGE else stored, shape))
        if name in view.packed:
            for part in view.parts(name):
                accounts[part] = _part_account(part, name, dtype)
        elif specs[-1].dtype != stored:
            accounts[name] = Account("changed", (name,), f"stored as {dtype} instead of {stored}")
        else:
            accounts[name] = Account("copied", (name,))
    return DequantizePlan(
        by_tensor=True,
        working=most_made(spec for spec in specs if spec.name in view.packed),
        specs=tuple(specs),
        config=with_dtype(view.config, dtype),
        accounts=accounts,
        notes=(f"{len(view.packed)} weights dequantized to {str(STORAGE[dtype]).removeprefix('torch.')}",),
        n_blocks=len(layout.blocks),
        dtype=dtype,
    )


def _view(source: TensorSource) -> DenseView:
    assert isinstance(source, Checkpoint | PlannedSource)
    view = dense_view(source, weights_alone=True)
    if not isinstance(view, DenseView):
        raise SutureError(f"dequantize: {source.source} is not quantized", "remove the step")
    return view


def _commonest(view: DenseView) -> str:
    found = [packed.dtype for packed in view.packed.values()]
    return max(STORAGE, key=found.count)


def _part_account(part: str, name: str, dtype: str) -> Account:
    if part.endswith(_ACTIVATIONS):
        return Account("dropped", reason="of rounded activations, which a plain model does not round")
    return Account("changed", (name,), f"dequantized to {dtype}")


def run(work: StepRun, plan: DequantizePlan, settings: DequantizeSettings) -> StepResult:
    """Dequantize and write one tensor after another."""
    view = _view(work.checkpoint)
    copied = {name for name, account in plan.accounts.items() if account.action == "copied"}

    def derive(name: str) -> Tensor | str:
        return name if name in copied else _rounded(view, name, plan.dtype)

    return run_derived(work, plan, derive, measure=False)


def _rounded(view: DenseView, name: str, dtype: str) -> Tensor:
    tensor = view.read(name)
    if view.dtypes[name] not in STORAGE:
        return tensor
    result = tensor.to(STORAGE[dtype])
    if bool(torch.isfinite(tensor).all()) and not bool(torch.isfinite(result).all()):
        raise SutureError(
            f"{view.source}: {name} holds values up to {float(tensor.abs().max()):.3g}, which overflow float16",
            "use dtype: bfloat16",
        )
    return result
