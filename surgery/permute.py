"""Put attention heads and MLP neurons into another order: the model computes the same.

A head's rows of W_q, W_k, W_v (and their biases) and its columns of W_o move together. Query heads that share a
key-value head form a group: whole groups move, and query heads within their group, never across (a flat permutation of
a GQA model's heads changes its function). A neuron is its rows of gate and up and its column of down. Nothing but the
order of sums changes.

Where things lie in fused matrices: `Part` describes one role's rows in a tensor, heads `step` apart; GPT-NeoX's
per-head (q, k, v) is a step of 3d, Phi-3's and GPT-2's blocks are an offset, and in Falcon the query heads of a group lie
together, with a larger step from group to group.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..checkpoint.families import Family
from .heads import head_counts

Order = Literal["keep", "random", "importance"]


class PermuteSettings(BaseModel):
    """Which order heads and neurons are put into."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    heads: Order = Field("importance", description="importance: largest contribution to the block's output first")
    neurons: Order = Field("importance", description="importance: largest mean activation times column norm first")
    seed: int = Field(0, ge=0, description="of random orders")


@dataclass(frozen=True)
class Part:
    """One role in a matrix: unit i (a head or neuron) is `size` rows (or columns) from `at(i)` on."""

    path: str  # of the linear layer, under the block
    side: Literal["out", "in"]
    units: str  # which order applies: "q", "kv", "mlp" or one expert's path
    offset: int
    step: int
    size: int
    run: int = 1  # units that lie one behind the other before the next step

    def at(self, unit: int) -> int:
        return self.offset + unit // self.run * self.step + unit % self.run * self.size


def attention_parts(family: Family, config: Any) -> tuple[Part, ...]:
    """Where the heads of every block lie. `config`: transformers' config of the text model."""
    counts = head_counts(config)
    heads, kv, d = counts.query, counts.key_value, counts.dim
    if hasattr(config, "kv_lora_rank"):  # multi-head latent attention
        q_size, v_size = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        q = "self_attn.q_proj" if config.q_lora_rank is None else "self_attn.q_b_proj"
        both = config.qk_nope_head_dim + v_size
        return (
            Part(q, "out", "q", 0, q_size, q_size),
            Part("self_attn.kv_b_proj", "out", "kv", 0, both, both),
            Part(family.attention_out, "in", "q", 0, v_size, v_size),
        )
    parts = [Part(family.attention_out, "in", "q", 0, d, d)]
    fused = next((fused for fused in family.fused if "q" in fused.parts), None)
    if fused is None:
        q, k, v = (path for path in family.groups[0])
        parts += [Part(path, "out", units, 0, d, d) for path, units in ((q, "q"), (k, "kv"), (v, "kv"))]
    elif fused.layout == "per group":
        queries = heads // kv
        step = (queries + 2) * d
        parts.append(Part(fused.linear, "out", "q", 0, step, d, run=queries))
        parts += [Part(fused.linear, "out", "kv", (queries + i) * d, step, d) for i in range(2)]
    else:
        offsets = (0, heads * d, (heads + kv) * d)
        parts += [
            Part(fused.linear, "out", units, offset, d, d)
            for offset, units in zip(offsets, ("q", "kv", "kv"), strict=True)
        ]
    return tuple(parts)


def neuron_parts(family: Family, names: Iterable[str], prefix: str, sizes: Mapping[str, int]) -> tuple[Part, ...]:
    """Where the neurons of the block lie whose parameters (`names`) begin with `prefix`.

    `sizes`: path under the block -> inputs of that linear layer, for those that write the MLP's output.
    """
    known = set(names)
    parts: list[Part] = []
    for out in sizes:
        if out == family.mlp_out:
            fused = next((fused for fused in family.fused if "gate" in fused.parts), None)
            n = sizes[out]
            offsets = (0, n) if fused is not None else (0,)
            parts += [Part(path, "out", out, offset, 1, 1) for path in family.mlp_in for offset in offsets]
        else:  # an expert
            expert = out.removesuffix("down_proj")
            parts += [Part(f"{expert}{name}", "out", out, 0, 1, 1) for name in ("gate_proj", "up_proj")]
        parts.append(Part(out, "in", out, 0, 1, 1))
    return tuple(part for part in parts if f"{prefix}{part.path}.weight" in known)


def group_order(groups: Sequence[int], within: Sequence[Sequence[int]]) -> list[int]:
    """Order of query heads: group `groups[j]` comes j-th, its heads in the order `within` has for it."""
    size = len(within[0])
    return [group * size + head for group in groups for head in within[group]]


def permute(
    parameters: Mapping[str, Tensor],
    prefix: str,
    parts: Iterable[Part],
    orders: Mapping[str, Sequence[int]],
    conv1d: bool,
) -> dict[str, Tensor]:
    """The permuted weights and biases. `orders[units][j]`: the old number of the unit that comes j-th."""
    index: dict[tuple[str, int], Tensor] = {}
    for part in parts:
        order = orders.get(part.units)
        if order is None:
            continue
        axis = int((part.side == "in") != conv1d)
        name = f"{prefix}{part.path}.weight"
        rows = index.setdefault((name, axis), torch.arange(parameters[name].shape[axis]))
        for new, old in enumerate(order):
            rows[part.at(new) : part.at(new) + part.size] = part.at(old) + torch.arange(part.size)
    changed: dict[str, Tensor] = {}
    for (name, axis), rows in index.items():
        changed[name] = changed.get(name, parameters[name]).index_select(axis, rows.to(parameters[name].device))
        bias = name.removesuffix("weight") + "bias"
        if axis == int(conv1d) and bias in parameters:
            changed[bias] = parameters[bias][rows.to(parameters[bias].device)]
    return changed


def contributions(x: Tensor, weight: Tensor, units: int) -> Tensor:
    """E ||W_u x_u||² of each of `units` equal slices of the inputs: x [tokens, in], weight [out, in] -> [units]."""
    size = x.shape[1] // units
    slices = x.reshape(x.shape[0], units, size)
    maps = weight.reshape(weight.shape[0], units, size)
    return torch.stack([(slices[:, u] @ maps[:, u].T).square().sum() for u in range(units)]) / max(x.shape[0], 1)


def neuron_importance(mean_abs: Tensor, down: Tensor) -> Tensor:
    """E|a_j| · ||W_down[:, j]||, [neurons]; down [hidden, neurons]."""
    return mean_abs * down.norm(dim=0)


def by_importance(values: Tensor) -> list[int]:
    """Largest first, equal ones as they were."""
    return torch.sort(values, descending=True, stable=True).indices.tolist()


def shuffled(n: int, seed: int, *where: int) -> list[int]:
    """A random order of n units, of its own for each place in the model."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, *where)).encode()))
    return torch.randperm(n, generator=generator).tolist()
