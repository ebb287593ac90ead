"""Write an adapter as PEFT would: low-rank factors and trained-in-full parameters in, config and named tensors out."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.layout import ModelLayout
from ..checkpoint.source import TensorSource
from .adapter import FINGERPRINT, PREFIX


@dataclass(frozen=True, eq=False)
class NewAdapter:
    """What adapter_config.json and adapter_model.safetensors will hold."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    @property
    def n_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())


@dataclass(frozen=True, eq=False)
class Factors:
    """A [r, in] and B [out, r] of one module; the change is alpha / r times B A (over sqrt(r) with rsLoRA)."""

    A: Tensor
    B: Tensor
    magnitude: Tensor | None = None
    bias: Tensor | None = None  # the module's own bias, as it was trained
    embedding: bool = False  # A [r, tokens], B [hidden, r], under names of their own

    @property
    def rank(self) -> int:
        return self.A.shape[0]


@dataclass(frozen=True)
class Form:
    """Settings of the adapter as a whole. `alpha` None: each module's rank, which makes the scale 1."""

    base: str | None
    alpha: float | None = None
    rslora: bool = False
    dora: bool = False
    init: bool | str = True
    fan_in_fan_out: bool = False
    saved: Mapping[str, Tensor] = field(default_factory=dict)  # parameter -> trained in full


def runtime_names(layout: ModelLayout, config: Mapping[str, Any]) -> str:
    """What stands before `layers.0` in the names of the model as transformers builds it; a vision wrapper has its own."""
    wrapped = isinstance(config.get("text_config"), Mapping)
    return "model.language_model." if wrapped else layout.family.stem


def compose(modules: Mapping[str, Factors], form: Form, metadata: Mapping[str, str] | None = None) -> NewAdapter:
    """An adapter of the modules' factors, under PEFT's names; modules of another rank get their own patterns."""
    ranks = Counter(factors.rank for factors in modules.values())
    r = ranks.most_common(1)[0][0] if ranks else 8
    alpha = form.alpha if form.alpha is not None else float(r)
    others = {path: factors.rank for path, factors in modules.items() if factors.rank != r}
    biases = {path for path, factors in modules.items() if factors.bias is not None}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": form.base,
        "inference_mode": True,
        "r": r,
        "lora_alpha": _plain(alpha),
        "lora_dropout": 0.0,
        "use_rslora": form.rslora,
        "use_dora": form.dora,
        "bias": "lora_only" if biases else "none",
        "fan_in_fan_out": form.fan_in_fan_out,
        "init_lora_weights": form.init,
        "target_modules": sorted(modules),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in form.saved}) or None,
        "rank_pattern": {_pattern(path): rank for path, rank in others.items()},
        "alpha_pattern": {_pattern(path): _plain(rank) for path, rank in others.items()} if form.alpha is None else {},
    }
    tensors: dict[str, Tensor] = {}
    for path, factors in modules.items():
        a, b = ("lora_embedding_A", "lora_embedding_B") if factors.embedding else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"{PREFIX}{path}.{a}": factors.A, f"{PREFIX}{path}.{b}": factors.B}
        if factors.magnitude is not None:
            tensors[f"{PREFIX}{path}.lora_magnitude_vector"] = factors.magnitude
        if factors.bias is not None:
            tensors[f"{PREFIX}{path}.base_layer.bias"] = factors.bias
    tensors |= {f"{PREFIX}{name}": tensor for name, tensor in form.saved.items()}
    stored = {name: tensor.detach().float().contiguous().cpu().clone() for name, tensor in tensors.items()}
    return NewAdapter(config, stored, {"format": "pt", **(metadata or {})})


def _plain(number: float) -> float | int:
    return int(number) if float(number).is_integer() else float(number)


def _pattern(path: str) -> str:
    return path.replace(".", r"\.")


def fingerprint(source: TensorSource, layout: ModelLayout) -> str:
    """SHA-256 of every linear layer's name and shape, and of the values in its first row: enough to tell bases apart.

    A model in another dtype has another fingerprint where its first rows were rounded.
    """
    digest = hashlib.sha256()
    names = sorted({linear.place.tensor for linear in layout.linears} | {layout.embedding})
    for name in names:
        shape = source.shapes[name]
        digest.update(json.dumps([name, list(shape)]).encode())
        if len(shape) == 2:
            digest.update(source.read_rows(name, [0]).to(torch.float32).numpy().tobytes())
    return digest.hexdigest()


def base_metadata(source: TensorSource, layout: ModelLayout) -> dict[str, str]:
    """Entries for the weight file's metadata, which PEFT leaves alone."""
    return {FINGERPRINT: fingerprint(source, layout)}
