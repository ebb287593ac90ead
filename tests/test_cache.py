"""Bytes of KV cache per token, read off a live cache, against what each attention must hold."""

import json
import logging
import warnings
from dataclasses import asdict

import kit
import pytest
import torch
import transformers
from kit import NAMES, make

from suture.pipeline.cache import measure_cache
from suture.pipeline.stock import cache_of, go_on


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
    cache = cache_of(model(kit.some_ids(1, 10), use_cache=True))
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert nbytes == 10 * measure_cache(json.loads((directory / "config.json").read_text())).bytes_per_token


def test_reading_the_cache_asks_for_no_name_that_transformers_takes_away(shelf, caplog):
    """Its warnings about old names would end up in every report's terminal."""
    logger = logging.getLogger("transformers")
    before, logger.propagate = logger.propagate, True
    try:
        with caplog.at_level(logging.WARNING, "transformers"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = kit.stock(shelf("L1"))
            output = model(kit.some_ids(1, 4), use_cache=True)
            cache = cache_of(output)
            again = go_on(model, kit.some_ids(1, 1), cache)
            measure_cache(json.loads((shelf("L1") / "config.json").read_text()))
    finally:
        logger.propagate = before
    assert cache.get_seq_length() == 5 and again.logits.shape[1] == 1
    told = [record.getMessage() for record in caplog.records] + [str(warning.message) for warning in caught]
    assert not [text for text in told if "deprecated" in text and "cache" in text]
