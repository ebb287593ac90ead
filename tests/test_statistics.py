"""Shares, pairs and power: published figures, scipy and statsmodels, and simulations of what each estimate promises."""

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from suture.checkpoint.errors import SutureError
from suture.report.clusters import cr1_se
from suture.report.grouped import difference, labels_of, share
from suture.report.pairs import (
    bonett_price,
    holm,
    mcnemar,
    mcnemar_chi_square,
    paired_proportions,
)
from suture.report.power import (
    detectable_difference,
    detectable_ratio,
    items_needed,
    items_needed_from_flips,
    needed,
    power_of,
    tokens_needed,
)
from suture.report.proportions import clustered_se, pass_at_k, pass_at_k_over_items, split_variance, wilson


@pytest.mark.parametrize(
    ("right", "n", "low", "high"), [(27, 30, 74.4, 96.5), (30, 30, 88.6, 100.0), (0, 30, 0.0, 11.4)]
)
def test_wilson_gives_the_published_intervals(right, n, low, high):
    found = wilson(right, n)
    assert (round(100 * found.low, 1), round(100 * found.high, 1)) == (low, high)


def test_wilson_agrees_with_scipy_and_statsmodels():
    for right, n, level in ((0, 1, 0.95), (1, 1, 0.9), (3, 17, 0.95), (350, 500, 0.99), (499, 500, 0.95)):
        found = wilson(right, n, level)
        ours = (found.low, found.high)
        theirs = stats.binomtest(right, n).proportion_ci(level, method="wilson")
        assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-12)
        assert ours == pytest.approx(proportion_confint(right, n, 1 - level, method="wilson"), abs=1e-12)
    assert wilson(350, 500).se == pytest.approx(0.0205, abs=5e-5)  # 2.0 points
    with pytest.raises(SutureError, match="5 of 4"):
        wilson(5, 4)


def test_pass_at_k_is_unbiased_where_the_plug_in_is_not():
    """p = 0.1, n = 10, k = 5: the expectation over c is 1 - 0.9^5 = 40.95 %, the plug-in's 34.8 %."""
    n, k, p = 10, 5, 0.1
    weights = [stats.binom.pmf(c, n, p) for c in range(n + 1)]
    unbiased = sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
    plug_in = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weights))
    assert unbiased == pytest.approx(1 - 0.9**5, abs=1e-12)
    assert int(1000 * unbiased) / 10 == 40.9 and 100 * plug_in == pytest.approx(34.8, abs=0.1)
    assert pass_at_k(10, 6, 5) == 1.0 and pass_at_k(10, 0, 5) == 0.0
    with pytest.raises(SutureError, match="pass@5 from 1 of 4"):
        pass_at_k(4, 1, 5)
    over = pass_at_k_over_items([(10, 1), (10, 10), (10, 0), (10, 3)], 1)
    assert over.value == pytest.approx(0.35) and over.low >= 0 and over.high <= 1


def test_variance_splits_between_items_and_samples():
    """Items with chances drawn from Beta(2, 2), K answers each: both parts are met on average over repetitions."""
    rng = np.random.default_rng(0)
    n, K = 40, 8
    items, samples, means = [], [], []
    for _ in range(400):
        chance = rng.beta(2, 2, n)
        found = split_variance([rng.random(K) < c for c in chance])
        items.append(found.items), samples.append(found.samples), means.append(found.mean)
    assert np.mean(items) == pytest.approx(0.05 / n, rel=0.05)  # Var Beta(2,2) = 1/20
    assert np.mean(samples) == pytest.approx(0.2 / (n * K), rel=0.05)  # E p(1-p) = 1/5
    assert np.var(means) == pytest.approx(0.05 / n + 0.2 / (n * K), rel=0.2)
    with pytest.raises(SutureError, match="two samples"):
        split_variance([[1.0], [0.0]])


