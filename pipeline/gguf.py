"""The step `gguf`: the checkpoint as it is, and beside it a GGUF file of the same model for llama.cpp.

The file is written tensor by tensor, read back with the `gguf` package's own dequantizers and compared with the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calibrate.skeleton import Skeleton, finite, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.manifest import Account, to_json
from ..checkpoint.reader import Checkpoint
from ..checkpoint.source import PlannedSource, TensorSource
from ..checkpoint.writer import ShardWriter, TensorSpec, disk_errors
from ..quant.decode import DenseView, dense_view, quantization_of
from ..quant.export import FORMATS
from ..quant.gguf_blocks import BLOCK, block_type, exact_values, to_blocks
from ..quant.gguf_model import (
    ARCHITECTURES,
    PERMUTED,
    add_hyperparameters,
    check_config,
    permute_rows,
    read_vocabulary,
    rope_tensors,
)
from ..quant.scheme import Quantized
from ..quant.settings import GGUFSettings
from .step import Prepared, StepResult, StepRun
from .walk import probe_logits

FILE = "model.gguf"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Entry:
    """One tensor of the file."""

    name: str  # in the file
    source: str  # the checkpoint's
    type: str  # gguf's name of the type
    carried: bool  # its codes are the checkpoint's
    heads: int | None  # of q and k whose rows llama.cpp wants permuted
    plus_one: bool  # Gemma's norms


@dataclass(frozen=True)
class GGUFPlan(Prepared):
    entries: tuple[Entry, ...] = ()
    architecture: str = ""


def prepare(source: TensorSource, settings: GGUFSettings) -> GGUFPlan:
    """Raises SutureError for a model that llama.cpp would not compute as it is."""
    if find_spec("gguf") is None:
        raise SutureError("gguf: the package gguf is not installed", "pip install 'suture[gguf]'")
    assert isinstance(source, Checkpoint | PlannedSource)
    view = dense_view(source)
    skeleton = open_skeleton(view)
    layout, model_type = skeleton.layout, skeleton.family.model_type
    if model_type not in ARCHITECTURES or "language_model." in layout.disk_stem:
        raise SutureError(
            f"gguf: {source.config.get('model_type')} is not supported", f"supported: {', '.join(ARCHITECTURES)}"
        )
    if layout.unknown:
        raise SutureError(f"gguf: {layout.unknown[0]} is no tensor of a {model_type} model that llama.cpp knows")
    check_config(skeleton.hf_config, model_type)
    entries = tuple(_entries(skeleton, settings))
    kept = [name for name in source.shapes if name not in layout.stale]
    accounts = {name: Account("copied", (name,)) for name in kept}
    accounts |= {name: Account("dropped", reason=reason) for name, reason in layout.stale.items()}
    method = str((quantization_of(source) or {}).get("quant_method"))
    form = FORMATS.get(method)
    return GGUFPlan(
        specs=tuple(TensorSpec(name, source.dtypes[name], source.shapes[name]) for name in kept),
        config=dict(source.config),
        accounts=accounts,
        notes=_notes(entries, settings),
        n_blocks=len(layout.blocks),
        not_stock=form.not_stock if form else "",
        entries=entries,
        architecture=ARCHITECTURES[model_type],
    )


def _entries(skeleton: Skeleton, settings: GGUFSettings) -> Iterator[Entry]:
    import gguf

    layout, config, view = skeleton.layout, skeleton.hf_config, skeleton.source
    model_type = skeleton.family.model_type
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[model_type])
    names = gguf.get_tensor_name_map(arch, len(layout.blocks))
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    packed = view.packed if isinstance(view, DenseView) and settings.codes == "carry" else {}
    for module, place in layout.places.items():
        if layout.head is None and module == f"{skeleton.family.head}.weight":
            continue  # tied: llama.cpp takes the embedding
        found = names.get_name(module, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise SutureError(f"gguf: llama.cpp's {ARCHITECTURES[model_type]} has no place for {module}")
        vector = len(view.shapes[place.tensor]) == 1
        scheme = packed[place.tensor].scheme if place.tensor in packed else None
        carried = None if scheme is None else block_type(scheme, view.shapes[place.tensor][1])
        fits = vector or view.shapes[place.tensor][1] % BLOCK == 0 or not settings.type.startswith("q")
        permuted = model_type in PERMUTED and {".q_proj": heads, ".k_proj": kv_heads}.get(module.rsplit(".", 1)[0][-7:])
        yield Entry(
            name=found,
            source=place.tensor,
            type=carried or ("F32" if vector else settings.type.upper() if fits else "F16"),
            carried=carried is not None,
            heads=permuted or None,
            plus_one=skeleton.family.norm_kind == "1+w" and module.endswith("norm.weight"),
        )


def _notes(entries: tuple[Entry, ...], settings: GGUFSettings) -> tuple[str, ...]:
    carried = sum(entry.carried for entry in entries)
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.type] = counts.get(entry.type, 0) + 1
    found = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    notes = [f"{FILE}: {found}; {carried} tensors carry the checkpoint's codes unchanged"]
    narrow = sum(entry.type == "F16" for entry in entries) if settings.type.startswith("q") else 0
    if narrow:
        notes.append(f"{narrow} matrices whose rows are no multiple of {BLOCK} stay F16")
    return tuple(notes)


@torch.no_grad()
def run(work: StepRun, plan: GGUFPlan, settings: GGUFSettings) -> StepResult:
    """Copy the checkpoint, write the file, read it back."""
    with ShardWriter(work.directory, work.shards) as writer:
        for spec in plan.specs:
            writer.write_bytes(spec.name, work.checkpoint.read_bytes(spec.name))
        writer.sync()
    view = dense_view(work.checkpoint)
    skeleton = open_skeleton(view, device=work.device)
    path = work.directory / FILE
    with disk_errors(path):
        _write(path, work, plan, settings, skeleton)
    receipt = _read_back(path, plan, view)
    n_blocks = min(work.verify_blocks, plan.n_blocks)
    return StepResult({}, probe_logits(skeleton, work.probe, n_blocks), receipt)


def _write(path: Path, work: StepRun, plan: GGUFPlan, settings: GGUFSettings, skeleton: Skeleton) -> None:
    import gguf

    view, config = skeleton.source, skeleton.hf_config
    writer = gguf.GGUFWriter(path, plan.architecture)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(_file_type(plan))
    vocabulary = view.shapes[skeleton.layout.embedding][0]
    add_hyperparameters(writer, config, skeleton.family.model_type, vocabulary)
    _add_tokenizer(writer, work, plan, vocabulary, settings.pre_tokenizer)
    extra = rope_tensors(config)
    for name, tensor in extra.items():
        writer.add_tensor_info(name, list(tensor.shape), np.dtype(np.float32), tensor.nbytes)
    for entry in plan.entries:
        kind = gguf.GGMLQuantizationType[entry.type]
        shape = gguf.quant_shape_to_byte_shape(view.shapes[entry.source], kind)
        if entry.type in ("F32", "F16"):
            dtype = np.dtype(np.float32 if entry.type == "F32" else np.float16)
            writer.add_tensor_info(entry.name, list(view.shapes[entry.source]), dtype, 0, kind)
        else:
            writer.add_tensor_info(entry.name, list(shape), np.dtype(np.uint8), 0, kind)
    _set_sizes(writer, plan, view)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in extra.values():
        writer.write_tensor_data(tensor.numpy())
    for entry in work.progress.track(plan.entries, len(plan.entries), f"{work.label}: {FILE}"):
        writer.write_tensor_data(_data(entry, view))
    writer.close()


def _set_sizes(writer: Any, plan: GGUFPlan, view: TensorSource) -> None:
    """Bytes of each tensor, from which the writer lays out offsets."""
    import gguf

    infos = writer.tensors[-1]
    for entry in plan.entries:
        kind = gguf.GGMLQuantizationType[entry.type]
        count = int(np.prod(view.shapes[entry.source]))
        per_block, size = gguf.GGML_QUANT_SIZES[kind]
        infos[entry.name].nbytes = count // per_block * size


def _file_type(plan: GGUFPlan) -> int:
    """llama.cpp's name for what most of the matrices are."""
    import gguf

    kinds = [entry.type for entry in plan.entries if entry.type != "F32"] or ["F32"]
    most = max(sorted(set(kinds)), key=kinds.count)
    return int(gguf.LlamaFileType["ALL_F32" if most == "F32" else f"MOSTLY_{most}"])


