"""Every family through both methods, to files that stock transformers loads with the logits that were computed."""

import json
import re
from functools import cache

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from kit import LENGTH, NAMES, edit, fuse_experts, ids_file, make, quantize, read, run

import suture
from suture.calibrate.replay import Stream, run_block, staged_block
from suture.calibrate.skeleton import cut, open_skeleton
from suture.calibrate.statistics import SecondMoment
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.quant.block import gptq_block
from suture.quant.compressed_tensors import tensors
from suture.quant.decode import dense_view
from suture.quant.gptq import output_error
from suture.quant.grid import Search
from suture.quant.rtn import rtn
from suture.quant.scheme import Scheme
from suture.quant.settings import GPTQSettings

BITS, GROUP = 4, 8  # 8 divides every layer of the kit
SAMPLES = 8
TOKENS = SAMPLES * LENGTH


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    return ids_file(tmp_path_factory.mktemp("ids") / "ids.jsonl", rows=6, length=70)


@pytest.fixture(scope="module")
def finished(shelf, ids, tmp_path_factory):
    """Runs of the whole kit, each made once."""
    root = tmp_path_factory.mktemp("out")

    @cache
    def done(name, method):
        data = {"data": ids, "calibration": {"samples": SAMPLES}} if method == "gptq" else {}
        return quantize(shelf(name), root / f"{name}-{method}", method, bits=BITS, group_size=GROUP, **data)

    return done


def layout_of(directory):
    return open_skeleton(open_checkpoint(directory)).layout


def dense_by_hand(stored, linear):
    """[out, in] in float64 from the tensors of a file, by compressed-tensors' unpacking and our own arithmetic."""
    part = lambda end: stored[f"{linear.name}.weight_{end}"]  # noqa: E731
    codes = unpack_from_int32(part("packed"), BITS, torch.Size(part("shape").tolist()), packed_dim=1).double()
    scale = part("scale").double()
    if linear.conv1d:
        codes, scale = codes.T, scale.T
    return (codes.reshape(*scale.shape, -1) * scale[..., None]).reshape(codes.shape)


def original(source, linear):
    weight = cut(source[linear.place.tensor], linear.place)
    return weight.T if linear.conv1d else weight


def assert_verified(manifest, blocks=2):
    found = manifest["verification"]
    assert (found["blocks"], found["of_blocks"], found["missing"]) == (blocks, blocks, 0)
    assert found["max_difference"] <= 1e-5 * found["largest_logit"]


# ---- every family, both methods


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_b11_the_output_loads_in_stock_transformers_with_the_logits_computed(finished, name, method):
    assert_verified(finished(name, method).manifest)
    assert not finished(name, method).fallbacks
    assert finished(name, method).manifest["verification"]["loaded_as"] == architecture(finished(name, method).output)