def test_the_clustered_error_is_millers_formula():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 12, 60)
    x = (rng.random(60) < 0.3 + 0.05 * labels).astype(float)
    e = x - x.mean()
    cross = sum(e[i] * e[j] for i in range(60) for j in range(60) if i != j and labels[i] == labels[j])
    expected = math.sqrt(x.mean() * (1 - x.mean()) / 60 + cross / 60**2)
    assert clustered_se(x, labels.tolist()) == pytest.approx(expected, rel=1e-12)
    assert clustered_se(x, range(60)) == pytest.approx(math.sqrt(x.mean() * (1 - x.mean()) / 60))
    sums = np.array([e[labels == g].sum() for g in np.unique(labels)])
    assert cr1_se(sums, 60) == pytest.approx(expected * math.sqrt(sums.size / (sums.size - 1)))


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 3), (5, 5), (4, 15), (30, 61), (1, 0)])
def test_mcnemar_agrees_with_statsmodels(b, c):
    exact, mid = mcnemar(b, c)
    table = [[7, b], [c, 9]]
    if b + c:
        assert exact == pytest.approx(statsmodels_mcnemar(table, exact=True).pvalue, abs=1e-12)
        theirs = statsmodels_mcnemar(table, exact=False, correction=False).statistic
        assert mcnemar_chi_square(b, c) == pytest.approx(theirs) == pytest.approx((b - c) ** 2 / (b + c))
    else:
        assert (exact, mcnemar_chi_square(b, c)) == (1.0, None)
    assert 0 <= mid <= exact <= 1


def test_the_mid_p_test_keeps_its_level_where_the_exact_one_is_conservative():
    """40 items, a quarter discordant, no difference: rejections at 5 %."""
    n, q = 40, 0.25
    rates = np.zeros(2)
    for m in range(n + 1):
        weight = stats.binom.pmf(m, n, q)
        for b in range(m + 1):
            exact, mid = mcnemar(b, m - b)
            rates += weight * stats.binom.pmf(b, m, 0.5) * np.array([exact <= 0.05, mid <= 0.05])
    assert rates[0] < 0.03 < rates[1] < 0.05


def test_bonett_price_covers():
    """Small tables, where Wald's interval of paired shares fails: 95 % covers between 94 and 98 %."""
    rng = np.random.default_rng(2)
    n, chances = 25, (0.6, 0.16, 0.08, 0.16)  # both, base only, candidate only, neither
    hits = 0
    for _ in range(2000):
        _, b, c, _ = rng.multinomial(n, chances)
        _, low, high = bonett_price(int(b), int(c), n)
        hits += low <= chances[2] - chances[1] <= high
    assert 0.94 < hits / 2000 < 0.985
    b, c, n = 9, 3, 50
    less, more = 10 / 52, 4 / 52
    half = 1.959964 * math.sqrt((less + more - (more - less) ** 2) / 52)
    assert bonett_price(b, c, n) == pytest.approx(((c - b) / n, more - less - half, more - less + half), abs=1e-6)


def test_paired_answers():
    base = np.array([1, 1, 1, 0, 0, 1, 0, 1, 1, 0])
    new = np.array([1, 0, 1, 1, 0, 0, 0, 1, 0, 0])
    found = paired_proportions(base, new)
    assert (found.both, found.base_only, found.candidate_only, found.neither, found.n) == (3, 3, 1, 3, 10)
    assert found.difference == pytest.approx(-0.2) and found.low < -0.2 < found.high
    assert found.flips.value == pytest.approx(0.4) and found.p_exact == pytest.approx(0.625)
    same = paired_proportions(base, base)
    assert (same.difference, same.p_exact, same.p_mid, same.chi_square) == (0.0, 1.0, 1.0, None)
    with pytest.raises(SutureError, match="same items"):
        paired_proportions(base, new[:9])


