"""Steps that copy tensors under other names, dtypes, files or settings."""

import json
import math

import pytest
import torch
import transformers
from kit import edit, ids_file, make, read, run, some_ids, stock

from suture.checkpoint.errors import SutureError
from suture.surgery.rope_scaling import RopeScalingSettings, frequencies


@torch.no_grad()
def logits(directory, ids=None):
    return stock(directory)(some_ids() if ids is None else ids).logits


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


def receipt(done):
    return done.manifest["receipts"][-1]


# -- cast and reshard


@pytest.mark.parametrize("name", ["L2", "MX", "W-gemma3"])
def test_casting_wider_and_back_restores_every_bit(shelf, tmp_path, name):
    source = shelf(name)
    wide = run({"model": str(source), "output": str(tmp_path / "w"), "steps": [{"cast": {"dtype": "float32"}}]})
    assert receipt(wide)["exact"] and receipt(wide)["changed"] == 0 and receipt(wide)["max_logit_difference"] == 0
    assert {tensor.dtype for tensor in read(wide.output).values()} == {torch.float32}
    assert transformers.AutoConfig.from_pretrained(wide.output).dtype == torch.float32
    back = run({"model": str(wide.output), "output": str(tmp_path / "b"), "steps": [{"cast": {"dtype": "bfloat16"}}]})
    before, after = read(source), read(back.output)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert receipt(back)["share_changed"] == 0


def test_casting_narrower_counts_what_changes_and_what_is_lost(apply, tmp_path):
    def small(tensors):
        tensors["model.norm.weight"][:4] = 1e-9
        return tensors

    model = edit(make("L1", tmp_path / "m", "float32"), small)
    source, done = apply("L1", {"cast": {"dtype": "float16"}}, model=model)
    before, after = read(source), read(done.output)
    changed = sum(int((after[key].double() != before[key].double()).sum()) for key in before)
    assert receipt(done)["changed"] == changed > 1000 and receipt(done)["became_zero"] == 4
    assert receipt(done)["values"] == sum(tensor.numel() for tensor in before.values())
    assert receipt(done)["largest_relative_change"] == 1.0 and receipt(done)["kl"] > 0
    assert all(torch.equal(after[key], before[key].half()) for key in before)


