"""Scales and zero points: rounding errors within half a step, nothing undefined, and what is stored is what was used."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from suture.checkpoint.errors import SutureError
from suture.quant.grid import Search, candidates, find_grid
from suture.quant.rtn import round_to_grid, rtn
from suture.quant.scheme import Quantized, Scheme, split_rows

torch.set_num_threads(1)  # as in kit.py
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCHEMES = [Scheme(bits, group, symmetric) for bits in (2, 3, 4, 8) for group in (16, -1) for symmetric in (True, False)]


def name_of(scheme):
    return f"{scheme.bits}bit-{scheme.group_size}-{'sym' if scheme.symmetric else 'asym'}"


def weights(out=24, inputs=64, seed=0, scale=0.3):
    """Normal weights, with rows of one sign, a far outlier and a row that hardly differs."""
    w = torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed)) * scale
    w[0], w[1] = w[0].abs() + 0.1, -w[1].abs() - 0.1
    w[2, 5] = 9.0
    w[3] = 0.5 + 1e-4 * w[3]
    return w


def values(quantized):
    """(code - zero) * scale in float64, before it is rounded to the storage dtype."""
    rows, cols = quantized.codes.shape
    codes = quantized.codes.double().view(rows, quantized.scale.shape[1], -1)
    zero = quantized.scheme.middle if quantized.zero is None else quantized.zero.double()[..., None]
    return ((codes - zero) * quantized.scale.double()[..., None]).view(rows, cols)


def steps(quantized):
    """Scale of every weight [out, in]."""
    cols = quantized.codes.shape[1]
    return quantized.scale.double().repeat_interleave(cols // quantized.scale.shape[1], 1)


def range_of(quantized):
    """Lowest and highest value that the grid can store, for every weight."""
    levels, middle = quantized.scheme.levels, quantized.scheme.middle
    zero = torch.full_like(quantized.scale, middle) if quantized.zero is None else quantized.zero
    zero = zero.double().repeat_interleave(quantized.codes.shape[1] // zero.shape[1], 1)
    return -zero * steps(quantized), (levels - zero) * steps(quantized)


# ---- rounding


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("search", [None, Search()], ids=["full", "search"])
def test_the_error_is_at_most_half_a_step_inside_the_range(scheme, dtype, search):
    w = weights()
    q = rtn(w, scheme, dtype, search=search)
    low, high = range_of(q)
    inside = (w >= low) & (w <= high)
    error = (w.double() - values(q)).abs()
    assert bool((error <= steps(q) * (0.5 + 1e-5))[inside].all())
    # what lies outside becomes the nearest end
    assert bool(torch.equal(values(q)[w > high], high[w > high]))
    assert bool(torch.equal(values(q)[w < low], low[w < low]))
    if search is None:  # the full range clips by no more than the rounding of scale and zero point
        slack = 0.5 + scheme.levels * torch.finfo(dtype).eps + (0.0 if scheme.symmetric else 0.5)
        assert bool((error <= steps(q) * slack).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_fit_and_scales_are_those_of_the_storage_dtype(scheme, dtype):
    w = weights()
    grid = find_grid(w, scheme, dtype, search=Search())
    q = round_to_grid(w, grid)
    assert q.codes.dtype == torch.uint8
    assert int(q.codes.min()) >= 0 and int(q.codes.max()) <= scheme.levels
    assert q.scale.dtype == dtype
    assert torch.equal(grid.scale.to(dtype).float(), grid.scale)
    assert tuple(q.scale.shape) == (24, 1 if scheme.group_size == -1 else 4)
    assert bool((q.scale > 0).all()) and bool(torch.isfinite(q.scale).all())
    if scheme.symmetric:
        assert q.zero is None
    else:
        assert q.zero is not None and q.zero.dtype == torch.uint8 and int(q.zero.max()) <= scheme.levels


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_on_the_grid_is_returned_exactly(scheme, dtype):
    grid = find_grid(weights(), scheme, dtype, search=Search())
    codes = torch.randint(0, scheme.levels + 1, (24, 64), generator=torch.Generator().manual_seed(1))
    on_grid = grid.quantized(codes)
    assert torch.equal(round_to_grid(values(on_grid).float(), grid).codes, on_grid.codes)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("search", [None, Search()], ids=["full", "search"])
def test_an_asymmetric_grid_is_found_again_from_the_weights_on_it(bits, dtype, search):
    """Each group uses both ends of its range, so that scale and zero point can be told from the weights."""
    scheme = Scheme(bits, 16, symmetric=False)
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, scheme.levels + 1, (8, 32), generator=generator, dtype=torch.uint8)
    codes[:, 0::16], codes[:, 1::16] = 0, scheme.levels
    scale = (torch.rand(8, 2, generator=generator) + 0.5).to(dtype)
    zero = torch.randint(0, scheme.levels + 1, (8, 2), generator=generator, dtype=torch.uint8)
    q = Quantized(codes, scale, zero, scheme)
    found = rtn(values(q).float(), scheme, dtype, search=search)
    assert torch.equal(found.codes, q.codes)
    assert torch.equal(found.zero, q.zero)
    if dtype == torch.float32:  # the weights themselves are rounded, so their range is a scale's multiple but nearly
        torch.testing.assert_close(found.scale, q.scale, rtol=3e-7, atol=0)
    else:
        assert torch.equal(found.scale, q.scale)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(2, 8),
    st.sampled_from([(1, -1), (7, -1), (8, 4), (12, 3), (5, 5), (6, 1)]),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.lists(st.floats(-60000, 60000, width=16), min_size=1, max_size=60),
)
def test_any_half_precision_weights_round_to_something_finite(bits, size, symmetric, dtype, search, numbers):
    inputs, group = size
    scheme = Scheme(bits, group, symmetric)
    w = torch.tensor(numbers).repeat(inputs)[: 3 * inputs].repeat(3)[: 3 * inputs].view(3, inputs)
    q = rtn(w, scheme, dtype, search=Search() if search else None)
    assert bool(torch.isfinite(q.scale).all()) and bool((q.scale > 0).all())
    assert int(q.codes.max()) <= scheme.levels
    assert bool(torch.isfinite(values(q)).all())
    low, high = range_of(q)
    inside = (w >= low) & (w <= high)
    assert bool(((w.double() - values(q)).abs() <= steps(q) * (0.5 + 1e-4))[inside].all())


# ---- the real cases


def test_c10_a_symmetric_grid_of_all_positive_weights_uses_the_range_to_the_largest():
    w = torch.tensor([[0.8315, 0.4567], [0.4362, 0.2019]])
    dense = rtn(w, Scheme(4, -1), torch.float32).dequantize()
    torch.testing.assert_close(dense[0], torch.tensor([0.7761, 0.4435]), rtol=0, atol=1e-4)
    assert float((dense - w).abs().max()) < 0.06  # not 0.44, as with a range taken from the minimum


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_d3_a_group_of_zeros_stays_zeros(scheme, dtype):
    w = weights()
    w[5, 16:32] = 0
    w[6] = 0
    q = rtn(w, scheme, dtype, search=Search())
    dense = q.dequantize()
    assert not bool(dense[6].any())
    assert not bool(dense[5, 16:32].any())
    assert bool(torch.isfinite(dense).all())
    assert bool((q.scale[6] == 1).all())


@pytest.mark.parametrize("symmetric", [True, False])
def test_d3_weights_too_small_for_a_half_precision_scale_get_its_smallest_normal_one(symmetric):
    w = torch.full((2, 32), 2e-8)
    w[1] = 3e-5
    q = rtn(w, Scheme(4, 16, symmetric), torch.float16, search=Search())
    floor = torch.finfo(torch.float16).smallest_normal
    assert bool((q.scale.float() == floor).all())
    assert not bool(q.dequantize()[0].any())
    assert bool((q.dequantize()[1].float() - w[1]).abs().max() <= floor / 2)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if not s.symmetric], ids=name_of)
def test_an_asymmetric_grid_stores_zero_exactly(scheme):
    """Pruned weights stay pruned, also in rows of one sign."""
    w = weights()
    w[:, ::8] = 0
    for search in (None, Search()):
        assert not bool(rtn(w, scheme, torch.bfloat16, search=search).dequantize()[:, ::8].any())


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_search_never_costs_more_than_the_full_range(scheme, weighted):
    w = weights()
    h = torch.rand(64, generator=torch.Generator().manual_seed(2)) ** 4 if weighted else None
    cost = lambda q: ((w.double() - values(q)).square() * (1 if h is None else h.double())).sum(1)  # noqa: E731
    full, found = (rtn(w, scheme, torch.bfloat16, h, search) for search in (None, Search()))
    assert bool((cost(found) <= cost(full) * (1 + 1e-6)).all())
    assert scheme.bits > 4 or float(cost(found).sum()) < float(cost(full).sum())


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(3, 32), Scheme(2, 32, False), Scheme(8, -1)])
def test_the_search_is_nearly_as_good_as_trying_every_range(scheme):
    """Every third range and the best one's neighbours, against all of them one by one."""
    w, h = weights(64, 128, seed=3), torch.rand(128, generator=torch.Generator().manual_seed(4)) ** 2
    grid = find_grid(w, scheme, torch.float16, h, Search())
    parts = w.view(64, scheme.groups(128), -1)
    scales, zeros = candidates(parts, scheme, torch.float16, Search())
    zeros = torch.full_like(scales, scheme.middle) if zeros is None else zeros

    def cost(scale, zero):
        codes = (parts / scale + zero).round().clamp(0, scheme.levels)
        return ((parts - (codes - zero) * scale).square() * h.view(1, parts.shape[1], -1)).sum(2)

    least = torch.stack([cost(s, z) for s, z in zip(scales, zeros, strict=True)]).min(0).values
    found = cost(grid.scale[..., None], grid.zero[..., None])
    full = cost(scales[0], zeros[0])
    assert (found >= least * (1 - 1e-5)).all() and (found <= full * (1 + 1e-5)).all()
    assert found.sum() <= 1.02 * least.sum() and found.sum() < 0.97 * full.sum()


