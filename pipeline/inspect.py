"""What a model is and what it costs: three budgets from config.json, and from the weights, when they are there, what they say.

A directory with config.json alone is enough. With weights, their headers are checked against the config as every other
command does, and a quantized checkpoint says what its weights take, scales included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..calibrate.blueprint import Blueprint, blueprint_of
from ..calibrate.skeleton import hf_text_config, open_layout
from ..checkpoint.errors import SutureError, did_you_mean
from ..checkpoint.layout import text_config
from ..checkpoint.manifest import MANIFEST, read_manifest
from ..checkpoint.reader import Checkpoint, has_weights, open_checkpoint, read_config
from ..quant.decode import DenseView, dense_view, unquantized
from ..quant.int_quantized import IntegerView
from ..quant.sizes import FORMATS, bytes_of, linear_of
from ..report.budget_view import page, sections, text
from ..report.budgets import QUERY_VALUE, compute_section, dimensions_section, lora_targets, update_section
from ..report.cost import GPU, GPUS
from .adapter_inspect import inspect_adapter

CONTEXT = 8192  # tokens, or the model's context when that is shorter
RANKS = (8, 16, 64)


@dataclass(frozen=True)
class Inspection:
    """One model's facts, or several side by side. `facts` is plain data; it shows itself in a notebook and on a terminal."""

    models: tuple[dict[str, Any], ...]

    @property
    def facts(self) -> dict[str, Any]:
        """Of the only model, or all under `models`."""
        return self.models[0] if len(self.models) == 1 else {"models": list(self.models)}

    def to_json(self) -> str:
        return json.dumps(self.facts, indent=1)

    def sections(self) -> list[Any]:
        """(title, rows), a row being a label and one text per model."""
        return sections(self.models)

    def __str__(self) -> str:
        return text(self.models)

    def _repr_html_(self) -> str:
        return page(self.models)


@dataclass(frozen=True)
class Question:
    """What to count for; None: the model's own."""

    context: int | None = None  # tokens per sequence
    batch: int = 1  # sequences decoded together
    cache_bits: int = 16
    gpus: Mapping[str, GPU] = field(default_factory=lambda: GPUS)
    ranks: Sequence[int] = RANKS
    targets: Sequence[str] = ()


def inspect(
    model: str | Path,
    *others: str | Path,
    context: int | None = None,
    batch: int = 1,
    cache_bits: int = 16,
    gpus: Sequence[str] = (),
    ranks: Sequence[int] = RANKS,
    targets: Sequence[str] = (),
    download: bool = False,
) -> Inspection:
    """Read a model, or several beside one another, as three budgets; weights are not needed.

    Args:
        model, others: directories, config.json files, Hub ids (`download`: fetch their config.json), `builtin:tiny`, or
            one LoRA adapter.
        context: tokens per sequence, for the cache and attention; default: the model's, at most 8192.
        batch: sequences decoded together.
        cache_bits: of a cached number.
        gpus: names of the roofline's GPUs, or NAME=BANDWIDTH,FLOPS,MEMORY in bytes/s, FLOPs/s and bytes; default: all.
        ranks, targets: of LoRA; a target is the end of a layer's name.

    Raises SutureError for what does not open, an unknown GPU or target.

    >>> facts = inspect("builtin:tiny").facts
    >>> facts["parameters"]["total"], facts["dimensions"]["attention"], facts["kv_cache_bytes_per_token"]
    (5507328, 'MHA', 4096)
    """
    for name, value in (("context", context or 1), ("batch", batch), *(("rank", rank) for rank in ranks)):
        if value < 1:
            raise SutureError(f"{name}: {value} is not a positive number")
    if cache_bits not in (4, 8, 16, 32):
        raise SutureError(f"cache_bits: {cache_bits} is none of 4, 8, 16, 32")
    chosen = dict(parse_gpu(gpu) for gpu in gpus) if gpus else GPUS
    asked = Question(context, batch, cache_bits, chosen, ranks, targets)
    sources = (model, *others)
    if _is_adapter(model) and not others:
        return Inspection((inspect_adapter(model),))
    wrong = next((source for source in sources if _is_adapter(source)), None)
    if wrong is not None:
        raise SutureError(f"{wrong} is an adapter: only models can be set side by side", "inspect it alone")
    return Inspection(tuple(inspect_model(source, download, asked) for source in sources))


def _is_adapter(source: str | Path) -> bool:
    return (Path(source) / "adapter_config.json").is_file() and not (Path(source) / "config.json").is_file()


