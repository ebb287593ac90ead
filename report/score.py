"""Negative log-likelihood of every scored token of a plan of windows, by the block-by-block replay.

When the whole model fits in the budget its blocks are read once and windows pass through it one batch after another;
otherwise all windows pass through one block after another. Both compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..calibrate.replay import Stream, run_block
from ..calibrate.skeleton import Skeleton
from ..checkpoint.errors import SutureError
from .windows import Windows

_LOGIT_BYTES = 128 << 20  # logits held at once


@torch.no_grad()
def score(
    skeleton: Skeleton,
    windows: Windows,
    track: Callable[..., Iterator[Any]],
    label: str,
    budget: int = 4 << 30,
    spill: Path | None = None,
    batch_tokens: int = 2048,
) -> npt.NDArray[np.float64]:
    """NLL in nats, (n_scored,), in the plan's order. Raises SutureError naming a window that gives NaN."""
    batches = list(_batches(windows, batch_tokens))
    nll: list[npt.NDArray[np.float64] | None] = [None] * windows.n_windows
    skeleton.load_head()
    if _bytes_of_blocks(skeleton) <= budget:
        for index in range(skeleton.n_blocks):
            skeleton.load_block(index)
        for members, ids in track(batches, len(batches), label):
            hidden = skeleton.embed(ids)
            for index in range(skeleton.n_blocks):
                hidden = skeleton.run_block(index, hidden)
            _score_batch(skeleton, windows, members, ids, hidden, nll)
    else:
        stream = Stream.start(skeleton, [ids for _, ids in batches], budget, spill)
        for index in track(range(skeleton.n_blocks), skeleton.n_blocks, label):
            skeleton.load_block(index)
            run_block(skeleton, index, stream)
            skeleton.free_block(index)
        for (members, ids), hidden in zip(batches, stream.hidden, strict=True):
            _score_batch(skeleton, windows, members, ids, hidden.to(skeleton.device), nll)
    for index in range(skeleton.n_blocks):
        skeleton.free_block(index)
    skeleton.free_head()
    return np.concatenate([part for part in nll if part is not None])


def _bytes_of_blocks(skeleton: Skeleton) -> int:
    """Of all blocks: they differ where only some have experts."""
    shapes, layout = skeleton.source.shapes, skeleton.layout
    names = {place.tensor for index in range(skeleton.n_blocks) for place in layout.block_tensors(index).values()}
    return sum(int(np.prod(shapes[name])) for name in names) * skeleton.dtype.itemsize


def _batches(windows: Windows, batch_tokens: int) -> Iterator[tuple[list[int], Tensor]]:
    """Windows of equal length together, about `batch_tokens` per batch: (window numbers, ids [B, T])."""
    by_length: dict[int, list[int]] = {}
    for number, ids in enumerate(windows.ids):
        by_length.setdefault(ids.size, []).append(number)
    for length, numbers in sorted(by_length.items(), reverse=True):
        size = max(1, batch_tokens // length)
        for start in range(0, len(numbers), size):
            members = numbers[start : start + size]
            yield members, torch.from_numpy(np.stack([windows.ids[n] for n in members]))


def _score_batch(
    skeleton: Skeleton,
    windows: Windows,
    members: list[int],
    ids: Tensor,
    hidden: Tensor,
    nll: list[npt.NDArray[np.float64] | None],
) -> None:
    first = int(min(windows.score_from[n] for n in members))  # the target at position p is predicted at p - 1
    length = ids.shape[1]
    losses = torch.empty(len(members), length, dtype=torch.float64)
    vocabulary = skeleton.source.shapes[skeleton.layout.head or skeleton.layout.embedding][0]
    step = max(1, _LOGIT_BYTES // (4 * vocabulary * len(members)))
    for start in range(first, length, step):
        end = min(start + step, length)
        logits = skeleton.logits(hidden, torch.arange(start - 1, end - 1))
        targets = ids[:, start:end].to(logits.device)
        chosen = logits.gather(2, targets[..., None])[..., 0]
        losses[:, start:end] = (torch.logsumexp(logits, dim=2) - chosen).double().cpu()
    for row, number in enumerate(members):
        part = losses[row, int(windows.score_from[number]) :].numpy()
        if np.isnan(part).any():
            raise SutureError(
                f"{skeleton.source.source}: window {number} gives NaN at position "
                f"{int(windows.score_from[number]) + int(np.isnan(part).argmax())}",
                "a layer overflows or a weight is damaged; NaN is never averaged away",
            )
        nll[number] = part.copy()
