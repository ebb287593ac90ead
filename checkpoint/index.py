"""Which files of a directory are the model's weights, and which tensor lies where.

An index (`model.safetensors.index.json`) decides when there is one: what it names must be there, and its shards must
hold what it names and nothing else. Without an index the names of the files decide, and every doubt is an error: two
files with the same tensor, a gap in numbered shards, numbered shards beside `model.safetensors`. No file is opened
whose real place is outside of the directory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import SutureError
from .header import TensorInfo, read_header
from .strict_json import strict_json

INDEX_LIMIT = 100_000_000  # bytes; the largest public indexes have some 20 MB
SAFETENSORS = ".safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]+)-of-(?P<count>[0-9]+)\.(safetensors|bin)")
TORCH_BIN = re.compile(r"pytorch_model(-[0-9]+-of-[0-9]+)?\.bin")
_ADAPTER = re.compile(r"adapter_.*\.safetensors")
_TRAINING = re.compile(r"(optimizer|scheduler|scaler|trainer|training|rng_state|random_state).*\.safetensors")
_CONSOLIDATED = re.compile(r"consolidated.*\.safetensors")
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)  # devices on Windows


@dataclass(frozen=True)
class Located:
    """The weights of one directory."""

    tensors: dict[str, TensorInfo]  # empty for .bin files: torch has to open them
    weight_files: tuple[Path, ...]
    notes: tuple[str, ...]  # what was ignored or odd, for the user
    bin_files: tuple[Path, ...] = ()
    index_file: Path | None = None
    weight_map: dict[str, str] = field(default_factory=dict)  # tensor -> file name, as the index says


def locate_tensors(directory: Path) -> Located:
    """Find the weight files of `directory`, check them against its index, and read their headers.

    Raises:
        SutureError: no weights, an incomplete or contradictory set of them, an entry that leaves the directory, or a
            damaged file.
    """
    names = file_names(directory)
    index = _choose_index(directory, names)
    if index is not None:
        return _locate_indexed(directory, index, names)
    chosen, notes = _choose_unindexed(directory, names)
    if not chosen:
        return _locate_bins(directory, names, notes)
    roots = allowed_roots(directory)
    for name in chosen:
        refuse_escape(directory / name, roots)
    tensors: dict[str, TensorInfo] = {}
    for name in chosen:
        for info in read_header(directory / name).tensors.values():
            if info.name in tensors:
                raise SutureError(
                    f"{directory}: tensor {info.name!r} is in both {tensors[info.name].file.name} and {name}, "
                    "and there is no index to decide",
                    "remove the files that are not the model's",
                )
            tensors[info.name] = info
    return Located(
        _some_tensors(directory, tensors), _paths(directory, chosen), (*notes, *_unused_bins(names, chosen[0]))
    )


def file_names(directory: Path) -> list[str]:
    """Names of the files in `directory`, sorted; links count even when broken; hidden files do not."""
    try:
        entries = [entry for entry in directory.iterdir() if entry.is_symlink() or entry.is_file()]
    except OSError as error:
        raise SutureError(f"{directory} cannot be listed: {error.strerror}") from error
    return sorted(entry.name for entry in entries if not entry.name.startswith(".") and not entry.is_dir())


def allowed_roots(directory: Path) -> tuple[Path, ...]:
    """Real directories that files of `directory` may lie in: itself, and the blobs of a Hugging Face cache.

    A cached model is `models--org--name/snapshots/COMMIT/`, whose files are links into `models--org--name/blobs/`.
    """
    real = directory.resolve()
    repo = real.parent.parent
    blobs = repo / "blobs"
    if real.parent.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink():
        return (real, blobs)
    return (real,)


def refuse_escape(path: Path, roots: tuple[Path, ...]) -> None:
    """Raise SutureError when `path`, with its links followed, is not inside one of `roots`."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise SutureError(f"{path} cannot be followed: {error}") from error
    if not any(root in real.parents for root in roots):
        raise SutureError(
            f"{path} leads out of its directory, to {real}",
            "put a copy of that file into the directory, or open the directory that it is in",
        )


def _paths(directory: Path, names: Iterable[str]) -> tuple[Path, ...]:
    return tuple(directory / name for name in names)


