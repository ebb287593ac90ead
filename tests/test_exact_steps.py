"""Steps that must leave the model's function as it is, on every family in which they differ."""

import json

import pytest
import torch
from kit import edit, fuse_experts, ids_file, make, read, some_ids, stock

from suture.checkpoint.errors import SutureError
from suture.cli.tables import print_run


@torch.no_grad()
def logits(directory, ids=None):
    model = stock(directory)
    return model(some_ids() if ids is None else ids).logits


def assert_same_function(source, done, factor=3e-5):
    """Reloaded by stock transformers, the output computes what the input does, and the receipt says so."""
    receipt = done.manifest["receipts"][-1]
    assert receipt["exact"] and receipt["max_logit_difference"] <= 1e-4 * receipt["largest_logit"]
    assert 0 <= receipt["kl"] < 1e-6
    before, after = logits(source), logits(done.output)
    assert float((before - after).abs().max()) <= factor * float(before.abs().max())


def changed(done):
    return {name for name, account in done.manifest["inputs"].items() if account["action"] == "changed"}


# -- fold_norms

TIED = ("L2", "Q2", "G1", "G2", "G3", "GP", "FA-new")
FOLDED = (
    "L1",
    "L-llama3",
    "Q2",
    "Q3",
    "G1",
    "G2",
    "G3",
    "P3",
    "GP",
    "NX",
    "PH",
    "FA",
    "FA-new",
    "MX",
    "QM",
    "DS-q-lora",
)


@pytest.mark.parametrize("name", FOLDED)
def test_b9_d6_folded_norms_leave_the_logits(apply, name):
    steps = [{"untie": {}}] if name in TIED else []
    source, done = apply(name, *steps, {"fold_norms": {}})
    assert_same_function(source, done)
    tensors, before = read(done.output), read(source)
    norms = [key for key in tensors if "norm" in key or ".ln_" in key]
    kept = ("q_norm", "k_norm", "a_layernorm", "post_feedforward") + (
        ("post_attention",) if name in ("G2", "G3") else ()
    )
    for key in norms:
        if any(part in key for part in kept):
            assert torch.equal(tensors[key], before[key])
        elif key.endswith("weight"):
            assert bool((tensors[key] == (0.0 if name.startswith("G") and name != "GP" else 1.0)).all()), key
    last = {"GP": "transformer.ln_f", "NX": "gpt_neox.final_layer_norm", "FA-new": "transformer.ln_f"}.get(name)
    if last:  # its bias has no bias to go to
        assert {key for key in norms if key.endswith("bias") and tensors[key].any()} == {f"{last}.bias"}


def test_folding_a_tied_head_is_refused_and_may_be_left_out(apply, capsys):
    with pytest.raises(SutureError, match=r"fold_norms: the last norm is read by the head.*put `- untie: \{\}` before"):
        apply("L2", {"fold_norms": {}})
    source, done = apply("L2", {"fold_norms": {"final_norm": False}})
    assert_same_function(source, done)
    print_run(done)
    assert "fold_norms receipt" in (printed := capsys.readouterr().out) and "max logit difference" in printed
    assert torch.equal(read(done.output)["model.norm.weight"], read(source)["model.norm.weight"])


def test_a_norm_whose_bias_has_nowhere_to_go_stays_and_is_named(apply, tmp_path):
    def damaged(tensors):
        tensors["gpt_neox.final_layer_norm.weight"][3] = 0.0
        return tensors

    model = edit(make("NX", tmp_path / "m", "float32"), damaged)
    source, done = apply("NX", {"fold_norms": {}}, model=model)
    assert_same_function(source, done)
    assert done.fallbacks == {
        "gpt_neox.final_layer_norm": "its readers have no bias, and its own cannot be divided by a weight of 0"
    }


# -- permute

PERMUTED = ("L0", "L1", "L-llama3", "Q2", "Q3", "G2", "P3", "GP", "NX", "PH", "FA", "FA-new", "MX", "QM", "DS-q-lora")


