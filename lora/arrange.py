"""From a model and adapters to everything that merging needs to know: arrangement, changes, output shapes.

The decision that others get wrong is made here: what happens to a tied embedding. Embedding and head are one tensor; an
adapter that changes only one of them, or both differently, forces them apart, and then each gets its own change. One
that was trained with `ensure_weight_tying`, or changes both alike, leaves them tied and changes the tensor once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..calibrate.skeleton import Skeleton, hf_text_config, meta_model, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import ModelLayout, text_config
from ..checkpoint.source import PlannedSource, TensorSource
from .config import refuse_changed_base
from .match import Change, ExpertLayout, Matched, Weighted, match
from .merge import same_change
from .origin import Arranged, bias_switch, replicated, with_biases, with_head, with_vocabulary


@dataclass(frozen=True, eq=False)
class Arrangement:
    """The base arranged, and what every adapter's tensors do to it."""

    arranged: Arranged
    layout: ModelLayout  # of the output; module shapes may have grown
    matched: Matched
    config: dict[str, Any]  # of the output
    shapes: dict[str, tuple[int, ...]]  # of the output's tensors
    notes: tuple[str, ...]
    untied: bool

    @property
    def changes(self) -> dict[str, Change]:
        return self.matched.changes


def arrange(
    source: TensorSource,
    adapters: list[Weighted],
    *,
    expert_layout: ExpertLayout = "peft",
    base_is_residual: bool = False,
    blocks: int | None = None,
    head_name: Callable[[ModelLayout], str],
    untied_config: Callable[[dict[str, Any]], dict[str, Any]],
) -> Arrangement:
    """Match adapters with the model `source`.

    `head_name`, `untied_config`: how a tied model's head is called and its config changed if it has to be untied.
    `blocks`: for a rehearsal on the model's first blocks. Raises SutureError for whatever could fail or go wrong later.
    """
    if not base_is_residual:
        for weighted in adapters:
            refuse_changed_base(weighted.adapter.config, weighted.adapter.source)
    skeleton = open_skeleton(source)
    layout = skeleton.layout
    dropped = set(layout.stale) | ({layout.head_duplicate} if layout.head_duplicate else set())
    arranged = Arranged.of(source, tuple(dropped))
    ranges = _replication(adapters)
    if ranges:
        arranged = replicated(arranged, layout, ranges if blocks is None else [(0, blocks)])
        skeleton = open_skeleton(arranged)
        layout = skeleton.layout
    matched = match(
        adapters,
        layout,
        _parameter_shapes(skeleton),
        expert_layout=expert_layout,
        base_is_residual=base_is_residual,
        blocks=blocks,
    )
    notes = list(matched.notes)
    embedding, head = _ends(layout)
    ends = (matched.changes.get(embedding), matched.changes.get(head))
    untie = layout.head is None and _parts_ways(adapters, *ends, layout.family.embedding)
    if untie:
        _share_base(matched.changes, embedding, head)
        name = head_name(layout)
        arranged = with_head(arranged, name, layout.embedding, untied_config(arranged.config))
        notes.append(f"{name} added: the adapter changes embedding and head differently, so they are untied")
    arranged = _biased(arranged, layout, matched.changes)
    layout = open_skeleton(arranged).layout if untie or arranged.zeros else layout
    config, shapes = _grow(arranged, layout, matched.changes)
    return Arrangement(arranged, layout, matched, config, shapes, tuple(notes), untie)


def _replication(adapters: list[Weighted]) -> tuple[tuple[int, int], ...]:
    found = {weighted.adapter.config.layer_replication for weighted in adapters}
    if len(found) > 1:
        raise SutureError("the adapters stack layers differently (layer_replication)", "merge them one after the other")
    return found.pop()


def _parameter_shapes(skeleton: Skeleton) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in skeleton.model.named_parameters(remove_duplicate=False)}


def _ends(layout: ModelLayout) -> tuple[str, str]:
    family = layout.family
    return f"{family.stem}{family.embedding}.weight", f"{family.head}.weight"


