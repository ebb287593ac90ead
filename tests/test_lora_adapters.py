"""Commands that write adapters, against PEFT: what they write loads there and does what it says."""

import json

import pytest
import torch
from adapters import TARGETS, edit_adapter, live, logits, trained
from kit import Shelf, edit, ids_file, make, quantize, read, run, stock
from peft import PeftModel
from safetensors.torch import load_file

from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.lora.delta import effective_rank, reduce, singular_values
from suture.lora.extract import spectrum
from suture.lora.transport import Map, find_map, pooled
from suture.pipeline.adapters import attach, combine, extract, extraction_curve, inspect_adapter, transport
from suture.pipeline.recipe import CalibrationSettings
from suture.pipeline.texts import calibration_text, text_model
from suture.quant.decode import dense_view


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    shelf = Shelf(tmp_path_factory.mktemp("kit"))
    return lambda name: shelf(name, "float32")


def assert_same(found, wanted, tolerance=1e-5):
    assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


def deltas(directory):
    """Module -> s B A in float64, by the file and the config alone."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    found = {}
    for key, A in tensors.items():
        if key.endswith("lora_A.weight"):
            B = tensors[key.replace("lora_A", "lora_B")]
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            r = A.shape[0]
            alpha = config["alpha_pattern"].get(path.replace(".", r"\."), config["lora_alpha"])
            found[path] = alpha / (r**0.5 if config["use_rslora"] else r) * (B.double() @ A.double())
    return found


# ---- attach


@pytest.mark.parametrize("init", ["default", "gaussian", "orthogonal", "pissa"])
@pytest.mark.parametrize("name", ["L1", "P3"])
def test_a_new_adapter_loads_in_peft_and_changes_nothing(shelf, tmp_path, name, init):
    attach(shelf(name), tmp_path / "new", r=4, alpha=10, init=init, rslora=init == "gaussian")
    tolerance = 1e-4 if init == "pissa" else 1e-5  # PEFT takes the base apart in float32
    assert_same(live(shelf(name), tmp_path / "new"), logits(shelf(name)), tolerance)
    modules = deltas(tmp_path / "new")
    assert {path.rpartition(".")[2] for path in modules} == set(TARGETS[name])
    if init == "pissa":
        assert all(float(delta.norm()) > 0.1 for delta in modules.values())


@pytest.mark.parametrize("name", ["DS", "QM"])
def test_layers_whose_names_peft_takes_for_experts_are_left_out_by_name(shelf, tmp_path, name):
    written = attach(shelf(name), tmp_path / "new", r=4)
    assert any("PEFT takes their names for experts'" in note for note in written.notes)
    loaded = PeftModel.from_pretrained(stock(shelf(name)), tmp_path / "new").state_dict()
    ours = load_file(tmp_path / "new/adapter_model.safetensors")
    assert {k.replace(".default", "") for k in loaded if "lora_" in k} == set(ours)


def test_gpt2_and_dora_load_in_peft(shelf, tmp_path):
    attach(shelf("GP"), tmp_path / "plain", r=4)
    assert_same(live(shelf("GP"), tmp_path / "plain"), logits(shelf("GP")))
    attach(shelf("L1"), tmp_path / "dora", r=4, dora=True, targets=["q_proj"])
    assert_same(live(shelf("L1"), tmp_path / "dora"), logits(shelf("L1")))


def test_loftq_takes_the_most_of_the_quantization_error_that_its_rank_can(shelf, tmp_path):
    quantize(shelf("L1"), tmp_path / "w3", bits=3, group_size=8)
    written = attach(tmp_path / "w3", tmp_path / "new", r=8, alpha=4, init="loftq", original=shelf("L1"))
    original, rounded = read(shelf("L1")), dense_view(open_checkpoint(tmp_path / "w3"))
    for path, delta in deltas(tmp_path / "new").items():
        E = original[f"{path}.weight"].double() - rounded.read(f"{path}.weight").double()
        S = torch.linalg.svdvals(E)
        assert float((E - delta).norm()) == pytest.approx(float(S[8:].norm()), rel=1e-4)
        assert written.record["modules"][path]["error_taken_away"] == pytest.approx(
            float(S[:8].square().sum() / S.square().sum()), rel=1e-3
        )


def test_starts_that_nothing_could_load_are_refused(shelf, tmp_path):
    quantize(shelf("L1"), tmp_path / "w4", bits=4, group_size=16)
    with pytest.raises(SutureError, match="is quantized, and pissa takes its start out of weights"):
        attach(tmp_path / "w4", tmp_path / "new", r=4, init="pissa")
    with pytest.raises(SutureError, match="alpha: inf is not a number above 0"):
        attach(shelf("L1"), tmp_path / "new", r=4, alpha=float("inf"))
    assert not (tmp_path / "new").exists()


def test_eora_makes_up_for_more_of_what_layers_put_out_than_loftq(shelf, tmp_path):
    """On the calibration tokens' inputs, layer by layer; the reference is the weighted truncation written out here."""
    quantize(shelf("L1"), tmp_path / "w3", bits=3, group_size=8)
    text = {"data": str(ids_file(tmp_path / "ids.jsonl")), "samples": 8, "length": 24}
    options = {"r": 4, "alpha": 6, "original": shelf("L1")}
    attach(tmp_path / "w3", tmp_path / "loftq", init="loftq", **options)
    attach(tmp_path / "w3", tmp_path / "eora", init="eora", calibration=text, **options)
    original, rounded = read(shelf("L1")), dense_view(open_checkpoint(tmp_path / "w3"))
    tokens = text_model(open_checkpoint(tmp_path / "w3"), rounded.shapes["model.embed_tokens.weight"][0], 128)
    blocks = calibration_text(CalibrationSettings.model_validate(text), tokens).blocks
    inputs = {}
    model = stock(shelf("L1"))

    def keep(path):
        return lambda module, x: inputs.setdefault(path, []).append(x[0].flatten(0, -2).double())

    plain, weighted = deltas(tmp_path / "loftq"), deltas(tmp_path / "eora")
    for path in plain:
        model.get_submodule(path).register_forward_pre_hook(keep(path))
    with torch.no_grad():
        model(torch.from_numpy(blocks.ids))
    assert set(plain) == set(weighted)
    for path, delta in weighted.items():
        E = original[f"{path}.weight"].double() - rounded.read(f"{path}.weight").double()
        X = torch.cat(inputs[path])
        left = [float((X @ (E - d).T).norm()) for d in (delta, plain[path])]
        best = torch.linalg.svdvals(E @ torch.linalg.cholesky(X.T @ X + 1e-9 * torch.eye(X.shape[1]).double()))[4:]
        assert left[0] <= left[1] * (1 + 1e-6), path
        assert left[0] == pytest.approx(float(best.norm()), rel=2e-2), path


