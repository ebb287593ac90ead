"""The command line: exit codes, one clear sentence for every wrong input, nothing harmed and nothing half done."""

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch
import warm
from safetensors import safe_open
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
RTN = [{"rtn": {"bits": 4, "group_size": 32}}]
GPTQ = [{"gptq": {"bits": 4, "group_size": 32}}]
CALIBRATION = {"data": "calibration.jsonl", "samples": 4, "length": 16}
NO_NETWORK = {"socket:socket.connect": "lambda *a: os._exit(99)"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("made")
    tiny.llama(directory / "model", shard="100KB")
    tiny.ids_file(directory / "calibration.jsonl")
    tiny.ids_file(directory / "evaluation.jsonl", seed=1)
    return directory


@pytest.fixture
def home(made, tmp_path):
    """A model in three shards, text, and a directory `work` in which suture is run."""
    shutil.copytree(made, tmp_path / "home", ignore=shutil.ignore_patterns(".task-*"))
    return tmp_path / "home"


def write_recipe(home: Path, steps=RTN, **content) -> Path:
    content = {"model": "model", "steps": steps, "output": "out"} | content
    if "gptq" in json.dumps(steps):
        content = {"calibration": CALIBRATION} | content
    return tiny.recipe(home / "recipe.yaml", {key: value for key, value in content.items() if value is not None})


def run(home: Path, steps=RTN, args=(), options=None, **content) -> warm.Done:
    write_recipe(home, steps, **content)
    return warm.suture("run", "recipe.yaml", *args, cwd=home, **options or {})


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


COMMANDS = ("run", "plan", "quantize", "apply", "steps", "report", "power", "inspect", "check", "watch", "init")


# -- start -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [["--version"], ["--help"], *([c, "--help"] for c in COMMANDS)],
)
def test_i6_help_and_version_need_no_torch_no_gpu_and_no_network(tmp_path, args):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "http_proxy": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    command = [sys.executable, "-X", "importtime", warm.COMMAND, *args]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "typer" in imported
    assert not imported & {"torch", "transformers", "numpy", "scipy", "safetensors", "huggingface_hub"}
    assert done.stdout.startswith("suture 0.") if args == ["--version"] else "Usage: suture" in done.stdout


def test_every_command_is_in_the_help():
    from suture.cli.main import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert names == set(COMMANDS)


