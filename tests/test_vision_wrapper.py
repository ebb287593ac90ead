"""A text model inside a real vision wrapper: the text is quantized, the rest arrives bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from kit import ids_file

import suture


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = {
        "vocab_size": 320,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 128,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=300
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    directory = tmp_path_factory.mktemp("wrapper") / "model"
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def test_a_vision_wrapper_is_quantized_in_its_text_model_alone(wrapper: Path, tmp_path: Path) -> None:
    data = ids_file(tmp_path / "ids.jsonl", rows=6, length=120, seed=1)
    run = suture.quantize(
        str(wrapper),
        tmp_path / "out",
        "gptq",
        bits=4,
        group_size=8,
        calibration={"data": str(data), "samples": 8, "length": 48},
    )
    # The embedding scale sqrt(48) is not a bfloat16 number: equal logits show that it is not rounded on either side.
    assert run.manifest["verification"]["max_difference"] < 1e-4
    assert run.manifest["verification"]["loaded_as"] == "Gemma3ForConditionalGeneration"
    before = transformers.AutoModelForImageTextToText.from_pretrained(wrapper).state_dict()
    after = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out").state_dict()
    vision = [name for name in before if "vision" in name or "projector" in name]
    assert len(vision) > 20
    for name in vision:
        assert torch.equal(before[name], after[name]), name
