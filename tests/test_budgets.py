"""The three budgets: published figures from configs alone, and counts against real files, caches and adapters."""

import json
import math

import kit
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import suture
from suture.calibrate.blueprint import blueprint_of
from suture.pipeline.cache import measure_cache
from suture.pipeline.inspect import inspect_model
from suture.report import budgets
from suture.report.cost import GPU

GEMMA2_27B = {
    "model_type": "gemma2",
    "hidden_size": 4608,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 36864,
    "vocab_size": 256000,
    "query_pre_attn_scalar": 144,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
DEEPSEEK_V2 = {
    **{
        key: value
        for key, value in DEEPSEEK_V3.items()
        if key not in ("num_nextn_predict_layers", "quantization_config")
    },
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "n_shared_experts": 2,
    "n_routed_experts": 160,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}
LLAMA2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def from_config(directory, config, **options):
    """Facts of a directory that holds config.json and nothing else."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return suture.inspect(directory, **options).facts


# ---- published figures


def test_gemma_2_27b_from_its_config_alone(tmp_path):
    facts = from_config(tmp_path / "gemma", GEMMA2_27B)
    dimensions, compute = facts["dimensions"], facts["compute"]
    assert dimensions["non_embedding"] == 26_047_480_320
    assert dimensions["embedding"] == 256_000 * 4608 == 1_179_648_000
    assert dimensions["by_part"]["norms and biases"] == 185 * 4608
    assert dimensions["by_layer"] == [566_249_472] * 46 and sum(dimensions["by_layer"]) + 4608 == 26_047_480_320
    assert (dimensions["attention"], dimensions["head_dim"]) == ("GQA", 128) and 128 != 4608 // 32
    assert dimensions["attention_scale"] == pytest.approx(1 / math.sqrt(144))
    assert dimensions["tied_head"] and dimensions["mlp_widths"] == [36864]
    assert compute["cache"]["bytes_per_token"] == 376_832
    assert compute["flops"]["decode_per_token"] / 1e9 == pytest.approx(54.45, abs=0.005)  # 2 × 27.23 B, less the norms
    assert compute["cache"]["bytes_per_sequence_without_windows"] / 1e9 == pytest.approx(3.09, abs=0.005)
    assert compute["cache"]["bytes_per_sequence"] / 1e9 == pytest.approx(2.3, abs=0.05)
    assert compute["cache"]["windows"] == {"4096": 23} and compute["context"] == 8192
    by_gpu = {row["gpu"]: row for row in compute["gpus"]}
    assert by_gpu["A100 80GB SXM"]["tokens_beside_weights"] == pytest.approx(6.8e4, rel=0.005)
    assert by_gpu["RTX A6000"]["tokens_beside_weights"] == 0  # 54 GB of weights on 48
    stored = {row["format"]: row for row in facts["formats"]}["int4 group 128, zero points"]
    assert stored["bits_per_weight"] == pytest.approx(4.16, abs=0.005)
    assert stored["all_weights"] / 1e9 == pytest.approx(14.2, abs=0.06)
    assert stored["bytes"] - stored["all_weights"] == pytest.approx(1_180_500_480 * (16 - 4.15625) / 8, rel=1e-3)
    assert facts["bytes"] / 1e9 == pytest.approx(54.45, abs=0.01) and "no weights here" in facts["notes"][0]
    trained = {row["what"]: row for row in facts["update"]}
    assert trained["LoRA r = 16, q_proj, v_proj"]["parameters"] / 1e6 == pytest.approx(11.3, abs=0.05)
    assert trained["LoRA r = 16, all-linear"]["parameters"] / 1e6 == pytest.approx(114, abs=0.5)
    assert trained["LoRA r = 64, all-linear"]["parameters"] / 1e6 == pytest.approx(457, abs=0.5)
    assert trained["LoRA r = 64, all-linear"]["training_bytes"] / 1e9 == pytest.approx(7.3, abs=0.05)
    assert trained["full fine-tuning"]["training_bytes"] == 16 * 27_227_128_320


def test_rooflines_of_gemma_2_27b_on_round_figures(tmp_path):
    """An A100 at 2 TB/s and 312 TFLOPs: 27.2 ms to read the weights, 0.17 ms to compute, batch 156 at the ridge."""
    facts = from_config(tmp_path / "gemma", GEMMA2_27B, gpus=["A100=2e12,312e12,80e9"], context=1)
    (row,) = facts["compute"]["gpus"]
    assert row["decode_seconds_per_step"] == pytest.approx(27.2e-3, rel=0.002) and row["decode_bound"] == "memory"
    assert facts["compute"]["flops"]["decode_per_token"] / 312e12 == pytest.approx(0.1745e-3, rel=0.001)
    assert row["compute_bound_from_batch_without_cache"] == 157  # ceil(156.0x): the head's and norms' share
    model = blueprint_of(GEMMA2_27B, "gemma")
    assert budgets.batch_of(model, GPU(2e12, 312e12), 0) == pytest.approx(156, rel=0.001)
    assert budgets.training_flops(model, 100) == 3 * (100 * 54_452_551_680 + 46 * 2 * 32 * 256 * 5050)
    assert budgets.attention_intensity(model) == 2  # 32 query heads over 16


def test_deepseek_counts_its_latent_and_the_experts_that_a_token_meets(tmp_path):
    v3 = from_config(tmp_path / "v3", DEEPSEEK_V3)
    assert v3["compute"]["cache"]["bytes_per_token"] / 1024 == pytest.approx(68.6, abs=0.05)
    assert v3["dimensions"]["parameters"] / 1e9 == pytest.approx(671, abs=0.5)
    assert v3["dimensions"]["active_parameters"] / 1e9 == pytest.approx(37, abs=0.6)
    assert v3["dimensions"]["experts"] == {"number": 256, "per_token": 8}
    assert any("multi-token" in note for note in v3["notes"]) and v3["quantization"] == {"method": "fp8"}
    v2 = from_config(tmp_path / "v2", DEEPSEEK_V2)
    assert v2["compute"]["cache"]["numbers_per_token_and_layer"] == [576] and not v2["supported"]
    assert v2["compute"]["cache"]["bytes_per_token"] / 1024 == pytest.approx(67.5)
    threshold = {row["gpu"]: row["mla_heads_to_turn"] for row in v2["compute"]["gpus"]}["RTX A6000"]
    assert 100 < threshold < 102


def test_llama_2_7b_under_every_kind_of_attention(tmp_path):
    def cached(kind, **changes):
        facts = from_config(tmp_path / kind, {**LLAMA2_7B, **changes})
        assert facts["dimensions"]["attention"] == kind.split("-")[0]
        return facts["compute"]["cache"]

    mha = cached("MHA")
    assert mha["numbers_per_token_and_layer"] == [8192]
    assert cached("GQA", num_key_value_heads=8)["numbers_per_token_and_layer"] == [2048]
    assert cached("MQA", num_key_value_heads=1)["numbers_per_token_and_layer"] == [256]
    assert mha["alternatives"]["GQA-8"] == 2048 and mha["alternatives"]["MQA"] == 256
    assert mha["alternatives"]["MLA, latent 512"] == 512
    mla = {key: DEEPSEEK_V3[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")}
    mla |= {"model_type": "deepseek_v3", "first_k_dense_replace": 32, "q_lora_rank": None}
    assert cached("MLA-576", **mla)["numbers_per_token_and_layer"] == [576]


def test_the_batch_and_the_heads_at_which_decoding_turns():
    """Llama-2-7B on an A6000 at 4096 tokens: MHA and GQA-8 never turn; MQA, with 0.083 ms of cache a sequence, would."""
    a6000 = GPU(768e9, 155e12, 48e9)
    assert budgets.turning_batch(17.58e-3, 0.09e-3, 0.083e-3) == pytest.approx(2511, rel=0.001)
    assert budgets.turning_batch(17.58e-3, 0.09e-3, 0.667e-3) is None
    assert budgets.heads_to_turn(a6000, rope=0) == pytest.approx(100.9, abs=0.05)
    assert budgets.heads_to_turn(a6000, rope=64) == pytest.approx(155e12 / 768e9 * 576 / 1088)
    grouped = blueprint_of(LLAMA2_7B | {"num_key_value_heads": 8}, "llama")
    assert budgets.batch_of(grouped, a6000, 4096) is None and budgets.batch_of(grouped, a6000, 0) > 200


# ---- against what really exists


@pytest.mark.parametrize("name", ["L-llama3", "MI", "G2", "P3", "GP", "NX", "FA", "MX", "QM", "DS-q-lora", "W-gemma3"])
def test_counts_are_those_of_the_files_and_of_a_live_cache(shelf, name):
    directory = shelf(name)
    facts = inspect_model(directory)
    stored = {name: tensor for name, tensor in kit.read(directory).items() if "vision" not in name}
    mine = {n for n in stored if "projector" not in n and "multi_modal" not in n}
    assert facts["dimensions"]["parameters"] == sum(stored[n].numel() for n in mine)
    assert facts["parameters"]["total"] == facts["dimensions"]["parameters"]
    config = json.loads((directory / "config.json").read_text())
    live = measure_cache(config)
    counted = facts["compute"]["cache"]["numbers_per_token_and_layer"]
    if facts["dimensions"]["attention"] != "MLA":
        assert counted == [live.numbers_per_layer]
        assert facts["kv_cache_bytes_per_token"] == live.bytes_per_token
    else:
        assert counted == [config["kv_lora_rank"] + config["qk_rope_head_dim"]]


def test_experts_in_one_tensor_count_as_experts(shelf):
    facts = inspect_model(shelf("QM"))
    routed = 3 * 64 * 48 * 8  # in block 1; block 0 is dense
    assert facts["dimensions"]["by_part"]["experts"] == routed
    assert facts["dimensions"]["parameters"] - facts["dimensions"]["active_parameters"] == routed * 6 // 8
    one = budgets.weight_bytes_read(blueprint_of(config_of(shelf("QM")), "qm"), batch=1)
    many = budgets.weight_bytes_read(blueprint_of(config_of(shelf("QM")), "qm"), batch=64)
    assert many - one == pytest.approx(2 * routed * (6 / 8 - (6 / 8) ** 64) + 63 * 2 * 64)  # 63 more embedding rows


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize(
    ("stored", "step"),
    [
        ("int4 group 64", {"rtn": {"bits": 4, "group_size": 64}}),
        ("int8 per channel", {"rtn": {"bits": 8, "group_size": -1}}),
        ("NF4, double quantization", {"nf4": {}}),
        ("int8, bitsandbytes", {"int8": {}}),
        ("int8 weights and inputs", {"smoothquant": {"alpha": "none"}}),
    ],
)
def test_the_promised_bytes_are_the_written_ones(shelf, tmp_path, stored, step):
    base = suture.inspect(shelf("L1")).facts
    promised = next(row for row in base["formats"] if row["format"] == stored)
    content = {"model": str(shelf("L1")), "steps": [step], "output": str(tmp_path / "out")}
    kit.run(content)
    facts = inspect_model(tmp_path / "out")
    assert facts["bytes"] == promised["bytes"]
    found = facts["quantization"]
    assert found["layers"] == 14 and found["bits_per_weight"] == pytest.approx(promised["bits_per_weight"], abs=1e-4)
    assert [list(one) for one in facts["history"][0]] == [list(step)]
    beside = suture.inspect(shelf("L1"), tmp_path / "out")
    assert "14 layers" in str(beside) and len(beside.facts["models"]) == 2


def test_lora_parameters_are_peffts(shelf):
    directory = shelf("Q2")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    trained = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    counted = suture.inspect(directory, ranks=[4]).facts["update"]
    wanted = sum(p.numel() for p in trained.parameters() if p.requires_grad)
    assert next(row for row in counted if row["what"] == "LoRA r = 4, all-linear")["parameters"] == wanted


def test_prefill_and_decode_are_the_products_of_a_forward(shelf):
    """FLOPs against torch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    directory, tokens = shelf("L1"), 24
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").float()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.int64), logits_to_keep=1)
    blueprint = blueprint_of(config_of(directory), "L1")
    whole_square = sum(2 * one.heads * one.prefill_width * tokens**2 for one in blueprint.attention)
    causal = sum(2 * one.heads * one.prefill_width * tokens * (tokens + 1) // 2 for one in blueprint.attention)
    rotary = counter.get_total_flops() - (budgets.prefill_flops(blueprint, tokens) - causal + whole_square)
    assert 0 <= rotary <= 0.01 * counter.get_total_flops()  # the angles are a product too


# ---- how it shows itself, and what it refuses


def test_two_models_side_by_side_and_a_picture(tmp_path):
    first = tmp_path / "a"
    from_config(first, LLAMA2_7B)
    from_config(tmp_path / "b", LLAMA2_7B | {"num_key_value_heads": 8})
    both = suture.inspect(first, tmp_path / "b" / "config.json", gpus=["a6000"])
    row = next(row for s in both.sections() for row in s.rows if row[0] == "numbers cached")
    assert row[1].startswith("8192") and row[2].startswith("2048")
    html = both._repr_html_()
    assert html.count("<svg") == 8 and "RTX A6000" in html and "H100" not in html
    assert json.loads(both.to_json())["models"][1]["kv_heads"] == 8


def test_an_adapter_is_inspected_alone(tmp_path):
    suture_adapter = tmp_path / "adapter"
    from suture.pipeline.adapters import attach

    attach("builtin:tiny", suture_adapter, r=2, alpha=4.0)
    facts = suture.inspect(suture_adapter).facts
    assert facts["adapter"] and facts["r"] == 2 and "rank, alpha" in str(suture.inspect(suture_adapter))
    with pytest.raises(suture.SutureError, match="is an adapter"):
        suture.inspect("builtin:tiny", suture_adapter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": ["A6001"]}, r"not known.*RTX A6000"),
        ({"gpus": ["SXM"]}, "several match"),
        ({"gpus": ["x=1,two"]}, "expected NAME"),
        ({"targets": ["q_porj"]}, "did you mean 'q_proj'"),
        ({"batch": 0}, "not a positive number"),
        ({"cache_bits": 7}, "none of 4, 8"),
    ],
)
def test_what_cannot_be_counted_is_refused(options, message):
    with pytest.raises(suture.SutureError, match=message):
        suture.inspect("builtin:tiny", **options)


def test_a_model_type_that_transformers_lacks_is_refused(tmp_path):
    with pytest.raises(suture.SutureError, match="knows no model_type 'lama'"):
        from_config(tmp_path / "x", {"model_type": "lama"})