def test_b17_a25_what_float16_cannot_hold_is_refused_by_name(apply, tmp_path):
    def hot(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 7e4
        return tensors

    model = edit(make("L1", tmp_path / "m", "float32"), hot)
    with pytest.raises(SutureError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: values up to 7e\+04 do not fit"):
        apply("L1", {"cast": {"dtype": "float16"}}, model=model)


def test_casting_to_what_it_is_is_refused(shelf, tmp_path):
    with pytest.raises(SutureError, match="cast: every tensor is bfloat16 already"):
        run({"model": str(shelf("L1")), "output": str(tmp_path / "o"), "steps": [{"cast": {"dtype": "bfloat16"}}]})


def test_resharding_moves_bytes_and_nothing_else(apply):
    source, done = apply("L1", {"reshard": {"max_shard_size": "100KB"}})
    files = sorted(done.output.glob("model-*.safetensors"))
    assert len(files) == receipt(done)["files"] > 3
    before, after = read(source), read(done.output)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert receipt(done)["exact"] and receipt(done)["max_logit_difference"] == 0
    with pytest.raises(SutureError, match="expected bytes, or a number with KB"):
        apply("L1", {"reshard": {"max_shard_size": "2 parsecs"}})


# -- retie


@pytest.mark.parametrize("name", ["L2", "GP", "G2"])
def test_f1_untie_and_retie_give_back_the_model(apply, name):
    source, done = apply(name, {"untie": {}}, {"retie": {}})
    before, after = read(source), read(done.output)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert config_of(done.output)["tie_word_embeddings"] is True
    assert receipt(done)["exact"] and receipt(done)["max_logit_difference"] == 0


def test_f1_retying_what_differs_is_refused_with_the_difference(apply, shelf, tmp_path):
    with pytest.raises(
        SutureError, match=r"retie: lm_head.weight and model.embed_tokens.weight differ in \d+ of 20480"
    ):
        apply("L1", {"retie": {}})
    with pytest.raises(SutureError, match="retie: this model's head is tied"):
        apply("L2", {"retie": {}})


# -- layers


def renamed(tensors, order, prefix="model.layers."):
    """What the tensors should be for layers in `order`, the others as they are."""
    result = {key: tensor for key, tensor in tensors.items() if not key.startswith(prefix)}
    for position, old in enumerate(order):
        for key, tensor in tensors.items():
            if key.startswith(f"{prefix}{old}."):
                result[f"{prefix}{position}.{key.removeprefix(f'{prefix}{old}.')}"] = tensor
    return result


@torch.no_grad()
def reference(directory, order):
    """Logits of the stock model whose blocks were rearranged in memory."""
    model = stock(directory)
    backbone = model.model if hasattr(model, "model") else model.transformer
    kind = "layers" if hasattr(backbone, "layers") else "h"
    layers = getattr(backbone, kind)
    setattr(backbone, kind, torch.nn.ModuleList([layers[i] for i in order]))
    model.config.num_hidden_layers = len(order)
    types = getattr(model.config, "layer_types", None)
    if types is not None:
        model.config.layer_types = [types[i] for i in order]
    return model(some_ids(), use_cache=False).logits


SWITCHED = ("L1", "Q2", "G2", "G3", "GP", "DS", "QM")


@pytest.mark.parametrize("name", SWITCHED)
def test_b11_layers_in_another_order_bring_their_settings(apply, name):
    """Sliding windows, rotary bases and dense blocks go where their layer goes."""
    order = [1, 0, 1]
    source, done = apply(name, {"layers": {"order": order}})
    prefix = "transformer.h." if name == "GP" else "model.layers."
    expected, after = renamed(read(source), order, prefix), read(done.output)
    assert expected.keys() == after.keys() and all(torch.equal(expected[key], after[key]) for key in expected)
    assert torch.allclose(logits(done.output), reference(source, order), atol=1e-4, rtol=1e-4)
    config = config_of(done.output)
    assert config["n_layer" if name == "GP" else "num_hidden_layers"] == 3
    if name in ("G2", "G3"):
        assert config["layer_types"] == ["full_attention", "sliding_attention", "full_attention"]
    if name == "QM":
        assert config["mlp_only_layers"] == [1]
    if name == "DS":
        assert config["first_k_dense_replace"] == 3
    accounts = done.manifest["inputs"]
    assert accounts[f"{prefix}1.{next(k for k in read(source) if k.startswith(prefix + '1.')).split('.', 3)[3]}"][
        "reason"
    ].startswith("its layer comes 2 times")


@pytest.mark.parametrize("name", ["L1", "QM", "G3"])
def test_dropped_layers_are_accounted_for(apply, name):
    source, done = apply(name, {"layers": {"drop": [0]}})
    assert torch.allclose(logits(done.output), reference(source, [1]), atol=1e-4, rtol=1e-4)
    dropped = {key for key, account in done.manifest["inputs"].items() if account["action"] == "dropped"}
    assert dropped == {key for key in read(source) if key.startswith("model.layers.0.")}
    assert receipt(done)["order"] == [1] and receipt(done)["kl"] > 0.01


def test_layers_that_window_lists_name_follow(tmp_path, apply):
    """Qwen2 slides from max_window_layers on; the derived list of kinds is written out when it matters."""
    model = make("Q2", tmp_path / "m", "float32", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    edit(model, layer_types=None)
    source, done = apply("Q2", {"layers": {"order": [1, 0]}}, model=model)
    assert config_of(done.output)["layer_types"] == ["sliding_attention", "full_attention"]
    assert torch.allclose(logits(done.output), reference(source, [1, 0]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["L-llama3", "G2", "NX", "FA-new", "MX", "GP"])
def test_silent_copies_leave_the_function(apply, name):
    source, done = apply(name, {"layers": {"repeat": [0, 1], "silent_copies": True}})
    assert receipt(done)["exact"] and done.manifest["verification"]["of_blocks"] == 4
    assert torch.allclose(logits(done.output), logits(source), atol=1e-4, rtol=1e-4)


def test_least_influential_layers_are_found_and_dropped(apply, tmp_path):
    """A layer that writes next to nothing has no influence, and is the one that goes."""

    def quiet(tensors):
        for key in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.0.{key}.weight"] *= 1e-4
        return tensors

    model = edit(make("L1", tmp_path / "m", "float32"), quiet)
    text = {"data": str(ids_file(tmp_path / "ids.jsonl")), "samples": 4, "length": 24, "order": "sequential"}
    source, done = apply("L1", {"layers": {"drop_least": 1}}, model=model, calibration=text)
    scores = receipt(done)["block_influence"]
    assert receipt(done)["dropped"] == [0] and scores[0] < 1e-4 < 0.05 < scores[1]
    assert receipt(done)["kl"] < 1e-2
    assert "dropped" in {account["action"] for account in done.manifest["inputs"].values()}
    assert not any(account["action"] == "dropped" for key, account in done.manifest["inputs"].items() if ".1." in key)
    flat = torch.tensor(text_ids(tmp_path / "ids.jsonl")).flatten()[: 4 * 23].reshape(4, 23)
    blocks = torch.cat([torch.full((4, 1), 256), flat], 1)  # each block begins with BOS
    with torch.no_grad():
        seen = stock(source)(blocks, output_hidden_states=True).hidden_states
    assert scores[0] == pytest.approx(float((1 - torch.cosine_similarity(seen[0], seen[1], dim=-1)).mean()), abs=2e-6)


def text_ids(path):
    return [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]


def test_what_is_dropped_reaches_the_steps_after(apply, tmp_path):
    """What data decided is planned anew for them."""
    text = {"data": str(ids_file(tmp_path / "ids.jsonl")), "samples": 4, "length": 24}
    steps = [{"layers": {"drop_least": 1}}, {"rtn": {"bits": 8, "group_size": 16}}]
    _, done = apply("G3", *steps, calibration=text)
    kept = done.manifest["receipts"][0]["order"]
    kinds = ["sliding_attention", "full_attention"]
    assert config_of(done.output)["layer_types"] == [kinds[kept[0]]]
    assert len(done.manifest["modules"]) == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop": [2]}, "there is no layer 2; this model has layers 0 to 1"),
        ({"drop": [0, 1]}, "dropping all 2 layers leaves none"),
        ({"drop": [0], "order": [1]}, "give one of order, drop, repeat and drop_least"),
        ({"drop": [0], "silent_copies": True}, "silent_copies belongs to repeat and order"),
        ({"drop_least": 1}, "calibration: missing, but layers needs text"),
    ],
)
def test_impossible_layers_are_refused_before_work(apply, tmp_path, settings, message):
    with pytest.raises(SutureError, match=message):
        apply("L1", {"layers": settings})


def test_b7_attention_scaled_by_layer_number_is_refused(apply, tmp_path):
    model = edit(make("GP", tmp_path / "m", "float32"), scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(SutureError, match="scale_attn_by_inverse_layer_idx scales attention by a layer's number"):
        apply("GP", {"layers": {"drop": [0]}}, model=model)


# -- rope_scaling

SCALINGS = [
    {"type": "linear", "factor": 4.0},
    {"type": "ntk", "factor": 4.0},
    {"type": "dynamic", "factor": 2.0},
    {"type": "yarn", "factor": 4.0, "beta_fast": 16.0},
    {"type": "yarn", "factor": 4.0, "attention_factor": 1.2},
    {"type": "llama3", "factor": 8.0, "high_freq_factor": 8.0},
]


@pytest.mark.parametrize("settings", SCALINGS, ids=lambda settings: settings["type"])
@pytest.mark.parametrize("form", ["5.x", "4.x"])
def test_b3_positions_are_stretched_in_either_form_of_config(apply, tmp_path, settings, form):
    model = make("L1", tmp_path / "m", "float32")
    if form == "4.x":
        edit(model, rope_parameters=None, rope_theta=10000.0, rope_scaling=None)
    source, done = apply("L1", {"rope_scaling": settings}, model=model)
    config = config_of(done.output)
    assert ("rope_parameters" in config) == (form == "5.x")
    assert config["max_position_embeddings"] == (128 if settings["type"] == "dynamic" else 128 * settings["factor"])
    rotary = stock(done.output).model.rotary_emb
    wanted = frequencies(10000.0, 8, 128, RopeScalingSettings(**settings))
    assert torch.allclose(rotary.inv_freq.double(), wanted, rtol=1e-5)
    assert rotary.attention_scaling == pytest.approx(receipt(done)["attention_factor"], abs=1e-5)
    pairs = receipt(done)["pairs"]
    assert sum(pairs.values()) == 4
    if settings["type"] == "linear":
        assert pairs["divided_by_factor"] == 4
    before, after = read(source), read(done.output)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (receipt(done)["kl"] > 1e-6) == (settings["type"] != "dynamic")


def test_yarn_numbers_are_the_papers():
    """Head size 128, base 10000, 4096 -> 16384: pairs below 20 stay, above 45 are divided (YaRN, section 3.2)."""
    settings = RopeScalingSettings(type="yarn", factor=4.0)
    ratio = frequencies(1e4, 128, 4096, None) / frequencies(1e4, 128, 4096, settings)
    assert (ratio[:21] == 1).all() and torch.allclose(ratio[46:], torch.tensor(4.0, dtype=torch.float64))
    assert (ratio[21:46].diff() > 0).all()
    assert math.isclose(0.1 * math.log(4) + 1, 1.1386294, abs_tol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("GP", {"type": "linear", "factor": 2}, "gpt2 has no rotary embedding"),
        ("G3", {"type": "linear", "factor": 2}, "another rotary embedding for each kind of layer"),
        ("L-yarn", {"type": "linear", "factor": 2}, r"scaled already \(yarn\)"),
        ("L1", {"type": "linear", "factor": 2, "beta_fast": 3}, "beta_fast belongs to type: yarn"),
        ("L1", {"type": "yarn", "factor": 2, "beta_fast": 1}, "beta_fast must be above beta_slow"),
        ("L1", {"type": "linear", "factor": 0.5}, "greater than 1"),
    ],
)
def test_what_cannot_be_stretched_is_refused(apply, name, settings, message):
    with pytest.raises(SutureError, match=message):
        apply(name, {"rope_scaling": settings})


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Q2", "yarn"), ("MI", "llama3"), ("G2", "ntk"), ("NX", "linear"), ("FA", "linear"), ("DS", "yarn")],
)
def test_other_families_stretch_too(apply, name, kind):
    _, done = apply(name, {"rope_scaling": {"type": kind, "factor": 2.0}})
    assert receipt(done)["context"] == {"before": 128, "after": 256}
    assert stock(done.output).config.max_position_embeddings == 256


# -- fuse and unfuse


@pytest.mark.parametrize(
    ("name", "changes", "there", "back"),
    [
        ("P3", {}, "llama", "phi3"),
        ("P3", {"sliding_window": 8}, "mistral", "phi3"),
        ("L1", {}, "phi3", "llama"),
        ("MI", {}, "phi3", "mistral"),
    ],
    ids=["P3", "P3-window", "L1", "MI"],
)
def test_b8_fusing_and_unfusing_are_each_others_inverse(apply, tmp_path, name, changes, there, back):
    step, inverse = ("unfuse", "fuse") if name == "P3" else ("fuse", "unfuse")
    model = make(name, tmp_path / "m", "float32", **changes)
    source, done = apply(name, {step: {}}, model=model)
    assert receipt(done)["exact"] and config_of(done.output)["model_type"] == there
    assert torch.allclose(logits(done.output), logits(source), atol=1e-4, rtol=1e-4)
    _, again = apply(name, {inverse: {}}, model=done.output)
    before, after = read(source), read(again.output)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert config_of(again.output)["model_type"] == back
    assert torch.allclose(logits(again.output), logits(source), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "step", "message"),
    [
        ("GP", "unfuse", "no stock class reads GPT-2's c_attn in three parts"),
        ("L1", "unfuse", "llama has no fused matrices"),
        ("P3-longrope", "unfuse", "only Phi-3's own class switches its rotary embedding"),
        ("P3-partial", "unfuse", "rotates 0.5 of each head"),
        ("P3", "fuse", "phi3 holds its matrices fused already"),
        ("Q2", "fuse", "qwen2 is not llama, mistral or phi"),
        ("L-llama3", "fuse", "it has biases"),
        ("L-yarn", "fuse", "does not know rope_type yarn"),
        ("W-mistral3", "fuse", "part of a mistral3 model, which keeps its class"),
    ],
)
def test_b6_b8_what_no_stock_class_reads_is_refused_with_the_reason(apply, name, step, message):
    with pytest.raises(SutureError, match=message):
        apply(name, {step: {}})


