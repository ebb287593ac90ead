"""An adapter carried over to a model that was made from its base."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibrate.skeleton import Skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from ..checkpoint.staging import check_output
from ..lora.adapter import Adapter, open_adapter
from ..lora.compose import Factors, Form, base_metadata, compose
from ..lora.transport import Map, find_map, fused_factors, without_empty_ranks
from .adapter_files import Written, match_weighted, open_dense, runtime_path, stored_weight, write_adapter
from .progress import Progress, default_progress


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
    progress = progress or default_progress()
    output = Path(output)
    opened = open_adapter(adapter)
    (first, before), (second, after) = open_dense(base), open_dense(converted)
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
        weights = [stored_weight(before.source, source) for source in sources]
        head = _head_rows(after, linear)
        found = find_map(weights, stored_weight(after.source, linear), head)
        if not isinstance(found, Map):
            names = ", ".join(source.name for source in sources)
            near = f" (the nearest is {found:.3g} times off what rounding explains)" if found < math.inf else ""
            raise SutureError(
                f"{linear.name} is no row or column selection, mean pooling or scaling of {names}{near}: the change does not "
                "follow exactly",
                "merge the adapter into the base first, then convert",
            )
        if found.right is not None:
            _refuse_shifted(before, after, sources[0], linear, found.right)
        joined = fused_factors(given, [source.out_features for source in sources])
        assert joined is not None
        reached |= {source.module for source in sources}
        factors = without_empty_ranks(found.apply(joined))
        modules[runtime_path(after, linear)] = factors
        records[linear.name] = {"how": found.what, "from": [source.name for source in sources], "r": factors.rank}
    lost = sorted(set(lows) - reached)
    if lost:
        raise SutureError(
            f"{converted}: nothing in it was made from {lost[0]}, which the adapter changes", "merge first"
        )
    form = Form(base=str(second.path), fan_in_fan_out=after.family.conv1d)
    new = compose(modules, form, base_metadata(after.source, after.layout))
    source = {"adapter": opened.source, "sha256": opened.sha256, "base": first.source, "converted": second.source}
    return write_adapter(new, output, "lora transport", {}, source, records, (), overwrite)


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
    matched = match_weighted(adapter, before)
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
        if linear.conv1d and low.stored == "linear":  # of the parameter as it is stored, [in, out]
            A, B = B.T, A.T
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
    last = linear.role.rpartition(".")[2]
    by_end = {role.rpartition(".")[2]: role for role in mine}
    fused = {f.linear: [by_end.get(f"{part}_proj", "") for part in f.parts] for f in after.family.fused}
    parts = fused.get(linear.role, [])
    if parts and all(part in mine for part in parts):
        return [mine[part] for part in parts]
    wholes = {f"{part}_proj": f.linear for f in before.family.fused for part in f.parts}
    old, new = before.family, after.family
    wholes |= {new.attention_out: old.attention_out, new.mlp_out: old.mlp_out}  # the same under another name
    if len(old.mlp_in) == len(new.mlp_in):
        wholes |= dict(zip(new.mlp_in, old.mlp_in, strict=True))
    whole = wholes.get(last, wholes.get(linear.role))
    return [mine[whole]] if whole in mine else []


def _refuse_shifted(before: Skeleton, after: Skeleton, source: Linear, linear: Linear, right: Tensor) -> None:
    """With x the inputs of the base, those of the converted layer must be x / right. A norm's bias that was folded into
    the layer's own is missing there: (W + B A)(x' + c) has changed by B A c, which no adapter of this layer holds."""
    shift, rest = _shift(before, source), _shift(after, linear) * right
    if not bool(torch.allclose(shift, rest, rtol=2.0**-6, atol=1e-6)):
        raise SutureError(
            f"{linear.name}: the bias of the norm before it was folded away, and what the adapter makes of that bias would be "
            "lost: the change does not follow exactly",
            "merge the adapter into the base first, then convert",
        )


def _shift(skeleton: Skeleton, linear: Linear) -> Tensor:
    """The bias, float64, of the norm that `linear` reads; 0 without one."""
    prefix, places = skeleton.layout.block_prefix(linear.block), skeleton.layout.places
    for norm, readers in skeleton.family.readers:
        bias = f"{prefix}{norm}.bias"
        if linear.role in readers and bias in places:
            return skeleton.source.read(places[bias].tensor).double()
    return torch.zeros(linear.in_features, dtype=torch.float64)


def _head_rows(skeleton: Skeleton, linear: Linear) -> int | None:
    """Rows of one key or value head, for layers whose rows are heads."""
    config = skeleton.hf_config
    if linear.role.rpartition(".")[2] not in ("k_proj", "v_proj"):
        return None
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
