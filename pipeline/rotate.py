"""The step `rotate`: every reader and writer of the residual stream, embedding and head, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calibrate.replay import Stream
from ..calibrate.skeleton import Skeleton, cut, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import ModelLayout
from ..checkpoint.manifest import Account
from ..checkpoint.source import TensorSource
from ..checkpoint.writer import TensorSpec
from ..quant.scheme import STORAGE
from ..surgery.rotate import RotateSettings, rotate_heads, rotate_reader, rotate_writer, rotation, unrotate_heads
from ..surgery.untie import head_to_add, untied_config
from .step import Prepared, StepResult, StepRun
from .walk import CONVERTING, convert_blocks

# Last component of a linear's role -> which of the block's two norms it reads.
_ATTENTION, _MLP = 0, 1
_READS: dict[str, int] = {
    "q_proj": _ATTENTION,
    "k_proj": _ATTENTION,
    "v_proj": _ATTENTION,
    "qkv_proj": _ATTENTION,
    "q_a_proj": _ATTENTION,
    "kv_a_proj_with_mqa": _ATTENTION,
    "gate_proj": _MLP,
    "up_proj": _MLP,
    "gate_up_proj": _MLP,
}
_WRITES = ("o_proj", "down_proj")
_INSIDE = ("q_b_proj", "kv_b_proj")  # between latents of the attention


@dataclass(frozen=True)
class Values:
    """Where a block's values are made: rows of each key-value head, and the linear that reads them."""

    role: str
    starts: list[int]
    size: int


@dataclass(frozen=True)
class RotatePlan(Prepared):
    layout: ModelLayout
    head: str
    values: Values | None


def prepare(source: TensorSource, settings: RotateSettings) -> RotatePlan:
    """Raises SutureError for families whose function a rotation would change, and why."""
    skeleton = open_skeleton(source)
    layout = skeleton.layout
    _refuse(source, layout)
    values = _values(skeleton) if settings.heads else None
    changed = {name for index in range(len(layout.blocks)) for name in _changed(layout, index, values)}
    head = layout.head or head_to_add(layout)
    norm = layout.places[f"{layout.family.stem}{layout.family.final_norm}.weight"].tensor
    changed |= {layout.embedding, norm, head}
    for name in changed - {head}:
        if source.dtypes[name] not in STORAGE:
            raise SutureError(
                f"{source.source}: {name} is {source.dtypes[name]}; only {', '.join(STORAGE)} tensors can be rotated",
                "give the unquantized checkpoint",
            )
    how = f"rotated (seed {settings.seed})"
    accounts: dict[str, Account] = {}
    specs: list[TensorSpec] = []
    for name, shape in source.shapes.items():
        if name in layout.stale:
            accounts[name] = Account("dropped", reason=layout.stale[name])
            continue
        if name == layout.head_duplicate:
            accounts[name] = Account("dropped", reason="equal to the embedding, which the new head is made of")
            continue
        specs.append(TensorSpec(name, source.dtypes[name], shape))
        accounts[name] = Account("changed", (name,), how) if name in changed else Account("copied", (name,))
    if layout.head is None:
        specs.append(TensorSpec(head, source.dtypes[layout.embedding], source.shapes[layout.embedding]))
        accounts[layout.embedding] = Account("changed", (layout.embedding, head), f"{how} and untied")
    return RotatePlan(
        specs=tuple(specs),
        config=source.config if layout.head else untied_config(source.config),
        accounts=accounts,
        notes=(f"{head} added: the tied embedding's copy, with the final norm folded in",)
        if layout.head is None
        else (),
        n_blocks=len(layout.blocks),
        working_blocks=CONVERTING,
        layout=layout,
        head=head,
        values=values,
    )


def _refuse(source: TensorSource, layout: ModelLayout) -> None:
    family = layout.family
    if family.norm_kind == "layernorm":
        raise SutureError(
            f"rotate: {family.model_type} normalizes with LayerNorm, whose mean and bias a rotation would change",
            "rotate is for families with RMSNorm",
        )
    if len(family.norms) > 2:
        raise SutureError(
            f"rotate: {family.model_type} normalizes what attention and MLP put out before it is added: that norm's "
            "weights stand between the layers and the residual stream, and cannot be folded into either",
            "leave the step out for this family",
        )
    if "language_model." in layout.disk_stem:
        raise SutureError(
            f"rotate: {source.source} is a vision model: images enter the residual stream by a way that is not rotated",
            "rotate text models only",
        )
    for name in layout.block_tensors(0):
        local = name.removeprefix(layout.block_prefix(0))
        role, _, leaf = local.rpartition(".")
        end = role.rsplit(".", 1)[-1]
        known = (
            end in (*_READS, *_WRITES, *_INSIDE)
            or role in (*family.norms, *family.head_norms)
            or _router(layout, local)
        )
        if not known or (role in family.norms and leaf != "weight"):
            raise SutureError(f"rotate: {name} has no known place in the block", "leave the step out for this model")


def _router(layout: ModelLayout, local: str) -> bool:
    return layout.family.experts is not None and local == "mlp.gate.weight"