def architecture(directory):
    return json.loads((directory / "config.json").read_text())["architectures"][0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_c3_c12_every_layer_is_recorded_with_its_method_and_error(finished, shelf, name, method):
    manifest, layout = finished(name, method).manifest, layout_of(shelf(name))
    skipped = {linear.name for linear in layout.linears if linear.role in layout.family.keep}
    assert set(manifest["modules"]) == {linear.name for linear in layout.linears} - skipped
    assert set(manifest["skipped_layers"]) == skipped
    assert manifest["fallbacks"] == {}
    for linear in layout.linears:
        if linear.name in skipped:
            continue
        record = manifest["modules"][linear.name]
        assert record["method"] == method and record["fallback"] is None
        assert (record["bits"], record["group_size"], record["symmetric"]) == (BITS, GROUP, True)
        assert record["shape"] == [linear.out_features, linear.in_features]
        assert 0.02 < record["weight_error"] < 0.25
        if method == "gptq":
            assert record["tokens"] == TOKENS or (linear.expert is not None and 0 < record["tokens"] < TOKENS)
            assert 0 < record["output_error"] < 0.25
            assert record["damp"] == 0.01 and record["damp_retries"] == 0
        else:
            assert record["tokens"] is None and record["output_error"] is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_c11_the_stored_codes_are_the_weights_whose_errors_are_recorded(finished, shelf, name, method):
    manifest, source = finished(name, method).manifest, read(shelf(name))
    stored, view = read(finished(name, method).output), dense_view(open_checkpoint(finished(name, method).output))
    for linear in layout_of(shelf(name)).linears:
        if linear.name not in manifest["modules"]:
            continue
        dense = dense_by_hand(stored, linear)
        seen = view.read(f"{linear.name}.weight")
        seen = seen.T if linear.conv1d else seen
        assert torch.equal(dense.to(seen.dtype), seen)
        weight = original(source, linear).double()
        error = float((weight - seen.double()).norm() / weight.norm())
        assert error == pytest.approx(manifest["modules"][linear.name]["weight_error"], rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_b14_every_other_tensor_is_copied_byte_for_byte(finished, shelf, name, method):
    manifest = finished(name, method).manifest
    before, after = open_checkpoint(shelf(name)), open_checkpoint(finished(name, method).output)
    quantized = {f"{module}.weight" for module in manifest["modules"]}
    assert set(manifest["inputs"]) == set(before.tensors)
    for tensor, account in manifest["inputs"].items():
        if tensor in quantized:
            assert account["action"] == "changed" and tensor not in after.tensors
            assert list(account["outputs"]) == [f"{tensor}_{part}" for part in ("packed", "scale", "shape")]
        else:
            assert account["action"] == "copied" and list(account["outputs"]) == [tensor]
            assert after.read_bytes(tensor) == before.read_bytes(tensor)
            assert after.dtypes[tensor] == before.dtypes[tensor]
    assert set(after.tensors) == {output for account in manifest["inputs"].values() for output in account["outputs"]}


@pytest.mark.parametrize("name", NAMES)
def test_c15_the_config_changes_in_one_key_and_leaves_the_head_alone(finished, shelf, name):
    before = json.loads((shelf(name) / "config.json").read_text())
    after = json.loads((finished(name, "rtn").output / "config.json").read_text())
    assert {k: v for k, v in after.items() if k != "quantization_config"} == before
    head = layout_of(shelf(name)).head
    ignored = after["quantization_config"]["ignore"]
    assert "lm_head" in ignored and (head is None or head.removesuffix(".weight") in ignored)


@pytest.mark.parametrize("name", NAMES)
def test_c12_gptq_is_not_rounding(finished, shelf, name):
    """The records could say so without a single code having moved."""
    rounded, tuned = (read(finished(name, method).output) for method in ("rtn", "gptq"))
    packed = [key for key in tuned if key.endswith(".weight_packed")]
    assert packed
    assert all(not torch.equal(rounded[key], tuned[key]) for key in packed)


# ---- what GPTQ was shown


def replayed_moments(skeleton, ids):
    """Second moment of every linear layer's inputs in the model of `skeleton`: {linear name: moment}."""
    stream, moments = Stream.start(skeleton, list(ids.split(4))), {}
    for index in range(skeleton.n_blocks):
        skeleton.load_block(index)
        stages = skeleton.layout.blocks[index]

        def observe(stage, x, stages=stages):
            for linear in stages[stage]:
                part = x[linear.expert] if isinstance(x, list) else x
                moments.setdefault(linear.name, SecondMoment.zeros(linear.in_features, torch.float64)).add(part)

        staged_block(skeleton, index, stream, stages, observe, lambda _: None, False)
        skeleton.free_block(index)
    return moments


@pytest.mark.parametrize("name", ["L1", "P3", "GP", "MX", "QM", "DS-q-lora"])
def test_c12_recorded_output_errors_are_those_on_inputs_from_the_quantized_model(finished, shelf, name):
    """Replaying the finished model gives each layer the inputs that it had when it was quantized: those of the layers
    before it, already quantized. A Hessian of the unquantized model, or of none, would give other figures."""
    done, source = finished(name, "gptq"), read(shelf(name))
    ids = torch.from_numpy(done.plan.calibration.blocks.ids)
    view = dense_view(open_checkpoint(done.output))
    skeleton = open_skeleton(view)
    moments = replayed_moments(skeleton, ids)
    unquantized = replayed_moments(open_skeleton(open_checkpoint(shelf(name))), ids)
    differing = 0
    by_name = {linear.name: linear for linear in layout_of(shelf(name)).linears}
    for module, record in done.manifest["modules"].items():
        linear = by_name[module]
        dense = view.read(f"{module}.weight")
        dense = dense.T if linear.conv1d else dense
        weight = original(source, linear)
        assert moments[module].tokens == record["tokens"]
        error = output_error(weight, dense, moments[module].hessian())
        assert error == pytest.approx(record["output_error"], rel=1e-3)
        other = output_error(weight, dense, unquantized[module].hessian())
        differing += abs(other - record["output_error"]) > 3e-3 * record["output_error"]
    assert differing > len(done.manifest["modules"]) // 2


@pytest.mark.parametrize("name", ["L1", "QM"])
def test_gptq_gives_the_same_codes_paused_or_run_again_and_in_batches_of_any_size(shelf, name):
    ids = torch.randint(0, 256, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    found = []
    for paused, batch in ((True, 4), (False, 4), (True, 1)):
        skeleton = open_skeleton(open_checkpoint(shelf(name)))
        stream = Stream.start(skeleton, list(ids.split(batch)))
        settings = GPTQSettings(bits=BITS, group_size=GROUP, hessian="float64")
        skeleton.load_block(0)
        run_block(skeleton, 0, stream)
        skeleton.free_block(0)
        skeleton.load_block(1)
        layers = gptq_block(skeleton, 1, stream, block_of(skeleton, 1), settings, torch.bfloat16, paused)
        found.append((layers, stream.buffer))
    for layers, _ in found[1:]:
        for one, other in zip(found[0][0], layers, strict=True):
            assert one.linear == other.linear
            same = (one.quantized.codes == other.quantized.codes).double().mean()
            assert same == 1.0 if layers is found[1][0] else same > 0.99  # another batch size rounds differently
    assert torch.equal(found[0][1], found[1][1])


def block_of(skeleton, index):
    return [linear for group in skeleton.layout.blocks[index] for linear in group]


# ---- experts


def silence_expert(tensors, expert=7):
    """The router's rows in pairs of opposite sign and a row of zeros: two of the pairs' scores are always above zero."""
    name = "model.layers.1.mlp.gate.weight"
    router = tensors[name].clone()
    router[1], router[3], router[expert] = -router[0], -router[2], 0
    return tensors | {name: router}


def test_c4_an_expert_that_sees_no_token_is_rounded_and_recorded_as_a_fallback(tmp_path, ids):
    model = edit(make("QM", tmp_path / "m"), silence_expert)
    done = quantize(model, tmp_path / "out", "gptq", data=ids, bits=BITS, group_size=GROUP)
    silent = {f"model.layers.1.mlp.experts.7.{p}_proj" for p in ("gate", "up", "down")}
    assert done.fallbacks == dict.fromkeys(silent, "no calibration token reached it")
    assert done.manifest["expert_tokens"]["block 1"]["7"] == 0
    assert_verified(done.manifest)
    for module, record in done.manifest["modules"].items():
        expected = ("rtn", 0, None) if module in silent else ("gptq", record["tokens"], record["output_error"])
        assert (record["method"], record["tokens"], record["output_error"]) == expected
    stored, source = read(tmp_path / "out"), read(model)
    for module in silent:  # neutral scales: exactly those of rounding
        plain = rtn(source[f"{module}.weight"].float(), Scheme(BITS, GROUP), torch.bfloat16, search=Search())
        assert all(torch.equal(stored[name], tensor) for name, tensor in tensors(module, plain).items())
    assert all(bool(torch.isfinite(t.float()).all()) for name, t in stored.items() if name.endswith("scale"))


def test_c4_the_manifest_has_a_table_of_tokens_per_expert(finished):
    table = finished("QM", "gptq").manifest["expert_tokens"]
    assert set(table) == {"block 1"}  # block 0 is dense
    assert sorted(table["block 1"], key=int) == [str(e) for e in range(8)]
    table = finished("QM", "gptq").manifest["expert_tokens"] | finished("MX", "gptq").manifest["expert_tokens"]
    assert all(sum(tokens.values()) == 2 * TOKENS for tokens in table.values())  # top 2
    assert finished("L1", "gptq").manifest["expert_tokens"] == {}


@pytest.mark.parametrize(("name", "method"), [("MX", "rtn"), ("QM", "gptq")])
def test_b4_experts_fused_on_disk_give_the_same_codes(finished, tmp_path, ids, name, method):
    model = edit(make(name, tmp_path / "m"), fuse_experts)
    data = {"data": ids, "calibration": {"samples": SAMPLES}} if method == "gptq" else {}
    done = quantize(model, tmp_path / "out", method, bits=BITS, group_size=GROUP, **data)
    assert_verified(done.manifest)
    apart, together = read(finished(name, method).output), read(tmp_path / "out")
    packed = {key for key in apart if ".weight_" in key}
    assert packed == {key for key in together if ".weight_" in key}
    assert all(torch.equal(apart[key], together[key]) for key in packed)
    account = done.manifest["inputs"]["model.layers.1.mlp.experts.down_proj"]
    assert account["action"] == "changed" and len(account["outputs"]) == 3 * (4 if name == "MX" else 8)


@pytest.mark.parametrize("ignore", ["*.experts.2.*", "experts.0.down_proj", "*.experts.*"])
def test_b4_some_experts_or_none_are_refused(shelf, tmp_path, ignore):
    """transformers' loader fuses them, and expects all of them packed."""
    message = r"of 24 expert matrices are selected; loaders read all experts in one format; select all of them"
    with pytest.raises(SutureError, match=message):
        quantize(shelf("QM"), tmp_path / "out", "rtn", bits=BITS, group_size=GROUP, ignore=[ignore])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["MX", "QM"])
def test_b4_experts_fused_on_disk_may_stay_as_they_are(tmp_path, name):
    model = edit(make(name, tmp_path / "m"), fuse_experts)
    done = quantize(model, tmp_path / "out", "rtn", bits=BITS, group_size=GROUP, ignore=["*.experts.*"])
    assert_verified(done.manifest)
    assert not any("experts" in module for module in done.manifest["modules"])


def test_b4_some_of_the_experts_fused_on_disk_are_refused(tmp_path):
    model = edit(make("QM", tmp_path / "m"), fuse_experts)
    with pytest.raises(SutureError, match="select all or none of them"):
        quantize(model, tmp_path / "out", "rtn", bits=BITS, group_size=GROUP, ignore=["*.experts.2.*"])


# ---- settings


ASYMMETRIC = {"bits": 3, "group_size": GROUP, "symmetric": False, "actorder": "none"}
CHANNEL = {"bits": 8, "group_size": -1, "search": False}


@pytest.mark.parametrize(
    ("name", "method", "settings"),
    [
        ("L1", "gptq", ASYMMETRIC),
        ("Q3", "gptq", ASYMMETRIC),
        ("DS", "gptq", ASYMMETRIC),
        ("P3", "rtn", CHANNEL),
        ("NX", "gptq", CHANNEL),
        ("QM", "rtn", CHANNEL),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value['bits']}bit",
)
def test_c9_c11_other_schemes_reload_too(shelf, ids, tmp_path, name, method, settings):
    data = {"data": ids} if method == "gptq" else {}
    done = quantize(shelf(name), tmp_path / "out", method, **settings, **data)
    assert_verified(done.manifest)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config.get("dequantize", False) == (settings is ASYMMETRIC or name == "QM")


@pytest.mark.parametrize("name", ["MX", "GP"])
def test_asymmetric_schemes_that_no_loader_reads_are_refused(shelf, tmp_path, name):
    with pytest.raises(SutureError, match=r"symmetric: false is not possible for .*; use symmetric: true"):
        quantize(shelf(name), tmp_path / "out", "rtn", bits=BITS, group_size=GROUP, symmetric=False)


def test_b7_one_scale_per_channel_is_refused_for_conv1d_of_several_widths(shelf, tmp_path):
    with pytest.raises(SutureError, match="group_size: -1 with Conv1D layers of different inputs"):
        quantize(shelf("GP"), tmp_path / "out", "rtn", bits=BITS, group_size=-1)


@pytest.mark.parametrize(
    ("name", "settings", "problem", "hint"),
    [
        ("L0", {"group_size": 96}, "96 does not divide the inputs (64, 128) of 14 layers", "use 64 or 32 or 16"),
        ("GP", {"group_size": 128}, "128 does not divide the inputs (48, 192) of 8 layers", "use 48 or 16"),
        ("Q3", {"group_size": 32}, "32 does not divide the inputs (40) of 10 layers", "use -1"),
        ("NX", {"group_size": 128}, "128 does not divide the inputs (64, 160) of 8 layers", "use 32 or 16"),
        ("L0", {"group_size": 96, "targets": ["down_proj"]}, "the inputs (128) of 2 layers", "use 128 or 64 or 32"),
    ],
)
def test_c6_a_group_size_that_does_not_divide_is_refused_before_work(
    shelf, ids, tmp_path, name, settings, problem, hint
):
    with pytest.raises(SutureError) as error:
        quantize(shelf(name), tmp_path / "out", "gptq", bits=BITS, data=ids, **settings)
    message = str(error.value)
    assert message.startswith("group_size: ") and problem in message and hint in message
    assert re.search(r"first (\w+\.)?(layers|h)\.0\.", message)
    assert "-1 (one scale per channel), or list them under ignore" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "ignore", "method"),
    [
        ("L1", "down_proj", "gptq"),
        ("P3", "qkv_proj", "rtn"),
        ("GP", "c_fc", "gptq"),
        ("MX", "o_proj", "rtn"),
        ("W-mistral3", "o_proj", "gptq"),
        ("W-gemma3-new", "down_proj", "rtn"),
    ],
)
def test_layers_under_ignore_stay_dense_and_reload(shelf, ids, tmp_path, name, ignore, method):
    data = {"data": ids} if method == "gptq" else {}
    done = quantize(shelf(name), tmp_path / "out", method, bits=BITS, group_size=GROUP, ignore=[ignore], **data)
    assert_verified(done.manifest)
    assert set(done.manifest["skipped_layers"].values()) == {"listed under ignore"}
    after, before = read(tmp_path / "out"), read(shelf(name))
    for module in done.manifest["skipped_layers"]:
        assert module.endswith(ignore)
        assert torch.equal(after[f"{module}.weight"], before[f"{module}.weight"])


