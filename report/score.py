"""Per-token scores of a plan of windows, by the block-by-block replay.

`score` gives the negative log-likelihoods of one model, `compare_tokens` those of two and how far their predictions are
from each other. A model whose blocks fit in the budget is read once and windows pass through it one batch after another;
otherwise all windows pass through one block after another. Both compute the same numbers.

Of the base only the last hidden states are ever kept, `hidden` numbers a token where logits are `vocabulary` of them;
its head makes the same logits of them again, exactly, when the candidate's are there.

Several processes may take a share of the batches each, formed as one process forms them, and `together` puts their
scores in order: the numbers are those of one process, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..calibrate.replay import Stream, run_block
from ..calibrate.skeleton import Skeleton
from ..checkpoint.errors import SutureError
from .fidelity import TOKEN_FIELDS, token_fidelity
from .windows import Windows

LOGIT_BYTES = 128 << 20  # logits held at once
_ROWS = 16  # tokens whose two distributions are compared at once: they stay in the processor's cache

Track = Callable[..., Iterator[Any]]
Share = tuple[int, int]  # which of how many: batches are taken in turn
WHOLE: Share = (0, 1)
Batch = tuple[list[int], Tensor, Tensor]  # window numbers, ids [B, T], last hidden states [B, T - 1, hidden]


@torch.no_grad()
def score(
    skeleton: Skeleton,
    windows: Windows,
    track: Track,
    label: str,
    budget: int = 4 << 30,
    spill: Path | None = None,
    batch_tokens: int = 2048,
    share: Share = WHOLE,
) -> npt.NDArray[np.float64]:
    """NLL in nats, (n_scored,), in the plan's order. Raises SutureError naming a window that gives NaN.

    share: only of the windows of this share.
    """
    nll: list[npt.NDArray[np.float64] | None] = [None] * windows.n_windows
    skeleton.load_head()
    for members, ids, hidden in _hidden_states(skeleton, windows, share, track, label, budget, spill, batch_tokens):
        first = _first(windows, members)
        losses = torch.empty(len(members), ids.shape[1], dtype=torch.float64)
        for start, end in _pieces(first, ids.shape[1], len(members), vocabulary(skeleton)):
            logits = skeleton.logits(hidden.to(skeleton.device), torch.arange(start - 1, end - 1))
            losses[:, start:end] = _nll(logits, ids[:, start:end].to(logits.device)).double().cpu()
        for row, number in enumerate(members):
            start = int(windows.score_from[number])
            part = losses[row, start:].numpy().copy()
            _refuse_nan(part, skeleton, number, start)
            nll[number] = part
    skeleton.free_head()
    return _in_order(nll, np.dtype(np.float64))


@dataclass
class KeptStates:
    """A base's last hidden states, for the next candidate that is compared with it on the same windows."""

    limit: int = 2 << 30  # bytes of all of them
    held: int = 0
    batches: dict[str, list[Batch]] = field(default_factory=dict)  # by the windows' tokens

    def through(self, windows: Windows, width: int, states: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
        """The windows' states, of `width` numbers a token: kept ones, or `states()`, which are kept if there is room."""
        key = windows.tokens_sha256
        if key not in self.batches:
            size = 4 * width * sum(ids.size for ids in windows.ids)
            if self.held + size > self.limit:
                return states()
            self.held += size
            self.batches[key] = list(states())
        return iter(self.batches[key])


@torch.no_grad()
def compare_tokens(
    base: Skeleton,
    candidate: Skeleton,
    windows: Windows,
    track: Track,
    label: str,
    budget: int = 4 << 30,
    spill: Path | None = None,
    batch_tokens: int = 2048,
    rounded: torch.dtype | None = None,
    share: Share = WHOLE,
    kept: KeptStates | None = None,
) -> npt.NDArray[Any]:
    """One row per scored token in the plan's order, (n_scored,) of `fidelity.TOKEN_FIELDS`.

    spill: where states go that do not fit; two files, with `-base` and `-candidate` after its stem.
    rounded: the candidate's hidden state is rounded to this dtype after each block, as a model does that computes in
    it; with `candidate` the base itself this measures the noise of that arithmetic.
    share: as for `score`. kept: of this base, and with no share.
    Raises SutureError: models of different vocabularies; a window that gives NaN, with the model's name.
    """
    if vocabulary(base) != vocabulary(candidate):
        raise SutureError(
            f"{base.source.source} has a vocabulary of {vocabulary(base)}, {candidate.source.source} of "
            f"{vocabulary(candidate)}: their predictions do not compare",
            "compare models with one vocabulary",
        )
    rows: list[npt.NDArray[Any] | None] = [None] * windows.n_windows
    models = {"base": base} if candidate is base else {"base": base, "candidate": candidate}
    for skeleton in models.values():
        skeleton.load_head()
    each = budget // 2
    files = {name: spill and spill.with_name(f"{spill.stem}-{name}{spill.suffix}") for name in ("base", "candidate")}
    itself = candidate is base and rounded is None  # then its blocks run once
    quiet = _fits(base, each) and not itself and kept is None  # then both go side by side, under one progress bar
    follow = _untracked if quiet else track

    def states() -> Iterator[Batch]:
        return _hidden_states(base, windows, share, follow, f"{label}: base", each, files["base"], batch_tokens)

    ours = states() if kept is None else kept.through(windows, int(base.hf_config.hidden_size), states)
    theirs = _hidden_states(candidate, windows, share, track, label, each, files["candidate"], batch_tokens, rounded)
    if not quiet and not itself:
        ours = iter(list(ours))
    pairs = ((batch, batch) for batch in ours) if itself else zip(ours, theirs, strict=True)
    for (members, ids, of_base), (_, _, of_candidate) in pairs:
        table = np.zeros(ids.shape, dtype=TOKEN_FIELDS)
        for start, end in _pieces(_first(windows, members), ids.shape[1], 2 * len(members), vocabulary(base)):
            keep = torch.arange(start - 1, end - 1)
            p = base.logits(of_base.to(base.device), keep).flatten(0, 1)
            q = p if itself else candidate.logits(of_candidate.to(candidate.device), keep).flatten(0, 1)
            targets = ids[:, start:end].to(p.device).flatten()
            parts = [
                token_fidelity(p[i : i + _ROWS], q[i : i + _ROWS], targets[i : i + _ROWS])
                for i in range(0, len(targets), _ROWS)
            ]
            for name in table.dtype.names or ():
                table[name][:, start:end] = (
                    torch.cat([part[name] for part in parts]).view(len(members), -1).cpu().numpy()
                )
        for row, number in enumerate(members):
            start = int(windows.score_from[number])
            part = table[row, start:].copy()
            for name, skeleton in (("nll_base", base), ("nll_candidate", candidate), ("kl", candidate)):
                _refuse_nan(part[name], skeleton, number, start)
            rows[number] = part
    for skeleton in models.values():
        skeleton.free_head()
    return _in_order(rows, TOKEN_FIELDS)


def together(windows: Windows, parts: Sequence[npt.NDArray[Any]], batch_tokens: int = 2048) -> npt.NDArray[Any]:
    """What all shares give, in the plan's order. parts: what the first, second, ... of `len(parts)` gave."""
    scored: list[npt.NDArray[Any] | None] = [None] * windows.n_windows
    for number, part in enumerate(parts):
        batches = _batches(windows, batch_tokens, (number, len(parts)))
        taken = sorted(window for members, _ in batches for window in members)
        ends = np.cumsum([windows.ids[window].size - int(windows.score_from[window]) for window in taken])
        for window, piece in zip(taken, np.split(part, ends[:-1]), strict=bool(taken)):
            scored[window] = piece
    return _in_order(scored, parts[0].dtype)


def _in_order(scored: Sequence[npt.NDArray[Any] | None], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The windows' figures one after another, of those that there are."""
    return np.concatenate([np.empty(0, dtype), *(part for part in scored if part is not None)])


def _hidden_states(
    skeleton: Skeleton,
    windows: Windows,
    share: Share,
    track: Track,
    label: str,
    budget: int,
    spill: Path | None,
    batch_tokens: int,
    rounded: torch.dtype | None = None,
) -> Iterator[Batch]:
    """Batches in a fixed order with the last block's outputs. A window's last token only has to be predicted."""

    def after(hidden: Tensor) -> Tensor:
        return hidden if rounded is None else hidden.to(rounded).to(hidden.dtype)

    batches = list(_batches(windows, batch_tokens, share))
    if not batches:
        return
    if _fits(skeleton, budget):
        for index in range(skeleton.n_blocks):
            if next(skeleton.block(index).parameters()).is_meta:
                skeleton.load_block(index)
        for members, ids in track(batches, len(batches), label):
            hidden = after(skeleton.embed(ids[:, :-1]))
            for index in range(skeleton.n_blocks):
                hidden = after(skeleton.run_block(index, hidden))
            yield members, ids, hidden
        for index in range(skeleton.n_blocks):
            skeleton.free_block(index)
        return
    stream = Stream.start(skeleton, [ids[:, :-1] for _, ids in batches], budget, spill)
    for index in track(range(skeleton.n_blocks), skeleton.n_blocks, label):
        skeleton.load_block(index)
        run_block(skeleton, index, stream)
        if rounded is not None:
            for number, hidden in enumerate(stream.hidden):
                stream.replace(number, after(hidden))
        skeleton.free_block(index)
    for (members, ids), hidden in zip(batches, stream.hidden, strict=True):
        yield members, ids, hidden


def _untracked(items: Sequence[Any], total: int, label: str) -> Iterator[Any]:
    return iter(items)


def _fits(skeleton: Skeleton, budget: int) -> bool:
    """Whether all blocks together fit. They differ where only some have experts."""
    shapes, layout = skeleton.source.shapes, skeleton.layout
    names = {place.tensor for index in range(skeleton.n_blocks) for place in layout.block_tensors(index).values()}
    return sum(int(np.prod(shapes[name])) for name in names) * skeleton.dtype.itemsize <= budget


def vocabulary(skeleton: Skeleton) -> int:
    """Logits per token."""
    return skeleton.source.shapes[skeleton.layout.head or skeleton.layout.embedding][0]


def _batches(windows: Windows, batch_tokens: int, share: Share) -> Iterator[tuple[list[int], Tensor]]:
    """Windows of equal length together, about `batch_tokens` per batch: (window numbers, ids [B, T]); of all batches,
    those of the share."""
    by_length: dict[int, list[int]] = {}
    for number, ids in enumerate(windows.ids):
        by_length.setdefault(ids.size, []).append(number)
    batches: list[list[int]] = []
    for length, numbers in sorted(by_length.items(), reverse=True):
        size = max(1, batch_tokens // length)
        batches += [numbers[start : start + size] for start in range(0, len(numbers), size)]
    which, of = share
    for members in batches[which::of]:
        yield members, torch.from_numpy(np.stack([windows.ids[n] for n in members]))


def _first(windows: Windows, members: list[int]) -> int:
    """First target of a batch; the one at position p is predicted at p - 1."""
    return int(min(windows.score_from[n] for n in members))


def _pieces(first: int, length: int, rows: int, vocabulary: int) -> Iterator[tuple[int, int]]:
    """Spans of positions whose logits fit in memory."""
    step = max(1, LOGIT_BYTES // (4 * vocabulary * rows))
    for start in range(first, length, step):
        yield start, min(start + step, length)


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """[B, T] from logits [B, T, vocabulary] and targets [B, T]."""
    return torch.logsumexp(logits, dim=2) - logits.gather(2, targets[..., None])[..., 0]


def _refuse_nan(part: npt.NDArray[Any], skeleton: Skeleton, window: int, start: int) -> None:
    if np.isnan(part).any():
        raise SutureError(
            f"{skeleton.source.source}: window {window} gives NaN at position {start + int(np.isnan(part).argmax())}",
            "a layer overflows or a weight is damaged; NaN is never averaged away",
        )
