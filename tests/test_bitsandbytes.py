"""nf4, fp4 and int8: the bytes that bitsandbytes makes, and files that stock transformers loads through it."""

import json

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.nn import Int8Params
from hypothesis import given, settings
from hypothesis import strategies as st

from suture.checkpoint.errors import SutureError
from suture.quant.bitsandbytes import (
    POINTS,
    blockwise_from,
    dynamic_map,
    quantize_4bit,
    quantize_int8,
    tensors_4bit,
    tensors_int8,
)

torch.compiler.set_stance("force_eager")  # bitsandbytes compiles a kernel for every odd shape otherwise
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAME = "model.layers.0.mlp.up_proj"


def weights(rows, cols, dtype, seed=0):
    """Rows from tiny to huge, a block of zeros, and values that lie on and between code points."""
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.1
    w *= torch.logspace(-3, 1, rows)[:, None]
    w.view(-1)[:64] = 0.0
    w[-1] *= torch.tensor([0.0, 1.0]).repeat(cols)[:cols]
    return w.to(dtype)


def test_the_tables_are_those_of_bitsandbytes():
    assert torch.equal(dynamic_map(), bnb.create_dynamic_map())
    for kind, points in POINTS.items():
        assert torch.equal(torch.tensor(points), bnb.get_4bit_type(kind, device="cpu"))


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["nf4", "fp4"]),
    dtype=st.sampled_from(DTYPES),
    block=st.sampled_from([32, 64, 128, 4096]),
    double=st.booleans(),
    rows=st.integers(1, 70),
    cols=st.integers(1, 130),
    seed=st.integers(0, 100),
)
def test_four_bits_are_bit_for_bit_those_of_bitsandbytes(kind, dtype, block, double, rows, cols, seed):
    w = weights(rows, cols, dtype, seed)
    packed, state = bnb.quantize_4bit(w, blocksize=block, compress_statistics=double, quant_type=kind)
    theirs = {f"{NAME}.weight": packed} | {f"{NAME}.weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    quantized = quantize_4bit(w, kind, block, double)
    ours = tensors_4bit(NAME, quantized)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        if "quant_state" in key:
            assert bytes(ours[key].tolist()).rstrip() == bytes(tensor.tolist())
        else:
            assert ours[key].dtype == tensor.dtype and torch.equal(ours[key], tensor), key
    dense = bnb.dequantize_4bit(packed, state).reshape(rows, cols)  # one byte it takes for a row, and turns
    assert torch.equal(quantized.dequantize(), dense)
    assert torch.equal(blockwise_from(theirs, f"{NAME}.weight", "here").dequantize(), dense)


def test_a_large_weight_with_double_quantization_is_the_same_too():
    w = weights(512, 1024, torch.bfloat16)  # 8,192 blocks: the table's cells all matter
    packed, state = bnb.quantize_4bit(w, compress_statistics=True, quant_type="nf4")
    ours = tensors_4bit(NAME, quantize_4bit(w, "nf4", 64, True))
    assert torch.equal(ours[f"{NAME}.weight"], packed)
    assert torch.equal(ours[f"{NAME}.weight.absmax"], state.absmax)
    assert torch.equal(ours[f"{NAME}.weight.nested_absmax"], state.state2.absmax)


def test_another_storage_dtype_is_read():
    w = weights(64, 64, torch.bfloat16)
    packed, state = bnb.quantize_4bit(w, quant_type="nf4", quant_storage=torch.bfloat16)
    theirs = {f"{NAME}.weight": packed} | {f"{NAME}.weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    assert packed.dtype == torch.bfloat16
    assert torch.equal(
        blockwise_from(theirs, f"{NAME}.weight", "here").dequantize(), bnb.dequantize_4bit(packed, state)
    )


@pytest.mark.parametrize("damage", ["missing", "not json", "another type"])
def test_a_damaged_state_is_refused_by_name(damage):
    stored = tensors_4bit(NAME, quantize_4bit(weights(8, 64, torch.bfloat16), "nf4", 64, False))
    key = f"{NAME}.weight.quant_state.bitsandbytes__nf4"
    text = {
        "not json": b"{",
        "another type": json.dumps({"quant_type": "af4", "shape": [8, 64], "dtype": "int8"}).encode(),
    }
    if damage == "missing":
        del stored[key]
    else:
        stored[key] = torch.tensor(list(text[damage]), dtype=torch.uint8)
    with pytest.raises(SutureError, match=r"here: model\.layers\.0\.mlp\.up_proj\.weight: .*quant_state"):
        blockwise_from(stored, f"{NAME}.weight", "here")


@settings(max_examples=25, deadline=None)
@given(dtype=st.sampled_from(DTYPES), rows=st.integers(1, 70), cols=st.integers(1, 130), seed=st.integers(0, 100))
def test_int8_is_bit_for_bit_that_of_bitsandbytes(dtype, rows, cols, seed):
    w = weights(rows, cols, dtype, seed)
    w[0] = 0.0 if seed % 2 else w[0]
    theirs = Int8Params(w.clone(), requires_grad=False).to("cpu")
    quantized = quantize_int8(w)
    ours = tensors_int8(NAME, quantized)
    assert torch.equal(ours[f"{NAME}.weight"], theirs.data)
    assert torch.equal(ours[f"{NAME}.SCB"], theirs.SCB)
    assert torch.equal(quantized.dequantize(), bnb.int8_vectorwise_dequant(theirs.data, theirs.SCB))


def test_d3_a_row_of_zeros_stays_zero_in_int8():
    w = weights(4, 32, torch.bfloat16)
    w[1] = 0
    assert torch.equal(quantize_int8(w).dequantize()[1], torch.zeros(32))


def test_a25_weights_that_overflow_float16_are_refused():
    w = weights(4, 32, torch.float32)
    w[2, 3] = 1e5
    with pytest.raises(SutureError, match=r"up to 1e\+05 overflow float16"):
        quantize_int8(w)
