"""The pack-quantized format: what we write, compressed-tensors reads, and the other way round, bit for bit."""

import json
from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from kit import edit, make, quantize, read, some_ids
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, CompressedTensorsConfig

from suture.calibrate.skeleton import cut, open_skeleton
from suture.checkpoint.errors import SutureError
from suture.checkpoint.layout import Linear, Place
from suture.checkpoint.reader import open_checkpoint
from suture.quant.compressed_tensors import (
    ConfigGroup,
    from_tensors,
    parse_config,
    quantization_config,
    stored_transposed,
    tensor_specs,
    tensors,
)
from suture.quant.decode import dense_view
from suture.quant.grid import Search
from suture.quant.rtn import rtn
from suture.quant.scheme import STORAGE, Scheme

SCHEMES = [
    Scheme(bits, group, symmetric) for bits in (2, 3, 4, 5, 8) for group in (16, -1) for symmetric in (True, False)
]
CODES = {dtype: code for code, dtype in STORAGE.items()}
NAME = "model.layers.0.mlp.up_proj"


def name_of(scheme):
    return f"{scheme.bits}bit-{scheme.group_size}-{'sym' if scheme.symmetric else 'asym'}"


def quantized(scheme, out=37, inputs=48, dtype=torch.bfloat16, seed=0):
    w = torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed))
    return rtn(w, scheme, dtype, search=Search())


def same(a, b):
    assert torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)
    assert a.codes.dtype == b.codes.dtype and a.scale.dtype == b.scale.dtype
    assert (a.zero is None and b.zero is None) or torch.equal(a.zero, b.zero)
    assert a.scheme == b.scheme


def scheme_of(config):
    group = config["config_groups"]["group_0"]
    return QuantizationScheme(**{key: value for key, value in group.items() if key != "format"})


def one_group(scheme, ignore=(), dequantize=False, conv1d_inputs=None):
    return quantization_config([ConfigGroup(scheme, ["Linear"], conv1d_inputs)], ignore, dequantize)


def linear_of(q, conv1d=False):
    out, inputs = q.codes.shape
    return Linear(NAME, NAME, "mlp.up_proj", 0, out, inputs, Place(f"{NAME}.weight"), conv1d=conv1d)


# ---- tensors


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("dtype", STORAGE.values(), ids=str)
def test_c9_tensors_and_from_tensors_undo_one_another(scheme, dtype):
    q = quantized(scheme, dtype=dtype)
    same(from_tensors(NAME, tensors(NAME, q), scheme), q)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.symmetric], ids=name_of)
def test_b7_transposed_tensors_undo_one_another(scheme):
    q = quantized(scheme)
    stored = tensors(NAME, q, transposed=True)
    assert stored[f"{NAME}.weight_shape"].tolist() == [48, 37]
    same(from_tensors(NAME, stored, scheme, transposed=True), q)


@pytest.mark.parametrize(
    ("scheme", "conv1d"),
    [(scheme, conv1d) for scheme in SCHEMES for conv1d in (False, True) if scheme.symmetric or not conv1d],
    ids=lambda value: name_of(value) if isinstance(value, Scheme) else "conv1d" if value else "linear",
)
@pytest.mark.parametrize("dtype", STORAGE.values(), ids=str)
def test_c7_planned_names_dtypes_and_shapes_are_those_of_the_tensors(scheme, conv1d, dtype):
    q = quantized(scheme, dtype=dtype)
    planned = tensor_specs(linear_of(q, conv1d), scheme, CODES[dtype])
    codes = {torch.int32: "I32", torch.int64: "I64", **CODES}
    stored = tensors(NAME, q, conv1d)
    assert planned == [(name, codes[t.dtype], tuple(t.shape)) for name, t in stored.items()]
    assert all(t.is_contiguous() for t in stored.values())
    assert (f"{NAME}.weight_zero_point" in stored) == (not scheme.symmetric)  # vLLM refuses symmetric zero points


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("dtype", STORAGE.values(), ids=str)
def test_c11_compressed_tensors_decompresses_our_tensors_to_our_dense_weight(scheme, dtype):
    q = quantized(scheme, dtype=dtype)
    state = {name.removeprefix(f"{NAME}."): t for name, t in tensors(NAME, q).items()}
    theirs = PackedQuantizationCompressor.decompress(state, scheme_of(one_group(scheme, [], False)))
    assert theirs["weight"].dtype == dtype
    assert torch.equal(theirs["weight"], q.dequantize())


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.symmetric and s.group_size > 0], ids=name_of)
def test_b7_compressed_tensors_decompresses_conv1d_blocks_to_the_transposed_weight(scheme):
    q = quantized(scheme)
    state = {name.removeprefix(f"{NAME}."): t for name, t in tensors(NAME, q, transposed=True).items()}
    config = one_group(scheme, [], True, conv1d_inputs=scheme.group_size)
    theirs = PackedQuantizationCompressor.decompress(state, scheme_of(config))
    assert torch.equal(theirs["weight"], q.dequantize().T)


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_we_read_what_compressed_tensors_compresses(scheme):
    q = quantized(scheme, dtype=torch.float32)  # bfloat16 cannot hold every multiple of an 8-bit scale
    zero = (torch.full_like(q.scale, scheme.middle) if q.zero is None else q.zero).to(torch.int16) - scheme.middle
    state = {"weight": q.dequantize(), "weight_scale": q.scale, "weight_zero_point": zero.to(torch.int8)}
    theirs = PackedQuantizationCompressor.compress(state, scheme_of(one_group(scheme, [], False)))
    found = from_tensors(NAME, {f"{NAME}.{name}": t for name, t in theirs.items()}, scheme)
    assert torch.equal(found.dequantize(), q.dequantize())


