"""What a step is to the run loop: a plan made from names and shapes, and a function that carries it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from ..calibrate.crew import ALONE, Crew
from ..calibrate.tokens import TokenBlocks
from ..checkpoint.manifest import Account
from ..checkpoint.reader import Checkpoint
from ..checkpoint.source import PlannedSource, TensorSource
from ..checkpoint.staging import Staging
from ..checkpoint.writer import ShardPlan, TensorSpec
from .progress import Progress


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A step's output, known before its work begins."""

    specs: tuple[TensorSpec, ...]
    config: dict[str, Any]
    accounts: dict[str, Account]  # for every tensor of the input
    notes: tuple[str, ...]
    n_blocks: int
    skipped: dict[str, str] = field(default_factory=dict)  # layers that the step could have changed -> why not
    side_files: Mapping[str, bytes | Path | None] = field(default_factory=dict)  # content, a copy, or (None) left out
    token_map: tuple[int, ...] | None = None  # for every token id of the input: its id in the output, -1 when dropped
    portability: tuple[dict[str, str], ...] = ()  # per feature of the source: what becomes of it, by target
    not_stock: str = ""  # why stock transformers is not asked to load it: then our own decoder reads it back
    shard_bytes: int | None = None  # another size of the output's files than the recipe's
    streams: int = 1  # hidden states of the calibration text that it keeps
    forwards: float = 1.0  # of each block over the calibration text, a backward counted as two
    reached: float = 1.0  # share of the blocks through which the text goes
    by_tensor: bool = False  # one tensor in memory at a time instead of one block
    working_blocks: int = 0  # what it holds beside a block's weights, in blocks of float32
    working: int = 0  # and in bytes, while it is at a layer
    resident: int = 0  # bytes that it holds all along
    token_bytes: int = 0  # and per token of one calibration sequence
    flops: float = 0.0  # beyond its forwards over the calibration text
    weight_passes: float = 0.0  # numbers of weights that it goes over, a number counted as often as that is

    def tokens_after(self, ids: Tensor) -> Tensor:
        """Token ids as the output numbers them; -1 for dropped ones."""
        return ids if self.token_map is None else torch.tensor(self.token_map, dtype=torch.int64)[ids]

    def probe_after(self, ids: Tensor) -> Tensor:
        """Like `tokens_after`, but a dropped token becomes one that stays."""
        if self.token_map is None:
            return ids
        mapped = self.tokens_after(ids)
        kept = sorted(new for new in self.token_map if new >= 0)
        return torch.where(mapped >= 0, mapped, torch.tensor(kept, dtype=torch.int64)[ids % len(kept)])


def planned_output(source: str, prepared: Prepared, before: TensorSource) -> PlannedSource:
    """A step's output as names and shapes. `before`: its input."""
    return PlannedSource(
        source,
        prepared.config,
        {spec.name: spec.shape for spec in prepared.specs},
        {spec.name: spec.dtype for spec in prepared.specs},
        prepared.side_files,
        before,
    )


@dataclass(frozen=True)
class StepRun:
    """What a running step is given."""

    key: str  # "step-1": names its journal entries and files
    label: str  # for progress
    checkpoint: Checkpoint
    original: Checkpoint  # the recipe's model, which the first step changed
    directory: Path  # where its output goes
    shards: ShardPlan
    staging: Staging
    text: TokenBlocks | None
    batch: int  # calibration sequences per forward
    paused: bool  # whether a block's forward waits at its stages, or runs again for each
    budget: int  # bytes of hidden states kept in memory
    probe: Tensor  # token ids [B, T] whose logits the reloaded output must reproduce
    verify_blocks: int  # blocks that verification will reload
    progress: Progress
    device: torch.device
    crew: Crew = ALONE  # the processes that work together
    rounded_by: tuple[str, BaseModel] | None = None  # the step after this one that quantizes, and its settings
    unpacked: bool = False  # an earlier step, or run, dequantized what this one is given: it lies on a grid


@dataclass(frozen=True)
class StepResult:
    """What a step reports back."""

    modules: dict[str, Any]  # per layer: method, errors, fallback
    expected: Tensor  # logits of the probe, from memory
    receipt: dict[str, Any] = field(default_factory=dict)  # what was proved or measured of the step as a whole


@dataclass(frozen=True)
class StepKind:
    """A row of the table of steps."""

    settings: type[BaseModel]
    summary: str
    needs_text: Callable[[Any], bool]  # whether it takes calibration text, given its settings
    rounds: bool  # its output is quantized: nothing that needs full precision may follow
    prepare: Callable[[TensorSource, Any], Prepared]
    run: Callable[[StepRun, Any, Any], StepResult]
    rehearsal: Callable[[Any, Any], tuple[str, BaseModel]] | None = None
    """For a step that needs text, or more than the first block: (prepared, settings) -> the step and settings that stand
    for it in the preflight, which has neither: they change the same layers' shapes and formats."""
    paths: tuple[str, ...] = ()  # settings that are paths, or lists of mappings with paths under the same key
    decide: Callable[[TensorSource, Any, int], BaseModel] | None = None
    """For settings that may be left to suture and depend on how many calibration tokens there are: (source, settings,
    tokens) -> the settings with that decided."""
    settle: Callable[[StepRun, Any, Any], BaseModel | None] | None = None
    """For a step whose plan depends on data: decide, before `run`. The settings with the decision written out, of
    which `prepare` is asked again; None when nothing was left to decide. What `prepare` plans before must be at least as
    large, and refuse all that can be refused; shapes may only depend on it in the last step."""
    check_text: Callable[[Any, TokenBlocks], None] | None = None
    """For a step that trains: (settings, text) -> refuses text that cannot be divided, before the hours."""
    check_next: Callable[[Any, tuple[str, BaseModel] | None], None] | None = None
    """For a step that prepares the one after it: (settings, that one's name and settings, or None) -> refuses others."""
    on_answers: Callable[[Any], bool] = lambda settings: False  # whether it asks which tokens the assistant wrote
    reads_quantized: bool = False  # it takes a quantized checkpoint, of any format that suture reads


@dataclass(frozen=True)
class PlannedStep:
    """A step of a recipe, and what it will write."""

    name: str
    settings: BaseModel
    kind: StepKind
    prepared: Prepared
    shards: ShardPlan


def never(settings: Any) -> bool:
    return False


def always(settings: Any) -> bool:
    return True
