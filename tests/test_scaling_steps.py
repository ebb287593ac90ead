"""The steps awq and smoothquant from checkpoint to files: records, exactness, what a stock loader computes of them."""

import json

import pytest
import torch
from kit import LENGTH, edit, fuse_experts, ids_file, make, quantize, read, some_ids, stock

from suture.calibrate.activations import static_scale, through_integers
from suture.calibrate.replay import Stream, run_block
from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline.recipe import make_recipe
from suture.pipeline.verify import reload_here
from suture.quant.decode import dense_view, open_decoded
from suture.quant.smoothquant import ALPHAS

AWQ = {"bits": 4, "group_size": 8, "grid": 2}
EXPERTS = {"MX": 4, "QM": 8}


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    return ids_file(tmp_path_factory.mktemp("ids") / "ids.jsonl", rows=6, length=70)


def logits(skeleton, ids):
    """By the replay, from whatever the skeleton's source holds."""
    stream = Stream.start(skeleton, [ids])
    for index in range(skeleton.n_blocks):
        skeleton.load_block(index)
        run_block(skeleton, index, stream)
        skeleton.free_block(index)
    skeleton.load_head()
    return skeleton.logits(stream.hidden[0], torch.arange(ids.shape[1]))


def error(directory, base, ids):
    """Relative error of a written model's logits."""
    wanted = logits(open_skeleton(open_checkpoint(base)), ids)
    found = logits(open_decoded(open_checkpoint(directory)), ids)
    return float((found - wanted).norm() / wanted.norm())


def assert_sound(done):
    manifest = done.manifest
    assert manifest["verification"]["missing"] == 0
    assert manifest["verification"]["max_difference"] <= 1e-5 * manifest["verification"]["largest_logit"]
    (receipt,) = manifest["receipts"]
    assert receipt["exact"] and receipt["max_logit_difference"] <= 1e-4 * receipt["largest_logit"]
    assert all(block["max_difference"] <= 1e-4 * block["largest"] for block in receipt["blocks"].values())
    return receipt


# ---- AWQ


@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        ("L-llama3", "rtn"),
        ("G2", "gptq"),
        ("P3", "rtn"),
        ("GP", "rtn"),
        ("NX", "gptq"),
        ("FA", "rtn"),
        ("FA-new", "gptq"),
        ("QM", "rtn"),
        ("DS-q-lora", "rtn"),
    ],
)
def test_d13_awq_records_each_place_and_stock_transformers_loads_the_result(shelf, ids, tmp_path, name, rounding):
    done = quantize(shelf(name), tmp_path / "out", "awq", data=ids, rounding=rounding, **AWQ)
    receipt, manifest = assert_sound(done), done.manifest
    assert receipt["folds"] and any(record["scaled"] != "none" for record in receipt["folds"].values())
    for place, record in receipt["folds"].items():
        assert record["error"] <= record["error_unscaled"], place
        assert 0 < record["factors"][0] <= record["factors"][1] < 1e4
    methods = {record["method"] for record in manifest["modules"].values()}
    assert f"awq+{rounding}" in methods and methods <= {f"awq+{rounding}", rounding}
    for record in manifest["modules"].values():
        assert record["tokens"] > 0 and record["output_error"] is not None and record["fallback"] is None
    before, after = open_checkpoint(shelf(name)), open_checkpoint(tmp_path / "out")
    changed = [tensor for tensor, account in manifest["inputs"].items() if account["action"] == "changed"]
    for tensor, account in manifest["inputs"].items():
        if account["action"] == "copied":
            assert after.read_bytes(tensor) == before.read_bytes(tensor)
    norms = [tensor for tensor in changed if "norm" in tensor or "ln_" in tensor]
    assert norms and all(after.dtypes[tensor] == before.dtypes[tensor] for tensor in norms)
    assert any(after.read_bytes(tensor) != before.read_bytes(tensor) for tensor in norms)


def test_d13_what_a_norm_lost_its_readers_hold(shelf, ids, tmp_path):
    """From the files alone: gain x weight is what it was, up to rounding."""
    quantize(shelf("G1"), tmp_path / "out", "awq", data=ids, **AWQ)
    before, after = read(shelf("G1")), dense_view(open_checkpoint(tmp_path / "out"))
    for norm, reader in (("input_layernorm", "self_attn.k_proj"), ("post_attention_layernorm", "mlp.up_proj")):
        names = [f"model.layers.1.{part}.weight" for part in (norm, reader)]
        old = (1 + before[names[0]].float()) * before[names[1]].float()
        new = (1 + after.read(names[0]).float()) * after.read(names[1]).float()
        assert 0.01 < float((old - new).norm() / old.norm()) < 0.2


