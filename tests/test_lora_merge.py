"""Merging adapters: suture's output against PEFT's unmerged model, in float32, for everything that an adapter can hold."""

import json
import shutil
from pathlib import Path

import bitsandbytes.functional as bitsandbytes
import jsonschema
import pytest
import torch
from adapters import TARGETS, edit_adapter, live, logits, peft_merged, trained
from kit import Shelf, edit, fuse_experts, ids_file, make, read, run
from safetensors.torch import load_file, save_file

import suture
from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.lora.delta import Delta, merge_into
from suture.lora.merge import merge_tensor, pieces_by_tensor
from suture.lora.settings import MergeSettings
from suture.pipeline import lora_merge
from suture.pipeline.lora_merge import prepare
from suture.pipeline.qlora import nf4


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    shelf = Shelf(tmp_path_factory.mktemp("kit"))
    return lambda name: shelf(name, "float32")


def merge(model, adapter, output, **settings):
    adapter = adapter if isinstance(adapter, list) else str(adapter)
    step = {"lora.merge": {"adapter": adapter, **settings}}
    return run({"model": str(model), "steps": [step], "output": str(output)})


def merge_alone(model, adapter, output, **settings):
    """The step's plan carried out on all tensors in memory, without a run around it."""
    adapter = adapter if isinstance(adapter, list) else str(adapter)
    plan = prepare(open_checkpoint(model), MergeSettings(adapter=adapter, **settings))
    arrangement = plan.arrangement
    pieces = pieces_by_tensor(arrangement.changes, arrangement.layout)
    tensors = {}
    for spec in plan.specs:
        tensors[spec.name], _ = merge_tensor(arrangement.arranged.read(spec.name), pieces.get(spec.name, ()))
        assert tuple(tensors[spec.name].shape) == spec.shape
    output.mkdir()
    save_file(tensors, output / "model.safetensors")
    (output / "config.json").write_text(json.dumps(plan.config))
    return plan


def assert_same(found, wanted, tolerance=1e-5):
    assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


def assert_merged(model, adapter, output, prepare=None, **settings):
    """The output's logits are the unmerged model's, they are not the base's, and every key is accounted for."""
    plan = merge_alone(model, adapter, output, **settings)
    wanted = live(model, adapter, prepare=prepare)
    assert_same(logits(output), wanted)
    base = logits(model)
    assert float((wanted[..., : base.shape[-1]] - base).abs().max()) > 1e-2 * float(wanted.abs().max())
    if (adapter / "adapter_model.safetensors").exists():
        assert set(plan.arrangement.matched.keys[str(adapter)]) == set(load_file(adapter / "adapter_model.safetensors"))
    return plan


# ---- every family, every kind


KINDS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 6, r"layers.1.self_attn.v_proj": 2, "c_attn": 6, "qkv_proj": 6},
        "alpha_pattern": {"o_proj": 3, "c_fc": 3},
    },
    "dora": {"use_dora": True},
    "lora bias": {"lora_bias": True},
    "bias all": {"bias": "all"},
    "bias lora_only": {"bias": "lora_only"},
    "norms saved": {"modules_to_save": ["norm", "input_layernorm", "ln_1"]},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}
WITH_BIASES = ("GP",)  # every linear layer has one


@pytest.mark.parametrize("name", ["L1", "Q2", "GP", "P3", "MX"])
@pytest.mark.parametrize("kind", KINDS)
def test_f6_f7_merged_is_the_unmerged_model(shelf, tmp_path, name, kind):
    settings = KINDS[kind]
    if kind in ("lora bias", "bias all", "bias lora_only") and name not in WITH_BIASES:
        pytest.skip("no biases to train")
    if kind in ("olora", "orthogonal") and name == "GP":
        pytest.skip("PEFT does not define it for Conv1D")
    if kind == "norms saved" and name != "L1" and name != "GP":
        pytest.skip("one family of each kind of norm is enough")
    if kind == "patterns":
        ends = TARGETS[name]
        settings = {
            key: {p: v for p, v in patterns.items() if p.rpartition(".")[2] in ends}
            for key, patterns in settings.items()
        }
    adapter = trained(shelf(name), tmp_path / "adapter", target_modules=TARGETS[name], **settings)
    assert_merged(shelf(name), adapter, tmp_path / "out")


# ---- tied embeddings: right where PEFT is wrong


TIED = {  # settings, whether the head must part from the embedding, whether PEFT's own merge is right
    "head only": ({"target_modules": ["lm_head"]}, True, False),
    "embedding only": ({"target_modules": ["embed_tokens"]}, True, False),
    "both": ({"target_modules": ["embed_tokens", "lm_head"]}, True, False),
    "both, one adapter": (
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        False,
        False,
    ),
    "embedding saved": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, True, True),
    "both saved": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, True, True),
    "tokens": ({"target_modules": ["q_proj"], "trainable_token_indices": [3, 77, 256]}, False, True),
}


