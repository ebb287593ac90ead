"""The steps nf4, fp4 and int8: the file that transformers and bitsandbytes themselves would have written."""

import json
from functools import cache

import pytest
import torch
from kit import Shelf, edit, ids_file, quantize, read, run
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import suture
from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline.check import check
from suture.quant.decode import dense_view

torch.compiler.set_stance("force_eager")  # bitsandbytes compiles a kernel for every odd shape otherwise
COMPUTE = {"bnb_4bit_compute_dtype": "bfloat16"}
THEIRS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, **COMPUTE},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True, **COMPUTE},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def finished(shelf, tmp_path_factory):
    root = tmp_path_factory.mktemp("out")

    @cache
    def done(name, method):
        return quantize(shelf(name), root / f"{name}-{method}", method)

    return done


CASES = [("L2", "nf4"), ("L1", "fp4"), ("L1", "int8"), ("GP", "nf4"), ("GP", "int8"), ("MX", "nf4"), ("NX", "int8")]
CASES += [("P3", "nf4"), ("DS", "nf4"), ("W-gemma3-new", "nf4"), ("W-mistral3", "int8")]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_stock_transformers_loads_it_with_the_logits_of_the_dequantized_weights(finished, name, method):
    found = finished(name, method).manifest["verification"]
    assert found["missing"] == 0 and found["blocks"] == 2 and "not_stock" not in found
    assert found["max_difference"] <= 1e-5 * found["largest_logit"]


@pytest.mark.parametrize(("name", "method"), [case for case in CASES if case[0][:2] not in ("W-", "DS", "NX")])
def test_the_tensors_are_those_that_transformers_would_save(finished, shelf, name, method):
    theirs = THEIRS[method]
    model = AutoModelForCausalLM.from_pretrained(
        shelf(name), quantization_config=BitsAndBytesConfig(**theirs), dtype=torch.bfloat16
    )
    state, ours = model.state_dict(), read(finished(name, method).output)
    quantized = [key for key in state if key.endswith((".absmax", ".SCB"))]
    assert quantized
    renamed = {key: key.replace("block_sparse_moe", "mlp") for key in ours}
    assert {key for key in renamed.values() if key.endswith((".absmax", ".SCB"))} == set(quantized)
    for disk, key in renamed.items():
        if "experts" in key:
            continue  # fused in memory
        if "quant_state" in key:
            assert json.loads(bytes(ours[disk].tolist())) == json.loads(bytes(state[key].tolist()))
        else:
            assert torch.equal(ours[disk], state[key]), key
    written = json.loads((finished(name, method).output / "config.json").read_text())["quantization_config"]
    for key, value in model.config.quantization_config.to_dict().items():
        if key not in ("llm_int8_skip_modules", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant") or key in theirs:
            assert written.get(key, False) == value or key.startswith("_"), key


@pytest.mark.parametrize(("name", "method"), CASES)
def test_c11_our_decoder_reads_what_was_written(finished, shelf, name, method):
    manifest = finished(name, method).manifest
    view, before = dense_view(open_checkpoint(finished(name, method).output)), open_checkpoint(shelf(name))
    assert dict(view.shapes) == before.shapes
    for module, record in manifest["modules"].items():
        weight, dense = before.read(f"{module}.weight").double(), view.read(f"{module}.weight").double()
        error = float((weight - dense).norm() / weight.norm())
        assert error == pytest.approx(record["weight_error"], rel=1e-4) and error < (0.02 if method == "int8" else 0.2)


def test_b4_experts_stay_and_say_why(finished):
    manifest = finished("MX", "nf4").manifest
    assert all("self_attn" in name for name in manifest["modules"]) and len(manifest["modules"]) == 8
    experts = {name: why for name, why in manifest["skipped_layers"].items() if "experts" in name}
    assert len(experts) == 2 * 4 * 3 and all("fused parameters" in why for why in experts.values())


def test_experts_asked_for_by_name_are_refused(shelf, tmp_path):
    with pytest.raises(SutureError, match=r"experts\.0\.w1 is an expert; transformers keeps experts in fused"):
        quantize(shelf("MX"), tmp_path / "out", "nf4", targets=["re:.*experts.*"])


def test_layers_left_out_are_left_out_by_the_loader_too(shelf, tmp_path):
    done = quantize(
        shelf("L1"), tmp_path / "out", "nf4", ignore=["down_proj", "layers.1.self_attn.q_proj"], block_size=32
    )
    config = json.loads((done.output / "config.json").read_text())["quantization_config"]
    assert sorted(config["llm_int8_skip_modules"]) == [
        "lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj",
    ]  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(done.output)
    plain = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert plain == set(config["llm_int8_skip_modules"])


def test_a_file_in_many_shards_loads(shelf, tmp_path):
    recipe = {
        "model": str(shelf("L1")),
        "output": str(tmp_path / "out"),
        "steps": [{"nf4": {}}],
        "max_shard_size": 3_000,
    }
    done = run(recipe)
    assert len(list(done.output.glob("*.safetensors"))) > 10 and done.manifest["verification"]["missing"] == 0


def test_int8_says_what_the_loaders_own_arithmetic_adds(finished):
    manifest = finished("L1", "int8").manifest
    assert any("round their inputs to int8" in note for note in manifest["notes"])
    assert manifest["verification"]["max_difference_in_stored_dtype"] > 10 * manifest["verification"]["max_difference"]


def test_a_weight_that_overflows_float16_is_named(shelf, tmp_path):
    def huge(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
        return tensors

    source = edit(Shelf(tmp_path / "own")("L1", "float32"), huge)
    with pytest.raises(SutureError, match=r"model\.layers\.0\.mlp\.up_proj: weights up to 1e\+05 overflow float16"):
        quantize(source, tmp_path / "out", "int8")


def test_without_bitsandbytes_it_is_written_and_read_back(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr("suture.pipeline.bitsandbytes.find_spec", lambda name: None)
    done = quantize(shelf("L1"), tmp_path / "out", "nf4")
    found = done.manifest["verification"]
    assert "bitsandbytes" in found["not_stock"] and found["max_difference"] <= 1e-5 * found["largest_logit"]
    assert check(done.output)["loaded"]


def test_outputs_can_be_compared_with_their_base(finished, shelf, tmp_path):
    ids = ids_file(tmp_path / "ids.jsonl", rows=6, length=40)
    report = suture.compare(shelf("L1"), finished("L1", "fp4").output, data=str(ids), window=24)
    assert 0.5 < report.perplexity.ratio < 20 and report.perplexity.ratio != 1.0


@pytest.mark.parametrize("method", ["rtn", "nf4"])
def test_i8_an_output_is_not_quantized_again(finished, tmp_path, method):
    with pytest.raises(SutureError, match="already quantized"):
        quantize(finished("L1", "int8").output, tmp_path / "out", method)


def test_the_head_is_never_quantized(shelf, tmp_path, finished):
    with pytest.raises(SutureError, match="head"):
        quantize(shelf("L2"), tmp_path / "out", "nf4", targets=["lm_head"])
    assert "model.embed_tokens.weight.absmax" not in read(finished("L2", "nf4").output)
    layout = open_skeleton(dense_view(open_checkpoint(finished("L2", "nf4").output))).layout
    assert layout.head is None
