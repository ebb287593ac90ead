"""The table of steps: a recipe's names, their settings and what carries them out."""

from __future__ import annotations

from ..lora.settings import MergeSettings
from ..quant.settings import GPTQSettings, RTNSettings
from ..surgery.untie import UntieSettings
from . import lora_merge, quantize, untie
from .step import StepKind, always, never

STEPS: dict[str, StepKind] = {
    "untie": StepKind(UntieSettings, "give a tied head its own copy", never, False, untie.prepare, untie.run),
    "rtn": StepKind(RTNSettings, "round to nearest", never, True, quantize.prepare, quantize.run, quantize.rehearsal),
    "gptq": StepKind(GPTQSettings, "GPTQ", always, True, quantize.prepare, quantize.run, quantize.rehearsal),
    "lora.merge": StepKind(
        MergeSettings,
        "merge LoRA adapters",
        never,
        False,
        lora_merge.prepare,
        lora_merge.run,
        lora_merge.rehearsal,
        paths=("adapter",),
    ),
}