@pytest.mark.parametrize("kind", TIED)
def test_f1_f2_a_tied_model_gets_what_was_trained_where_peft_does_and_where_it_does_not(shelf, tmp_path, kind):
    settings, untied, peft_is_right = TIED[kind]
    adapter = trained(shelf("L2"), tmp_path / "adapter", **settings)
    plan = assert_merged(shelf("L2"), adapter, tmp_path / "out")
    assert plan.arrangement.untied == untied
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is not untied
    wanted = live(shelf("L2"), adapter)
    off = float((peft_merged(shelf("L2"), adapter) - wanted).abs().max() / wanted.abs().max())
    assert off < 1e-5 if peft_is_right else off > 0.05


# ---- what PEFT's settings do to one another


MIXED = {
    "MX: the router, a parameter": {"target_modules": "all-linear"},
    "DS: what is added for experts that it has not": {"target_modules": "all-linear"},
    "L1: parameters": {
        "target_modules": [],
        "target_parameters": ["q_proj.weight", "embed_tokens.weight"],
        "alpha_pattern": {"q_proj.weight": 3, "embed_tokens.weight": 7},
    },
    "GP: parameters stored transposed": {
        "target_modules": [],
        "target_parameters": ["c_attn.weight", "attn.c_proj.weight"],
    },
    "MX: experts saved": {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
    "L1: targets that are excluded": {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["up_proj"]},
    "L1: targets that are saved": {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp"]},
    "GP: biases of saved norms, twice": {
        "target_modules": ["c_attn"],
        "modules_to_save": ["ln_1"],
        "bias": "all",
    },
    "L1: pissa of a head, whose residual is stored": {"target_modules": ["lm_head"], "init_lora_weights": "pissa"},
    "L1: pissa of an embedding, which is plain": {
        "target_modules": ["embed_tokens", "q_proj"],
        "init_lora_weights": "pissa",
    },
    "L2: a head's LoRA over trained tokens": {"target_modules": ["lm_head"], "trainable_token_indices": [3, 77]},
    "L2: one adapter, two magnitudes": {
        "target_modules": ["embed_tokens"],
        "ensure_weight_tying": True,
        "use_dora": True,
    },
    "GP: a name that PEFT does not tie": {"target_modules": ["wte"], "ensure_weight_tying": True},
    "GP: nor when it is saved": {
        "target_modules": ["c_attn"],
        "modules_to_save": ["wte"],
        "ensure_weight_tying": True,
    },
}


@pytest.mark.parametrize("case", MIXED)
def test_f13_settings_together_are_the_unmerged_model(shelf, tmp_path, case):
    model = shelf(case.partition(":")[0])
    assert_merged(model, trained(model, tmp_path / "adapter", **MIXED[case]), tmp_path / "out")


# ---- embeddings, tokens, grown vocabularies


OTHER = {
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "down_proj"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "embedding, dora": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 77, 256]},
    "tokens by module": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [9, 5]}},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("kind", OTHER)
@pytest.mark.parametrize("name", ["L1", "G3"])
def test_embeddings_heads_and_tokens(shelf, tmp_path, name, kind):
    if name == "G3" and kind in ("head", "both", "saved"):
        pytest.skip("tied: above")
    adapter = trained(shelf(name), tmp_path / "adapter", **OTHER[kind])
    assert_merged(shelf(name), adapter, tmp_path / "out")


def grow(model):
    torch.manual_seed(5)
    model.resize_token_embeddings(324)


@pytest.mark.parametrize(("name", "targets"), [("L1", []), ("L2", []), ("L2", ["embed_tokens"])])
def test_f4_a_grown_vocabulary_comes_with_its_rows(shelf, tmp_path, name, targets):
    adapter = trained(shelf(name), tmp_path / "adapter", prepare=grow, target_modules=["q_proj", *targets])
    plan = assert_merged(shelf(name), adapter, tmp_path / "out", prepare=grow)
    assert plan.config["vocab_size"] == 324