@pytest.mark.parametrize("name", ["MX"])
def test_d6_experts_fused_on_disk_and_their_router_are_scaled_alike(shelf, ids, tmp_path, name):
    fused = edit(make(name, tmp_path / "m"), fuse_experts)
    apart = quantize(shelf(name), tmp_path / "apart", "awq", data=ids, **AWQ)
    together = quantize(fused, tmp_path / "together", "awq", data=ids, **AWQ)
    assert assert_sound(together)["folds"] == assert_sound(apart)["folds"]
    left, right = read(tmp_path / "apart"), read(tmp_path / "together")
    packed = [key for key in left if ".weight_" in key]
    assert all(torch.equal(left[key], right[key]) for key in packed)
    router = "model.layers.1.mlp.gate.weight"
    assert not torch.equal(right[router], read(fused)[router])


def planted(tensors, columns=(3, 17, 40), factor=100.0):
    """The same function, with some channels of the norms' outputs far larger: through norm and weights."""
    made = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            made[name] = tensor.clone()
            made[name][list(columns)] *= factor
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            made[name] = tensor.clone()
            made[name][:, list(columns)] /= factor
    return made


def test_awq_costs_no_more_than_rounding_and_less_where_channels_differ(shelf, ids, tmp_path):
    held_out = some_ids(4, seed=1)
    found = {}
    for label, model in (
        ("plain", shelf("L1")),
        ("planted", edit(make("L1", tmp_path / "m"), lambda t: planted(t, factor=8))),
    ):
        for method in ("rtn", "awq"):
            settings = {"bits": 4, "group_size": 16} | ({"data": ids} if method == "awq" else {})
            quantize(model, tmp_path / f"{label}-{method}", method, **settings)
            found[label, method] = error(tmp_path / f"{label}-{method}", model, held_out)
    assert found["plain", "awq"] <= 1.05 * found["plain", "rtn"]
    assert found["planted", "awq"] <= 0.8 * found["planted", "rtn"]


def test_c4_an_expert_without_tokens_is_rounded_and_recorded(ids, tmp_path):
    from test_families_end_to_end import silence_expert

    model = edit(make("QM", tmp_path / "m"), silence_expert)
    done = quantize(model, tmp_path / "out", "awq", data=ids, **AWQ)
    silent = {f"model.layers.1.mlp.experts.7.{p}_proj" for p in ("gate", "up", "down")}
    assert done.fallbacks == dict.fromkeys(silent, "no calibration token reached it")
    assert_sound(done)


def test_d7_what_makes_the_inputs_of_a_quantized_layer_is_written_scaled_with_its_bias(shelf, ids, tmp_path):
    done = quantize(shelf("L-llama3"), tmp_path / "out", "awq", data=ids, targets=["o_proj", "1.mlp.down_proj"], **AWQ)
    folds = {place.split(" -> ")[0]: record["scaled"] for place, record in assert_sound(done)["folds"].items()}
    assert set(folds.values()) != {"none"}
    changed = {name for name, account in done.manifest["inputs"].items() if account["action"] == "changed"}
    ends = ["0.self_attn.o_proj.weight", "1.self_attn.o_proj.weight", "1.mlp.down_proj.weight"]
    ends += [f"{i}.self_attn.v_proj.{leaf}" for i in (0, 1) for leaf in ("weight", "bias")]
    ends += [f"1.mlp.up_proj.{leaf}" for leaf in ("weight", "bias")]
    assert changed == {f"model.layers.{end}" for end in ends}
    before, after = read(shelf("L-llama3")), read(tmp_path / "out")
    for name in changed & set(after):
        assert torch.equal(after[name], before[name]) == (folds[name.rsplit(".", 1)[0]] == "none")
        kept = (after[name].float() / before[name].float()).view(len(before[name]), -1)
        assert float((kept / kept.median(1, keepdim=True).values - 1).abs().max()) < 2**-7  # one factor per output


def test_rules_give_scaled_layers_their_formats(shelf, ids, tmp_path):
    rules = [{"match": "down_proj", "bits": 8, "group_size": 16}]
    done = quantize(shelf("L1"), tmp_path / "out", "awq", data=ids, rules=rules, **AWQ)
    assert_sound(done)
    bits = {record["bits"] for name, record in done.manifest["modules"].items() if name.endswith("down_proj")}
    assert bits == {8}