def test_attach_refuses_what_cannot_be(shelf, tmp_path):
    with pytest.raises(SutureError, match=r"'q_prj' matches no linear layer .did you mean 'q_proj'"):
        attach(shelf("L1"), tmp_path / "new", targets=["q_prj"])
    with pytest.raises(SutureError, match="r: 17 is more than"):
        attach(shelf("L1"), tmp_path / "new", r=17)
    with pytest.raises(SutureError, match="loftq needs the original"):
        attach(shelf("L1"), tmp_path / "new", init="loftq")
    assert not list(tmp_path.iterdir())


def test_f19_an_adapter_knows_its_base(shelf, tmp_path):
    attach(shelf("L1"), tmp_path / "new", r=4, init="orthogonal")
    other = edit(make("L1", tmp_path / "other", "float32"), lambda ts: {k: t * 1.01 for k, t in ts.items()})
    with pytest.raises(SutureError, match="was made for another base"):
        merged_model(other, tmp_path / "new", tmp_path / "out")
    merged_model(shelf("L1"), tmp_path / "new", tmp_path / "out")
    assert_same(logits(tmp_path / "out"), logits(shelf("L1")))


# ---- extract


def tuned(shelf, name, directory, change):
    """A copy of the kit's model with `change(name, tensor)` applied to every tensor."""
    model = make(name, directory, "float32")
    return edit(model, lambda tensors: {k: change(k, t) for k, t in tensors.items()})


def noise(name, tensor, std=0.05):
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    return tensor + std * torch.randn(tensor.shape, generator=generator)