def _parts_ways(adapters: list[Weighted], embedding: Change | None, head: Change | None, name: str) -> bool:
    """Whether a tied tensor has to become two. `name`: of the embedding; ensure_weight_tying ties only `embed_tokens`."""
    if (embedding is None and head is None) or same_change(embedding, head):
        return False
    if all(weighted.adapter.config.tied for weighted in adapters):
        given = [change for change in (embedding, head) if change is not None]
        magnitudes = any("magnitude" in low.part.keys for change in given for low in change.low_rank)
        if len(given) == 2 and not magnitudes:
            raise SutureError(
                "ensure_weight_tying is set, but the adapter changes embedding and head differently",
                "the adapter's config is not of this file",
            )
        if len(given) == 1 and name == "embed_tokens":
            return False
    if head is not None or embedding is None or embedding.low_rank:
        return True
    # only the embedding: rows of a token adapter, and a table that merely grew, are the head's as well
    saved = {s.rpartition(".")[2] for weighted in adapters for s in weighted.adapter.config.modules_to_save}
    return bool(embedding.replaced) and name in saved


def _share_base(changes: dict[str, Change], embedding: str, head: str) -> None:
    """What PEFT saved of the tensor below its LoRA is the base of both, and rows trained in the embedding are the head's."""
    for one, other in ((embedding, head), (head, embedding)):
        change = changes.get(one)
        if change is None:
            continue
        below = [s for s in change.replaced if s.key.endswith("base_layer.weight")]
        mine = changes.get(other)
        if below and (mine is None or not mine.replaced):
            changes.setdefault(other, Change(other)).replaced.extend(below)
    first, second = changes.get(embedding), changes.get(head)
    if first is not None and first.rows and not (second is not None and (second.rows or second.replaced)):
        changes.setdefault(head, Change(head)).rows.extend(first.rows)


def _biased(arranged: Arranged, layout: ModelLayout, changes: Mapping[str, Change]) -> Arranged:
    """With zero biases where the adapter adds to ones that are not there."""
    absent = [name for name, change in changes.items() if change.added and name not in layout.places]
    if not absent:
        return arranged
    keys = sorted({bias_switch(arranged.config, layout, name.removesuffix(".bias")) for name in absent})
    switched = with_biases(arranged, keys, {})
    wanted = PlannedSource(arranged.source, switched.config, dict(arranged.shapes), dict(arranged.dtypes))
    added = _missing_biases(wanted, layout)
    lost = [name for name in absent if layout_name(layout, name) not in added]
    if lost:
        raise SutureError(f"{lost[0]}: the architecture has no such bias", "use the adapter unmerged, through PEFT")
    return with_biases(arranged, keys, added)


def layout_name(layout: ModelLayout, parameter: str) -> str:
    """Disk name of a parameter that lies where its module name says."""
    return layout.disk_stem + parameter.removeprefix(layout.family.stem)


def _missing_biases(wanted: PlannedSource, layout: ModelLayout) -> dict[str, tuple[str, tuple[int, ...]]]:
    text = {key: value for key, value in text_config(wanted.config).items() if key != "quantization_config"}
    model = meta_model(hf_text_config(text, wanted.source), layout.family, torch.device("cpu"))
    dtype = wanted.dtypes[layout.embedding]
    return {
        layout_name(layout, name): (dtype, tuple(p.shape))
        for name, p in model.named_parameters()
        if name.endswith(".bias") and name not in layout.places
    }


def _grow(
    arranged: Arranged, layout: ModelLayout, changes: Mapping[str, Change]
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """(config, shapes of all tensors) of the output: a vocabulary that grew must have grown at both ends."""
    shapes = dict(arranged.shapes)
    for parameter in _ends(layout):
        change = changes.get(parameter)
        if change is not None and change.shape is not None:
            shapes[layout.places[parameter].tensor] = change.shape
    rows = shapes[layout.embedding][0]
    if layout.head is not None and shapes[layout.head][0] != rows:
        raise SutureError(
            f"the adapter makes {layout.embedding} {rows} rows and leaves {layout.head} {shapes[layout.head][0]}",
            "its vocabulary grew on one side only: save both embed_tokens and lm_head with it",
        )
    grown = rows != arranged.shapes[layout.embedding][0]
    for change in changes.values():
        for stored in change.rows:
            if max(stored.rows, default=0) >= shapes[layout.places[change.parameter].tensor][0]:
                raise SutureError(
                    f"{stored.adapter.source}: trainable_token_indices has {max(stored.rows)}, the model has {rows} tokens",
                    "give the base that the adapter was trained on",
                )
    return with_vocabulary(arranged.config, rows) if grown else arranged.config, shapes
