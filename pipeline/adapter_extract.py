"""A low-rank adapter out of two checkpoints, and the perplexity by its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..calibrate.skeleton import Skeleton, finite, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from ..checkpoint.reader import Checkpoint
from ..checkpoint.staging import check_output
from ..lora.adapter import open_adapter
from ..lora.arrange import arrange
from ..lora.compose import Factors, Form, base_metadata, compose, runtime_names
from ..lora.delta import reduce, singular_values
from ..lora.extract import Spectrum, rank_for_energy, ranks_for_budget, spectrum
from ..lora.match import Change, Weighted
from ..lora.merge import Live
from ..quant.targets import select
from ..report.clusters import paired
from ..report.score import score
from ..surgery.untie import head_to_add, untied_config
from .adapter_files import Written, open_dense, runtime_path, short, stored_weight, write_adapter
from .progress import Progress, default_progress
from .recipe import ReportSettings
from .texts import evaluation_text, text_model


def extract(
    base: str | Path,
    tuned: str | Path,
    output: str | Path,
    *,
    rank: int | None = None,
    energy: float | None = None,
    budget: int | None = None,
    max_rank: int = 256,
    targets: Sequence[str] = ("all-linear",),
    embeddings: Literal["full", "skip"] = "full",
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Written:
    """The difference of two checkpoints as an adapter of `base`.

    Exactly one of `rank` (of every layer), `energy` (share of each layer's ||D||^2 to keep) and `budget` (parameters of
    all layers together) says how much is kept. Norms and biases that differ are stored in full, embeddings and head too
    unless `embeddings` is skip; whatever differs and is not covered is in the notes.
    """
    progress = progress or default_progress()
    output = Path(output)
    if sum(x is not None for x in (rank, energy, budget)) != 1:
        raise SutureError("rank, energy, budget: exactly one of them says how much is kept", "for example --rank 16")
    if (rank is not None and rank < 1) or (energy is not None and not 0 < energy <= 1):
        raise SutureError("rank must be above 0 and energy in (0, 1]", "for example --energy 0.9")
    (first, before), (second, after) = open_dense(base), open_dense(tuned)
    check_output(output, first.path, overwrite, False)
    check_output(output, second.path, overwrite, False)
    _same_shapes(first, before, second, after)
    chosen = [linear for linear in select(before.layout, targets, ()).chosen if linear.expert is None]
    found: dict[str, Spectrum] = {}
    most = rank or max_rank
    for linear in progress.track(chosen, len(chosen), "extract"):
        D = _whole(after, linear).double() - _whole(before, linear).double()
        if bool(D.any()):
            found[linear.module] = spectrum(D, min(most, *D.shape), seed)
    if not found:
        raise SutureError(f"{tuned}: its targeted layers are equal to {base}'s", "is it the tuned model?")
    ranks = _ranks(found, rank, energy, budget)
    by_module = {linear.module: linear for linear in chosen}
    modules, records, notes = {}, {}, []
    for module, spectral in found.items():
        r, linear = ranks[module], by_module[module]
        records[linear.name] = {"r": r, "kept": short(spectral.kept(r)), "delta_norm": short(spectral.energy**0.5)}
        if r:
            modules[runtime_path(before, linear)] = spectral.truncated(r)
    saved, left = _beside_linears(before, after, {by_module[m].place.tensor for m in found}, embeddings, modules)
    notes += [f"not covered: {name} differs ({reason})" for name, reason in left.items()]
    total = sum(s.energy for s in found.values())
    kept = sum(s.kept(ranks[m]) * s.energy for m, s in found.items()) / total
    notes.append(f"{100 * kept:.2f} % of the layers' squared change is kept")
    form = Form(base=str(first.path), saved=saved, fan_in_fan_out=before.family.conv1d)
    new = compose(modules, form, base_metadata(before.source, before.layout))
    settings = {"rank": rank, "energy": energy, "budget": budget, "max_rank": max_rank, "seed": seed}
    settings |= {"targets": list(targets), "embeddings": embeddings}
    source = {"base": first.source, "tuned": second.source}
    return write_adapter(new, output, "lora extract", settings, source, records, notes, overwrite)


def _whole(skeleton: Skeleton, linear: Linear) -> Tensor:
    return finite(stored_weight(skeleton.source, linear), f"{linear.name}.weight", skeleton.source.source)


def _same_shapes(first: Checkpoint, before: Skeleton, second: Checkpoint, after: Skeleton) -> None:
    one, other = (
        {name: tuple(p.shape) for name, p in skeleton.model.named_parameters(remove_duplicate=False)}
        for skeleton in (before, after)
    )
    different = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    if different:
        name = different[0]
        raise SutureError(
            f"{first.source} and {second.source} are not one architecture: {name} is {one.get(name)} and {other.get(name)}",
            "extract needs a model and its fine-tuned version",
        )
    if (before.layout.head is None) != (after.layout.head is None):
        raise SutureError(
            f"{first.source} and {second.source}: only one of them ties its head to the embedding",
            "untie the other first (step untie)",
        )


def _ranks(found: Mapping[str, Spectrum], rank: int | None, energy: float | None, budget: int | None) -> dict[str, int]:
    if budget is not None:
        ranks = ranks_for_budget(found, budget)
        if not any(ranks.values()):
            raise SutureError(f"budget: {budget} parameters are not enough for one rank of any layer", "raise it")
        return ranks
    if energy is not None:
        return {module: rank_for_energy(spectral, energy) for module, spectral in found.items()}
    return {module: min(rank or 0, spectral.S.shape[0]) for module, spectral in found.items()}


def _beside_linears(
    before: Skeleton, after: Skeleton, covered: set[str], embeddings: str, modules: dict[str, Factors]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(parameters stored in full, disk names that differ and are not covered -> why)."""
    stem = runtime_names(before.layout, before.source.config)
    ends = {before.layout.embedding, before.layout.head}
    experts = {linear.place.tensor for linear in before.layout.linears if linear.expert is not None}
    linears = {linear.place.tensor for linear in before.layout.linears}
    saved: dict[str, Tensor] = {}
    left: dict[str, str] = {}
    seen: set[str] = set()
    for parameter, place in before.layout.places.items():
        other = after.layout.places[parameter].tensor
        if place.tensor in covered or place.tensor in seen:
            continue
        seen.add(place.tensor)
        new = after.source.read(other)
        if torch.equal(before.source.read(place.tensor).float(), new.float()):
            continue
        runtime = stem + parameter.removeprefix(before.family.stem)
        path = runtime.rpartition(".")[0]
        of_head = parameter.startswith(f"{before.family.head}.")
        if of_head:
            runtime = parameter
        if place.tensor in experts:
            left[place.tensor] = "experts lie in one parameter of transformers"
        elif (place.tensor in ends or of_head) and embeddings == "skip":
            left[place.tensor] = "embeddings: skip"
        elif place.tensor in linears:
            left[place.tensor] = "matches no target"
        elif parameter.endswith(".bias") and path in modules:
            old = modules[path]
            modules[path] = Factors(old.A, old.B, bias=new)
        elif parameter.endswith(".bias") and f"{parameter.removesuffix('bias')}weight" in _weights_of(before):
            left[place.tensor] = "a bias of a layer that has no low-rank change"
        else:
            saved[runtime] = new
            if place.tensor == before.layout.embedding and before.layout.head is None:
                saved[f"{before.family.head}.weight"] = new  # tied: PEFT would leave the head what it was
    return _whole_modules(before, after, saved, stem), left


