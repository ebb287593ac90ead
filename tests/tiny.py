"""A small Llama on disk, made by transformers, and token ids for it: nothing at an identity value."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

VOCABULARY = 320


def llama(directory: Path, *, layers: int = 3, tied: bool = False, seed: int = 0, shard="5GB", **config) -> Path:
    """Heads 8 and 2, weights of standard deviation 0.3, norms between 0.5 and 1.5, float32 computed, bfloat16 stored."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings | config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size=shard)
    return directory


def ids_file(path: Path, *, documents: int = 8, length: int = 40, seed: int = 0) -> Path:
    """Token ids as JSON Lines, one document a line."""
    drawn = np.random.default_rng(seed).integers(0, VOCABULARY, (documents, length))
    path.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in drawn))
    return path


def recipe(path: Path, content: dict) -> Path:
    """A recipe file; JSON is YAML."""
    path.write_text(json.dumps(content, indent=1))
    return path


def contents(directory: Path) -> dict[str, str]:
    """Every file below a directory with its hash; links as what they point to."""
    return {
        str(path.relative_to(directory)): f"-> {path.readlink()}"
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() or path.is_symlink()
    }


def visible(directory: Path) -> list[str]:
    """Names in a directory, without those that begin with a dot."""
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
