"""An adapter that heals a quantized model: trained beside it towards the original, and kept apart from it.

A quantized base cannot hold the change: merged and rounded again most of it would be lost. So the base stays as it is, the
adapter carries its fingerprint, and PEFT loads the pair.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..calibrate.crew import ALONE, Crew
from ..checkpoint.errors import SutureError
from ..checkpoint.manifest import sha256_file
from ..checkpoint.reader import Checkpoint
from ..checkpoint.staging import check_output, open_staging
from ..lora.compose import Form, base_metadata, compose
from ..lora.settings import HealSettings
from .adapter_files import Written, commit_adapter, open_dense, runtime_path, taken_for_experts
from .heal_rounding import round_in_loop, rounded_layers
from .heal_train import hook_factors
from .heal_whole import Desk, costs_of, linears_of, notes_of, same_vocabulary, train_whole
from .judge import judge, split, why_not
from .progress import Progress, Silent
from .recipe import CalibrationSettings, make_settings
from .texts import calibration_text, text_model

_BUDGET = 2 << 30  # bytes of hidden states kept in memory, and of models to be judged
_SMALL = 1 << 28  # the same, where memory is what is saved


def heal(
    model: str | Path,
    output: str | Path,
    *,
    teacher: str | Path,
    calibration: Mapping[str, Any],
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    crew: Crew = ALONE,
    **settings: Any,
) -> Written:
    """Train a LoRA for `model`, which may be quantized, towards `teacher`, which it was made from.

    `calibration`: keys of a recipe's calibration. `settings`: keys of the step `heal` with method lora. Raises SutureError
    for everything that does not fit, and when the adapter does not make the model better on the sequences held out.
    """
    progress, output = progress or Silent(), Path(output)
    chosen = make_settings(HealSettings, {"method": "lora", **settings}, "heal")
    if chosen.method != "lora":
        raise SutureError(f"heal: method: {chosen.method} changes weights; an adapter is method: lora", "leave it out")
    (checkpoint, student), (original, source) = open_dense(model), open_dense(teacher)
    chosen = chosen.beside(checkpoint.quantization is not None)
    check_output(output, checkpoint.path, overwrite, resume)
    check_output(output, original.path, overwrite, resume)
    same_vocabulary(source, student)
    linears = linears_of(student.layout, chosen)
    rounded_layers(student, chosen.rounding)
    notes = notes_of(chosen)
    unloaded = []
    if renamed := taken_for_experts(student, linears):
        unloaded = [
            f"PEFT takes the names of {len(renamed)} layers for experts', first {renamed[0].name}, and would load no "
            "factors for them: merge the adapter with lora.merge"
        ]
    limit = getattr(source.hf_config, "max_position_embeddings", None)
    text = text_model(original, source.source.shapes[source.layout.embedding][0], limit)
    told = make_settings(CalibrationSettings, calibration, "calibration")
    blocks = calibration_text(told, text, chosen.on_answers).blocks
    parts = split(blocks, chosen, "heal")
    recipe = {"command": "lora heal", **chosen.model_dump(), "calibration": told.model_dump()}
    begun = {
        "suture": __version__,
        "torch": torch.__version__,
        "recipe": hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest(),
        "model": _hash(checkpoint),
        "teacher": _hash(original),
        "text": blocks.sha256,
    }
    for note in (costs_of(student.source, student.layout, linears, 0, chosen).note, *notes, *unloaded):
        progress.say(note)
    with open_staging(output, begun, overwrite, resume) as staging:
        budget = _SMALL if chosen.value("weights") == "stored" else _BUDGET
        desk = Desk(staging, "heal", "heal", progress, budget, checkpoint.path, crew)
        trained = train_whole(student, source, parts, chosen, linears, (), desk)
        scale = chosen.value("alpha") / chosen.value("r")
        healed = open_dense(model)[1]
        factors = {module: (f.A, f.B) for module, f in trained.factors.items()}
        if chosen.rounding is None:
            hook_factors(healed, factors, scale)
        else:
            round_in_loop(healed, chosen.rounding, factors, scale)
        verdict = judge(source, student, healed, parts, progress.track, budget).describe()
        if not verdict["better"]:
            staging.discard()
            raise SutureError(f"heal: {why_not(verdict)}", "no adapter was written: use the model as it is")
        form = Form(
            base=str(checkpoint.path) if not checkpoint.revision else checkpoint.source,
            alpha=chosen.value("alpha"),
            fan_in_fan_out=student.family.conv1d,
        )
        modules = {runtime_path(student, linear): trained.factors[linear.module] for linear in linears}
        new = compose(modules, form, base_metadata(student.source, student.layout))
        receipt = {
            "compared_with": original.source,
            "text": parts.describe(),
            "held_out": verdict,
            "steps": trained.steps,
            "tokens": trained.tokens,
            "curve": trained.curve,
        }
        kept = ["to be kept beside its base: merged into a quantized one, most of the change is rounded away"]
        if chosen.rounding is not None:
            steps = f"dequantize (where the base is quantized), lora.merge, and rtn with {chosen.rounding.model_dump()}"
            kept = [f"to be merged, not kept beside its base: it was trained for what {steps} makes of the two"]
        return commit_adapter(
            staging,
            new,
            recipe,
            {"model": checkpoint.source, "original": original.source},
            {linear.name: {"r": chosen.value("r")} for linear in linears},
            (kept if checkpoint.quantization is not None or chosen.rounding is not None else []) + unloaded,
            [receipt],
        )


def _hash(checkpoint: Checkpoint) -> str:
    files = sorted((path.name, sha256_file(path)) for path in checkpoint.weight_files)
    return hashlib.sha256(json.dumps([files, checkpoint.config], sort_keys=True).encode()).hexdigest()