# ---- config


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("conv1d_inputs", [None, 16])
def test_the_config_is_accepted_by_the_libraries_that_will_read_it(scheme, conv1d_inputs):
    config = one_group(scheme, ["lm_head"], dequantize=True, conv1d_inputs=conv1d_inputs)
    json.dumps(config)
    theirs = QuantizationConfig.model_validate({k: v for k, v in config.items() if k != "dequantize"})
    weights = theirs.config_groups["group_0"].weights
    assert (weights.num_bits, weights.symmetric, weights.dynamic) == (scheme.bits, scheme.symmetric, False)
    assert weights.group_size == (None if conv1d_inputs or scheme.group_size == -1 else scheme.group_size)
    assert weights.actorder is None
    assert theirs.ignore == ["lm_head"] and theirs.format == "pack-quantized"
    loaded = CompressedTensorsConfig(**{k: v for k, v in config.items() if k != "quant_method"})
    assert loaded.dequantize is True
    assert "dequantize" not in one_group(scheme, [], dequantize=False)


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_a_config_written_is_the_scheme_read(scheme):
    config = one_group(scheme, [], False)
    assert parse_config(config, NAME, "here") == scheme
    assert not stored_transposed(config)
    if scheme.group_size > 0:
        blocks = one_group(scheme, [], True, conv1d_inputs=scheme.group_size)
        assert parse_config(blocks, NAME, "here") == scheme
        assert stored_transposed(blocks)


def two_groups(first, second):
    config = one_group(Scheme(4, 16), [], False)
    group = config["config_groups"]["group_0"]
    eight = {**group["weights"], "num_bits": 8}
    config["config_groups"] = {
        "group_0": {**group, "targets": first},
        "group_1": {**group, "targets": second, "weights": eight},
    }
    return config


def test_a_config_of_several_groups_is_read_by_name():
    config = two_groups(["re:.*mlp.*"], ["model.layers.0.self_attn.q_proj", "re:.*o_proj"])
    assert parse_config(config, "model.layers.0.mlp.up_proj", "here").bits == 4
    assert parse_config(config, "model.layers.0.self_attn.q_proj", "here").bits == 8
    assert parse_config(config, "model.layers.7.self_attn.o_proj", "here").bits == 8
    with pytest.raises(SutureError, match=r"0 of 2 config_groups fit model\.layers\.0\.self_attn\.k_proj"):
        parse_config(config, "model.layers.0.self_attn.k_proj", "here")
    with pytest.raises(SutureError, match=r"2 of 2 config_groups fit model\.layers\.0\.mlp\.up_proj, where one should"):
        parse_config(two_groups(["Linear"], ["re:.*mlp.*"]), "model.layers.0.mlp.up_proj", "here")


@pytest.mark.parametrize(
    ("change", "weights"),
    [
        ({}, {"type": "float"}),
        ({}, {"strategy": "tensor"}),
        ({"input_activations": {"num_bits": 8}}, {}),
    ],
)
def test_a_config_that_is_not_ours_to_read_is_refused(change, weights):
    config = one_group(Scheme(4, 16), [], False)
    group = config["config_groups"]["group_0"]
    config["config_groups"]["group_0"] = {**group, **change, "weights": {**group["weights"], **weights}}
    with pytest.raises(SutureError, match=r"here: .*up_proj has \w+ weights .*, which suture does not read"):
        parse_config(config, NAME, "here")


# ---- a written checkpoint


WRITTEN = [
    ("L1", "bfloat16", {"bits": 4, "group_size": 16}),
    ("L1", "float16", {"bits": 3, "group_size": 32, "symmetric": False}),
    ("L1", "float32", {"bits": 8, "group_size": -1}),
    ("Q3", "bfloat16", {"bits": 5, "group_size": 8, "symmetric": False}),
    ("Q2", "bfloat16", {"bits": 2, "group_size": -1}),
    ("GP", "bfloat16", {"bits": 4, "group_size": 24}),
    ("NX", "bfloat16", {"bits": 4, "group_size": 32}),
    ("MX", "bfloat16", {"bits": 4, "group_size": 32}),
    ("QM", "float16", {"bits": 4, "group_size": 16}),
    ("W-gemma3", "bfloat16", {"bits": 4, "group_size": 16}),
]