def _data(entry: Entry, view: TensorSource) -> np.ndarray[Any, Any]:
    """The tensor as it lies in the file."""
    import gguf

    if entry.carried:
        rows = to_blocks(_codes(entry, view), entry.source).rows
        return _permuted(entry, rows).numpy()
    values = _permuted(entry, finite(view.read(entry.source), entry.source, view.source).float())
    if entry.plus_one:
        values = values + 1
    if entry.type == "F16":
        half = values.half()
        if not bool(torch.isfinite(half).all()):
            raise SutureError(
                f"gguf: {entry.source} holds values up to {float(values.abs().max()):.3g}, which overflow float16",
                "use type: bf16",
            )
        return half.numpy()
    return gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[entry.type])


def _codes(entry: Entry, view: TensorSource) -> Quantized:
    assert isinstance(view, DenseView)
    codes = view.packed[entry.source].codes
    assert codes is not None
    return codes()


def _permuted(entry: Entry, rows: Tensor) -> Tensor:
    return rows if entry.heads is None else rows[permute_rows(entry.heads, len(rows))].contiguous()


def _add_tokenizer(writer: Any, work: StepRun, plan: GGUFPlan, vocabulary: int, pre: str | None) -> None:
    """Tokens, merges and special ids from the checkpoint's tokenizer.json; a model without one gets none."""
    import gguf

    files = {name: content for name in _TOKENIZER if (content := work.checkpoint.side(name)) is not None}
    if "tokenizer.json" not in files:
        writer.add_tokenizer_model("none")
        return
    found = read_vocabulary(files["tokenizer.json"], vocabulary, pre)
    writer.add_tokenizer_model(found.model)
    writer.add_token_list(found.tokens)
    writer.add_token_types(found.types)
    if found.scores is not None:
        writer.add_token_scores(found.scores)
    if found.pre is not None:
        writer.add_tokenizer_pre(found.pre)
    if found.space_prefix is not None:
        writer.add_add_space_prefix(found.space_prefix)
    scratch = work.staging.work / "tokenizer"
    scratch.mkdir(exist_ok=True)
    for name, content in files.items():
        (scratch / name).write_bytes(content)
    (scratch / "config.json").write_bytes(to_json(plan.config))
    special = gguf.SpecialVocab(scratch, load_merges=found.model == "gpt2", n_vocab=vocabulary)
    special.add_to_gguf(writer, quiet=True)


