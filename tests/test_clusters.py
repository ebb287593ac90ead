"""Intervals over documents: the reference vectors, and what must hold whatever the numbers are."""

import math

import numpy as np
import pytest

from suture.checkpoint.errors import SutureError
from suture.report.clusters import cluster_mean, cr1_se, jackknife_se, paired, perplexity, t_interval, t_test

A = [[2, 1, 3], [0.5, 1.5], [4, 2, 2, 4], [1]]
B = [[2.1, 1.1, 3.4], [0.5, 1.6], [4.1, 2.3, 2.2, 4.3], [0.9]]


def close(value, rel=1e-9):
    return pytest.approx(value, rel=rel, abs=0)


def random_documents(seed, n=12, sizes=(3, 40)):
    rng = np.random.default_rng(seed)
    return [rng.gamma(2.0, 1.5, size=rng.integers(*sizes)) + rng.normal(0, 0.3) for _ in range(n)]


def shifted(documents, seed, shift=0.05):
    rng = np.random.default_rng(seed)
    return [x + shift + rng.normal(0, 0.1, x.size) + rng.normal(0, 0.02) for x in documents]


def test_vector_a_mean_and_standard_errors():
    m = cluster_mean(A)
    assert (m.n_values, m.n_clusters, m.df, m.level) == (10, 4, 3, 0.95)
    assert m.mean == close(2.1)
    assert m.se_token == close(0.3858612300930075)
    assert m.se_cr1 == close(0.5046450898073483)
    assert m.se_cr1 * math.sqrt(3 / 4) == close(0.43703546766824314)  # CR0
    assert m.se_jackknife == close(0.582494639223497)
    assert m.g_star == close(10 / 3)
    assert (m.se_cr1 / m.se_token) ** 2 == close(1.7104477611940303)
    assert m.deff == close((0.582494639223497 / 0.3858612300930075) ** 2)
    assert m.n_eff == close(10 / m.deff)


def test_vector_a_jackknife_is_the_delete_one_document_mean():
    means = [np.concatenate([x for j, x in enumerate(A) if j != g]).mean() for g in range(4)]
    assert means == close([2.142857142857143, 2.375, 1.5, 20 / 9])
    assert cluster_mean(A).se_jackknife == close(math.sqrt(3 / 4 * sum((v - 2.1) ** 2 for v in means)))


def test_vector_a_perplexity_and_intervals():
    p = perplexity(A, n_bytes=40)
    assert p.ppl == close(8.166169912567652)
    assert p.bits_per_byte == close(0.7574148964667058)
    assert p.se == close(8.166169912567652 * 0.582494639223497)
    jackknife = t_interval(p.log.mean, p.log.se_jackknife, 3)
    assert jackknife == close((0.24624208755561572, 3.9537579124443845))
    assert np.exp(jackknife) == close((1.2792092166922393, 52.13090256913697))
    assert np.exp(t_interval(p.log.mean, p.log.se_cr1, 3)) == close((1.638848889037928, 40.69095783447905))


def test_vector_b_paired():
    r = paired(A, B)
    assert r.log.mean == close(0.15)
    assert r.ratio == close(1.161834242728283)
    assert r.log.se_token == close(0.0477260702, 1e-8)
    assert r.correlation == close(0.9958139512718658)
    assert r.log.se_cr1 == close(0.05354126134736333)
    assert r.log.se_jackknife == close(0.05715628975717147)
    assert np.exp(t_interval(r.log.mean, r.log.se_jackknife, 3)) == close((0.9686065146817419, 1.3936090529181817))
    assert r.log.mean / r.log.se_cr1 == close(2.8015776286)
    assert t_test(r.log.mean, r.log.se_cr1, 3) == close(0.0677641472, 1e-8)
    assert r.delta_ppl == close(1.3215659237908692)
    assert r.delta_ppl_se == close(1.134888361732536)
    assert (r.delta_ppl_low, r.delta_ppl_high) == (None, None)  # of four documents
    unpaired = math.hypot(cluster_mean(A).se_token, cluster_mean(B).se_token)
    assert unpaired == close(0.5676951451)


