"""GPTQ against a reference that shares nothing with it, and its behaviour where data is thin, flat or missing."""

from itertools import product

import pytest
import torch

from suture.quant.gptq import BLOCK, GPTQOptions, gptq, output_error
from suture.quant.grid import Search, find_grid
from suture.quant.rtn import round_to_grid, rtn
from suture.quant.scheme import Scheme

torch.set_num_threads(1)  # as in kit.py
F64 = torch.float64
OUT, IN = 12, 160  # two and a half blocks of columns


def weight(seed=0, out=OUT, inputs=IN):
    return 0.3 * torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed), dtype=F64)


def inputs(seed=0, tokens=400, width=IN, shared=0.7):
    """Correlated inputs [tokens, width], some columns far larger than others."""
    generator = torch.Generator().manual_seed(100 + seed)
    common = torch.randn(tokens, 8, generator=generator, dtype=F64) @ torch.randn(
        8, width, generator=generator, dtype=F64
    )
    own = torch.randn(tokens, width, generator=generator, dtype=F64)
    spread = torch.rand(width, generator=generator, dtype=F64) * 3 + 0.2
    return (shared * common / 8**0.5 + (1 - shared) * own) * spread


def hessian(x):
    return x.T @ x / len(x)


def loss(W, dense, H):
    E = W.double() - dense.double()
    return float(((E @ H.double()) * E).sum())


def exact(quantized):
    """Dequantized in float64."""
    rows, cols = quantized.codes.shape
    zero = quantized.scheme.middle if quantized.zero is None else quantized.zero.double()[..., None]
    codes = quantized.codes.double().view(rows, quantized.scale.shape[1], -1)
    return ((codes - zero) * quantized.scale.double()[..., None]).view(rows, cols)


def column_by_column(W, H, options, dtype):
    """Optimal brain quantization as first written down: after each column, H⁻¹ loses that column by one elimination
    step. No Cholesky factor, no blocks. Returns codes [out, in]."""
    W, n = W.double().clone(), W.shape[1]
    h = H.double().diagonal()
    grid = find_grid(W, options.scheme, dtype, h, options.search)
    order = sorted(range(n), key=lambda j: -float(h[j])) if options.actorder == "static" else range(n)
    inverse = torch.linalg.inv(H.double() + options.damp * h.mean() * torch.eye(n, dtype=F64))
    codes = torch.zeros(W.shape, dtype=torch.uint8)
    width = options.scheme.width(n)
    for j in order:
        scale, zero = grid.scale[:, j // width].double(), grid.zero[:, j // width].double()
        q = (W[:, j] / scale + zero).round().clamp(0, options.scheme.levels)
        codes[:, j] = q.to(torch.uint8)
        W -= torch.outer((W[:, j] - (q - zero) * scale) / inverse[j, j], inverse[j])
        inverse -= torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j], inverse[:, j] = 0, 0
    return codes


SCHEMES = [
    Scheme(4, 32),
    Scheme(3, 32, symmetric=False),
    Scheme(4, -1),
    Scheme(2, -1, symmetric=False),
    Scheme(8, 16),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("actorder", [True, False])
@pytest.mark.parametrize("search", [None, Search()], ids=["full", "search"])
def test_c12_lazy_blocks_equal_the_column_by_column_reference(scheme, actorder, search):
    """float64; a wrong block update or a stale group would move many codes."""
    for seed in range(3):
        W, H = weight(seed), hessian(inputs(seed))
        options = GPTQOptions(scheme, damp=0.01, actorder="static" if actorder else "none", search=search)
        result = gptq(W, H, options, torch.bfloat16)
        expected = column_by_column(W, H, options, torch.bfloat16)
        assert torch.equal(result.quantized.codes, expected)
        reference = find_grid(W, scheme, torch.bfloat16, H.diagonal(), search).quantized(expected)
        difference = loss(W, exact(result.quantized), H) - loss(W, exact(reference), H)
        assert abs(difference) <= 1e-9
        assert (result.method, result.damp, result.retries, result.dead) == ("gptq", 0.01, 0, 0)


@pytest.mark.parametrize("width", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5])
def test_c12_the_reference_is_met_at_every_block_boundary(width):
    W, H = weight(3, inputs=width), hessian(inputs(3, width=width))
    options = GPTQOptions(Scheme(4, -1))
    codes = gptq(W, H, options, torch.float32).quantized.codes
    assert torch.equal(codes, column_by_column(W, H, options, torch.float32))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("actorder", [True, False])
