"""A checkpoint in stock transformers, as its users run it: for what is timed and for answers in words."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load_stock(path: Path, device: torch.device) -> Any:
    """The model in its stored dtype; packed weights become dense when its first forward makes them so."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    loaded: Any = auto.from_pretrained(str(path), dtype="auto", local_files_only=True)
    return loaded.to(device).eval()


def cache_of(output: Any) -> Any:
    """The key-value cache of a model's output, under the name that this transformers gives it."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def go_on(model: Any, token: Tensor, cache: Any) -> Any:
    """The output for more tokens [B, T] behind a cache, which grows by them."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(token, use_cache=True, **{name: cache})