@pytest.mark.parametrize("name", ["L1", "GP", "Q2"])
def test_extraction_at_full_rank_is_the_tuned_model(shelf, tmp_path, name):
    after = tuned(shelf, name, tmp_path / "tuned", noise)
    written = extract(shelf(name), after, tmp_path / "new", rank=64)
    assert not any("not covered" in note for note in written.notes), written.notes
    assert_same(live(shelf(name), tmp_path / "new"), logits(after), 3e-5)


def test_a_head_with_a_bias_and_a_tuned_model_that_is_damaged(shelf, tmp_path):
    after = tuned(shelf, "PH", tmp_path / "tuned", noise)
    extract(shelf("PH"), after, tmp_path / "new", rank=64)
    assert_same(live(shelf("PH"), tmp_path / "new"), logits(after), 3e-5)
    broken = edit(after, lambda ts: {k: t * float("nan") if "fc1.weight" in k else t for k, t in ts.items()})
    with pytest.raises(SutureError, match=r"fc1\.weight holds .* NaN"):
        extract(shelf("PH"), broken, tmp_path / "x", rank=4)


def test_extraction_keeps_the_best_rank_and_says_what_it_left(shelf, tmp_path):
    after = tuned(shelf, "L1", tmp_path / "tuned", noise)
    for number, how in enumerate(({"rank": 3}, {"energy": 0.6}, {"budget": 4000})):
        written = extract(shelf("L1"), after, tmp_path / f"{number}", embeddings="skip", **how)
        before, later = read(shelf("L1")), read(after)
        spent = 0
        for path, delta in deltas(tmp_path / f"{number}").items():
            D = (later[f"{path}.weight"] - before[f"{path}.weight"]).double()
            S = torch.linalg.svdvals(D)
            record = written.record["modules"][path]
            r = record["r"]
            spent += r * sum(D.shape)
            assert float((D - delta).norm()) == pytest.approx(float(S[r:].norm()), rel=1e-3)
            assert record["kept"] == pytest.approx(float(S[:r].square().sum() / S.square().sum()), rel=1e-3)
            if "energy" in how:
                assert record["kept"] >= 0.6 > float(S[: r - 1].square().sum() / S.square().sum())
            if "rank" in how:
                assert r == 3
        assert "budget" not in how or 3000 < spent <= 4000
        skipped = [note for note in written.notes if "not covered" in note]
        assert len(skipped) == 2 and all("embeddings: skip" in note for note in skipped)


def test_the_curve_goes_from_the_base_to_the_tuned_model(shelf, tmp_path):
    after = tuned(shelf, "L1", tmp_path / "tuned", noise)
    extract(shelf("L1"), after, tmp_path / "new", rank=64)
    text = ids_file(tmp_path / "ids.jsonl", rows=6, length=40)
    rows = extraction_curve(shelf("L1"), after, tmp_path / "new", str(text), ranks=[2, 64], window=40)
    assert [row["model"] for row in rows] == ["base", "rank 2", "rank 64", "tuned"]
    assert rows[2]["against_tuned"][0] == pytest.approx(1, abs=1e-4) and rows[2]["kept"] == pytest.approx(1)
    assert abs(rows[0]["against_tuned"][0] - 1) > 0.01 and 0 < rows[1]["kept"] < 1


