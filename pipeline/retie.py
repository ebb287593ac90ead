"""The step `retie`: every tensor is copied but the head, which must equal the embedding."""

from __future__ import annotations

from dataclasses import dataclass

from ..calibrate.skeleton import open_layout
from ..checkpoint.errors import SutureError
from ..checkpoint.manifest import Account
from ..checkpoint.source import TensorSource
from ..surgery.retie import RetieSettings, check_equal, tied_config
from .derive import copied, run_derived
from .step import Prepared, StepResult, StepRun


@dataclass(frozen=True)
class RetiePlan(Prepared):
    embedding: str
    head: str


def prepare(source: TensorSource, settings: RetieSettings) -> RetiePlan:
    """Raises SutureError when the head is tied already, or of another shape than the embedding."""
    layout = open_layout(source)
    if layout.head is None:
        raise SutureError("retie: this model's head is tied to its embedding already", "remove the step")
    if source.shapes[layout.head] != source.shapes[layout.embedding]:
        raise SutureError(f"retie: {layout.head} and {layout.embedding} have different shapes", "remove the step")
    specs, accounts = copied(source, layout)
    accounts[layout.head] = Account("dropped", reason=f"equal to {layout.embedding}, to which the head is tied")
    return RetiePlan(
        by_tensor=True,
        specs=tuple(spec for spec in specs if spec.name != layout.head),
        config=tied_config(source.config),
        accounts=accounts,
        notes=(),
        n_blocks=len(layout.blocks),
        embedding=layout.embedding,
        head=layout.head,
    )


def run(work: StepRun, plan: RetiePlan, settings: RetieSettings) -> StepResult:
    """Raises SutureError with the difference when the two are not equal."""
    read = work.checkpoint.read
    check_equal(read(plan.embedding), read(plan.head), (plan.embedding, plan.head))
    return run_derived(work, plan, lambda name: name, exact=True)