def _read_back(path: Path, plan: GGUFPlan, view: TensorSource) -> dict[str, Any]:
    """Receipt of what the `gguf` package finds in the file. Raises SutureError when a carried weight is another, or any
    tensor is further from the checkpoint's than its type explains."""
    import gguf

    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    absent = [entry.name for entry in plan.entries if entry.name not in found]
    if absent:
        raise SutureError(f"{path}: {absent[0]} is not in the file that was written", "please report this")
    worst: dict[str, float] = {}
    for entry in plan.entries:
        tensor = found[entry.name]
        values = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        wanted = exact_values(_codes(entry, view)) if entry.carried else view.read(entry.source).float()
        wanted = _permuted(entry, wanted) + (1.0 if entry.plus_one else 0.0)
        values = values.view(wanted.shape)
        size = float(torch.linalg.vector_norm(wanted))
        error = float(torch.linalg.vector_norm(values - wanted)) / size if size else float(values.abs().max())
        exact = entry.type in ("F32", "Q4_0", "Q8_0") if entry.carried or entry.type == "F32" else False
        if not error <= (0.0 if exact else _TOLERANCE[entry.type]):
            raise SutureError(
                f"{path}: {entry.name} differs from {entry.source} by {error:.3g} of its size", "please report this"
            )
        kind = f"{entry.type} carried" if entry.carried else entry.type
        worst[kind] = max(worst.get(kind, 0.0), error)
    return {
        "file": path.name,
        "tensors": len(found),
        "carried": sum(entry.carried for entry in plan.entries),
        "largest_relative_error": {kind: float(f"{error:.3g}") for kind, error in sorted(worst.items())},
        "llama.cpp": "not run",
    }


_TOLERANCE = {"F16": 1e-3, "BF16": 5e-3, "Q8_0": 2e-2, "Q4_0": 0.3, "Q4_1": 0.3}  # of a tensor's size