def test_the_randomized_svd_agrees_with_the_full_one():
    generator = torch.Generator().manual_seed(0)
    U = torch.linalg.qr(torch.randn(700, 600, generator=generator, dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(650, 600, generator=generator, dtype=torch.float64))[0]
    S = torch.arange(1, 601, dtype=torch.float64).pow(-1.0)
    found = spectrum((U * S) @ V.T, 20)
    assert torch.allclose(found.S, S[:20], rtol=1e-4)
    assert found.energy == pytest.approx(float(S.square().sum()))


# ---- combine


def test_sums_are_exact_also_for_rslora_and_reduced_by_the_core(shelf, tmp_path):
    one = trained(shelf("L1"), tmp_path / "one", target_modules=["q_proj", "down_proj"], use_rslora=True)
    two = trained(shelf("L1"), tmp_path / "two", seed=1, r=6, target_modules=["q_proj"], alpha_pattern={"q_proj": 3})
    edit_adapter(two, alpha_pattern={}, lora_alpha=3)
    combine([(one, 0.7), (two, -1.5)], tmp_path / "sum")
    a, b, total = deltas(one), deltas(two), deltas(tmp_path / "sum")
    for path, delta in total.items():
        wanted = 0.7 * a[path] + (-1.5 * b[path] if path in b else 0)
        assert torch.allclose(delta, wanted, atol=1e-6)
    combine([(one, 0.7), (two, -1.5)], tmp_path / "less", rank=3)
    for path, delta in deltas(tmp_path / "less").items():
        S = torch.linalg.svdvals(total[path])
        assert float((total[path] - delta).norm()) == pytest.approx(float(S[3:].norm()), rel=1e-4, abs=1e-6)
    combine([(one, 1.0)], tmp_path / "same")
    assert_same(live(shelf("L1"), tmp_path / "same"), live(shelf("L1"), one))


def test_ties_and_dare_act_on_the_changes(shelf, tmp_path):
    one = trained(shelf("L1"), tmp_path / "one", target_modules=["q_proj"])
    two = trained(shelf("L1"), tmp_path / "two", seed=1, target_modules=["q_proj"])
    combine([(one, 1.0), (two, 1.0)], tmp_path / "ties", method="ties", density=0.25, rank=64)
    for path, delta in deltas(tmp_path / "ties").items():
        wanted = ties_by_hand([deltas(one)[path], deltas(two)[path]], 0.25)
        assert torch.allclose(delta, wanted, atol=1e-6)
    combine([(one, 1.0), (two, 1.0)], tmp_path / "dare", method="dare", density=1.0, rank=64)
    for path, delta in deltas(tmp_path / "dare").items():
        assert torch.allclose(delta, deltas(one)[path] + deltas(two)[path], atol=1e-6)
    with pytest.raises(SutureError, match="ties: its result has full rank"):
        combine([(one, 1.0)], tmp_path / "x", method="ties")


def ties_by_hand(changes, density):
    """One number at a time."""
    keep = round(density * changes[0].numel())
    floors = [change.abs().flatten().sort(descending=True).values[keep - 1] for change in changes]
    out = torch.zeros_like(changes[0])
    for i in range(out.numel()):
        left = [float(c.flatten()[i]) for c, f in zip(changes, floors, strict=True) if abs(float(c.flatten()[i])) >= f]
        agreed = [x for x in left if x * sum(left) > 0]
        out.view(-1)[i] = sum(agreed) / len(agreed) if agreed else 0
    return out


def test_what_is_no_sum_is_refused(shelf, tmp_path):
    dora = trained(shelf("L1"), tmp_path / "dora", target_modules=["q_proj"], use_dora=True)
    with pytest.raises(SutureError, match="DoRA's magnitudes, whose sum is not an adapter"):
        combine([(dora, 1.0)], tmp_path / "out")
    saved = trained(shelf("L1"), tmp_path / "saved", target_modules=["q_proj"], modules_to_save=["norm"])
    with pytest.raises(SutureError, match=r"more than low-rank changes \(model.layers.0.input_layernorm\)"):
        combine([(saved, 1.0)], tmp_path / "out")
    with pytest.raises(SutureError, match="weight inf is not a number"):
        combine([(saved, float("inf"))], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_r_by_r_core_is_the_whole_svd():
    generator = torch.Generator().manual_seed(0)
    L, R = torch.randn(40, 5, generator=generator), torch.randn(5, 30, generator=generator)
    S = torch.linalg.svdvals((L @ R).double())[:5]
    assert torch.allclose(singular_values(L, R), S, rtol=1e-5)
    B, A, kept = reduce(L, R, 2)
    assert kept == pytest.approx(float(S[:2].square().sum() / S.square().sum()), rel=1e-5)
    assert float(((L @ R).double() - B @ A).norm()) == pytest.approx(float(S[2:].norm()), rel=1e-4)
    assert effective_rank(torch.ones(4)) == pytest.approx(4) and effective_rank(torch.tensor([3.0, 0.0])) == 1


# ---- transport


def changed_model(shelf, name, directory, tensors, **config):
    return edit(make(name, directory, "float32"), tensors, **config)


def assert_follows(shelf, adapter, before, after, merged_after, tmp_path):
    """The adapter carried over gives the converted model what converting the merged model gives."""
    transport(adapter, before, after, tmp_path / "carried")
    assert_same(live(after, tmp_path / "carried"), logits(merged_after), 2e-5)


def merged_model(base, adapter, output):
    run({"model": str(base), "steps": [{"lora.merge": {"adapter": str(adapter)}}], "output": str(output)})
    return output


def pool(tensors):
    """Mean-pooled GQA: 8 heads of 8 rows to 2."""
    return {k: pooled(t, 8, 4) if "k_proj" in k or "v_proj" in k else t for k, t in tensors.items()}


def permute(tensors):
    """Query, key and value heads in another order, with the columns of o_proj that read them."""
    rows = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])[:, None] * 8 + torch.arange(8)
    rows = rows.flatten()
    result = dict(tensors)
    for k, t in tensors.items():
        if k.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            result[k] = t[rows]
        elif k.endswith("o_proj.weight"):
            result[k] = t[:, rows]
    return result