def parse_gpu(text: str) -> tuple[str, GPU]:
    name, equals, figures = text.partition("=")
    if equals:
        try:
            bandwidth, flops, *memory = (float(part) for part in figures.split(","))
        except ValueError:
            raise SutureError(
                f"gpu {text}: expected NAME=BANDWIDTH,FLOPS,MEMORY", "as 4090=1.0e12,165e12,24e9"
            ) from None
        if len(memory) > 1 or min(bandwidth, flops, *memory) <= 0:
            raise SutureError(f"gpu {text}: expected two or three positive numbers", "as 4090=1.0e12,165e12,24e9")
        return name, GPU(bandwidth, flops, memory[0] if memory else None)
    found = [known for known in GPUS if known.lower() == text.lower()]
    found = found or [known for known in GPUS if text.lower() in known.lower()]
    if len(found) != 1:
        raise SutureError(
            f"gpu {text}: {'several match' if found else 'not known'}{did_you_mean(text, GPUS)}",
            f"known: {', '.join(GPUS)}; or give NAME=BANDWIDTH,FLOPS,MEMORY",
        )
    return found[0], GPUS[found[0]]


def inspect_model(source: str | Path, download: bool = False, asked: Question | None = None) -> dict[str, Any]:
    """Facts of one model as plain data. Raises SutureError for one that does not open."""
    asked = asked or Question()
    directory, config = read_config(source, download=download)
    model = blueprint_of(unquantized(config), str(source))
    checkpoint = (
        open_checkpoint(directory) if has_weights(directory) and Path(source) != directory / "config.json" else None
    )
    weights = _weights(checkpoint, model) if checkpoint is not None else _without_weights(config, model)
    context = asked.context or min(model.context or CONTEXT, CONTEXT)
    formats = format_sizes(model)
    facts = {
        "model": str(source),
        "family": model.model_type,
        "supported": model.family,
        "blocks": model.layers,
        "hidden_size": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocabulary": model.vocabulary,
        "context": model.context,
        "tied_head": model.tied,
    }
    compute = compute_section(
        model,
        dict(asked.gpus),
        context=context,
        batch=asked.batch,
        weight_bytes=weights["bytes"],
        read_bits=weights["bits_per_weight"],
        cache_bits=asked.cache_bits,
    )
    dimensions = dimensions_section(model)
    facts |= {
        "parameters": {**dimensions["by_part"], "total": model.total},
        "kv_cache_bytes_per_token": compute["cache"]["bytes_per_token"],
        "kv_cache_dtype": f"{asked.cache_bits} bits",
        "flops_per_token": compute["flops"]["decode_per_token"],
        **{
            key: weights[key]
            for key in ("bytes", "dtypes", "quantization", "notes", "unknown_tensors", "stale_buffers")
        },
        "history": _history(directory) if checkpoint is not None else [],
        "dimensions": dimensions,
        "compute": compute,
        "formats": formats,
        "update": update_section(model, asked.ranks, _target_sets(model, asked.targets), _bases(model, formats)),
    }
    return facts


# ---- weights, when they are there


def _without_weights(config: Mapping[str, Any], model: Blueprint) -> dict[str, Any]:
    notes = ["no weights here: everything is counted from config.json, at 16 bits per parameter", *model.notes]
    found = config.get("quantization_config")
    if found:
        notes.append("config.json says that the weights are quantized; without them their bytes are not known")
    return {
        "bytes": 2 * model.total,
        "bits_per_weight": 16.0,
        "dtypes": {},
        "quantization": {"method": found.get("quant_method")} if isinstance(found, dict) else None,
        "notes": notes,
        "unknown_tensors": 0,
        "stale_buffers": 0,
    }


def _weights(checkpoint: Checkpoint, model: Blueprint) -> dict[str, Any]:
    dtypes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        dtypes[info.dtype] = dtypes.get(info.dtype, 0) + info.nbytes
    notes = [*checkpoint.notes, *model.notes]
    unknown = stale = 0
    quantization, bits = None, 8.0 * checkpoint.nbytes / model.total
    if model.family and _is_replayable(checkpoint, notes):
        view = dense_view(checkpoint)
        layout = open_layout(view)
        unknown, stale = len(layout.unknown), len(layout.stale)
        quantization, bits = _quantization(checkpoint, view)
    elif checkpoint.quantization is not None:
        quantization = {"method": checkpoint.quantization.get("quant_method")}
    if not model.family:
        notes.append(f"suture's steps do not know {model.model_type}: its figures are counted, it cannot be changed")
    return {
        "bytes": checkpoint.nbytes,
        "bits_per_weight": bits,
        "dtypes": dict(sorted(dtypes.items())),
        "quantization": quantization,
        "notes": notes,
        "unknown_tensors": unknown,
        "stale_buffers": stale,
    }


