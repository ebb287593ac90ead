"""GGUF files: the gguf package reads back our weights, and transformers' own GGUF loader finds the model's logits."""

import json

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import LENGTH, ids_file, make, read, run, some_ids
from test_export_formats import drawn
from transformers import AutoModelForCausalLM

from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline.walk import probe_logits
from suture.quant.decode import dense_view
from suture.quant.gguf_blocks import exact_values, to_blocks
from suture.quant.gguf_model import permute_rows, read_vocabulary
from suture.quant.scheme import Quantized, Scheme

WIDE = {"hidden_size": 64, "intermediate_size": 128}


def of_32(name, directory):
    """The kit's model with rows of whole blocks, in the arrangement of layers that llama.cpp knows."""
    changes = dict(WIDE)
    if name in ("Q3", "G2", "G3"):
        changes |= {"num_attention_heads": 4}
    if name == "G3":
        kinds = ["sliding_attention"] * 5 + ["full_attention"]
        changes |= {"num_hidden_layers": 6, "layer_types": kinds}
    return make(name, directory, **changes)


@settings(max_examples=50, deadline=None)
@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    blocks=st.integers(1, 4),
    groups=st.integers(1, 3),
    out=st.integers(1, 5),
    extreme=st.booleans(),
    seed=st.integers(0, 99),
)
def test_codes_in_blocks_are_what_the_gguf_package_reads(bits, symmetric, blocks, groups, out, extreme, seed):
    scheme = Scheme(bits, 32 * blocks, symmetric)
    q = drawn(out, 32 * blocks * groups, scheme, seed, extreme)
    if bits > 4 and not symmetric:
        with pytest.raises(SutureError, match="no GGUF type holds"):
            to_blocks(q, "x")
        return
    made = to_blocks(q, "x")
    found = gguf.quants.dequantize(made.rows.numpy(), gguf.GGMLQuantizationType[made.type])
    exact = exact_values(q).numpy()
    if symmetric:
        assert np.array_equal(found, exact)
    else:
        assert np.abs(found - exact).max() <= np.abs(exact).max() * 2.0**-9 + 15 * float(q.scale.max()) * 2.0**-11
    assert torch.equal(torch.from_numpy(exact).to(q.scale.dtype), q.dequantize())


def test_a_scale_that_float16_cannot_hold_is_refused_with_a_number():
    q = drawn(4, 32, Scheme(4, 32), 0, False)
    q = Quantized(q.codes, torch.full((4, 1), 1e-9, dtype=torch.bfloat16), None, q.scheme)
    with pytest.raises(SutureError, match=r"x: 4 of 4 scales, such as 9.97e-10, are no float16 numbers"):
        to_blocks(q, "x")


def test_b18_rows_are_permuted_within_heads():
    order = permute_rows(2, 8).tolist()
    assert order == [0, 2, 1, 3, 4, 6, 5, 7]


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits.float()


def written(source, output, carried, kind):
    steps = [{"rtn": {"group_size": 32}}] if carried else []
    done = run({"model": str(source), "output": str(output), "steps": [*steps, {"gguf": {"type": kind}}]})
    receipt = done.manifest["receipts"][-1]
    assert receipt["carried"] == (len(done.manifest["modules"]) if carried else 0)
    if carried:
        assert receipt["largest_relative_error"]["Q4_0 carried"] == 0.0
    return done.output


@pytest.mark.parametrize(
    "name", ["L1", "L2", "Q2"]
)  # it knows no head size of its own for Qwen 3, nor these tiny others
@pytest.mark.parametrize("carried", [False, True])
def test_transformers_own_gguf_loader_finds_the_same_model(tmp_path, name, carried):
    output = written(of_32(name, tmp_path / "source"), tmp_path / "out", carried, "f16" if carried else "f32")
    ids = some_ids(1)
    skeleton = open_skeleton(dense_view(open_checkpoint(output)))
    wanted = probe_logits(skeleton, ids, skeleton.n_blocks)
    model = AutoModelForCausalLM.from_pretrained(output, gguf_file="model.gguf", dtype=torch.float32).eval()
    difference = float((logits(model, ids) - wanted).abs().max())
    # our dense weights are rounded to bfloat16 after the product of code and scale, llama.cpp's are not
    assert difference <= (6e-2 if carried else 1e-4) * float(wanted.abs().max())


PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.1.attn_norm": "model.layers.1.input_layernorm",
    "blk.1.attn_output": "model.layers.1.self_attn.o_proj",
    "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
}
GATED = {
    "blk.1.attn_q": "model.layers.1.self_attn.q_proj",
    "blk.1.attn_k": "model.layers.1.self_attn.k_proj",
    "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
    "blk.1.ffn_gate": "model.layers.1.mlp.gate_proj",
    "blk.1.ffn_up": "model.layers.1.mlp.up_proj",
}
SANDWICH = {
    "blk.1.post_attention_norm": "model.layers.1.post_attention_layernorm",
    "blk.1.ffn_norm": "model.layers.1.pre_feedforward_layernorm",
    "blk.1.post_ffw_norm": "model.layers.1.post_feedforward_layernorm",
}
QK_NORM = {
    "blk.1.attn_q_norm": "model.layers.1.self_attn.q_norm",
    "blk.1.attn_k_norm": "model.layers.1.self_attn.k_norm",
}
PHI = {
    "blk.1.attn_qkv": "model.layers.1.self_attn.qkv_proj",
    "blk.1.ffn_up": "model.layers.1.mlp.gate_up_proj",
    "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm",
    "output": "lm_head",
}


@pytest.mark.parametrize(
    ("name", "names", "n_norms"),
    [
        ("G2", PARTS | GATED | SANDWICH, 4),
        ("G3", PARTS | GATED | SANDWICH | QK_NORM, 6),
        ("P3", PARTS | PHI, 2),
        ("P3-partial", PARTS | PHI, 2),
        ("P3-longrope", PARTS | PHI, 2),
        ("Q3", PARTS | GATED | QK_NORM | {"blk.1.ffn_norm": PHI["blk.1.ffn_norm"]}, 4),
    ],
)
def test_b9_every_tensor_has_its_name_and_gemmas_norms_their_one(tmp_path, name, names, n_norms):
    source = of_32(name, tmp_path / "source")
    output = written(source, tmp_path / "out", False, "f32")
    reader = gguf.GGUFReader(output / "model.gguf")
    found = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in reader.tensors}
    before = read(source)
    for ours, theirs in names.items():
        wanted = before[f"{theirs}.weight"].float()
        if name.startswith("G") and wanted.dim() == 1:
            wanted = wanted + 1
        assert torch.equal(found[f"{ours}.weight"].view(wanted.shape), wanted), ours
    assert sum("norm" in key for key in found if key.startswith("blk.1.")) == n_norms
    assert ("output.weight" in found) == ("lm_head.weight" in before)
    extra = {key for key in found if key.startswith("rope")}
    assert extra == ({"rope_factors_long.weight", "rope_factors_short.weight"} if name == "P3-longrope" else set())
    if name == "P3-longrope":
        long = json.loads((source / "config.json").read_text())["rope_parameters"]["long_factor"]
        assert found["rope_factors_long.weight"].tolist() == pytest.approx(long)


