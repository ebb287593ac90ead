"""Which base a QLoRA adapter is better merged into, measured: both merges against the adapter on the 4-bit base.

Three models on the same tokens: the adapter beside what NF4 makes of the linear layers (unrounded, which is what the
unmerged pair computes, as the merge's self-check shows), the change added to the original weights, and the change added
to NF4's; the last two rounded to their stored dtypes, as they would be written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..calibrate.skeleton import open_skeleton
from ..checkpoint.source import TensorSource
from ..checkpoint.staging import Staging
from ..lora.merge import Live
from ..lora.settings import MergeSettings
from ..quant.scheme import STORAGE
from ..report.clusters import paired
from ..report.score import score
from .lora_merge import MergePlan, live_model
from .plan import Plan
from .qlora import merge_base
from .scoring import Track, kept_tokens
from .texts import Evaluation


@dataclass
class _Stored(Live):
    """The merged weights in the dtypes that they are written in."""

    def read(self, name: str) -> torch.Tensor:
        return super().read(name).to(STORAGE[self.dtypes[name]])


def compare_bases(
    plan: Plan, source: TensorSource, evaluation: Evaluation, track: Track, level: float, budget: int, staging: Staging
) -> dict[str, Any] | None:
    """Perplexities and paired ratios for the report; None unless the first step is a merge that compares."""
    step = plan.steps[0]
    if not (isinstance(step.settings, MergeSettings) and step.settings.compares):
        return None
    assert isinstance(step.prepared, MergePlan)
    windows = evaluation.windows
    models = {
        "adapter_on_nf4": ("dequantized", Live),
        "merged_into_original": ("original", _Stored),
        "merged_into_dequantized": ("dequantized", _Stored),
    }
    nll = {}
    for name, (base, kind) in models.items():
        merged = merge_base(source, step.settings.model_copy(update={"base": base}))
        skeleton = open_skeleton(live_model(step.prepared, merged, kind), device=plan.device)
        nll[name] = kept_tokens(
            staging,
            f"bases-{name}-{windows.tokens_sha256[:16]}.npy",
            lambda skeleton=skeleton, name=name: score(
                skeleton, windows, track, f"score {name.replace('_', ' ')}", budget, staging.work / "score.bin"
            ),
        )
    documents = {name: windows.by_document(values) for name, values in nll.items()}
    rows = []
    for name in ("merged_into_original", "merged_into_dequantized"):
        found = paired(
            documents["adapter_on_nf4"], documents[name], n_bytes=windows.n_bytes, level=level, cluster=windows.cluster
        )
        rows.append({"model": name, "ppl": found.new.ppl, "ratio": found.ratio, "low": found.low, "high": found.high})
    return {
        "text": evaluation.name,
        "tokens": windows.n_scored,
        "level": level,
        "adapter_on_nf4_ppl": found.base.ppl,
        "merged": rows,
    }