def test_a_block_of_which_nothing_is_chosen_is_copied(shelf, ids, tmp_path):
    done = quantize(
        shelf("L1"), tmp_path / "out", "gptq", data=ids, bits=BITS, group_size=GROUP, ignore=["*.layers.0.*"]
    )
    assert_verified(done.manifest)
    assert len(done.manifest["modules"]) == 7


@pytest.mark.parametrize("targets", [["kv_a_proj_with_mqa", "q_b_proj"], ["all-linear", "*.kv_a_proj*"]])
def test_the_latent_projection_can_be_quantized_when_named(shelf, ids, tmp_path, targets):
    """The forward comes to it after q_b_proj, though it shares q_a_proj's input."""
    done = quantize(
        shelf("DS-q-lora"), tmp_path / "out", "gptq", data=ids, bits=BITS, group_size=GROUP, targets=targets
    )
    assert_verified(done.manifest)
    assert sum(module.endswith("kv_a_proj_with_mqa") for module in done.manifest["modules"]) == 2


# ---- thin, odd and damaged input


@pytest.mark.parametrize("name", ["L0", "GP"])
def test_c1_four_calibration_tokens_are_a_warning_not_a_crash(shelf, tmp_path, name):
    few = ids_file(tmp_path / "few.jsonl", rows=1, length=4)
    done = quantize(
        shelf(name),
        tmp_path / "out",
        "gptq",
        data=few,
        calibration={"samples": 1, "length": 4},
        bits=BITS,
        group_size=GROUP,
    )
    assert_verified(done.manifest)
    widest = 192 if name == "GP" else 128
    assert any(
        note.startswith(f"4 calibration tokens cannot determine layers of {widest}") for note in done.manifest["notes"]
    )
    assert all(record["tokens"] == 4 for record in done.manifest["modules"].values())
    assert all(record["damp"] is not None for record in done.manifest["modules"].values())


