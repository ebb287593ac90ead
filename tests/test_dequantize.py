"""Every format that is read, back to plain weights: against the formats' own rules written out by hand."""

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from kit import Shelf, edit, ids_file, quantize, read, run

import suture
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.quant.decode import dense_view
from suture.quant.scheme import STORAGE

torch.compiler.set_stance("force_eager")


def dequantize(model, output, **settings):
    return run({"model": str(model), "output": str(output), "steps": [{"dequantize": settings}]})


def a_copy(shelf, tmp_path, tensors, **config):
    return edit(Shelf(tmp_path)("L1"), tensors, **config)


def layers(tensors):
    return [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]


# ---- by hand


def words(numbers, bits):
    """Numbers of a list into 32-bit words, one dense stream of bits, least significant first."""
    stream = sum(number << (bits * i) for i, number in enumerate(numbers))
    out = [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(numbers) * bits // 32))]
    return [word - 2**32 if word >= 2**31 else word for word in out]


def a_grid(out, inputs, groups, bits, seed):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (out, inputs), generator=g)
    zeros = torch.randint(0, 2**bits, (out, groups), generator=g)
    zeros[0, 0], zeros[-1, -1] = 0, 2**bits - 1  # case C9
    scales = (torch.rand(out, groups, generator=g) * 0.05 + 0.01).half()
    return codes, zeros, scales