def test_the_search_is_for_the_columns_that_matter():
    w = weights()
    h = torch.full((64,), 1e-3)
    h[:4] = 1.0
    error = lambda q: float((w.double() - values(q))[4:, :4].square().sum())  # noqa: E731
    plain, weighted = (
        rtn(w, Scheme(3, -1), torch.float32, None, Search()),
        rtn(w, Scheme(3, -1), torch.float32, h, Search()),
    )
    assert error(weighted) < error(plain)


def test_the_grid_of_a_row_does_not_depend_on_the_other_rows():
    """Rows are worked on in chunks."""
    w = weights(out=300, inputs=512)
    whole = rtn(w, Scheme(4, 128), torch.bfloat16, search=Search())
    alone = rtn(w[257:258], Scheme(4, 128), torch.bfloat16, search=Search())
    assert torch.equal(whole.codes[257:258], alone.codes)
    assert torch.equal(whole.scale[257:258], alone.scale)


def test_a_weight_is_not_changed_by_rounding_it():
    w = weights()
    before = w.clone()
    rtn(w, Scheme(4, 16), torch.bfloat16, torch.rand(64), Search())
    assert torch.equal(w, before)


@pytest.mark.parametrize("symmetric", [True, False])
def test_split_rows_undoes_a_concatenation(symmetric):
    w = weights()
    whole = rtn(w, Scheme(4, 16, symmetric), torch.bfloat16)
    for part, rows in zip(split_rows(whole, [10, 2, 12]), w.split([10, 2, 12]), strict=True):
        alone = rtn(rows, Scheme(4, 16, symmetric), torch.bfloat16)
        assert torch.equal(part.codes, alone.codes)
        assert torch.equal(part.scale, alone.scale)
        assert (part.zero is None) if symmetric else torch.equal(part.zero, alone.zero)