def test_the_package_runs_as_a_module(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "suture", "--version"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("suture 0.")


# -- exit code 2: wrong usage ------------------------------------------------------------------------------------------

USAGE = {
    "no command's argument": (["run"], "Missing argument 'recipe'"),
    "unknown command": (["frobnicate"], "No such command 'frobnicate'"),
    "unknown option": (["run", "r.yaml", "--bogus"], "No such option: --bogus"),
    "unknown device": (["run", "r.yaml", "--device", "tpu"], "'tpu' is not one of 'auto', 'cpu'"),
    "unknown protocol": (["report", "a", "b", "--data", "d", "--protocol", "x"], "'x' is not one of 'doc-rolling'"),
    "bits not a number": (["quantize", "m", "o", "--bits", "four"], "valid integer"),
    "set without a value": (["run", "r.yaml", "--set", "steps"], "expected KEY=VALUE"),
    "no data": (["report", "a", "b"], "Missing option '--data'"),
    "no candidate": (["report", "a", "--data", "d"], "Missing argument"),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_ends_with_2(tmp_path, name):
    args, message = USAGE[name]
    done = warm.suture(*args, cwd=tmp_path)
    text = " ".join(done.err.replace("│", " ").split())
    assert done.code == 2 and message in text and "Traceback" not in done.err
    assert tiny.visible(tmp_path) == []


def test_no_command_at_all_shows_the_help(tmp_path):
    done = warm.suture(cwd=tmp_path)
    assert done.code == 2 and "Commands" in done.out + done.err


# -- exit code 1: every wrong input ------------------------------------------------------------------------------------


def shard(home: Path, number: int) -> Path:
    return sorted((home / "model").glob("model-*.safetensors"))[number]


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def point_elsewhere(home: Path, where: str) -> None:
    index = json.loads((home / "model" / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = where
    (home / "model" / INDEX).write_text(json.dumps(index))


def poison(home: Path, name: str, value: float = float("nan")) -> None:
    for path in (home / "model").glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name].view(-1)[3] = value
            save_file(tensors, path, metadata={"format": "pt"})


def truncate(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def link_out(home: Path) -> None:
    path = shard(home, 1)
    path.rename(home / "outside.safetensors")
    path.symlink_to(home / "outside.safetensors")


def no_op(home: Path) -> None:
    pass


def lfs_pointer(home: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 5000000000\n"
    shard(home, 0).write_text(text)


def rename_in_index(home: Path) -> None:
    index = json.loads((home / "model" / INDEX).read_text())
    index["weight_map"]["model.layers.9.mtp.weight"] = shard(home, 1).name
    (home / "model" / INDEX).write_text(json.dumps(index))


def rtn(**settings):
    return {"steps": [{"rtn": {"bits": 4, "group_size": 32} | settings}]}


def gptq(**calibration):
    return {"steps": GPTQ, "calibration": CALIBRATION | calibration}


#  name: (what is done to the input, what the recipe says, what the message names)
WRONG = {
    "a2 missing shard": (lambda h: shard(h, 1).unlink(), {}, ["model-00002-of-0000", "incomplete"]),
    "a13 truncated shard": (lambda h: truncate(shard(h, 1), 100), {}, ["model-00002-of-0000", "truncated"]),
    "a13 shard cut in its header": (lambda h: shard(h, 1).write_bytes(shard(h, 1).read_bytes()[:50]), {}, ["00002-of"]),
    "a13 empty shard": (lambda h: shard(h, 1).write_bytes(b""), {}, ["model-00002-of-0000"]),
    "a13 lfs pointer": (lfs_pointer, {}, ["model-00001-of-0000", "git-LFS pointer", "git lfs pull"]),
    "a15 trailing byte": (lambda h: shard(h, 0).write_bytes(shard(h, 0).read_bytes() + b"x"), {}, ["00001-of-0000"]),
    "a1 index names a tensor that is not there": (rename_in_index, {}, ["model.layers.9.mtp.weight", "00002-of-0000"]),
    "index is not JSON": (lambda h: (h / "model" / INDEX).write_text("{"), {}, [INDEX]),
    "a4 shard in the parent": (lambda h: point_elsewhere(h, "../x.safetensors"), {}, ["../x.safetensors"]),
    "a4 absolute shard": (lambda h: point_elsewhere(h, "/etc/passwd"), {}, ["/etc/passwd"]),
    "a4 shard linked out of the directory": (link_out, {}, ["model-00002-of-0000", "outside"]),
    "no model": (no_op, {"model": "./nowhere"}, ["no such directory", "nowhere"]),
    "i5 a mistyped path": (no_op, {"model": "modle"}, ["modle", "no model modle", "--download"]),
    "unknown builtin": (no_op, {"model": "builtin:tinny"}, ["no builtin model 'tinny' (did you mean 'tiny'?)"]),
    "a file instead of a model": (no_op, {"model": "./calibration.jsonl"}, ["is not a directory"]),
    "no config": (lambda h: (h / "model/config.json").unlink(), {}, ["has no config.json"]),
    "config is not JSON": (
        lambda h: (h / "model/config.json").write_text("{,}"),
        {},
        ["config.json", "not valid JSON"],
    ),
    "unknown family": (lambda h: edit_json(h / "model/config.json", model_type="bloom"), {}, ["bloom", "llama"]),
    "config of other shapes": (
        lambda h: edit_json(h / "model/config.json", num_key_value_heads=4),
        {},
        ["k_proj", "num_key_value_heads"],
    ),
    "config with more layers": (
        lambda h: edit_json(h / "model/config.json", num_hidden_layers=5),
        {},
        ["model.layers.3.", "not in the checkpoint"],
    ),
    "i8 quantized input": (
        lambda h: edit_json(h / "model/config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        {},
        ["already quantized (gptq)"],
    ),
    "c6 group size does not divide": (no_op, rtn(group_size=48), ["group_size: 48", "64", "layers.0.self_attn.q_proj"]),
    "i7 no module matches": (
        no_op,
        rtn(targets=["q_prj"]),
        ["'q_prj' matches no linear layer", "did you mean 'q_proj'"],
    ),
    "i7 all modules ignored": (no_op, rtn(ignore=["all-linear"]), ["no layer is left to quantize"]),
    "i7 a pattern that is no regular expression": (
        no_op,
        rtn(targets=["re:("]),
        ["'re:('", "not a regular expression"],
    ),
    "the head as a target": (no_op, rtn(targets=["lm_head"]), ["'lm_head' is the head"]),
    "g1 empty calibration text": (lambda h: (h / "calibration.jsonl").write_text(""), gptq(), ["calibration.jsonl"]),
    "g2 calibration of blanks": (
        lambda h: (h / "calibration.jsonl").write_text('{"text": ""}\n{"text": "  "}\n{"text": null}\n'),
        gptq(),
        ["no documents in column 'text'", "2 empty", "1 no value"],
    ),
    "g2 too little calibration text": (
        lambda h: tiny.ids_file(h / "calibration.jsonl", documents=1, length=9),
        gptq(),
        ["9 tokens", "length 16"],
    ),
    "no calibration": (no_op, {"steps": GPTQ, "calibration": None}, ["calibration: missing, but gptq needs text"]),
    "g6 no text column": (
        lambda h: (h / "calibration.jsonl").write_text('{"prompt": "a", "response": "b"}\n'),
        gptq(),
        ["prompt, response", "column: NAME"],
    ),
    "g9 token ids outside the vocabulary": (
        lambda h: (h / "calibration.jsonl").write_text(json.dumps({"input_ids": [320] * 64}) + "\n"),
        gptq(),
        ["token id 320", "0 to 319"],
    ),
    "broken calibration line": (
        lambda h: (h / "calibration.jsonl").write_text('{"input_ids": [1, 2]}\n{"inp\n'),
        gptq(),
        ["calibration.jsonl:2", "not valid JSON"],
    ),
    "missing calibration file": (no_op, gptq(data="nope.txt"), ["nope.txt", "neither a file nor a directory"]),
    "text without a tokenizer": (
        lambda h: (h / "calibration.jsonl").write_text('{"text": "some text"}\n'),
        gptq(),
        ["has no tokenizer"],
    ),
    "g10 sequences longer than the context": (no_op, gptq(length=65), ["length = 65", "64 positions"]),
    "h13 window longer than the context": (
        no_op,
        {"report": {"data": "evaluation.jsonl", "window": 65}},
        ["window = 65", "64 positions"],
    ),
    "i3 typo in the recipe": (no_op, rtn(group_sise=64), ["line 8", "group_sise", "did you mean 'group_size'?"]),
    "i3 typo in a section": (
        no_op,
        {"report": {"data": "evaluation.jsonl", "windwo": 9}},
        ["line 14", "report.windwo", "did you mean 'window'?"],
    ),
    "i3 unknown step": (no_op, {"steps": [{"gtpq": {}}]}, ["line 4", "unknown step 'gtpq' (did you mean 'gptq'?)"]),
    "i9 a step after rounding": (
        no_op,
        {"steps": [*RTN, {"untie": {}}]},
        ["comes after rtn, whose output is quantized"],
    ),
    "untie of an untied model": (no_op, {"steps": [{"untie": {}}]}, ["this model's head is not tied"]),
    "a7 output is the input": (no_op, {"output": "model"}, ["model is the input itself"]),
    "a7 output is the input by a link": (
        lambda h: (h / "link").symlink_to("model"),
        {"output": "link"},
        ["link is the input itself"],
    ),
    "a7 input by a link": (lambda h: (h / "link").symlink_to("model"), {"model": "link", "output": "model"}, ["input"]),
    "a7 output inside the input": (no_op, {"output": "model/out"}, ["lie inside one another"]),
    "a7 output around the input": (no_op, {"output": "."}, ["lie inside one another"]),
    "output is a file": (no_op, {"output": "evaluation.jsonl"}, ["is a file"]),
    "output below a file": (no_op, {"output": "evaluation.jsonl/out"}, ["evaluation.jsonl", "Not a directory"]),
    "a6 output is not empty": (
        lambda h: shutil.copytree(h / "model", h / "out2"),
        {"output": "out2"},
        ["is not empty"],
    ),
    "nan in the first block": (
        lambda h: poison(h, "model.layers.0.mlp.up_proj.weight"),
        {},
        ["model.layers.0.mlp.up_proj.weight holds 1 NaN"],
    ),
    "nan in the last block": (
        lambda h: poison(h, "model.layers.2.self_attn.o_proj.weight"),
        gptq(),
        ["model.layers.2.self_attn.o_proj.weight holds 1 NaN"],
    ),
    "infinity in a norm": (
        lambda h: poison(h, "model.layers.1.post_attention_layernorm.weight", float("inf")),
        gptq(),
        ["model.layers.1.post_attention_layernorm.weight holds 1 NaN or infinite"],
    ),
    "nan in the head": (lambda h: poison(h, "lm_head.weight"), {}, ["lm_head.weight holds 1 NaN"]),
    "nan in the last norm": (lambda h: poison(h, "model.norm.weight"), {}, ["model.norm.weight holds 1 NaN"]),
    "nan in the embedding": (lambda h: poison(h, "model.embed_tokens.weight"), {}, ["model.embed_tokens.weight holds"]),
    "b17 activations that overflow": (
        lambda h: poison(h, "model.layers.0.mlp.down_proj.weight", 3e38),
        gptq(),
        ["block 0", "hold NaN or values too large", "overflows"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_one_sentence_and_harms_nothing(home, name):
    damage, content, names = WRONG[name]
    damage(home)
    write_recipe(home, **content)
    before = tiny.contents(home)
    done = warm.suture("run", "recipe.yaml", cwd=home, patches=NO_NETWORK)
    assert done.code == 1, (done.code, done.err)
    assert len(done.messages) == 1 and "Traceback" not in done.err, done.err
    missing = [word for word in names if word not in done.messages[0]]
    assert not missing, done.messages[0]
    assert not done.out
    after = {name: h for name, h in tiny.contents(home).items() if not name.startswith((".task", "out.partial"))}
    assert after == before
    assert not (home / "out").exists() and not done.temporary


def test_what_is_refused_before_the_work_leaves_no_trace(home):
    """Not even a directory for the work: the next run, corrected, needs no flag."""
    assert run(home, [{"rtn": {"group_size": 48}}]).code == 1
    poison(home, "model.layers.0.mlp.up_proj.weight")
    assert run(home).code == 1
    assert tiny.visible(home) == ["calibration.jsonl", "evaluation.jsonl", "model", "recipe.yaml"]


def test_the_other_commands_refuse_in_one_sentence_too(home):
    shard(home, 1).unlink()
    write_recipe(home)
    for args in (
        ["plan", "recipe.yaml"],
        ["inspect", "model"],
        ["quantize", "model", "out", "--method", "rtn", "--group-size", "32"],
        ["quantize", "./model", "out", "--group-size", "32"],
        ["report", "model", "model", "--data", "evaluation.jsonl"],
        ["check", "model"],
        ["check", "nowhere"],
        ["run", "nowhere.yaml"],
    ):
        done = warm.suture(*args, cwd=home, patches=NO_NETWORK)
        assert done.code == 1 and len(done.messages) == 1 and "Traceback" not in done.err, (args, done.err)
        assert not (home / "out").exists()


def test_no_gpu_where_one_is_asked_for_is_one_sentence(home):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = run(home, args=["--device", "cuda"])
    assert done.code == 1 and "--device cuda: torch sees no CUDA device" in done.messages[0]


# -- exit codes 0 and 3: done ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(made, tmp_path_factory):
    """An output made by gptq with a report."""
    directory = tmp_path_factory.mktemp("finished")
    shutil.copytree(made, directory / "home", ignore=shutil.ignore_patterns(".task-*"))
    report = {"data": "evaluation.jsonl", "window": 16}
    done = run(directory / "home", GPTQ, report=report, max_shard_size=60_000)
    assert done.code == 0, done.err
    return directory / "home", done


def test_a_finished_run_says_what_it_did(finished):
    home, done = finished
    assert not done.messages and "Traceback" not in done.err
    assert "perplexity on identical held-out tokens" in done.out and "21 quantized, 0 left, 0 fallbacks" in done.out
    assert "reloaded by transformers as LlamaForCausalLM, 3 of 3 blocks" in done.out
    assert tiny.visible(home) == ["calibration.jsonl", "evaluation.jsonl", "model", "out", "recipe.yaml"]
    assert "\x1b" not in done.out + done.err  # colours are for terminals


def test_what_is_copied_is_copied_bit_for_bit(finished):
    home, _ = finished
    before, after = tensors_of(home / "model"), tensors_of(home / "out")
    inputs = json.loads((home / "out/suture.json").read_text())["inputs"]
    copied = {name: account["outputs"] for name, account in inputs.items() if account["action"] == "copied"}
    assert len(copied) == 9 and set(inputs) == set(before)
    for name, (same,) in copied.items():
        assert torch.equal(before[name].view(torch.int16), after[same].view(torch.int16))
    assert (home / "out/generation_config.json").read_bytes() == (home / "model/generation_config.json").read_bytes()


def test_the_installed_command_runs_a_recipe_from_anywhere(home, tmp_path):
    """The whole of it: the console script, the reload in a process of its own, no GPU, no network."""
    write_recipe(home, report={"data": "evaluation.jsonl", "window": 16})
    done = warm.installed("run", home / "recipe.yaml", "--set", "steps.0.rtn.bits=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tiny.visible(tmp_path) == ["home"]
    assert (
        json.loads((home / "out/config.json").read_text())["quantization_config"]["quant_method"]
        == "compressed-tensors"
    )
    again = warm.suture("run", home / "recipe.yaml", "--set", "steps.0.rtn.bits=3", "--output", "again", cwd=tmp_path)
    assert again.code == 0
    assert tiny.contents(tmp_path / "again") == tiny.contents(home / "out")
    assert "perplexity" in done.stdout and "LOAD REPORT" not in done.stderr


def test_a_fallback_is_done_but_ends_with_3(home):
    """C3: a layer whose inputs are always zero cannot be calibrated; it is rounded, and that is said."""
    for path in (home / "model").glob("*.safetensors"):
        tensors = load_file(path)
        tensors |= {n: torch.zeros_like(t) for n, t in tensors.items() if n == "model.layers.1.input_layernorm.weight"}
        save_file(tensors, path, metadata={"format": "pt"})
    done = run(home, GPTQ, report={"data": "evaluation.jsonl", "window": 16})
    assert done.code == 3, done.err
    assert not done.messages
    fallen = json.loads((home / "out/suture.json").read_text())["fallbacks"]
    assert sorted(name.rsplit(".", 1)[1] for name in fallen) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert all(name.startswith("model.layers.1.self_attn.") and reason for name, reason in fallen.items())
    for name, reason in fallen.items():
        assert f"note: fallback: {name}: {reason}" in done.out
    assert json.loads((home / "out/report.json").read_text())["layers"]["fallbacks"] == fallen
    assert "4 fallbacks" in done.out
    assert warm.suture("check", "out", cwd=home).code == 0


def test_quantize_is_the_recipe_of_one_step(home):
    options = [
        "--bits",
        "4",
        "--group-size",
        "32",
        "--calibration",
        "calibration.jsonl",
        "--samples",
        "4",
        "--length",
        "16",
    ]
    done = warm.suture("quantize", "model", "out", *options, cwd=home)
    assert done.code == 0, done.err
    assert run(home, GPTQ, output="out2").code == 0
    one, two = tensors_of(home / "out"), tensors_of(home / "out2")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_apply_runs_any_steps_and_shows_the_recipe_that_does_the_same(home):
    steps = ["--step", "untie", "--step", "rtn: {bits: 3, group_size: 32, targets: [q_proj]}"]
    untied = warm.suture("apply", "model", "out", *steps, cwd=home)
    assert untied.code == 1 and "this model's head is not tied" in untied.messages[0]
    done = warm.suture("apply", "model", "out", *steps[2:], cwd=home)
    assert done.code == 0, done.err
    shown = warm.suture("apply", "model", "out2", *steps[2:], "--show-recipe", cwd=home)
    (home / "shown.yaml").write_text(shown.out)
    assert warm.suture("run", "shown.yaml", cwd=home).code == 0
    one, two = tensors_of(home / "out"), tensors_of(home / "out2")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert sum(name.endswith("q_proj.weight_packed") for name in one) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["quantize", "model", "out", "--bits", "9"], "gptq.bits: Input should be less than or equal to 8 (found 9)"),
        (["quantize", "model", "out", "--method", "gtpq"], "not a step that quantizes (did you mean 'gptq'?)"),
        (["quantize", "model", "out", "--method", "untie"], "`suture apply --step` runs it"),
        (
            ["quantize", "model", "out", "--method", "rtn", "--set", "bit=3"],
            "rtn.bit: unknown key (did you mean 'bits'?)",
        ),
        (["apply", "model", "out", "--step", "rtn: {bit: 3}"], "rtn.bit: unknown key (did you mean 'bits'?)"),
        (["apply", "model", "out", "--step", "rtm"], "unknown step 'rtm' (did you mean 'rtn'?)"),
        (["apply", "model", "out", "--step", "rtn: 3"], "expected settings"),
        (["apply", "model", "out", "--step", "{rtn: {}, gptq: {}}"], "not one step"),
        (["apply", "model", "out", "--step", "rtn: {bits: 4"], "--step rtn: {bits: 4"),
        (["steps", "gtpq"], "unknown step (did you mean 'gptq'?)"),
    ],
)
def test_i3_wrong_steps_on_the_command_line(home, args, message):
    done = warm.suture(*args, cwd=home)
    assert done.code == 1 and message in done.messages[0] and not (home / "out").exists()


def test_steps_lists_every_step_and_every_setting(home):
    from suture.pipeline.steps import STEPS

    listed = json.loads(warm.suture("steps", "--json", cwd=home).out)["steps"]
    assert set(listed) == set(STEPS) and listed["gptq"]["needs_text"] == "always"
    shown = json.loads(warm.suture("steps", "gptq", "--json", cwd=home).out)["settings"]
    assert set(shown) == set(STEPS["gptq"].settings.model_fields) and shown["bits"]["default"] == 4
    assert all(setting["description"] for setting in shown.values())
    table = warm.suture("steps", cwd=home).out
    assert all(name in table for name in STEPS)


# -- plan, inspect, report ---------------------------------------------------------------------------------------------


def test_plan_says_what_will_happen_and_does_nothing(home):
    write_recipe(home, GPTQ, report={"data": "evaluation.jsonl", "window": 16})
    before = tiny.contents(home)
    table = warm.suture("plan", "recipe.yaml", cwd=home)
    plain = warm.suture("plan", "recipe.yaml", "--json", cwd=home)
    assert table.code == plain.code == 0
    plan = json.loads(plain.out)
    assert plan["family"] == "llama" and plan["blocks"] == 3
    assert plan["steps"][0]["changed"] == 21 and plan["steps"][0]["copied"] == 9 and plan["steps"][0]["dropped"] == 0
    assert plan["calibration"]["samples"] == 4 and plan["evaluation"]["window"] == 16
    assert plan["bytes_out"] < plan["bytes_in"] and plan["peak_memory"] > 0 and plan["disk"] >= plan["bytes_out"]
    assert "21 tensors changed" in table.out and "peak memory" in table.out
    assert {n: h for n, h in tiny.contents(home).items() if not n.startswith(".task")} == before


def test_the_plans_bytes_are_the_outputs(finished):
    home, _ = finished
    plan = json.loads(warm.suture("plan", "recipe.yaml", "--json", "--output", "elsewhere", cwd=home).out)
    assert plan["bytes_out"] == sum(path.stat().st_size for path in (home / "out").glob("*.safetensors"))


def test_inspect_counts_what_is_there(finished):
    home, _ = finished
    model = json.loads(warm.suture("inspect", "model", "--json", cwd=home).out)
    tensors = tensors_of(home / "model")
    assert model["parameters"]["total"] == sum(t.numel() for t in tensors.values())
    assert model["bytes"] == sum(t.nbytes for t in tensors.values())
    assert (model["heads"], model["kv_heads"], model["head_dim"], model["context"]) == (8, 2, 8, 64)
    assert model["kv_cache_bytes_per_token"] == 2 * 2 * 3 * 2 * 8
    assert model["quantization"] is None and model["history"] == []
    quantized = json.loads(warm.suture("inspect", "out", "--json", cwd=home).out)
    assert quantized["parameters"] == model["parameters"] and quantized["bytes"] < model["bytes"]
    assert quantized["quantization"]["method"] == "compressed-tensors"
    assert [list(step) for step in quantized["history"][0]] == [["gptq"]]
    assert warm.suture("inspect", "out", cwd=home).code == 0


def test_report_scores_candidates_and_prints_or_writes_it(finished):
    home, _ = finished
    args = ["report", "model", "out", "--data", "evaluation.jsonl", "--window", "16"]
    done = warm.suture(*args, "--json", "--output", "scores", cwd=home)
    assert done.code == 0, done.err
    content = json.loads(done.out)
    assert content == json.loads((home / "scores/report.json").read_text())
    made = json.loads((home / "out/report.json").read_text())
    assert [m["value"] for m in content["metrics"]] == [m["value"] for m in made["metrics"]]
    page = warm.suture(*args, cwd=home)
    assert page.code == 0 and page.out.startswith("# model")
    several = warm.suture("report", "model", "out", "model", *args[3:], "--output", "many", cwd=home)
    assert several.code == 0
    assert sorted(p.parent.name for p in (home / "many").glob("*/report.json")) == ["1-out", "2-model"]
    assert {"report.html", "comparison.json"} <= {path.name for path in (home / "many").iterdir()}
    extra = [
        "--also",
        "evaluation.jsonl",
        "--margin",
        "0.1",
        "--no-fidelity",
        "--latency",
        "--json",
        "--output",
        "more",
    ]
    more = warm.suture(*args, *extra, cwd=home)
    assert more.code == 0, more.err
    content = json.loads(more.out)
    assert (len(content["sets"]), content["fidelity"], content["verdict"]["margin"]) == (1, None, 0.1)
    timed = json.loads((home / "more/latency.json").read_text())
    assert [m["name"] for m in timed["measurements"]] == ["prefill", "decode"]
    assert "Latency" in (home / "more/report.html").read_text() and "latency" not in content
    shaped = ["--stride", "4", "--max-tokens-per-document", "16", "--level", "0.8", "--gpu", "mine=1e12,2e13"]
    other = json.loads(warm.suture(*args, *shaped, "--no-fidelity", "--json", cwd=home).out)
    assert (other["protocol"]["stride"], other["protocol"]["max_tokens_per_document"]) == (4, 16)
    assert other["metrics"][0]["level"] == 0.8 and other["cost"]["roofline"][-1]["gpu"] == "mine"
    wrong = warm.suture(*args, "--detokenize", "wikitext", cwd=home)
    assert wrong.code == 1 and "belongs to the protocol lm-eval" in wrong.err
    wrong = warm.suture(*args, "--task", "no-equals-sign", cwd=home)
    assert wrong.code == 1 and "expected NAME=FILE" in wrong.err
    for name in ("scores", "many", "more"):
        shutil.rmtree(home / name)


def test_power_says_what_a_difference_needs(finished):
    """From a run's report, from a comparison's, and from assumptions alone (Miller's 969 items)."""
    home, _ = finished
    found = json.loads(warm.suture("power", "out", "--ratio", "1.001", "--json", cwd=home).out)["rows"]
    content = json.loads((home / "out/report.json").read_text())
    ratio = content["metrics"][0]
    (row,) = found
    exact = ratio["n_tokens"] * ((1.959964 + 0.841621) * ratio["se_log"] / math.log(1.001)) ** 2
    assert row["needed"] == pytest.approx(exact, rel=1e-4) and row["measured"] == ratio["n_tokens"]
    table = warm.suture("power", "out/report.json", "--ratio", "1.001", cwd=home)
    assert table.code == 0 and f"{row['needed']:,}" in table.out
    args = ["report", "model", "out", "model", "--data", "evaluation.jsonl", "--window", "16", "--output", "both"]
    assert warm.suture(*args, cwd=home).code == 0
    several = json.loads(warm.suture("power", "both", "--json", cwd=home).out)["rows"]
    assert [row["candidate"] for row in several] == ["out", "model"]
    assert several[1]["needed"] is None  # a model against itself has no spread
    miller = warm.suture("power", "--points", "3", "--variance", str(1 / 9), cwd=home)
    assert miller.code == 0 and miller.out.startswith("969 items show a difference of 3 points with 80 % power")
    flips = json.loads(warm.suture("power", "--points", "3", "--flips", "0.1", "--json", cwd=home).out)
    assert flips["items"] == 865
    for wrong, why in (
        ([], "give a report, or --flips"),
        (["out", "--flips", "0.1"], "give a report, or --flips"),
        (["model"], "no report.json or comparison.json"),
        (["out/suture.json"], "not a report of suture's"),
        (["nowhere"], "no report.json or comparison.json"),
        (["--flips", "0.001"], "needs at least so many"),
        (["out", "--level", "0.9"], "--level does not go with a report; leave it out"),
        (["--flips", "0.1", "--ratio", "1.02"], "--ratio does not go with --flips"),
        (["--flips", "0.1", "--samples", "2"], "--samples does not go with --flips"),
    ):
        done = warm.suture("power", *wrong, cwd=home)
        assert done.code == 1 and why in done.err and "Traceback" not in done.err
    shutil.rmtree(home / "both")


# -- check -------------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def edit_manifest(out: Path, edit) -> None:
    manifest = json.loads((out / "suture.json").read_text())
    edit(manifest)
    (out / "suture.json").write_text(json.dumps(manifest))


def drop_config_key(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))


def swap_shards(out: Path) -> None:
    first, second = sorted(out.glob("model-*.safetensors"))[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


FIRST = "model-00001-of-0000"
DAMAGE = {
    "a flipped bit at the end of a shard": (lambda o: flip(sorted(o.glob("model-*"))[0], -1), [FIRST, "not the bytes"]),
    "a flipped bit in a header": (lambda o: flip(sorted(o.glob("model-*"))[0], 40), [FIRST, "not the bytes"]),
    "a flipped bit in a side file": (
        lambda o: flip(o / "generation_config.json", 5),
        ["generation_config.json", "bytes"],
    ),
    "a shard cut short": (lambda o: truncate(sorted(o.glob("model-*"))[0], 1), [FIRST, "not the bytes"]),
    "a missing shard": (lambda o: sorted(o.glob("model-*"))[0].unlink(), [FIRST, "is missing"]),
    "a missing side file": (lambda o: (o / "generation_config.json").unlink(), ["generation_config.json is missing"]),
    "an extra file": (lambda o: (o / "notes.txt").write_text("x"), ["notes.txt is not in the manifest"]),
    "an extra file below": (lambda o: ((o / "sub").mkdir(), (o / "sub/x").write_text("x")), ["sub/x is not in the"]),
    "an extra weight file": (
        lambda o: save_file({"a": torch.zeros(1)}, o / "model.safetensors"),
        ["model.safetensors is not in the manifest"],
    ),
    "a config that was edited": (drop_config_key, ["config.json", "not the bytes"]),
    "two shards exchanged": (swap_shards, ["not the bytes"]),
    "no manifest": (lambda o: (o / "suture.json").unlink(), ["no suture.json: not an output of suture"]),
    "a broken manifest": (lambda o: (o / "suture.json").write_text("{"), ["suture.json", "not valid JSON"]),
    "a manifest without files": (
        lambda o: edit_manifest(o, lambda m: m.pop("files")),
        ["suture.json: damaged: no files in it"],
    ),
    "a manifest with another shape": (
        lambda o: edit_manifest(o, lambda m: m["outputs"]["lm_head.weight"].update(shape=[1, 2])),
        ["tensor lm_head.weight is BF16 [320, 64], not as recorded"],
    ),
    "a manifest without a tensor": (
        lambda o: edit_manifest(o, lambda m: m["outputs"].pop("lm_head.weight")),
        ["tensor lm_head.weight is only in one of the weights and the manifest"],
    ),
    "a manifest that lost an input": (
        lambda o: edit_manifest(o, lambda m: m["inputs"]["lm_head.weight"].update(action="forgotten")),
        ["lm_head.weight is neither copied, changed nor dropped"],
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_check_finds_what_was_changed_afterwards(finished, tmp_path, name):
    damage, names = DAMAGE[name]
    shutil.copytree(finished[0] / "out", tmp_path / "out")
    damage(tmp_path / "out")
    done = warm.suture("check", "out", cwd=tmp_path)
    assert done.code == 1 and len(done.messages) == 1 and "Traceback" not in done.err, done.err
    assert not [word for word in names if word not in done.messages[0]], done.messages[0]


def test_check_passes_what_is_whole_and_loads_it(finished, tmp_path):
    shutil.copytree(finished[0] / "out", tmp_path / "out")
    before = tiny.contents(tmp_path / "out")
    done = warm.suture("check", "out", cwd=tmp_path)
    assert done.code == 0 and "loads in stock transformers" in done.out, done.err
    quick = warm.suture("check", "out", "--no-load", cwd=tmp_path)
    assert quick.code == 0 and "loads" not in quick.out
    assert tiny.contents(tmp_path / "out") == before


def test_check_finds_what_no_longer_loads(finished, tmp_path):
    """A tensor that the manifest was made to forget, with every hash right: only loading shows it."""
    shutil.copytree(finished[0] / "out", tmp_path / "out")
    out = tmp_path / "out"
    (path,) = [p for p in out.glob("model-*.safetensors") if "model.norm.weight" in load_file(p)]
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    index = json.loads((out / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (out / INDEX).write_text(json.dumps(index))

    from suture.checkpoint.manifest import file_hashes

    edit_manifest(out, lambda m: (m["outputs"].pop("model.norm.weight"), m.update(files=file_hashes(out))))
    assert warm.suture("check", "out", "--no-load", cwd=tmp_path).code == 0
    done = warm.suture("check", "out", cwd=tmp_path)
    assert done.code == 1 and "missing or mismatched tensors: ['model.norm.weight']" in done.messages[0]


# -- overwriting -------------------------------------------------------------------------------------------------------


def test_a6_overwriting_leaves_nothing_of_the_older_output(home):
    assert run(home, max_shard_size=60_000).code == 0
    first = set(tiny.contents(home / "out"))
    assert len([name for name in first if name.endswith(".safetensors")]) >= 3 and INDEX in first
    refused = run(home)
    assert refused.code == 1 and "is not empty" in refused.messages[0] and "--overwrite" in refused.messages[0]
    assert set(tiny.contents(home / "out")) == first
    (home / "out/pytorch_model.bin").write_bytes(b"stale")
    (home / "out/sub").mkdir()
    (home / "out/sub/stale").write_bytes(b"stale")
    assert run(home, args=["--overwrite"]).code == 0
    second = sorted(tiny.contents(home / "out"))
    assert second == ["README.md", "config.json", "generation_config.json", "model.safetensors", "suture.json"]
    with safe_open(home / "out/model.safetensors", "pt") as opened:
        assert "lm_head.weight" in opened.keys()  # noqa: SIM118
    assert tiny.visible(home) == ["calibration.jsonl", "evaluation.jsonl", "model", "out", "recipe.yaml"]


def test_a_failed_overwrite_keeps_the_older_output(home):
    assert run(home).code == 0
    before = tiny.contents(home / "out")
    poison(home, "model.layers.2.mlp.up_proj.weight")
    assert run(home, args=["--overwrite"]).code == 1
    assert tiny.contents(home / "out") == before


def test_an_empty_directory_is_as_good_as_none(home):
    (home / "out").mkdir()
    assert run(home).code == 0 and (home / "out/model.safetensors").is_file()


def test_an_output_of_suture_can_be_an_input_for_inspection_but_not_be_quantized_again(finished):
    home, _ = finished
    write_recipe(home, model="out", output="twice")
    done = warm.suture("run", "recipe.yaml", cwd=home)
    write_recipe(home, GPTQ, report={"data": "evaluation.jsonl", "window": 16}, max_shard_size=60_000)
    assert done.code == 1 and "already quantized (compressed-tensors)" in done.messages[0]
    assert not (home / "twice").exists()


# -- full disks --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(place: Path, kilobytes: int):
    """A tmpfs at `place`; skips the test where mounting is not permitted."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("kilobytes", [16, 192, 224, 256, 288, 320, 512])
def test_a_full_disk_is_one_sentence_and_with_more_space_the_run_resumes(home, finished, kilobytes):
    with small_disk(home / "disk", kilobytes):
        report = {"data": "evaluation.jsonl", "window": 16}
        done = run(home, GPTQ, report=report, output="disk/out", max_shard_size=60_000)
        if done.code != 0:
            assert done.code == 1 and len(done.messages) == 1 and "Traceback" not in done.err, done.err
            assert "the disk is full" in done.messages[0] or "are needed under" in done.messages[0]
            assert not (home / "disk/out").exists()
            subprocess.run(["mount", "-o", "remount,size=8m", home / "disk"], check=True)
            done = run(home, GPTQ, ["--resume"], report=report, output="disk/out", max_shard_size=60_000)
            assert done.code == 0, done.err
        same = {"model.safetensors.index.json", "config.json", "report-tokens.npy"}
        one, two = tiny.contents(home / "disk/out"), tiny.contents(finished[0] / "out")
        assert {n: h for n, h in one.items() if n in same or n.startswith("model-")} == {
            n: h for n, h in two.items() if n in same or n.startswith("model-")
        }


def failing(call: str, after: int) -> dict[str, str]:
    """A patch of `os.CALL` that raises ENOSPC from its n-th call on."""
    raise_it = f"(_ for _ in ()).throw(OSError({errno.ENOSPC}, 'No space left on device'))"
    return {
        f"os:{call}": "(lambda calls: lambda *a: original(*a) "
        f"if calls.append(1) or len(calls) < {after} else {raise_it})([])"
    }


@pytest.mark.parametrize(
    ("call", "after"),
    [("posix_fallocate", 1), ("posix_fallocate", 3), ("pwrite", 5), ("pwrite", 90), ("fsync", 20), ("fsync", 30)],
)
def test_a_disk_that_fills_up_in_the_middle_is_one_sentence(home, call, after):
    before = tiny.contents(home / "model")
    done = run(home, GPTQ, options={"patches": failing(call, after)}, max_shard_size=60_000)
    assert done.code == 1 and len(done.messages) == 1 and "Traceback" not in done.err, done.err
    assert "the disk is full; free some space, then run again with --resume" in done.messages[0]
    assert not (home / "out").exists() and tiny.contents(home / "model") == before
    resumed = run(home, GPTQ, ["--resume"], max_shard_size=60_000)
    assert resumed.code == 0, resumed.err


def test_j3_a_full_disk_under_the_hidden_states_is_one_sentence(home):
    """With little memory the hidden states live in a mapped file, whose pages must have been reserved."""
    low = {"psutil:virtual_memory": "lambda: type('Memory', (), {'available': 4000})()"}
    tiny.ids_file(home / "calibration.jsonl", documents=64, length=64)
    write_recipe(home, GPTQ, calibration={"data": "calibration.jsonl", "samples": 60, "length": 64}, output="disk/out")
    with small_disk(home / "disk", 6000):
        running = warm.start("run", "recipe.yaml", cwd=home, patches=low, stop_at=40)
        running.wait_until_stopped()
        with contextlib.suppress(OSError):
            (home / "disk/filler").write_bytes(bytes(8 << 20))
        running.go()
        done = running.wait()
    assert done.code == 1 and "the disk is full" in done.messages[0], (done.code, done.err)


# -- interrupts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_an_interrupted_run_says_how_to_go_on_and_does(home, number, code, word):
    whole = run(home, GPTQ, output="whole")
    assert whole.code == 0
    write_recipe(home, GPTQ)
    for moment in (0.4, 0.7, 0.97):
        running = warm.start("run", "recipe.yaml", "--resume", cwd=home, stop_at=int(whole.events * moment))
        running.wait_until_stopped()
        running.signal(number)
        running.go()
        done = running.wait()
        assert done.code == code, done.err
        assert done.messages == [f"suture: {word}; --resume goes on with what is done"]
        assert "Traceback" not in done.err and not (home / "out").exists() and not done.temporary
        shutil.copytree(home / "out.partial", home / "out.seen", dirs_exist_ok=True)  # it is there, and stays
        shutil.rmtree(home / "out.seen")
        if moment != 0.97:
            shutil.rmtree(home / "out.partial")
    assert run(home, GPTQ, ["--resume"]).code == 0
    one, two = tiny.contents(home / "out"), tiny.contents(home / "whole")
    assert one == two


def command_line(pid: str) -> bytes:
    """Empty for a process that is no more."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def test_an_interrupt_while_stock_transformers_reloads_ends_that_process_too(home):
    """The reload is a process of its own, which must not go on alone."""
    write_recipe(home)
    running = warm.start("run", "recipe.yaml", cwd=home, quick_verify=False)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    while not (found := [c for c in children.read_text().split() if b"pipeline.reload" in command_line(c)]):
        assert not (running.place / "ended").exists(), (running.place / "err").read_text()
    time.sleep(0.2)
    running.signal(signal.SIGTERM)
    done = running.wait()
    assert done.code == 143, done.err
    assert command_line(found[0]) == b""
    assert run(home, args=["--resume"]).code == 0


def test_interrupting_what_has_nothing_to_resume_promises_nothing(home):
    write_recipe(home)
    slow = {"suture.pipeline.plan:open_checkpoint": "lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)"}
    done = warm.suture("plan", "recipe.yaml", cwd=home, patches=slow)
    assert done.code == 130 and done.messages == ["suture: interrupted"]


def test_a_pipe_that_closes_early_is_no_error(home):
    done = subprocess.run(
        f"{warm.COMMAND} --help | head -1", shell=True, cwd=home, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