def gptq_file(tensors, bits, group, version, order):
    """GPTQ's tensors for every layer, and the dense weights; with `order`, inputs are in groups as they come in it."""
    after, dense = dict(tensors), {}
    for seed, name in enumerate(layers(tensors)):
        out, inputs = tensors[f"{name}.weight"].shape
        codes, zeros, scales = a_grid(out, inputs, inputs // group, bits, seed)
        g_idx = torch.arange(inputs) // group
        if order:
            g_idx = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
        stored = (zeros - int(version == "gptq")) % 2**bits
        del after[f"{name}.weight"]
        after[f"{name}.qweight"] = torch.tensor([words(c, bits) for c in codes.tolist()], dtype=torch.int32).T
        after[f"{name}.qzeros"] = torch.tensor([words(z, bits) for z in stored.T.tolist()], dtype=torch.int32)
        after[f"{name}.scales"], after[f"{name}.g_idx"] = scales.T, g_idx.int()
        dense[f"{name}.weight"] = ((codes - zeros[:, g_idx]) * scales[:, g_idx].float()).half()
    return after, dense


def awq_file(tensors, group):
    after, dense = dict(tensors), {}
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def in_words(row):
        return words([row[i + j] for i in range(0, len(row), 8) for j in order], 4)

    for seed, name in enumerate(layers(tensors)):
        out, inputs = tensors[f"{name}.weight"].shape
        codes, zeros, scales = a_grid(out, inputs, inputs // group, 4, seed)
        g_idx = torch.arange(inputs) // group
        del after[f"{name}.weight"]
        after[f"{name}.qweight"] = torch.tensor([in_words(c) for c in codes.T.tolist()], dtype=torch.int32)
        after[f"{name}.qzeros"] = torch.tensor([in_words(z) for z in zeros.T.tolist()], dtype=torch.int32)
        after[f"{name}.scales"] = scales.T
        dense[f"{name}.weight"] = ((codes - zeros[:, g_idx]) * scales[:, g_idx].float()).half()
    return after, dense


def fp8_file(tensors, block):
    after, dense = dict(tensors), {}
    for name in layers(tensors):
        weight = tensors[f"{name}.weight"].float()
        out, inputs = weight.shape
        scale = torch.zeros(-(-out // block), -(-inputs // block))
        eight = torch.zeros(out, inputs).to(torch.float8_e4m3fn)
        wide = torch.zeros(out, inputs)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
                scale[i, j] = weight[part].abs().max() / 448
                eight[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
                wide[part] = eight[part].float() * scale[i, j]
        after[f"{name}.weight"], after[f"{name}.weight_scale_inv"] = eight, scale
        dense[f"{name}.weight"] = wide.bfloat16()
    return after, dense


def w8a8_file(tensors):
    """compressed-tensors' own compressor for int8 weights per channel; static input scales beside them."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry("int-quantized")
    after, dense = dict(tensors), {}
    for name in layers(tensors):
        weight = tensors[f"{name}.weight"]
        scale = weight.abs().amax(1, keepdim=True) / 127.5
        state = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        dense[f"{name}.weight"] = compressor.decompress(dict(state), scheme)["weight"]
        after |= {f"{name}.{key}": value for key, value in state.items()} | {f"{name}.input_scale": torch.ones(1)}
    return after, dense


def made(kind, tensors):
    """(tensors, dense weights, quantization_config) of a foreign checkpoint."""
    if kind.startswith("gptq"):
        _, bits, version, order = kind.split(" ")
        config = {
            "quant_method": "gptq",
            "bits": int(bits),
            "group_size": 32,
            "desc_act": order == "act-order",
            "sym": False,
        }
        if version == "gptq_v2":
            config["checkpoint_format"] = version
        return *gptq_file(tensors, int(bits), 32, version, order == "act-order"), config
    if kind == "awq":
        return *awq_file(tensors, 16), {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 16,
            "zero_point": True,
            "version": "gemm",
        }
    if kind == "fp8":
        return *fp8_file(tensors, 24), {
            "quant_method": "fp8",
            "weight_block_size": [24, 24],
            "activation_scheme": "dynamic",
        }
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        "input_activations": activations,
    }
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    return *w8a8_file(tensors), config


KINDS = [
    "gptq 4 gptq plain",
    "gptq 4 gptq_v2 act-order",
    "gptq 3 gptq act-order",
    "gptq 8 gptq plain",
    "gptq 2 gptq_v2 plain",
]
KINDS += ["awq", "fp8", "w8a8"]


@pytest.mark.parametrize("kind", KINDS)
def test_c9_a23_foreign_files_become_the_plain_weights_that_they_mean(shelf, tmp_path, kind):
    held = {}

    def change(tensors):
        after, held["dense"], held["config"] = made(kind, tensors)
        return after

    source = a_copy(shelf, tmp_path / "source", change)
    edit(source, quantization_config=held["config"])
    done = dequantize(source, tmp_path / "out")
    config = json.loads((done.output / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    before, after = read(shelf("L1")), read(done.output)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        wanted = held["dense"].get(name, before[name])
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, wanted.bfloat16()), name
    found = done.manifest["verification"]
    assert found["missing"] == 0 and found["max_difference"] <= 1e-5 * found["largest_logit"]
    inputs = done.manifest["inputs"]
    assert set(inputs) == set(open_checkpoint(source).tensors)
    dropped = {name for name, account in inputs.items() if account["action"] == "dropped"}
    assert dropped == {name for name in inputs if name.endswith("input_scale")}
    assert all(
        account["action"] == "changed" for name, account in inputs.items() if "_proj." in name and name not in dropped
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_tensor_gets_the_dtype_asked_for(shelf, tmp_path, dtype):
    quantized = quantize(shelf("L1"), tmp_path / "nf4", "nf4").output
    done = dequantize(quantized, tmp_path / "out", dtype=dtype)
    stored = read(done.output)
    assert {str(t.dtype) for t in stored.values()} == {f"torch.{dtype}"}
    assert json.loads((done.output / "config.json").read_text())["dtype"] == dtype
    view = dense_view(open_checkpoint(quantized))
    for name, tensor in stored.items():
        assert torch.equal(tensor, view.read(name).to(tensor.dtype))


@pytest.mark.parametrize(
    ("name", "method", "settings"),
    [
        ("MX", "rtn", {"group_size": 8}),
        ("GP", "rtn", {"group_size": 8}),
        ("GP", "int8", {}),
        ("L1", "rtn", {"bits": 3, "group_size": 16, "symmetric": False}),
        ("L1", "rtn", {"bits": 4, "group_size": 16, "rules": [{"match": "down_proj", "bits": 8, "group_size": -1}]}),
        ("DS", "nf4", {}),
        ("W-gemma3-new", "fp4", {"double_quant": False}),
    ],
)
def test_a23_our_own_outputs_come_back_with_the_logits_of_the_quantized_model(shelf, tmp_path, name, method, settings):
    quantized = quantize(shelf(name), tmp_path / "quantized", method, **settings).output
    done = dequantize(quantized, tmp_path / "out")
    assert done.manifest["verification"]["max_difference"] <= 1e-5 * done.manifest["verification"]["largest_logit"]
    view, plain = dense_view(open_checkpoint(quantized)), open_checkpoint(done.output)
    assert plain.quantization is None and dict(view.shapes) == plain.shapes
    for tensor in plain.tensors:
        assert torch.equal(plain.read(tensor), view.read(tensor).to(STORAGE[plain.dtypes[tensor]]))
    assert len(done.manifest["history"]) == 1


def test_a_recipe_may_quantize_and_dequantize(shelf, tmp_path):
    """What rounding does to a model, as a plain checkpoint, in one recipe; then quantized again."""
    steps = [{"rtn": {"bits": 3, "group_size": 8}}, {"dequantize": {}}, {"nf4": {}}]
    done = run({"model": str(shelf("L1")), "output": str(tmp_path / "out"), "steps": steps})
    assert done.manifest["verification"]["missing"] == 0
    account = done.manifest["inputs"]["model.layers.0.mlp.up_proj.weight"]
    assert account["action"] == "changed" and "quantized to 3 bits" in account["reason"] and "nf4" in account["reason"]


def test_a_report_on_a_dequantized_model_says_that_nothing_changed(shelf, tmp_path):
    quantized = quantize(shelf("L1"), tmp_path / "nf4", "nf4").output
    ids = ids_file(tmp_path / "ids.jsonl", rows=6, length=40)
    recipe = {"model": str(quantized), "output": str(tmp_path / "out"), "steps": [{"dequantize": {}}]}
    report = run(recipe | {"report": {"data": str(ids), "window": 24}}).report
    assert report.perplexity.ratio == 1.0
    assert suture.compare(quantized, tmp_path / "out", data=str(ids), window=24).perplexity.ratio == 1.0


def test_refusals(shelf, tmp_path):
    with pytest.raises(SutureError, match="is not quantized; remove the step"):
        dequantize(shelf("L1"), tmp_path / "out")
    quantized = quantize(shelf("L1"), tmp_path / "rtn", "rtn", group_size=8).output
    for changes, message in (
        ({"quantization_config": {"quant_method": "hqq"}}, "already quantized with hqq"),
        ({"quantization_config": None}, "as its tensors' names say, but config.json does not say how"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, "gptq with 5 bits"),
        ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "awq gemv"),
        ({"quantization_config": {"quant_method": "fp8"}}, "config.json says fp8, but no tensor is packed that way"),
    ):
        original = (quantized / "config.json").read_text()
        edit(quantized, **changes)
        with pytest.raises(SutureError, match=message):
            dequantize(quantized, tmp_path / "out")
        (quantized / "config.json").write_text(original)
    assert not (tmp_path / "out").exists()


def test_b17_values_that_overflow_float16_are_named(shelf, tmp_path):
    def huge(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
        return tensors

    source = a_copy(shelf, tmp_path / "source", huge)
    quantized = quantize(source, tmp_path / "nf4", "nf4").output
    with pytest.raises(
        SutureError, match=r"up_proj\.weight holds values up to .*, which overflow float16; use dtype: bf"
    ):
        dequantize(quantized, tmp_path / "out", dtype="float16")