def test_with_uncorrelated_inputs_of_one_size_gptq_is_rounding(scheme, actorder):
    W, H = weight(), 3.0 * torch.eye(IN, dtype=F64)
    result = gptq(W, H, GPTQOptions(scheme, actorder="static" if actorder else "none"), torch.bfloat16)
    plain = rtn(W, scheme, torch.bfloat16, torch.full((IN,), 3.0), Search())
    assert result.method == "gptq"
    assert torch.equal(result.quantized.codes, plain.codes)
    assert torch.equal(result.quantized.scale, plain.scale)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("precision", [torch.float32, F64], ids=str)
def test_c12_gptq_costs_less_than_rounding_on_correlated_inputs(scheme, precision):
    ratios = []
    for seed in range(8):
        W, H = weight(seed), hessian(inputs(seed))
        result = gptq(W, H.to(precision), GPTQOptions(scheme), torch.bfloat16)
        plain = rtn(W, scheme, torch.bfloat16, H.diagonal(), Search())
        ratios.append(loss(W, exact(result.quantized), H) / loss(W, exact(plain), H))
    assert max(ratios) <= 1.0
    assert sum(ratios) / len(ratios) < 0.6


@pytest.mark.parametrize("actorder", [True, False])
def test_c11_act_order_keeps_each_columns_group(actorder):
    """Static groups: column i belongs to group i // size, in whatever order columns are visited."""
    scheme = Scheme(4, 32, symmetric=False)
    W, H = weight(4), hessian(inputs(4))
    result = gptq(
        W, H, GPTQOptions(scheme, actorder="static" if actorder else "none", search=None), torch.bfloat16
    ).quantized
    grid = find_grid(W, scheme, torch.bfloat16)
    assert torch.equal(result.scale, grid.scale.to(torch.bfloat16))
    assert torch.equal(result.zero, grid.zero.to(torch.uint8))
    g_idx = torch.arange(IN) // 32
    by_index = (result.codes.double() - result.zero.double()[:, g_idx]) * result.scale.double()[:, g_idx]
    assert torch.equal(by_index, exact(result))
    torch.testing.assert_close(result.dequantize().double(), by_index, rtol=2**-8, atol=0)


def test_act_order_is_the_same_as_permuting_the_columns_before():
    W, H = weight(5), hessian(inputs(5))
    order = torch.argsort(H.diagonal(), descending=True, stable=True)
    scheme = Scheme(3, -1)  # with groups a permutation would change the groups
    sorted_before = gptq(W[:, order], H[order][:, order], GPTQOptions(scheme, actorder="none"), torch.bfloat16)
    inside = gptq(W, H, GPTQOptions(scheme, actorder="static"), torch.bfloat16)
    assert torch.equal(inside.quantized.codes[:, order], sorted_before.quantized.codes)
    assert torch.equal(inside.quantized.scale, sorted_before.quantized.scale)


def test_act_order_makes_up_for_a_bad_order():
    """Columns of growing size: without act-order the largest are rounded last, when nothing is left to correct them."""
    ratios = []
    for seed in range(6):
        x = inputs(seed, shared=0.9)
        x = x / x.std(0) * torch.linspace(0.1, 5, IN, dtype=F64)
        W, H = weight(seed), hessian(x)
        a, b = (
            gptq(W, H, GPTQOptions(Scheme(3, -1), actorder=a), torch.bfloat16).quantized for a in ("static", "none")
        )
        ratios.append(loss(W, exact(a), H) / loss(W, exact(b), H))
    assert sum(ratios) / len(ratios) < 0.8


def test_rows_stacked_are_rows_apart():
    H, options = hessian(inputs(6)), GPTQOptions(Scheme(4, 32, symmetric=False))
    parts = [weight(seed, out=rows) for seed, rows in ((1, 5), (2, 1), (3, 30))]
    together = gptq(torch.cat(parts), H, options, torch.bfloat16).quantized
    apart = [gptq(part, H, options, torch.bfloat16).quantized for part in parts]
    assert torch.equal(together.codes, torch.cat([q.codes for q in apart]))
    assert torch.equal(together.scale, torch.cat([q.scale for q in apart]))
    assert torch.equal(together.zero, torch.cat([q.zero for q in apart]))