def test_llama3s_rotary_factors_are_transformers_own(shelf, tmp_path):
    done = run({"model": str(shelf("L-llama3")), "output": str(tmp_path / "out"), "steps": [{"gguf": {}}]})
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(done.output / "model.gguf").tensors}
    skeleton = open_skeleton(open_checkpoint(shelf("L-llama3")))
    theirs = skeleton.backbone.get_submodule("rotary_emb").inv_freq
    dim = len(theirs) * 2
    plain = 10000.0 ** -(torch.arange(0, dim, 2).double() / dim)
    assert torch.allclose(plain / torch.tensor(found["rope_freqs.weight"].data).double(), theirs.double(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_0", "q4_1"])
def test_a_plain_checkpoint_is_rounded_to_the_type_asked_for(tmp_path, kind):
    source = of_32("L1", tmp_path / "source")
    done = run({"model": str(source), "output": str(tmp_path / "out"), "steps": [{"gguf": {"type": kind}}]})
    errors = done.manifest["receipts"][-1]["largest_relative_error"]
    assert errors["F32"] == 0.0
    assert {"bf16": 0.0, "q8_0": 0.001, "q4_0": 0.04, "q4_1": 0.04}[kind] <= errors[kind.upper()]
    assert errors[kind.upper()] <= {"bf16": 0.0, "q8_0": 0.01, "q4_0": 0.12, "q4_1": 0.12}[kind]
    assert done.manifest["files"]["model.gguf"]["bytes"] == (done.output / "model.gguf").stat().st_size


def test_codes_of_gptq_with_zero_points_go_into_q4_1(tmp_path):
    source = of_32("L1", tmp_path / "source")
    ids = ids_file(tmp_path / "ids.jsonl", rows=6, length=70)
    steps = [{"gptq": {"group_size": 32, "symmetric": False}}, {"gguf": {}}]
    calibration = {"data": str(ids), "samples": 8, "length": LENGTH}
    done = run({"model": str(source), "output": str(tmp_path / "out"), "steps": steps, "calibration": calibration})
    receipt = done.manifest["receipts"][-1]
    assert receipt["carried"] == 14 and receipt["largest_relative_error"]["Q4_1 carried"] < 1e-3
    assert done.manifest["modules"]["model.layers.0.mlp.up_proj"]["method"] == "gptq"


def test_tokenizer_and_settings_of_the_builtin_model_are_in_the_file(tmp_path):
    done = run({"model": "builtin:tiny", "output": str(tmp_path / "out"), "steps": [{"gguf": {"type": "q8_0"}}]})
    reader = gguf.GGUFReader(done.output / "model.gguf")
    value = {name: field.contents() for name, field in reader.fields.items()}
    config = json.loads((done.output / "config.json").read_text())
    tokenizer = json.loads((done.output / "tokenizer.json").read_text())
    assert value["general.architecture"] == "llama" and value["tokenizer.ggml.model"] == "gpt2"
    assert value["tokenizer.ggml.pre"] == "gpt-2"
    assert len(value["tokenizer.ggml.tokens"]) == config["vocab_size"]
    assert len(value["tokenizer.ggml.merges"]) == len(tokenizer["model"]["merges"])
    assert value["tokenizer.ggml.token_type"][0] == 3  # <|endoftext|>
    assert value["llama.block_count"] == config["num_hidden_layers"]
    assert value["llama.attention.head_count_kv"] == config["num_key_value_heads"]
    assert value["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config["rms_norm_eps"])


def spm(directory, **changes):
    vocab = {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "▁": 3, "a": 4, "b": 5, "▁a": 6, "▁ab": 7}
    model = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "vocab": vocab, "merges": ["▁ a", "▁a b"]}
    added = [{"id": 0, "content": "<unk>", "special": True}, {"id": 1, "content": "<s>", "special": True}]
    content = {"model": model, "added_tokens": added, "normalizer": {"type": "Prepend", "prepend": "▁"}}
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(content | changes))
    return path


def test_a_sentencepiece_vocabulary_gets_scores_in_the_order_of_its_merges(tmp_path):
    found = read_vocabulary(spm(tmp_path).read_bytes(), 10, None)
    assert found.model == "llama" and found.types == [2, 3, 6, 1, 1, 1, 1, 1, 5, 5]
    assert found.scores is not None and found.scores[6] == 0.0 and found.scores[7] == -1.0 and found.scores[4] < -1
    assert found.space_prefix is True and found.tokens[8] == "[PAD8]"
    assert read_vocabulary(spm(tmp_path, normalizer=None).read_bytes(), 10, None).space_prefix is False


def test_refusals(shelf, tmp_path):
    for name, changes, message in (
        ("GP", {}, "gguf: gpt2 is not supported"),
        ("W-mistral3", {}, "gguf: mistral3 is not supported"),
        ("G3", {}, "every sixth layer of gemma3"),
        ("L1", {"hidden_act": "gelu"}, "llama.cpp computes llama with silu, this model has gelu"),
    ):
        source = make(name, tmp_path / f"{name}-{len(changes)}", **changes)
        with pytest.raises(SutureError, match=message):
            run({"model": str(source), "output": str(tmp_path / "out"), "steps": [{"gguf": {}}]})
    path = spm(tmp_path, pre_tokenizer={"type": "Whitespace"})
    content = json.loads(path.read_text())
    content["model"]["byte_fallback"] = False
    path.write_text(json.dumps(content))
    with pytest.raises(SutureError, match=r"its pre-tokenizer \(Whitespace\) is none that"):
        read_vocabulary(path.read_bytes(), 10, None)
    assert read_vocabulary(path.read_bytes(), 10, "llama-bpe").pre == "llama-bpe"
    with pytest.raises(SutureError, match="token id 7 is outside the model's vocabulary of 5"):
        read_vocabulary(path.read_bytes(), 5, None)
