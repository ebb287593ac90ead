"""From what the user typed to a directory: a path, `builtin:NAME`, or a Hub id, in that order.

The network is used only when it was allowed; a mistyped path never becomes a request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NoReturn

from .errors import SutureError, did_you_mean

BUILTIN = "builtin:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_FILE_SUFFIXES = (".safetensors", ".bin", ".gguf", ".json", ".pt", ".pth", ".ckpt", ".onnx", ".yaml", ".yml")
# What a model needs, then what travels with it. Subfolders hold other formats.
_NEEDED = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja"]
_TRAVELS = ["*.py", "*.md", "LICENSE*", "NOTICE*"]
_TORCH_BIN = ["pytorch_model.bin", "pytorch_model-*.bin"]
_ELSEWHERE = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class Resolved:
    """A directory with a checkpoint, and where it came from."""

    path: Path
    source: str  # as the user typed it
    revision: str | None  # commit hash, for a Hub id


def resolve_source(source: str | Path, *, download: bool = False, revision: str | None = None) -> Resolved:
    """Find the directory of a checkpoint.

    Args:
        source: a directory, `builtin:NAME`, or a Hub id like `org/name`.
        download: may the network be used for a Hub id.
        revision: branch, tag or commit of a Hub id.

    Raises:
        SutureError: nothing there; the message says what was tried.
    """
    text = str(source)
    if not text.strip() or "\0" in text:
        raise SutureError(f"model {text!r} is not a path or an id", _forms())
    is_builtin = isinstance(source, str) and text.startswith(BUILTIN)
    found = _builtin(text) if is_builtin else _local(source)
    if found is None:
        return _hub(text, download, revision)
    if revision is not None:
        raise SutureError(f"revision {revision!r} is given, but {text} is a directory", "leave the revision out")
    return Resolved(found, text, None)


def resolve_config(source: str | Path, *, download: bool = False, revision: str | None = None) -> Path:
    """The directory with a model's config.json; of a Hub id only that file is looked up in the cache, or fetched.

    Raises:
        SutureError: nothing there; the message says what was tried.
    """
    try:
        return resolve_source(source, revision=revision).path
    except SutureError:
        text = str(source)
        if not _HUB_ID.fullmatch(text) or text.startswith(BUILTIN) or _local(source) is not None:
            raise
        found = _hub_config(text, revision, download)
        if found is None:
            raise
        return found


def _hub_config(repo_id: str, revision: str | None, download: bool) -> Path | None:
    """The snapshot's directory that holds config.json; None when it is not in the cache and may not be fetched."""
    from huggingface_hub import hf_hub_download

    try:
        found = hf_hub_download(repo_id, "config.json", revision=revision, local_files_only=not download)
    except Exception as error:  # the network, the Hub, the disk: each has its own family of exceptions
        if not download:
            return None
        reason = " ".join(str(error).split())[:300]
        raise SutureError(
            f"{repo_id}: config.json could not be downloaded: {type(error).__name__}: {reason}",
            "check the id, the connection and, for a gated model, `hf auth login`; or give a directory",
        ) from error
    return Path(found).parent


def _forms() -> str:
    return f"give a directory, a Hub id like org/name, or {', '.join(BUILTIN + name for name in _builtins())}"


def _builtin_root() -> Traversable:
    return files(__name__.partition(".")[0]) / "builtin"


def _builtins() -> list[str]:
    root = _builtin_root()
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(("_", ".")))


def _builtin(text: str) -> Path:
    name = text.removeprefix(BUILTIN)
    names = _builtins()
    if name not in names:
        raise SutureError(f"no builtin model {name!r}{did_you_mean(name, names)}", f"there is: {', '.join(names)}")
    return Path(str(_builtin_root() / name))


def _local(source: str | Path) -> Path | None:
    """The existing directory that `source` names; None when it can only be a Hub id."""
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            return path
        exists = path.exists() or path.is_symlink()
    except (OSError, RuntimeError) as error:
        raise SutureError(f"{str(source)!r:.200} cannot be looked up: {error}", _forms()) from error
    if exists:
        raise SutureError(
            f"{source} is not a directory", "give the directory that holds config.json and the weight files"
        )
    if isinstance(source, Path) or _is_path_like(source):
        _missing(str(source), path)
    if not _HUB_ID.fullmatch(source):
        raise SutureError(f"no directory {source!r}, and it is not a Hub id", _forms())
    return None


def _is_path_like(text: str) -> bool:
    return (
        text.startswith(("/", ".", "~"))
        or text.count("/") > 1
        or "\\" in text
        or text.endswith("/")
        or text.lower().endswith(_FILE_SUFFIXES)
    )


def _missing(text: str, path: Path) -> NoReturn:
    hub_url = re.search(r"huggingface\.co/([\w.-]+/[\w.-]+)", text)
    if hub_url:
        raise SutureError(f"{text} is an address, not a directory", f"give the id alone: {hub_url[1]}")
    nearest, gone = path.absolute(), ""
    while not nearest.exists():
        gone, nearest = nearest.name, nearest.parent
    raise SutureError(
        f"no such directory: {path.absolute()}{did_you_mean(gone, _subdirectories(nearest))}; {nearest} exists",
        "nothing was asked of the network, because this is written as a path",
    )


def _subdirectories(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.iterdir() if entry.is_dir()]
    except OSError:
        return []  # only for a suggestion


def _hub(repo_id: str, download: bool, revision: str | None) -> Resolved:
    path = _download(repo_id, revision) if download else _cached(repo_id, revision)
    return Resolved(path, repo_id, path.name)


def _cached(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        found = snapshot_download(
            repo_id, revision=revision, local_files_only=True, allow_patterns=_NEEDED, ignore_patterns=_ELSEWHERE
        )
        path = Path(found)
        if (path / "config.json").is_file():
            return path
        problem = f"{repo_id} is in the cache without config.json: {path}"
    except Exception as error:  # not cached, cached in part, or not an id: what to do next is the same
        of_revision = f" at revision {revision}" if revision else ""
        partly = " complete" if type(error).__name__ == "IncompleteSnapshotError" else ""
        problem = (
            f"no such directory: {Path(repo_id).absolute()}, and no{partly} model {repo_id}{of_revision} "
            f"in the cache {constants.HF_HUB_CACHE}"
        )
    raise SutureError(problem, "give a directory, or allow the network: --download (`download: true` in a recipe)")


def _download(repo_id: str, revision: str | None) -> Path:
    """The snapshot's directory, after fetching what the cache lacks; .bin weights only when there are no others."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            repo_id, revision=revision, allow_patterns=_NEEDED + _TRAVELS, ignore_patterns=_ELSEWHERE
        )
        if not any(Path(found).glob("*.safetensors")):
            found = snapshot_download(
                repo_id, revision=Path(found).name, allow_patterns=_TORCH_BIN, ignore_patterns=_ELSEWHERE
            )
    except Exception as error:  # the network, the Hub, the disk: each has its own family of exceptions
        reason = " ".join(str(error).split())[:300]
        raise SutureError(
            f"{repo_id} could not be downloaded: {type(error).__name__}: {reason}",
            "check the id, the connection and, for a gated model, `hf auth login`; or give a directory",
        ) from error
    return Path(found)
