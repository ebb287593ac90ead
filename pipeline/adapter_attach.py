"""A new adapter for a model, in PEFT's format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibrate.replay import Stream, staged_block
from ..calibrate.skeleton import Skeleton
from ..calibrate.statistics import SecondMoment
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from ..checkpoint.staging import check_output
from ..lora.attach import FROM_ERROR, Init, draw, from_error, principal
from ..lora.compose import Factors, Form, base_metadata, compose
from ..quant.targets import select
from .adapter_files import Written, open_dense, runtime_path, short, stored_weight, taken_for_experts, write_adapter
from .progress import Progress, default_progress
from .recipe import CalibrationSettings
from .texts import calibration_text, text_model


def attach(
    model: str | Path,
    output: str | Path,
    *,
    r: int = 16,
    alpha: float = 32.0,
    targets: Sequence[str] = ("all-linear",),
    ignore: Sequence[str] = (),
    rslora: bool = False,
    dora: bool = False,
    init: Init = "default",
    original: str | Path | None = None,
    calibration: Mapping[str, Any] | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write a new adapter for `model`, which may be quantized; PEFT loads the pair.

    `init`: see `lora.attach`. loftq and eora need `original`, the unquantized checkpoint that `model` was made from, and
    eora also `calibration` (keys of a recipe's calibration). Raises SutureError for everything that does not fit.
    """
    progress = progress or default_progress()
    output = Path(output)
    _check_attach(r, alpha, init, original, calibration, dora)
    checkpoint, skeleton = open_dense(model)
    check_output(output, checkpoint.path, overwrite, False)
    if init == "pissa" and checkpoint.quantization is not None:
        raise SutureError(
            f"{checkpoint.source}: is quantized, and pissa takes its start out of weights that PEFT can change",
            "begin from the unquantized model, or use init: loftq with --original",
        )
    chosen, notes = _attachable(skeleton, targets, ignore)
    low = min(chosen, key=lambda linear: min(linear.out_features, linear.in_features))
    if r > min(low.out_features, low.in_features):
        raise SutureError(f"r: {r} is more than {low.name} has: [{low.out_features}, {low.in_features}]", "lower r")
    scale = alpha / (r**0.5 if rslora else r)
    generator = torch.Generator().manual_seed(seed)
    modules: dict[str, Factors] = {}
    records: dict[str, Any] = {}
    errors = _Errors(skeleton, original, calibration, chosen, progress) if init in FROM_ERROR else None
    for linear in progress.track(chosen, len(chosen), f"attach ({init})"):
        W = stored_weight(skeleton.source, linear) if init == "pissa" or dora or errors else None
        record: dict[str, Any] = {"r": r, "shape": [linear.out_features, linear.in_features]}
        if errors is not None:
            assert W is not None
            E, H = errors.of(linear, W)
            factors, taken = from_error(E, r, scale, H)
            record["error_taken_away"] = short(taken)
        elif init == "pissa":
            assert W is not None
            factors = principal(W, r, scale)
        else:
            factors = draw(init, linear.out_features, linear.in_features, r, generator)
        if dora:
            assert W is not None
            V = W.double() + scale * (factors.B.double() @ factors.A.double())
            factors = Factors(factors.A, factors.B, magnitude=V.norm(dim=1))
        modules[runtime_path(skeleton, linear)] = factors
        records[linear.name] = record
    form = Form(
        base=str(checkpoint.path) if not checkpoint.revision else checkpoint.source,
        alpha=alpha,
        rslora=rslora,
        dora=dora,
        init="pissa" if init == "pissa" else True,
        fan_in_fan_out=skeleton.family.conv1d,
    )
    new = compose(modules, form, base_metadata(skeleton.source, skeleton.layout))
    new.config["inference_mode"] = False
    settings = {"r": r, "alpha": alpha, "init": init, "rslora": rslora, "dora": dora, "seed": seed}
    settings |= {"targets": list(targets), "ignore": list(ignore), "calibration": calibration}
    source = {"model": checkpoint.source, "original": None if original is None else str(original)}
    return write_adapter(new, output, "lora attach", settings, source, records, notes, overwrite)


def _check_attach(
    r: int, alpha: float, init: Init, original: object, calibration: Mapping[str, Any] | None, dora: bool
) -> None:
    if r < 1:
        raise SutureError(f"r: {r} is not a rank", "give a whole number above 0")
    if not 0 < alpha < math.inf:
        raise SutureError(f"alpha: {alpha} is not a number above 0", "the scale of the change is alpha / r")
    if (init in FROM_ERROR) != (original is not None):
        raise SutureError(
            f"init: {init} {'needs' if init in FROM_ERROR else 'has no use for'} the original of a quantized model",
            "loftq and eora begin from what quantizing took away: give the quantized MODEL and --original",
        )
    if (init == "eora") != (calibration is not None):
        raise SutureError(
            f"init: {init} {'needs' if init == 'eora' else 'has no use for'} calibration text",
            "eora weighs the error by the layers' inputs: give --calibration builtin:novels",
        )
    if init == "pissa" and dora:
        raise SutureError(
            "init: pissa and dora exclude one another: both take the weight apart", "leave one of them out"
        )


