"""An opened checkpoint: config and tensor table in memory, weights on disk until they are asked for.

checkpoint = open_checkpoint("builtin:tiny")
checkpoint.config["hidden_size"], checkpoint.tensors["lm_head.weight"].shape
weight = checkpoint.read("lm_head.weight")  # its bytes alone are read
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .disk import read_soon
from .errors import SutureError, did_you_mean
from .header import DTYPES, TensorInfo, code_of, read_range, read_ranges, torch_dtype_of
from .index import TORCH_BIN, Located, allowed_roots, locate_tensors, match_index, refuse_adapter, refuse_escape
from .resolve import resolve_config, resolve_source
from .strict_json import strict_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CONFIG_LIMIT = 16_000_000  # bytes
MANIFEST = "suture.json"
# Weights in other formats, and what trainers leave: they would describe the model before the change.
_FOREIGN = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|pkl|gguf|ggml|onnx|onnx_data|h5|msgpack|ot|npz|tflite|pte|mlmodel|distcp|llamafile)"
    r"(\.index\.json)?\Z",
    re.IGNORECASE,
)
_DESKTOP_FILES = (".DS_Store", "Thumbs.db", "desktop.ini")
# Tensors that only quantized checkpoints have: end of the name, method.
_QUANTIZED_NAMES = (
    (".g_idx", "gptq"),
    (".qzeros", "awq"),
    (".qweight", "gptq"),
    (".weight_packed", "compressed-tensors"),
    (".absmax", "bitsandbytes"),
    (".quant_map", "bitsandbytes"),
    (".SCB", "bitsandbytes"),
    ("_proj_blocks", "mxfp4"),
    ("weight_scale_inv", "fp8"),
    ("_proj_scale_inv", "fp8"),
    ("weight_scale", "compressed-tensors"),
    (".W_q", "hqq"),
    (".codebooks", "aqlm"),
)


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoint:
    """A checkpoint on disk, validated; nothing of its weights is loaded."""

    path: Path
    source: str  # as the user typed it
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    weight_files: tuple[Path, ...]
    side_files: tuple[Path, ...]  # to be carried along byte for byte: tokenizer, templates, generation config, code
    notes: tuple[str, ...]  # what was ignored or odd on opening, for the user
    revision: str | None = None  # commit, for a Hub id
    bin_tensors: Mapping[str, Tensor] = field(default_factory=dict)  # memory-mapped, when the weights are .bin files
    settled: ClassVar[bool] = True  # nothing writes to it

    def __repr__(self) -> str:
        return (
            f"Checkpoint({self.source!r}, {self.config.get('model_type')}, {len(self.tensors)} tensors, "
            f"{self.nbytes / 1e6:,.1f} MB)"
        )

    def info(self, name: str) -> TensorInfo:
        """Where the tensor `name` is. SutureError when there is none of that name."""
        found = self.tensors.get(name)
        if found is None:
            raise SutureError(f"{self.path} has no tensor {name!r}{did_you_mean(name, self.tensors)}")
        return found

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, bit for bit, of its own dtype and shape, in memory of its own.

        Raises:
            SutureError: no such tensor, a dtype that torch lacks, or a failing read.
        """
        info = self.info(name)
        if info.start < 0:
            import torch

            return self.bin_tensors[name].clone(memory_format=torch.contiguous_format)
        dtype = torch_dtype_of(info)
        return _from_bytes(read_range(info.file, info.start, info.nbytes), dtype, info.shape)

    def read_bytes(self, name: str) -> bytearray:
        """The bytes of the tensor `name` as they are stored: little endian, last axis fastest."""
        info = self.info(name)
        if info.start < 0:
            return _to_bytes(self.bin_tensors[name])
        return read_range(info.file, info.start, info.nbytes)

    def expect(self, names: Iterable[str]) -> None:
        """Let the system read these tensors from the disk meanwhile, where it can (Linux); nothing waits."""
        by_file: dict[Path, list[TensorInfo]] = {}
        for name in dict.fromkeys(names):
            info = self.info(name)
            if info.start >= 0:
                by_file.setdefault(info.file, []).append(info)
        for file, infos in by_file.items():
            read_soon(file, [(info.start, info.nbytes) for info in infos])

    def read_rows(self, name: str, rows: Iterable[int] | torch.Tensor) -> torch.Tensor:
        """Some rows of a matrix, the others unread.

        Args:
            name: a tensor of shape (n, m).
            rows: k row numbers from 0 to n - 1, in any order, repeats allowed.

        Returns:
            (k, m), of the tensor's dtype, in the order asked for.

        Raises:
            SutureError: no such tensor, not a matrix, or a row that it does not have.
        """
        import torch

        info = self.info(name)
        if len(info.shape) != 2:
            raise SutureError(f"{info.file}: tensor {name!r} of shape {info.shape} has no rows: a matrix was expected")
        count, width = info.shape
        wanted = [operator.index(row) for row in (rows.tolist() if isinstance(rows, torch.Tensor) else rows)]
        outside = [row for row in wanted if not 0 <= row < count]
        if outside:
            raise SutureError(f"{info.file}: tensor {name!r} has rows 0 to {count - 1}, row {outside[0]} was asked for")
        if info.start < 0:
            return self.bin_tensors[name][torch.tensor(wanted, dtype=torch.long)].clone()
        dtype = torch_dtype_of(info)
        distinct = sorted(set(wanted))
        place = {row: position for position, row in enumerate(distinct)}
        order = torch.tensor([place[row] for row in wanted], dtype=torch.long)
        row_bytes = width * DTYPES[info.dtype].bits // 8
        ranges = [(info.start + first * row_bytes, many * row_bytes) for first, many in _runs(distinct)]
        read = _from_bytes(read_ranges(info.file, ranges), torch.uint8, (len(distinct), row_bytes))
        return read[order].view(dtype) if row_bytes else torch.empty((len(wanted), 0), dtype=dtype)

    def side(self, name: str) -> bytes | None:
        """The file `name` that travels with the weights, whole; None when there is none."""
        found = next((path for path in self.side_files if path.name == name), None)
        return found.read_bytes() if found is not None else None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: info.shape for name, info in self.tensors.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """safetensors dtype code of every tensor by name."""
        return {name: info.dtype for name, info in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def quantization(self) -> dict[str, Any] | None:
        """How the weights are already quantized: the config's own account, or a guess from the tensors; None if not.

        A guess is `{"quant_method": NAME, "detected": "tensors"}`.
        """
        return _declared_quantization(self.config) or _detected_quantization(self.tensors.values())


def open_checkpoint(source: str | Path, *, download: bool = False, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint: find it, and check config, index, headers and file links. No weights are loaded.

    Args:
        source: a directory, `builtin:NAME`, or a Hub id like `org/name`.
        download: may the network be used for a Hub id.
        revision: branch, tag or commit of a Hub id.

    Raises:
        SutureError: not found, incomplete, damaged, contradictory, or files that lead out of the directory.
    """
    resolved = resolve_source(source, download=download, revision=revision)
    config = _read_config(resolved.path)
    located = locate_tensors(resolved.path)
    bin_tensors = _load_bins(located)
    tensors = located.tensors or {name: _bin_info(name, tensor, file) for name, (tensor, file) in bin_tensors.items()}
    side_files, side_notes = _side_files(resolved.path, located.weight_files)
    return Checkpoint(
        path=resolved.path,
        source=resolved.source,
        config=config,
        tensors=tensors,
        weight_files=located.weight_files,
        side_files=side_files,
        notes=(*located.notes, *side_notes),
        revision=resolved.revision,
        bin_tensors={name: tensor for name, (tensor, _) in bin_tensors.items()},
    )


def read_config(
    source: str | Path, *, download: bool = False, revision: str | None = None
) -> tuple[Path, dict[str, Any]]:
    """The directory and the raw config.json of a model whose weights need not be there.

    Args:
        source: a directory, a config.json itself, `builtin:NAME`, or a Hub id, of which nothing else is fetched.

    Raises:
        SutureError: not found, or not the config of a model.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".json":
        directory = path.parent
        config = _checked_config(path)
        return directory, config
    directory = resolve_config(source, download=download, revision=revision)
    return directory, _read_config(directory)


def has_weights(directory: Path) -> bool:
    """Whether weight files, or an index of them, are there; not whether they are complete."""
    return any(
        path.suffix == ".safetensors" or path.name.endswith(".index.json") or TORCH_BIN.fullmatch(path.name)
        for path in directory.iterdir()
    )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file() and not path.is_symlink():
        refuse_adapter(directory)
        raise SutureError(f"{directory} has no config.json", "give the directory of a Hugging Face model")
    refuse_escape(path, allowed_roots(directory))
    return _checked_config(path)


def _checked_config(path: Path) -> dict[str, Any]:
    config = strict_json(path, CONFIG_LIMIT)
    if not isinstance(config, dict):
        raise SutureError(f"{path}: an object was expected, found {type(config).__name__}")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        found = f"found {model_type!r:.60}" if "model_type" in config else "it is missing"
        raise SutureError(
            f"{path}: a model_type like 'llama' was expected, {found}",
            "add the model_type of the architecture; without it no loader knows the model",
        )
    return config


# ---- .bin weights


def _load_bins(located: Located) -> dict[str, tuple[Tensor, Path]]:
    """Tensor and file by name, for weights in .bin files; empty for safetensors."""
    if not located.bin_files:
        return {}
    from .torchbin import load_bin

    found: dict[str, tuple[Tensor, Path]] = {}
    held: dict[str, list[str]] = {}
    for file in located.bin_files:
        loaded = load_bin(file)
        if located.index_file is not None:
            held[file.relative_to(located.index_file.parent).as_posix()] = list(loaded)
        for name, tensor in loaded.items():
            if name in found:
                raise SutureError(f"{file}: tensor {name!r} is also in {found[name][1].name}")
            found[name] = (tensor, file)
    if located.index_file is not None:
        match_index(located.index_file, located.weight_map, held)
    if not found:
        raise SutureError(f"{located.bin_files[0].parent}: its weight files hold no tensors")
    return found


def _bin_info(name: str, tensor: Tensor, file: Path) -> TensorInfo:
    nbytes = tensor.numel() * tensor.element_size()
    return TensorInfo(name, code_of(tensor.dtype), tuple(tensor.shape), file, -1, nbytes)


# ---- side files


def _side_files(directory: Path, weight_files: tuple[Path, ...]) -> tuple[tuple[Path, ...], list[str]]:
    """Files that travel with the model, and notes on what does not. SutureError for a link out of the directory.

    config.json and an earlier run's manifest are not among them: each output gets its own.
    """
    roots = allowed_roots(directory)
    weight_folders = {file.parent for file in weight_files}
    passed = {"config.json", MANIFEST, *_DESKTOP_FILES, *(file.name for file in weight_files)}
    side: list[Path] = []
    foreign: list[str] = []
    folders: list[str] = []
    broken: list[str] = []
    for path in sorted(directory.iterdir()):
        name = path.name
        if name in passed or name.startswith("._"):
            continue
        if path.is_dir():
            folders += [name] if not name.startswith((".", "__")) and path not in weight_folders else []
        elif _FOREIGN.search(name):
            located = name.endswith((".safetensors", ".index.json")) or TORCH_BIN.fullmatch(name)  # has its own note
            foreign += [name] if not located else []
        elif path.is_file():
            refuse_escape(path, roots)
            side.append(path)
        elif path.is_symlink():
            broken.append(name)
    left = {"weights in other formats or training state": foreign, "subfolders": folders, "broken links": broken}
    return tuple(side), [f"not carried along, {what}: {', '.join(names)}" for what, names in left.items() if names]


# ---- quantized input


def _declared_quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    nested = [value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)]
    for part in (config, *nested):
        for key in ("quantization_config", "compression_config", "quantization"):
            found = part.get(key)
            if found:
                return found if isinstance(found, dict) else {"quant_method": str(found)}
    return None


def _detected_quantization(tensors: Iterable[TensorInfo]) -> dict[str, Any] | None:
    infos = list(tensors)
    for ending, method in _QUANTIZED_NAMES:
        if any(info.name.endswith(ending) for info in infos):
            return {"quant_method": method, "detected": "tensors"}
    if any(".quant_state." in info.name for info in infos):
        return {"quant_method": "bitsandbytes", "detected": "tensors"}
    for info in infos:
        if len(info.shape) > 1 and info.name.endswith("weight") and info.dtype not in ("F64", "F32", "F16", "BF16"):
            return {"quant_method": f"{info.dtype} weights", "detected": "tensors"}
    return None


# ---- bytes and tensors


def _from_bytes(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor over `data`, which it keeps and which nothing else refers to."""
    import torch

    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _to_bytes(tensor: Tensor) -> bytearray:
    import torch

    return bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """Ascending row numbers as runs (first, how many): [2, 3, 7] -> [(2, 2), (7, 1)]."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((row, 1))
    return runs
