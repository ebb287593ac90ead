"""MLA: what is exact is exact, the rest is what an independent computation gives, and stock transformers loads it all."""

import hashlib
import time
from types import SimpleNamespace
from unittest.mock import patch

import kit
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

import suture
from suture.checkpoint.errors import SutureError
from suture.pipeline import mla as shell
from suture.pipeline.plan import describe, make_plan
from suture.pipeline.recipe import make_recipe
from suture.pipeline.stock import cache_of, go_on
from suture.surgery.eps_pin import EPS, pin
from suture.surgery.latent import joint_latent
from suture.surgery.mla import Heads, MLASettings, folds_of

LONG = 120  # positions above 100: a wrong layout of rotary rows is right at the first tokens


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("mla")


@pytest.fixture(scope="module")
def text(home):
    return kit.ids_file(home / "text.jsonl", rows=8, length=96)


def recipe(model, output, text, *steps, **settings):
    content = {"model": str(model), "output": str(output), "steps": [{"mla": settings}, *steps]}
    return content | {"calibration": {"data": str(text), "samples": 8, "length": 96, "order": "sequential"}}


@pytest.fixture(scope="module")
def converted(home, text):
    """(kit model, its changes, settings) -> source directory, finished run; each made once."""
    known = {}

    def of(name, changes=None, dtype="float32", **settings):
        key = str((name, changes, dtype, settings))
        if key not in known:
            source = kit.make(name, home / f"source-{len(known)}", dtype, **(changes or {}))
            run = kit.run(recipe(source, home / f"output-{len(known)}", text, **settings))
            known[key] = SimpleNamespace(source=source, run=run, output=run.output, manifest=run.manifest)
        return known[key]

    return of


@torch.no_grad()
def logits(model, ids=None):
    return model(kit.some_ids(2, LONG) if ids is None else ids).logits


def close(found, expected, share=1e-5):
    return float((found - expected).abs().max()) <= share * float(expected.abs().max())


def kl(p, q):
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


MQA = {
    "L0": {"rms_norm_eps": 1e-5},
    "Q2": {},
    "L-llama3": {"mlp_bias": False},
    "L-yarn": {},
    "MI": {"sliding_window": 128},  # never cuts: the context is as long
}


@pytest.mark.parametrize("name", MQA)
def test_e9_mqa_becomes_mla_exactly_biases_and_every_rope_type_included(converted, name):
    dim = 12 if name in ("L-llama3", "MI") else 8
    made = converted(name, MQA[name] | {"num_key_value_heads": 1}, rank=dim, rope_dim=dim)
    receipt = made.manifest["receipts"][0]
    assert receipt["exact"] and receipt["max_logit_difference"] <= 1e-4 * receipt["largest_logit"]
    assert close(logits(kit.stock(made.output)), logits(kit.stock(made.source)), 2e-5)
    verification = made.manifest["verification"]
    assert verification["loaded_as"] == "DeepseekV3ForCausalLM"
    assert verification["missing"] == verification["unexpected"] == 0


@pytest.mark.parametrize(
    ("name", "settings", "kept"),
    [
        ("L1", {"method": "mha2mla", "rope_dim": 8, "rank": 24}, [0, 2]),
        ("Q2", {"method": "mha2mla", "rope_dim": 4, "rank": 28, "rope": "high", "metric": "two-sided"}, [0]),
        ("L1", {"method": "mha2mla", "rope_dim": 12, "rank": 20, "rope": "low", "metric": "balanced"}, [1, 2, 3]),
        ("L-yarn", {"method": "mha2mla", "rope_dim": 8, "rank": 24}, [0, 2]),
        ("MQA", {"rope_dim": 4, "rank": 12}, [0, 2]),
        ("MQA", {"rope_dim": 6, "rank": 10, "rope": "high", "method": "transmla"}, [0, 1, 2]),
        ("MQA", {"rope_dim": 4, "rank": 12, "rope": "low"}, [2, 3]),
    ],
)
def test_full_rank_equals_the_source_with_the_other_frequencies_stopped(converted, name, settings, kept):
    changes = {"num_key_value_heads": 1} if name == "MQA" else {}
    made = converted("Q2" if name == "MQA" else name, changes, **settings)
    reference = kit.stock(made.source)
    rotary = reference.model.rotary_emb
    factor = rotary.attention_scaling
    stopped = [f for f in range(4) if f not in kept]
    rotary.inv_freq[stopped] = 0.0
    assert factor == 1.0 or name == "L-yarn"  # YaRN's factor must reach the parts that do not rotate, too
    assert close(logits(kit.stock(made.output)), logits(reference), 2e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["L1", "Q2"])
