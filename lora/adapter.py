"""A PEFT LoRA adapter on disk, opened and checked: which modules it changes and with which tensors.

Every tensor's name is `base_model.model.` + the module's path in the model + what the tensor is to it. Prefixes and
infixes that wrappers, trainers and older versions of PEFT leave are repaired; a name that means nothing is an error, for
a tensor that is silently dropped is how adapters come out as their base.

    adapter = open_adapter("path/to/adapter")
    adapter.parts[0].path, adapter.config.scale(adapter.parts[0].path)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError, did_you_mean
from ..checkpoint.header import TensorInfo, code_of, read_header, read_range, torch_dtype_of
from ..checkpoint.index import allowed_roots, refuse_escape
from ..checkpoint.manifest import sha256_file
from ..checkpoint.torchbin import load_bin
from .config import CONFIG, AdapterConfig, read_config

WEIGHTS, BIN = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
FINGERPRINT = "suture_base"  # key of the safetensors metadata that holds the base's fingerprint
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
# What a tensor is to its module: the end of its name, in the order in which ends are tried.
_KINDS: tuple[tuple[str, str], ...] = (
    ("A", r"lora_A(?:\.[^.]+)?\.weight"),
    ("B", r"lora_B(?:\.[^.]+)?\.weight"),
    ("B bias", r"lora_B(?:\.[^.]+)?\.bias"),
    ("magnitude", r"lora_magnitude_vector(?:\.[^.]+)?(?:\.weight)?"),
    ("embedding A", r"lora_embedding_A(?:\.[^.]+)?"),
    ("embedding B", r"lora_embedding_B(?:\.[^.]+)?"),
    ("tokens", r"(?:token_adapter\.)?trainable_tokens_delta(?:\.[^.]+)?"),
    ("base weight", r"base_layer\.weight"),
    ("base bias", r"base_layer\.bias"),
    ("weight", r"(?:modules_to_save(?:\.[^.]+)?\.)?weight"),
    ("bias", r"(?:modules_to_save(?:\.[^.]+)?\.)?bias"),
    ("gate_up_proj", r"(?:modules_to_save(?:\.[^.]+)?\.)?gate_up_proj"),  # of all experts, in one parameter
    ("down_proj", r"(?:modules_to_save(?:\.[^.]+)?\.)?down_proj"),
)
EXPERTS = ("gate_up_proj", "down_proj")
_OTHER_KINDS = {
    "lora_diag": "KaSA",
    "lora_E": "AdaLoRA",
    "ranknum": "AdaLoRA",
    "hada_w1_a": "LoHa",
    "lokr_w1": "LoKr",
    "vera_lambda_b": "VeRA",
    "oft_r": "OFT",
    "ia3_l": "IA3",
}
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Part:
    """One module's tensors. `level`: how many wrappers lie inside of it, for several parameters of one module."""

    path: str  # in the model, as PEFT names it
    keys: dict[str, str]  # kind (of `_KINDS`) -> key in the file
    level: int = 0

    @property
    def low_rank(self) -> bool:
        return "A" in self.keys or "embedding A" in self.keys


@dataclass(frozen=True, eq=False)
class Adapter:
    """An opened adapter; tensors are read when they are asked for."""

    source: str  # as the user typed it
    directory: Path
    file: Path
    config: AdapterConfig
    tensors: dict[str, TensorInfo]
    parts: tuple[Part, ...]
    ignored: dict[str, str]  # key -> why it has no effect
    metadata: dict[str, str]
    notes: tuple[str, ...]
    in_memory: Mapping[str, Tensor] = field(default_factory=dict)

    def read(self, key: str, index: int | None = None) -> Tensor:
        """The tensor, or its part `index`, in float32. Raises SutureError when it holds NaN or inf."""
        info = self.tensors[key]
        if info.start < 0:
            tensor = self.in_memory[key] if index is None else self.in_memory[key][index]
            tensor = tensor.to(torch.float32, copy=True)  # what is read may be changed
        else:
            shape = info.shape if index is None else info.shape[1:]
            nbytes = info.nbytes if index is None else info.nbytes // info.shape[0]
            raw = read_range(info.file, info.start + (index or 0) * nbytes, nbytes)
            stored = torch.frombuffer(raw, dtype=torch_dtype_of(info)) if raw else torch.empty(0)
            tensor = stored.reshape(shape).float()
        if info.dtype[0] not in "FB" or info.dtype == "BOOL":
            raise SutureError(
                f"{self.file}: {key} is {info.dtype}, not floating point", "quantized adapters are not read"
            )
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise SutureError(
                f"{self.file}: {key} holds {bad} NaN or infinite values of {tensor.numel()}",
                "the training diverged or the file is damaged: take an earlier checkpoint of the adapter",
            )
        return tensor

    def shape(self, key: str) -> tuple[int, ...]:
        return self.tensors[key].shape

    @property
    def sha256(self) -> str:
        """Of the weight file."""
        return sha256_file(self.file)

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        return tuple(self.directory / name for name in TOKENIZER_FILES if (self.directory / name).is_file())

    @property
    def n_parameters(self) -> int:
        return sum(info.numel for key, info in self.tensors.items() if key not in self.ignored)