def test_the_interval_of_the_difference_is_the_jackknife_of_the_difference():
    x = random_documents(9, n=12)
    y = shifted(x, 4, shift=0.05)
    r = paired(x, y)
    without = []
    for left_out in range(12):
        rest = paired([d for i, d in enumerate(x) if i != left_out], [d for i, d in enumerate(y) if i != left_out])
        without.append(rest.new.ppl - rest.base.ppl)
    se = math.sqrt(11 / 12 * sum((w - r.delta_ppl) ** 2 for w in without))
    assert (r.delta_ppl_low, r.delta_ppl_high) == close(t_interval(r.delta_ppl, se, 11))
    assert r.delta_ppl_low < r.delta_ppl < r.delta_ppl_high
    assert se == pytest.approx(r.delta_ppl_se, rel=0.5)
    same = paired(x, x)
    assert (same.delta_ppl_low, same.delta_ppl_high) == (0, 0)


# Mean and "±" of llama.cpp's --kl-divergence, as its users published them: PPL(Q), PPL(base), the correlation of their
# logarithms in percent, ln of the ratio, the ratio, the difference.
LLAMA_CPP = [
    (15.919427, 0.295934, 13.505476, 0.255762, 87.69, 0.164445, 0.009317, 1.178739, 0.010983, 2.413951, 0.142312),
    (10.910139, 0.080259, 10.517647, 0.077374, 99.20, 0.036638, 0.000930, 1.037318, 0.000965, 0.392492, 0.010372),
    (6.227711, 0.037833, 6.225194, 0.037771, 99.990, 0.000404, 0.000086, 1.000404, 0.000086, 0.002517, 0.000536),
]  # pull requests 19661 and 12557 of ggml-org/llama.cpp, and its tools/perplexity/README.md (BF16 against F16)


def llama_cpp_pair(q, u_q, base, u_base, correlation):
    """(ln ratio, its ±, ratio, ±, difference, ±) from both perplexities and the correlation of their logarithms."""
    relative = u_q / q, u_base / base
    covariance = correlation * relative[0] * relative[1]
    u_log = math.sqrt(relative[0] ** 2 + relative[1] ** 2 - 2 * covariance)
    u_delta = math.sqrt(u_q**2 + u_base**2 - 2 * q * base * covariance)
    return math.log(q / base), u_log, q / base, u_log * q / base, q - base, u_delta


@pytest.mark.parametrize("row", LLAMA_CPP)
def test_llama_cpps_formulas_give_its_published_figures(row):
    """Within what the digits of the correlation leave open."""
    q, u_q, base, u_base, percent, *published = row
    half = 0.0005 if percent == 99.990 else 0.005
    ends = [llama_cpp_pair(q, u_q, base, u_base, (percent + by) / 100) for by in (half, -half)]
    for found, low, high in zip(published, *map(list, ends), strict=True):
        assert min(low, high) - 2e-6 <= found <= max(low, high) + 2e-6


def test_token_errors_are_llama_cpps_formulas():
    """What stands behind those figures, from token losses: where each token is its own cluster, ours are the same."""
    x = np.concatenate(random_documents(21, n=30))
    y = np.concatenate(shifted([x], 22, shift=0.04))
    n = x.size
    mean = np.mean
    u = [math.sqrt((mean(z * z) - mean(z) ** 2) / (n - 1)) for z in (y, x)]
    covariance = (mean(x * y) - mean(x) * mean(y)) / (n - 1)
    ppl = [math.exp(mean(z)) for z in (y, x)]
    theirs = llama_cpp_pair(ppl[0], ppl[0] * u[0], ppl[1], ppl[1] * u[1], covariance / (u[0] * u[1]))
    documents = np.array_split(np.arange(n), 7)
    ours = paired([x[at] for at in documents], [y[at] for at in documents])
    assert (ours.log.mean, ours.log.se_token) == close(theirs[:2], 1e-9)
    assert (ours.ratio, ours.ratio * ours.log.se_token) == close(theirs[2:4], 1e-9)
    assert (ours.base.log.se_token, ours.new.log.se_token) == close((u[1], u[0]), 1e-9)
    assert ours.correlation == close(covariance / (u[0] * u[1]), 1e-9)
    alone = paired(x[:, None], y[:, None])  # each token a cluster
    assert (alone.delta_ppl, alone.delta_ppl_se) == close(theirs[4:], 1e-9)
    assert alone.log.se_cr1 == close(theirs[1], 1e-9)


def test_vector_b_prime_equal_clusters():
    documents = [np.full(5, s / 5) for s in (10, 12, 9, 11, 13)]
    m = cluster_mean(documents)
    assert m.se_jackknife == close(0.1414213562373095)
    assert m.se_cr1 == close(0.1414213562373095)
    assert m.g_star == close(5)


def test_under_five_clusters_there_is_no_interval():
    p = perplexity(A)
    assert (p.low, p.high) == (None, None)
    assert "no interval" in p.log.warnings[0]
    assert paired(A, B).p_value is None
    assert paired(A, B).upper_bound() is None
    assert paired(A, B).non_inferior(0.5) is None


