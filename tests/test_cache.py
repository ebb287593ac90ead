"""Bytes of KV cache per token, read off a live cache, against what each attention must hold."""

import json
from dataclasses import asdict

import kit
import pytest
import torch
import transformers
from kit import NAMES, make

from suture.pipeline.cache import measure_cache


@pytest.mark.parametrize("name", NAMES)
def test_the_measured_cache_is_what_the_attention_must_hold(tmp_path, name):
    text = json.loads((make(name, tmp_path) / "config.json").read_text())
    text = text.get("text_config", text)
    heads = text.get("num_attention_heads") or text["n_head"]
    d = text.get("head_dim") or text.get("hidden_size", text.get("n_embd")) // heads
    kv_heads = {"FA": 1}.get(name) or text.get("num_key_value_heads") or heads  # FA-new: repeated for each query head
    per_layer = 2 * kv_heads * d
    if "kv_lora_rank" in text:
        per_layer = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    found = measure_cache(json.loads((tmp_path / "config.json").read_text()), torch.float32)
    assert asdict(found) == {
        "bytes_per_token": 2 * per_layer * 4,
        "numbers_per_layer": per_layer,
        "layers": 2,
        "dtype": "float32",
        "kind": "DynamicCache",
    }


def test_the_small_model_caches_as_much_as_the_real_one(tmp_path):
    directory = make("L1", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    cache = model(kit.some_ids(1, 10), use_cache=True).past_key_values
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert nbytes == 10 * measure_cache(json.loads((directory / "config.json").read_text())).bytes_per_token