def test_the_size_of_h_is_not_felt():
    """The mean or the sum over tokens, with a factor 2 or without."""
    W, H, options = weight(7), hessian(inputs(7)), GPTQOptions(Scheme(4, 32))
    assert torch.equal(
        gptq(W, H, options, torch.bfloat16).quantized.codes,
        gptq(W, 1024.0 * H, options, torch.bfloat16).quantized.codes,
    )


@pytest.mark.parametrize("actorder", [True, False])
@pytest.mark.parametrize("group", [16, -1])
def test_a_weight_on_its_grid_is_returned_exactly(actorder, group):
    scheme = Scheme(4, group, symmetric=False)
    width = scheme.width(IN)
    generator = torch.Generator().manual_seed(8)
    codes = torch.randint(0, 16, (OUT, IN), generator=generator)
    codes[:, 0::width], codes[:, 1::width] = 0, 15  # each group reaches both ends, so that its grid can be found again
    W = (codes.double() - 6) * 0.125
    result = gptq(
        W, hessian(inputs(8)), GPTQOptions(scheme, actorder="static" if actorder else "none"), torch.bfloat16
    ).quantized
    assert torch.equal(result.codes.long(), codes)
    assert torch.equal(result.dequantize().double(), W)


# ---- dead columns, few tokens, no tokens


@pytest.mark.parametrize("actorder", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_c5_dead_columns_are_rounded_not_zeroed(scheme, actorder):
    x = inputs(9)
    dead = [3, 64, 65, 159]
    x[:, dead] = 0
    W = weight(9)
    result = gptq(W, hessian(x), GPTQOptions(scheme, actorder="static" if actorder else "none"), torch.bfloat16)
    assert result.dead == 4 and result.method == "gptq"
    q = result.quantized
    grid = find_grid(W, scheme, torch.bfloat16)
    grid = type(grid)(q.scale.float(), grid.zero if q.zero is None else q.zero.float(), scheme, torch.bfloat16)
    assert torch.equal(q.codes[:, dead], round_to_grid(W, grid).codes[:, dead])
    assert scheme.bits == 2 or bool((exact(q)[:, dead] != 0).any())


def test_c5_the_damping_ignores_dead_columns():
    """Else a layer with many dead columns would be damped less than one without."""
    dead = torch.zeros(IN, dtype=torch.bool)
    dead[::2] = True
    x = inputs(10)
    x[:, dead] = 0
    W = weight(10)
    W[:, dead] = 0  # so that the scale of the row is that of the live columns
    H = hessian(x)
    options = GPTQOptions(Scheme(3, -1), damp=0.2, search=None)
    whole = gptq(W, H, options, torch.bfloat16).quantized
    live = gptq(W[:, ~dead], H[~dead][:, ~dead], options, torch.bfloat16).quantized
    assert torch.equal(whole.codes[:, ~dead], live.codes)
    assert bool((whole.codes[:, dead] == 4).all())


def test_c5_dead_columns_count_in_the_range_search_but_little():
    W = weight(11, inputs=32)
    W[:, 5] = 40.0  # an outlier that no token touches, as large as it may be
    x = inputs(11, width=32)
    x[:, 5] = 0
    q = gptq(W, hessian(x), GPTQOptions(Scheme(4, -1)), torch.bfloat16).quantized
    assert bool((exact(q)[:, 5] >= 0.4 * 40).all())  # within the ranges tried, not cut off to fit the others


@pytest.mark.parametrize("precision", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 63])
def test_c1_fewer_tokens_than_inputs_are_enough_to_run(tokens, precision):
    W, H = weight(12), hessian(inputs(12, tokens=tokens)).to(precision)
    result = gptq(W, H, GPTQOptions(Scheme(4, 32)), torch.bfloat16)
    assert result.method == "gptq"
    assert bool(torch.isfinite(result.quantized.dequantize()).all())
    plain = rtn(W, Scheme(4, 32), torch.bfloat16, H.diagonal(), Search())
    assert loss(W, exact(result.quantized), H) < loss(W, exact(plain), H)


def indefinite(lowest):
    """Symmetric, diagonal 1, smallest eigenvalue `lowest`: what rounding leaves of a matrix that should be semidefinite."""
    H = torch.eye(IN, dtype=F64)
    H[0, 1] = H[1, 0] = 1 - lowest
    return H