def test_b6_what_phi_and_neox_cannot_say_of_each_other_is_refused(apply, tmp_path):
    one_after_the_other = make("NX", tmp_path / "m", "float32", use_parallel_residual=False)
    with pytest.raises(SutureError, match="unfuse: its MLP reads what attention has added"):
        apply("NX", {"unfuse": {}}, model=one_after_the_other)
    with pytest.raises(SutureError, match=r"gpt_neox gives every query head a key and .* falcon rotates whole heads"):
        apply("PH", {"fuse": {}})
    for changes in ({"alibi": True}, {"parallel_attn": False}):
        with pytest.raises(SutureError, match="a falcon with ALiBi positions"):
            apply("FA", {"unfuse": {}}, model=make("FA", tmp_path / str(changes), "float32", **changes))
    with pytest.raises(SutureError, match=r"fuse: lm_head\.bias is not 0"):
        apply("PH", {"fuse": {}}, model=make("PH", tmp_path / "p", "float32", num_key_value_heads=4))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": False}], ids=["own", "tied"])
def test_b6_neox_is_phi_with_its_heads_apart_and_its_norms_folded(apply, tmp_path, changes):
    """Two norms of different weights and biases, rows of (q, k, v) head by head, partial rotary positions."""
    model = make("NX", tmp_path / "m", "float32", hidden_dropout=0.1, **changes)
    source, done = apply("NX", {"unfuse": {}}, model=model)
    assert receipt(done)["exact"] and config_of(done.output)["model_type"] == "phi"
    ids = some_ids(1, 120)
    wanted = logits(source, ids)
    assert float((logits(done.output, ids) - wanted).abs().max()) < 3e-5 * float(wanted.abs().max())
    unfused = read(done.output)
    q, k, v = (unfused[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    old = read(source)
    gain = old["gpt_neox.layers.1.input_layernorm.weight"]
    of_head_2 = old["gpt_neox.layers.1.attention.query_key_value.weight"].view(4, 3, 16, 64)[2] * gain
    for part, rows in zip((q, k, v), of_head_2, strict=True):
        assert torch.allclose(part.view(4, 16, 64)[2], rows, rtol=1e-6)
    _, back = apply("NX", {"fuse": {}}, model=done.output)  # every bit from here on
    assert config_of(back.output)["model_type"] == "gpt_neox"
    assert torch.allclose(logits(back.output, ids), wanted, atol=1e-4 * float(wanted.abs().max()))
    _, again = apply("NX", {"unfuse": {}}, model=back.output)
    assert all(torch.equal(tensor, unfused[name]) for name, tensor in read(again.output).items())


WHOLE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}


@pytest.mark.parametrize(
    ("name", "changes", "kv_heads"),
    [
        ("FA", {}, 1),
        ("FA-new", {}, 2),
        ("FA-new", {"num_ln_in_parallel_attn": 1, "bias": False, "tie_word_embeddings": False}, 2),
        ("FA-new", {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None}, 6),
    ],
    ids=["7B", "40B", "11B", "MHA"],
)
def test_b6_falcon_is_phi_with_its_groups_apart_and_its_norms_folded(apply, tmp_path, name, changes, kv_heads):
    """Rows of (queries, k, v) group by group; one norm or two; with biases or without; tied or not."""
    model = make(
        name, tmp_path / "m", "float32", hidden_dropout=0.1, rope_parameters=WHOLE["rope_parameters"], **changes
    )
    source, done = apply(name, {"unfuse": {}}, model=model)
    config = config_of(done.output)
    assert receipt(done)["exact"] and config["model_type"] == "phi"
    assert config["num_key_value_heads"] == kv_heads and config["resid_pdrop"] == 0.1 and "alibi" not in config
    ids = some_ids(1, 120)
    wanted = logits(source, ids)
    assert float((logits(done.output, ids) - wanted).abs().max()) < 3e-5 * float(wanted.abs().max())
    unfused, old = read(done.output), read(source)
    fused = old["transformer.h.1.self_attention.query_key_value.weight"]
    gain = old.get("transformer.h.1.ln_attn.weight", torch.ones(fused.shape[1]))
    heads = config["num_attention_heads"]
    d = fused.shape[1] // heads
    group = fused.view(kv_heads, heads // kv_heads + 2, d, -1)[-1] * gain  # of the last key-value head
    q, k, v = (unfused[f"model.layers.1.self_attn.{x}_proj.weight"].unflatten(0, (-1, d)) for x in "qkv")
    assert torch.allclose(q[-(heads // kv_heads) :], group[:-2], rtol=1e-6)
    assert torch.allclose(k[-1], group[-2], rtol=1e-6) and torch.allclose(v[-1], group[-1], rtol=1e-6)
    _, back = apply(name, {"fuse": {}}, model=done.output)  # every bit from here on
    returned = config_of(back.output)
    assert returned["model_type"] == ("gpt_neox" if kv_heads == heads else "falcon")
    assert returned.get("multi_query", False) == (kv_heads == 1)
    assert torch.allclose(logits(back.output, ids), wanted, atol=1e-4 * float(wanted.abs().max()))
    if name == "FA":  # one norm, nothing folded: what it was, with biases of 0
        assert all(torch.equal(read(back.output)[key], tensor) for key, tensor in old.items())
    _, again = apply(name, {"unfuse": {}}, model=back.output)
    assert all(torch.equal(tensor, unfused[key]) for key, tensor in read(again.output).items())


def test_b6_a_phi_of_grouped_heads_becomes_a_falcon(apply, tmp_path):
    def without_head_bias(tensors):
        return tensors | {"lm_head.bias": tensors["lm_head.bias"] * 0}

    model = edit(make("PH", tmp_path / "m", "float32", **WHOLE), without_head_bias)
    source, done = apply("PH", {"fuse": {}}, model=model)
    config, before, after = config_of(done.output), read(source), read(done.output)
    assert (config["model_type"], config["num_kv_heads"], config["new_decoder_architecture"]) == ("falcon", 2, True)
    ids = some_ids(1, 120)
    assert torch.allclose(logits(done.output, ids), logits(source, ids), atol=1e-4)
    rows = after["transformer.h.0.self_attention.query_key_value.bias"].view(2, 4, 16)
    assert torch.equal(rows[1, 2], before["model.layers.0.self_attn.k_proj.bias"][16:])
    _, back = apply("PH", {"unfuse": {}}, model=done.output)
    assert all(torch.equal(tensor, before[key]) for key, tensor in read(back.output).items())


def test_b6_a_bfloat16_neox_is_proved_before_rounding_and_goes_on_to_gqa_and_gptq(shelf, tmp_path):
    text = ids_file(tmp_path / "ids.jsonl")
    steps = [{"unfuse": {}}, {"gqa": {"kv_heads": 2}}, {"gptq": {"bits": 4, "group_size": 8}}]
    done = run(
        {
            "model": str(shelf("NX")),
            "output": str(tmp_path / "out"),
            "steps": steps,
            "calibration": {"data": str(text), "samples": 4, "length": 24},
        }
    )
    assert done.manifest["receipts"][0]["exact"]
    assert config_of(done.output)["num_key_value_heads"] == 2 and done.manifest["verification"]["missing"] == 0


def test_b3_neox_with_its_old_keys_stretches_too(apply, tmp_path):
    """rotary_pct and rotary_emb_base, as published, stay beside rope_parameters and must not win over it."""
    model = make("NX", tmp_path / "m", "float32")
    edit(model, rope_parameters=None, rotary_pct=0.25, rotary_emb_base=10000)
    source, done = apply("NX", {"rope_scaling": {"type": "ntk", "factor": 4.0}}, model=model)
    rotary = stock(done.output).gpt_neox.rotary_emb
    wanted = frequencies(10000.0, 4, 128, RopeScalingSettings(type="ntk", factor=4.0))
    assert torch.allclose(rotary.inv_freq.double(), wanted, rtol=1e-5)
    assert float((logits(source) - logits(done.output)).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["L1", "GP"])
def test_a_model_too_large_to_reload_whole_is_verified_by_its_first_layers(apply, monkeypatch, name):
    """The output's first layers, which are not the input's."""
    monkeypatch.setattr("suture.pipeline.estimate._verify_blocks", lambda *_: 2)
    source, done = apply(name, {"layers": {"order": [1, 1, 0]}}, {"reshard": {"max_shard_size": "50KB"}})
    assert (done.manifest["verification"]["blocks"], done.manifest["verification"]["of_blocks"]) == (2, 3)
    assert "kl" not in done.manifest["receipts"][0]  # two of three layers say nothing about the input's
    assert torch.allclose(logits(done.output), reference(source, [1, 1, 0]), atol=1e-4, rtol=1e-4)