def _is_replayable(checkpoint: Checkpoint, notes: list[str]) -> bool:
    try:
        hf_text_config(text_config(checkpoint.config), checkpoint.source)
    except SutureError as error:
        notes.append(str(error).replace("\n", " "))
        return False
    return True


def _quantization(checkpoint: Checkpoint, view: Any) -> tuple[dict[str, Any] | None, float]:
    """What is quantized and how many bits a weight of it takes, its scales, zero points and tables included."""
    found = checkpoint.quantization
    if found is None:
        dense = [info for info in checkpoint.tensors.values() if len(info.shape) > 1]
        return None, 8.0 * sum(info.nbytes for info in dense) / sum(_numel(info.shape) for info in dense)
    if isinstance(view, DenseView):
        parts = {name: packed.parts for name, packed in view.packed.items()}
    elif isinstance(view, IntegerView):
        ends = (".weight", ".weight_scale", ".input_scale")
        parts = {
            f"{name}.weight": tuple(f"{name}{end}" for end in ends if f"{name}{end}" in checkpoint.tensors)
            for name in view.modules
        }
    else:
        parts = {}
    taken = sum(checkpoint.tensors[part].nbytes for names in parts.values() for part in names)
    numel = sum(_numel(view.shapes[name]) for name in parts)
    bits = 8.0 * taken / numel if numel else 16.0
    groups = [group.get("weights") for group in found.get("config_groups", {}).values() if isinstance(group, dict)]
    section = {
        "method": found.get("quant_method"),
        "format": found.get("format"),
        "weights": groups,
        "layers": len(parts),
        "parameters": numel,
        "bytes": taken,
        "bits_per_weight": round(bits, 4),
    }
    return section, bits


def _numel(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _history(directory: Path) -> list[Any]:
    if not (directory / MANIFEST).is_file():
        return []
    manifest = read_manifest(directory)
    return [*(entry["recipe"]["steps"] for entry in manifest["history"]), manifest["recipe"]["steps"]]


# ---- formats and training


def format_sizes(model: Blueprint) -> list[dict[str, Any]]:
    """Bytes of the whole model with its linear layers in each format that suture writes; the rest in 16 bits.

    `all_weights`: what it would be with every parameter, embedding and head too, at that format's bits per weight.
    """
    chosen = [matrix for matrix in model.matrices if _quantizable(matrix)]
    linears = [(linear_of(m.name, m.out_features, m.in_features), m.copies) for m in chosen]
    numel = sum(matrix.numel for matrix in chosen)
    rest = 2 * (model.total - numel)
    rows: list[dict[str, Any]] = [
        {
            "format": "16 bits",
            "step": None,
            "bits_per_weight": 16.0,
            "overhead_bits": 0.0,
            "bytes": 2 * model.total,
            "all_weights": 2 * model.total,
        }
    ]
    for stored in FORMATS:
        taken = bytes_of(stored, linears) if numel else None
        if taken is None:
            continue
        bits = 8 * taken / numel
        rows.append(
            {
                "format": stored.name,
                "step": stored.step,
                "bits_per_weight": round(bits, 4),
                "overhead_bits": round(bits - stored.code_bits, 4),
                "bytes": taken + rest,
                "all_weights": round(bits * model.total / 8),
            }
        )
    return rows


def _quantizable(matrix: Any) -> bool:
    return (matrix.linear or matrix.part == "experts") and not matrix.kept and matrix.block is not None


def _bases(model: Blueprint, formats: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What LoRA can be trained over: the weights in 16 bits, and QLoRA's NF4."""
    nf4 = next((row["bytes"] for row in formats if row["step"] == "nf4: {}"), None)
    return {"16 bits": 2 * model.total} | ({"NF4": nf4} if nf4 is not None else {})


def _target_sets(model: Blueprint, targets: Sequence[str]) -> list[Sequence[str]]:
    """The user's targets; or queries and values alone where they are layers of their own, and all linear layers."""
    if not targets:
        default: list[Sequence[str]] = [QUERY_VALUE] if len(lora_targets(model, ("v_proj",))) else []
        return [*default, ("all-linear",)]
    for target in targets:
        if target != "all-linear" and not lora_targets(model, (target,)):
            known = sorted({m.name.rpartition(".")[2] for m in lora_targets(model)})
            raise SutureError(
                f"targets: no linear layer's name ends with {target}{did_you_mean(target, known)}",
                f"there are {', '.join(known)}; or all-linear",
            )
    return [tuple(targets)]
