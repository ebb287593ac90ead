"""Score a base and a candidate on one evaluation text: the part that recipes and comparisons share.

Where a launcher started several processes, each scores its share of the windows.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ..calibrate.crew import ALONE, Crew
from ..calibrate.skeleton import Skeleton
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.staging import Staging, write_whole
from ..quant.decode import open_decoded
from ..report.document import ScoredSet
from ..report.fidelity import noise_floor
from ..report.score import KeptStates, compare_tokens, score, together, vocabulary
from ..report.windows import Windows
from .texts import Evaluation

_FLOOR_WINDOWS, _FLOOR_SHARE = 5, 20  # of the windows, at least so many and one in so many
_SHORT = {"BF16": torch.bfloat16, "F16": torch.float16}

Track = Callable[..., Iterator[Any]]


Which = Literal["base", "candidate"]


@dataclass(frozen=True)
class ScoreJob:
    """One pass over windows: the losses of one model, or two models compared."""

    of: tuple[Which, ...]
    paths: dict[str, Path]  # where other processes open them
    device: str
    windows: Windows
    label: str
    budget: int  # bytes, of all processes
    spill: Path | None
    rounded: torch.dtype | None  # as in `compare_tokens`

    def help(self, crew: Crew) -> None:
        """Score this process's share of the windows, for process 0."""
        found = {name: open_decoded(open_checkpoint(self.paths[name]), self.device) for name in sorted({*self.of})}
        crew.gather(self.share(found, crew, lambda items, total, label: iter(items)))

    def share(
        self, models: dict[str, Skeleton], crew: Crew, track: Track, kept: KeptStates | None = None
    ) -> npt.NDArray[Any]:
        """The figures of this process's windows."""
        spill = self.spill and crew.own(self.spill)
        how = (self.windows, track, self.label, self.budget // crew.size, spill)
        mine = (crew.rank, crew.size)
        if len(self.of) == 1:
            return score(models[self.of[0]], *how, share=mine)
        base, candidate = (models[name] for name in self.of)
        return compare_tokens(base, candidate, *how, rounded=self.rounded, share=mine, kept=kept)


@dataclass(frozen=True)
class Scorer:
    """A base and a candidate, and the processes that score them."""

    models: dict[str, Skeleton]
    paths: dict[str, Path]
    track: Track
    crew: Crew = ALONE
    kept: KeptStates | None = None  # where the base meets more candidates than this

    @classmethod
    def of(
        cls,
        base: Checkpoint,
        candidate: Checkpoint,
        device: torch.device,
        track: Track,
        crew: Crew = ALONE,
        kept: KeptStates | None = None,
    ) -> Scorer:
        """Raises SutureError when one of them cannot be decoded."""
        given = {"base": base, "candidate": candidate}
        models = {name: open_decoded(checkpoint, device) for name, checkpoint in given.items()}
        return cls(models, {name: checkpoint.path for name, checkpoint in given.items()}, track, crew, kept)

    @property
    def base(self) -> Skeleton:
        return self.models["base"]

    @property
    def candidate(self) -> Skeleton:
        return self.models["candidate"]

    def measure(
        self,
        of: tuple[Which, ...],
        windows: Windows,
        label: str,
        budget: int,
        spill: Path | None,
        rounded: torch.dtype | None = None,
    ) -> npt.NDArray[Any]:
        """(n_scored,) in the plan's order: `score` of one model, or `compare_tokens` of two."""
        job = ScoreJob(of, self.paths, self.base.device.type, windows, label, budget, spill, rounded)
        self.crew.share(job)
        kept = self.kept if self.crew.size == 1 else None
        return together(windows, self.crew.gather(job.share(self.models, self.crew, self.track, kept)))


def score_set(
    evaluation: Evaluation,
    scorer: Scorer,
    *,
    fidelity: bool,
    level: float,
    budget: int = 4 << 30,
    staging: Staging | None = None,
    renumbered: Windows | None = None,
) -> ScoredSet:
    """Every token's figures under both models, and the base's own noise. Raises SutureError naming what gives NaN.

    renumbered: the windows in the candidate's token ids, when it numbers them otherwise; there is no divergence then.
    staging: where finished tokens are kept, so that a resumed run does not score them again.
    """
    windows, notes, base = evaluation.windows, list(evaluation.warnings), scorer.base
    if fidelity and (renumbered is not None or vocabulary(base) != vocabulary(scorer.candidate)):
        fidelity = False
        notes.append("the candidate has another vocabulary than the base: KL divergence is not defined between them")
    label = f"score {evaluation.name}"
    spill = staging.work / "score.bin" if staging is not None else None

    def measure() -> npt.NDArray[Any]:
        if fidelity:
            return scorer.measure(("base", "candidate"), windows, label, budget, spill)
        tokens = np.zeros(windows.n_scored, dtype=[("nll_base", "<f4"), ("nll_candidate", "<f4")])
        names: tuple[Which, ...] = ("base", "candidate")
        for name in names:
            theirs = renumbered if renumbered is not None and name == "candidate" else windows
            tokens[f"nll_{name}"] = scorer.measure((name,), theirs, f"{label}: {name}", budget, spill)
        return tokens

    kind = "fidelity" if fidelity else "nll"
    tokens = kept_tokens(staging, f"{kind}-{windows.tokens_sha256[:16]}.npy", measure)
    floor = None
    if fidelity:
        dtype = _SHORT.get(base.source.dtypes[base.layout.embedding], torch.bfloat16)
        sample = windows.sample(max(_FLOOR_WINDOWS, windows.n_windows // _FLOOR_SHARE))

        def repeat() -> npt.NDArray[Any]:
            return scorer.measure(("base", "base"), sample, f"{label}: noise", budget, spill, dtype)

        noise = kept_tokens(staging, f"noise-{windows.tokens_sha256[:16]}.npy", repeat)
        what = (
            f"the base against itself with its hidden state rounded to {str(dtype).removeprefix('torch.')} after each "
            "block: at least what computing in that dtype does"
        )
        floor = noise_floor(sample, noise, level, what)
    protocol = evaluation.describe() | {"dtype": "float32"}
    return ScoredSet(evaluation.name, windows, tokens, protocol, floor, tuple(notes))


def kept_tokens(staging: Staging | None, name: str, measure: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """What `measure` gives, from the file of an interrupted run when it is there."""
    if staging is None:
        return measure()
    saved = staging.work / name
    if staging.find(unit=name) is not None:
        return np.load(saved)
    tokens = measure()
    buffer = io.BytesIO()
    np.save(buffer, tokens)
    write_whole(saved, buffer.getvalue())
    staging.record({"unit": name})
    return tokens