def open_adapter(source: str | Path) -> Adapter:
    """Open an adapter's directory, or a directory with one adapter's sub-folder in it.

    Raises SutureError: not an adapter, damaged or truncated files, keys of no meaning, halves without their other half,
    or shapes that contradict one another or the config's ranks.
    """
    directory, notes = _find(Path(source))
    config, config_notes = read_config(directory)
    file, tensors, in_memory, metadata, file_notes = _weights(directory)
    parts, ignored, unknown = sort_keys(list(tensors))
    if unknown:
        raise SutureError(_meaningless(file, unknown), "a key that is dropped would silently change the result")
    adapter = Adapter(
        source=str(source),
        directory=directory,
        file=file,
        config=config,
        tensors=tensors,
        parts=parts,
        ignored=ignored,
        metadata=metadata,
        notes=(*notes, *config_notes, *file_notes),
        in_memory=in_memory,
    )
    _check_parts(adapter)
    return adapter


def _find(path: Path) -> tuple[Path, list[str]]:
    if not path.is_dir():
        raise SutureError(f"adapter: {path} is not a directory", "give the directory with adapter_config.json")
    if (path / CONFIG).is_file():
        return path, []
    below = sorted(file.parent for file in path.glob(f"*/{CONFIG}"))
    if len(below) == 1:
        return below[0], [f"adapter: taken from the sub-folder {below[0].name}"]
    if below:
        names = ", ".join(folder.name for folder in below)
        raise SutureError(f"adapter: {path} holds several adapters: {names}", "give one of these sub-folders")
    if (path / "config.json").is_file():
        raise SutureError(f"adapter: {path} is a model, not an adapter: it has config.json and no {CONFIG}")
    raise SutureError(f"adapter: {path} has no {CONFIG}", "give the directory that PEFT's save_pretrained wrote")


def _weights(
    directory: Path,
) -> tuple[Path, dict[str, TensorInfo], dict[str, Tensor], dict[str, str], list[str]]:
    roots = allowed_roots(directory)
    safe, pickled = directory / WEIGHTS, directory / BIN
    if safe.exists() or safe.is_symlink():
        refuse_escape(safe, roots)
        header = read_header(safe)
        notes = [f"{BIN}: ignored, {WEIGHTS} is used"] if pickled.exists() else []
        found = safe, header.tensors, {}, header.metadata, notes
    elif pickled.exists() or pickled.is_symlink():
        refuse_escape(pickled, roots)
        loaded = load_bin(pickled)
        infos = {
            name: TensorInfo(name, code_of(t.dtype), tuple(t.shape), pickled, -1, t.numel() * t.element_size())
            for name, t in loaded.items()
        }
        found = pickled, infos, loaded, {}, []
    else:
        raise SutureError(
            f"{directory} has {CONFIG} but neither {WEIGHTS} nor {BIN}", "incomplete download? Fetch the weights too"
        )
    if not found[1]:
        raise SutureError(f"{found[0]} holds no tensors", "the adapter was saved wrongly (an empty state dict)")
    return found


def sort_keys(keys: list[str]) -> tuple[tuple[Part, ...], dict[str, str], list[str]]:
    """(parts in the file's order, ignored keys with reasons, keys of no meaning)."""
    collected: dict[tuple[str, int], dict[str, str]] = {}
    ignored: dict[str, str] = {}
    unknown: list[str] = []
    for key in keys:
        name = _repaired(key)
        if ".original_module." in f".{name}":
            ignored[key] = "the base's own copy, kept beside a trained one"
            continue
        read = _read_name(name)
        if read is None:
            unknown.append(key)
            continue
        path, level, kind = read
        kinds = collected.setdefault((path, level), {})
        other = kinds.get(kind, key)
        if other != key:
            copies = [k for k in (other, key) if ".modules_to_save." in k]
            if len(copies) != 1:
                raise SutureError(
                    f"adapter keys {other} and {key} both mean the {kind} of {path}", "remove one of them"
                )
            ignored[copies[0]] = "PEFT's second copy of a bias that was trained in full (bias: all)"
            key = other if copies[0] == key else key
        kinds[kind] = key
    return tuple(Part(path, kinds, level) for (path, level), kinds in collected.items()), ignored, unknown