# ---- 8-bit inputs


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("L-llama3", {}),
        ("L1", {"activations": "static", "rounding": "gptq"}),
        ("G2", {"activations": "static"}),
        ("P3", {"alpha": 0.8}),
        ("NX", {"rounding": "gptq"}),
        ("DS", {"activations": "static", "alpha": "none"}),
        ("DS", {}),
    ],
)
def test_d13_stock_transformers_computes_what_was_computed_in_memory_inputs_rounded(
    shelf, ids, tmp_path, name, settings
):
    done = quantize(shelf(name), tmp_path / "out", "smoothquant", data=ids, **settings)
    manifest = done.manifest
    if settings.get("alpha") != "none":
        assert_sound(done)
    assert manifest["verification"]["max_difference"] <= 1e-5 * manifest["verification"]["largest_logit"]
    checkpoint, tokens = open_checkpoint(tmp_path / "out"), some_ids()
    rounded = logits(open_decoded(checkpoint), tokens)
    weights_alone = logits(open_skeleton(dense_view(checkpoint)), tokens)
    found = reload_here(tmp_path / "out", tokens)["logits"]
    difference, effect = float((found - rounded).abs().max()), float((found - weights_alone).abs().max())
    assert difference <= 1e-5 * float(found.abs().max())
    assert effect > 100 * difference and effect > 1e-3 * float(found.abs().max())
    static = settings.get("activations") == "static"
    group = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    assert group["input_activations"]["dynamic"] is not static
    for module, record in manifest["modules"].items():
        assert checkpoint.dtypes[f"{module}.weight"] == "I8" and record["input_bits"] == 8
        assert record["inputs"]["max"] > 0 and record["inputs"]["peak_ratio"] >= 1
        assert (record["input_scale"] is not None) == static == (f"{module}.input_scale" in checkpoint.tensors)
        if static:
            scale = static_scale(record["inputs"]["max_scaled"], torch.bfloat16)
            assert float(checkpoint.read(f"{module}.input_scale")) == record["input_scale"]
            assert record["input_scale"] == pytest.approx(float(scale), rel=1e-2)
    if name == "DS":
        kept = [layer for layer in manifest["skipped_layers"] if layer.endswith("kv_b_proj")]
        assert len(kept) == (0 if static else 2) and all("4-D" in manifest["skipped_layers"][layer] for layer in kept)
    assert len(manifest["receipts"][0]["widest_inputs"]) == min(10, len(manifest["modules"]))


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_d12_smoothing_beats_plain_rounding_where_activations_have_outliers(ids, tmp_path, activations):
    model, held_out = edit(make("L1", tmp_path / "m"), planted), some_ids(4, seed=1)
    found = {}
    for alpha in ("none", "auto", 0.5) if activations == "static" else ("none", "auto"):
        out = tmp_path / str(alpha)
        done = quantize(model, out, "smoothquant", data=ids, activations=activations, alpha=alpha)
        found[alpha] = error(out, model, held_out)
        modules = done.manifest["modules"].items()
        peaks = {n: r["inputs"] for n, r in modules if n.endswith(("q_proj", "gate_proj")) and "inputs" in r}
        assert peaks or (alpha, activations) == ("none", "dynamic")
        assert all(peak["peak_ratio"] > 30 for peak in peaks.values())
        if alpha == 0.5:
            assert all(peak["peak_ratio_scaled"] < 0.2 * peak["peak_ratio"] for peak in peaks.values())
    assert all(found[alpha] < 0.5 * found["none"] for alpha in found if alpha != "none")


def test_8_bit_inputs_without_smoothing_or_static_scales_need_no_text(shelf, tmp_path):
    done = quantize(shelf("L1"), tmp_path / "out", "smoothquant", alpha="none")
    assert {record["method"] for record in done.manifest["modules"].values()} == {"rtn"}
    assert done.manifest["verification"]["max_difference"] <= 1e-5 * done.manifest["verification"]["largest_logit"]
    assert all(a["action"] == "copied" for n, a in done.manifest["inputs"].items() if "norm" in n)
    again = stock(tmp_path / "out")
    assert again(some_ids()).logits.shape == (2, LENGTH, 320)


def test_d12_the_arithmetic_of_inputs_is_the_loaders():
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = torch.randn(3, 7, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)
    x[0, 0] = 0
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(2, 2))
    assert torch.equal(through_integers(x), fake_quantize(x, scale, zero, args))
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="tensor")
    scale = static_scale(500.0, torch.bfloat16).float()
    assert torch.equal(through_integers(x, scale), fake_quantize(x, scale, None, args))


# ---- refusals


@pytest.mark.parametrize("name", ["MX", "QM", "GP"])
def test_8_bit_inputs_are_refused_where_a_loader_would_not_round_them(shelf, tmp_path, name):
    with pytest.raises(SutureError, match="8-bit inputs are not possible for"):
        quantize(shelf(name), tmp_path / "out", "smoothquant", alpha="none")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"awq": {"damp": 0.1}}, "damp: belongs to rounding: gptq"),
        ({"smoothquant": {"hessian": "float64"}}, "hessian: belongs to rounding: gptq"),
        ({"smoothquant": {"alpha": 1.5}}, r"alpha: 1.5 is outside 0..1"),
        ({"smoothquant": {"alpha": 0.5, "search_tokens": 64}}, "search_tokens: belongs to alpha: auto"),
        ({"smoothquant": {"bits": 4}}, "unknown key"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(step, message):
    with pytest.raises(SutureError, match=message):
        make_recipe({"model": "m", "output": "o", "steps": [step]})


def test_awq_at_2_bits_comes_with_a_warning(shelf, ids, tmp_path):
    done = quantize(shelf("L0"), tmp_path / "out", "awq", data=ids, bits=2, group_size=8, grid=1)
    assert any("awq at 2 bits" in note for note in done.manifest["notes"])


def test_the_alphas_tried_hold_the_usual_ones():
    assert {0.5, 0.8, 0.85, 0.9, 1.0} <= set(ALPHAS)