@pytest.mark.parametrize(("lowest", "retries", "damp"), [(-0.015, 1, 0.02), (-0.05, 3, 0.08), (-0.1, 4, 0.16)])
def test_c1_c17_a_failed_factorization_doubles_the_damping_and_says_so(lowest, retries, damp):
    result = gptq(weight(), indefinite(lowest), GPTQOptions(Scheme(4, 32)), torch.bfloat16)
    assert (result.method, result.retries, result.damp) == ("gptq", retries, pytest.approx(damp))
    assert bool(torch.isfinite(result.quantized.dequantize()).all())


def test_c3_what_no_damping_can_repair_is_rounded_and_called_rtn():
    options = GPTQOptions(Scheme(4, 32))
    result = gptq(weight(), indefinite(-1.0), options, torch.bfloat16)
    assert result.method == "rtn"
    assert result.retries == 4
    plain = rtn(weight(), Scheme(4, 32), torch.bfloat16, torch.ones(IN), Search())
    assert torch.equal(result.quantized.codes, plain.codes)


@pytest.mark.parametrize("precision", [torch.float32, F64], ids=str)
def test_c4_without_a_token_the_layer_is_rounded_and_called_rtn(precision):
    result = gptq(weight(), torch.zeros(IN, IN, dtype=precision), GPTQOptions(Scheme(4, 32)), torch.bfloat16)
    assert (result.method, result.retries, result.dead) == ("rtn", 0, IN)
    plain = rtn(weight(), Scheme(4, 32), torch.bfloat16, search=Search())
    assert torch.equal(result.quantized.codes, plain.codes)
    assert torch.equal(result.quantized.scale, plain.scale)


@pytest.mark.parametrize("precision", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_b17_inputs_of_any_size_leave_nothing_undefined(size, precision):
    H = (hessian(inputs(13)) * size).to(precision)
    q = gptq(weight(13), H, GPTQOptions(Scheme(4, 32)), torch.bfloat16).quantized
    assert bool(torch.isfinite(q.scale).all()) and bool((q.scale > 0).all())
    assert bool(torch.isfinite(q.dequantize()).all())
    reference = gptq(weight(13), hessian(inputs(13)), GPTQOptions(Scheme(4, 32)), torch.bfloat16).quantized
    assert float((q.codes != reference.codes).float().mean()) < 0.02  # H's size is not felt


def test_b17_strange_weights_and_hessians_leave_nothing_undefined():
    x = inputs(14)
    x[:, 7] *= 1e6  # massive activations
    x[:, 8] = x[:, 9]  # two columns that cannot be told apart
    x[:, 10] = 1e-20
    for seed, (symmetric, group, precision) in enumerate(product([True, False], [32, -1], [torch.float32, F64])):
        W = weight(seed)
        W[0], W[1, :32], W[2], W[3, 4] = 0, 0, 1e-30, 1e4
        q = gptq(W, hessian(x).to(precision), GPTQOptions(Scheme(2, group, symmetric)), torch.float16).quantized
        assert bool(torch.isfinite(q.scale).all())
        assert bool(torch.isfinite(q.dequantize()).all())
        assert int(q.codes.max()) <= 3
        assert not bool(q.dequantize()[0].any())


def test_the_inputs_of_gptq_are_left_alone():
    W, H = weight().float(), hessian(inputs()).float()
    before = W.clone(), H.clone()
    gptq(W, H, GPTQOptions(Scheme(4, 32), actorder="none"), torch.bfloat16)
    assert torch.equal(W, before[0]) and torch.equal(H, before[1])


# ---- the figure that is reported


def test_output_error_is_the_relative_error_of_outputs_on_the_data():
    W, x = weight(15), inputs(15)
    dense = rtn(W, Scheme(4, 32), torch.bfloat16).dequantize()
    expected = float((x @ (W - dense.double()).T).norm() / (x @ W.T).norm())
    assert output_error(W, dense, hessian(x)) == pytest.approx(expected, rel=1e-9)
    assert output_error(W.float(), dense, hessian(x).float()) == pytest.approx(expected, rel=1e-3)


def test_output_error_is_zero_for_the_weight_itself_and_for_outputs_of_zero():
    W, H = weight(16), hessian(inputs(16))
    assert output_error(W, W, H) == 0.0
    assert output_error(torch.zeros_like(W), torch.zeros_like(W), H) == 0.0
    assert output_error(W, W * 0.5, H) == pytest.approx(0.5)
