"""From quantized layers to what a checkpoint holds: which format, which tensors, which config, who loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear, ModelLayout
from . import qweight
from .compressed_tensors import ConfigGroup, Spec, quantization_config, tensor_specs, tensors
from .scheme import Quantized, Scheme
from .targets import Selection


@dataclass(frozen=True)
class SchemeGroup:
    """Layers of one format."""

    scheme: Scheme
    linears: tuple[Linear, ...]


def scheme_groups(selection: Selection, schemes: Mapping[str, Scheme]) -> tuple[SchemeGroup, ...]:
    """The chosen layers by format, in the order in which formats first appear."""
    by_scheme: dict[Scheme, list[Linear]] = {}
    for linear in selection.chosen:
        by_scheme.setdefault(schemes[linear.name], []).append(linear)
    return tuple(SchemeGroup(scheme, tuple(linears)) for scheme, linears in by_scheme.items())


def check_divisible(groups: Sequence[SchemeGroup]) -> None:
    """Refuse a group size that does not divide the inputs of every layer it is for, before any work."""
    for group in groups:
        odd = [linear for linear in group.linears if not group.scheme.divides(linear.in_features)]
        if not odd:
            continue
        sizes = sorted({linear.in_features for linear in odd})
        fitting = [g for g in (256, 128, 96, 64, 48, 32, 16) if all(x.in_features % g == 0 for x in group.linears)]
        raise SutureError(
            f"group_size: {group.scheme.group_size} does not divide the inputs ({', '.join(map(str, sizes))}) of {len(odd)} "
            f"layers, first {odd[0].name}",
            f"use {' or '.join(map(str, fitting[:3]))}, or -1 (one scale per channel), or list them under ignore"
            if fitting
            else "use -1 (one scale per channel), or list them under ignore",
        )


def check_format(layout: ModelLayout, groups: Sequence[SchemeGroup]) -> None:
    """Refuse what the format cannot express for this family, or its loaders cannot read."""
    asymmetric = any(not group.scheme.symmetric for group in groups)
    if layout.family.experts is not None and asymmetric:
        raise SutureError(
            "symmetric: false is not possible for mixtures of experts: transformers' loader reads no experts' zero points",
            "use symmetric: true",
        )
    if layout.family.conv1d and asymmetric:
        raise SutureError(
            "symmetric: false is not possible for GPT-2's Conv1D layers in compressed-tensors files",
            "use symmetric: true",
        )
    if len(groups) == 1:
        return
    if layout.family.conv1d or layout.family.own_linear:
        what = layout.family.own_linear or "Conv1D"
        raise SutureError(
            f"rules: {what} layers are dequantized when transformers loads them, which reads one format per model",
            "give all layers one format",
        )
    if asymmetric:
        raise SutureError(
            "rules: several formats with symmetric: false: transformers dequantizes zero points when it loads them, and "
            "reads only one format then",
            "use symmetric: true in all of them, or one format",
        )
    of_experts = {group.scheme for group in groups for linear in group.linears if linear.expert is not None}
    others = {group.scheme for group in groups for linear in group.linears if linear.expert is None}
    if of_experts and (len(of_experts) > 1 or len(others) > 1):
        raise SutureError(
            "rules: a mixture of experts is dequantized when transformers loads it, which reads one format for all experts "
            "and one for all other layers",
            "give all experts one format and all other layers one format",
        )


def check_replaceable(layout: ModelLayout, wanted: str) -> None:
    """Refuse formats that put a module of their own in each linear layer's place, where transformers leaves the layer."""
    if layout.family.own_linear:
        raise SutureError(
            f"{wanted}: not possible for {layout.family.model_type}: loaders replace nn.Linear, and its layers are "
            f"transformers' {layout.family.own_linear}, which they pass by",
            "put `- unfuse: {}` before it, which makes it a phi model, or use gptq, awq or rtn with format: pack-quantized",
        )


