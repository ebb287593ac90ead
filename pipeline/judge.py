"""Whether a healed model is better than the one before: paired intervals on sequences that it was not trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..calibrate.skeleton import Skeleton
from ..calibrate.tokens import TokenBlocks
from ..checkpoint.errors import SutureError
from ..checkpoint.writer import ShardWriter
from ..report.clusters import cluster_mean, paired
from ..report.score import compare_tokens
from ..report.windows import Windows, rolling_windows
from .step import StepRun

IntArray = npt.NDArray[np.int64]
Track = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Split:
    """Sequences to train on and, the last ones, to judge by."""

    train: IntArray  # [n, length]
    held: IntArray  # [m, length]

    def describe(self) -> dict[str, Any]:
        return {
            "train": {"sequences": len(self.train), "sha256": _digest(self.train)},
            "held_out": {"sequences": len(self.held), "sha256": _digest(self.held)},
        }


def split(text: TokenBlocks, held: int, what: str) -> Split:
    """Raises SutureError when nothing is left to train on, or a sequence to judge by is one to train on."""
    ids = text.ids
    if held >= len(ids):
        raise SutureError(
            f"{what}: {len(ids)} calibration sequences, of which {held} are held out to judge the result, leave none to "
            "train on",
            "give more samples",
        )
    found = Split(ids[:-held], ids[-held:])
    known = {row.tobytes() for row in found.train}
    twice = sum(row.tobytes() in known for row in found.held)
    if twice:
        raise SutureError(
            f"{what}: {twice} of the {held} held-out sequences are also among those to train on",
            "the text repeats itself: give another one, or fewer samples",
        )
    return found


def _digest(ids: IntArray) -> str:
    return hashlib.sha256(f"{ids.shape}".encode() + ids.astype("<i8").tobytes()).hexdigest()


def windows_of(ids: IntArray) -> Windows:
    """Each sequence as a document of its own, scored from its second token."""
    return rolling_windows(list(ids), window=ids.shape[1], stride=max(1, ids.shape[1] // 2))


@dataclass(frozen=True)
class Verdict:
    """Differences healed - before, with 95 % intervals over sequences."""

    better: bool
    kl: tuple[float, float, float]  # KL divergence from the original, nats per token: mean, low, high
    log_perplexity: tuple[float, float, float]
    kl_before: float
    kl_after: float
    perplexity: tuple[float, float, float]  # of the original, before, healed

    def describe(self) -> dict[str, Any]:
        """For the receipt."""

        def interval(name: str, found: tuple[float, float, float]) -> dict[str, list[float]]:
            return {name: [_short(x) for x in found]}

        original, before, healed = (_short(x) for x in self.perplexity)
        return {
            "better": self.better,
            "perplexity": {"original": original, "before": before, "healed": healed},
            "kl_to_original": {"before": _short(self.kl_before), "healed": _short(self.kl_after)},
            **interval("kl_change_low_high", self.kl),
            **interval("log_perplexity_change_low_high", self.log_perplexity),
        }


def judge(original: Skeleton, before: Skeleton, healed: Skeleton, ids: IntArray, track: Track, budget: int) -> Verdict:
    """Better: the divergence from the original is lower, the whole interval, and the perplexity is not surely higher."""
    windows = windows_of(ids)
    old = compare_tokens(original, before, windows, track, "judge: before", budget)
    new = compare_tokens(original, healed, windows, track, "judge: healed", budget)
    difference = new["kl"].astype(np.float64) - old["kl"].astype(np.float64)
    kl = cluster_mean(windows.by_document(difference), cluster="sequence")
    nll = paired(*(windows.by_document(rows["nll_candidate"]) for rows in (old, new)), cluster="sequence")
    assert kl.low is not None and kl.high is not None, "there are enough sequences for an interval"
    assert nll.log.low is not None and nll.log.high is not None
    return Verdict(
        better=kl.high < 0 and nll.log.low <= 0,
        kl=(kl.mean, kl.low, kl.high),
        log_perplexity=(nll.log.mean, nll.log.low, nll.log.high),
        kl_before=float(old["kl"].mean()),
        kl_after=float(new["kl"].mean()),
        perplexity=(float(np.exp(old["nll_base"].mean())), nll.base.ppl, nll.new.ppl),
    )


def why_not(verdict: dict[str, Any]) -> str:
    """The reason, from a description of a verdict that is not `better`."""
    kl = verdict["kl_to_original"]
    if kl["before"] == 0:
        return "its predictions on held-out text are the original's already, so there is nothing to win back"
    low, high = verdict["kl_change_low_high"][1:]
    change = f"KL divergence from the original on held-out text {kl['before']} → {kl['healed']}, change [{low}, {high}]"
    return f"training did not make it surely better ({change})"


def restore_input(work: StepRun) -> None:
    """Write the step's input, tensor by tensor, over what the step has written."""
    with ShardWriter(work.directory, work.shards) as writer:
        for name in work.shards.specs:
            writer.write_bytes(name, work.checkpoint.read_bytes(name))
        writer.sync()


def _short(value: float) -> float:
    return float(f"{value:.5g}")