def test_g9_a_token_outside_the_vocabulary_is_refused_before_work(shelf, tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 400] * 40}) + "\n")
    with pytest.raises(SutureError, match="400"):
        quantize(shelf("L1"), tmp_path / "out", "gptq", data=path, bits=BITS, group_size=GROUP)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ids.jsonl"]


def test_g10_learned_positions_are_never_exceeded(shelf, ids, tmp_path):
    settings = {"data": ids, "bits": BITS, "group_size": GROUP}
    with pytest.raises(SutureError, match="64"):
        quantize(shelf("GP"), tmp_path / "out", "gptq", calibration={"samples": 2, "length": 65}, **settings)
    assert_verified(
        quantize(shelf("GP"), tmp_path / "out", "gptq", calibration={"samples": 2, "length": 64}, **settings).manifest
    )


def test_a19_stale_buffers_go_and_unknown_tensors_stay(tmp_path, ids):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "value_head.weight": torch.ones(1, 64)}
    model = edit(make("L1", tmp_path / "m"), lambda tensors: tensors | extra)
    done = quantize(model, tmp_path / "out", "rtn", bits=BITS, group_size=GROUP)
    assert_verified(done.manifest)
    stored = read(tmp_path / "out")
    assert not any("inv_freq" in key for key in stored)
    assert torch.equal(stored["value_head.weight"], extra["value_head.weight"])
    dropped = done.manifest["inputs"]["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert dropped["action"] == "dropped" and "recomputed" in dropped["reason"] and not dropped["outputs"]
    assert any("inv_freq dropped: rotary frequencies" in note for note in done.manifest["notes"])


@pytest.mark.parametrize("method", ["gptq"])
def test_a19_b7_gpt2_as_first_published_without_prefix_and_with_masks(tmp_path, ids, method):
    def bare(tensors):
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
        return {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()} | masks

    model = edit(make("GP", tmp_path / "m"), bare)
    data = {"data": ids} if method == "gptq" else {}
    done = quantize(model, tmp_path / "out", method, bits=BITS, group_size=GROUP, **data)
    assert_verified(done.manifest)
    stored = read(tmp_path / "out")
    assert "h.0.attn.c_attn.bias" in stored and "h.0.attn.bias" not in stored


def test_f1_a_stored_copy_of_a_tied_head_stays(tmp_path):
    copied = lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}  # noqa: E731
    model = edit(make("L2", tmp_path / "m"), copied)
    done = quantize(model, tmp_path / "out", "rtn", bits=BITS, group_size=GROUP)
    assert_verified(done.manifest)
    assert done.manifest["inputs"]["lm_head.weight"]["action"] == "copied"
    assert torch.equal(read(tmp_path / "out")["lm_head.weight"], read(model)["lm_head.weight"])


