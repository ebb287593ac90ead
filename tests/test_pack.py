"""Codes of 2 to 8 bits in 32-bit words: a pair of functions that undo one another, and compressed-tensors' own bits."""

from itertools import product

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from suture.checkpoint.errors import SutureError
from suture.quant.pack import pack, unpack, words

torch.set_num_threads(1)  # as in kit.py
BITS = range(2, 9)


@st.composite
def coded(draw):
    """bits, dim, codes [rows, cols] with extremes well represented."""
    bits = draw(st.sampled_from(BITS))
    rows, cols = draw(st.integers(1, 5)), draw(st.integers(1, 70))
    top = 2**bits - 1
    code = st.one_of(st.integers(0, top), st.sampled_from([0, 1, top // 2, top // 2 + 1, top]))
    drawn = draw(st.lists(code, min_size=rows * cols, max_size=rows * cols))
    return bits, draw(st.sampled_from([0, 1])), torch.tensor(drawn, dtype=torch.uint8).view(rows, cols)


def theirs(codes, bits, dim):
    return pack_to_int32((codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8), bits, packed_dim=dim)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(coded())
def test_c9_what_is_packed_unpacks_and_is_what_compressed_tensors_packs(case):
    bits, dim, codes = case
    packed = pack(codes, bits, dim)
    assert packed.dtype == torch.int32 and packed.is_contiguous()
    assert packed.shape[dim] == words(codes.shape[dim], bits)
    assert torch.equal(unpack(packed, bits, codes.shape[dim], dim), codes)
    assert torch.equal(packed, theirs(codes, bits, dim))
    signed = unpack_from_int32(packed, bits, codes.shape, packed_dim=dim)
    assert torch.equal(signed.to(torch.int16) + 2 ** (bits - 1), codes.to(torch.int16))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [0, 1])
def test_c7_c9_extreme_codes_at_every_width(bits, dim):
    top = 2**bits - 1
    for row, count in product(([0], [top], [0, top], [top, 0]), (1, 2, 5, 31, 32, 33, 60, 64, 65, 97)):
        codes = torch.tensor(row, dtype=torch.uint8).repeat(count)[:count].expand(3, count)
        codes = codes.T if dim == 0 else codes
        packed = pack(codes, bits, dim)
        assert torch.equal(unpack(packed, bits, count, dim), codes)
        assert torch.equal(packed, theirs(codes, bits, dim))
        if row == [top] and count * bits % 32 == 0:
            assert bool((packed == -1).all())


def test_the_first_code_lies_in_the_lowest_bits():
    assert pack(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), 4, 1).tolist() == [[-0x789ABCDF]]
    codes = torch.arange(1, 12)[None] % 8  # 3 bits: the eleventh code begins at bit 30 and ends in the next word
    low, high = pack(codes, 3, 1).tolist()[0]
    stream = sum(int(c) << 3 * i for i, c in enumerate(codes[0]))
    assert (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32 == stream


def test_words_count_what_a_row_needs():
    assert [words(n, 4) for n in (1, 8, 9, 64)] == [1, 1, 2, 8]
    assert [words(n, 3) for n in (10, 11, 32, 33)] == [1, 2, 3, 4]
    assert words(128, 8) == 32


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_code_out_of_range_is_refused(bits, dim):
    for wrong in (2**bits, -1):
        with pytest.raises(SutureError, match=f"does not fit in {bits} bits"):
            pack(torch.tensor([[0, wrong, 1]]), bits, dim)


@pytest.mark.parametrize("wrong", [16, -1])
def test_the_code_that_does_not_fit_is_the_one_named(wrong):
    with pytest.raises(SutureError, match=f"a code of {wrong} does not fit"):
        pack(torch.tensor([[0, wrong, 1]]), 4, 1)


@pytest.mark.parametrize("count", [7, 17])
def test_words_that_do_not_match_the_count_are_refused(count):
    packed = pack(torch.zeros(2, 9, dtype=torch.uint8), 4, 1)
    with pytest.raises(SutureError, match=rf"{count} codes of 4 bits need \d words, found 2"):
        unpack(packed, 4, count, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_codes_of_any_dtype_pack_alike(dtype):
    codes = torch.randint(0, 32, (3, 21), generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack(codes.to(dtype), 5, 1), pack(codes, 5, 1))


def test_packing_along_outputs_is_packing_the_transpose():
    codes = torch.randint(0, 8, (21, 5), generator=torch.Generator().manual_seed(1))
    assert torch.equal(pack(codes, 3, 0), pack(codes.T, 3, 1).T)
