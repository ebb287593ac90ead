"""The directory in which an output is built, and the journal that makes a killed run resume.

    OUT.partial/model/     what becomes OUT, by one rename, when everything in it is complete and verified
    OUT.partial/work/      journal.jsonl, saved hidden states, the lock
    OUT.partial/replaced/  for a moment, the older output that --overwrite replaces

The journal's first line is the run's fingerprint: a run with another recipe, model or calibration text is refused. Each
further line says that one unit of work is on disk. A line is written and synced only after the data it speaks of.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from .disk import disk_used, sync_directory, sync_file, take_lock
from .errors import SutureError
from .writer import DISK_FULL, disk_errors


class Staging:
    """An output under construction. `open_staging` makes one; use as a context manager."""

    def __init__(self, output: Path, lock: IO[str], done: list[dict[str, Any]]) -> None:
        self.output = output
        self.partial = partial_of(output)
        self.model = self.partial / "model"
        self.work = self.partial / "work"
        self.done = done  # the journal's entries after the fingerprint, of earlier runs and of this one
        self.most = 0  # bytes of the files here at most, as far as `measured` was asked
        self._lock = lock

    def measured(self) -> int:
        """Bytes of the files here now; the most there ever were when it was asked or a unit recorded."""
        self.most = max(self.most, disk_used(self.partial))
        return self.most

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append one entry to the journal; returns once it is on disk."""
        with disk_errors(self.work), (self.work / "journal.jsonl").open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(entry) + "\n")  # keys keep their order: they go into the manifest
            file.flush()
            os.fsync(file.fileno())
        self.done.append(dict(entry))
        self.measured()

    def find(self, **keys: Any) -> dict[str, Any] | None:
        """The journal's last entry whose fields equal `keys`."""
        matching = [entry for entry in self.done if all(entry.get(k) == v for k, v in keys.items())]
        return matching[-1] if matching else None

    def commit(self) -> None:
        """Give the output its final name, replacing an older output as a whole, and remove what was staged."""
        with disk_errors(self.output):
            sync_tree(self.model)
            replaced = self.partial / "replaced"
            if self.output.exists():
                _remove(replaced)
                self.output.rename(replaced)
            self.model.rename(self.output)
            sync_directory(self.output.parent)
            self.discard()

    def discard(self) -> None:
        """Leave no trace: after the commit, or when a run is refused before its work began."""
        if os.name == "nt":
            self._lock.close()  # an open file cannot be removed there
        shutil.rmtree(self.partial, ignore_errors=True)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._lock.close()
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            with disk_errors(self.partial):
                raise error


_OF_A_MODEL = ("suture.json", "config.json")


def partial_of(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def check_output(output: Path, source: Path, overwrite: bool, resume: bool) -> None:
    """Refuse an output that is, holds or lies in the input, or that exists. Touches nothing."""
    target, origin = output.resolve(), source.resolve()
    if target == origin or (output.exists() and output.samefile(source)):
        raise SutureError(f"output: {output} is the input itself", "choose another directory")
    if origin in target.parents or target in origin.parents:
        raise SutureError(f"output: {output} and the input {source} lie inside one another", "choose another directory")
    if origin == partial_of(target) or partial_of(target) in origin.parents:
        raise SutureError(
            f"output: {output} would be built in {partial_of(target)}, where the input is", "choose another"
        )
    if output.exists() and not output.is_dir():
        raise SutureError(f"output: {output} is a file", "choose a directory")
    if output.exists() and any(output.iterdir()) and not overwrite:
        advice = (
            "it is finished: nothing to resume" if resume and (output / "suture.json").exists() else "choose another"
        )
        raise SutureError(f"output: {output} is not empty ({advice})", "--overwrite replaces it as a whole")
    if output.exists() and any(output.iterdir()) and not any((output / name).is_file() for name in _OF_A_MODEL):
        raise SutureError(
            f"output: {output} is not empty and holds no model: --overwrite would remove files that are not suture's",
            "choose another directory, or empty it yourself",
        )
    if partial_of(output).exists() and not overwrite and not resume:
        raise SutureError(
            f"output: {partial_of(output)} holds an unfinished run",
            "--resume goes on with it, --overwrite starts again",
        )


def clean_committed(output: Path) -> None:
    """Remove what a run left that was killed after it had named its output and before it had cleaned up."""
    partial = partial_of(output)
    if not (output / "suture.json").is_file() or not partial.is_dir() or (partial / "model").exists():
        return
    work = partial / "work"
    if work.is_dir():
        with (work / "lock").open("a", encoding="utf-8") as lock:
            try:
                take_lock(lock)
            except OSError:
                return  # a run that has only begun
    shutil.rmtree(partial, ignore_errors=True)


def open_staging(output: Path, fingerprint: Mapping[str, str], overwrite: bool, resume: bool) -> Staging:
    """Create or reopen OUT.partial. Raises SutureError when the fingerprint differs, naming what changed."""
    partial = partial_of(output)
    with disk_errors(partial):
        (partial / "work").mkdir(parents=True, exist_ok=True)
        lock = (partial / "work" / "lock").open("w", encoding="utf-8")
    try:
        take_lock(lock)
    except OSError as error:
        lock.close()
        raise SutureError(f"output: another run is writing to {partial}", "wait for it or stop it") from error
    entries = read_journal(partial / "work" / "journal.jsonl") if resume or not overwrite else []
    with disk_errors(partial):
        if not entries:
            _clear(partial, keep=Path(lock.name))
        (partial / "model").mkdir(exist_ok=True)
    if entries:
        changed = sorted(key for key in {*fingerprint, *entries[0]} if fingerprint.get(key) != entries[0].get(key))
        if changed:
            lock.close()
            raise SutureError(
                f"output: {partial} was begun with another {', another '.join(changed)}: it cannot be resumed",
                "use --overwrite to start again, or another output",
            )
    staging = Staging(output, lock, entries[1:])
    if not entries:
        staging.record(fingerprint)
        staging.done.clear()
    return staging


def _clear(partial: Path, keep: Path) -> None:
    """Empty OUT.partial but for the lock that is held."""
    for path in (*partial.iterdir(), *keep.parent.iterdir()):
        if path not in (keep, keep.parent):
            _remove(path)


def _remove(path: Path) -> None:
    """A file, a link or a directory with all it holds; nothing when there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Entries of a journal; a last line that a power cut tore is cut off, also on disk."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) != len(raw):
        with path.open("r+b") as file:
            file.truncate(len(whole))
            os.fsync(file.fileno())
    try:
        return [dict(json.loads(line)) for line in whole.splitlines()]
    except (ValueError, TypeError) as error:
        raise SutureError(f"{path}: damaged journal", "start again with --overwrite") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that its name never holds half of it."""
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors(path):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def sync_tree(path: Path) -> None:
    """fsync every file of a directory, then the directory."""
    for file in sorted(path.rglob("*")):
        if file.is_file():
            sync_file(file)
    sync_directory(path)