def _repaired(key: str) -> str:
    """The key without what wrappers put into it, and without PEFT's own prefix."""
    name = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
    name = name.removeprefix("module.")
    while name.startswith(PREFIX):
        name = name.removeprefix(PREFIX)
    return name.removeprefix("base_model.") if name.startswith("base_model.") else name


def _read_name(name: str) -> tuple[str, int, str] | None:
    for kind, ending in _KINDS:
        found = re.fullmatch(rf"(?:(?P<path>.+?)\.)?(?P<levels>(?:base_layer\.)*){ending}", name)
        whole = kind in ("weight", "bias")
        if found and found["path"] and not (whole and re.search(r"(^|\.)lora_", found["path"], re.IGNORECASE)):
            level = found["levels"].count("base_layer.")
            return found["path"], level, kind
    return None


def _meaningless(file: Path, unknown: list[str]) -> str:
    for key in unknown:
        for ending, method in _OTHER_KINDS.items():
            if key.endswith((f".{ending}", f".{ending}.default")) or f".{ending}." in key:
                return f"{file}: {key} belongs to a {method} adapter, which cannot be merged as a LoRA"
    ends = ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B"]
    tail = ".".join(unknown[0].split(".")[-2:])
    return f"{file}: {len(unknown)} keys mean nothing to a LoRA adapter, first {unknown[0]}{did_you_mean(tail, ends)}"


_HALVES = (("A", "B"), ("embedding A", "embedding B"))
_NEEDS_LOW_RANK = ("B bias", "magnitude")


def _check_parts(adapter: Adapter) -> None:
    """Both halves there, of one rank, and of the rank that the config gives them."""
    for part in adapter.parts:
        for one, other in (*_HALVES, *((b, a) for a, b in _HALVES)):
            if one in part.keys and other not in part.keys:
                raise SutureError(
                    f"{adapter.file}: {part.keys[one]} has no lora_{other.rpartition(' ')[2]} beside it",
                    "the adapter is incomplete: save or download it again",
                )
        for kind in _NEEDS_LOW_RANK:
            if kind in part.keys and not part.low_rank:
                raise SutureError(
                    f"{adapter.file}: {part.keys[kind]} has no lora_A and lora_B beside it",
                    "the adapter is incomplete: save or download it again",
                )
        if part.low_rank:
            _check_shapes(adapter, part)
    if adapter.config.lora_bias:
        bare = [p for p in adapter.parts if "A" in p.keys and "B bias" not in p.keys]
        if bare:
            raise SutureError(
                f"{adapter.file}: lora_bias is set, but {bare[0].path} has no lora_B.bias",
                "the adapter is incomplete: save or download it again",
            )
    elif any("B bias" in part.keys for part in adapter.parts):
        raise SutureError(f"{adapter.file}: it holds lora_B's biases, but {CONFIG} says lora_bias: false", "correct it")
    if adapter.config.dora:
        bare = [p for p in adapter.parts if p.low_rank and "magnitude" not in p.keys]
        if bare:
            raise SutureError(
                f"{adapter.file}: use_dora is set, but {bare[0].path} has no lora_magnitude_vector",
                "the adapter is incomplete: save or download it again",
            )
    elif any("magnitude" in part.keys for part in adapter.parts):
        raise SutureError(f"{adapter.file}: it holds DoRA magnitudes, but {CONFIG} says use_dora: false", "correct it")


def _check_shapes(adapter: Adapter, part: Part) -> None:
    a_kind, b_kind = _HALVES[0] if "A" in part.keys else _HALVES[1]
    a, b = adapter.shape(part.keys[a_kind]), adapter.shape(part.keys[b_kind])
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise SutureError(
            f"{adapter.file}: {part.path}: A is {list(a)} and B {list(b)}; [r, in] and [out, r] of one r were expected",
            "convolutions are not supported; else the file is damaged",
        )
