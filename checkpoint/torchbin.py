"""Weights in PyTorch's own .bin files, for checkpoints that have nothing newer. Their pickle is never run as code.

torch.load(weights_only=True) takes tensors and plain containers alone; versions before 2.6 could be tricked past that
(CVE-2025-32434) and are refused. mmap keeps memory at what is read.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import SutureError
from .header import code_of
from .strict_json import refuse_lfs_pointer, regular_size

if TYPE_CHECKING:
    from torch import Tensor

SAFE_TORCH = (2, 6)
_CONVERT = "convert it to safetensors with a tool that you trust, in a sandbox if you do not know its origin"


def load_bin(path: Path) -> dict[str, Tensor]:
    """The tensors of one .bin file by name, memory-mapped, on the CPU.

    Raises:
        SutureError: torch is too old to do it safely; the file is damaged, of the format before torch 1.6, holds
            code, or holds anything else than named dense tensors.
    """
    import torch

    _refuse_old_torch(torch.__version__)
    _refuse_other_format(path)
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        asks = f" asks for {named[1]}, which" if named else " holds something that"
        raise SutureError(f"{path}{asks} is not tensor data; nothing of it was run", _CONVERT) from error
    except Exception as error:  # torch raises whatever the damaged pickle led to
        reason = str(error).partition("\n")[0][:200]
        raise SutureError(f"{path} cannot be loaded: {reason}", "download or copy the file again") from error
    if not isinstance(loaded, dict):
        raise SutureError(f"{path} holds a {type(loaded).__name__}, named tensors were expected")
    return {name: _plain_tensor(path, name, value) for name, value in loaded.items()}


def _refuse_old_torch(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < SAFE_TORCH:
        raise SutureError(
            f".bin files are not safe to load with torch {version} (CVE-2025-32434)",
            "update torch to 2.6 or newer, or use a safetensors version of the model",
        )


def _refuse_other_format(path: Path) -> None:
    """Refuse all but torch's zip format with its entries stored plainly, which is what can be memory-mapped."""
    if regular_size(path) == 0:
        raise SutureError(f"{path} is empty, PyTorch weights were expected", "download or copy the file again")
    try:
        with path.open("rb") as file:
            head = file.read(40)
        refuse_lfs_pointer(path, head)
        if not head.startswith(b"PK"):
            raise SutureError(
                f"{path} is not in the zip format that torch has written since version 1.6",
                "load and save it again with a current torch, or convert it to safetensors",
            )
        with zipfile.ZipFile(path) as archive:
            compressed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        raise SutureError(f"{path} is damaged or truncated: {error}", "download or copy the file again") from error
    except OSError as error:
        raise SutureError(f"{path} cannot be read: {error.strerror}") from error
    if compressed:
        raise SutureError(f"{path}: entry {compressed[0]!r} is compressed, torch does not write such files", _CONVERT)


def _plain_tensor(path: Path, name: Any, value: Any) -> Tensor:
    """`value` when it is a dense CPU tensor with a name and with all of its elements in the file."""
    import torch

    if not isinstance(value, torch.Tensor) or not isinstance(name, str):
        raise SutureError(
            f"{path}: {name!r:.100} holds a {type(value).__name__}, a tensor was expected",
            "a training checkpoint holds more than a model's weights: export the model's state dict",
        )
    tensor = value.detach()
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise SutureError(f"{path}: tensor {name!r} is not a plain dense tensor")
    try:
        code_of(tensor.dtype)
    except SutureError as error:
        raise SutureError(f"{path}: tensor {name!r}: {error.problem}", error.hint) from error
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise SutureError(f"{path}: tensor {name!r} of shape {tuple(tensor.shape)} has more elements than are stored")
    return tensor