def test_one_cluster_has_no_clustered_standard_error():
    m = cluster_mean([[1.0, 2.0, 3.0]])
    assert (m.se_jackknife, m.se_cr1, m.deff, m.low) == (None, None, None, None)
    assert m.mean == 2
    assert paired([[1.0]], [[2.0]]).log.se_token is None


def test_under_twenty_effective_clusters_there_is_a_warning():
    assert "effective documents of 12" in cluster_mean(random_documents(0)).warnings[0]
    equal = [np.arange(4.0) + g for g in range(25)]
    assert cluster_mean(equal).warnings == ()
    uneven = [np.ones(2000), *equal]
    assert "of 26" in cluster_mean(uneven, cluster="block").warnings[0]


def test_interval_is_exponentiated_and_ratio_interval_contains_the_ratio():
    x = random_documents(1)
    p = perplexity(x)
    assert p.low == close(math.exp(p.log.low))
    assert 0 < p.low < p.ppl < p.high
    assert p.high - p.ppl > p.ppl - p.low
    narrow, wide = perplexity(x, level=0.5), perplexity(x, level=0.99)
    assert wide.low < p.low < narrow.low < narrow.high < p.high < wide.high


@pytest.mark.parametrize("n", [1, 3, 12])
def test_h11_identical_models_give_ratio_one_and_no_error(n):
    x = random_documents(2, n=n)
    r = paired(x, [a.copy() for a in x])
    assert (r.ratio, r.delta_ppl, r.p_value) == (1, 0, 1)
    assert (r.delta_ppl_se, r.log.deff) == (0, None)
    assert r.log.se_token == 0
    if n > 1:
        assert r.se == 0 and r.log.se_cr1 == 0
    if n == 12:
        assert (r.low, r.high, r.upper_bound()) == (1, 1, 1)
        assert r.non_inferior(0.01)


def test_constant_identical_values_do_not_give_nan():
    x = [np.full(4, 2.0) for _ in range(6)]
    r = paired(x, x)
    assert (r.ratio, r.se, r.p_value, r.correlation) == (1, 0, 1, None)


def test_permuting_documents_changes_nothing():
    x, order = random_documents(3), np.random.default_rng(0).permutation(12)
    y = shifted(x, 4)
    one, two = paired(x, y), paired([x[i] for i in order], [y[i] for i in order])
    for name in ("ratio", "low", "high", "p_value", "delta_ppl", "delta_ppl_se", "correlation"):
        assert getattr(two, name) == close(getattr(one, name), 1e-10)


def test_splitting_a_document_changes_the_jackknife_but_not_the_mean():
    x = random_documents(5)
    one, two = cluster_mean(x), cluster_mean([x[0][:2], x[0][2:], *x[1:]])
    assert two.mean == close(one.mean)
    assert two.se_jackknife != pytest.approx(one.se_jackknife, rel=1e-6)


def test_h11_duplicating_tokens_inside_documents_leaves_the_document_error_unchanged():
    x = random_documents(6, sizes=(200, 300))
    one, two = cluster_mean(x), cluster_mean([np.repeat(a, 2) for a in x])
    assert two.se_jackknife == close(one.se_jackknife)
    assert two.se_cr1 == close(one.se_cr1)
    assert two.se_token == pytest.approx(one.se_token / math.sqrt(2), rel=1e-3)


def test_swapping_models_flips_the_sign():
    x = random_documents(7)
    y = shifted(x, 8)
    one, two = paired(x, y), paired(y, x)
    assert two.log.mean == close(-one.log.mean)
    assert two.ratio == close(1 / one.ratio)
    assert two.low == close(1 / one.high)
    assert two.delta_ppl == close(-one.delta_ppl)
    assert two.p_value == close(one.p_value)


def test_pairing_is_far_tighter_than_the_absolute_number():
    x = random_documents(9, n=30)
    r = paired(x, shifted(x, 10))
    assert r.log.se_jackknife < r.base.log.se_jackknife / 5


def test_jackknife_of_a_ratio_of_sums_matches_deleting_documents():
    rng = np.random.default_rng(11)
    S, n = rng.random(7) * 10, rng.integers(1, 9, 7).astype(float)
    m = S.sum() / n.sum()
    deleted = [(S.sum() - S[g]) / (n.sum() - n[g]) for g in range(7)]
    assert jackknife_se(S - m * n, n) == close(math.sqrt(6 / 7 * sum((v - m) ** 2 for v in deleted)))
    assert cr1_se(S[:1], 3) is None


