"""Order of rotary rows: half-split (pair f in rows f and f + d/2) or interleaved (rows 2f and 2f + 1).

The class decides which order it reads, and most read one only; deepseek_v3 has a switch (rope_interleave). The rows of
queries and of the shared key, and their biases, move; nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.families import Family

Layout = Literal["half", "interleaved"]
KEY = "rope_interleave"


class RotarySettings(BaseModel):
    """The order of the output's rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layout: Layout = Field(description="half: pairs d/2 apart; interleaved: pairs side by side")


def check(family: Family, config: Any, settings: RotarySettings) -> None:
    """Raises SutureError for a class that reads one order only, or when the rows are in that order already."""
    if not hasattr(config, KEY) or not hasattr(config, "qk_rope_head_dim"):
        order = "no rotary rows at all" if family.rope == "none" else "half-split rows only"
        raise SutureError(
            f"rotary: transformers' {family.model_type} class reads {order}",
            "the step is for deepseek_v3, whose rope_interleave says which order it reads",
        )
    if bool(getattr(config, KEY)) == (settings.layout == "interleaved"):
        raise SutureError(f"rotary: the rows are in {settings.layout} order already", "remove the step")


def old_rows(d: int, layout: Layout) -> Tensor:
    """For rows 0..d-1 of the wanted order, the row of the other order: new = old[old_rows(d, layout)].

    >>> old_rows(6, "interleaved").tolist()  # rows of half-split pairs (0, 3), (1, 4), (2, 5) beside one another
    [0, 3, 1, 4, 2, 5]
    """
    pairs = torch.arange(d // 2)
    if layout == "half":
        return torch.cat([2 * pairs, 2 * pairs + 1])
    return torch.stack([pairs, pairs + d // 2], 1).flatten()


def _rotary_slices(config: Any) -> dict[str, list[int]]:
    """Path under a block -> where each run of rotary rows begins."""
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    q = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    heads = [head * (nope + rope) + nope for head in range(config.num_attention_heads)]
    return {f"self_attn.{q}": heads, "self_attn.kv_a_proj_with_mqa": [config.kv_lora_rank]}


def changed_names(config: Any, names: Iterable[str], prefix: str) -> list[str]:
    known = set(names)
    wanted = [f"{prefix}{path}.{leaf}" for path in _rotary_slices(config) for leaf in ("weight", "bias")]
    return [name for name in wanted if name in known]


def reordered(config: Any, parameters: Mapping[str, Tensor], prefix: str, layout: Layout) -> dict[str, Tensor]:
    """The block's parameters with rotary rows in `layout`, which they are not in yet."""
    d = config.qk_rope_head_dim
    changed: dict[str, Tensor] = {}
    for path, starts in _rotary_slices(config).items():
        rows = torch.arange(parameters[f"{prefix}{path}.weight"].shape[0])
        for start in starts:
            rows[start : start + d] = start + old_rows(d, layout)
        for name in (f"{prefix}{path}.weight", f"{prefix}{path}.bias"):
            if name in parameters:
                changed[name] = parameters[name][rows.to(parameters[name].device)]
    return changed
