"""Score a base and a candidate on one evaluation text: the part that recipes and comparisons share."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..calibrate.skeleton import Skeleton
from ..checkpoint.staging import Staging, write_whole
from ..report.document import ScoredSet
from ..report.fidelity import noise_floor
from ..report.score import compare_tokens, score, vocabulary
from ..report.windows import Windows
from .texts import Evaluation

_FLOOR_WINDOWS, _FLOOR_SHARE = 5, 20  # of the windows, at least so many and one in so many
_SHORT = {"BF16": torch.bfloat16, "F16": torch.float16}

Track = Callable[..., Iterator[Any]]


def score_set(
    evaluation: Evaluation,
    base: Skeleton,
    candidate: Skeleton,
    track: Track,
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
    windows, notes = evaluation.windows, list(evaluation.warnings)
    if fidelity and (renumbered is not None or vocabulary(base) != vocabulary(candidate)):
        fidelity = False
        notes.append("the candidate has another vocabulary than the base: KL divergence is not defined between them")
    label = f"score {evaluation.name}"
    spill = staging.work / "score.bin" if staging is not None else None

    def measure() -> npt.NDArray[Any]:
        if fidelity:
            return compare_tokens(base, candidate, windows, track, label, budget, spill)
        tokens = np.zeros(windows.n_scored, dtype=[("nll_base", "<f4"), ("nll_candidate", "<f4")])
        for name, skeleton in (("base", base), ("candidate", candidate)):
            theirs = renumbered if renumbered is not None and name == "candidate" else windows
            tokens[f"nll_{name}"] = score(skeleton, theirs, track, f"{label}: {name}", budget, spill)
        return tokens

    kind = "fidelity" if fidelity else "nll"
    tokens = kept_tokens(staging, f"{kind}-{windows.tokens_sha256[:16]}.npy", measure)
    floor = None
    if fidelity:
        dtype = _SHORT.get(base.source.dtypes[base.layout.embedding], torch.bfloat16)
        sample = windows.sample(max(_FLOOR_WINDOWS, windows.n_windows // _FLOOR_SHARE))

        def repeat() -> npt.NDArray[Any]:
            return compare_tokens(base, base, sample, track, f"{label}: noise", budget, spill, rounded=dtype)

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
