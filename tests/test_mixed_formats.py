"""Several formats in one model: which rule counts, what stock transformers loads, what is refused."""

import json

import pytest
import torch
from kit import ids_file, make, quantize, read

from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.quant.decode import dense_view
from suture.quant.grid import Search
from suture.quant.rtn import rtn
from suture.quant.scheme import Scheme

RULES = [
    {"match": "model.layers.1.mlp.down_proj", "bits": 8, "group_size": 16},
    {"match": "down_proj", "bits": 5},
    {"match": "re:.*[qk]_proj", "bits": 3, "group_size": -1},
]


def expected_scheme(name):
    if name == "model.layers.1.mlp.down_proj":
        return Scheme(8, 16)
    if name.endswith("down_proj"):
        return Scheme(5, 8)
    return Scheme(3, -1) if name.endswith(("q_proj", "k_proj")) else Scheme(4, 8)


@pytest.mark.parametrize("name", ["L1", "Q3", "W-gemma3-new", "W-mistral3"])
def test_i7_each_layer_gets_the_first_rule_that_matches_and_stock_transformers_reads_all_of_them(shelf, tmp_path, name):
    stem = {"W-gemma3-new": "model.language_model.", "W-mistral3": "language_model.model."}.get(name, "model.")
    rules = [{**rule, "match": rule["match"].replace("model.", stem, 1)} for rule in RULES]
    done = quantize(shelf(name), tmp_path / "out", bits=4, group_size=8, rules=rules)
    found = done.manifest["verification"]  # logits of the stock loader against the ones in memory
    assert found["missing"] == 0 and found["max_difference"] <= 1e-5 * found["largest_logit"]
    source, view = read(shelf(name)), dense_view(open_checkpoint(tmp_path / "out"))
    for module, record in done.manifest["modules"].items():
        scheme = expected_scheme(module.replace(stem, "model."))
        assert (record["bits"], record["group_size"]) == (scheme.bits, scheme.group_size)
        plain = rtn(source[f"{module}.weight"].float(), scheme, torch.bfloat16, search=Search())
        assert torch.equal(view.read(f"{module}.weight"), plain.dequantize())
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert sorted(group["weights"]["num_bits"] for group in groups.values()) == [3, 4, 5, 8]


def test_gptq_shares_inputs_between_formats(shelf, tmp_path):
    """q and k in 3 bits, v in 4: one Hessian, rounded apart; each as good as when all have its format."""
    ids = ids_file(tmp_path / "ids.jsonl", rows=6, length=70)
    mixed = quantize(shelf("L1"), tmp_path / "mixed", "gptq", data=ids, bits=4, group_size=8, rules=RULES[2:])
    plain = quantize(shelf("L1"), tmp_path / "plain", "gptq", data=ids, bits=4, group_size=8)
    v = "model.layers.0.self_attn.v_proj"
    a, b = read(tmp_path / "mixed"), read(tmp_path / "plain")
    assert torch.equal(a[f"{v}.weight_packed"], b[f"{v}.weight_packed"])
    assert mixed.manifest["modules"][v] == plain.manifest["modules"][v]
    q = mixed.manifest["modules"]["model.layers.0.self_attn.q_proj"]
    assert (q["method"], q["bits"], q["group_size"]) == ("gptq", 3, -1) and q["output_error"] > 0


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("L1", {"rules": [{"match": "dwn_proj", "bits": 8}]}, r"rules\[0\].match: 'dwn_proj' matches no.*down_proj"),
        ("L1", {"rules": [{"match": "o_proj"}], "ignore": ["o_proj"]}, r"rules\[0\].match: 'o_proj' matches no layer"),
        (
            "L1",
            {"rules": [{"match": "down_proj", "bits": 8}, {"match": "model.layers.1.mlp.down_proj", "bits": 3}]},
            r"rules\[1\].match: all that .* has a rule before it; put the narrower rule first",
        ),
        ("L1", {"rules": [{"match": "o_proj", "group_size": 48}]}, "group_size: 48 does not divide .*64.* of 2 layers"),
        ("L1", {"rules": [{"match": "o_proj", "symmetric": False}]}, "several formats with symmetric: false"),
        ("GP", {"rules": [{"match": "c_fc", "bits": 8}]}, "reads one format per model"),
        ("QM", {"rules": [{"match": "o_proj", "bits": 8}]}, "one format for all experts"),
        ("QM", {"rules": [{"match": "*.experts.2.*", "bits": 8}]}, "one format for all experts"),
    ],
)
def test_i7_a_rule_that_cannot_be_followed_is_refused_before_any_work(shelf, tmp_path, name, settings, message):
    with pytest.raises(SutureError, match=message):
        quantize(shelf(name), tmp_path / "out", bits=4, group_size=8, **settings)
    assert not list(tmp_path.iterdir())


def test_b4_experts_may_have_a_format_of_their_own(shelf, tmp_path):
    done = quantize(
        shelf("MX"),
        tmp_path / "out",
        bits=8,
        group_size=16,
        rules=[{"match": "*.experts.*", "bits": 3, "group_size": 8}],
    )
    found = done.manifest["verification"]
    assert found["missing"] == 0 and found["max_difference"] <= 1e-5 * found["largest_logit"]
    layout = open_skeleton(open_checkpoint(shelf("MX"))).layout
    bits = {linear.name: 3 if linear.expert is not None else 8 for linear in layout.linears}
    assert {name: record["bits"] for name, record in done.manifest["modules"].items()} == bits


def test_the_same_rules_in_one_format_write_what_no_rules_would(tmp_path):
    model = make("L1", tmp_path / "m")
    quantize(model, tmp_path / "a", bits=4, group_size=8, rules=[{"match": "o_proj", "bits": 4}])
    quantize(model, tmp_path / "b", bits=4, group_size=8)
    config = [json.loads((tmp_path / x / "config.json").read_text())["quantization_config"] for x in "ab"]
    assert config[0] == config[1] and len(config[0]["config_groups"]) == 1
