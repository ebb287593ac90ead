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
from ..lora.settings import HealSettings
from ..report.clusters import cluster_mean, paired
from ..report.score import compare_tokens
from ..report.windows import Windows, rolling_windows
from .step import StepRun

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Track = Callable[..., Iterator[Any]]


@dataclass(frozen=True, eq=False)
class Split:
    """Sequences to train on and, the last `n_held` ones, to judge by."""

    text: TokenBlocks
    n_held: int
    on_answers: bool = False  # only the predictions of the assistant's tokens count
    left_out: int = 0  # sequences without any such token

    @property
    def train(self) -> IntArray:
        """[n, length]"""
        return self.text.ids[: -self.n_held]

    @property
    def held(self) -> IntArray:
        """[m, length]"""
        return self.text.ids[-self.n_held :]

    @property
    def predicted(self) -> BoolArray:
        """[n + m, length]: tokens that the one before, in the same piece, predicts, and whose prediction counts."""
        inside = np.ones(self.text.ids.shape, dtype=np.bool_)
        inside[:, 0] = False
        if self.text.segments is not None:
            inside[:, 1:] = np.diff(self.text.segments, axis=1) == 0
        if not self.on_answers:
            return inside
        assert self.text.answers is not None
        return inside & self.text.answers

    @property
    def counted(self) -> BoolArray:
        """[n + m, length]: positions whose prediction is to be the original's; all of them, or those before answers."""
        if not self.on_answers:
            return np.ones(self.text.ids.shape, dtype=np.bool_)
        return np.roll(self.predicted, -1, axis=1)  # a first token is never predicted

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "train": {"sequences": len(self.train), "sha256": _digest(self.train)},
            "held_out": {"sequences": len(self.held), "sha256": _digest(self.held)},
        }
        if self.on_answers:
            tokens = self.predicted.sum(1)
            found["train"]["tokens_of_answers"] = int(tokens[: -self.n_held].sum())
            found["held_out"]["tokens_of_answers"] = int(tokens[-self.n_held :].sum())
            found["sequences_without_answers"] = self.left_out
        return found


def split(text: TokenBlocks, settings: HealSettings, what: str) -> Split:
    """Raises SutureError when nothing is left to train on, or a sequence to judge by is one to train on."""
    left_out = 0
    if settings.on_answers:
        kept = Split(text, 1, on_answers=True).predicted.sum(1) > 0
        left_out = int((~kept).sum())
        text = text.only(kept)
    ids, held = text.ids, settings.held(len(text.ids))
    if held >= len(ids):
        raise SutureError(
            f"{what}: {len(ids)} calibration sequences{' with answers' if settings.on_answers else ''}, of which {held} are "
            "held out to judge the result, leave none to train on",
            "give more samples",
        )
    found = Split(text, held, settings.on_answers, left_out)
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


def windows_of(parts: Split) -> tuple[Windows, BoolArray]:
    """Each sequence held out, or isolated piece of one, as a document scored from its second token; and which of the
    scores count."""
    held, length = parts.held, parts.held.shape[1]
    counts = parts.predicted[-parts.n_held :]
    documents, marks = list(held), list(counts)
    if parts.text.segments is not None:
        cuts = [np.flatnonzero(np.diff(row)) + 1 for row in parts.text.segments[-parts.n_held :]]
        documents = [piece for row, cut in zip(held, cuts, strict=True) for piece in np.split(row, cut)]
        marks = [piece for row, cut in zip(counts, cuts, strict=True) for piece in np.split(row, cut)]
    windows = rolling_windows(documents, window=length, stride=max(1, length // 2))
    scored = [bool(marks[d][t]) for d, t in zip(windows.document, windows.token, strict=True)]
    return windows, np.array(scored, dtype=np.bool_)


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


def judge(original: Skeleton, before: Skeleton, healed: Skeleton, parts: Split, track: Track, budget: int) -> Verdict:
    """Better: the divergence from the original is lower, the whole interval, and the perplexity is not surely higher."""
    windows, counts = windows_of(parts)
    old = compare_tokens(original, before, windows, track, "judge: before", budget)[counts]
    new = compare_tokens(original, healed, windows, track, "judge: healed", budget)[counts]
    of_document = windows.document[counts]
    order, (_, sizes) = np.argsort(of_document, kind="stable"), np.unique(of_document, return_counts=True)

    def by_document(values: npt.NDArray[Any]) -> list[npt.NDArray[np.float64]]:
        return np.split(values.astype(np.float64)[order], np.cumsum(sizes)[:-1])

    cluster = "sequence" if parts.text.segments is None else "piece"
    difference = new["kl"].astype(np.float64) - old["kl"].astype(np.float64)
    kl = cluster_mean(by_document(difference), cluster=cluster)
    nll = paired(*(by_document(rows["nll_candidate"]) for rows in (old, new)), cluster=cluster)
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
