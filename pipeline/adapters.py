"""Commands whose output is an adapter, not a model: attach, extract, combine, transport; and inspect, which writes nothing.

Each refuses what it can before it reads weights, holds one layer at a time, and writes a directory that PEFT loads, as a
whole or not at all, with a manifest that says what it was made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

from .. import __version__
from ..calibrate.replay import Stream, staged_block
from ..calibrate.skeleton import Skeleton, cut, open_skeleton
from ..calibrate.statistics import SecondMoment
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from ..checkpoint.manifest import MANIFEST, SCHEMA, file_hashes, to_json
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.source import TensorSource
from ..checkpoint.staging import check_output, open_staging, write_whole
from ..lora.adapter import WEIGHTS, Adapter, Part, open_adapter
from ..lora.arrange import arrange
from ..lora.attach import FROM_ERROR, Init, draw, from_error, principal
from ..lora.combine import concatenated, dare, reduced, ties, truncated
from ..lora.compose import Factors, Form, NewAdapter, base_metadata, compose, runtime_names
from ..lora.config import CONFIG
from ..lora.delta import effective_rank, norm, reduce, singular_values
from ..lora.extract import Spectrum, rank_for_energy, ranks_for_budget, spectrum
from ..lora.match import Change, Matched, Weighted, match
from ..lora.merge import Live
from ..lora.transport import Map, find_map, fused_factors, without_empty_ranks
from ..quant.decode import dense_view
from ..quant.targets import select
from ..report.clusters import paired
from ..report.score import score
from ..surgery.untie import head_to_add, untied_config
from .progress import Progress, Silent
from .recipe import CalibrationSettings, ReportSettings
from .texts import calibration_text, evaluation_text, text_model


@dataclass(frozen=True)
class Written:
    """An adapter that was written."""

    output: Path
    record: dict[str, Any]  # its manifest's `recipe` and `modules`
    n_parameters: int
    notes: tuple[str, ...] = field(default=())


def _write(
    new: NewAdapter,
    output: Path,
    command: str,
    settings: Mapping[str, Any],
    source: Mapping[str, Any],
    modules: Mapping[str, Any],
    notes: Sequence[str],
    overwrite: bool,
) -> Written:
    """Stage, reopen with every check that a stranger's adapter gets, and rename into place."""
    with open_staging(output, {"command": command}, overwrite, False) as staging:
        write_whole(staging.model / CONFIG, to_json(new.config))
        write_whole(staging.model / WEIGHTS, save(new.tensors, metadata=new.metadata))
        reopened = open_adapter(staging.model)
        for key, tensor in new.tensors.items():
            if not torch.equal(reopened.read(key), tensor):
                raise SutureError(f"{output}: {key} reads back with other values", "please report this")
        manifest = {
            "suture": __version__,
            "schema": SCHEMA,
            "recipe": {"command": command, **settings},
            "source": dict(source),
            "history": [],
            "inputs": {},
            "outputs": {k: {"dtype": "F32", "shape": list(t.shape)} for k, t in sorted(new.tensors.items())},
            "modules": dict(modules),
            "fallbacks": {},
            "notes": list(notes),
            "files": file_hashes(staging.model),
        }
        write_whole(staging.model / MANIFEST, to_json(manifest))
        staging.commit()
    return Written(output, {"recipe": manifest["recipe"], "modules": dict(modules)}, new.n_parameters, tuple(notes))


def _open(model: str | Path) -> tuple[Checkpoint, Skeleton]:
    checkpoint = open_checkpoint(model)
    return checkpoint, open_skeleton(dense_view(checkpoint))


def _weight(source: TensorSource, linear: Linear) -> Tensor:
    """[out, in], in its stored dtype."""
    stored = cut(source.read(linear.place.tensor), linear.place)
    return (stored.T if linear.conv1d else stored).contiguous()