# ---- loaders compute the same


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c11_dequantize_equals_compressed_tensors_bit_for_bit(scheme, dtype):
    q = rtn(weights(out=64, inputs=256), scheme, dtype, search=Search())
    args = QuantizationArgs(
        num_bits=scheme.bits,
        symmetric=scheme.symmetric,
        strategy="channel" if scheme.group_size == -1 else "group",
        group_size=None if scheme.group_size == -1 else scheme.group_size,
    )
    signed = (q.codes.to(torch.int16) - scheme.middle).to(torch.int8)
    zero = None if q.zero is None else (q.zero.to(torch.int16) - scheme.middle).to(torch.int8)
    theirs = ct_dequantize(signed, q.scale, zero, args)
    assert theirs.dtype == q.dequantize().dtype == dtype
    assert torch.equal(theirs, q.dequantize())


# ---- schemes


@pytest.mark.parametrize(("bits", "group"), [(1, 16), (9, 16), (4, 0), (4, -2)])
def test_a_scheme_out_of_range_is_refused_by_key(bits, group):
    with pytest.raises(SutureError, match="bits: " if not 2 <= bits <= 8 else "group_size: "):
        Scheme(bits, group)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (Scheme(4, 128), 4 + 16 / 128),
        (Scheme(4, 128, False), 4 + 20 / 128),
        (Scheme(8, -1), 8 + 16 / 256),
        (Scheme(3, 64), 3.25),
    ],
)
def test_bits_per_weight_count_scales_and_zero_points(scheme, expected):
    assert scheme.bits_per_weight(256) == expected
    q = rtn(torch.randn(32, 256, generator=torch.Generator().manual_seed(0)), scheme, torch.bfloat16)
    stored = (
        q.codes.numel() * scheme.bits + q.scale.numel() * 16 + (0 if q.zero is None else q.zero.numel() * scheme.bits)
    )
    assert stored / q.codes.numel() == expected


def test_c6_a_group_size_divides_or_does_not():
    assert Scheme(4, 64).divides(768) and not Scheme(4, 512).divides(768)
    assert Scheme(4, -1).divides(160)
    assert Scheme(4, 32).groups(160) == 5 and Scheme(4, -1).groups(160) == 1
