"""Prove that what was written is what was computed: reload it with stock transformers and compare logits."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibrate.skeleton import open_skeleton
from ..checkpoint.disk import link_or_copy
from ..checkpoint.errors import SutureError
from ..checkpoint.manifest import to_json
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..quant.decode import dense_view
from .reload import load_and_run
from .walk import probe_logits

_FILE_BYTES = 1 << 16  # of a saved tensor beside its numbers
_LOADER = """
from suture.pipeline.process import own_process
own_process()
from suture.pipeline.reload import main
main()
"""
TOLERANCE = 1e-3  # of the largest logit, both sides in float32: rounding of another order of the same sums


class FreshLoader:
    """Stock transformers in a process of its own, which knows nothing but the files.

    It is started early: what it imports (seconds) is there when the output is. It ends with this process.
    """

    peak_memory: int = 0  # bytes that it had at most; 0 before `load`

    def __init__(self) -> None:
        self._messages = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed with this
        command = [sys.executable, "-P", "-X", "utf8", "-c", _LOADER]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._messages,
            encoding="utf-8",
            cwd="/",
        )

    def __enter__(self) -> FreshLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._messages.close()

    def load(self, directory: Path, work: Path, probe: Tensor) -> dict[str, Any]:
        """`reload.load_and_run` there; to be called once. Raises SutureError when the output does not load."""
        work = work.absolute()
        ids_file, out_file = work / "probe.pt", work / "reloaded.pt"
        out_file.unlink(missing_ok=True)
        torch.save(probe, ids_file)
        self._process.communicate("\n".join(map(str, (directory.absolute(), ids_file, out_file))))
        if self._process.returncode != 0 or not out_file.exists():
            self._messages.seek(0)
            last = (self._messages.read().strip().splitlines() or ["no message"])[-1]
            raise SutureError(f"the output does not load in stock transformers: {last}", "please report this")
        found = torch.load(out_file, weights_only=True)
        self.peak_memory = found["peak_memory"]
        return found


def check_room(work: Path, probe: Tensor, expected: Tensor) -> None:
    """Raises SutureError when the logits that a fresh process writes would not fit on the disk."""
    if shutil.disk_usage(work).free < 2 * expected.numel() * 4 + 16 * probe.numel() + _FILE_BYTES:
        raise SutureError(f"{work}: the disk is full", "free some space, then run again with --resume")


def read_back(directory: Path, probe: Tensor, expected: Tensor, n_blocks: int, why: str) -> dict[str, Any]:
    """Verification record of a format that stock transformers does not load here (`why`): our own decoder reads what was
    written, from the files alone."""
    skeleton = open_skeleton(dense_view(open_checkpoint(directory)))
    return compare(probe_logits(skeleton, probe, n_blocks), expected) | {
        "loaded_as": "dense weights by suture's own decoder",
        "not_stock": why,
        "tokens": probe.numel(),
        "max_difference_in_stored_dtype": None,
        "missing": 0,
        "unexpected": 0,
    }


def reload_here(directory: Path, probe: Tensor) -> dict[str, Any]:
    """`reload.load_and_run` in this process, without what libraries print meanwhile."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return load_and_run(str(directory), probe)
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SutureError(f"{directory}: does not load in stock transformers: {first}") from error


def check_reload(found: dict[str, Any], probe: Tensor, expected: Tensor, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Verification record from what `reload.load_and_run` found; raises SutureError when anything is off.

    `allowed`: what the loader may call unexpected: tensors that the input had beyond what the model uses, and, ending
    with a dot, beginnings of names.
    """
    problems = {kind: found[kind] for kind in ("missing", "mismatched") if found[kind]}
    beginnings = tuple(name for name in allowed if name.endswith("."))
    strangers = [name for name in found["unexpected"] if name not in allowed and not name.startswith(beginnings)]
    if problems or strangers:
        raise SutureError(f"the output loads with problems: {problems or strangers[:3]}", "please report this")
    return compare(found["logits"], expected) | {
        "loaded_as": found["model_class"],
        "tokens": probe.numel(),
        **_in_stored_dtype(found["stored_dtype_logits"], expected[:, : found["stored_dtype_logits"].shape[1]]),
        "missing": 0,
        "unexpected": len(found["unexpected"]),
    }


def _in_stored_dtype(logits: Tensor, expected: Tensor) -> dict[str, Any]:
    """How far the arithmetic of the stored dtype is from float32's; fp16 may overflow where the model is sound."""
    if bool(torch.isfinite(logits).all()):
        return {"max_difference_in_stored_dtype": _rounded(float((logits - expected).abs().max()))}
    note = "computed in its stored dtype the output gives NaN or infinite logits: serve it in bfloat16 or float32"
    return {"max_difference_in_stored_dtype": None, "note": note}


def compare(found: Tensor, expected: Tensor) -> dict[str, Any]:
    """Largest difference of logits; raises SutureError when it is more than float32 rounding."""
    if not bool(torch.isfinite(expected).all()):
        raise SutureError(
            "the result in memory gives NaN or infinite logits itself",
            "a layer overflows or a weight is damaged: check the checkpoint",
        )
    if not bool(torch.isfinite(found).all()):
        raise SutureError("the reloaded output gives NaN or infinite logits", "please report this")
    difference, scale = float((found - expected).abs().max()), float(expected.abs().max())
    if difference > TOLERANCE * scale:
        raise SutureError(
            f"the reloaded output differs from the result in memory by {difference:.3g} in logits up to {scale:.3g}",
            "please report this",
        )
    return {"max_difference": _rounded(difference), "largest_logit": _rounded(scale)}


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def first_blocks(source: Checkpoint, n_blocks: int, keep: frozenset[str], directory: Path) -> Path:
    """A checkpoint directory with the tensors `keep` of `source` and a config of `n_blocks` blocks, by links."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map = {name: info.file.name for name, info in source.tensors.items() if name in keep}
    for file in {info.file for name, info in source.tensors.items() if name in keep}:
        link = directory / file.name
        if not link.exists():
            link_or_copy(file, link)
    (directory / "model.safetensors.index.json").write_bytes(to_json({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_bytes(to_json(shortened(source.config, n_blocks)))
    return directory


def shortened(config: Mapping[str, Any], n_blocks: int) -> dict[str, Any]:
    """The raw config of the same model with only its first blocks."""
    result = dict(config)
    if isinstance(config.get("text_config"), Mapping):
        result["text_config"] = shortened(config["text_config"], n_blocks)
    for key in ("num_hidden_layers", "n_layer"):
        if key in config:
            result[key] = n_blocks
    if isinstance(config.get("layer_types"), list):
        result["layer_types"] = config["layer_types"][:n_blocks]
    for key in ("max_window_layers", "first_k_dense_replace"):
        if isinstance(config.get(key), int):
            result[key] = min(config[key], n_blocks)
    return result


def reopen(directory: Path) -> Checkpoint:
    """Open what was just written, with every check that a stranger's checkpoint gets."""
    return open_checkpoint(directory)