QUICK = ("L1", "MX", "GP")  # a plain one, experts, Conv1D


@pytest.mark.parametrize(
    ("name", "dtype", "settings"),
    [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow) for case in WRITTEN],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_c11_a_dense_view_of_a_written_checkpoint_is_what_stock_transformers_loads(
    shelf, tmp_path, name, dtype, settings
):
    """Bit for bit, in the stored dtype; and each dense weight is (code - zero) * scale of the stored tensors."""
    source = shelf(name, dtype)
    quantize(source, tmp_path / "out", "rtn", **settings)
    view = dense_view(open_checkpoint(tmp_path / "out"))
    layout = open_skeleton(view).layout
    assert dict(view.shapes) == open_checkpoint(source).shapes
    assert dict(view.dtypes) == open_checkpoint(source).dtypes
    auto = AutoModelForImageTextToText if name.startswith("W-") else AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "out", dtype="auto")
    with torch.no_grad():
        model(some_ids())  # packed weights are decompressed by the first forward
    loaded = model.state_dict()
    raw = read(tmp_path / "out")
    for parameter, place in layout.places.items():
        assert torch.equal(cut(view.read(place.tensor), place), stock_parameter(loaded, parameter, name))
    original = read(source)
    for linear in layout.linears:
        dense = view.read(f"{linear.name}.weight")
        stored = from_tensors(linear.name, raw, Scheme(**scheme_keys(settings)), linear.conv1d)
        assert torch.equal(dense.T if linear.conv1d else dense, stored.dequantize())
        assert dense.dtype == original[linear.place.tensor].dtype
        assert not torch.equal(dense, original[linear.place.tensor])
        assert torch.equal(view.read_rows(f"{linear.name}.weight", [3, 1]), dense[[3, 1]])


def scheme_keys(settings):
    return {"symmetric": True} | settings


def stock_parameter(loaded, parameter, name):
    """A parameter of our unfused module in a stock state dict."""
    if name.startswith("W-"):
        parameter = parameter.replace("model.", "model.language_model.", 1)
    if ".experts." not in parameter:
        return loaded[parameter]
    block, rest = parameter.split(".experts.")
    number, projection, _ = rest.split(".")
    if projection == "down_proj":
        return loaded[f"{block}.experts.down_proj"][int(number)]
    both = loaded[f"{block}.experts.gate_up_proj"][int(number)]
    return both[: len(both) // 2] if projection == "gate_proj" else both[len(both) // 2 :]


def test_a_dense_view_has_no_quantization_config_and_no_packed_parts(shelf, tmp_path):
    quantize(shelf("L1"), tmp_path / "out", "rtn", bits=4, group_size=16)
    view = dense_view(open_checkpoint(tmp_path / "out"))
    assert "quantization_config" not in view.config
    assert not any("weight_" in name for name in view.shapes)
    assert torch.equal(view.read("model.norm.weight"), read(shelf("L1"))["model.norm.weight"])
    assert torch.equal(view.read_rows("lm_head.weight", [5]), read(shelf("L1"))["lm_head.weight"][[5]])
    with pytest.raises(SutureError, match="has no tensor"):
        view.read("model.layers.0.mlp.nothing.weight")


def test_a_plain_checkpoint_is_its_own_dense_view(shelf):
    checkpoint = open_checkpoint(shelf("L1"))
    assert dense_view(checkpoint) is checkpoint


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ],
)
def test_a_config_that_speaks_of_packed_weights_where_none_are_is_refused(tmp_path, config):
    directory = edit(make("L1", tmp_path / "m"), quantization_config=config)
    with pytest.raises(
        SutureError, match=f"config.json says {config['quant_method']}, but no tensor is packed that way"
    ):
        dense_view(open_checkpoint(directory))


def test_packed_tensors_without_a_config_are_refused(shelf, tmp_path):
    quantize(shelf("L1"), tmp_path / "out", "rtn", bits=4, group_size=16)
    edit(tmp_path / "out", quantization_config=None)
    with pytest.raises(SutureError, match="already quantized with compressed-tensors, as its tensors' names say"):
        dense_view(open_checkpoint(tmp_path / "out"))


def test_a_quantized_weight_of_another_scheme_is_not_the_same():
    q = quantized(Scheme(4, 16))
    other = from_tensors(NAME, tensors(NAME, q), replace(q.scheme, bits=4, group_size=24))
    assert other.scheme != q.scheme