def test_full_rank_equals_an_independent_partial_rope_with_mixed_heads(converted, text, name):
    made = converted(name, {"rms_norm_eps": 1e-5}, rank=28, rope_dim=4)
    source, output = kit.stock(made.source), kit.stock(made.output)
    plan = make_plan(make_recipe(recipe(made.source, "unused", text, rank=28, rope_dim=4)))
    ids = torch.from_numpy(plan.calibration.blocks.ids)
    calibrated = []  # inputs of each attention, as the conversion saw them
    linears = [layer.self_attn.q_proj for layer in source.model.layers]
    hooks = [linear.register_forward_pre_hook(lambda _, x: calibrated.append(x[0].flatten(0, 1))) for linear in linears]
    logits(source, ids)
    for hook in hooks:
        hook.remove()
    for layer, x in zip(source.model.layers, calibrated, strict=True):
        layer.self_attn.forward = _mixed(layer.self_attn, x, kept=(0, 2))
    assert close(logits(output), logits(source), 2e-5)


def _mixed(attention, x, kept):
    """Attention in which per kept frequency the leading mixture of the two KV heads rotates and nothing else does."""

    def pairs(z):
        return torch.complex(z[..., :4].double(), z[..., 4:].double())

    q = pairs(attention.q_proj(x).unflatten(-1, (2, 4, 8)))  # token, KV head, its reader, frequency
    k = pairs(attention.k_proj(x).unflatten(-1, (2, 8)))
    weight = (q.abs() ** 2).sum(2).mean(0).sqrt()
    mixture = torch.zeros(4, 2, 2, dtype=torch.complex128)  # frequency: k -> the part of k that rotates
    for f in kept:
        z = k[..., f] * weight[:, f]
        u = torch.linalg.eigh(z.T @ z.conj() / len(x))[1][:, -1]
        mixture[f] = torch.outer(u / weight[:, f], u.conj() * weight[:, f])

    def forward(hidden_states, position_embeddings, attention_mask, **_):
        b, t, _ = hidden_states.shape
        q = attention.q_proj(hidden_states).view(b, t, 8, 8).transpose(1, 2)
        k = attention.k_proj(hidden_states).view(b, t, 2, 8).transpose(1, 2)
        v = attention.v_proj(hidden_states).view(b, t, 2, 8).transpose(1, 2)
        rotates = torch.einsum("fij,bjtf->bitf", mixture, pairs(k))
        rotates = torch.cat([rotates.real, rotates.imag], -1).float()
        turned_q, turned_k = apply_rotary_pos_emb(q, rotates, *position_embeddings)
        scores = turned_q @ repeat_kv(turned_k, 4).mT + q @ repeat_kv(k - rotates, 4).mT
        scores = scores * 8**-0.5 + torch.full((t, t), -1e30).triu(1)
        out = (scores.softmax(-1) @ repeat_kv(v, 4)).transpose(1, 2).flatten(2)
        return attention.o_proj(out), None

    return forward


@pytest.mark.parametrize("name", ["L0", "Q2"])
def test_e1_heads_that_are_alike_convert_without_loss(home, text, name):
    """The planted case: 8 -> 1 or 2 -> 1 by mixing, nothing lost although the cache is an MQA's."""
    source = kit.make(name, home / f"alike-{name}", "float32")
    kit.edit(source, lambda tensors: {key: _alike(key, tensor) for key, tensor in tensors.items()})
    out = kit.run(recipe(source, home / f"alike-{name}-out", text, rank=8, rope_dim=8)).output
    assert close(logits(kit.stock(out)), logits(kit.stock(source)), 1e-4)


def _alike(name, tensor):
    if "k_proj" not in name and "v_proj" not in name:
        return tensor
    heads = tensor.unflatten(0, (-1, 8))
    return heads[:1].expand_as(heads).flatten(0, 1).contiguous()


class _Unpinned(torch.nn.Module):
    """What the pinned norm stands for."""

    def __init__(self, norm):
        super().__init__()
        self.register_buffer("factor", norm.weight.detach() / EPS**0.5)

    def forward(self, c):
        return c * self.factor


@torch.no_grad()
@pytest.mark.parametrize("name", ["L1", "Q2"])
def test_the_pinned_norm_is_a_multiplication_in_float32_and_in_bfloat16(converted, name):
    made = converted(name, {"rms_norm_eps": 1e-5}, rank=16, rope_dim=4)
    pinned = kit.stock(made.output)
    expected = logits(pinned)
    short = logits(kit.stock(made.output, torch.bfloat16)).float()
    plain = kit.stock(made.output)
    for layer in plain.model.layers:
        layer.self_attn.kv_a_layernorm = _Unpinned(layer.self_attn.kv_a_layernorm)
        if name == "Q2":
            layer.self_attn.q_a_layernorm = _Unpinned(layer.self_attn.q_a_layernorm)
    assert float((expected - logits(plain)).abs().max()) <= 1e-5
    noise = kl(expected, logits(plain.bfloat16()).float())
    assert kl(expected, short) <= 1.5 * noise + 1e-4
    assert not close(short, expected, 1e-4)  # bfloat16 was really used