def test_bits_per_byte_has_an_interval_when_bytes_come_per_document():
    x = random_documents(12)
    n_bytes = [4 * a.size + g for g, a in enumerate(x)]
    p, total = perplexity(x, n_bytes=n_bytes), perplexity(x, n_bytes=sum(n_bytes))
    assert p.bits_per_byte == total.bits_per_byte
    assert p.bits_per_byte_low < p.bits_per_byte < p.bits_per_byte_high
    assert total.bits_per_byte_low is None
    # with bytes proportional to tokens, bits per byte is the log-perplexity rescaled, and so is its interval
    q = perplexity(x, n_bytes=[3 * a.size for a in x])
    assert q.bits_per_byte_high == close(q.log.high / (3 * math.log(2)))


def test_bytes_that_do_not_fit_are_refused():
    with pytest.raises(SutureError, match="3 documents given for 4"):
        perplexity(A, n_bytes=[1, 2, 3])
    with pytest.raises(SutureError, match="positive number of bytes"):
        perplexity(A, n_bytes=0)


def test_empty_documents_are_not_clusters():
    assert cluster_mean([*A, []]) == cluster_mean(A)
    x = random_documents(13)
    assert perplexity([[], *x], n_bytes=[0.0, *[9.0] * 12]) == perplexity(x, n_bytes=[9.0] * 12)
    with pytest.raises(SutureError, match="no values"):
        cluster_mean([[], []])


def test_h12_nan_names_document_and_token():
    broken = [[1.0], [2.0, 3.0, math.nan]]
    with pytest.raises(SutureError, match="document 1, token 2"):
        perplexity(broken)
    with pytest.raises(SutureError, match="new: document 1, token 2"):
        paired([[1.0], [2.0, 3.0, 4.0]], broken)
    with pytest.raises(SutureError, match="block 0, token 0"):
        cluster_mean([[math.nan]], cluster="block")


def test_h12_infinite_nll_is_kept():
    x = random_documents(14)
    y = [a.copy() for a in x]
    y[3][2] = math.inf
    p = perplexity(y, n_bytes=100)
    assert p.ppl == math.inf and p.bits_per_byte == math.inf
    assert (p.low, p.se) == (None, None)
    assert "document 3 at token 2" in p.log.warnings[0]
    r = paired(x, y)
    assert (r.ratio, r.low, r.p_value, r.delta_ppl) == (math.inf, None, None, math.inf)
    assert paired(y, x).ratio == 0
    assert paired(y, y).ratio == 1 and paired(y, y).p_value == 1
    z = [a.copy() for a in x]
    z[0][0] = math.inf
    with pytest.raises(SutureError, match="both signs"):
        paired(y, z)


def test_a_huge_loss_overflows_to_infinity_without_an_exception():
    assert perplexity([[800.0, 900.0]] * 6).ppl == math.inf


def test_misaligned_models_are_refused():
    with pytest.raises(SutureError, match="document 1: base has 2 tokens and new has 1"):
        paired([[1.0], [1.0, 2.0]], [[1.0], [1.0]])
    with pytest.raises(SutureError, match="base has 4 documents and new has 3"):
        paired(A, A[:3])
    with pytest.raises(SutureError, match="1-D"):
        cluster_mean([np.ones((2, 2))])


@pytest.mark.parametrize("level", [0, 1, 95])
def test_level_outside_zero_and_one_is_refused(level):
    with pytest.raises(SutureError, match="level"):
        perplexity(A, level=level)


def test_non_inferiority_bound_is_the_upper_end_of_the_two_sided_ninety_percent_interval():
    x = random_documents(15, n=30)
    r = paired(x, shifted(x, 16, shift=0.01), level=0.90)
    assert r.upper_bound(0.95) == close(r.high)
    assert r.non_inferior(0.5) and not r.non_inferior(-0.5)


def test_coverage_of_the_interval_is_near_nominal_where_the_token_interval_is_not():
    rng = np.random.default_rng(2024)
    truth, reps, hits, token_hits = 2.0, 600, 0, 0
    for _ in range(reps):
        sizes = rng.integers(20, 200, size=24)
        documents = [rng.normal(truth + rng.normal(0, 0.3), 1.0, n) for n in sizes]
        m = cluster_mean(documents)
        hits += m.low <= truth <= m.high
        token_hits += abs(m.mean - truth) <= 1.96 * m.se_token
    assert 0.92 <= hits / reps <= 0.98
    assert token_hits / reps < 0.7