def _some_tensors(directory: Path, tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    if not tensors:
        raise SutureError(f"{directory}: its weight files hold no tensors")
    return tensors


# ---- with an index


def _choose_index(directory: Path, names: list[str]) -> Path | None:
    found = [name for name in names if name.endswith(".safetensors.index.json") and not name.startswith("adapter_")]
    if SAFETENSORS_INDEX in found:
        return directory / SAFETENSORS_INDEX
    if len(found) > 1:
        raise SutureError(
            f"{directory} has several indexes and none is {SAFETENSORS_INDEX}: {', '.join(found)}",
            f"remove or rename all but one to {SAFETENSORS_INDEX}",
        )
    return directory / found[0] if found else None


def _locate_indexed(directory: Path, index: Path, names: list[str]) -> Located:
    weight_map, claimed_size = read_index(index, SAFETENSORS)
    shards = sorted(set(weight_map.values()))
    tensors: dict[str, TensorInfo] = {}
    held: dict[str, list[str]] = {}
    for shard in shards:
        header = read_header(directory / shard)
        held[shard] = list(header.tensors)
        tensors |= header.tensors
    match_index(index, weight_map, held)
    notes = [f"{name}: not referenced by {index.name}, ignored" for name in names if _is_stray(name, shards)]
    total = sum(info.nbytes for info in tensors.values())
    if claimed_size is not None and claimed_size != total:
        notes.append(f"{index.name}: total_size says {claimed_size!r:.40}, the tensors have {total}; recomputed")
    notes += _unused_bins(names, index.name)
    return Located(
        _some_tensors(directory, tensors),
        _paths(directory, shards),
        tuple(notes),
        index_file=index,
        weight_map=weight_map,
    )


def _is_stray(name: str, shards: list[str]) -> bool:
    return name.endswith((SAFETENSORS, ".safetensors.index.json")) and name not in (*shards, SAFETENSORS_INDEX)


def read_index(index: Path, suffix: str) -> tuple[dict[str, str], Any]:
    """Read and check an index whose shards end in `suffix`; no shard is opened.

    Returns:
        The map from tensor name to shard name, and metadata.total_size as it is written there (None: absent).

    Raises:
        SutureError: not an index, a shard's name that leaves the directory, or a shard that is missing.
    """
    roots = allowed_roots(index.parent)
    refuse_escape(index, roots)
    content = strict_json(index, INDEX_LIMIT)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise SutureError(f"{index}: an object with a weight_map from tensor names to file names was expected")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        problem = _unsafe_name(shard, suffix)
        if problem:
            raise SutureError(
                f"{index}: weight_map names the file {shard!r:.200}, which {problem}",
                "an index may only name files beside it; do not trust this one",
            )
        refuse_escape(index.parent / shard, roots)
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        single = f"model{suffix}" if suffix == SAFETENSORS else f"pytorch_model{suffix}"
        stale = f"; or, if {single} is the model, remove the index" if (index.parent / single).is_file() else ""
        raise SutureError(
            f"{index.parent}: {len(missing)} of {len(shards)} files that {index.name} names are missing: "
            f"{_first(missing)}",
            f"incomplete download? Fetch the missing files{stale}",
        )
    metadata = content.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None


def _unsafe_name(name: str, suffix: str) -> str:
    """Why `name` may not stand in an index, or an empty string."""
    parts = name.split("/")
    if name.startswith("/") or "\\" in name or ":" in name:
        return "is not a plain relative path"
    if ".." in parts:
        return "leaves the directory"
    if any(part in ("", ".") or part.endswith((".", " ")) or _RESERVED.fullmatch(part) for part in parts):
        return "is not a portable file name"
    if not name.isprintable() or len(name) > 255:
        return "is not a printable file name of at most 255 characters"
    if PurePosixPath(name).suffix != suffix:
        return f"does not end in {suffix}"
    return ""


def match_index(index: Path, weight_map: Mapping[str, str], held: Mapping[str, Iterable[str]]) -> None:
    """Check that each file holds the tensors that the index places in it, no fewer and no more.

    Args:
        weight_map: tensor -> file, as the index says.
        held: file -> the tensors that it really has.
    """
    listed: dict[str, set[str]] = defaultdict(set)
    for tensor, shard in weight_map.items():
        listed[shard].add(tensor)
    for shard, tensors in held.items():
        there = set(tensors)
        counts = f"the index lists {len(listed[shard])} tensors for it, it holds {len(there)}"
        lacking, extra = sorted(listed[shard] - there), sorted(there - listed[shard])
        if lacking:
            raise SutureError(
                f"{index.parent / shard} lacks {_tensors(lacking)} that {index.name} places in it; {counts}",
                "the index and the file are not of the same save: fetch both again",
            )
        if extra:
            raise SutureError(
                f"{index.parent / shard} holds {_tensors(extra)} that {index.name} does not place in it; {counts}",
                "loaders would drop it silently: fetch the index and the file again, or correct the index",
            )


def _tensors(names: list[str]) -> str:
    return f"tensor{'s' if len(names) > 1 else ''} {_first([repr(name) for name in names])}"


def _first(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# ---- without an index


def _choose_unindexed(directory: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """The safetensors files that make up the model by their names, and notes on those left out."""
    weights = [name for name in names if name.endswith(SAFETENSORS)]
    left_out = [name for name in weights if _ADAPTER.fullmatch(name) or _TRAINING.fullmatch(name)]
    chosen = [name for name in weights if name not in left_out]
    consolidated = [name for name in chosen if _CONSOLIDATED.fullmatch(name)]
    if len(consolidated) < len(chosen):
        left_out += consolidated
        chosen = [name for name in chosen if name not in consolidated]
    shards = [name for name in chosen if _NUMBERED.fullmatch(name)]
    if "model.safetensors" in chosen:
        if shards:
            raise SutureError(
                f"{directory} has both model.safetensors and numbered shards ({_first(shards, 2)}), and no index",
                f"remove the older of the two, or fetch {SAFETENSORS_INDEX} if the shards are the model",
            )
        left_out += chosen
        left_out.remove("model.safetensors")
        chosen = ["model.safetensors"]
    _refuse_gaps(directory, shards)
    return chosen, [f"{name}: not the model's weights by its name, ignored" for name in sorted(left_out)]


def _refuse_gaps(directory: Path, shards: list[str]) -> None:
    """Check that files NAME-00001-of-0000N are there for all numbers, from 1 or from 0, for one N per NAME."""
    sets: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for shard in shards:
        match = _NUMBERED.fullmatch(shard)
        if match:
            sets[match["stem"]][int(match["count"])].add(int(match["number"]))
    for stem, by_count in sets.items():
        if len(by_count) > 1:
            totals = " and ".join(str(count) for count in sorted(by_count))
            raise SutureError(
                f"{directory}: shards of two different saves: {stem}-*-of {totals}",
                "remove the files of the older one",
            )
        ((count, numbers),) = by_count.items()
        first = 0 if 0 in numbers else 1
        missing = islice((number for number in range(first, first + count) if number not in numbers), 6)
        shown = [f"{number:05d}" for number in missing]
        if shown or len(numbers) != count:
            etc = ", ..." if len(shown) > 5 else ""
            raise SutureError(
                f"{directory}: {len(numbers)} of {count} shards of {stem} are there"
                + (f"; missing: number {', '.join(shown[:5])}{etc}" if shown else ""),
                "incomplete download? Fetch the missing files",
            )


def _unused_bins(names: list[str], instead: str) -> list[str]:
    bins = [name for name in names if TORCH_BIN.fullmatch(name)]
    return [f"{_first(bins)}: ignored, {instead} is used: safetensors is preferred"] if bins else []


def _locate_bins(directory: Path, names: list[str], notes: list[str]) -> Located:
    bins = [name for name in names if TORCH_BIN.fullmatch(name)]
    if BIN_INDEX in names:
        index = directory / BIN_INDEX
        weight_map, _ = read_index(index, ".bin")
        shards = sorted(set(weight_map.values()))
        notes = notes + [f"{name}: not referenced by {BIN_INDEX}, ignored" for name in bins if name not in shards]
        files = _paths(directory, shards)
        return Located({}, files, tuple(notes), bin_files=files, index_file=index, weight_map=weight_map)
    if not bins:
        raise _no_weights(directory, names)
    shards = [name for name in bins if name != "pytorch_model.bin"]
    if shards and len(shards) < len(bins):
        raise SutureError(
            f"{directory} has both pytorch_model.bin and numbered shards ({_first(shards, 2)}), and no index",
            "remove the older of the two",
        )
    _refuse_gaps(directory, shards)
    for name in bins:
        refuse_escape(directory / name, allowed_roots(directory))
    files = _paths(directory, bins)
    return Located({}, files, tuple(notes), bin_files=files)


def refuse_adapter(directory: Path) -> None:
    """Raise SutureError when `directory` holds a LoRA adapter; call it where a model was expected and not found."""
    if (directory / "adapter_config.json").is_file():
        raise SutureError(
            f"{directory} is a LoRA adapter, not a model: it has adapter_config.json and no model weights",
            "give the base model here, and the adapter to lora.merge",
        )


def _no_weights(directory: Path, names: list[str]) -> SutureError:
    refuse_adapter(directory)
    try:
        below = sorted(path.parent.name for path in directory.glob("*/*.safetensors"))
    except OSError:
        below = []
    inside = f"; there are weights in its subfolders {_first(sorted(set(below)))}: give one of them" if below else ""
    return SutureError(
        f"{directory} has no weights; found: {_first(names, 12) if names else 'nothing'}",
        f"*.safetensors or pytorch_model.bin is needed{inside}",
    )