def test_the_pin_holds_for_any_input_of_the_norm_before():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(16, 64, generator=generator, dtype=torch.float64) * 50
    gain = torch.rand(64, generator=generator, dtype=torch.float64) * 3
    bias = torch.randn(16, generator=generator, dtype=torch.float64)
    made = pin(rows, bias, gain)
    worst = torch.linalg.svd(rows * gain)[2][0] * 8  # the input of norm sqrt(64) that the rows amplify most
    c = (rows * gain) @ worst + bias
    assert float((c * made.down).square().mean()) <= 2**-24 * EPS
    assert made.down * made.gain * made.up == pytest.approx(EPS**0.5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["L1", "Q2"])
def test_decoding_with_the_cache_is_the_full_forward_and_the_cache_is_latent(converted, name):
    model = kit.stock(converted(name, {"rms_norm_eps": 1e-5}, rank=16, rope_dim=4).output)
    ids = kit.some_ids(1, LONG)
    full = logits(model, ids)
    first = model(ids[:, :100], use_cache=True)
    cache, steps = cache_of(first), [first.logits]
    for t in range(100, LONG):
        steps.append(go_on(model, ids[:, t : t + 1], cache).logits)
    assert close(torch.cat(steps, 1), full, 2e-5)
    assert {tuple(x.shape) for layer in cache.layers for x in (layer.keys, layer.values)} == {
        (1, 1, LONG, 16),
        (1, 1, LONG, 4),
    }
    texts = [
        model.generate(ids[:, :40], max_new_tokens=24, do_sample=False, use_cache=use, eos_token_id=None)
        for use in (True, False)
    ]
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Q3", {}, "QK norm"),
        ("QM", {}, "mixture of experts"),
        ("MX", {}, "mixture of experts"),
        ("G1", {}, "1 + w norms"),
        ("G2", {}, "soft caps"),
        ("G3", {}, "QK norm"),
        ("P3", {}, "fused projections"),
        ("GP", {}, "a gpt2 block"),
        ("NX", {}, "a gpt_neox block"),
        ("MI", {}, "sliding window of 8"),
        ("DS", {}, "MLA already"),
        ("L-llama3", {}, "MLP bias"),
        ("L1", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic"),
        ("L1", {"hidden_act": "gelu"}, "activation gelu"),
        ("W-gemma3", {}, "vision wrapper"),
    ],
)
def test_e4_what_no_stock_class_has_is_refused_from_names_and_shapes(tmp_path, name, changes, reason):
    source = kit.make(name, tmp_path / "model", **changes)
    with pytest.raises(SutureError, match="mla: ") as caught:
        make_plan(make_recipe(recipe(source, tmp_path / "out", "builtin:novels", rank=8, rope_dim=8)))
    assert reason in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_float16_is_refused_and_another_dtype_is_the_way_out(home, text):
    source = kit.make("L1", home / "half", "float16", num_key_value_heads=1)
    with pytest.raises(SutureError, match="float16"):
        make_plan(make_recipe(recipe(source, home / "half-out", text, rank=8, rope_dim=8)))
    run = kit.run(recipe(source, home / "half-out", text, rank=8, rope_dim=8, dtype="float32"))
    assert close(logits(kit.stock(run.output)), logits(kit.stock(source)), 2e-5)
    assert {spec["dtype"] for spec in run.manifest["outputs"].values()} == {"F32"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 25, "rope_dim": 8}, "more than full rank: 24"),
        ({"rank": 8, "rope_dim": 10}, "more than the 8 dimensions"),
        ({"rank": 8, "rope_dim": 3}, "come in pairs"),
        ({"rank": 8, "rope_dim": 6}, "every k-th of 4 frequencies"),
        ({"rank": 8, "rope_dim": 4, "fold": 3}, "does not fit"),
        ({"rank": 8, "rope_dim": 4, "fold": 2, "method": "mha2mla"}, "mixes no frequencies"),
        ({"rank": 8, "rope_dim": 6, "method": "mha2mla"}, "in whole pairs"),
    ],
)
def test_e9_sizes_that_cannot_be_are_refused(settings, message):
    with pytest.raises(SutureError, match=message):
        folds_of(MLASettings(**settings), Heads(heads=8, kv_heads=2, dim=8, width=64))