@pytest.mark.parametrize("name", PERMUTED)
def test_b18_permuted_heads_and_neurons_leave_the_logits(apply, name):
    source, done = apply(name, {"permute": {"heads": "random", "neurons": "random", "seed": 3}})
    assert_same_function(source, done)
    before, after = read(source), read(done.output)
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved <= changed(done)  # of two key-value heads the order may have stayed
    assert len(moved) >= 0.7 * len(changed(done))
    for key in changed(done):  # the same numbers, in other places
        assert torch.equal(before[key].flatten().sort().values, after[key].flatten().sort().values)


@pytest.mark.parametrize("name", ["FA", "FA-new", "P3"])
def test_what_looks_at_inputs_leaves_them_as_they_are(apply, tmp_path, name):
    """Falcon's own linear layers take no [neurons] for [batch, tokens, neurons]; others would compute on it, unseen."""
    text = {"data": str(ids_file(tmp_path / "ids.jsonl")), "samples": 4, "length": 24}
    source, done = apply(name, {"permute": {}}, calibration=text)
    assert_same_function(source, done)


def test_permuting_back_restores_the_parameters():
    from suture.checkpoint.families import family_of
    from suture.surgery.permute import Part, permute

    parts = [Part("self_attn.q_proj", "out", "q", 0, 4, 4), Part("self_attn.o_proj", "in", "q", 0, 4, 4)]
    before = {
        "self_attn.q_proj.weight": torch.randn(12, 6),
        "self_attn.q_proj.bias": torch.randn(12),
        "self_attn.o_proj.weight": torch.randn(6, 12),
    }
    assert not family_of("llama").conv1d
    there = permute(before, "", parts, {"q": [2, 0, 1]}, conv1d=False)
    back = permute(there, "", parts, {"q": [1, 2, 0]}, conv1d=False)
    assert all(torch.equal(back[key], before[key]) and not torch.equal(there[key], before[key]) for key in before)


@pytest.mark.parametrize("name", ["L1", "QM", "GP"])
def test_importance_puts_what_contributes_most_first(apply, shelf, tmp_path, name):
    """A head and a neuron whose output is much larger come first, and zeroed ones last."""
    text = ids_file(tmp_path / "ids.jsonl")
    loud, silent = 5, 2

    def shaped(tensors):
        for key, tensor in tensors.items():
            conv1d = name == "GP"
            if key.endswith(("self_attn.o_proj.weight", "attn.c_proj.weight")):
                heads = tensor.view(tensor.shape[0], 8, -1) if not conv1d else tensor.view(4, -1, tensor.shape[1])
                chosen = heads[:, loud] if not conv1d else heads[3]
                chosen.mul_(10)
            if key.endswith(("down_proj.weight", "mlp.c_proj.weight")):
                columns = tensor.T if conv1d else tensor
                columns[:, loud] *= 100
                columns[:, silent] = 0
        return tensors

    model = edit(make(name, tmp_path / "m", "float32"), shaped)
    calibration = {"data": str(text), "samples": 4, "length": 24}
    source, done = apply(name, {"permute": {}}, model=model, calibration=calibration)
    assert_same_function(source, done)
    first = done.manifest["receipts"][-1]["parts"]["block 0"]["heads"]
    assert first[0] == (3 if name == "GP" else loud)
    if name != "GP":
        assert set(first[:4]) == {4, 5, 6, 7}  # its group came along
    for key, tensor in read(done.output).items():
        if key.endswith(("down_proj.weight", "mlp.c_proj.weight")) and ".experts." not in key:  # some saw no token
            columns = tensor.T if name == "GP" else tensor
            assert columns[:, 0].norm() > 3 * columns[:, 1].norm() and not columns[:, -1].any()


# -- rescale_residual and rotary


