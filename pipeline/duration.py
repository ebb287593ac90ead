"""How long the steps of a run will take on this machine, from shapes and three rates that are measured in a moment.

What takes time: products (the text through the blocks, its statistics, GPTQ's factors and errors, the probe), attention,
what lies between products (norms, rotary embeddings, activations), passes over the weights, and the disk. How often a
method passes over its weights was counted from where its time goes on SmolLM2-135M.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ..calibrate.skeleton import Skeleton
from .step import PlannedStep
from .texts import Calibration

PROBE = 128  # tokens
_PROBES = 2  # forwards of the probe that a step takes, with its logits
_WRITING = 500e6  # bytes per second
_COPYING = 100  # passes over a tensor that is read, checked and written
_TRYING = 0.05  # seconds for each rate: a processor that others use too is taken away for hundredths of one
_SHARING = 8  # threads at most among which the way to memory is divided without a loss
_SUSTAINED = 0.75  # of a small product's rate, by those of a run
_STEP = 0.5  # seconds of a step that depend on nothing
_BETWEEN = 150, 36  # passes per token over a block's hidden states, and over the inner ones, between its products


@dataclass(frozen=True)
class Rates:
    """Of this machine, with the threads that torch uses."""

    product: float  # flops per second of a product
    near: float  # seconds per number of a pass over what is in the processor's cache
    far: float  # and over what is not


@cache
def measured_rates() -> Rates:
    """One thread's, times the threads: where the machine is shared, threads that wait for one another take any time."""
    threads = torch.get_num_threads()
    a, b = torch.ones(512, 512), torch.ones(512, 512)
    x, y, z, w = torch.ones(1 << 14), torch.empty(1 << 14), torch.ones(1 << 22), torch.empty(1 << 22)
    torch.set_num_threads(1)
    try:
        product, near, far = (
            _quickest(work)
            for work in (lambda: torch.mm(a, b), lambda: torch.mul(x, x, out=y), lambda: torch.mul(z, z, out=w))
        )
    finally:
        torch.set_num_threads(threads)
    sharing = min(threads, _SHARING)
    return Rates(_SUSTAINED * threads * 2 * 512**3 / product, near / len(x) / threads, far / len(z) / sharing)


def _quickest(work: Callable[[], object]) -> float:
    """Seconds."""
    best, begun = math.inf, time.perf_counter()
    while time.perf_counter() - begun < _TRYING or best == math.inf:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return max(best, 1e-9)


def duration(skeleton: Skeleton, steps: Sequence[PlannedStep], calibration: Calibration | None) -> float:
    """Seconds that the steps take together."""
    rates = measured_rates()
    return sum(_of_step(skeleton, step, calibration, rates) for step in steps)


def _of_step(skeleton: Skeleton, step: PlannedStep, calibration: Calibration | None, rates: Rates) -> float:
    layout, prepared = skeleton.layout, step.prepared
    numbers = sum(linear.numel for linear in layout.linears)
    rows, hidden = skeleton.source.shapes[layout.head or layout.embedding]
    flops = prepared.flops + _PROBES * PROBE * 2 * (numbers + rows * hidden)
    passes = 0.0
    if calibration is not None and step.kind.needs_text(step.settings):
        samples, length = calibration.blocks.ids.shape
        tokens = samples * length * prepared.reached
        groups = [group[0].in_features for groups in layout.blocks for group in groups]
        attention = 2 * 4 * length * hidden * len(layout.blocks)  # per token; twice, for it has half the rate
        flops += tokens * prepared.forwards * (2 * numbers + attention)
        flops += tokens * sum(width**2 for width in groups)  # second moments, of which half is computed
        flops += prepared.reached * sum(3 * linear.numel * linear.in_features for linear in layout.linears)
        flops += prepared.reached * sum(1.8 * width**3 for width in groups)
        inner = max(linear.out_features for linear in layout.linears)
        passes = prepared.forwards * tokens * len(layout.blocks) * (_BETWEEN[0] * hidden + _BETWEEN[1] * inner)
    weights = prepared.weight_passes + _COPYING * sum(spec.nbytes for spec in prepared.specs) / 2
    seconds = flops / rates.product + passes * rates.far + weights * rates.near
    return _STEP + seconds + step.shards.nbytes / _WRITING