@pytest.mark.parametrize(
    "block",
    [1, 0],
)
def test_b17_inputs_that_overflow_name_the_first_layer_that_receives_them(tmp_path, ids, block):
    def hot(tensors):
        key = f"model.layers.{block}.mlp.up_proj.weight"
        return tensors | {key: (tensors[key].float() * 1e38).to(torch.bfloat16)}

    model = edit(make("L1", tmp_path / "m"), hot)
    with pytest.raises(SutureError, match=rf"model\.layers\.{block}\.mlp\.down_proj: its inputs .* hold NaN or"):
        quantize(model, tmp_path / "out", "gptq", data=ids, bits=BITS, group_size=GROUP)
    assert not (tmp_path / "out").exists()


def test_b17_a_weight_that_is_not_finite_is_named(tmp_path):
    def damaged(tensors):
        tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] = torch.inf
        return tensors

    model = edit(make("L1", tmp_path / "m"), damaged)
    with pytest.raises(
        SutureError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight holds 1 NaN or infinite values"
    ):
        quantize(model, tmp_path / "out", "rtn", bits=BITS, group_size=GROUP)
    assert not (tmp_path / "out").exists()


# ---- chains, and the same again


@pytest.mark.parametrize(("name", "method"), [("L2", "gptq"), ("Q2", "gptq"), ("GP", "rtn")])
def test_c15_f1_untie_then_quantize(finished, shelf, ids, tmp_path, name, method):
    """The head becomes an exact copy; codes and all else are those of the tied model."""
    steps = [{"untie": {}}, {method: {"bits": BITS, "group_size": GROUP}}]
    calibration = {"data": str(ids), "samples": SAMPLES, "length": LENGTH}
    done = run({"model": str(shelf(name)), "output": str(tmp_path / "out"), "steps": steps, "calibration": calibration})
    assert_verified(done.manifest)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    embedding = layout_of(shelf(name)).embedding
    stored, source = read(tmp_path / "out"), read(shelf(name))
    assert torch.equal(stored["lm_head.weight"], source[embedding])
    assert torch.equal(stored[embedding], source[embedding])
    assert list(done.manifest["inputs"][embedding]["outputs"]) == [embedding, "lm_head.weight"]
    assert {edit["key"] for edit in done.manifest["config_edits"]} == {"tie_word_embeddings", "quantization_config"}
    assert "lm_head" in config["quantization_config"]["ignore"]
    tied = read(finished(name, method).output)
    assert set(stored) - set(tied) == {"lm_head.weight"}
    assert all(torch.equal(stored[key], tied[key]) for key in tied)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("L2", "lm_head.weight"),
        ("NX", "embed_out.weight"),
        ("W-gemma3", "language_model.lm_head.weight"),
        ("W-gemma3-new", "lm_head.weight"),
    ],
)
def test_f1_untying_alone_is_exact(tmp_path, name, head):
    model = make(name, tmp_path / "m", tie_word_embeddings=True)
    assert head not in read(model)
    done = run({"model": str(model), "output": str(tmp_path / "out"), "steps": [{"untie": {}}]})
    assert done.manifest["verification"]["max_difference"] == 0.0
    assert set(read(tmp_path / "out")) - set(read(model)) == {head}
    assert torch.equal(read(tmp_path / "out")[head], read(model)[layout_of(model).embedding])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config.get("text_config", config)["tie_word_embeddings"] is False