def config_entry(layout: ModelLayout, selection: Selection, groups: Sequence[SchemeGroup]) -> dict[str, Any]:
    """`quantization_config` for config.json: one config group per format."""
    conv1d_inputs = None
    if layout.family.conv1d:
        widths = {group.scheme.width(linear.in_features) for group in groups for linear in group.linears}
        if len(widths) > 1:
            raise SutureError(
                "group_size: -1 with Conv1D layers of different inputs needs several block shapes",
                "use a positive group_size",
            )
        conv1d_inputs = widths.pop()
    experts = any(linear.expert is not None for linear in selection.chosen)
    asymmetric = any(not group.scheme.symmetric for group in groups)
    dequantize = asymmetric or experts or layout.family.conv1d or bool(layout.family.own_linear)
    entries = [ConfigGroup(group.scheme, _targets(layout, group, len(groups)), conv1d_inputs) for group in groups]
    return quantization_config(entries, _ignored(layout, selection), dequantize)


def _targets(layout: ModelLayout, group: SchemeGroup, of: int) -> list[str]:
    """`Linear` for a model of one format. Else every layer by name, so that no loader's order of patterns matters;
    experts by a pattern that says so, by which transformers tells their group from the others'."""
    if of == 1:
        return ["Linear"]
    if group.linears[0].expert is not None:
        return [r"re:.*\.experts\..*"]
    return list(dict.fromkeys(name for linear in group.linears for name in _names(layout, linear)))


def _names(layout: ModelLayout, linear: Linear) -> list[str]:
    """What loaders may call a layer: by module, on disk and, in a vision wrapper, as the wrapper's module."""
    names = [linear.module, linear.name]
    if "language_model." in layout.disk_stem:
        names.append(f"model.language_model.{linear.module.removeprefix(layout.family.stem)}")
    return names


def _ignored(layout: ModelLayout, selection: Selection) -> list[str]:
    """Linear modules left alone, by module name and, where it differs, by disk name: loaders look up either."""
    names: list[str] = [layout.family.head]
    if layout.head is not None:
        names.append(layout.head.removesuffix(".weight"))
    if "language_model." in layout.disk_stem:  # the vision tower's layers are linear too
        outside = [name.removeprefix("model.").split(".")[0] for name in layout.unknown]
        names += [f"re:(model\\.)?{part}\\..*" for part in dict.fromkeys(outside) if part != "language_model"]
    experts = layout.family.experts
    for index in range(len(layout.blocks)):
        for module, disk in experts.renames if experts else ():
            names += [f"{layout.block_prefix(index)}{module}", layout.block_prefix(index) + disk]
    for linear in layout.linears:
        if linear.name in selection.skipped:
            names += _names(layout, linear)
    return list(dict.fromkeys(names))


# ---- GPTQ and AWQ


def _check_one_scheme(name: str, layout: ModelLayout, groups: Sequence[SchemeGroup]) -> Scheme:
    """What the formats of GPTQ and AWQ have in common."""
    check_replaceable(layout, f"format {name}")
    if len(groups) > 1:
        raise SutureError(f"rules: format {name} holds one bit width and group size", "use format: pack-quantized")
    odd = layout.family.conv1d or layout.family.experts is not None or "language_model." in layout.disk_stem
    if odd:
        what = "Conv1D layers" if layout.family.conv1d else "experts" if layout.family.experts else "a vision wrapper"
        raise SutureError(f"format: {name} with {what} is not supported", "use format: pack-quantized")
    return groups[0].scheme


def _check_whole_words(name: str, groups: Sequence[SchemeGroup], per_word: int, inputs: bool) -> None:
    for linear in groups[0].linears:
        sizes = [("outputs", linear.out_features), *([("inputs", linear.in_features)] if inputs else [])]
        for what, size in sizes:
            if size % per_word:
                raise SutureError(
                    f"format: {name} packs {per_word} codes at a time, and {linear.name} has {size} {what}",
                    "list it under ignore, or use format: pack-quantized",
                )