def test_every_tensor_has_an_account_and_the_matrix_is_in_plan_and_manifest(converted, text):
    made = converted("Q2", {"rms_norm_eps": 1e-5}, rank=16, rope_dim=4)
    inputs = made.manifest["inputs"]
    assert inputs["model.norm.weight"]["action"] == "copied"
    assert inputs["model.embed_tokens.weight"]["outputs"] == ("model.embed_tokens.weight", "lm_head.weight")
    assert inputs["model.layers.0.self_attn.o_proj.weight"]["action"] == "copied"
    assert "model.layers.0.self_attn.o_proj.bias" in inputs["model.layers.0.self_attn.v_proj.bias"]["outputs"]
    matrix = made.manifest["receipts"][0]["portability"]
    plan = describe(make_plan(make_recipe(recipe(made.source, "unused", text, rank=16, rope_dim=4))))
    assert plan["steps"][0]["portability"] == matrix
    biases = next(row for row in matrix if row["feature"].startswith("biases"))
    assert biases["transformers"] == "exact" and biases["vllm"].startswith("refused")
    scaled = converted("L-yarn", rank=24, rope_dim=8, method="mha2mla").manifest["receipts"][0]["portability"]
    assert next(row for row in scaled if row["feature"].startswith("rope"))["vllm"].startswith("refused")
    record = made.manifest["modules"]["model.layers.1.self_attn"]
    assert 0 < record["key_energy"] < 1 and 0 < record["value_energy"] < 1 and 0 < record["rotary_energy"] < 1
    config = suture.open_checkpoint(made.output).config
    assert config["rms_norm_eps"] == 1e-6 and config["first_k_dense_replace"] == 2 and "auto_map" not in config


def test_the_latent_is_the_best_of_its_rank_from_either_side():
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    y, root = draw(2, 3, 4, 16), draw(2, 3, 4, 4)
    metric = root @ root.mT
    x = draw(16, 200) * torch.logspace(0, -2, 16, dtype=torch.float64)[:, None]
    c = x @ x.T / 200
    half = torch.linalg.cholesky(metric).mT
    target = (half @ y).flatten(0, 2) @ torch.linalg.cholesky(c)
    tail = float(torch.linalg.svdvals(target)[6:].square().sum())
    for wide in (False, True):  # fewer rows than inputs, and more
        source, moment = (y, c) if not wide else (y[..., :12], c[:12, :12])
        made = joint_latent(source, moment, metric, 6)
        error = (half @ (source - made.decoder @ made.encoder)).flatten(0, 2)
        found = float(((error @ moment) * error).sum())
        chol = (half @ source).flatten(0, 2) @ torch.linalg.cholesky(moment)
        tail = float(torch.linalg.svdvals(chol)[6:].square().sum())
        assert found == pytest.approx(tail, rel=1e-6)


def test_a_chain_to_gptq_keeps_the_latents_projection_and_loads(home, text):
    source = kit.make("L1", home / "chain", "bfloat16")
    content = recipe(source, home / "chain-out", text, {"gptq": {"group_size": 16}}, rank=16, rope_dim=8)
    run = kit.run(content | {"report": {"data": str(text), "window": 32}})
    assert run.manifest["verification"]["loaded_as"] == "DeepseekV3ForCausalLM"
    assert all("kv_a_proj_with_mqa" in name for name in run.manifest["skipped_layers"])
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in run.manifest["outputs"]
    assert run.report.perplexity.ratio > 0
    assert run.manifest["modules"]["model.layers.0.self_attn"]["method"] == "mla complex"


def test_j1_killed_after_a_block_it_resumes_to_the_same_bytes(home, text, converted):
    settings = {"rank": 16, "rope_dim": 4}
    made = converted("Q2", {"rms_norm_eps": 1e-5}, **settings)
    real = shell._convert_block

    def dies(before, index, *args):
        if index == 1:
            journal = home / "resumed.partial/work/journal.jsonl"
            while '"block": 0' not in journal.read_text():  # it is written while the next block computes
                time.sleep(0.01)
            raise KeyboardInterrupt
        return real(before, index, *args)

    content = recipe(made.source, home / "resumed", text, **settings)
    plan = make_recipe(content)
    with patch.object(shell, "_convert_block", dies), pytest.raises(KeyboardInterrupt):
        kit.run(plan)
    seen = []
    with patch.object(
        shell, "_convert_block", lambda before, index, *args: (seen.append(index), real(before, index, *args))[1]
    ):
        resumed = kit.run(plan, resume=True).output
    assert seen == [1]
    assert _hashes(resumed) == _hashes(made.output)


def _hashes(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}