def _changed(layout: ModelLayout, index: int, values: Values | None) -> set[str]:
    """Disk names of a block's tensors that a rotation changes."""
    prefix, changed = layout.block_prefix(index), set[str]()
    for name, place in layout.block_tensors(index).items():
        role, _, leaf = name.removeprefix(prefix).rpartition(".")
        end = role.rsplit(".", 1)[-1]
        reads = (end in _READS and leaf == "weight") or _router(layout, f"{role}.{leaf}")
        if reads or end in _WRITES or role in layout.family.norms or (values is not None and role == values.role):
            changed.add(place.tensor)
    return changed


def _values(skeleton: Skeleton) -> Values:
    """Raises SutureError for attention whose values are not found by name."""
    config = skeleton.hf_config
    heads = int(config.num_attention_heads)
    if skeleton.family.model_type == "deepseek_v3":
        nope, size = int(config.qk_nope_head_dim), int(config.v_head_dim)
        return Values("self_attn.kv_b_proj", [h * (nope + size) + nope for h in range(heads)], size)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kv_heads = int(config.num_key_value_heads)
    fused = bool(skeleton.family.fused)
    first = (heads + kv_heads) * size if fused else 0  # rows of q and k
    role = "self_attn.qkv_proj" if fused else "self_attn.v_proj"
    return Values(role, [first + h * size for h in range(kv_heads)], size)


@torch.no_grad()
def run(work: StepRun, plan: RotatePlan, settings: RotateSettings) -> StepResult:
    """Rotate block by block; the float32 logits of the probe must stay what they were."""
    layout, source = plan.layout, work.checkpoint
    hidden = source.shapes[layout.embedding][1]
    R = rotation(hidden, settings.seed)
    S = rotation(plan.values.size, settings.seed + 1) if plan.values else None

    def convert(skeleton: Skeleton, index: int, stream: Stream | None) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        return _rotated_block(skeleton, index, plan, R, S), {}

    outside = _outside(source, plan, R)
    return convert_blocks(work, plan, layout, convert, calibrated=False, outside=outside, exact=True)


def _outside(source: TensorSource, plan: RotatePlan, R: Tensor) -> dict[str, Tensor]:
    layout = plan.layout
    norm = layout.places[f"{layout.family.stem}{layout.family.final_norm}.weight"].tensor
    embedding = source.read(layout.embedding)
    head = embedding if layout.head is None else source.read(layout.head)
    gamma = _multiplier(source.read(norm), layout)
    return {
        layout.embedding: (embedding.double() @ R).float(),
        norm: _unit(gamma, layout),
        plan.head: rotate_reader(head, gamma, R).float(),
    }


def _multiplier(norm: Tensor, layout: ModelLayout) -> Tensor:
    """What the model multiplies by, float64."""
    return norm.double() + (1.0 if layout.family.norm_kind == "1+w" else 0.0)


def _unit(gamma: Tensor, layout: ModelLayout) -> Tensor:
    """The stored weights of a norm that multiplies by one."""
    return torch.full(gamma.shape, 0.0 if layout.family.norm_kind == "1+w" else 1.0)


def _rotated_block(skeleton: Skeleton, index: int, plan: RotatePlan, R: Tensor, S: Tensor | None) -> dict[str, Tensor]:
    """The block's changed tensors, float32 by disk name; experts fused on disk are put together again."""
    layout, source, family = skeleton.layout, skeleton.source, skeleton.family
    prefix, places = layout.block_prefix(index), layout.block_tensors(index)
    gammas = [_multiplier(source.read(places[f"{prefix}{norm}.weight"].tensor), layout) for norm in family.norms]
    changed = _changed(layout, index, plan.values)
    made: dict[str, Tensor] = {}
    for name, place in places.items():
        role, _, leaf = name.removeprefix(prefix).rpartition(".")
        if place.tensor not in changed:
            continue
        if place.tensor not in made:
            made[place.tensor] = source.read(place.tensor).double()
        part = cut(made[place.tensor], place)
        part.copy_(_rotated(part, role, leaf, family.norms, gammas, plan, R, S))
    return {name: tensor.float() for name, tensor in made.items()}


def _rotated(
    tensor: Tensor,
    role: str,
    leaf: str,
    norms: tuple[str, ...],
    gammas: list[Tensor],
    plan: RotatePlan,
    R: Tensor,
    S: Tensor | None,
) -> Tensor:
    """One parameter of a block, float64."""
    end = role.rsplit(".", 1)[-1]
    if role in norms:
        return _unit(tensor, plan.layout).double()
    if role == "mlp.gate":
        return rotate_reader(tensor, gammas[_MLP], R)
    if end in _READS and leaf == "weight":
        tensor = rotate_reader(tensor, gammas[_READS[end]], R)
    if end in _WRITES:
        tensor = rotate_writer(tensor, R)
    if S is not None and plan.values is not None:
        if role == plan.values.role:
            return rotate_heads(tensor, S, plan.values.starts)
        if end == "o_proj" and leaf == "weight":
            return unrotate_heads(tensor, S)
    return tensor
