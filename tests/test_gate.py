"""A recipe's gate: past a perplexity ratio nothing is put under the final name."""

import json

import pytest
import tiny
import warm
from kit import run

from suture.checkpoint.errors import SutureError
from suture.pipeline.recipe import make_recipe

COARSE = {"rtn": {"bits": 2, "group_size": 64, "search": False}}


def recipe(directory, **changes):
    content = {
        "model": str(directory / "model"),
        "steps": [COARSE],
        "report": {"data": str(directory / "text.jsonl"), "window": 32},
        "output": str(directory / "out"),
    }
    return content | changes


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gate")
    tiny.llama(directory / "model", layers=1)
    tiny.ids_file(directory / "text.jsonl")
    return directory


def test_past_the_gate_nothing_has_the_final_name_and_a_wider_gate_resumes(home):
    free = run(recipe(home, output=str(home / "free")))
    ratio = free.report.perplexity.ratio
    with pytest.raises(SutureError, match=rf"gate: .* {ratio:.4f} .* more than the {ratio * 0.99:g} .* point estimate"):
        run(recipe(home, gate=float(f"{ratio * 0.99:g}")))
    assert not (home / "out").exists()
    kept = run(recipe(home, gate=ratio * 1.01), resume=True)
    assert kept.output.exists()
    assert json.loads((kept.output / "suture.json").read_text())["recipe"]["gate"] == ratio * 1.01


def test_a_gate_without_held_out_text_is_refused(home):
    with pytest.raises(SutureError, match="gate: needs a perplexity ratio"):
        make_recipe(recipe(home, gate=1.1) | {"report": None})
    with pytest.raises(SutureError, match="gate"):
        make_recipe(recipe(home, gate=0))


def test_the_command_takes_a_gate(home):
    path = tiny.recipe(home / "recipe.yaml", recipe(home, output="by-command"))
    done = warm.suture("run", path, "--gate", "0.5", cwd=home)
    assert done.code == 1 and len(done.messages) == 1 and "0.5 that the gate lets through" in done.messages[0]
    assert not (home / "by-command").exists()
