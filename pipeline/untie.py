"""The step `untie`: every tensor is copied, the embedding twice."""

from __future__ import annotations

from dataclasses import dataclass

from ..calibrate.skeleton import open_layout
from ..checkpoint.layout import ModelLayout
from ..checkpoint.manifest import Account
from ..checkpoint.source import TensorSource
from ..checkpoint.writer import TensorSpec
from ..surgery.untie import UntieSettings, head_to_add, untied_config
from .derive import run_derived
from .step import Prepared, StepResult, StepRun


@dataclass(frozen=True)
class UntiePlan(Prepared):
    layout: ModelLayout
    head: str


def prepare(source: TensorSource, settings: UntieSettings) -> UntiePlan:
    """Raises SutureError when the model is not tied."""
    layout = open_layout(source)
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
        by_tensor=True,
        specs=tuple(specs),
        config=untied_config(source.config),
        accounts=accounts,
        notes=(f"{head} added: a copy of {layout.embedding}",),
        n_blocks=len(layout.blocks),
        layout=layout,
        head=head,
    )


def run(work: StepRun, plan: UntiePlan, settings: UntieSettings) -> StepResult:
    return run_derived(work, plan, lambda name: plan.layout.embedding if name == plan.head else name, exact=True)