def test_f4_a_vocabulary_that_grew_on_one_side_is_refused(shelf, tmp_path):
    adapter = trained(shelf("L1"), tmp_path / "adapter", prepare=grow, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(SutureError, match=r"324 rows and leaves lm_head.weight 320"):
        merge_alone(shelf("L1"), adapter, tmp_path / "out")


def test_f4_a_grown_vocabulary_brings_its_tokenizer(shelf, tmp_path):
    adapter = trained(shelf("L2"), tmp_path / "adapter", prepare=grow, target_modules=["q_proj"])
    model = make("L2", tmp_path / "model", "float32")
    (model / "tokenizer_config.json").write_text("{}")
    (model / "merges.txt").write_text("of the base")
    (adapter / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    done = merge(model, adapter, tmp_path / "out")
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text()) == {"model_max_length": 77}
    assert not (tmp_path / "out/merges.txt").exists() and "merges.txt" not in done.manifest["side_files"]


@pytest.mark.parametrize("name", ["W-gemma3", "W-gemma3-new"])
def test_f12_the_text_model_inside_a_vision_wrapper(shelf, tmp_path, name):
    adapter = trained(shelf(name), tmp_path / "adapter", target_modules=r".*language_model.*\.(q_proj|down_proj)")
    assert_merged(shelf(name), adapter, tmp_path / "out")


# ---- experts


@pytest.mark.parametrize("name", ["MX", "QM"])
@pytest.mark.parametrize("fused", [False, True])
def test_expert_adapters(shelf, tmp_path, name, fused):
    model = shelf(name)
    settings = {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    adapter = trained(model, tmp_path / "adapter", rank_pattern={"down_proj": 3}, **settings)
    if fused:
        model = edit(make(name, tmp_path / "fused", "float32"), fuse_experts)
    assert_merged(model, adapter, tmp_path / "out")


# ---- whole runs


@pytest.mark.parametrize(
    ("name", "settings"), [("GP", {"use_dora": True}), ("MX", {}), ("L2", {"modules_to_save": ["lm_head"]})]
)
def test_f20_a_run_proves_itself_and_accounts_for_every_key(shelf, tmp_path, name, settings):
    adapter = trained(shelf(name), tmp_path / "adapter", target_modules=TARGETS[name], **settings)
    done = merge(shelf(name), adapter, tmp_path / "out")
    wanted = live(shelf(name), adapter)
    assert_same(logits(tmp_path / "out"), wanted)
    (receipt,) = done.manifest["receipts"]
    assert set(receipt["adapters"][0]["keys"]) == set(load_file(adapter / "adapter_model.safetensors"))
    proof = receipt["unmerged_against_merged"]
    assert proof["exact"] and proof["max_logit_difference"] <= 3e-5 * proof["largest_logit"]
    assert receipt["merged_against_stored"]["max_logit_difference"] == 0  # float32 keeps all of it
    changed = {name for name, a in done.manifest["inputs"].items() if a["action"] == "changed"}
    assert changed and len(changed) <= len(receipt["tensors"])


def test_float32_says_how_large_the_change_was(shelf):
    W = read(shelf("L1"))["model.layers.0.mlp.down_proj.weight"]
    L, R = torch.full((W.shape[0], 1), 0.5), torch.ones(1, W.shape[1])
    found = merge_into(W.clone(), [Delta(L, R)])
    assert (found.delta, found.weight) == pytest.approx((0.5 * W.numel() ** 0.5, float(W.norm())))
    assert (found.kept, found.noise, found.unchanged) == (1, 0, 0)


def test_f16_bfloat16_says_what_rounding_lost(tmp_path):
    model = make("L1", tmp_path / "model")
    adapter = trained(model, tmp_path / "adapter", target_modules=["q_proj"], std=1e-3)
    done = merge(model, adapter, tmp_path / "out")
    (receipt,) = done.manifest["receipts"]
    record = receipt["tensors"]["model.layers.0.self_attn.q_proj.weight"]
    before, after = (read(d)["model.layers.0.self_attn.q_proj.weight"].float() for d in (model, tmp_path / "out"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    A, B = (tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight"] for x in "AB")
    delta = 2.5 * B @ A
    error = after - (before + delta)
    assert record["lost_to_rounding"] == pytest.approx(float(error.norm() / delta.norm()), rel=1e-3)
    assert record["kept"] == pytest.approx(1 + float((error * delta).sum() / delta.square().sum()), abs=1e-3)
    assert record["unchanged_share"] == pytest.approx(float((after == before).float().mean()), rel=1e-3)
    assert record["lost_to_rounding"] > 0.3 and any("rounding noise" in note for note in receipt["notes"])
    assert torch.equal(after, (before + delta).to(torch.bfloat16).float())


def test_several_adapters_are_a_weighted_sum(shelf, tmp_path):
    one = trained(shelf("L1"), tmp_path / "one", target_modules=["q_proj", "down_proj"], use_dora=True)
    two = trained(shelf("L1"), tmp_path / "two", seed=1, target_modules=["q_proj"], r=6, use_rslora=True)
    shares = [{"adapter": str(one)}, {"adapter": str(two), "weight": -0.5}]
    merge_alone(shelf("L1"), shares, tmp_path / "both")
    for name, adapter in (("a", one), ("b", two)):
        merge_alone(shelf("L1"), adapter, tmp_path / name)
    base, both, a, b = (read(d) for d in (shelf("L1"), tmp_path / "both", tmp_path / "a", tmp_path / "b"))
    for key, tensor in both.items():
        assert torch.allclose(tensor, base[key] + (a[key] - base[key]) - 0.5 * (b[key] - base[key]), atol=1e-6)


def test_layers_stacked_again_become_layers_of_their_own(shelf, tmp_path):
    adapter = trained(
        shelf("L1"), tmp_path / "adapter", target_modules=["q_proj", "o_proj"], layer_replication=[[0, 2], [0, 2]]
    )
    plan = assert_merged(shelf("L1"), adapter, tmp_path / "out")
    assert plan.config["num_hidden_layers"] == 4
    done = merge(shelf("L1"), adapter, tmp_path / "whole")
    assert done.manifest["verification"]["blocks"] == 4
    assert torch.equal(logits(tmp_path / "whole"), logits(tmp_path / "out"))


def test_a_bias_that_the_base_lacks_is_created(shelf, tmp_path):
    """PEFT refuses to merge lora_bias into a layer without one."""
    adapter = trained(shelf("L1"), tmp_path / "adapter", target_modules=["q_proj", "down_proj"], lora_bias=True)
    plan = assert_merged(shelf("L1"), adapter, tmp_path / "out")
    assert plan.config["attention_bias"] and plan.config["mlp_bias"]
    merge(shelf("L1"), adapter, tmp_path / "whole")


# ---- what files in the world look like


def renamed(directory, change):
    return edit_adapter(directory, lambda tensors: {change(key): tensor for key, tensor in tensors.items()})


REPAIRS = {
    "no prefix": lambda key: key.removeprefix("base_model.model."),
    "adapter name": lambda key: key.replace(".weight", ".default.weight"),
    "compiled": lambda key: key.replace("base_model.model.", "base_model.model._orig_mod."),
    "backbone alone": lambda key: key.replace("base_model.model.model.", "base_model.model."),
}


@pytest.mark.parametrize("how", REPAIRS)
def test_f12_prefixes_are_repaired(shelf, tmp_path, how):
    adapter = trained(shelf("L1"), tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    merge_alone(shelf("L1"), adapter, tmp_path / "a")
    merge_alone(shelf("L1"), renamed(adapter, REPAIRS[how]), tmp_path / "b")
    assert all(torch.equal(x, read(tmp_path / "b")[k]) for k, x in read(tmp_path / "a").items())


def test_bin_files_and_sub_folders(shelf, tmp_path):
    adapter = trained(shelf("L1"), tmp_path / "adapter", target_modules=["q_proj"])
    merge_alone(shelf("L1"), adapter, tmp_path / "a")
    (tmp_path / "outer").mkdir()
    shutil.copytree(adapter, tmp_path / "outer/mine")
    file = tmp_path / "outer/mine/adapter_model.safetensors"
    torch.save(load_file(file), file.with_name("adapter_model.bin"))
    file.unlink()
    merge_alone(shelf("L1"), tmp_path / "outer", tmp_path / "b")
    assert all(torch.equal(x, read(tmp_path / "b")[k]) for k, x in read(tmp_path / "a").items())


def test_experts_lora_b_in_the_other_order(shelf, tmp_path):
    settings = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    adapter = trained(shelf("MX"), tmp_path / "adapter", **settings)
    merge_alone(shelf("MX"), adapter, tmp_path / "a")

    def reorder(tensors):
        return {
            k: t.reshape(t.shape[0], 4, 4).transpose(1, 2).reshape(t.shape) if "experts" in k and "lora_B" in k else t
            for k, t in tensors.items()
        }

    merge_alone(shelf("MX"), edit_adapter(adapter, reorder), tmp_path / "b", expert_layout="expert-major")
    assert all(torch.equal(x, read(tmp_path / "b")[k]) for k, x in read(tmp_path / "a").items())


def test_gpt2_shards_without_their_prefix(shelf, tmp_path):
    adapter = trained(shelf("GP"), tmp_path / "adapter", target_modules=["c_attn", "c_fc"])
    hub = edit(
        make("GP", tmp_path / "hub", "float32"),
        lambda tensors: {k.removeprefix("transformer."): t for k, t in tensors.items() if k != "lm_head.weight"},
    )
    assert_merged(hub, adapter, tmp_path / "out")


@pytest.mark.parametrize("fused", [False, True])
def test_adapters_of_single_experts_as_older_versions_trained_them(shelf, tmp_path, fused):
    model = shelf("MX")
    if fused:
        model = edit(make("MX", tmp_path / "fused", "float32"), fuse_experts)
    generator = torch.Generator().manual_seed(0)
    tensors, wanted = {}, {k: t.clone() for k, t in read(shelf("MX")).items()}
    for block in range(2):
        for expert in range(4):
            for part, (out, inner) in {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}.items():
                path = f"model.layers.{block}.block_sparse_moe.experts.{expert}.{part}"
                A, B = (0.1 * torch.randn(*s, generator=generator) for s in ((3, inner), (out, 3)))
                tensors |= {f"base_model.model.{path}.lora_{n}.weight": x for n, x in (("A", A), ("B", B))}
                wanted[f"{path}.weight"] += 5 / 3 * B @ A
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "target_modules": ["w1", "w2", "w3"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    merge_alone(model, adapter, tmp_path / "out")
    found = read(tmp_path / "out")
    wanted = fuse_experts(wanted) if fused else wanted
    assert all(torch.allclose(found[k], t, atol=1e-5) for k, t in wanted.items())


def test_a_merge_that_was_killed_goes_on_to_the_same_bytes(shelf, tmp_path, monkeypatch):
    adapter = trained(shelf("L1"), tmp_path / "adapter", target_modules=TARGETS["L1"])
    whole = merge(shelf("L1"), adapter, tmp_path / "whole")
    monkeypatch.setattr(lora_merge, "_SYNC", 1)
    monkeypatch.setattr("suture.pipeline.run.preflight", lambda plan, scratch: None)
    calls = []

    def dying(stored, pieces):
        calls.append(len(calls))
        if len(calls) == 9:
            raise KeyboardInterrupt
        return merge_tensor(stored, pieces)

    monkeypatch.setattr(lora_merge, "merge_tensor", dying)
    with pytest.raises(KeyboardInterrupt):
        merge(shelf("L1"), adapter, tmp_path / "out")
    step = {"lora.merge": {"adapter": str(adapter)}}
    recipe = {"model": str(shelf("L1")), "steps": [step], "output": str(tmp_path / "out")}
    resumed = run(recipe, resume=True)
    assert 9 < len(calls) < 9 + 14  # the first eight were not made again
    assert resumed.manifest["files"] == whole.manifest["files"]
    assert resumed.manifest["receipts"] == whole.manifest["receipts"]


# ---- refusals: one sentence, nothing written


def drop(end):
    return lambda tensors: {k: t for k, t in tensors.items() if not k.endswith(end)}


def with_nan(tensors):
    first = next(k for k in tensors if "lora_B" in k)
    tensors[first][0, 0] = float("nan")
    return tensors


REFUSED = {  # change of the adapter -> what the message must say
    "NaN": (lambda d: edit_adapter(d, with_nan), "NaN"),
    "half missing": (lambda d: edit_adapter(d, drop("layers.1.self_attn.q_proj.lora_B.weight")), "no lora_B beside"),
    "layer missing": (
        lambda d: edit_adapter(d, lambda ts: {k: t for k, t in ts.items() if "layers.1.self_attn.q" not in k}),
        "targets 4 linear layers, 1 of them have no tensors",
    ),
    "truncated": (lambda d: truncate(d / "adapter_model.safetensors"), "truncated"),
    "foreign prefix": (
        lambda d: renamed(d, lambda k: k.replace("model.model.", "model.language_model.model.")),
        r"match nothing in the model, first .* \(did you mean 'model.layers",
    ),
    "typo in a target": (
        lambda d: edit_adapter(d, target_modules=["q_prj", "v_proj"]),
        "'q_prj' .did you mean 'q_proj'",
    ),
    "typo in a key": (lambda d: renamed(d, lambda k: k.replace("lora_A", "lora_a")), "mean nothing to a LoRA"),
    "a regular expression of nothing": (lambda d: edit_adapter(d, target_modules=".*q_prj"), "does not target"),
    "trained tokens missing": (
        lambda d: edit_adapter(d, trainable_token_indices=[3]),
        "names tokens, for which the file holds no rows",
    ),
    "lora_B's biases missing": (lambda d: edit_adapter(d, lora_bias=True), "has no lora_B.bias"),
    "layer beyond": (lambda d: renamed(d, lambda k: k.replace("layers.1", "layers.7")), "the model has 2 blocks"),
    "pattern of nothing": (lambda d: edit_adapter(d, alpha_pattern={"^q_proj": 100}), r"'\^q_proj' matches no module"),
    "other rank": (lambda d: edit_adapter(d, r=8), "has rank 4, but"),
    "aLoRA": (lambda d: edit_adapter(d, alora_invocation_tokens=[1, 2]), "aLoRA"),
    "Arrow": (lambda d: edit_adapter(d, arrow_config={"top_k": 2}), "Arrow"),
    "KaSA": (lambda d: edit_adapter(d, kasa_config={"beta": 1}), "KaSA"),
    "CorDA": (lambda d: edit_adapter(d, init_lora_weights="corda"), "'corda' changed the base"),
    "LoftQ": (lambda d: edit_adapter(d, init_lora_weights="loftq"), "base_is_residual: true"),
    "PiSSA by chance": (lambda d: edit_adapter(d, init_lora_weights="pissa_niter_4"), "pissa_niter_4"),
    "another type": (lambda d: edit_adapter(d, peft_type="LOHA"), "only LORA adapters"),
    "wrong type of a key": (lambda d: edit_adapter(d, r="4"), "a whole number above 0 was expected"),
    "no weights": (lambda d: (d / "adapter_model.safetensors").unlink(), "neither adapter_model.safetensors"),
}


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("what", REFUSED)
def test_f11_f13_one_clear_error_and_nothing_written(shelf, tmp_path, what):
    spoil, message = REFUSED[what]
    adapter = trained(shelf("L1"), tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    spoil(adapter)
    with pytest.raises(SutureError, match=message):
        merge(shelf("L1"), adapter, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter"]


def test_f19_a_wrong_base_is_refused(shelf, tmp_path):
    adapter = trained(shelf("L0"), tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    with pytest.raises(SutureError, match=r"v_proj\.weight is \[16, 64\]; give the base"):
        merge(shelf("L1"), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_f19_a_base_of_another_type_is_refused_where_all_shapes_fit(shelf, tmp_path):
    adapter = trained(shelf("L1"), tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    with pytest.raises(SutureError, match=r"whose model_type is llama; that of .* is qwen2; .* check_base: false"):
        prepare(open_checkpoint(shelf("Q2")), MergeSettings(adapter=str(adapter)))
    prepare(open_checkpoint(shelf("Q2")), MergeSettings(adapter=str(adapter), check_base=False))


def test_trained_biases_that_are_missing_are_refused(shelf, tmp_path):
    adapter = trained(shelf("Q2"), tmp_path / "adapter", target_modules=["q_proj", "o_proj"], bias="lora_only")
    edit_adapter(adapter, drop("layers.1.self_attn.q_proj.base_layer.bias"))
    with pytest.raises(SutureError, match=r"1 of 2 biases are not in the file, first model.layers.1.self_attn.q_proj"):
        merge_alone(shelf("Q2"), adapter, tmp_path / "out")


def test_a_residual_base_takes_the_change_plainly(shelf, tmp_path):
    adapter = trained(shelf("L1"), tmp_path / "adapter", target_modules=["q_proj"])
    merge_alone(shelf("L1"), adapter, tmp_path / "a")
    edit_adapter(adapter, init_lora_weights="loftq")
    merge_alone(shelf("L1"), adapter, tmp_path / "b", base_is_residual=True)
    assert all(torch.equal(x, read(tmp_path / "b")[k]) for k, x in read(tmp_path / "a").items())


# ---- QLoRA: which base, and what quantizing it again leaves


def bnb_nf4(W):
    codes, state = bitsandbytes.quantize_4bit(W.contiguous(), blocksize=64, quant_type="nf4")
    return bitsandbytes.dequantize_4bit(codes, state).to(W.dtype).reshape(W.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_is_bitsandbytes(dtype):
    W = torch.randn(37, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    W[3] = 0
    assert torch.equal(nf4(W), bnb_nf4(W))


@pytest.mark.parametrize("name", ["L1", "GP"])
def test_f15_the_base_that_qlora_saw(tmp_path, name):
    """Against PEFT's unmerged adapter on weights that bitsandbytes quantized; the choice is named."""
    model = make(name, tmp_path / "model", "float32")
    adapter = trained(model, tmp_path / "adapter", target_modules=TARGETS[name][:2], std=0.02)
    done = merge(model, adapter, tmp_path / "out", base="dequantized")
    (receipt,) = done.manifest["receipts"]
    assert receipt["base"] == "dequantized" and any("base: dequantized" in note for note in done.manifest["notes"])
    linears = {linear.place.tensor for linear in open_skeleton(open_checkpoint(model)).layout.linears}
    flip = (lambda W: bnb_nf4(W.T).T) if name == "GP" else bnb_nf4
    seen = edit(
        make(name, tmp_path / "seen", "float32"),
        lambda tensors: {k: flip(t) if k in linears else t for k, t in tensors.items()},
    )
    assert_same(logits(tmp_path / "out"), live(seen, adapter))
    assert {n for n, a in done.manifest["inputs"].items() if a["action"] == "changed"} == linears


def test_f15_a_change_that_would_vanish_is_refused_and_the_right_order_keeps_it(tmp_path):
    model = make("L1", tmp_path / "model")
    adapter = trained(model, tmp_path / "adapter", target_modules=["q_proj", "down_proj"], std=0.01)
    quantizing = {"rtn": {"bits": 4, "group_size": 64}}
    wrong = [{"lora.merge": {"adapter": str(adapter), "base": "dequantized"}}, quantizing]
    with pytest.raises(SutureError, match=r"would vanish: .* [\d.]+ % of it would survive"):
        run({"model": str(model), "steps": wrong, "output": str(tmp_path / "out")})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "model"]
    done = merge(model, adapter, tmp_path / "wrong", base="dequantized")
    (receipt,) = done.manifest["receipts"]
    assert receipt["survives_requantizing"] < 0.2 and any(
        "smaller than the quantization" in n for n in receipt["notes"]
    )
    merge_alone(model, adapter, tmp_path / "right")
    name = "model.layers.0.mlp.down_proj.weight"
    W, merged, onto = (read(d)[name] for d in (model, tmp_path / "right", tmp_path / "wrong"))
    delta = merged.float() - W.float()
    gain = lambda Q: float(((Q.float() - bnb_nf4(W).float()) * delta).sum() / delta.square().sum())  # noqa: E731
    assert gain(bnb_nf4(merged)) > 0.7 and gain(bnb_nf4(onto)) < 0.2
    record = receipt["tensors"][name]["survives_requantizing"]
    assert record == pytest.approx(gain(bnb_nf4(onto)), abs=0.02)


def test_f15_both_bases_are_scored_against_the_adapter_on_the_nf4_weights(tmp_path):
    """The figures are those of live models: PEFT's unmerged adapter on what bitsandbytes makes, and the two merges."""
    model = make("L1", tmp_path / "model", "float32")
    adapter = trained(model, tmp_path / "adapter", target_modules=["q_proj", "down_proj"], std=0.02)
    text = ids_file(tmp_path / "ids.jsonl", rows=8, length=16)
    step = {"lora.merge": {"adapter": str(adapter), "compare_bases": True}}
    recipe = {"model": str(model), "steps": [step], "output": str(tmp_path / "out")}
    with pytest.raises(SutureError, match="compare_bases needs a text to score"):
        run(recipe)
    report = {"data": str(text), "window": 24}
    with pytest.raises(SutureError, match=r"merging into the recipe's own model, but fold_norms comes before"):
        run(recipe | {"steps": [{"fold_norms": {}}, step], "report": report})
    asked = run(recipe | {"report": report, "output": str(tmp_path / "asked")}).report.content["qlora_bases"]
    step["lora.merge"] = {"adapter": str(adapter), "base": "dequantized"}  # then it is asked for by itself
    done = run(recipe | {"report": report})
    found = done.report.content["qlora_bases"]
    linears = {linear.place.tensor for linear in open_skeleton(open_checkpoint(model)).layout.linears}
    seen = edit(
        make("L1", tmp_path / "seen", "float32"),
        lambda tensors: {k: bnb_nf4(t) if k in linears else t for k, t in tensors.items()},
    )
    bos = open_checkpoint(model).config["bos_token_id"]  # scoring puts it before each document
    rows = torch.tensor([[bos, *json.loads(line)["input_ids"]] for line in text.read_text().splitlines()])

    def nll(all_logits):
        return torch.nn.functional.cross_entropy(all_logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    on_nf4, merged = nll(live(seen, adapter, rows)), nll(logits(tmp_path / "asked", rows))
    assert found == asked
    assert found["adapter_on_nf4_ppl"] == pytest.approx(float(on_nf4.exp()), rel=1e-4)
    original, dequantized = found["merged"]
    assert original["ratio"] == pytest.approx(float((merged - on_nf4).exp()), rel=1e-4)
    assert original["low"] < original["ratio"] < original["high"]
    assert dequantized["ratio"] == pytest.approx(1, abs=1e-4)  # float32 keeps all of it
    jsonschema.validate(
        done.report.content, json.loads((Path(suture.__file__).parent / "report/schema.json").read_text())
    )
    assert "merged into dequantized: perplexity" in (tmp_path / "out" / "report.md").read_text()


def test_f15_what_qlora_trained_is_merged_from_the_quantized_checkpoint_in_one_recipe(tmp_path):
    """An NF4 checkpoint and its adapter: the steps dequantize and lora.merge give the unmerged pair's logits."""
    model = make("L1", tmp_path / "model", "float32")
    run({"model": str(model), "steps": [{"nf4": {}}], "output": str(tmp_path / "nf4")})
    run({"model": str(tmp_path / "nf4"), "steps": [{"dequantize": {}}], "output": str(tmp_path / "dense")})
    adapter = trained(tmp_path / "dense", tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    steps = [{"dequantize": {}}, {"lora.merge": {"adapter": str(adapter)}}]
    done = run({"model": str(tmp_path / "nf4"), "steps": steps, "output": str(tmp_path / "out")})
    assert_same(logits(tmp_path / "out"), live(tmp_path / "dense", adapter))
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert len(done.manifest["receipts"]) == 2


def test_f_large_factors_whose_rounding_the_model_amplifies_are_merged_and_a_wrong_merge_is_still_found(
    tmp_path, monkeypatch
):
    """Two orders of the same float32 sums differ by more than 1e-4 of the logits here: the last bits explain it."""
    model = make("L1", tmp_path / "model", "float32")
    adapter = trained(model, tmp_path / "adapter", std=0.5, r=8, lora_alpha=20, target_modules="all-linear")
    recipe = {
        "model": str(model),
        "steps": [{"lora.merge": {"adapter": str(adapter)}}],
        "output": str(tmp_path / "out"),
    }
    proof = run(recipe).manifest["receipts"][0]["unmerged_against_merged"]
    assert proof["exact"] and proof["max_logit_difference"] > 1e-4 * proof["largest_logit"]
    assert proof["max_logit_difference"] < 8 * proof["last_bits_move_logits"]
    wanted = live(model, adapter)
    assert float((logits(tmp_path / "out") - wanted).abs().max()) <= 1e-3 * float(wanted.abs().max())
    right = lora_merge.Live.read
    monkeypatch.setattr(lora_merge.Live, "read", lambda self, name: right(self, name) * (1.003 if self.merged else 1))
    with pytest.raises(SutureError, match="should leave the model's function as it is"):
        run(recipe | {"output": str(tmp_path / "wrong")})


# ---- bases that were quantized once


def test_f15_a_change_that_quantizing_again_would_lose_is_refused_after_dequantize(tmp_path):
    """What `dequantize` wrote lies on the grid, in the same recipe or in one before: small changes do not survive it."""
    model = make("L1", tmp_path / "m", "float32")
    run({"model": str(model), "steps": [{"nf4": {}}], "output": str(tmp_path / "q")})
    run({"model": str(tmp_path / "q"), "steps": [{"dequantize": {}}], "output": str(tmp_path / "d")})
    adapter = trained(tmp_path / "d", tmp_path / "a", target_modules=TARGETS["L1"], std=0.02)
    step = {"lora.merge": {"adapter": str(adapter)}}
    for name, source, steps in (
        ("one recipe", "q", [{"dequantize": {}}, step, {"nf4": {}}]),
        ("two", "d", [step, {"nf4": {}}]),
    ):
        with pytest.raises(SutureError, match=r"would vanish: .* of it would survive being quantized again \(nf4\)"):
            run({"model": str(tmp_path / source), "steps": steps, "output": str(tmp_path / name)})
        assert not (tmp_path / name).exists()
    kept = run({"model": str(tmp_path / "d"), "steps": [step], "output": str(tmp_path / "kept")})
    assert kept.manifest["receipts"][0]["survives_requantizing"] is None  # nothing quantizes it again
    fresh = trained(model, tmp_path / "b", target_modules=TARGETS["L1"], std=0.02)
    steps = [{"lora.merge": {"adapter": str(fresh)}}, {"nf4": {}}]
    assert run({"model": str(model), "steps": steps, "output": str(tmp_path / "fine")}).output.exists()


def test_f15_weights_that_an_adapter_saw_already_do_not_go_through_nf4_as_well(tmp_path, shelf):
    model = make("L1", tmp_path / "m", "float32")
    run({"model": str(model), "steps": [{"rtn": {"bits": 8, "group_size": 32}}], "output": str(tmp_path / "q")})
    adapter = trained(model, tmp_path / "a", target_modules=TARGETS["L1"])
    merging = {"lora.merge": {"adapter": str(adapter), "base": "dequantized"}}
    with pytest.raises(SutureError, match=r"base: dequantized after dequantize.*use base: original"):
        run({"model": str(tmp_path / "q"), "steps": [{"dequantize": {}}, merging], "output": str(tmp_path / "o")})
    adapter = trained(shelf("FA"), tmp_path / "f", target_modules=TARGETS["FA-new"])
    with pytest.raises(SutureError, match=r"bitsandbytes leaves falcon's FalconLinear as it is.*use base: original"):
        merge(shelf("FA"), adapter, tmp_path / "o", base="dequantized")


@pytest.mark.parametrize(("first", "then"), [("untie", "L2"), ("retie", "L1")])
def test_f7_tokens_trained_on_a_tied_model_do_not_fit_an_untied_one(tmp_path, shelf, first, then):
    tied = make("L2", tmp_path / "tied", "float32")
    run({"model": str(tied), "steps": [{"untie": {}}], "output": str(tmp_path / "apart")})
    trained_on, given = (tied, tmp_path / "apart") if first == "untie" else (tmp_path / "apart", tied)
    adapter = trained(trained_on, tmp_path / "a", target_modules=["q_proj"], trainable_token_indices=[3, 7])
    hint = {"untie": "retie", "retie": "untie"}[first]
    with pytest.raises(SutureError, match=rf"changes tokens, and was trained on .* put `- {hint}"):
        merge(given, adapter, tmp_path / "out")


def test_f7_a_change_of_one_table_alone_fits_a_tied_and_an_untied_model(tmp_path):
    tied = make("L2", tmp_path / "tied", "float32")
    run({"model": str(tied), "steps": [{"untie": {}}], "output": str(tmp_path / "apart")})
    adapter = trained(tied, tmp_path / "a", target_modules=["q_proj", "embed_tokens"])
    done = merge(tmp_path / "apart", adapter, tmp_path / "out")
    wanted = live(tied, adapter)
    assert float((logits(done.output) - wanted).abs().max()) < 3e-5 * float(wanted.abs().max())


def test_f15_what_a_later_step_leaves_alone_cannot_vanish_in_it(tmp_path):
    model = make("L1", tmp_path / "m", "float32")
    run({"model": str(model), "steps": [{"nf4": {}}], "output": str(tmp_path / "q")})
    run({"model": str(tmp_path / "q"), "steps": [{"dequantize": {}}], "output": str(tmp_path / "d")})
    adapter = trained(tmp_path / "d", tmp_path / "a", target_modules=["q_proj"], std=0.02)
    steps = [{"lora.merge": {"adapter": str(adapter)}}, {"nf4": {"targets": ["down_proj"]}}]
    assert run({"model": str(tmp_path / "d"), "steps": steps, "output": str(tmp_path / "out")}).output.exists()
