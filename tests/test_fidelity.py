"""Divergence between two models, token by token, against float64 from stock transformers' logits; quantiles and noise."""

import copy
import math

import kit
import numpy as np
import pytest
import torch
from scipy import stats

from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline.progress import Silent
from suture.report.fidelity import TOKEN_FIELDS, histogram, summarize, token_fidelity
from suture.report.score import compare_tokens, score
from suture.report.windows import rolling_windows


def figure(section, name):
    (row,) = [row for row in section["metrics"] if row["name"] == name]
    return row


def exact(p, q):
    """KL(p||q), KL(q||p) in float64 by the definition."""
    p, q = torch.log_softmax(p.double(), 1), torch.log_softmax(q.double(), 1)
    return (p.exp() * (p - q)).sum(1), (q.exp() * (q - p)).sum(1)


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 20.0])
def test_divergences_agree_with_float64_at_every_size(size):
    """Float32 logits that differ by so much: the plain sums would lose a divergence of 1e-9 in 1e-7 of rounding."""
    generator = torch.Generator().manual_seed(0)
    p = 5 * torch.randn(40, 500, generator=generator)
    q = p + size * torch.randn(40, 500, generator=generator)
    found = token_fidelity(p, q, torch.arange(40))
    for name, expected in zip(("kl", "kl_reverse"), exact(p, q), strict=True):
        assert bool((found[name] >= 0).all())
        np.testing.assert_allclose(found[name].double(), expected, rtol=2e-3 if size < 1e-3 else 1e-4, atol=1e-12)
    same = token_fidelity(p, p.clone(), torch.arange(40))
    assert not same["kl"].any() and not same["kl_reverse"].any() and bool(same["same_top"].all())