def _path(skeleton: Skeleton, linear: Linear) -> str:
    stem = runtime_names(skeleton.layout, skeleton.source.config)
    return stem + linear.module.removeprefix(skeleton.family.stem)


# -- inspect -------------------------------------------------------------------------------------------------------------


def inspect_adapter(adapter: str | Path, base: str | Path | None = None) -> dict[str, Any]:
    """What an adapter is, as plain data; with `base`, also how large its changes are beside the weights.

    Raises SutureError for an adapter that does not open, or that does not fit `base`.
    """
    opened = open_adapter(adapter)
    config = opened.config
    modules = {part.path: _inspect_part(opened, part) for part in opened.parts if part.low_rank}
    facts: dict[str, Any] = {
        "adapter": opened.source,
        "kind": _kind(opened),
        "trained_on": config.base,
        "r": config.r,
        "alpha": config.alpha,
        "init": config.init,
        "targets": sorted({path.rpartition(".")[2] for path in modules}),
        "low_rank_modules": len(modules),
        "other_parts": {p.path: sorted(set(p.keys) - {"A", "B"}) for p in opened.parts if not p.low_rank},
        "parameters": opened.n_parameters,
        "bytes": sum(info.nbytes for info in opened.tensors.values()),
        "training_bytes": {
            "weights, gradients and Adam's two moments in float32": 16 * opened.n_parameters,
            "note": "beside the frozen base and its activations",
        },
        "changes_nothing": bool(modules) and all(m["norm"] == 0 for m in modules.values()),
        "notes": list(opened.notes),
        "modules": modules,
    }
    if base is not None:
        facts |= _beside(opened, base, modules)
    return facts


def _kind(adapter: Adapter) -> list[str]:
    config = adapter.config
    traits = {
        "rsLoRA": config.rslora,
        "DoRA": config.dora,
        "per-module ranks": bool(config.rank_pattern),
        "per-module alphas": bool(config.alpha_pattern),
        "lora bias": config.lora_bias,
        f"bias {config.bias}": config.bias != "none",
        "modules saved in full": bool(config.modules_to_save),
        "trained tokens": bool(config.token_indices),
        "experts' parameters": bool(config.target_parameters),
        "stacked layers": bool(config.layer_replication),
        "tied embeddings": config.tied,
        f"base changed by {config.init}": config.init != "plain",
    }
    return ["LoRA", *(name for name, present in traits.items() if present)]


def _inspect_part(adapter: Adapter, part: Part) -> dict[str, Any]:
    A, B = (adapter.read(part.keys[k]) for k in (("A", "B") if "A" in part.keys else ("embedding A", "embedding B")))
    scale = adapter.config.scale(part.path)
    values = singular_values(B, A) * abs(scale)
    return {
        "r": A.shape[0],
        "alpha": adapter.config.alpha_of(part.path),
        "scale": _short(scale),
        "shape": [B.shape[0], A.shape[1]],
        "norm": _short(norm(B, A) * abs(scale)),
        "largest_singular_value": _short(float(values[0])),
        "effective_rank": _short(effective_rank(values)),
    }


def _beside(adapter: Adapter, base: str | Path, modules: dict[str, Any]) -> dict[str, Any]:
    checkpoint, skeleton = _open(base)
    matched = _match(adapter, skeleton)
    weights = {}
    for parameter, change in matched.changes.items():
        if not change.low_rank:
            continue
        place = skeleton.layout.places[parameter]
        W = cut(skeleton.source.read(place.tensor), place).float()
        for low in change.low_rank:
            weights.setdefault(low.part.path, []).append(float(W.square().sum()))
    for path, squares in weights.items():
        size = sum(squares) ** 0.5
        modules[path] |= {"weight_norm": _short(size), "relative": _short(modules[path]["norm"] / size if size else 0)}
    change = sum(m["norm"] ** 2 for m in modules.values()) ** 0.5
    whole = sum(sum(squares) for squares in weights.values()) ** 0.5
    return {
        "base": checkpoint.source,
        "relative_delta": _short(change / whole) if whole else None,
        "training_bytes_with_base": 16 * adapter.n_parameters + checkpoint.nbytes,
        "keys": matched.keys[adapter.source],
    }