def test_f1_untying_a_model_that_is_not_tied_is_refused(shelf, tmp_path):
    with pytest.raises(SutureError, match="untie: this model's head is not tied"):
        run({"model": str(shelf("L1")), "output": str(tmp_path / "out"), "steps": [{"untie": {}}]})


@pytest.mark.parametrize("name", ["L1", "QM"])
def test_the_same_recipe_writes_the_same_bytes(finished, shelf, ids, tmp_path, name):
    again = quantize(
        shelf(name), tmp_path / "out", "gptq", data=ids, calibration={"samples": SAMPLES}, bits=BITS, group_size=GROUP
    )
    assert again.manifest["files"] == finished(name, "gptq").manifest["files"]


def test_quantized_input_is_refused(finished, tmp_path):
    with pytest.raises(SutureError, match=r"already quantized \(compressed-tensors\)"):
        quantize(finished("L1", "rtn").output, tmp_path / "out", "rtn", bits=BITS, group_size=GROUP)


@pytest.mark.parametrize("name", ["L1"])
def test_verification_in_a_process_of_its_own_agrees(finished, shelf, tmp_path, name):
    """As users run it; the other tests here reload in this one."""
    done = suture.quantize(shelf(name), tmp_path / "out", "rtn", bits=BITS, group_size=GROUP)
    assert done.manifest["verification"] == finished(name, "rtn").manifest["verification"]


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("gptq", {"bits": 4, "group_size": 8, "format": "gptq"}, "format gptq: not possible for falcon"),
        ("rtn", {"bits": 4, "group_size": 8, "format": "awq", "symmetric": False}, "format awq: not possible"),
        ("nf4", {}, "bitsandbytes' format: not possible"),
        ("int8", {}, "bitsandbytes' format: not possible"),
        ("smoothquant", {}, "8-bit inputs: not possible"),
    ],
)
def test_c11_what_loaders_pass_by_in_a_falcon_is_refused(shelf, ids, tmp_path, method, settings, message):
    """transformers puts its modules in the place of nn.Linear alone, and then finds tensors of other shapes in the file."""
    with pytest.raises(SutureError, match=message + r".*FalconLinear.*put `- unfuse: \{\}` before it"):
        quantize(
            shelf("FA"), tmp_path / "out", method, data=ids if method in ("gptq", "smoothquant") else None, **settings
        )


def test_b6_a_falcon_taken_apart_is_quantized_to_what_it_could_not_hold(shelf, ids, tmp_path):
    done = run({"model": str(shelf("FA-new")), "output": str(tmp_path / "out"), "steps": [{"unfuse": {}}, {"nf4": {}}]})
    assert done.manifest["verification"]["missing"] == 0 and done.manifest["verification"]["unexpected"] == 0
    assert len(done.manifest["modules"]) == 2 * 6
