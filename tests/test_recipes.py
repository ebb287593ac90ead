"""The recipes that ship run as they are, their schema is current, and a first recipe can be made from each."""

import json
import os
import pty
import re
import select
import shlex
import subprocess
from pathlib import Path

import jsonschema
import kit
import pytest
import torch
import warm
from ruamel.yaml import YAML

import suture
from suture.pipeline.adapters import attach
from suture.pipeline.recipe import load_recipe
from suture.pipeline.recipe_schema import recipe_schema, schema_text
from suture.pipeline.recipes import example, examples, first_recipe, schema_path, shown
from suture.pipeline.steps import STEPS

ROOT = Path(__file__).resolve().parent.parent
RECIPES = [name for name, one in examples().items() if not one.is_script]
SMALL = {"calibration.samples": "2", "calibration.length": "64", "report.max_tokens_per_document": "40"}


def small(name, tmp_path, **more):
    """The shipped recipe as it is, of few tokens."""
    wanted = {key: value for key, value in SMALL.items() if f"{key.split('.')[0]}:" in example(name).text}
    overrides = wanted | {"report.fidelity": "false", "output": json.dumps(str(tmp_path / "out"))} | more
    return load_recipe(ROOT / "recipes" / example(name).file, overrides)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Of builtin:tiny, with a change that can be seen."""
    directory = tmp_path_factory.mktemp("adapter") / "adapter"
    attach("builtin:tiny", directory, r=2, alpha=4.0)
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(tmp_path, name, adapter):
    (tmp_path / "kept.txt").write_text("It was a bright cold day in April, and the clocks were striking thirteen.")
    more = {
        "merge-then-quantize": {"steps.0.lora.merge.adapter": json.dumps(str(adapter))},
        "trim-vocabulary": {
            "steps.0.vocabulary.trim": json.dumps([str(tmp_path / "kept.txt")]),
            "report.data": json.dumps(str(tmp_path / "kept.txt")),
        },
    }.get(name, {})
    recipe = small(name, tmp_path, **more)
    run = kit.run(recipe)
    done = suture.inspect(tmp_path / "out").facts
    assert [next(iter(step)) for step in done["history"][0]] == [step for step, _ in recipe.resolved_steps()]
    assert run.report is not None and run.report.perplexity.ratio < 20
    before = suture.inspect("builtin:tiny").facts
    changed = {
        "gqa-heal": lambda: done["kv_heads"] == 4,
        "mla-w4": lambda: done["compute"]["cache"]["numbers_per_token_and_layer"] == [256],
        "extend-context": lambda: done["context"] == 1024,
        "trim-vocabulary": lambda: done["vocabulary"] < before["vocabulary"] and done["vocabulary"] % 64 == 0,
    }
    assert changed[name]() if name in changed else done["quantization"]["bits_per_weight"] < 8.2


def commands_of(name, *args):
    """The script's commands as a shell would see them, its variables filled in."""
    text = example(name).text.replace("\\\n", " ")
    values = dict(re.findall(r"(\w+)=\$\{(?:\w+):-(\w+)\}", text)) | {"SAMPLES": "1", "LENGTH": "32"}
    values |= {key: args[int(n) - 1] for key, n in re.findall(r"(\w+)=\$(\d)", text)}
    given = re.findall(r"(\w+)=\$\{(\d):-(\w+)\}", text)
    values |= {key: args[int(n) - 1] if len(args) >= int(n) else default for key, n, default in given}
    lines = [line for line in text.splitlines() if line.startswith("suture ")]
    texts = re.search(r'^TEXT="(.*)"$', text, re.MULTILINE)
    for line in lines:
        line = line.replace("$TEXT", texts[1]) if texts else line
        line = re.sub(r"\$\{(\w+):-\w+\}", lambda found: values[found[1]], line)
        yield shlex.split(re.sub(r"\$(\w+)", lambda found: values[found[1]], line))[1:]


def test_the_script_that_extracts_an_adapter_runs(tmp_path, adapter):
    steps = [{"lora.merge": {"adapter": str(adapter)}}]
    tuned = kit.run({"model": "builtin:tiny", "steps": steps, "output": str(tmp_path / "tuned")}).output
    outputs = []
    for args in commands_of("extract-adapter", "builtin:tiny", str(tuned), "taken", "2"):
        args = [*args, "--max-windows", "1"] if "curve" in args else args
        done = warm.suture(*args, cwd=tmp_path)
        assert done.code == 0, done.err
        outputs.append(done.out)
    assert len(outputs) == 3 and "rank, alpha" in outputs[1] and "change kept" in outputs[2]


@pytest.mark.slow
def test_the_script_that_compares_five_runs(tmp_path):
    ran = list(commands_of("compare-five", "builtin:tiny", "five", "1"))
    for args in ran:
        done = warm.suture(*args, *(["--no-fidelity"] if args[0] == "report" else []), cwd=tmp_path)
        assert done.code in (0, 3), done.err
    assert (tmp_path / "five" / "page" / "report.html").is_file() and len(ran) == 6


# -- the schema --------------------------------------------------------------------------------------------------------