def test_an_impossible_token_is_infinite_one_way_only():
    p, q = torch.zeros(1, 4), torch.tensor([[0.0, 0.0, 0.0, -math.inf]])
    found = token_fidelity(p, q, torch.tensor([0]))
    assert found["kl"].item() == math.inf and found["kl_reverse"].item() == pytest.approx(math.log(4 / 3))
    both = token_fidelity(q, q, torch.tensor([0]))
    assert both["kl"].item() == 0.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(base, candidate) of one shape: the candidate's weights are the base's with noise."""
    home = tmp_path_factory.mktemp("pair")
    base, other = kit.make("L1", home / "base"), kit.make("L1", home / "other")

    def shake(tensors):
        generator = torch.Generator().manual_seed(1)
        for name, tensor in tensors.items():
            if "proj" in name:
                tensor += 0.02 * tensor.float().std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return tensors

    kit.edit(other, shake)
    return base, other


@pytest.fixture(scope="module")
def plan():
    rng = np.random.default_rng(0)
    return rolling_windows(
        [rng.integers(0, 256, n).tolist() for n in (40, 25, 60, 33, 40, 50, 12)], window=24, bos_id=256
    )


@pytest.fixture(scope="module")
def tokens(pair, plan):
    return compare_tokens(*(open_skeleton(open_checkpoint(path)) for path in pair), plan, Silent().track, "")


def test_tokens_are_those_of_stock_transformers(pair, plan, tokens):
    models = [kit.stock(path) for path in pair]
    rows = []
    for ids, start in zip(plan.ids, plan.score_from, strict=True):
        with torch.no_grad():
            p, q = (model(torch.from_numpy(ids)[None]).logits[0, start - 1 : -1] for model in models)
        target = torch.from_numpy(ids[start:])
        kl, reverse = exact(p, q)
        log_p, log_q = torch.log_softmax(p.double(), 1), torch.log_softmax(q.double(), 1)
        nll = [-x.gather(1, target[:, None])[:, 0] for x in (log_p, log_q)]
        guess = [x.argmax(1) for x in (log_p, log_q)]
        table = [*nll, kl, reverse, log_p.exp().amax(1), guess[0] == guess[1], guess[0] == target, guess[1] == target]
        rows.append(torch.stack([column.double() for column in table], 1).numpy())
    expected = np.concatenate(rows)
    assert tokens.dtype == TOKEN_FIELDS and len(tokens) == plan.n_scored
    for column, name in enumerate(TOKEN_FIELDS.names):
        np.testing.assert_allclose(tokens[name].astype(float), expected[:, column], rtol=1e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("options", [{"batch_tokens": 1}, {"batch_tokens": 4096}])
def test_tokens_do_not_depend_on_the_batch(pair, plan, tokens, options):
    """H6: batch 1 = batch 8 to 1e-5; there is no padding."""
    skeletons = [open_skeleton(open_checkpoint(path)) for path in pair]
    found = compare_tokens(*skeletons, plan, Silent().track, "", **options)
    for name in ("nll_base", "nll_candidate", "kl"):
        np.testing.assert_allclose(found[name], tokens[name], rtol=1e-3, atol=1e-5)


def test_stock_padding_on_either_side_gives_the_same_losses(pair, plan, tokens):
    """H6: padded batches of transformers, left or right with their mask, are what is scored without padding."""
    model = kit.stock(pair[0])
    width = max(ids.size for ids in plan.ids)
    for side in ("left", "right"):
        found = []
        for ids, start in zip(plan.ids, plan.score_from, strict=True):
            pad = np.zeros(width - ids.size, dtype=np.int64)
            row = torch.from_numpy(np.concatenate([pad, ids] if side == "left" else [ids, pad]))[None]
            mask = torch.zeros_like(row)
            at = slice(pad.size, None) if side == "left" else slice(0, ids.size)
            mask[:, at] = 1
            with torch.no_grad():
                logits = model(row, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
            log = torch.log_softmax(logits[0, at].double(), 1)
            found.append(-log[start - 1 : -1].gather(1, torch.from_numpy(ids[start:])[:, None])[:, 0].numpy())
        np.testing.assert_allclose(np.concatenate(found), tokens["nll_base"], atol=1e-5)


def test_tokens_do_not_depend_on_the_memory(pair, plan, tokens, tmp_path):
    """Blocks all at once, or one at a time with both models' states in files."""
    skeletons = [open_skeleton(open_checkpoint(path)) for path in pair]
    spill = tmp_path / "states.bin"
    found = compare_tokens(*skeletons, plan, Silent().track, "", budget=0, spill=spill)
    np.testing.assert_array_equal(found, tokens)
    assert {path.name for path in tmp_path.iterdir()} == {"states-base.bin", "states-candidate.bin"}
    alone = score(skeletons[1], plan, Silent().track, "")
    np.testing.assert_allclose(alone, tokens["nll_candidate"], atol=1e-6)


def test_the_noise_of_a_dtype_is_small_and_not_zero(pair, plan):
    base = open_skeleton(open_checkpoint(pair[0]))
    sample = plan.sample(5)
    assert sample.n_windows == 5 and sample.n_scored + sum(sample.n_unscored.values()) == plan.n_tokens_in
    noise = compare_tokens(base, base, sample, Silent().track, "", rounded=torch.bfloat16)
    none = compare_tokens(base, base, sample, Silent().track, "")
    streamed = compare_tokens(base, base, sample, Silent().track, "", budget=0, rounded=torch.bfloat16)
    assert not none["kl"].any() and 0 < noise["kl"].mean() < 0.05
    np.testing.assert_array_equal(streamed, noise)
    np.testing.assert_array_equal(noise["nll_base"], none["nll_base"])