def _match(adapter: Adapter, skeleton: Skeleton) -> Matched:
    shapes = {name: tuple(p.shape) for name, p in skeleton.model.named_parameters(remove_duplicate=False)}
    return match([Weighted(adapter)], skeleton.layout, shapes)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


# -- attach --------------------------------------------------------------------------------------------------------------


def attach(
    model: str | Path,
    output: str | Path,
    *,
    r: int = 16,
    alpha: float = 32.0,
    targets: Sequence[str] = ("all-linear",),
    ignore: Sequence[str] = (),
    rslora: bool = False,
    dora: bool = False,
    init: Init = "default",
    original: str | Path | None = None,
    calibration: Mapping[str, Any] | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write a new adapter for `model`, which may be quantized; PEFT loads the pair.

    `init`: see `lora.attach`. loftq and eora need `original`, the unquantized checkpoint that `model` was made from, and
    eora also `calibration` (keys of a recipe's calibration). Raises SutureError for everything that does not fit.
    """
    progress = progress or Silent()
    output = Path(output)
    _check_attach(r, alpha, init, original, calibration, dora)
    checkpoint, skeleton = _open(model)
    check_output(output, checkpoint.path, overwrite, False)
    chosen, notes = _attachable(skeleton, targets, ignore)
    low = min(chosen, key=lambda linear: min(linear.out_features, linear.in_features))
    if r > min(low.out_features, low.in_features):
        raise SutureError(f"r: {r} is more than {low.name} has: [{low.out_features}, {low.in_features}]", "lower r")
    scale = alpha / (r**0.5 if rslora else r)
    generator = torch.Generator().manual_seed(seed)
    modules: dict[str, Factors] = {}
    records: dict[str, Any] = {}
    errors = _Errors(skeleton, original, calibration, chosen, progress) if init in FROM_ERROR else None
    for linear in progress.track(chosen, len(chosen), f"attach ({init})"):
        W = _weight(skeleton.source, linear) if init == "pissa" or dora or errors else None
        record: dict[str, Any] = {"r": r, "shape": [linear.out_features, linear.in_features]}
        if errors is not None:
            assert W is not None
            E, H = errors.of(linear, W)
            factors, taken = from_error(E, r, scale, H)
            record["error_taken_away"] = _short(taken)
        elif init == "pissa":
            assert W is not None
            factors = principal(W, r, scale)
        else:
            factors = draw(init, linear.out_features, linear.in_features, r, generator)
        if dora:
            assert W is not None
            V = W.double() + scale * (factors.B.double() @ factors.A.double())
            factors = Factors(factors.A, factors.B, magnitude=V.norm(dim=1))
        modules[_path(skeleton, linear)] = factors
        records[linear.name] = record
    form = Form(
        base=str(checkpoint.path) if not checkpoint.revision else checkpoint.source,
        alpha=alpha,
        rslora=rslora,
        dora=dora,
        init="pissa" if init == "pissa" else True,
        fan_in_fan_out=skeleton.family.conv1d,
    )
    new = compose(modules, form, base_metadata(skeleton.source, skeleton.layout))
    new.config["inference_mode"] = False
    settings = {"r": r, "alpha": alpha, "init": init, "rslora": rslora, "dora": dora, "seed": seed}
    settings |= {"targets": list(targets), "ignore": list(ignore), "calibration": calibration}
    source = {"model": checkpoint.source, "original": None if original is None else str(original)}
    return _write(new, output, "lora attach", settings, source, records, notes, overwrite)


def _check_attach(
    r: int, alpha: float, init: Init, original: object, calibration: Mapping[str, Any] | None, dora: bool
) -> None:
    if r < 1:
        raise SutureError(f"r: {r} is not a rank", "give a whole number above 0")
    if not alpha > 0:
        raise SutureError(f"alpha: {alpha} is not above 0", "the scale of the change is alpha / r")
    if (init in FROM_ERROR) != (original is not None):
        raise SutureError(
            f"init: {init} {'needs' if init in FROM_ERROR else 'has no use for'} the original of a quantized model",
            "loftq and eora begin from what quantizing took away: give the quantized MODEL and --original",
        )
    if (init == "eora") != (calibration is not None):
        raise SutureError(
            f"init: {init} {'needs' if init == 'eora' else 'has no use for'} calibration text",
            "eora weighs the error by the layers' inputs: give --calibration builtin:novels",
        )
    if init == "pissa" and dora:
        raise SutureError(
            "init: pissa and dora exclude one another: both take the weight apart", "leave one of them out"
        )


def _attachable(skeleton: Skeleton, targets: Sequence[str], ignore: Sequence[str]) -> tuple[list[Linear], list[str]]:
    """Linear layers that PEFT can wrap: experts lie in one parameter there."""
    selection = select(skeleton.layout, targets, ignore)
    chosen = [linear for linear in selection.chosen if linear.expert is None]
    experts = len(selection.chosen) - len(chosen)
    if not chosen:
        raise SutureError("targets: only experts are selected, which transformers keeps in one parameter", "add others")
    return chosen, [
        f"{experts} experts' matrices are left out: transformers keeps them in one parameter"
    ] if experts else []


class _Errors:
    """What quantization took from each layer, and with calibration text the second moment of its inputs."""

    def __init__(
        self,
        quantized: Skeleton,
        original: str | Path | None,
        calibration: Mapping[str, Any] | None,
        chosen: Sequence[Linear],
        progress: Progress,
    ) -> None:
        assert original is not None
        self.checkpoint, self.skeleton = _open(original)
        if self.checkpoint.quantization is not None:
            raise SutureError(f"{original}: is quantized itself", "give the checkpoint that MODEL was quantized from")
        self.by_module = {linear.module: linear for linear in self.skeleton.layout.linears}
        for linear in chosen:
            other = self.by_module.get(linear.module)
            if other is None or (other.out_features, other.in_features) != (linear.out_features, linear.in_features):
                raise SutureError(f"{original}: has no {linear.module} of the same shape", "is it another model?")
        self.moments = self._moments(calibration, chosen, progress) if calibration else {}

    def of(self, linear: Linear, quantized: Tensor) -> tuple[Tensor, Tensor | None]:
        """(E [out, in] float64, H [in, in] or None)."""
        W = _weight(self.skeleton.source, self.by_module[linear.module])
        return W.double() - quantized.double(), self.moments.get(linear.module)

    @torch.no_grad()
    def _moments(
        self, calibration: Mapping[str, Any], chosen: Sequence[Linear], progress: Progress
    ) -> dict[str, Tensor]:
        skeleton = self.skeleton
        rows = skeleton.source.shapes[skeleton.layout.embedding][0]
        limit = getattr(skeleton.hf_config, "max_position_embeddings", None)
        text = text_model(self.checkpoint, rows, limit)
        blocks = calibration_text(CalibrationSettings.model_validate(dict(calibration)), text).blocks
        stream = Stream.start(skeleton, list(torch.from_numpy(blocks.ids).split(max(1, 2048 // blocks.ids.shape[1]))))
        wanted = {linear.module for linear in chosen}
        found: dict[str, Tensor] = {}
        for index in progress.track(range(skeleton.n_blocks), skeleton.n_blocks, "inputs"):
            skeleton.load_block(index)
            groups = [group for group in skeleton.layout.blocks[index] if group[0].expert is None]
            moments = [SecondMoment.zeros(group[0].in_features) for group in groups]
            staged_block(skeleton, index, stream, groups, lambda k, x, m=moments: m[k].add(x), lambda k: None)
            for group, moment in zip(groups, moments, strict=True):
                found |= {linear.module: moment.hessian() for linear in group if linear.module in wanted}
            skeleton.free_block(index)
        return found


# -- extract -------------------------------------------------------------------------------------------------------------


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
    progress = progress or Silent()
    output = Path(output)
    if sum(x is not None for x in (rank, energy, budget)) != 1:
        raise SutureError("rank, energy, budget: exactly one of them says how much is kept", "for example --rank 16")
    if (rank is not None and rank < 1) or (energy is not None and not 0 < energy <= 1):
        raise SutureError("rank must be above 0 and energy in (0, 1]", "for example --energy 0.9")
    (first, before), (second, after) = _open(base), _open(tuned)
    check_output(output, first.path, overwrite, False)
    check_output(output, second.path, overwrite, False)
    _same_shapes(first, before, second, after)
    chosen = [linear for linear in select(before.layout, targets, ()).chosen if linear.expert is None]
    found: dict[str, Spectrum] = {}
    most = rank or max_rank
    for linear in progress.track(chosen, len(chosen), "extract"):
        D = _weight(after.source, linear).double() - _weight(before.source, linear).double()
        if bool(D.any()):
            found[linear.module] = spectrum(D, min(most, *D.shape), seed)
    if not found:
        raise SutureError(f"{tuned}: its targeted layers are equal to {base}'s", "is it the tuned model?")
    ranks = _ranks(found, rank, energy, budget)
    by_module = {linear.module: linear for linear in chosen}
    modules, records, notes = {}, {}, []
    for module, spectral in found.items():
        r, linear = ranks[module], by_module[module]
        records[linear.name] = {"r": r, "kept": _short(spectral.kept(r)), "delta_norm": _short(spectral.energy**0.5)}
        if r:
            modules[_path(before, linear)] = spectral.truncated(r)
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
    return _write(new, output, "lora extract", settings, source, records, notes, overwrite)


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
        if parameter == f"{before.family.head}.weight":
            runtime = parameter
        if place.tensor in experts:
            left[place.tensor] = "experts lie in one parameter of transformers"
        elif place.tensor in ends and embeddings == "skip":
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
    progress = progress or Silent()
    opened = open_adapter(adapter)
    (first, before), (second, after) = _open(base), _open(tuned)
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
        "perplexity": _short(compared.new.ppl),
        "against_tuned": [None if x is None else float(f"{x:.5g}") for x in ratio],
        "kept": _short(kept),
    }


# -- combine -------------------------------------------------------------------------------------------------------------


def combine(
    adapters: Sequence[tuple[str | Path, float]],
    output: str | Path,
    *,
    method: Literal["sum", "ties", "dare"] = "sum",
    rank: int | None = None,
    density: float = 0.5,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Written:
    """One adapter whose change is the weighted sum of several; `sum` is exact unless `rank` truncates it.

    `ties` and `dare` act on the changes themselves and need a `rank` for what comes out; `density` is the share of each
    change that they keep. Adapters that hold more than low-rank changes are refused: their sums are not adapters.
    """
    progress = progress or Silent()
    output = Path(output)
    opened = [(open_adapter(path), float(weight)) for path, weight in adapters]
    _check_combine(opened, method, rank, density)
    for adapter, _ in opened:
        check_output(output, adapter.directory, overwrite, False)
    paths = list(dict.fromkeys(part.path for adapter, _ in opened for part in adapter.parts))
    generator = torch.Generator().manual_seed(seed)
    modules: dict[str, Factors] = {}
    records: dict[str, Any] = {}
    for path in progress.track(paths, len(paths), f"combine ({method})"):
        parts, embedding = _parts_of(opened, path)
        factors, kept = _combined(parts, method, rank, density, generator)
        modules[path] = Factors(factors.A, factors.B, embedding=embedding)
        records[path] = {"r": factors.rank, "kept": _short(kept), "from": len(parts)}
    first = opened[0][0]
    form = Form(base=first.config.base)
    new = compose(modules, form, {k: v for k, v in first.metadata.items() if k != "format"})
    settings = {"method": method, "rank": rank, "seed": seed} | ({} if method == "sum" else {"density": density})
    source = {"adapters": [{"adapter": a.source, "weight": w, "sha256": a.sha256} for a, w in opened]}
    return _write(new, output, "lora combine", settings, source, records, (), overwrite)


def _check_combine(opened: Sequence[tuple[Adapter, float]], method: str, rank: int | None, density: float) -> None:
    if not opened:
        raise SutureError("combine: no adapter is given", "give at least one")
    if method != "sum" and rank is None:
        raise SutureError(f"{method}: its result has full rank, an adapter needs a rank", "give --rank")
    if rank is not None and rank < 1:
        raise SutureError(f"rank: {rank} is not a rank", "give a whole number above 0")
    if not 0 < density <= 1:
        raise SutureError(f"density: {density} is not in (0, 1]", "it is the share of each change that is kept")
    for adapter, _ in opened:
        config = adapter.config
        other = [part.path for part in adapter.parts if set(part.keys) - {"A", "B", "embedding A", "embedding B"}]
        if config.dora or other or config.target_parameters or config.init != "plain" or config.layer_replication:
            what = (
                "DoRA's magnitudes" if config.dora
                else f"more than low-rank changes ({other[0]})" if other
                else "experts in one parameter" if config.target_parameters
                else f"a base changed by {config.init}" if config.init != "plain"
                else "stacked layers"
            )  # fmt: skip
            raise SutureError(f"{adapter.source}: has {what}, whose sum is not an adapter", "merge it into the model")
    bases = {adapter.metadata.get("suture_base") for adapter, _ in opened} - {None}
    if len(bases) > 1:
        raise SutureError(
            "combine: the adapters are of different bases (their fingerprints differ)", "they cannot be added"
        )


def _parts_of(opened: Sequence[tuple[Adapter, float]], path: str) -> tuple[list[tuple[float, Tensor, Tensor]], bool]:
    found, embedding, shapes = [], False, set()
    for adapter, weight in opened:
        for part in (part for part in adapter.parts if part.path == path):
            embedding = "embedding A" in part.keys
            A, B = (adapter.read(part.keys[f"embedding {k}" if embedding else k]) for k in "AB")
            found.append((weight * adapter.config.scale(path), A, B))
            shapes.add((B.shape[0], A.shape[1]))
    if len(shapes) > 1:
        raise SutureError(f"{path}: the adapters have it with shapes {sorted(shapes)}", "they are of different bases")
    return found, embedding


def _combined(
    parts: list[tuple[float, Tensor, Tensor]], method: str, rank: int | None, density: float, generator: torch.Generator
) -> tuple[Factors, float]:
    if method == "sum":
        exact = concatenated(parts)
        return reduced(exact, rank) if rank is not None and rank < exact.rank else (exact, 1.0)
    deltas = [scale * (B.double() @ A.double()) for scale, A, B in parts]
    result = ties(deltas, density) if method == "ties" else dare(deltas, density, generator)
    assert rank is not None
    return truncated(result, min(rank, *result.shape))


# -- transport -----------------------------------------------------------------------------------------------------------


def transport(
    adapter: str | Path,
    base: str | Path,
    converted: str | Path,
    output: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Written:
    """The adapter of `base` as an adapter of `converted`, a model that linear surgery made from it; exact or refused."""
    progress = progress or Silent()
    output = Path(output)
    opened = open_adapter(adapter)
    (first, before), (second, after) = _open(base), _open(converted)
    for place in (opened.directory, first.path, second.path):
        check_output(output, place, overwrite, False)
    lows = _transportable(opened, before)
    targets = [linear for linear in after.layout.linears if linear.expert is None]
    modules: dict[str, Factors] = {}
    records: dict[str, Any] = {}
    reached: set[str] = set()
    for linear in progress.track(targets, len(targets), "transport"):
        sources = _sources(before, linear, after)
        if not any(source.module in lows for source in sources):
            continue
        given = [lows.get(source.module) for source in sources]
        weights = [_weight(before.source, source) for source in sources]
        head = _head_rows(after, linear)
        found = find_map(weights, _weight(after.source, linear), head)
        if not isinstance(found, Map):
            names = ", ".join(source.name for source in sources)
            raise SutureError(
                f"{linear.name} is no row or column selection, mean pooling or scaling of {names} (the nearest is {found:.3g} "
                "times off what rounding explains): the change does not follow exactly",
                "merge the adapter into the base first, then convert",
            )
        joined = fused_factors(given, [source.out_features for source in sources])
        assert joined is not None
        reached |= {source.module for source in sources}
        factors = without_empty_ranks(found.apply(joined))
        modules[_path(after, linear)] = factors
        records[linear.name] = {"how": found.what, "from": [source.name for source in sources], "r": factors.rank}
    lost = sorted(set(lows) - reached)
    if lost:
        raise SutureError(
            f"{converted}: nothing in it was made from {lost[0]}, which the adapter changes", "merge first"
        )
    form = Form(base=str(second.path), fan_in_fan_out=after.family.conv1d)
    new = compose(modules, form, base_metadata(after.source, after.layout))
    source = {"adapter": opened.source, "sha256": opened.sha256, "base": first.source, "converted": second.source}
    return _write(new, output, "lora transport", {}, source, records, (), overwrite)


def _transportable(adapter: Adapter, before: Skeleton) -> dict[str, Factors]:
    """Module -> factors with the scale in B. Raises SutureError for what is not a linear change."""
    config = adapter.config
    if config.dora:
        raise SutureError(
            f"{adapter.source}: DoRA divides by the norm of the changed weight, which no linear map keeps",
            "merge the adapter into the base first, then convert",
        )
    if config.init != "plain":
        raise SutureError(f"{adapter.source}: its base was changed by {config.init}", "merge it into the base first")
    matched = _match(adapter, before)
    found: dict[str, Factors] = {}
    linears = {linear.module: linear for linear in before.layout.linears}
    for parameter, change in matched.changes.items():
        module = parameter.removesuffix(".weight")
        linear = linears.get(module)
        if change.replaced or change.rows or change.added or linear is None or linear.expert is not None:
            raise SutureError(
                f"{adapter.source}: it changes {parameter} in another way than by a low-rank change of a linear layer",
                "merge the adapter into the base first, then convert",
            )
        (low,) = change.low_rank
        A, B = low.factors()
        found[module] = Factors(A.double(), low.scale * B.double())
    return found


def _sources(before: Skeleton, linear: Linear, after: Skeleton) -> list[Linear]:
    """Layers of the base that `linear` of the converted model can have been made from: itself, its parts, or its whole."""
    mine = (
        {x.role: x for group in before.layout.blocks[linear.block] for x in group}
        if linear.block < before.n_blocks
        else {}
    )
    if linear.role in mine:
        return [mine[linear.role]]
    prefix, _, last = linear.role.rpartition(".")
    fused = {f.linear: [f"{prefix}.{part}_proj" for part in f.parts] for f in after.family.fused}
    parts = fused.get(linear.role, [])
    if parts and all(part in mine for part in parts):
        return [mine[part] for part in parts]
    wholes = {f"{part}_proj": f.linear for f in before.family.fused for part in f.parts}
    whole = wholes.get(last)
    return [mine[whole]] if whole in mine else []


def _head_rows(skeleton: Skeleton, linear: Linear) -> int | None:
    """Rows of one key or value head, for layers whose rows are heads."""
    config = skeleton.hf_config
    if linear.role.rpartition(".")[2] not in ("k_proj", "v_proj"):
        return None
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
