"""The step `lora.merge`: one tensor at a time, everything else copied at file speed, then checked against the live model.

`prepare` opens the adapters, reads every tensor of theirs, and finds for each what it changes; whatever cannot be
merged is refused there. `run` streams. The self-check then takes the probe through three models, block by block: the
base with its adapters unmerged, the merged weights before rounding, and the weights that were written. The first two must
agree to float32 rounding; what separates the last two is what storing cost, and is reported.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibrate.memory import release_memory
from ..calibrate.replay import Stream, run_block
from ..calibrate.skeleton import Skeleton, finite, hf_text_config, open_layout, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import ModelLayout, text_config
from ..checkpoint.manifest import Account, to_json
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.source import PlannedSource, TensorSource
from ..checkpoint.staging import Staging, write_whole
from ..checkpoint.strict_json import strict_json
from ..checkpoint.writer import ShardPlan, ShardWriter, TensorSpec
from ..lora.adapter import FINGERPRINT, TOKENIZER_FILES, Adapter, open_adapter
from ..lora.arrange import Arrangement, arrange
from ..lora.compose import fingerprint
from ..lora.delta import Rounding, effective_rank, singular_values
from ..lora.match import Weighted
from ..lora.merge import Live, Piece, hooked, merge_tensor, pieces_by_tensor
from ..lora.settings import MergeSettings
from ..quant.scheme import STORAGE
from ..quant.settings import Chosen
from ..quant.targets import select
from ..surgery.untie import head_to_add, untied_config
from .progress import Progress
from .qlora import AsTrained, merge_base, rounding_of, survival
from .step import Prepared, StepResult, StepRun
from .walk import check_exact, distance, probe_logits

_SYNC = 1 << 29  # bytes between two entries of the journal


class Rehearsal(MergeSettings):
    """The same settings for a model's first block alone, whose later blocks' keys are left out."""


@dataclass(frozen=True, eq=False)
class MergePlan(Prepared):
    adapters: tuple[Weighted, ...]
    arrangement: Arrangement


def prepare(source: TensorSource, settings: MergeSettings) -> MergePlan:
    """Raises SutureError for everything that could fail or go wrong later."""
    adapters = [Weighted(open_adapter(share.adapter), share.weight) for share in settings.shares]
    _refuse_twice(adapters)
    if not isinstance(settings, Rehearsal):
        _read_all(adapters)
    base = merge_base(source, settings)
    arrangement = arrange(
        base,
        adapters,
        expert_layout=settings.expert_layout,
        base_is_residual=settings.base_is_residual,
        blocks=1 if isinstance(settings, Rehearsal) else None,
        head_name=head_to_add,
        untied_config=untied_config,
    )
    if settings.check_base and not isinstance(settings, Rehearsal):
        _check_fingerprints(base, source, adapters)
        _check_trained_on(source, adapters)
    layout, arranged, shapes = arrangement.layout, arrangement.arranged, arrangement.shapes
    pieces = pieces_by_tensor(arrangement.changes, layout)
    for name in pieces:
        if arranged.dtypes[name] not in STORAGE:
            raise SutureError(
                f"{source.source}: {name} is {arranged.dtypes[name]}; only {', '.join(STORAGE)} weights can be merged into",
                "give the unquantized checkpoint",
            )
    specs = [TensorSpec(name, arranged.dtypes[name], shapes[name]) for name in arranged.shapes]
    return MergePlan(
        specs=tuple(specs),
        config=arrangement.config,
        accounts=_accounts(source, base, arrangement, pieces),
        notes=(*arrangement.notes, *_base_notes(source, adapters), *_which_base(base)),
        n_blocks=len(layout.blocks),
        side_files=_tokenizer(adapters, settings, arrangement),
        adapters=tuple(adapters),
        arrangement=arrangement,
    )


def _refuse_twice(adapters: Sequence[Weighted]) -> None:
    seen: set[Path] = set()
    for weighted in adapters:
        place = weighted.adapter.directory.resolve()
        if place in seen:
            raise SutureError(f"adapter: {weighted.adapter.source} is listed twice", "give it one weight")
        seen.add(place)


def _read_all(adapters: Sequence[Weighted]) -> None:
    """A damaged tensor must show before anything is written."""
    for weighted in adapters:
        for key in weighted.adapter.tensors:
            weighted.adapter.read(key)


def _check_fingerprints(base: TensorSource, source: TensorSource, adapters: Sequence[Weighted]) -> None:
    """Adapters that suture wrote know their base; a model that an earlier step has yet to make cannot be compared."""
    stored = {weighted.adapter.source: weighted.adapter.metadata.get(FINGERPRINT) for weighted in adapters}
    if isinstance(source, PlannedSource) or not any(stored.values()):
        return
    found = fingerprint(base, open_layout(base))
    for name, wanted in stored.items():
        if wanted is not None and wanted != found:
            raise SutureError(
                f"{name}: was made for another base than {source.source}: their fingerprints differ",
                "give that base, or set check_base: false if this one stands for it (another dtype, its quantized copy)",
            )


_SHAPE = ("model_type", "hidden_size", "n_embd", "num_hidden_layers", "n_layer")


def _check_trained_on(source: TensorSource, adapters: Sequence[Weighted]) -> None:
    """The model that an adapter names, where it lies on this machine, must be one like `source`: some layers of another
    model have the same shapes."""
    if isinstance(source, PlannedSource):
        return
    for weighted in adapters:
        named = Path(weighted.adapter.config.base or "") / "config.json"
        if weighted.adapter.config.base is None or not named.is_file():
            continue
        raw = strict_json(named, 1 << 26)
        trained, given = (text_config(c) if isinstance(c, Mapping) else {} for c in (raw, source.config))
        shared = bool(weighted.adapter.config.token_indices) or weighted.adapter.config.tied
        if shared and trained.get("model_type") == given.get("model_type"):  # others change one of the two tables alone
            tied = [
                bool(getattr(hf_text_config(c, source.source), "tie_word_embeddings", False)) for c in (trained, given)
            ]
            if tied[0] != tied[1]:
                raise SutureError(
                    f"{weighted.adapter.source}: changes tokens, and was trained on {named.parent}, whose head is "
                    f"{'tied to' if tied[0] else 'apart from'} its embedding; that of {source.source} is not",
                    f"put `- {'retie' if tied[0] else 'untie'}: {{}}` before it, or set check_base: false",
                )
        for key in _SHAPE:
            if key in trained and key in given and trained[key] != given[key]:
                raise SutureError(
                    f"{weighted.adapter.source}: was trained on {named.parent}, whose {key} is {trained[key]}; that of "
                    f"{source.source} is {given[key]}",
                    "give that base, or set check_base: false",
                )


def _base_notes(source: TensorSource, adapters: Sequence[Weighted]) -> list[str]:
    """What the adapters say of their base; only names, since PEFT stores nothing that could be checked."""
    notes = []
    for weighted in adapters:
        trained_on = weighted.adapter.config.base
        same = trained_on is None or Path(trained_on).name == Path(source.source.partition(" ")[0]).name
        if not same:
            notes.append(
                f"{weighted.adapter.source}: says that it was trained on {trained_on}, merged into {source.source}"
            )
    return notes


def _tokenizer(
    adapters: Sequence[Weighted], settings: MergeSettings, arrangement: Arrangement
) -> dict[str, Path | None]:
    """Side files to write instead of the base's; None: leave the base's out."""
    grown = (
        arrangement.shapes[arrangement.layout.embedding] != arrangement.arranged.shapes[arrangement.layout.embedding]
    )
    if settings.tokenizer == "base" or (settings.tokenizer == "auto" and not grown):
        return {}
    having = [weighted.adapter for weighted in adapters if weighted.adapter.tokenizer_files]
    if not having and settings.tokenizer == "auto":
        return {}
    if len(having) != 1:
        raise SutureError(
            f"tokenizer: {len(having)} of the adapters have tokenizer files, one was expected",
            "set tokenizer: base, and copy the right files yourself",
        )
    own = {path.name: path for path in having[0].tokenizer_files}
    return {name: own.get(name) for name in TOKENIZER_FILES}


def _which_base(base: TensorSource) -> list[str]:
    """The choice that decides what a QLoRA adapter is added to, by name."""
    if isinstance(base, AsTrained):
        return [f"base: dequantized: merged into what NF4 makes of {len(base.transposed)} linear layers"]
    return []


def _accounts(
    source: TensorSource, base: TensorSource, arrangement: Arrangement, pieces: dict[str, list[Piece]]
) -> dict[str, Account]:
    arranged, layout = arrangement.arranged, arrangement.layout
    new_biases = {f"{name.removesuffix('.bias')}.weight": name for name in arranged.zeros}
    accounts = {}
    for name in source.shapes:
        outputs = arranged.outputs_of(name)
        if not outputs:
            reason = layout.stale.get(name) or "not read by a loader: a stale buffer, or a copy of the tied embedding"
            accounts[name] = Account("dropped", reason=reason)
            continue
        changed = [output for output in outputs if output in pieces]
        beside = tuple(new_biases[output] for output in outputs if output in new_biases)
        how = [f"adapter merged into {', '.join(changed)}" if len(outputs) > 1 else "adapter merged"] if changed else []
        how = (["bias added"] if beside else []) + how
        if isinstance(base, AsTrained) and name in base.transposed:
            how = ["through NF4 and back", *how]
        accounts[name] = Account("changed" if how else "copied", (*outputs, *beside), "; ".join(how))
    return accounts


def rehearsal(plan: MergePlan, settings: MergeSettings) -> tuple[str, MergeSettings]:
    """The first block with the part of the adapters that is for it."""
    return "lora.merge", Rehearsal(**settings.model_dump())


# -- streaming -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def run(work: StepRun, plan: MergePlan, settings: MergeSettings) -> StepResult:
    """Write every tensor, then check what was written against the live model."""
    _same_adapters(work, plan)
    base = merge_base(work.checkpoint, settings)
    again = _rounded_again(work, plan.arrangement.layout)
    tensors = write_merged(
        base, plan, work.shards, work.directory, work.staging, work.key, work.progress, work.label, again
    )
    write_whole(work.directory / "config.json", to_json(plan.config))
    receipt = {"adapters": _adapter_records(plan), "base": settings.base, "tensors": tensors, **_summary(tensors)}
    _refuse_vanishing(work, settings, receipt["survives_requantizing"])
    checked, expected = _self_check(work, plan, base, open_checkpoint(work.directory))
    return StepResult({}, expected, receipt | checked)


def _same_adapters(work: StepRun, plan: MergePlan) -> None:
    """The journal remembers which adapters a run began with: a resumed one must not mix in others."""
    hashes = [weighted.adapter.sha256 for weighted in plan.adapters]
    begun = work.staging.find(step=work.key, unit="adapters")
    if begun is None:
        work.staging.record({"step": work.key, "unit": "adapters", "sha256": hashes})
    elif begun["sha256"] != hashes:
        raise SutureError("adapter: its weights are not those that the interrupted run had", "start with --overwrite")


_VANISHED = 0.5  # share of a change below which quantizing again is said to lose it


def _refuse_vanishing(work: StepRun, settings: MergeSettings, share: float | None) -> None:
    """A later step that quantizes would undo the merge: said before the hours, unless it is wanted."""
    if share is None or share >= _VANISHED or work.rounded_by is None or settings.allow_vanishing:
        return
    raise SutureError(
        f"{work.label}: the change is smaller than the quantization steps and would vanish: merged into dequantized "
        f"weights, {100 * share:.1f} % of it would survive being quantized again ({work.rounded_by[0]})",
        "merge into the original weights and quantize those (base: original), or set allow_vanishing: true",
    )


def write_merged(
    source: TensorSource,
    plan: MergePlan,
    shards: ShardPlan,
    directory: Path,
    staging: Staging,
    key: str,
    progress: Progress,
    label: str,
    again: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> dict[str, Any]:
    """Stream all tensors to their places; returns what became of each changed parameter. `again`: what a later step will
    make of a tensor that lies on a grid already.

    The journal's entries under `key` say how far a run that was killed had come.
    """
    pieces = pieces_by_tensor(plan.arrangement.changes, plan.arrangement.layout)
    done = staging.find(step=key, unit="tensors") or {"upto": 0, "records": {}}
    records: dict[str, Any] = dict(done["records"])
    with (
        ShardWriter(directory, shards) as writer,
        ThreadPoolExecutor(1, "suture-read") as reader,
        ThreadPoolExecutor(1, "suture-write") as scribe,
        ThreadPoolExecutor(1, "suture-sync") as syncer,
    ):

        def sync(entry: dict[str, Any]) -> None:
            writer.sync()
            staging.record(entry)

        syncing: Future[None] | None = None
        writing: Future[None] | None = None
        waiting = 0
        todo = plan.specs[done["upto"] :]
        ahead = _ahead(reader, [_reading(source, plan, spec.name) for spec in todo])
        numbered = zip(range(done["upto"] + 1, len(plan.specs) + 1), todo, ahead, strict=True)
        for upto, spec, stored in progress.track(numbered, len(todo), label):
            if spec.name not in pieces or any(piece.place.expert is not None for piece in pieces[spec.name]):
                finite(stored, spec.name, source.source)
            if spec.name in pieces:
                requantize = _requantizing(source, plan, spec.name, again or {})
                before = stored.clone() if requantize else stored
                stored, found = merge_tensor(stored, pieces[spec.name])
                if not all(map(_sound, found.values())):
                    finite(_reading(source, plan, spec.name)(), spec.name, source.source)
                    _check_overflow(stored, spec.name)
                made = {name: _record(plan, name, rounding) for name, rounding in found.items()}
                if requantize and before.shape == stored.shape:
                    along, energy = survival(before, stored, requantize(stored))
                    for record in made.values():
                        record["survives_requantizing"] = _short(along / energy) if energy else None
                records |= made
            if writing is not None:
                writing.result()  # one tensor behind at most: two are in memory, and one that is read ahead
            writing = scribe.submit(writer.write, spec.name, stored)
            waiting += spec.nbytes
            if waiting >= _SYNC or upto == len(plan.specs):
                writing.result()
                if syncing is not None:
                    syncing.result()
                entry = {"step": key, "unit": "tensors", "upto": upto, "records": dict(records)}
                syncing, waiting = syncer.submit(sync, entry), 0
        if syncing is not None:
            syncing.result()
    release_memory(sum(spec.nbytes for spec in plan.specs))
    return records


def _rounded_again(work: StepRun, layout: ModelLayout) -> dict[str, Callable[[Tensor], Tensor]]:
    """Tensor -> what the step that quantizes later makes of it, where the weights lie on a grid already."""
    if work.rounded_by is None or not work.unpacked:
        return {}
    settings = work.rounded_by[1]
    chosen = layout.linears
    if isinstance(settings, Chosen):
        with contextlib.suppress(SutureError):  # names of the class that a step between the two makes: then all count
            chosen = select(layout, settings.targets, settings.ignore, settings.layers).chosen
    Q = rounding_of(*work.rounded_by)
    return {x.place.tensor: (lambda W: Q(W.T).T) if x.conv1d else Q for x in chosen if x.expert is None}


def _requantizing(
    source: TensorSource, plan: MergePlan, name: str, again: Mapping[str, Callable[[Tensor], Tensor]]
) -> Callable[[Tensor], Tensor] | None:
    """What quantizing again does to a tensor as it is stored; None for one that was not, or will not be, quantized."""
    if isinstance(source, AsTrained):
        grid = plan.arrangement.arranged.names.get(name)
        return None if grid is None or grid not in source.transposed else lambda W: source.again(grid, W)
    return again.get(name)


def _reading(source: TensorSource, plan: MergePlan, name: str) -> Callable[[], Tensor]:
    arranged = replace(plan.arrangement.arranged, base=source)
    return lambda: arranged.read(name)


def _ahead(pool: ThreadPoolExecutor, reads: Sequence[Callable[[], Tensor]]) -> Iterator[Tensor]:
    """Results of `reads` in order, the next one under way while the last is used."""
    if not reads:  # a resumed run had written them all
        return
    coming: Future[Tensor] | None = pool.submit(reads[0])
    for following in (*reads[1:], None):
        assert coming is not None
        tensor = coming.result()
        coming = pool.submit(following) if following is not None else None
        yield tensor


def _sound(found: Rounding) -> bool:
    """Whether no number of the weight, before or after, is NaN or infinite: it would be in these sums of squares."""
    return all(map(math.isfinite, (found.weight, found.delta, found.kept, found.noise)))


def _check_overflow(tensor: Tensor, name: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise SutureError(
            f"{name}: merged, it holds values too large for {tensor.dtype}".replace("torch.", ""),
            "the adapter is not of this model, or convert the model to bfloat16 or float32 first",
        )


# -- records -------------------------------------------------------------------------------------------------------------


def _record(plan: MergePlan, parameter: str, found: Rounding) -> dict[str, Any]:
    change = plan.arrangement.changes[parameter]
    record: dict[str, Any] = {
        "how": [
            kind
            for kind, used in (
                ("replaced", change.replaced),
                ("low rank", change.low_rank),
                ("bias added", change.added),
                ("rows replaced", change.rows),
            )
            if used
        ],
        "weight_norm": _short(found.weight),
        "delta_norm": _short(found.delta),
        "relative_delta": _short(found.delta / found.weight) if found.weight else None,
        "kept": _short(found.kept),
        "lost_to_rounding": _short(found.noise),
        "unchanged_share": _short(found.unchanged),
    }
    if change.low_rank:
        record["scales"] = [_short(low.scale * low.share) for low in change.low_rank]
        record["ranks"] = [low.factors()[0].shape[0] for low in change.low_rank]
        spectra = [singular_values(B, A) for A, B in (low.factors() for low in change.low_rank)]
        record["effective_ranks"] = [_short(effective_rank(values)) for values in spectra]
        if any("magnitude" in low.part.keys for low in change.low_rank):
            record["how"].append("DoRA")
    return record


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _summary(tensors: dict[str, Any]) -> dict[str, Any]:
    """The whole change beside the whole of the weights it is in, and how much of it the stored dtype kept."""
    weight = math.sqrt(sum(record["weight_norm"] ** 2 for record in tensors.values()))
    delta = math.sqrt(sum(record["delta_norm"] ** 2 for record in tensors.values()))
    lost = math.sqrt(sum((record["lost_to_rounding"] * record["delta_norm"]) ** 2 for record in tensors.values()))
    kept = sum(record["kept"] * record["delta_norm"] ** 2 for record in tensors.values())
    notes = []
    if delta == 0:
        notes.append("the adapter's change is zero: the output is the base")
    elif lost > 0.3 * delta:
        notes.append(
            f"{100 * lost / delta:.0f} % of the change is rounding noise: it is small beside the steps of the stored dtype; "
            "float32 weights would keep it"
        )
    regridded = [record for record in tensors.values() if record.get("survives_requantizing") is not None]
    energy = sum(record["delta_norm"] ** 2 for record in regridded)
    survives = sum(record["survives_requantizing"] * record["delta_norm"] ** 2 for record in regridded)
    share = survives / energy if energy else None
    if share is not None and share < _VANISHED:
        notes.append(
            "this change is smaller than the quantization steps of its base: quantized the same way again, "
            f"{100 * share:.1f} % of it would be left; to keep it, merge into the original weights and quantize those"
        )
    return {
        "relative_delta": _short(delta / weight) if weight else None,
        "survives_requantizing": _short(share) if share is not None else None,
        "kept": _short(kept / delta**2) if delta else None,
        "lost_to_rounding": _short(lost / delta) if delta else None,
        "notes": notes,
    }


def _adapter_records(plan: MergePlan) -> list[dict[str, Any]]:
    return [_adapter_record(weighted.adapter, weighted.share, plan) for weighted in plan.adapters]


def _adapter_record(adapter: Adapter, share: float, plan: MergePlan) -> dict[str, Any]:
    return {
        "adapter": adapter.source,
        "weight": share,
        "sha256": adapter.sha256,
        "trained_on": adapter.config.base,
        "keys": dict(sorted(plan.arrangement.matched.keys[adapter.source].items())),
    }


# -- the proof -----------------------------------------------------------------------------------------------------------


def _self_check(
    work: StepRun, plan: MergePlan, base: TensorSource, written: Checkpoint
) -> tuple[dict[str, Any], Tensor]:
    """(receipt, logits of the probe by the written weights): unmerged against merged, and merged against stored."""
    n_blocks = min(work.verify_blocks, plan.n_blocks)
    live = live_model(plan, base, Live, merged=False)
    exact = live_model(plan, base, Live)

    def logits_of(source: TensorSource) -> Tensor:
        return probe_logits(open_skeleton(source, device=work.device), work.probe, n_blocks)

    def nudged() -> Tensor:
        return logits_of(live_model(plan, base, _Nudged))

    unmerged = _unmerged_logits(work, open_skeleton(live, device=work.device), n_blocks, live)
    merged, stored = logits_of(exact), logits_of(written)

    same = check_exact(f"{work.label}: merging", unmerged, merged, nudged)
    found = distance(merged, stored)
    rounded = {key: found[key] for key in ("max_logit_difference", "kl")}
    return {"unmerged_against_merged": same | {"blocks": n_blocks}, "merged_against_stored": rounded}, stored


class _Nudged(Live):
    """The merged weights, each moved in its last float32 bits, up or down by chance: as much as a sum of hundreds is off."""

    def read(self, name: str) -> Tensor:
        tensor = super().read(name).float()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return tensor * (1 + 2.0**-21 * torch.empty_like(tensor).bernoulli_(generator=generator).mul_(2).sub_(1))


def live_model(plan: MergePlan, base: TensorSource, kind: type[Live], merged: bool = True) -> Live:
    """The model with its adapters, merged or to be added by hooks, on `base`."""
    arrangement = plan.arrangement
    return kind(
        arranged=replace(arrangement.arranged, base=base),  # in `prepare` it may have been a planned one
        config=arrangement.config,
        layout=arrangement.layout,
        changes=arrangement.changes,
        shapes=arrangement.shapes,
        dtypes=dict(arrangement.arranged.dtypes),
        merged=merged,
    )


def _unmerged_logits(work: StepRun, skeleton: Skeleton, n_blocks: int, live: Live) -> Tensor:
    """Logits [B, T, vocab] of the probe after `n_blocks` blocks, the adapters added by hooks."""
    stream = Stream.start(skeleton, [work.probe])
    for index in range(n_blocks):
        skeleton.load_block(index)
        with hooked(skeleton, live, list(skeleton.layout.block_tensors(index))):
            run_block(skeleton, index, stream)
        skeleton.free_block(index)
    skeleton.load_head()
    with hooked(skeleton, live, [f"{skeleton.family.head}.weight"]):
        logits = skeleton.logits(stream.hidden[0].to(skeleton.device), torch.arange(work.probe.shape[1])).cpu()
    skeleton.free_head()
    return logits
