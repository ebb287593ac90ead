"""Several adapters in one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.layout import text_config
from ..checkpoint.staging import check_output
from ..checkpoint.strict_json import strict_json
from ..lora.adapter import Adapter, open_adapter
from ..lora.combine import concatenated, dare, reduced, ties, truncated
from ..lora.compose import Factors, Form, compose
from .adapter_files import Written, short, write_adapter
from .progress import Progress, default_progress


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
    progress = progress or default_progress()
    output = Path(output)
    opened = [(open_adapter(path), float(weight)) for path, weight in adapters]
    _check_combine(opened, method, rank, density)
    for adapter, _ in opened:
        check_output(output, adapter.directory, overwrite, False)
    whole = _whole_names([part.path for adapter, _ in opened for part in adapter.parts])
    paths = list(dict.fromkeys(whole.values()))
    generator = torch.Generator().manual_seed(seed)
    modules: dict[str, Factors] = {}
    records: dict[str, Any] = {}
    for path in progress.track(paths, len(paths), f"combine ({method})"):
        parts, embedding = _parts_of(opened, path, whole)
        factors, kept = _combined(parts, method, rank, density, generator)
        modules[path] = Factors(factors.A, factors.B, embedding=embedding)
        records[path] = {"r": factors.rank, "kept": short(kept), "from": len(parts)}
    first = opened[0][0]
    form = Form(base=first.config.base)
    new = compose(modules, form, {k: v for k, v in first.metadata.items() if k != "format"})
    settings = {"method": method, "rank": rank, "seed": seed} | ({} if method == "sum" else {"density": density})
    source = {"adapters": [{"adapter": a.source, "weight": w, "sha256": a.sha256} for a, w in opened]}
    bases = list(dict.fromkeys(adapter.config.base for adapter, _ in opened if adapter.config.base))
    notes = [f"the adapters name different bases: {', '.join(bases)}"] if len(bases) > 1 else []
    return write_adapter(new, output, "lora combine", settings, source, records, notes, overwrite)


def _kind_of_base(adapter: Adapter) -> str | None:
    """Model type and widths of the base that an adapter names, where it lies on this machine."""
    path = Path(adapter.config.base or "") / "config.json"
    raw = strict_json(path, 1 << 26) if adapter.config.base and path.is_file() else None
    if not isinstance(raw, Mapping):
        return None
    text = text_config(raw)
    return " ".join(str(text[key]) for key in ("model_type", "hidden_size", "num_hidden_layers") if key in text)


def _check_combine(opened: Sequence[tuple[Adapter, float]], method: str, rank: int | None, density: float) -> None:
    if not opened:
        raise SutureError("combine: no adapter is given", "give at least one")
    if method != "sum" and rank is None:
        raise SutureError(f"{method}: its result has full rank, an adapter needs a rank", "give --rank")
    if rank is not None and rank < 1:
        raise SutureError(f"rank: {rank} is not a rank", "give a whole number above 0")
    if not 0 < density <= 1:
        raise SutureError(f"density: {density} is not in (0, 1]", "it is the share of each change that is kept")
    kinds = {adapter.source: kind for adapter, _ in opened if (kind := _kind_of_base(adapter)) is not None}
    if len(set(kinds.values())) > 1:
        raise SutureError(
            f"combine: the adapters are for different models: {', '.join(f'{k}: {v}' for k, v in kinds.items())}",
            "give adapters of one base",
        )
    for adapter, weight in opened:
        if not math.isfinite(weight):
            raise SutureError(f"{adapter.source}: weight {weight} is not a number", "give each adapter a finite weight")
        config = adapter.config
        other = [part.path for part in adapter.parts if set(part.keys) - {"A", "B", "embedding A", "embedding B"}]
        if config.dora or other or config.target_parameters or config.init != "plain" or config.layer_replication:
            what = (
                "DoRA's magnitudes" if config.dora
                else f"more than low-rank changes ({other[0]})" if other
                else f"changes of parameters ({config.target_parameters[0]})" if config.target_parameters
                else f"a base changed by {config.init}" if config.init != "plain"
                else "stacked layers"
            )  # fmt: skip
            raise SutureError(f"{adapter.source}: has {what}, whose sum is not an adapter", "merge it into the model")
    bases = {adapter.metadata.get("suture_base") for adapter, _ in opened} - {None}
    if len(bases) > 1:
        raise SutureError(
            "combine: the adapters are of different bases (their fingerprints differ)", "they cannot be added"
        )


def _whole_names(paths: Sequence[str]) -> dict[str, str]:
    """Module path -> the longest path that ends in it: some tools leave the model's prefix out, and one module must not be
    in the result under two names, of which PEFT would load one. Raises SutureError where several are as good."""
    found: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        longer = {other for other in paths if other.endswith(f".{path}")}
        longest = [other for other in longer if not any(more.endswith(f".{other}") for more in longer)]
        if len(longest) > 1:
            raise SutureError(
                f"{path}: may be any of {', '.join(sorted(longest))}", "give adapters that name modules alike"
            )
        found[path] = longest[0] if longest else path
    return found


def _parts_of(
    opened: Sequence[tuple[Adapter, float]], path: str, whole: Mapping[str, str]
) -> tuple[list[tuple[float, Tensor, Tensor]], bool]:
    found, embedding, shapes = [], False, set()
    for adapter, weight in opened:
        for part in (part for part in adapter.parts if whole[part.path] == path):
            embedding = "embedding A" in part.keys
            A, B = (adapter.read(part.keys[f"embedding {k}" if embedding else k]) for k in "AB")
            found.append((weight * adapter.config.scale(part.path), A, B))
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