def scale(tensors):
    """What SmoothQuant moves from norms into layers, and AWQ from o_proj's inputs into v_proj's outputs."""
    result = dict(tensors)
    for block in range(2):
        s = torch.linspace(0.5, 2, 64)
        p = f"model.layers.{block}."
        result[f"{p}input_layernorm.weight"] = tensors[f"{p}input_layernorm.weight"] / s
        for x in "qkv":
            result[f"{p}self_attn.{x}_proj.weight"] = tensors[f"{p}self_attn.{x}_proj.weight"] * s
        t = torch.linspace(3, 0.3, 64)
        v, o = f"{p}self_attn.v_proj.weight", f"{p}self_attn.o_proj.weight"
        result[v], result[o] = result[v] / t[:, None], tensors[o] * t
    return result


@pytest.mark.parametrize("surgery", [pool, permute, scale])
def test_an_adapter_follows_linear_surgery_exactly(shelf, tmp_path, surgery):
    config = {"num_key_value_heads": 2} if surgery is pool else {}
    adapter = trained(shelf("L0"), tmp_path / "adapter", target_modules=TARGETS["L0"])
    merged = merged_model(shelf("L0"), adapter, tmp_path / "merged")
    after = changed_model(shelf, "L0", tmp_path / "after", surgery, **config)
    edit(merged, surgery, **config)
    assert_follows(shelf, adapter, shelf("L0"), after, merged, tmp_path)


@pytest.mark.parametrize(
    "steps",
    [
        [{"fuse": {}}],
        [{"fuse": {}}, {"unfuse": {}}],
        [{"permute": {"heads": "random", "neurons": "random"}}],
        [{"fold_norms": {}}],
    ],
)
def test_an_adapter_follows_the_steps_that_keep_the_function(shelf, tmp_path, steps):
    adapter = trained(shelf("L1"), tmp_path / "adapter", target_modules=TARGETS["L1"])
    run({"model": str(shelf("L1")), "steps": steps, "output": str(tmp_path / "after")})
    transport(adapter, shelf("L1"), tmp_path / "after", tmp_path / "carried")
    assert_same(live(tmp_path / "after", tmp_path / "carried"), live(shelf("L1"), adapter), 3e-5)


@pytest.mark.parametrize(
    ("name", "second", "first"),
    [("NX", "post_attention_layernorm", "input_layernorm"), ("FA-new", "ln_mlp", "ln_attn")],
)
def test_b6_an_adapter_follows_neox_and_falcon_to_phi_and_back(tmp_path, name, second, first):
    """Through other names and rows interleaved by head or group; two equal norms are one, so that only rows move."""

    def one_norm(tensors):
        return {name: tensors[name.replace(second, first)].clone() for name in tensors}

    model = edit(make(name, tmp_path / "model", "float32"), one_norm)
    adapter = trained(model, tmp_path / "adapter", target_modules=TARGETS[name])
    run({"model": str(model), "steps": [{"unfuse": {}}], "output": str(tmp_path / "phi")})
    transport(adapter, model, tmp_path / "phi", tmp_path / "there")
    assert_same(live(tmp_path / "phi", tmp_path / "there"), live(model, adapter), 3e-5)
    transport(tmp_path / "there", tmp_path / "phi", model, tmp_path / "back")
    assert_same(live(model, tmp_path / "back"), live(model, adapter), 3e-5)


def without_norm_biases(tensors):
    ends = ("norm.bias", "ln_1.bias", "ln_2.bias", "ln_f.bias")
    return {name: tensor * 0 if name.endswith(ends) else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["NX", "GP"])
