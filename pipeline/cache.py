"""What a model's KV cache holds per token, read off the cache object that stock transformers fills.

A formula would say what a cache should hold; classes have kept more than that. So a model of the same attention is made
small (one block, few words, a narrow MLP), run, and the tensors in its cache are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..calibrate.skeleton import hf_text_config, meta_model
from ..checkpoint.families import family_of
from ..checkpoint.layout import text_config
from .stock import cache_of
from .verify import shortened

_SHORT, _LONG = 3, 7  # tokens; the difference leaves out what does not grow with them
_NARROW = ("intermediate_size", "moe_intermediate_size", "n_inner", "vocab_size")  # no attention depends on these
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class CacheSize:
    """What one more token adds to the cache, as long as no sliding window cuts the sequence."""

    bytes_per_token: int  # over all layers
    numbers_per_layer: int
    layers: int
    dtype: str  # of the cache measured
    kind: str  # class of the cache object


@torch.no_grad()
def measure_cache(config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> CacheSize:
    """Size of the live cache of a model with this raw config.json, filled in `dtype`.

    Every block is taken to cache as much as the first. Raises SutureError for a family that is unknown.
    """
    text = {key: value for key, value in text_config(config).items() if key != "quantization_config"}
    family = family_of(str(text["model_type"]))
    source = f"the {text['model_type']} config"
    layers = int(hf_text_config(text, source).num_hidden_layers)
    small = shortened(text, 1) | {key: 64 for key in _NARROW if text.get(key)} | dict.fromkeys(_TOKENS, 0)
    model = meta_model(hf_text_config(small, source), family, torch.device("cpu")).to(dtype)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.zeros(parameter.shape, dtype=dtype), False)
    short, _ = _filled(model, _SHORT)
    long, kind = _filled(model, _LONG)
    bytes_per_layer = (long - short) // (_LONG - _SHORT)
    return CacheSize(
        layers * bytes_per_layer, bytes_per_layer // dtype.itemsize, layers, str(dtype).removeprefix("torch."), kind
    )


def _filled(model: nn.Module, tokens: int) -> tuple[int, str]:
    """Bytes in the cache after a forward over `tokens` tokens, and the cache's class."""
    cache = cache_of(model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=True))
    kept = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in kept), type(cache).__name__
