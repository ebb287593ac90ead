"""Fold the weights of norms into the layers that read them: y = W (g ⊙ n(x) + c) is y = (W diag g) n(x) + W c.

The norm keeps its class and becomes n(x): weight 1 (0 where the class computes 1 + w), bias 0. A norm with a bias c
whose readers have none of their own keeps c / g. Rotating the residual stream, merging norms or comparing layers needs
norms like that. Norms over a sublayer's output (Gemma 2 and 3) and over a head or a latent are read by no matrix and
stay. All tensors here are float32 or wider, by names of the transformers module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..checkpoint.errors import SutureError
from ..checkpoint.families import Family, NormKind


class FoldNormsSettings(BaseModel):
    """Which norms are folded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    final_norm: bool = Field(True, description="also fold the last norm into the head; the head must not be tied")


def block_readers(family: Family, names: Iterable[str], prefix: str) -> dict[str, list[str]]:
    """Norm -> the matrices that read it, as parameter names, for the block whose parameters begin with `prefix`.

    Raises SutureError when a norm has no reader, or the block none of the family's norms.
    """
    known = set(names)
    found: dict[str, list[str]] = {}
    for norm, readers in family.readers:
        if f"{prefix}{norm}.weight" not in known:
            continue
        matrices = [name for reader in readers for name in _matrices(family, known, prefix, reader)]
        if not matrices:
            raise SutureError(f"{prefix}{norm}: nothing reads it", "please report this")
        found[f"{prefix}{norm}"] = matrices
    if not found:
        raise SutureError(f"{family.model_type}: what reads its norms is not known", "remove the step")
    return found


def _matrices(family: Family, names: set[str], prefix: str, reader: str) -> list[str]:
    if family.experts is not None and reader == family.experts.module:
        inside = (name for name in names if name.startswith(f"{prefix}{reader}."))
        return sorted(name for name in inside if not name.endswith(".down_proj.weight"))
    return [name for name in (f"{prefix}{reader}.weight",) if name in names]


def fold(
    kind: NormKind, norm: str, readers: Iterable[str], parameters: Mapping[str, Tensor], conv1d: bool = False
) -> tuple[dict[str, Tensor], str]:
    """(the changed parameters, "" or why the norm stays as it is).

    `norm` without `.weight`; `readers` are weights [out, in], or [in, out] when they are Conv1D.
    """
    stored, bias = parameters[f"{norm}.weight"], parameters.get(f"{norm}.bias")
    gain = 1 + stored if kind == "1+w" else stored
    matrices = {name: parameters[name] for name in readers}
    biases = {name: _bias_name(name) for name in matrices}
    absorbed = bias is not None and all(biases[name] in parameters for name in matrices)
    if bias is not None and not absorbed and bool(((gain == 0) & (bias != 0)).any()):
        return {}, "its readers have no bias, and its own cannot be divided by a weight of 0"
    changed = {name: weight * (gain[:, None] if conv1d else gain) for name, weight in matrices.items()}
    changed[f"{norm}.weight"] = identity(kind, gain)
    if bias is None:
        return changed, ""
    if not absorbed:
        changed[f"{norm}.bias"] = torch.where(gain == 0, torch.zeros_like(bias), bias / gain)
        return changed, ""
    for name, weight in matrices.items():
        changed[biases[name]] = parameters[biases[name]] + (bias @ weight if conv1d else weight @ bias)
    changed[f"{norm}.bias"] = torch.zeros_like(bias)
    return changed, ""


def changed_names(norm: str, readers: Iterable[str], names: Iterable[str]) -> list[str]:
    """Names of the parameters that `fold` may change; readers' biases only where the norm has one to put there."""
    readers, known = list(readers), set(names)
    candidates = [f"{norm}.weight", f"{norm}.bias", *readers]
    if f"{norm}.bias" in known:
        candidates += map(_bias_name, readers)
    return [name for name in candidates if name in known]


def identity(kind: NormKind, like: Tensor) -> Tensor:
    """The weight of a norm that only normalizes."""
    return torch.zeros_like(like) if kind == "1+w" else torch.ones_like(like)


def _bias_name(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