def test_the_summary_is_what_the_tokens_say(plan, tokens):
    section = summarize(plan, tokens, 0.95)
    kl = tokens["kl"].astype(float)
    dp = np.exp(-tokens["nll_candidate"].astype(float)) - np.exp(-tokens["nll_base"].astype(float))
    assert figure(section, "kl")["value"] == pytest.approx(kl.mean())
    assert figure(section, "delta_p_rms")["value"] == pytest.approx(math.sqrt(np.square(dp).mean()))
    assert figure(section, "same_top")["value"] == pytest.approx(tokens["same_top"].mean())
    lost = tokens["right_base"].astype(bool) & ~tokens["right_candidate"].astype(bool)
    assert figure(section, "right_to_wrong")["value"] == pytest.approx(lost.mean())
    names = np.unique(plan.document)
    left_out = np.array([kl[plan.document != name].mean() for name in names])
    se = math.sqrt((names.size - 1) / names.size * np.square(left_out - kl.mean()).sum())
    half = stats.t.ppf(0.975, names.size - 1) * se
    assert figure(section, "kl")["ci"] == pytest.approx([max(0, kl.mean() - half), kl.mean() + half])
    for row in section["metrics"]:
        assert row["ci"][0] <= row["value"] <= row["ci"][1] and row["n_clusters"] == 7
    for row in section["kl_quantiles"]:
        assert row["value"] == np.quantile(kl, row["quantile"], method="inverted_cdf")
        assert row["ci"][0] <= row["value"] <= row["ci"][1]
    assert sum(bucket["n_tokens"] for bucket in section["confidence"]) == plan.n_scored
    shares = section["kl_histogram"]
    assert sum(shares["shares"]) + shares["below"] == pytest.approx(1, abs=1e-6)
    assert histogram(np.array([0.0, 1e-12, 1e-3, math.inf]))["below"] == 0.5


def test_quantile_intervals_cover():
    """Woodruff's interval of the median over documents of uneven size with an effect of their own: near 95 %."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        sizes = rng.integers(10, 60, 24)
        ids = [np.zeros(n + 1, dtype=np.int64).tolist() for n in sizes]
        plan = rolling_windows(ids, window=64)
        values = np.concatenate([np.exp(rng.normal(0, 0.4) + rng.normal(0, 1, n)) for n in sizes])
        tokens = np.zeros(plan.n_scored, dtype=TOKEN_FIELDS)
        tokens["kl"] = values
        row = summarize_median(plan, tokens)
        hits += row["ci"][0] <= 1.0 <= row["ci"][1]
    assert 0.9 <= hits / 300 <= 0.99


def summarize_median(plan, tokens):
    from suture.report.fidelity import _quantile

    return _quantile(plan, tokens["kl"].astype(float), 0.5, 0.95)


def test_one_outlier_moves_the_largest_and_not_the_median(plan, tokens):
    changed = copy.deepcopy(tokens)
    changed["kl"][3] = 50.0
    before, after = summarize(plan, tokens, 0.95), summarize(plan, changed, 0.95)
    assert after["kl_max"] == 50.0 and before["kl_quantiles"][0]["value"] == pytest.approx(
        after["kl_quantiles"][0]["value"], rel=0.1
    )


def test_vector_of_divergences():
    """Three positions of a vocabulary of four, computed once by the definitions in float64."""
    p = torch.tensor([[2.0, 1, 0, -1], [0, 0, 0, 0], [3, 0, -1, -2]])
    q = torch.tensor([[1.5, 1.2, 0.1, -0.9], [0.1, 0, -0.1, 0], [1, 1.1, -1, -2]])
    found = token_fidelity(p, q, torch.tensor([0, 2, 0]))
    np.testing.assert_allclose(found["kl"], [0.05394054, 0.00249896, 0.56629592], rtol=1e-5)
    np.testing.assert_allclose(found["kl_reverse"], [0.05564732, 0.00249688, 0.90104208], rtol=1e-5)
    assert found["same_top"].tolist().count(True) == 2
    change = torch.exp(-found["nll_candidate"]) - torch.exp(-found["nll_base"])
    np.testing.assert_allclose(change, [-0.16271314, -0.02435523, -0.49374516], rtol=1e-5)
    assert float(change.double().square().mean().sqrt()) == pytest.approx(0.300473528804, rel=1e-6)
