"""A checkpoint in stock transformers, as its users run it: for what is timed and for answers in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load_stock(path: Path, device: torch.device) -> Any:
    """The model in its stored dtype; packed weights become dense when its first forward makes them so."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    loaded: Any = auto.from_pretrained(str(path), dtype="auto", local_files_only=True)
    return loaded.to(device).eval()
