"""From quantized layers to what a checkpoint holds: which format, which tensors, which config, who loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear, ModelLayout
from .compressed_tensors import quantization_config
from .scheme import Scheme
from .targets import Selection


def check_divisible(selection: Selection, scheme: Scheme) -> None:
    """Refuse a group size that does not divide every chosen layer's inputs, before any work."""
    odd = [linear for linear in selection.chosen if not scheme.divides(linear.in_features)]
    if not odd:
        return
    sizes = sorted({linear.in_features for linear in odd})
    fitting = [g for g in (256, 128, 96, 64, 48, 32, 16) if all(x.in_features % g == 0 for x in selection.chosen)]
    raise SutureError(
        f"group_size: {scheme.group_size} does not divide the inputs ({', '.join(map(str, sizes))}) of {len(odd)} layers, "
        f"first {odd[0].name}",
        f"use {' or '.join(map(str, fitting[:3]))}, or -1 (one scale per channel), or list them under ignore"
        if fitting
        else "use -1 (one scale per channel), or list them under ignore",
    )


def check_format(layout: ModelLayout, scheme: Scheme) -> None:
    """Refuse what the format cannot express for this family."""
    if layout.family.experts is not None and not scheme.symmetric:
        raise SutureError(
            "symmetric: false is not possible for mixtures of experts: transformers' loader reads no experts' zero points",
            "use symmetric: true",
        )
    if layout.family.conv1d and not scheme.symmetric:
        raise SutureError(
            "symmetric: false is not possible for GPT-2's Conv1D layers in compressed-tensors files",
            "use symmetric: true",
        )


def config_entry(layout: ModelLayout, selection: Selection, scheme: Scheme) -> dict[str, Any]:
    """`quantization_config` for config.json."""
    conv1d_inputs = None
    if layout.family.conv1d:
        widths = {scheme.width(linear.in_features) for linear in selection.chosen}
        if len(widths) > 1:
            raise SutureError(
                "group_size: -1 with Conv1D layers of different inputs needs several block shapes",
                "use a positive group_size",
            )
        conv1d_inputs = widths.pop()
    experts = any(linear.expert is not None for linear in selection.chosen)
    dequantize = not scheme.symmetric or experts or layout.family.conv1d
    return quantization_config(scheme, _ignored(layout, selection), dequantize, conv1d_inputs)


def _ignored(layout: ModelLayout, selection: Selection) -> list[str]:
    """Linear modules left alone, by module name and, where it differs, by disk name: loaders look up either."""
    names: list[str] = [layout.family.head]
    if layout.head is not None:
        names.append(layout.head.removesuffix(".weight"))
    wrapped = "language_model." in layout.disk_stem
    if wrapped:  # the vision tower's layers are linear too
        outside = [name.removeprefix("model.").split(".")[0] for name in layout.unknown]
        names += [f"re:(model\\.)?{part}\\..*" for part in dict.fromkeys(outside) if part != "language_model"]
    experts = layout.family.experts
    for index in range(len(layout.blocks)):
        for module, disk in experts.renames if experts else ():
            names += [f"{layout.block_prefix(index)}{module}", layout.block_prefix(index) + disk]
    skipped: Sequence[Linear] = [linear for linear in layout.linears if linear.name in selection.skipped]
    for linear in skipped:
        names += [linear.module, linear.name]
        if wrapped:  # as the wrapper's modules are called, whatever the prefix on disk
            names.append(f"model.language_model.{linear.module.removeprefix(layout.family.stem)}")
    return list(dict.fromkeys(names))