def test_items_that_share_a_passage_are_tested_as_passages():
    """12 passages of 5 items, two of which flip whole: ten discordant items, and two groups."""
    labels, grouped = labels_of([f"p{i // 5}" for i in range(60)])
    base = np.ones(60)
    new = np.where(np.arange(60) < 10, 0.0, 1.0)
    found = difference(base, new, labels, 0.95)
    expected = stats.ttest_1samp([-1.0, -1.0, *[0.0] * 10], 0)
    assert grouped and found["test"] == "t over groups" and found["method"] == "jackknife over 12 groups"
    assert found["p"] == pytest.approx(expected.pvalue) and found["p"] > 0.1 > paired_proportions(base, new).p_mid
    assert found["ci"] == pytest.approx(list(expected.confidence_interval()))
    still = difference(base, base, labels, 0.95)
    assert still["p"] == 1.0 and still["ci"][0] < 0 < still["ci"][1]  # no flip is not certainty
    assert share(base, labels, 0.95)["ci"] == pytest.approx([wilson(12, 12).low, wilson(12, 12).high])
    assert labels_of(["subject"] * 4) == (["item 0", "item 1", "item 2", "item 3"], False)


def test_holm_agrees_with_statsmodels_and_leaves_what_was_not_tested():
    p = [0.01, 0.04, 0.03, 0.005, 0.9]
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1])
    assert holm([None, 0.02, None]) == [None, 0.02, None] and holm([]) == []


def test_power_gives_the_published_numbers():
    """Miller 2024: 969 items for 3 points at 80 % power, with variances omega^2 = 1/9 and no sampling noise."""
    assert items_needed(0.03, variance=1 / 9) == 969
    assert items_needed(0.03, variance=1 / 9, within_a=1 / 6, within_b=1 / 6, samples=10) > 969
    for n, flips in ((200, 0.1), (1000, 0.3)):
        assert detectable_difference(n, flips) == pytest.approx(2.80 * math.sqrt(flips / n), rel=1e-3)
    items = items_needed_from_flips(0.02, 0.1)
    assert items == math.ceil(2.8015852**2 * (0.1 - 0.0004) / 0.0004)
    with pytest.raises(SutureError, match="at least so many"):
        items_needed_from_flips(0.2, 0.1)


def test_items_needed_reach_their_power():
    """Simulated: so many items reject no difference in 80 % of repetitions."""
    rng = np.random.default_rng(3)
    difference, flips = 0.05, 0.15
    n = items_needed_from_flips(difference, flips)
    chances = (0.5, (flips - difference) / 2, (flips + difference) / 2, 0.5 - flips)
    tables = rng.multinomial(n, chances, 3000)
    b, c = tables[:, 1], tables[:, 2]
    z = (c - b) / np.sqrt(b + c - (c - b) ** 2 / n)
    assert (np.abs(z) > 1.959964).mean() == pytest.approx(0.8, abs=0.03)


def test_tokens_needed_scale_with_the_square_of_the_effect():
    """Chunks of 512 tokens with a standard deviation of 0.0229: +-1 % as an interval needs 21 of them."""
    one = 0.0229  # standard error of one chunk
    assert math.ceil((1.959964 * one / math.log(1.01)) ** 2) == 21
    n = tokens_needed(1.01, one, 512)
    assert n == math.ceil(512 * (2.8015852 * one / math.log(1.01)) ** 2)
    assert tokens_needed(1.005, one, 512) == pytest.approx(4 * n, rel=0.01)
    assert detectable_ratio(one / math.sqrt(n / 512)) == pytest.approx(1.01, rel=1e-4)
    with pytest.raises(SutureError, match="other than 1"):
        tokens_needed(1.0, one, 512)


def scored(se=0.01, ci=(0.99, 1.01), n=10_000, clusters=20):
    ratio = {"name": "ppl_ratio", "level": 0.95, "se_log": se, "ci": ci, "n_tokens": n, "cluster": "document"}
    return {"name": "text", "metrics": [ratio | {"n_clusters": clusters}], "sets": [], "tasks": [], "generation": []}


