"""Whether a changed model's residual stream can be set beside the original's, and by which factor it was scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calibrate.skeleton import open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.source import TensorSource

_NEAR = 0.02  # of the embeddings' size: storing them in bfloat16 once more moves them by 0.002


def frame_factor(what: str, original: TensorSource, changed: TensorSource, ids: Tensor) -> float:
    """How many times larger the residual stream of `changed` is (mla and rescale_residual scale it); else 1.

    Raises SutureError when the models differ in blocks or vocabulary, or their embeddings of `ids` in more than a factor.
    """
    ours, theirs = open_skeleton(original), open_skeleton(changed)
    counts, found = [(model.n_blocks, *model.source.shapes[model.layout.embedding]) for model in (ours, theirs)]
    if counts != found:
        raise SutureError(
            f"{what}: the original has {counts[0]} blocks and an embedding of {list(counts[1:])}, the model by now "
            f"{found[0]} and {list(found[1:])}: their residual streams cannot be compared",
            f"put {what} before the step that changes them",
        )
    x, y = ours.embed(ids).double(), theirs.embed(ids).double()
    factor = float((x * y).sum() / x.square().sum().clamp_min(torch.finfo(torch.float64).tiny))
    if float((y - factor * x).norm()) > _NEAR * float(y.norm()):
        raise SutureError(
            f"{what}: a step before it turned the residual stream: its embeddings are no multiple of the original's",
            f"put {what} before that step (rotate is one)",
        )
    return 1.0 if abs(factor - 1) < _NEAR else factor
