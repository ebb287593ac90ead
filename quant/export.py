"""From quantized layers to what a checkpoint holds: which format, which tensors, which config, who loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear, ModelLayout
from .compressed_tensors import ConfigGroup, quantization_config
from .scheme import Scheme
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
    if layout.family.conv1d:
        raise SutureError(
            "rules: Conv1D layers are dequantized when transformers loads them, which reads one format per model",
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
    dequantize = asymmetric or experts or layout.family.conv1d
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