def _check_gptq(layout: ModelLayout, groups: Sequence[SchemeGroup]) -> None:
    scheme = _check_one_scheme("gptq", layout, groups)
    if scheme.bits not in (2, 3, 4, 8):
        raise SutureError(f"format: gptq has 2, 3, 4 or 8 bits, not {scheme.bits}", "use format: pack-quantized")
    if not scheme.symmetric:
        raise SutureError(
            "format: gptq stores zero points less one, and loaders differ in how they read one of 0",
            "use symmetric: true, or format: awq",
        )
    _check_whole_words("gptq", groups, 32 if scheme.bits == 3 else 32 // scheme.bits, inputs=True)


def _check_awq(layout: ModelLayout, groups: Sequence[SchemeGroup]) -> None:
    scheme = _check_one_scheme("awq", layout, groups)
    if scheme.bits != qweight.AWQ_BITS:
        raise SutureError(f"format: awq has 4 bits, not {scheme.bits}", "use format: pack-quantized")
    _check_whole_words("awq", groups, 8, inputs=False)


def _skipped(layout: ModelLayout, selection: Selection) -> list[str]:
    return [linear.name for linear in layout.linears if linear.name in selection.skipped]


def _gptq_entry(layout: ModelLayout, selection: Selection, groups: Sequence[SchemeGroup]) -> dict[str, Any]:
    return qweight.gptq_config(groups[0].scheme, _skipped(layout, selection))


def _awq_entry(layout: ModelLayout, selection: Selection, groups: Sequence[SchemeGroup]) -> dict[str, Any]:
    return qweight.awq_config(groups[0].scheme, [layout.family.head, *_skipped(layout, selection)])


@dataclass(frozen=True)
class Format:
    """One way to put quantized layers on disk."""

    check: Callable[[ModelLayout, Sequence[SchemeGroup]], None]  # SutureError for what it cannot express
    specs: Callable[[Linear, Scheme, str], list[Spec]]  # (layer, scheme, dtype of scales) -> what `tensors` returns
    tensors: Callable[[Linear, Quantized], dict[str, Tensor]]
    config: Callable[[ModelLayout, Selection, Sequence[SchemeGroup]], dict[str, Any]]  # `quantization_config`
    scale_dtype: str | None = None  # safetensors code; None: the weights' own
    not_stock: str = ""  # why stock transformers is not asked to load it


_KERNELS = "transformers needs gptqmodel's kernels for it"
FORMATS: dict[str, Format] = {
    "pack-quantized": Format(
        check_format,
        tensor_specs,
        lambda linear, quantized: tensors(linear.name, quantized, linear.conv1d),
        config_entry,
    ),
    "gptq": Format(
        _check_gptq,
        qweight.gptq_specs,
        lambda linear, quantized: qweight.gptq_tensors(linear.name, quantized),
        _gptq_entry,
        "F16",
        _KERNELS,
    ),
    "awq": Format(
        _check_awq,
        qweight.awq_specs,
        lambda linear, quantized: qweight.awq_tensors(linear.name, quantized),
        _awq_entry,
        "F16",
        _KERNELS,
    ),
}


# ---- tensor parallelism

_ROW_PARALLEL = (
    "o_proj",
    "down_proj",
    "c_proj",
    "dense",
    "dense_4h_to_h",
)  # split along inputs; all others along outputs
RANKS = (2, 4, 8)


def ranks_that_divide(linear: Linear, scheme: Scheme, form: str) -> list[int]:
    """Of 2, 4 and 8 devices, those over which a server can split the layer: into whole groups of inputs, and whole words
    along whichever side is packed."""
    by_rows = linear.role.rsplit(".", 1)[-1] in _ROW_PARALLEL
    size = linear.in_features if by_rows else linear.out_features
    unit = scheme.width(linear.in_features) if by_rows and scheme.group_size != -1 else 1
    words = by_rows or form != "pack-quantized" or not scheme.symmetric  # zero points are packed along outputs
    parts = {n: size // n for n in RANKS if size % n == 0}
    return [n for n, part in parts.items() if part % unit == 0 and (not words or part * scheme.bits % 32 == 0)]


def undivided(groups: Sequence[SchemeGroup], form: str) -> list[str]:
    """A sentence for each number of devices over which some layers cannot be split."""
    notes = []
    for n in RANKS:
        odd = [x.name for group in groups for x in group.linears if n not in ranks_that_divide(x, group.scheme, form)]
        if odd:
            notes.append(f"tensor parallelism over {n} devices: {len(odd)} layers cannot be split, first {odd[0]}")
    return notes
