"""Read tasks' files and score their requests under a base and a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..calibrate.documents import read_rows
from ..checkpoint.errors import SutureError
from ..checkpoint.staging import Staging
from ..report.task_forms import Item, read_items
from ..report.tasks import answers, compare_answers, item_records, log_likelihoods, request_windows
from ..report.windows import Windows
from .recipe import TaskSettings
from .scoring import Scorer, kept_tokens
from .texts import TextModel


@dataclass(frozen=True)
class TaskPlan:
    """A task, read and tokenized before any model runs."""

    name: str
    items: tuple[Item, ...]
    windows: Windows
    protocol: str
    warnings: tuple[str, ...] = ()


def plan_tasks(settings: Sequence[TaskSettings], model: TextModel) -> tuple[TaskPlan, ...]:
    """Raises SutureError for a file that cannot be read, items of no known form, requests that do not fit."""
    plans = []
    for wanted in settings:
        if model.tokenizer is None:
            raise SutureError(model.missing)
        items = read_items(read_rows(wanted.data), wanted.form, wanted.data)[: wanted.limit]
        window = min(2048, model.max_positions or 2048)
        windows = request_windows(items, model.tokenizer, window=window, bos_id=model.bos_id, source=wanted.data)
        name = wanted.name or Path(wanted.data.split(":")[-1]).name.split(".")[0]
        bos = "no BOS" if model.bos_id is None else "BOS before each request"
        protocol = f"log-likelihood, zero-shot, {len(items)} items, {windows.n_windows} requests, {bos}, float32"
        warnings = tuple(model.warn_without_bos(name, windows.ids))
        plans.append(TaskPlan(name, tuple(items), windows, protocol, warnings))
    return tuple(plans)


def run_tasks(
    plans: Sequence[TaskPlan],
    scorer: Scorer,
    *,
    level: float,
    budget: int = 4 << 30,
    staging: Staging | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(the report's `tasks`, what each model did with each item)."""
    rows: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    for plan in plans:
        windows = plan.windows
        spill = staging.work / "score.bin" if staging is not None else None

        def measure(windows: Windows = windows, spill: Path | None = spill, name: str = plan.name) -> Any:
            return scorer.measure(("base", "candidate"), windows, f"task {name}", budget, spill)

        tokens = kept_tokens(staging, f"task-{windows.tokens_sha256[:16]}.npy", measure)
        sums = {model: log_likelihoods(windows, tokens[f"nll_{model}"]) for model in ("base", "candidate")}
        found = {
            model: answers(plan.items, windows, tokens[f"nll_{model}"], tokens[f"right_{model}"]) for model in sums
        }
        both = (found["base"], found["candidate"])
        rows += compare_answers(plan.name, plan.items, *both, level=level, protocol=plan.protocol)
        records += item_records(plan.name, plan.items, sums, found)
    return rows, records