def _weights_of(skeleton: Skeleton) -> set[str]:
    return {f"{linear.module}.weight" for linear in skeleton.layout.linears}


def _whole_modules(before: Skeleton, after: Skeleton, saved: dict[str, Tensor], stem: str) -> dict[str, Tensor]:
    """PEFT saves modules, not parameters: with a layer norm's weight goes its bias."""
    modules = {name.rpartition(".")[0] for name in saved}
    for parameter, place in after.layout.places.items():
        head = parameter.startswith(f"{before.family.head}.")
        runtime = parameter if head else stem + parameter.removeprefix(before.family.stem)
        if runtime.rpartition(".")[0] in modules and runtime not in saved:
            saved[runtime] = after.source.read(place.tensor)
    return saved


def extraction_curve(
    base: str | Path,
    tuned: str | Path,
    adapter: str | Path,
    data: str,
    *,
    ranks: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    progress: Progress | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Held-out perplexity of `base` with the adapter cut to each rank, between those of `base` and `tuned`.

    `settings`: keys of a recipe's report. One row each: `model`, `perplexity`, `against_tuned` (ratio, low, high; paired on
    identical tokens), `kept` (share of the adapter's squared change). Raises SutureError for what does not fit together.
    """
    progress = progress or default_progress()
    opened = open_adapter(adapter)
    (first, before), (second, after) = open_dense(base), open_dense(tuned)
    _same_shapes(first, before, second, after)
    rows = before.source.shapes[before.layout.embedding][0]
    text = text_model(first, rows, getattr(before.hf_config, "max_position_embeddings", None))
    windows = evaluation_text(ReportSettings.model_validate({"data": data, **settings}), text).windows
    arrangement = arrange(before.source, [Weighted(opened)], head_name=head_to_add, untied_config=untied_config)
    most = max((low.factors()[0].shape[0] for c in arrangement.changes.values() for low in c.low_rank), default=0)
    wanted = sorted({min(rank, most) for rank in ranks if rank > 0})

    def scored(label: str, skeleton: Skeleton) -> Any:
        return windows.by_document(score(skeleton, windows, progress.track, f"score {label}"))

    reference = scored("tuned", after)
    table = [_curve_row("base", scored("base", before), reference, windows.cluster, 0.0)]
    for rank in wanted:
        changes, kept = _cut_to(arrangement.changes, rank)
        live = Live(
            arrangement.arranged,
            arrangement.config,
            arrangement.layout,
            changes,
            arrangement.shapes,
            dict(arrangement.arranged.dtypes),
            merged=True,
        )
        table.append(
            _curve_row(f"rank {rank}", scored(f"rank {rank}", open_skeleton(live)), reference, windows.cluster, kept)
        )
    return [*table, _curve_row("tuned", reference, reference, windows.cluster, 1.0)]


def _cut_to(changes: Mapping[str, Change], rank: int) -> tuple[dict[str, Change], float]:
    """The same changes with every low-rank one cut to `rank`, and the share of their energy that is left."""

    def cut_factors(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        L, R, _ = reduce(B, A, rank)
        return R.float(), L.float()

    result, whole, left = {}, 0.0, 0.0
    for parameter, change in changes.items():
        shorter = [replace(low, cut=cut_factors) for low in change.low_rank]
        result[parameter] = replace(change, low_rank=shorter)
        for low in change.low_rank:
            A, B = low.factors()
            values = (low.scale * singular_values(B, A)).square()
            whole, left = whole + float(values.sum()), left + float(values[:rank].sum())
    return result, left / whole if whole else 1.0


def _curve_row(model: str, nll: Any, reference: Any, cluster: str, kept: float) -> dict[str, Any]:
    compared = paired(reference, nll, cluster=cluster)
    ratio = [compared.ratio, compared.low, compared.high]
    return {
        "model": model,
        "perplexity": short(compared.new.ppl),
        "against_tuned": [None if x is None else float(f"{x:.5g}") for x in ratio],
        "kept": short(kept),
    }