def test_what_a_report_saw_says_how_much_a_difference_needs():
    """As much as `tokens_needed` and the tasks' own power say; a hundredth of the effect needs ten thousand times as much."""
    (row,) = needed(scored(), ratio=1.02)
    assert row["needed"] == tokens_needed(1.02, 0.01, 10_000) and row["detectable"] == detectable_ratio(0.01)
    assert row["documents"] == math.ceil(20 * row["needed"] / 10_000)
    assert needed(scored(), ratio=1.02, power=0.9)[0]["needed"] > row["needed"]
    assert needed(scored(), ratio=1.5)[0]["documents"] == 5  # fewer have no interval
    for blind in (scored(se=None, ci=None), scored(se=0.0), scored(ci=None)):
        assert needed(blind)[0]["needed"] is None and needed(blind)[0]["detectable"] is None
    content = scored()
    power = power_of(0.02, 400)
    pair = {"name": "t", "metric": "acc", "n_items": 400, "level": 0.95, "paired": {"power": power}}
    content["tasks"] = [pair, pair | {"paired": {"power": None}}]
    _, one, blind = needed(content, points=1)
    assert one["needed"] == power["items_for_one_point"] and one["detectable"] == pytest.approx(power["detectable"])
    assert blind["needed"] is None
    assert needed(content, points=0.01)[1]["needed"] == pytest.approx(1e4 * one["needed"], rel=1e-3)
    higher = needed(content, power=0.9)[1]
    assert higher["needed"] == pytest.approx(one["needed"] * (3.2415155 / 2.8015852) ** 2, rel=1e-3)
    for wrong in ({"points": 0}, {"ratio": 1}, {"ratio": -1}, {"power": 1}):
        with pytest.raises(SutureError):
            needed(content, **wrong)


# -- vectors computed once, with scipy and inspect_ai's formulas, before any of this was written ------------------------


def test_vectors_of_shares():
    for right, n, low, high in (
        (8, 10, 0.4901624715, 0.9433178485),
        (10, 10, 0.7224672001, 1),
        (0, 10, 0, 0.2775327999),
    ):
        found = wilson(right, n)
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-10)
    clusters = [[1, 1, 1], [0, 0], [1, 0, 1, 1], [0], [1, 1]]
    values = [x for cluster in clusters for x in cluster]
    labels = [g for g, cluster in enumerate(clusters) for _ in cluster]
    assert clustered_se(values, labels) == pytest.approx(0.1619708860, abs=1e-10)
    sums = np.array([sum(x - np.mean(values) for x in cluster) for cluster in clusters])
    assert cr1_se(sums, len(values)) == pytest.approx(0.1810889557, abs=1e-10)
    assert pass_at_k(10, 3, 5) == pytest.approx(0.9166666667) and holm([0.01, 0.04, 0.03]) == pytest.approx(
        [0.03, 0.06, 0.06]
    )


def test_vectors_of_pairs():
    base = np.repeat([1, 1, 0, 0], [130, 15, 5, 50])
    new = np.repeat([1, 0, 1, 0], [130, 15, 5, 50])
    found = paired_proportions(base, new)
    assert (found.difference, found.p_exact, found.p_mid) == pytest.approx((-0.05, 0.04138946533, 0.02660369873))
    assert (found.low, found.high) == pytest.approx((-0.0945001, -0.0045098), abs=1e-7)
    assert stats.chi2.sf(found.chi_square, 1) == pytest.approx(0.02534731868)
    assert (found.flips.low, found.flips.high) == pytest.approx((0.0656704, 0.1494058), abs=1e-7)
    for n, flips, points in ((1267, 0.05, 1.76), (10042, 0.03, 0.48), (200, 0.10, 6.26)):
        assert round(100 * detectable_difference(n, flips), 2) == pytest.approx(points, abs=0.011)
