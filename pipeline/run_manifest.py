"""suture.json of a run: what became of every tensor, layer and file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .. import __version__
from ..checkpoint.manifest import (
    MANIFEST,
    SCHEMA,
    chain_accounts,
    file_hashes,
    read_manifest,
    to_json,
)
from ..checkpoint.reader import Checkpoint
from ..checkpoint.staging import Staging, write_whole
from ..report.document import REPORT_FILES, SAMPLES
from .cache import CacheSize
from .plan import Plan, PlannedStep
from .step import StepResult

README = "README.md"


def accounts_of(plan: Plan) -> Any:
    return chain_accounts([step.prepared.accounts for step in plan.steps])


def side_files_of(plan: Plan) -> set[str]:
    """Names of the files that came along: the input's, without those that a step left out, and what steps added."""
    names = {path.name for path in plan.checkpoint.side_files if path.name not in superseded()}
    for step in plan.steps:
        names -= set(step.prepared.side_files)
        names |= {name for name, content in step.prepared.side_files.items() if content is not None}
    return names


def superseded() -> frozenset[str]:
    """Files of an earlier suture output that speak of that output."""
    return frozenset({MANIFEST, README, *REPORT_FILES, SAMPLES})  # the card that is not suture's gets another name


def write_manifest(
    plan: Plan,
    staging: Staging,
    results: list[StepResult],
    hashes: dict[str, str],
    verification: dict[str, Any],
    cache: dict[str, CacheSize] | None,
) -> dict[str, Any]:
    modules = {name: record for result in results for name, record in result.modules.items()}
    accounts = accounts_of(plan)
    origin = {output: name for name, account in accounts.items() for output in account.outputs}
    manifest = {
        "suture": __version__,
        "schema": SCHEMA,
        "recipe": _recipe_record(plan),
        "source": {"model": plan.checkpoint.source, "revision": plan.checkpoint.revision, "weights_sha256": hashes},
        "history": _history(plan.checkpoint),
        "calibration": plan.calibration.describe() if plan.calibration else None,
        "inputs": {name: asdict(account) for name, account in sorted(accounts.items())},
        "outputs": {
            spec.name: {"dtype": spec.dtype, "shape": list(spec.shape), "from": origin[spec.name]}
            for spec in plan.steps[-1].prepared.specs
        },
        "config_edits": config_edits(plan.checkpoint.config, plan.steps[-1].prepared.config),
        "side_files": sorted(side_files_of(plan)),
        "side_file_edits": _side_file_edits(plan),
        "kv_cache": plain_sizes(cache),
        "receipts": [_receipt(step, result) for step, result in zip(plan.steps, results, strict=True)],
        "modules": modules,
        "skipped_layers": dict(plan.steps[-1].prepared.skipped) if modules else {},
        "fallbacks": {name: record["fallback"] for name, record in modules.items() if record.get("fallback")}
        | {name: reason for result in results for name, reason in result.receipt.get("fallbacks", {}).items()},
        "expert_tokens": _expert_tokens(plan, modules),
        "notes": list(plan.warnings),
        "verification": verification,
        "files": file_hashes(staging.model),
    }
    write_whole(staging.model / MANIFEST, to_json(manifest))
    return manifest


def _receipt(step: PlannedStep, result: StepResult) -> dict[str, Any]:
    """What was proved or measured of a step, and where its output runs as what it is."""
    matrix = step.prepared.portability
    return {"step": step.name, **result.receipt, **({"portability": list(matrix)} if matrix else {})}


def plain_sizes(cache: dict[str, CacheSize] | None) -> dict[str, Any] | None:
    return None if cache is None else {when: asdict(size) for when, size in cache.items()}


def _recipe_record(plan: Plan) -> dict[str, Any]:
    content = plan.recipe.model_dump(exclude={"output", "steps"})
    content["model"] = plan.checkpoint.source
    return content | {"steps": [{step.name: step.settings.model_dump()} for step in plan.steps]}


def _history(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Steps that made the input, when suture made it."""
    if not (checkpoint.path / MANIFEST).is_file():
        return []
    earlier = read_manifest(checkpoint.path)
    kept = ("suture", "recipe", "calibration")
    return [*earlier.get("history", []), {name: earlier[name] for name in kept if earlier.get(name) is not None}]


def config_edits(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "from": before.get(key), "to": after.get(key)}
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def _side_file_edits(plan: Plan) -> dict[str, str]:
    """File -> which step rewrote it, or left it out; later steps count."""
    return {
        name: f"{'rewritten' if content is not None else 'left out'} by {step.name}"
        for step in plan.steps
        for name, content in sorted(step.prepared.side_files.items())
    }


def _expert_tokens(plan: Plan, modules: dict[str, Any]) -> dict[str, Any]:
    """Calibration tokens that reached each expert, by block."""
    table: dict[str, dict[str, int]] = {}
    for linear in plan.skeleton.layout.linears:
        record = modules.get(linear.name)
        if linear.expert is not None and record is not None and record.get("tokens") is not None:
            table.setdefault(f"block {linear.block}", {})[str(linear.expert)] = record["tokens"]
    return table
