"""`suture check`: is this output whole, and does it still load?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..calibrate.skeleton import open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.manifest import MANIFEST, read_manifest, sha256_file
from ..checkpoint.reader import open_checkpoint
from ..lora.adapter import open_adapter
from ..lora.config import CONFIG
from ..quant.decode import dense_view
from .verify import reload_here
from .walk import probe_logits


def check(directory: Path, load: bool = True) -> dict[str, Any]:
    """Verify an output against its manifest. Raises SutureError naming the first thing that is off."""
    manifest = read_manifest(directory)
    _check_files(directory, manifest)
    if (directory / CONFIG).is_file():  # an adapter: it is opened with every check, and loads in no model alone
        adapter = open_adapter(directory)
        return {"files": len(manifest["files"]), "tensors": len(adapter.tensors), "loaded": False, "fallbacks": 0}
    checkpoint = open_checkpoint(directory)
    _check_tensors(directory, checkpoint.shapes, checkpoint.dtypes, manifest)
    lost = [name for name, account in manifest["inputs"].items() if account["action"] not in _ACTIONS]
    if lost:
        raise SutureError(f"{directory / MANIFEST}: {lost[0]} is neither copied, changed nor dropped")
    result = {"files": len(manifest["files"]), "tensors": len(checkpoint.tensors), "loaded": False}
    if load:
        _check_load(directory, manifest["verification"].get("not_stock"))
        result["loaded"] = True
    return result | {"fallbacks": len(manifest["fallbacks"])}


_ACTIONS = ("copied", "changed", "dropped")


def _check_files(directory: Path, manifest: dict[str, Any]) -> None:
    present = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file() and p.name != MANIFEST}
    recorded = manifest["files"]
    for names, what in ((set(recorded) - present, "is missing"), (present - set(recorded), "is not in the manifest")):
        if names:
            raise SutureError(
                f"{directory}: {sorted(names)[0]} {what}", "the directory was changed after it was written"
            )
    for name, record in recorded.items():
        path = directory / name
        if path.stat().st_size != record["bytes"] or sha256_file(path) != record["sha256"]:
            raise SutureError(f"{path}: not the bytes that were written", "restore the file, or run the recipe again")


def _check_tensors(
    directory: Path, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str], manifest: dict[str, Any]
) -> None:
    recorded = manifest["outputs"]
    different = sorted(set(shapes) ^ set(recorded))
    if different:
        raise SutureError(f"{directory}: tensor {different[0]} is only in one of the weights and the manifest")
    for name, record in recorded.items():
        if list(shapes[name]) != record["shape"] or dtypes[name] != record["dtype"]:
            raise SutureError(f"{directory}: tensor {name} is {dtypes[name]} {list(shapes[name])}, not as recorded")


def _check_load(directory: Path, not_stock: str | None) -> None:
    probe = torch.arange(8)[None]
    if not_stock:  # what its own loader does is not known here; that it can be read back is
        skeleton = open_skeleton(dense_view(open_checkpoint(directory)))
        if not bool(torch.isfinite(probe_logits(skeleton, probe, skeleton.n_blocks)).all()):
            raise SutureError(f"{directory}: can be read, but gives NaN or infinite logits")
        return
    found = reload_here(directory, probe)
    if found["missing"] or found["mismatched"]:
        raise SutureError(f"{directory}: loads with missing or mismatched tensors: {found['missing'][:3]}")
    if not bool(torch.isfinite(found["logits"]).all()):
        raise SutureError(f"{directory}: loads, but gives NaN or infinite logits")
