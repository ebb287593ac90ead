"""The step `untie`: every tensor is copied, the embedding twice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..calibrate.replay import Stream, run_block
from ..calibrate.skeleton import Skeleton, open_skeleton
from ..checkpoint.layout import ModelLayout
from ..checkpoint.manifest import Account
from ..checkpoint.source import TensorSource
from ..checkpoint.writer import ShardWriter, TensorSpec
from ..surgery.untie import UntieSettings, head_to_add, untied_config
from .step import Prepared, StepResult, StepRun


@dataclass(frozen=True)
class UntiePlan(Prepared):
    layout: ModelLayout
    head: str


def prepare(source: TensorSource, settings: UntieSettings) -> UntiePlan:
    """Raises SutureError when the model is not tied."""
    layout = open_skeleton(source).layout
    head = head_to_add(layout)
    names = [name for name in source.shapes if name not in layout.stale and name != head]
    specs = [TensorSpec(name, source.dtypes[name], source.shapes[name]) for name in names]
    specs.append(TensorSpec(head, source.dtypes[layout.embedding], source.shapes[layout.embedding]))
    accounts = {name: Account("copied", (name,)) for name in names}
    accounts[layout.embedding] = Account("copied", (layout.embedding, head))
    accounts |= {name: Account("dropped", reason=reason) for name, reason in layout.stale.items()}
    if layout.head_duplicate:
        accounts[head] = Account("copied", (head,))
    return UntiePlan(
        specs=tuple(specs),
        config=untied_config(source.config),
        accounts=accounts,
        notes=(f"{head} added: a copy of {layout.embedding}",),
        n_blocks=len(layout.blocks),
        layout=layout,
        head=head,
    )


def run(work: StepRun, plan: UntiePlan, settings: UntieSettings) -> StepResult:
    """Copy tensor by tensor."""
    with ShardWriter(work.directory, work.shards) as writer:
        for spec in work.progress.track(plan.specs, len(plan.specs), work.label):
            origin = plan.layout.embedding if spec.name == plan.head else spec.name
            writer.write_bytes(spec.name, work.checkpoint.read_bytes(origin))
        writer.sync()
    return StepResult({}, _logits(open_skeleton(work.checkpoint, device=work.device), work))


@torch.no_grad()
def _logits(skeleton: Skeleton, work: StepRun) -> torch.Tensor:
    """The tied model's logits on the probe, which the untied one must reproduce."""
    stream = Stream.start(skeleton, [work.probe])
    for index in range(min(work.verify_blocks, skeleton.n_blocks)):
        skeleton.load_block(index)
        run_block(skeleton, index, stream)
        skeleton.free_block(index)
    skeleton.load_head()
    return skeleton.logits(stream.hidden[0].to(skeleton.device), torch.arange(work.probe.shape[1])).cpu()
