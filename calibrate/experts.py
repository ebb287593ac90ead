"""A mixture of experts as separate linear layers.

transformers keeps all experts in two 3-D parameters, which no hook on a linear layer can see. This module computes the
same function with one `nn.Linear` per projection and expert, and passes through two stages at which every expert's
inputs are known: what reaches gate and up, and what reaches down.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Stage(nn.Module):
    """Does nothing; a hook on it sees every expert's inputs at once."""

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return inputs


class UnfusedExperts(nn.Module):
    """`experts(hidden [T, H], top_k_index [T, K], top_k_weights [T, K]) -> [T, H]` with children `0..E-1`."""

    def __init__(self, n_experts: int, hidden: int, intermediate: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.act_fn = act
        for e in range(n_experts):
            expert = nn.Module()
            expert.gate_proj = nn.Linear(hidden, intermediate, bias=False)
            expert.up_proj = nn.Linear(hidden, intermediate, bias=False)
            expert.down_proj = nn.Linear(intermediate, hidden, bias=False)
            self.add_module(str(e), expert)
        self.reach_gate_up = Stage()
        self.reach_down = Stage()

    @classmethod
    def like(cls, fused: nn.Module) -> UnfusedExperts:
        """The same sizes as transformers' fused module: gate_up_proj [E, 2I, H], down_proj [E, H, I]."""
        n_experts, hidden, intermediate = fused.get_parameter("down_proj").shape
        act = fused.act_fn
        assert callable(act)
        return cls(n_experts, hidden, intermediate, act)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = [torch.where(top_k_index == e) for e in range(self.n_experts)]  # (token, slot) pairs per expert
        inputs = self.reach_gate_up([hidden_states[token] for token, _ in chosen])
        inner = [
            self.act_fn(self.get_submodule(f"{e}.gate_proj")(x)) * self.get_submodule(f"{e}.up_proj")(x)
            for e, x in enumerate(inputs)
        ]
        inner = self.reach_down(inner)
        out = torch.zeros_like(hidden_states)
        for e, (token, slot) in enumerate(chosen):
            y = self.get_submodule(f"{e}.down_proj")(inner[e]) * top_k_weights[token, slot, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out