def test_an_adapter_cannot_follow_a_norms_bias_that_was_folded_away(tmp_path, name):
    """(W + B A)(g n + c): B A c would be lost without a word. Without biases, the adapter follows."""
    steps = [{"fold_norms": {"final_norm": False}}]
    for case in ("biases", "none"):
        model = make(name, tmp_path / case / "model", "float32")
        if case == "none":
            edit(model, without_norm_biases)
        adapter = trained(model, tmp_path / case / "adapter", target_modules=TARGETS[name])
        folded = tmp_path / case / "folded"
        run({"model": str(model), "steps": steps, "output": str(folded)})
        if case == "biases":
            with pytest.raises(SutureError, match="the bias of the norm before it was folded away"):
                transport(adapter, model, folded, tmp_path / case / "carried")
        else:
            transport(adapter, model, folded, tmp_path / case / "carried")
            assert_same(live(folded, tmp_path / case / "carried"), live(model, adapter), 3e-5)


def test_fused_layers_taken_apart_and_put_together(shelf):
    """Row blocks of a fused matrix, also interleaved per head, and back."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 16, generator=generator) for n in (32, 8, 8))
    whole = torch.cat([q, k, v])
    found = find_map([q, k, v], whole, None)
    assert isinstance(found, Map) and found.what == "fused"
    part = find_map([whole], k, None)
    assert isinstance(part, Map) and torch.equal(part.rows, torch.arange(32, 40))
    mixed = torch.stack([q.view(4, 8, 16), *(x.repeat(4, 1).view(4, 8, 16) for x in (k, v))], 1).reshape(-1, 16)
    per_head = find_map([q, k, v], mixed, None)
    assert isinstance(per_head, Map) and torch.equal(whole[per_head.rows], mixed)


def test_what_is_not_linear_is_refused(shelf, tmp_path):
    adapter = trained(shelf("L1"), tmp_path / "adapter", target_modules=["q_proj"])
    after = changed_model(shelf, "L1", tmp_path / "after", lambda ts: {k: noise(k, t, 1e-3) for k, t in ts.items()})
    with pytest.raises(SutureError, match="q_proj is no row or column selection, mean pooling or scaling"):
        transport(adapter, shelf("L1"), after, tmp_path / "out")
    dora = trained(shelf("L1"), tmp_path / "dora", target_modules=["q_proj"], use_dora=True)
    with pytest.raises(SutureError, match="DoRA divides by the norm"):
        transport(dora, shelf("L1"), shelf("L1"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_parameter_stored_transposed_is_carried_over_as_it_acts(shelf, tmp_path):
    parameters = {"target_modules": [], "target_parameters": ["attn.c_proj.weight"]}  # square: no shape tells
    adapter = trained(shelf("GP"), tmp_path / "adapter", **parameters)
    transport(adapter, shelf("GP"), shelf("GP"), tmp_path / "carried")
    assert_same(live(shelf("GP"), tmp_path / "carried"), live(shelf("GP"), adapter))


# ---- inspect, and the command line


def test_inspect_keeps_the_parameters_of_experts_apart(shelf, tmp_path):
    adapter = trained(shelf("MX"), tmp_path / "adapter", target_modules="all-linear", alpha_pattern={"down_proj": 7})
    modules = inspect_adapter(adapter, shelf("MX"))["modules"]
    experts = {path.rpartition(".")[2]: m for path, m in modules.items() if ".0.mlp.experts" in path}
    assert {name: (m["shape"], m["scale"]) for name, m in experts.items()} == {
        "gate_up_proj": ([192, 64], 2.5),
        "down_proj": ([64, 96], 1.75),
    }


def test_inspect_says_what_an_adapter_is(shelf, tmp_path):
    adapter = trained(
        shelf("L1"), tmp_path / "adapter", target_modules=["q_proj"], use_rslora=True, modules_to_save=["norm"]
    )
    facts = inspect_adapter(adapter, shelf("L1"))
    path = "model.layers.0.self_attn.q_proj"
    delta, W = deltas(adapter)[path], read(shelf("L1"))[f"{path}.weight"].double()
    assert facts["kind"] == ["LoRA", "rsLoRA", "modules saved in full"]
    module = facts["modules"][path]
    assert (module["r"], module["scale"]) == (4, 5.0)
    assert module["norm"] == pytest.approx(float(delta.norm()), rel=1e-3)
    assert module["relative"] == pytest.approx(float(delta.norm() / W.norm()), rel=1e-3)
    assert module["effective_rank"] == pytest.approx(effective_rank(torch.linalg.svdvals(delta)), rel=1e-3)
    assert facts["parameters"] == sum(t.numel() for t in load_file(adapter / "adapter_model.safetensors").values())
    assert not facts["changes_nothing"]


def test_the_command_line(shelf, tmp_path):
    from typer.testing import CliRunner

    from suture.cli.main import app

    call = CliRunner().invoke
    made = call(app, ["lora", "attach", str(shelf("L1")), str(tmp_path / "a"), "--r", "4", "--targets", "q_proj"])
    assert made.exit_code == 0, made.output
    assert "512 parameters" in made.output.replace(",", "") or "parameters in 2 modules" in made.output
    summed = call(app, ["lora", "combine", str(tmp_path / "b"), f"{tmp_path / 'a'}=0.5", str(tmp_path / "a")])
    assert summed.exit_code == 0, summed.output
    seen = call(app, ["lora", "inspect", str(tmp_path / "b"), "--json"])
    assert json.loads(seen.output)["r"] == 8 and json.loads(seen.output)["changes_nothing"]
    assert call(app, ["check", str(tmp_path / "b")]).exit_code == 0
    again = call(app, ["lora", "attach", str(shelf("L1")), str(tmp_path / "a"), "--r", "4"])
    assert again.exit_code == 1


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([{"awq": {"bits": 8, "group_size": 32}}], "scaled or rotated before it was rounded"),
        ([{"rotate": {}}, {"rtn": {"bits": 8, "group_size": 32}}], "scaled or rotated before it was rounded"),
        ([{"fold_norms": {}}, {"rtn": {"bits": 8, "group_size": 32}}], "scaled or rotated before it was rounded"),
        (
            [{"permute": {"heads": "random", "neurons": "random"}}, {"rtn": {"bits": 8, "group_size": 32}}],
            "rows or inputs were moved",
        ),
    ],
    ids=["awq", "rotate", "fold_norms", "permute"],
)
def test_a_quantization_error_needs_the_weights_that_were_quantized(tmp_path, steps, said):
    """W - Q is what rounding took only where Q is W rounded; else the "correction" would be a second model."""
    model = make("L1", tmp_path / "m", "float32")
    text = {"data": str(ids_file(tmp_path / "ids.jsonl")), "samples": 4, "length": 24}
    needs = {"calibration": text} if "awq" in steps[0] else {}
    run({"model": str(model), "steps": steps, "output": str(tmp_path / "q"), **needs})
    with pytest.raises(SutureError, match=said + ".*the dense checkpoint that was quantized"):
        attach(tmp_path / "q", tmp_path / "a", r=8, init="loftq", original=model)
    assert not (tmp_path / "a").exists()


def test_f3_a_sum_has_each_module_once_however_the_adapters_name_it(tmp_path):
    """One adapter without the model's prefix, as some tools write it; another of another model altogether."""
    model = make("L1", tmp_path / "m", "float32")
    one = trained(model, tmp_path / "one", target_modules=TARGETS["L1"])
    two = trained(model, tmp_path / "two", seed=5, target_modules=TARGETS["L1"])
    combine([(one, 0.7), (two, 1.0)], tmp_path / "sum")
    edit_adapter(two, lambda tensors: {k.replace("model.model.layers", "model.layers"): t for k, t in tensors.items()})
    combine([(one, 0.7), (two, 1.0)], tmp_path / "short")
    wanted, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("sum", "short"))
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[key], found[key]) for key in wanted)
    other = trained(make("P3", tmp_path / "p", "float32"), tmp_path / "three", target_modules=TARGETS["P3"])
    with pytest.raises(SutureError, match=r"the adapters are for different models: .*llama.*phi3"):
        combine([(one, 1.0), (other, 1.0)], tmp_path / "both")
    edit_adapter(one, lambda tensors: {key: tensor.to(torch.int8) for key, tensor in tensors.items()})
    with pytest.raises(SutureError, match=r"is I8, not floating point"):
        combine([(one, 1.0)], tmp_path / "whole")