def test_the_shipped_schema_is_current():
    """`python -m suture.pipeline.recipe_schema > recipes/recipe.schema.json` writes it again."""
    assert schema_path().read_text() == schema_text() == (ROOT / "recipes" / "recipe.schema.json").read_text()


def test_the_schema_takes_every_recipe_and_refuses_unknown_keys():
    checker = jsonschema.Draft202012Validator(recipe_schema())
    for name in RECIPES:
        content = YAML(typ="safe").load(example(name).text)
        assert not list(checker.iter_errors(content)), name
    good = {"model": "m", "output": "o", "steps": [{"gptq": {"bits": 4}}], "report": [{"data": "a"}, {"data": "b"}]}
    assert checker.is_valid(good)
    for wrong in (
        {"modle": "m"},
        {"steps": [{"gptq": {"bitts": 4}}]},
        {"steps": [{"gtpq": {}}]},
        {"report": {"windw": 1}},
    ):
        assert not checker.is_valid(good | wrong), wrong


def test_the_schema_knows_every_step_and_setting():
    found = recipe_schema()["$defs"]
    for name, kind in STEPS.items():
        assert set(found[f"step {name}"]["properties"]) == set(kind.settings.model_fields)


# -- recipes and init --------------------------------------------------------------------------------------------------


def test_the_jobs_are_covered_and_every_recipe_teaches():
    assert set(examples()) >= {
        *("quickstart", "w4-vllm", "w8a8-smoothquant", "nf4-qlora", "gqa-heal", "mla-w4", "merge-then-quantize"),
        *("extract-adapter", "extend-context", "trim-vocabulary", "compare-five"),
    }
    for one in examples().values():
        assert one.name == "quickstart" or one.text.count("#") >= 5, one.name
        assert one.is_script or one.text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")


@pytest.mark.parametrize("goal", RECIPES)
def test_a_first_recipe_keeps_the_comments_and_takes_the_users_paths(tmp_path, goal):
    text = first_recipe(goal, model="my/model", report="held.txt", output="here")
    (tmp_path / "recipe.yaml").write_text(text)
    loaded = load_recipe(tmp_path / "recipe.yaml")
    assert (loaded.model, loaded.output) == ("my/model", str(tmp_path / "here"))
    assert loaded.report.data == str(tmp_path / "held.txt")
    assert text.count("#") == shown(example(goal)).count("#")


def test_the_commands_list_print_and_write(tmp_path):
    listed = warm.suture("recipes", "--json", cwd=tmp_path)
    assert set(json.loads(listed.out)) == set(examples())
    assert "w4-vllm" in warm.suture("recipes", cwd=tmp_path).out
    printed = warm.suture("recipes", "show", "w4-vllm", cwd=tmp_path).out
    assert "output: out/w4-vllm" in printed and str(schema_path()) in printed
    missing = warm.suture("recipes", "show", "w4-vlm", cwd=tmp_path)
    assert missing.code == 1 and "did you mean 'w4-vllm'" in missing.err
    assert json.loads(warm.suture("recipes", "schema", cwd=tmp_path).out) == recipe_schema()
    done = warm.suture("init", "--goal", "nf4-qlora", "--model", "builtin:tiny", "--output", "nf4", cwd=tmp_path)
    assert done.code == 0 and "suture run recipe.yaml" in done.out
    assert load_recipe(tmp_path / "recipe.yaml").output == str(tmp_path / "nf4")
    again = warm.suture("init", cwd=tmp_path)
    assert again.code == 1 and "--overwrite" in again.err
    for args in (["--goal", "compare-five"], ["--goal", "nf4-qlora", "--calibration", "builtin:novels"]):
        assert warm.suture("init", "other.yaml", *args, cwd=tmp_path).code == 1
    assert not (tmp_path / "other.yaml").exists()


def test_set_reaches_into_a_step_whose_name_has_a_dot():
    changed = load_recipe(ROOT / "recipes" / "merge-then-quantize.yaml", {"steps.0.lora.merge.base": "dequantized"})
    assert changed.steps[0]["lora.merge"]["base"] == "dequantized"
    with pytest.raises(suture.SutureError, match="no 'lora' there"):
        load_recipe(ROOT / "recipes" / "merge-then-quantize.yaml", {"steps.1.lora.merge.base": "original"})


def test_on_a_terminal_init_asks(tmp_path):
    main, side = pty.openpty()
    process = subprocess.Popen([warm.COMMAND, "init"], stdin=side, stdout=side, stderr=side, cwd=tmp_path)
    os.close(side)
    os.write(main, b"gqa-heal\nmy/model\nbuiltin:novels\nheld.txt\n\n")
    text = b""
    while process.poll() is None or select.select([main], [], [], 0.1)[0]:
        try:
            text += os.read(main, 65536)
        except OSError:
            break
    os.close(main)
    assert process.wait() == 0, text
    assert b"what for" in text and b"calibration text" in text
    made = load_recipe(tmp_path / "recipe.yaml")
    assert (made.model, made.output, made.report.data) == (
        "my/model",
        str(tmp_path / "out/gqa-heal"),
        str(tmp_path / "held.txt"),
    )
