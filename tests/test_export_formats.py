"""GPTQ and AWQ files: written by one packer, read back from the file by rules written out by hand."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import ids_file, quantize, read
from test_dequantize import words

from suture.checkpoint.errors import SutureError
from suture.checkpoint.layout import Linear, Place
from suture.quant.export import FORMATS, ranks_that_divide
from suture.quant.pack import AWQ_ORDER, deinterleave, interleave, pack, unpack
from suture.quant.qweight import awq_dense, awq_tensors, gptq_dense, gptq_tensors
from suture.quant.scheme import Quantized, Scheme


def drawn(out, inputs, scheme, seed, extreme):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, scheme.levels + 1, (out, inputs), generator=g)
    zero = torch.randint(0, scheme.levels + 1, (out, scheme.groups(inputs)), generator=g)
    if extreme:
        codes, zero = codes % 2 * scheme.levels, zero % 2 * scheme.levels
    scale = (torch.rand(zero.shape, generator=g) + 0.01).half()
    return Quantized(codes.to(torch.uint8), scale, None if scheme.symmetric else zero.to(torch.uint8), scheme)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    rows=st.integers(1, 40),
    cols=st.integers(1, 70),
    dim=st.sampled_from([0, 1]),
    extreme=st.booleans(),
    seed=st.integers(0, 99),
)
def test_c9_the_packer_is_one_stream_of_bits_whatever_the_width(bits, rows, cols, dim, extreme, seed):
    codes = torch.randint(0, 2**bits, (rows, cols), generator=torch.Generator().manual_seed(seed))
    codes = codes % 2 * (2**bits - 1) if extreme else codes
    packed = pack(codes, bits, dim)
    assert torch.equal(unpack(packed, bits, codes.shape[dim], dim).long(), codes)
    lines, stored = (codes.T, packed.T) if dim == 0 else (codes, packed)
    padded = [line + [0] * (-len(line) % 32) for line in lines.tolist()]
    count = stored.shape[1]
    assert [words(line, bits)[:count] for line in padded] == stored.tolist()


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    out=st.integers(1, 4),
    groups=st.integers(1, 3),
    symmetric=st.booleans(),
    extreme=st.booleans(),
    seed=st.integers(0, 99),
)
def test_c9_gptq_tensors_mean_the_weight(bits, out, groups, symmetric, extreme, seed):
    q = drawn(32 * out, 32 * groups, Scheme(bits, 32, symmetric), seed, extreme)
    stored = gptq_tensors("x", q)
    for version, shift in (("gptq", 0), ("gptq_v2", 1)):
        changed = dict(stored)
        if shift:
            zeros = unpack(stored["x.qzeros"], bits, 32 * out, dim=1).long()
            changed["x.qzeros"] = pack((zeros + 1) % 2**bits, bits, dim=1)
        dense = gptq_dense(changed, "x", {"bits": bits, "checkpoint_format": version}, "here")
        assert torch.equal(dense, q.dequantize())
    if symmetric and bits == 4:
        assert set(stored["x.qzeros"].flatten().tolist()) == {0x77777777}
    assert torch.equal(stored["x.g_idx"], torch.arange(32 * groups, dtype=torch.int32) // 32)


@settings(max_examples=30, deadline=None)
@given(
    out=st.integers(1, 6),
    groups=st.integers(1, 5),
    symmetric=st.booleans(),
    extreme=st.booleans(),
    seed=st.integers(0, 99),
)
def test_awq_tensors_mean_the_weight(out, groups, symmetric, extreme, seed):
    q = drawn(8 * out, 7 * groups, Scheme(4, 7, symmetric), seed, extreme)
    stored = awq_tensors("x", q)
    assert torch.equal(awq_dense(stored, "x"), q.dequantize())
    row = q.codes[:, 0].tolist()
    assert stored["x.qweight"][0].tolist() == words([row[i + j] for i in range(0, 8 * out, 8) for j in AWQ_ORDER], 4)
    assert torch.equal(deinterleave(interleave(q.codes.T)), q.codes.T)


@pytest.mark.parametrize("name", ["L1", "P3", "DS", "Q3"])
@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_a25_a_file_is_read_back_from_disk_and_says_what_was_not_run(shelf, tmp_path, name, form):
    ids = ids_file(tmp_path / "ids.jsonl", rows=6, length=70)
    done = quantize(
        shelf(name), tmp_path / "out", "gptq", data=ids, group_size=8, format=form, symmetric=form == "gptq"
    )
    found = done.manifest["verification"]
    assert found["max_difference"] <= 1e-5 * found["largest_logit"] and "gptqmodel" in found["not_stock"]
    config = json.loads((done.output / "config.json").read_text())
    assert config["dtype"] == "float16" and config["quantization_config"]["quant_method"] == form
    stored = read(done.output)
    for module, record in done.manifest["modules"].items():
        assert record["method"] == "gptq" and stored[f"{module}.scales"].dtype == torch.float16
        assert not {f"{module}.weight", f"{module}.weight_packed"} & set(stored)
    if form == "gptq":
        assert (
            config["quantization_config"].items()
            >= {"desc_act": False, "sym": True, "checkpoint_format": "gptq"}.items()
        )
    else:
        assert config["quantization_config"].items() >= {"version": "gemm", "zero_point": True, "bits": 4}.items()
        assert "lm_head" in config["quantization_config"]["modules_to_not_convert"]


@pytest.mark.parametrize(
    ("name", "form", "settings", "message"),
    [
        ("L1", "gptq", {"symmetric": False}, "format: gptq stores zero points less one"),
        ("L1", "gptq", {"bits": 5}, "format: gptq has 2, 3, 4 or 8 bits, not 5"),
        ("L1", "awq", {"bits": 3}, "format: awq has 4 bits, not 3"),
        ("GP", "gptq", {}, "format: gptq with Conv1D layers"),
        ("MX", "awq", {}, "format: awq with experts"),
        ("W-mistral3", "awq", {}, "format: awq with a vision wrapper"),
        ("L1", "gptq", {"rules": [{"match": "q_proj", "bits": 8}]}, "format gptq holds one bit width"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_the_work(shelf, tmp_path, name, form, settings, message):
    with pytest.raises(SutureError, match=message):
        quantize(shelf(name), tmp_path / "out", "rtn", group_size=8, format=form, **settings)


def layer(role, out, inputs):
    return Linear("x", "x", role, 0, out, inputs, Place("x.weight"))


def test_c7_layers_that_do_not_fill_words_are_named():
    groups = FORMATS and [type("G", (), {"scheme": Scheme(4, -1), "linears": (layer("mlp.up_proj", 60, 64),)})()]
    family = type("F", (), {"conv1d": False, "experts": None, "own_linear": ""})()
    layout = type("L", (), {"family": family, "disk_stem": "model."})()
    with pytest.raises(SutureError, match="packs 8 codes at a time, and x has 60 outputs"):
        FORMATS["awq"].check(layout, groups)


def test_tensor_parallel_ranks():
    def ranks(role, out, inputs, scheme, form="pack-quantized"):
        return ranks_that_divide(layer(role, out, inputs), scheme, form)

    assert ranks("self_attn.q_proj", 24, 64, Scheme(4, 32)) == [2, 4, 8]
    assert ranks("self_attn.q_proj", 24, 64, Scheme(4, 32), "awq") == []  # 12 outputs fill one word and a half
    assert ranks("self_attn.q_proj", 24, 64, Scheme(4, 32, symmetric=False)) == []
    assert ranks("self_attn.o_proj", 64, 128, Scheme(4, 64)) == [2]
    assert ranks("mlp.down_proj", 64, 128, Scheme(4, -1)) == [2, 4, 8]
    assert ranks("mlp.down_proj", 64, 36, Scheme(8, -1)) == []
