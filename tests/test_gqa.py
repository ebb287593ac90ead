"""Fewer key-value heads: exact where heads can be merged, in every family; refused where they cannot."""

import itertools
import json

import numpy as np
import pytest
import tiny
import torch
import transformers
import warm
from kit import LENGTH, edit, ids_file, make, read, run, some_ids

from suture.checkpoint.errors import SutureError
from suture.pipeline.stock import cache_of, go_on
from suture.surgery.gqa import GQASettings, regroup
from suture.surgery.grouping import contiguous, group_by_cost
from suture.surgery.heads import Attention, rotary_pairs
from suture.surgery.merge import merge
from suture.surgery.ridge import Ridge

METHODS = ("mean", "procrustes", "pca")
D, HEAD = 20, 8


# ---- merging, on matrices


def orthogonal(*shape, generator):
    return torch.linalg.qr(torch.randn(*shape, generator=generator, dtype=torch.float64))[0]


def planted(kind, n, m, n_query, rotated, layout="half", seed=0):
    """An attention of n key-value heads, each group of n / m made from one by maps that `kind` names."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    first, second = rotary_pairs(rotated, layout)
    keys, values = [], []
    for _ in range(m):
        key, value = draw(HEAD, D + 1), draw(HEAD, D + 1)
        for _ in range(n // m):
            a, R, B = torch.ones(len(first)), torch.eye(HEAD - rotated).double(), torch.eye(HEAD).double()
            if kind != "identical":
                a = torch.polar(torch.ones(len(first), dtype=torch.float64), draw(len(first)))
                R, B = (orthogonal(size, size, generator=generator) for size in (HEAD - rotated, HEAD))
            if kind == "any map":
                a, R, B = a * (0.5 + draw(len(first)).abs()), draw(*R.shape), draw(*B.shape)
            turned = a[:, None] * torch.complex(key[first], key[second])
            made = key.clone()
            made[first], made[second], made[rotated:] = turned.real, turned.imag, R @ key[rotated:]
            keys.append(made)
            values.append(B @ value)
    return Attention(draw(n_query, HEAD, D + 1) / 2, torch.stack(keys), torch.stack(values), draw(D, n_query, HEAD))


def attend(attention, x, rotated, layout="half"):
    """Outputs [T, D] of an attention over all tokens, written out; positions far apart, some above 100."""
    first, second = rotary_pairs(rotated, layout)
    angle = 7.0 * torch.arange(len(x))[:, None] * 0.3 ** torch.arange(len(first))
    G = attention.q.shape[0] // attention.k.shape[0]
    x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)

    def rope(y):
        turned = torch.complex(y[..., first], y[..., second]) * torch.polar(torch.ones(()).double(), angle.double())
        y = y.clone()
        y[..., first], y[..., second] = turned.real, turned.imag
        return y

    q, k, v = (torch.einsum("hdx,tx->htd", part, x) for part in (attention.q, attention.k, attention.v))
    k, v = k.repeat_interleave(G, 0), v.repeat_interleave(G, 0)
    weights = (rope(q) @ rope(k).mT / HEAD**0.5).softmax(-1)
    return torch.einsum("hts,hsd,ohd->to", weights, v, attention.o)


def second_moment(tokens, seed=1):
    x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    return x.T @ x / tokens


EXACT = {"identical": METHODS, "turned": ("procrustes", "pca"), "any map": ("pca",)}


@pytest.mark.parametrize(("rotated", "layout"), [(8, "half"), (4, "half"), (8, "interleaved"), (0, "half")])
@pytest.mark.parametrize(("n_query", "n", "m"), [(8, 8, 2), (8, 4, 1), (6, 6, 2)])
@pytest.mark.parametrize("kind", EXACT)
def test_heads_that_a_method_can_merge_are_merged_exactly(rotated, layout, n_query, n, m, kind):
    """From 12 tokens, which do not span the inputs; groups in order, and found among shuffled heads."""
    attention = planted(kind, n, m, n_query, rotated, layout)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(2))
    G = n_query // n
    shuffled = Attention(
        attention.q.unflatten(0, (n, G))[order].flatten(0, 1),
        attention.k[order],
        attention.v[order],
        attention.o.unflatten(1, (n, G))[:, order].flatten(1, 2),
    )
    x = torch.randn(30, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted, C, pairs = attend(attention, x, rotated, layout), second_moment(12), rotary_pairs(rotated, layout)
    for method in METHODS:
        for given, grouping in ((attention, "contiguous"), (shuffled, "similar")):
            made = regroup(given, C, pairs, m, method, grouping)
            assert made.attention.k.shape == made.attention.v.shape == (m, HEAD, D + 1)
            error = float((attend(made.attention, x, rotated, layout) - wanted).abs().max() / wanted.abs().max())
            kept = (made.score_energy, made.value_energy)
            if method in EXACT[kind]:
                assert error < 1e-4 and min(kept) > 1 - 1e-6, (method, grouping)
            else:
                assert error > 0.1 and min(kept) < 0.99, (method, grouping)


def test_pca_keeps_most_and_what_is_reported_lost_is_what_is_lost():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.complex128)  # noqa: E731
    g, b = 3, 2
    x, root = draw(500, 4) @ draw(4, g * b), draw(g, b, b)
    S, P = (x.T @ x.conj() / 500).unflatten(1, (g, b)).unflatten(0, (g, b)), root @ root.mH
    lost = {}
    for method in METHODS:
        made = merge(S, P, method)
        rest = (x - x @ (made.decode @ made.encode).T).unflatten(1, (g, b))
        measured = torch.einsum("tib,ibc,tic->", rest.conj(), P, rest).real / 500
        assert float(made.lost) == pytest.approx(float(measured), rel=1e-9)
        lost[method] = float(made.lost)
    assert lost["pca"] < lost["procrustes"] and lost["pca"] < lost["mean"]
    for seed in range(20):  # no other maps of this kind lose less
        noise = 0.1 * torch.randn(made.encode.shape, generator=generator.manual_seed(seed), dtype=torch.complex128)
        rest = torch.eye(g * b) - made.decode @ (made.encode + noise)
        flat = S.flatten(2).flatten(0, 1)
        assert float(torch.einsum("ab,ba->", torch.block_diag(*P), rest @ flat @ rest.mH).real) > lost["pca"]


def test_a_merged_vector_looks_like_what_it_replaces():
    """Of heads that are one and the same, every method keeps that head as it is: no turn, no scale."""
    x = torch.randn(100, HEAD, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    S = (x.T @ x / 100).repeat(3, 3).unflatten(1, (3, HEAD)).unflatten(0, (3, HEAD))
    P = torch.eye(HEAD, dtype=torch.float64).expand(3, HEAD, HEAD) * torch.tensor([1.0, 2.0, 5.0])[:, None, None]
    for method in METHODS:
        made = merge(S, P, method)
        torch.testing.assert_close(made.encode @ torch.eye(HEAD).double().repeat(3, 1), torch.eye(HEAD).double())


@pytest.mark.parametrize(("n", "groups"), [(8, 2), (6, 3), (8, 4)])
def test_groups_are_as_good_as_the_best_of_all_or_nearly(n, groups):
    for seed in range(10):
        points = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        cost = torch.cdist(points, points).square()
        total = lambda found: sum(float(cost[i, j]) for g in found for i, j in itertools.combinations(g, 2))  # noqa: E731, B023
        found = total(group_by_cost(cost, groups))
        best = min(total(split) for split in splits(tuple(range(n)), n // groups))
        assert best <= found + 1e-9 and found <= total(contiguous(n, groups)) and found <= 1.1 * best


def splits(heads, size):
    """All ways to split `heads` into groups of `size`."""
    if not heads:
        yield ()
        return
    for rest in itertools.combinations(heads[1:], size - 1):
        group = (heads[0], *rest)
        for others in splits(tuple(h for h in heads if h not in group), size):
            yield (group, *others)


def test_ridge_is_the_minimum_and_leaves_right_outputs_alone():
    generator = torch.Generator().manual_seed(0)
    Z, W, truth = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((200, 6), (4, 6), (4, 6)))
    Y = Z @ truth.T + 0.1 * torch.randn(200, 4, generator=generator)
    sums = Ridge.zeros(6, 4)
    for part in range(4):
        rows = slice(50 * part, 50 * part + 50)
        sums.add(Z[rows], (Y - Z @ W.T)[rows], Y[rows])
    found = sums.solve(0.01)
    pull = (0.01 * float((Z.T @ Z).diagonal().mean())) ** 0.5
    stacked = torch.linalg.lstsq(torch.cat([Z, pull * torch.eye(6)]), torch.cat([Y - Z @ W.T, torch.zeros(6, 4)]))
    torch.testing.assert_close(found.delta, stacked.solution.T)
    assert found.before == pytest.approx(float((Y - Z @ W.T).square().sum() / Y.square().sum()))
    assert found.after == pytest.approx(float((Y - Z @ (W + found.delta).T).square().sum() / Y.square().sum()))
    right = Ridge.zeros(6, 4)
    right.add(Z, torch.zeros(200, 4), Y)
    assert not bool(right.solve(0.01).delta.any())


# ---- whole models


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    return ids_file(tmp_path_factory.mktemp("ids") / "ids.jsonl", rows=4, length=130)


def convert(model, output, data, samples=4, length=LENGTH, **settings):
    calibration = {"data": str(data), "samples": samples, "length": length}
    return run({"model": str(model), "output": str(output), "steps": [{"gqa": settings}], "calibration": calibration})


def same_heads(tensors):
    """All key and value heads of every layer like its first one; heads of 8, 12 or 16 numbers, 2 or 8 of them."""
    made = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith((".k_proj.weight", ".k_proj.bias", ".v_proj.weight", ".v_proj.bias")):
            made[name] = as_the_first(tensor)
        elif name.endswith("self_attn.qkv_proj.weight"):  # Phi-3: 64 rows of q, 16 of k, 16 of v
            made[name] = torch.cat([tensor[:64], as_the_first(tensor[64:80]), as_the_first(tensor[80:])])
    return made


def as_the_first(rows):
    half = len(rows) // 2
    return torch.cat([rows[:half], rows[:half]])


QK_NORM = ("Q3", "G3", "QM", "W-gemma3")
CAN = ("L1", "PH", "L-llama3", "L-yarn", "MI", "Q2", "G1", "G2", "P3", "P3-partial", "P3-longrope", "MX", "W-mistral3")


@pytest.mark.parametrize("name", [*CAN, *QK_NORM])
def test_identical_heads_leave_the_logits_as_they_are_in_every_family(tmp_path, ids, name):
    """Two heads become one: biases, decoupled and partial RoPE, sliding windows, fused qkv, experts, wrappers."""
    directory = edit(make(name, tmp_path / "model"), same_heads)
    method = "mean" if name in QK_NORM else "pca"
    finished = convert(directory, tmp_path / "out", ids, kv_heads=1, method=method)
    (receipt,) = finished.manifest["receipts"]
    assert receipt["exact"] and receipt["max_logit_difference"] <= 1e-4 * receipt["largest_logit"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("text_config", config)["num_key_value_heads"] == 1
    assert finished.manifest["verification"]["missing"] == 0
    changed = {name for name, account in finished.manifest["inputs"].items() if account["action"] == "changed"}
    assert changed and all("self_attn" in name for name in changed)
    cache = finished.manifest["kv_cache"]
    assert cache["before"]["bytes_per_token"] == 2 * cache["after"]["bytes_per_token"]


@pytest.fixture(scope="module")
def mergeable(tmp_path_factory):
    """A float32 Qwen2 (biases on q, k and v) of 8 heads, pairs of which differ by maps that pca can undo."""
    directory = make("Q2", tmp_path_factory.mktemp("mergeable") / "model", "float32", num_key_value_heads=8)
    generator = torch.Generator().manual_seed(0)

    def plant(tensors):
        made = dict(tensors)
        for block in range(2):
            stem = f"model.layers.{block}.self_attn"
            k, v = (
                torch.cat([tensors[f"{stem}.{x}_proj.weight"], tensors[f"{stem}.{x}_proj.bias"][:, None]], 1)
                .unflatten(0, (8, 8))
                .double()
                for x in ("k", "v")
            )
            for head in range(1, 8, 2):
                a = torch.randn(4, generator=generator, dtype=torch.complex128)
                turned = a[:, None] * torch.complex(k[head - 1, :4], k[head - 1, 4:])
                k[head] = torch.cat([turned.real, turned.imag])
                v[head] = torch.randn(8, 8, generator=generator, dtype=torch.float64) @ v[head - 1]
            for x, heads in (("k", k), ("v", v)):
                flat = heads.flatten(0, 1).float()
                made[f"{stem}.{x}_proj.weight"], made[f"{stem}.{x}_proj.bias"] = flat[:, :-1], flat[:, -1]
        return made

    return edit(directory, plant)


def test_a_planted_mergeable_model_converts_exactly_at_positions_above_100(mergeable, tmp_path, ids):
    finished = convert(mergeable, tmp_path / "out", ids, length=120, kv_heads=4, method="pca")
    assert finished.manifest["receipts"][0]["exact"]
    loads = transformers.AutoModelForCausalLM.from_pretrained
    before, after = loads(mergeable).eval(), loads(tmp_path / "out").eval()
    tokens = some_ids(1, 126)
    with torch.no_grad():
        wanted, found = before(tokens).logits, after(tokens).logits
        assert float((wanted - found).abs().max()) < 1e-4 * float(wanted.abs().max())
        cache = cache_of(after(tokens[:, :100], use_cache=True))  # decoding equals the full forward
        steps = [go_on(after, tokens[:, t : t + 1], cache).logits for t in range(100, 126)]
    torch.testing.assert_close(torch.cat(steps, 1), found[:, 100:], rtol=0, atol=1e-4 * float(found.abs().max()))
    assert cache.layers[0].keys.shape == (1, 4, 126, 8)


def test_the_same_model_loses_by_mean_and_the_groups_are_found_among_shuffled_heads(mergeable, tmp_path, ids):
    pooled = convert(mergeable, tmp_path / "mean", ids, kv_heads=4, method="mean").manifest["receipts"][0]
    assert not pooled["exact"] and pooled["kl"] > 0.1
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # pairs are 0 4, 1 5, ...

    def shuffle(tensors):
        made = dict(tensors)
        for name, tensor in tensors.items():
            if name.endswith(
                ("q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias")
            ):
                made[name] = tensor.unflatten(0, (8, 8))[order].flatten(0, 1)
            elif name.endswith("o_proj.weight"):
                made[name] = tensor.unflatten(1, (8, 8))[:, order].flatten(1)
        return made

    shuffled = tmp_path / "shuffled"
    shuffled.mkdir()
    for file in mergeable.iterdir():
        (shuffled / file.name).write_bytes(file.read_bytes())
    edit(shuffled, shuffle)
    found = convert(shuffled, tmp_path / "out", ids, kv_heads=4, method="pca").manifest
    assert found["receipts"][0]["exact"]
    assert found["modules"]["model.layers.1.self_attn"]["groups"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    in_order = convert(shuffled, tmp_path / "order", ids, kv_heads=4, method="pca", grouping="contiguous").manifest
    assert not in_order["receipts"][0]["exact"]
    assert GQASettings(kv_heads=4, method="mean").grouped == "contiguous"  # published so: W_q and W_o stay as they are


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("L1", {"kv_heads": 2}, "kv_heads 2 is not fewer than the model's 2"),
        ("L0", {"kv_heads": 3}, "does not divide the model's 8.*1, 2, 4"),
        ("GP", {"kv_heads": 1}, "gpt2 cannot have fewer"),
        ("NX", {"kv_heads": 1}, "gpt_neox cannot have fewer"),
        ("DS", {"kv_heads": 1}, "deepseek_v3 cannot have fewer.*latent"),
        ("Q3", {"kv_heads": 1}, "method pca cannot be used with qwen3.*QK norms.*method: mean"),
        ("G3", {"kv_heads": 1, "method": "procrustes"}, "procrustes cannot be used with gemma3_text"),
        ("G2", {"kv_heads": 1, "refit": "stream"}, "stream cannot be used with gemma2.*refit: attention"),
        ("L1", {"kv_heads": 0}, "kv_heads"),
    ],
)
def test_what_cannot_be_converted_is_refused_before_anything_is_read(tmp_path, ids, name, settings, said):
    with pytest.raises(SutureError, match=said):
        convert(make(name, tmp_path / "model"), tmp_path / "out", ids, **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) in (["model"], ["ids", "model"])


def test_multi_query_models_are_refused_and_text_is_asked_for_when_needed(tmp_path, ids):
    single = make("L1", tmp_path / "model", num_key_value_heads=1)
    with pytest.raises(SutureError, match="one key-value head already"):
        convert(single, tmp_path / "out", ids, kv_heads=1)
    recipe = {"model": str(make("L1", tmp_path / "L1")), "output": str(tmp_path / "out")}
    with pytest.raises(SutureError, match="calibration: missing, but gqa needs text"):
        run(recipe | {"steps": [{"gqa": {"kv_heads": 1}}]})
    assert run(recipe | {"steps": [{"gqa": {"kv_heads": 1, "method": "mean"}}]}).manifest["calibration"] is None


@pytest.mark.parametrize("name", ["Q2", "Q3"])
def test_mean_pooling_is_the_mean_of_the_stored_heads_biases_and_qk_norms_included(tmp_path, ids, name):
    directory = make(name, tmp_path / "model")
    convert(directory, tmp_path / "out", ids, kv_heads=1, method="mean")
    before, after = read(directory), read(tmp_path / "out")
    for key in before:
        if "k_proj" in key or "v_proj" in key:  # two heads
            assert torch.equal(after[key], before[key].double().unflatten(0, (2, -1)).mean(0).to(torch.bfloat16))
        else:
            assert torch.equal(after[key], before[key])


@pytest.mark.parametrize("refit", ["attention", "stream"])
def test_the_refit_brings_the_outputs_nearer_and_changes_w_o_alone(tmp_path, ids, refit):
    directory = make("Q2", tmp_path / "model")
    plain = convert(directory, tmp_path / "plain", ids, kv_heads=1)
    fitted = convert(directory, tmp_path / "fitted", ids, kv_heads=1, refit=refit)
    for record in fitted.manifest["modules"].values():
        assert record["refit"]["missing_after"] < 0.9 * record["refit"]["missing_before"]
    assert fitted.manifest["receipts"][0]["kl"] < plain.manifest["receipts"][0]["kl"]
    before, after = read(tmp_path / "plain"), read(tmp_path / "fitted")
    first = {name for name in before if ".layers.0." in name and not torch.equal(before[name], after[name])}
    assert first == {"model.layers.0.self_attn.o_proj.weight"}


@pytest.mark.slow
def test_j1_killed_and_resumed_gives_the_same_bytes(tmp_path):
    tiny.llama(tmp_path / "model")
    tiny.ids_file(tmp_path / "ids.jsonl")
    steps = [
        {"gqa": {"kv_heads": 1, "refit": "stream", "grouping": "similar"}},
        {"gptq": {"bits": 4, "group_size": 32}},
    ]
    content = {"model": "model", "steps": steps, "output": "out"}
    content |= {"calibration": {"data": "ids.jsonl", "samples": 6, "length": 16}}
    content |= {"report": {"data": "ids.jsonl", "window": 16, "max_windows": 8}}
    path = tiny.recipe(tmp_path / "recipe.yaml", content)
    whole = warm.suture("run", path, "--output", tmp_path / "whole", cwd=tmp_path)
    assert whole.code == 0, whole.err
    killed = warm.suture("run", path, cwd=tmp_path, kill_after="step-1 block 1")
    assert killed.code == 137 and not (tmp_path / "out").exists()
    resumed = warm.suture("run", path, "--resume", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert tiny.contents(tmp_path / "out") == tiny.contents(tmp_path / "whole")
    manifest = json.loads((tmp_path / "out" / "suture.json").read_text())  # the chain, scored against the original
    assert manifest["modules"]["model.layers.2.self_attn"]["kv_heads"] == [2, 1]
    assert manifest["modules"]["model.layers.2.self_attn.q_proj"]["bits"] == 4
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["base"] == "model" or report["base"].endswith("/model")
    assert report["kv_cache"]["before"]["bytes_per_token"] == 3 * 2 * 2 * 8 * 2
    assert report["kv_cache"]["after"]["bytes_per_token"] == 3 * 2 * 1 * 8 * 2
    assert set(report["layers"]["by_method"]) == {"pca", "gptq"}
    assert np.isfinite(report["metrics"][0]["value"])
