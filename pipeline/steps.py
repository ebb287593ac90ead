"""The table of steps: a recipe's names, their settings and what carries them out."""

from __future__ import annotations

from dataclasses import replace

from ..lora.settings import HealSettings, MergeSettings
from ..quant.settings import (
    AllocateSettings,
    AWQSettings,
    DequantizeSettings,
    FourBitSettings,
    GGUFSettings,
    GPTQSettings,
    Int8Settings,
    LearnSettings,
    RTNSettings,
    SmoothQuantSettings,
)
from ..surgery.cast import CastSettings, ReshardSettings
from ..surgery.fold_norms import FoldNormsSettings
from ..surgery.fuse import FuseSettings, UnfuseSettings
from ..surgery.gqa import GQASettings
from ..surgery.layers import LayersSettings
from ..surgery.mla import MLASettings
from ..surgery.permute import PermuteSettings
from ..surgery.rescale_residual import RescaleResidualSettings
from ..surgery.retie import RetieSettings
from ..surgery.ridge import RefitSettings
from ..surgery.rope_scaling import RopeScalingSettings
from ..surgery.rotary import RotarySettings
from ..surgery.rotate import RotateSettings
from ..surgery.spectra import SpectraSettings
from ..surgery.untie import UntieSettings
from ..surgery.vocabulary import VocabularySettings
from . import (
    allocate,
    cast,
    dequantize,
    fuse,
    gguf,
    gqa,
    heal,
    layers,
    lora_merge,
    mla,
    quantize,
    refit,
    retie,
    rewrite,
    rope_scaling,
    rotate,
    scale,
    spectra,
    untie,
    vocabulary,
)
from . import bitsandbytes as bnb
from .heal_rounding import check_next
from .step import StepKind, always, never

_GPTQ = StepKind(
    GPTQSettings,
    "GPTQ",
    always,
    True,
    quantize.prepare,
    quantize.run,
    quantize.rehearsal,
    decide=quantize.decide,
)

STEPS: dict[str, StepKind] = {
    "mla": StepKind(
        MLASettings,
        "latent attention, as a stock deepseek_v3",
        mla.needs_text,
        False,
        mla.prepare,
        mla.run,
        rehearsal=mla.rehearsal,
    ),
    "untie": StepKind(UntieSettings, "give a tied head its own copy", never, False, untie.prepare, untie.run),
    "gqa": StepKind(GQASettings, "fewer key-value heads", gqa.needs_text, False, gqa.prepare, gqa.run, gqa.rehearsal),
    "refit": StepKind(
        RefitSettings, "heal by ridge regression", always, False, refit.prepare, refit.run, refit.rehearsal
    ),
    "heal": StepKind(
        HealSettings,
        "train towards the original, kept only when it is better",
        always,
        False,
        heal.prepare,
        heal.run,
        heal.rehearsal,
        check_text=heal.check_text,
        check_next=check_next,
        on_answers=lambda settings: settings.on_answers,
    ),
    "rtn": StepKind(RTNSettings, "round to nearest", never, True, quantize.prepare, quantize.run, quantize.rehearsal),
    "gptq": _GPTQ,
    "learn": replace(_GPTQ, settings=LearnSettings, summary="GPTQ with trained rounding"),
    "allocate": StepKind(
        AllocateSettings,
        "widths per layer under a budget, then GPTQ",
        always,
        True,
        allocate.prepare,
        allocate.run,
        allocate.rehearsal,
        decide=quantize.decide,
        settle=allocate.settle,
    ),
    "rotate": StepKind(RotateSettings, "rotate the residual stream, exactly", never, False, rotate.prepare, rotate.run),
    "awq": StepKind(AWQSettings, "AWQ", always, True, scale.prepare, scale.run, scale.rehearsal),
    "smoothquant": StepKind(
        SmoothQuantSettings,
        "8-bit weights and inputs",
        scale.needs_text,
        True,
        scale.prepare,
        scale.run,
        scale.rehearsal,
    ),
    "nf4": StepKind(FourBitSettings, "bitsandbytes' NF4", never, True, bnb.prepare_nf4, bnb.run_nf4, bnb.rehearsal_nf4),
    "fp4": StepKind(FourBitSettings, "bitsandbytes' FP4", never, True, bnb.prepare_fp4, bnb.run_fp4, bnb.rehearsal_fp4),
    "int8": StepKind(
        Int8Settings, "bitsandbytes' LLM.int8()", never, True, bnb.prepare_int8, bnb.run_int8, bnb.rehearsal_int8
    ),
    "dequantize": StepKind(
        DequantizeSettings,
        "back to plain weights",
        never,
        False,
        dequantize.prepare,
        dequantize.run,
        reads_quantized=True,
    ),
    "gguf": StepKind(
        GGUFSettings, "a GGUF file beside the checkpoint", never, True, gguf.prepare, gguf.run, reads_quantized=True
    ),
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
    "retie": StepKind(RetieSettings, "drop a head that equals the embedding", never, False, retie.prepare, retie.run),
    "fold_norms": StepKind(
        FoldNormsSettings,
        "fold the weights of norms into what reads them",
        never,
        False,
        rewrite.prepare_fold_norms,
        rewrite.run_fold_norms,
    ),
    "permute": StepKind(
        PermuteSettings,
        "put heads and neurons into another order",
        rewrite.permute_needs_text,
        False,
        rewrite.prepare_permute,
        rewrite.run_permute,
        rehearsal=rewrite.rehearse_permute,
    ),
    "cast": StepKind(CastSettings, "store weights in another dtype", never, False, cast.prepare, cast.run),
    "reshard": StepKind(
        ReshardSettings, "write weight files of another size", never, False, cast.prepare_reshard, cast.run_reshard
    ),
    "layers": StepKind(
        LayersSettings,
        "drop, repeat or reorder layers",
        layers.needs_text,
        False,
        layers.prepare,
        layers.run,
        settle=layers.settle,
        rehearsal=layers.rehearsal,
    ),
    "vocabulary": StepKind(
        VocabularySettings,
        "trim, extend or pad the vocabulary, tokenizer included",
        never,
        False,
        vocabulary.prepare,
        vocabulary.run,
        paths=("trim",),
    ),
    "fuse": StepKind(
        FuseSettings, "join q, k, v and gate, up: Llama or Mistral to Phi-3", never, False, fuse.prepare_fuse, fuse.run
    ),
    "unfuse": StepKind(
        UnfuseSettings,
        "take q, k, v and gate, up apart: Phi-3 to Llama or Mistral",
        never,
        False,
        fuse.prepare_unfuse,
        fuse.run,
    ),
    "rotary": StepKind(
        RotarySettings,
        "put rotary rows into half-split or interleaved order",
        never,
        False,
        rewrite.prepare_rotary,
        rewrite.run_rotary,
    ),
    "rescale_residual": StepKind(
        RescaleResidualSettings,
        "scale the residual stream, and with it the norms' epsilon",
        never,
        False,
        rewrite.prepare_rescale_residual,
        rewrite.run_rescale_residual,
    ),
    "rope_scaling": StepKind(
        RopeScalingSettings,
        "stretch rotary positions to a longer context",
        never,
        False,
        rope_scaling.prepare,
        rope_scaling.run,
    ),
    "spectra": StepKind(
        SpectraSettings,
        "report how low-rank each matrix is",
        spectra.needs_text,
        False,
        spectra.prepare,
        spectra.run,
        rehearsal=spectra.rehearsal,
    ),
}