@pytest.mark.parametrize(
    "name", ["L2", "L-llama3", "Q3", "G2", "G3", "P3", "GP", "NX", "PH", "FA-new", "MX", "QM", "DS"]
)
def test_residual_rescaled_to_another_epsilon_leaves_the_logits(apply, tmp_path, name):
    layernorms = {"GP": "layer_norm_epsilon", "NX": "layer_norm_eps", "PH": "layer_norm_eps"}
    key = (layernorms | {"FA-new": "layer_norm_epsilon"}).get(name, "rms_norm_eps")
    model = make(name, tmp_path / "m", "float32", **{key: 1e-2})  # large, so that a wrong one shows
    source, done = apply(name, {"rescale_residual": {"eps": 1e-4}}, model=model)
    assert_same_function(source, done)
    assert json.loads((done.output / "config.json").read_text())[key] == 1e-4
    assert done.manifest["receipts"][-1]["factor"] == pytest.approx(0.1)
    wrong = make(name, tmp_path / "w", "float32", **{key: 1e-4})  # the same weights
    assert float((logits(source) - logits(wrong)).abs().max()) > 1e-3


def test_rescaling_back_restores_the_model(apply):
    source, done = apply("G2", {"rescale_residual": {"factor": 4.0}}, {"rescale_residual": {"factor": 0.25}})
    before, after = read(source), read(done.output)
    assert all(torch.allclose(before[key], after[key], atol=1e-6) for key in before)
    assert json.loads((done.output / "config.json").read_text())["rms_norm_eps"] == pytest.approx(1e-6)
    with pytest.raises(SutureError, match="give one of eps and factor"):
        apply("L1", {"rescale_residual": {}})


@pytest.mark.parametrize("name", ["DS", "DS-q-lora"])
def test_e7_rotary_rows_in_another_order_leave_the_logits(apply, name):
    ids = some_ids(1, 120)  # past position 100
    source, done = apply(name, {"rotary": {"layout": "half"}})
    assert_same_function(source, done)
    assert torch.allclose(logits(source, ids), logits(done.output, ids), atol=1e-3, rtol=1e-4)
    assert json.loads((done.output / "config.json").read_text())["rope_interleave"] is False
    assert len(changed(done)) == 4
    _, back = apply(name, {"rotary": {"layout": "interleaved"}}, model=done.output)
    before, after = read(source), read(back.output)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("L1", "interleaved", "llama class reads half-split rows only"),
        ("GP", "half", "gpt2 class reads no rotary rows at all"),
        ("DS", "interleaved", "in interleaved order already"),
    ],
)
def test_e7_an_order_that_no_stock_class_reads_is_refused(apply, name, layout, message):
    with pytest.raises(SutureError, match=message):
        apply(name, {"rotary": {"layout": layout}})


# -- several at once, where names and tensors are unusual

ALL = (
    {"fold_norms": {}},
    {"permute": {"heads": "random", "neurons": "random"}},
    {"rescale_residual": {"factor": 0.5}},
    {"layers": {"repeat": [0], "silent_copies": True}},
)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("W-mistral3", "QM fused", "GP bare")]


@pytest.mark.parametrize("name", ["W-gemma3", "MX fused", *SLOW])
def test_b4_a_chain_of_all_of_them_on_odd_layouts(apply, tmp_path, name):
    """Vision wrappers, experts fused in one tensor, GPT-2 without its prefix."""
    short = name.split()[0]
    model = make(short, tmp_path / "m", "float32")
    if name.endswith("fused"):
        edit(model, fuse_experts)
    if name.endswith("bare"):
        edit(model, lambda tensors: {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()})
    steps = [{"untie": {}}, *ALL] if short == "GP" else ALL
    source, done = apply(short, *steps, model=model)
    assert all(receipt["exact"] for receipt in done.manifest["receipts"])
    before, after = logits(source), logits(done.output)
    assert float((before - after).abs().max()) <= 1e-4 * float(before.abs().max())
    assert done.manifest["verification"]["of_blocks"] == 3