def _attachable(skeleton: Skeleton, targets: Sequence[str], ignore: Sequence[str]) -> tuple[list[Linear], list[str]]:
    """Linear layers that PEFT can wrap: experts lie in one parameter there."""
    selection = select(skeleton.layout, targets, ignore)
    chosen = [linear for linear in selection.chosen if linear.expert is None]
    experts = len(selection.chosen) - len(chosen)
    renamed = taken_for_experts(skeleton, chosen)
    chosen = [linear for linear in chosen if linear not in renamed]
    if not chosen:
        raise SutureError(
            "targets: only experts are selected, or layers that PEFT takes for experts by their names", "add others"
        )
    notes = []
    if experts:
        notes.append(f"{experts} experts' matrices are left out: transformers keeps them in one parameter")
    if renamed:
        notes.append(
            f"{len(renamed)} layers are left out, first {renamed[0].name}: PEFT takes their names for experts'"
        )
    return chosen, notes


_ALIKE = 0.5  # cosine of a layer and its rounding; at 2 bits it is above 0.8
_ROUNDED = 2.0**-6  # relative: another dtype explains no more
_GIVE_WHAT_WAS_QUANTIZED = (
    "give as original the dense checkpoint that was quantized: write one by the same steps without rounding"
)


class _Errors:
    """What quantization took from each layer, and with calibration text the second moment of its inputs."""

    def __init__(
        self,
        quantized: Skeleton,
        original: str | Path | None,
        calibration: Mapping[str, Any] | None,
        chosen: Sequence[Linear],
        progress: Progress,
    ) -> None:
        assert original is not None
        self.checkpoint, self.skeleton = open_dense(original)
        if self.checkpoint.quantization is not None:
            raise SutureError(f"{original}: is quantized itself", "give the checkpoint that MODEL was quantized from")
        self.by_module = {linear.module: linear for linear in self.skeleton.layout.linears}
        for linear in chosen:
            other = self.by_module.get(linear.module)
            if other is None or (other.out_features, other.in_features) != (linear.out_features, linear.in_features):
                raise SutureError(f"{original}: has no {linear.module} of the same shape", "is it another model?")
        self._refuse_rescaled(quantized, original)
        self.moments = self._moments(calibration, chosen, progress) if calibration else {}

    def of(self, linear: Linear, quantized: Tensor) -> tuple[Tensor, Tensor | None]:
        """(E [out, in] float64, H [in, in] or None). Raises SutureError where the two are not one layer."""
        W = stored_weight(self.skeleton.source, self.by_module[linear.module]).double()
        Q = quantized.double()
        if float((W * Q).sum()) < _ALIKE * float(W.norm() * Q.norm()):
            raise SutureError(
                f"{linear.name}: is not this layer of {self.checkpoint.source} rounded: its rows or inputs were moved",
                _GIVE_WHAT_WAS_QUANTIZED,
            )
        return W - Q, self.moments.get(linear.module)

    def _refuse_rescaled(self, quantized: Skeleton, original: str | Path) -> None:
        """AWQ, SmoothQuant, rotate, fold_norms change what stays dense too, and then E is not what rounding took."""
        mine, theirs = quantized.layout, self.skeleton.layout
        linears = {f"{linear.module}.weight" for linear in mine.linears}
        for name in sorted((set(mine.places) & set(theirs.places)) - linears):
            a = quantized.source.read(mine.places[name].tensor).float()
            b = self.skeleton.source.read(theirs.places[name].tensor).float()
            if a.shape == b.shape and float((a - b).norm()) > _ROUNDED * float(b.norm()):
                raise SutureError(
                    f"{name} differs from that of {original}: the model was scaled or rotated before it was rounded, so the "
                    "difference of its layers is not what rounding took",
                    _GIVE_WHAT_WAS_QUANTIZED,
                )

    @torch.no_grad()
    def _moments(
        self, calibration: Mapping[str, Any], chosen: Sequence[Linear], progress: Progress
    ) -> dict[str, Tensor]:
        skeleton = self.skeleton
        rows = skeleton.source.shapes[skeleton.layout.embedding][0]
        limit = getattr(skeleton.hf_config, "max_position_embeddings", None)
        text = text_model(self.checkpoint, rows, limit)
        blocks = calibration_text(CalibrationSettings.model_validate(dict(calibration)), text).blocks
        ids, positions = blocks.batches(max(1, 2048 // blocks.ids.shape[1]))
        stream = Stream.start(skeleton, ids, positions=positions)
        wanted = {linear.module for linear in chosen}
        found: dict[str, Tensor] = {}
        for index in progress.track(range(skeleton.n_blocks), skeleton.n_blocks, "inputs"):
            skeleton.load_block(index)
            groups = [group for group in skeleton.layout.blocks[index] if group[0].expert is None]
            moments = [SecondMoment.zeros(group[0].in_features) for group in groups]
            staged_block(skeleton, index, stream, groups, lambda k, x, m=moments: m[k].add(x), lambda k: None)
            for group, moment in zip(groups, moments, strict=True):
                found |= {linear.module: moment.hessian() for linear in group if linear.module in wanted}
            skeleton.free_block(index)
        return found
