"""What a model costs to serve, from its shapes: arithmetic, traffic, and what hardware allows at best.

    intensity     FLOPs per byte read from memory
    roofline      seconds per token >= max(bytes / bandwidth, FLOPs / peak)           Williams, Waterman & Patterson 2009

Decoding one sequence reads every weight once per token, so it is bound by bandwidth on all of these machines; B sequences
together read the weights once for B tokens. A roofline is a bound that kernels approach and never pass: an estimate, and
labelled so wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GPU:
    """Peak figures of a maker's data sheet."""

    bandwidth: float  # bytes per second
    flops: float  # dense bfloat16 multiply-adds counted twice, per second
    memory: float | None = None  # bytes


GPUS: dict[str, GPU] = {
    "A100 80GB SXM": GPU(2.039e12, 312e12, 80e9),
    "H100 SXM": GPU(3.35e12, 989e12, 80e9),
    "H200 SXM": GPU(4.8e12, 989e12, 141e9),
    "RTX A6000": GPU(768e9, 154.8e12, 48e9),
}


@dataclass(frozen=True)
class Roofline:
    """A bound, not a measurement."""

    tokens_per_second: float  # of all sequences together
    bound: str  # "memory" or "arithmetic"
    intensity: float  # FLOPs per byte


def decode_roofline(
    gpu: GPU, weight_bytes: float, flops_per_token: float, *, cache_bytes: float = 0.0, batch: int = 1
) -> Roofline:
    """Decoding `batch` sequences at once: weights are read once, each sequence's cache (`cache_bytes`) once.

    >>> found = decode_roofline(GPUS["A100 80GB SXM"], weight_bytes=16e9, flops_per_token=16e9)
    >>> round(found.tokens_per_second), found.bound
    (127, 'memory')
    """
    traffic, arithmetic = weight_bytes + batch * cache_bytes, batch * flops_per_token
    seconds = max(traffic / gpu.bandwidth, arithmetic / gpu.flops)
    bound = "memory" if traffic / gpu.bandwidth >= arithmetic / gpu.flops else "arithmetic"
    return Roofline(batch / seconds, bound, arithmetic / traffic)


def batch_at_the_ridge(gpu: GPU, weight_bytes: float, flops_per_token: float) -> float:
    """Sequences from which on decoding is bound by arithmetic, the cache not counted."""
    return (weight_bytes / gpu.bandwidth) / (flops_per_token / gpu.flops)


def cost_section(facts: Mapping[str, Mapping[str, Any]], gpus: Mapping[str, GPU]) -> dict[str, Any]:
    """The section `cost` of the report; `facts`: base and candidate, each with

    bytes_by_dtype, bytes_read (weights that a decoded token reads), flops_per_token, cache (bytes_per_token and how it
    was found, or None).
    """
    rows = []
    for name, gpu in gpus.items():
        bounds = {
            model: decode_roofline(gpu, fact["bytes_read"], fact["flops_per_token"]) for model, fact in facts.items()
        }
        rows.append(
            {
                "gpu": name,
                "bandwidth": gpu.bandwidth,
                "flops": gpu.flops,
                "tokens_per_second": {model: float(f"{b.tokens_per_second:.4g}") for model, b in bounds.items()},
                "bound": {model: bound.bound for model, bound in bounds.items()},
            }
        )
    return {
        "bytes_by_dtype": {model: dict(fact["bytes_by_dtype"]) for model, fact in facts.items()},
        "cache": {model: fact["cache"] for model, fact in facts.items()},
        "flops_per_token": {model: int(fact["flops_per_token"]) for model, fact in facts.items()},
        "intensity": {
            model: float(f"{fact['flops_per_token'] / fact['bytes_read']:.4g}") for model, fact in facts.items()
        },
        "roofline": rows,
    }
