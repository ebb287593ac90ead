"""What an adapter is merged into: the model as its trainer had arranged it.

Three arrangements differ from the checkpoint without changing any number in it: layers stacked again
(`layer_replication`), a tied head that needs a tensor of its own because embedding and head part ways, and biases that
are zero until the adapter adds to them. `Arranged` is the checkpoint seen that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..checkpoint.errors import SutureError
from ..checkpoint.layout import ModelLayout
from ..checkpoint.source import TensorSource, side_file

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# A config's key -> where the biases lie that it switches on.
_BIAS_SWITCHES = {"attention_bias": "self_attn.", "mlp_bias": "mlp."}
_PER_LAYER = ("layer_types",)  # config lists with one entry per layer


@dataclass(frozen=True)
class Arranged:
    """A source under other names. `names`: tensor -> the base's tensor that it is a copy of; `zeros`: new tensors."""

    base: TensorSource
    config: dict[str, Any]
    names: dict[str, str]
    zeros: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # name -> (dtype, shape)

    @classmethod
    def of(cls, source: TensorSource, dropped: Sequence[str] = ()) -> Arranged:
        return cls(source, dict(source.config), {name: name for name in source.shapes if name not in dropped})

    @property
    def source(self) -> str:
        return self.base.source

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        own = {name: self.base.shapes[origin] for name, origin in self.names.items()}
        return own | {name: shape for name, (_, shape) in self.zeros.items()}

    @property
    def dtypes(self) -> Mapping[str, str]:
        own = {name: self.base.dtypes[origin] for name, origin in self.names.items()}
        return own | {name: dtype for name, (dtype, _) in self.zeros.items()}

    def read(self, name: str) -> torch.Tensor:
        if name in self.zeros:
            dtype, shape = self.zeros[name]
            return torch.zeros(shape, dtype=_DTYPES[dtype])
        return self.base.read(self.names[name])

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        return self.base.read_rows(self.names[name], rows)

    def side(self, name: str) -> bytes | None:
        return side_file(self.base, name)

    def outputs_of(self, origin: str) -> tuple[str, ...]:
        return tuple(name for name, of in self.names.items() if of == origin)


def replicated(arranged: Arranged, layout: ModelLayout, ranges: Sequence[tuple[int, int]]) -> Arranged:
    """Layers stacked as `ranges` ([first, end) each) say; each copy then has weights of its own."""
    n = len(layout.blocks)
    order = [index for first, end in ranges for index in range(first, end)]
    beyond = [index for index in order if index >= n]
    if beyond:
        raise SutureError(
            f"layer_replication asks for layer {beyond[0]}, the model has {n}",
            "give the base that the adapter was trained on",
        )
    inside: dict[str, int] = {}
    for index in range(n):
        inside |= {place.tensor: index for place in layout.block_tensors(index).values()}
    head = f"{layout.disk_stem}{layout.family.blocks}."
    names = {name: origin for name, origin in arranged.names.items() if name not in inside}
    for new, old in enumerate(order):
        for name in (name for name, index in inside.items() if index == old):
            names[f"{head}{new}.{name.removeprefix(f'{head}{old}.')}"] = arranged.names[name]
    return replace(arranged, names=names, config=_stacked(arranged.config, order))


def _stacked(config: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    result = dict(config)
    if isinstance(config.get("text_config"), Mapping):
        result["text_config"] = _stacked(config["text_config"], order)
    for key in ("num_hidden_layers", "n_layer"):
        if key in config:
            result[key] = len(order)
    for key in _PER_LAYER:
        if isinstance(config.get(key), list):
            result[key] = [config[key][index] for index in order]
    for key in ("mlp_only_layers", "max_window_layers", "first_k_dense_replace"):
        if config.get(key):
            raise SutureError(f"layer_replication with {key} is not supported: which layers are special would be lost")
    return result


def with_head(arranged: Arranged, head: str, embedding: str, config: dict[str, Any]) -> Arranged:
    """The head as a copy of the embedding, under a name of its own."""
    return replace(arranged, names=arranged.names | {head: arranged.names[embedding]}, config=config)


def bias_switch(config: Mapping[str, Any], layout: ModelLayout, module: str) -> str:
    """The config key that gives `module` a bias. Raises SutureError where the architecture has no room for one."""
    local = module.removeprefix(layout.family.stem).split(".", 2)[-1]
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    for key, prefix in _BIAS_SWITCHES.items():
        if local.startswith(prefix) and not text.get(key):  # type: ignore[union-attr]
            return key
    raise SutureError(
        f"the adapter trained a bias of {module}, which has none, and {layout.family.model_type} has no room for one",
        "use the adapter unmerged, through PEFT",
    )


def with_biases(arranged: Arranged, keys: Sequence[str], added: Mapping[str, tuple[str, tuple[int, ...]]]) -> Arranged:
    """New biases of zeros: config `keys` switched on, `added`: name -> (dtype, shape)."""
    config = dict(arranged.config)
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = {**config["text_config"], **dict.fromkeys(keys, True)}
    else:
        config |= dict.fromkeys(keys, True)
    return replace(arranged, config=config, zeros={**arranged.zeros, **added})


def with_vocabulary(config: dict[str, Any], rows: int) -> dict[str, Any]:
    """The raw config with another vocab_size."""
    if isinstance(config.get("text_config"), dict):
        return {**config, "text_config": {**config["text_config"], "vocab_size": rows}}
    return {**config, "vocab_size": rows}
