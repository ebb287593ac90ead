"""The recipe: what is understood, what is refused and where, and that every way to write one gives the same."""

import json
import math
import re
from importlib.resources import files
from pathlib import Path

import pytest
import tiny
import typer.testing
from hypothesis import given, settings
from hypothesis import strategies as st

import suture
from suture.checkpoint.errors import SutureError
from suture.cli import main as cli
from suture.cli import measure
from suture.pipeline import api
from suture.pipeline.plan import make_plan
from suture.pipeline.recipe import CalibrationSettings, Recipe, ReportSettings, load_recipe, make_recipe
from suture.pipeline.run import fingerprint
from suture.pipeline.steps import STEPS

RTN = "model: builtin:tiny\nsteps: [{rtn: {group_size: 64}}]\noutput: out\n"
GPTQ = """\
model: builtin:tiny
calibration:
  data: builtin:novels
  samples: 2
  length: 32
steps:
  - gptq:
      bits: 3
      group_size: 64
report:
  data: builtin:holmes
  window: 64
output: out
"""


def load(directory: Path, text: str, **overrides: str) -> Recipe:
    path = directory / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path, {key.replace("__", "."): value for key, value in overrides.items()})


def only_step(recipe: Recipe):
    ((_, step),) = recipe.resolved_steps()
    return step


# -- I1: numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-4", 1e-4), ("1.0e-4", 1e-4), ("2E-2", 0.02), ("1e-04", 1e-4), ("0.02", 0.02), ("'1e-4'", 1e-4), (".5", 0.5)],
)
def test_i1_every_way_to_write_a_small_number_is_a_number(tmp_path, written, value):
    assert only_step(load(tmp_path, GPTQ.replace("bits: 3", f"damp: {written}"))).damp == value
    assert only_step(load(tmp_path, GPTQ, steps__0__gptq__damp=written)).damp == value


@pytest.mark.parametrize("written", ["1e1", "1.0e1", "1e+1", "10", "10.0", "1_0"])
def test_i1_a_whole_number_may_be_written_with_an_exponent(tmp_path, written):
    recipe = load(tmp_path, GPTQ.replace("samples: 2", f"samples: {written}"), max_shard_size="5e9")
    assert recipe.calibration.samples == 10 and type(recipe.calibration.samples) is int
    assert recipe.max_shard_size == 5_000_000_000


@pytest.mark.parametrize(
    ("key", "written", "shown"),
    [
        ("damp", "small", "'small'"),
        ("damp", ".nan", "nan"),
        ("damp", ".inf", "inf"),
        ("damp", "None", "'None'"),
        ("bits", "3.5", "3.5"),
        ("bits", "four", "'four'"),
        ("bits", "99", "99"),
        ("symmetric", "perhaps", "'perhaps'"),
        ("targets", "q_proj", "'q_proj'"),
    ],
)
def test_i1_what_is_not_a_number_is_shown_with_its_key_and_line(tmp_path, key, written, shown):
    with pytest.raises(SutureError) as refused:
        load(tmp_path, GPTQ.replace("bits: 3", f"{key}: {written}"))
    assert f"recipe.yaml: line 8: steps[0].gptq.{key}: " in str(refused.value)
    assert f"(found {shown})" in str(refused.value)


# -- I3: what is written wrong -----------------------------------------------------------------------------------------

WRONG = {
    "misspelled step setting": (
        GPTQ.replace("group_size", "group_sise"),
        r"recipe\.yaml: line 9: steps\[0\]\.gptq\.group_sise: unknown key \(did you mean 'group_size'\?\)",
    ),
    "misspelled ignore": (
        GPTQ.replace("group_size: 64", "ingore: [q_proj]"),
        r"line 9: steps\[0\]\.gptq\.ingore: unknown key \(did you mean 'ignore'\?\)",
    ),
    "misspelled section": (
        GPTQ.replace("calibration:", "calibratoin:"),
        r"line 2: calibratoin: unknown key \(did you mean 'calibration'\?\)",
    ),
    "misspelled in a section": (
        GPTQ.replace("samples:", "sampels:"),
        r"line 4: calibration\.sampels: unknown key \(did you mean 'samples'\?\); known keys: data, column",
    ),
    "misspelled in the report": (
        GPTQ.replace("window:", "windwo:"),
        r"line 12: report\.windwo: unknown key \(did you mean 'window'\?\)",
    ),
    "misspelled step": (
        GPTQ.replace("- gptq:", "- gptqq:"),
        r"line 7: steps\[0\]: unknown step 'gptqq' \(did you mean 'gptq'\?\); known: .*untie.*gptq",
    ),
    "a second step misspelled": (
        GPTQ.replace("  - gptq:", "  - untie: {}\n  - gtpq:"),
        r"line 8: steps\[1\]: unknown step 'gtpq' \(did you mean 'gptq'\?\)",
    ),
    "step setting at the top": (
        GPTQ + "bits: 4\n",
        r"line 14: bits: unknown key \(it belongs to steps' rtn or steps' gptq",
    ),
    "calibration setting in a step": (
        GPTQ.replace("bits: 3", "samples: 3"),
        r"line 8: steps\[0\]\.gptq\.samples: unknown key \(it belongs to calibration\)",
    ),
    "top-level key in a section": (
        GPTQ.replace("window: 64", "max_shard_size: 64"),
        r"line 12: report\.max_shard_size: unknown key \(it belongs to steps' reshard or the top level\)",
    ),
    "setting beside its step": (
        GPTQ.replace("      bits: 3\n      group_size: 64", "      bits: 3\n    group_size: 64"),
        r"line 7: steps\[0\]: one step is one \{name: \{settings\}\}",
    ),
    "rtn with gptq's setting": (
        RTN.replace("group_size: 64", "damp: 1"),
        r"line 2: steps\[0\]\.rtn\.damp: unknown key",
    ),
    "empty file": ("", r"recipe\.yaml: a recipe is a mapping of keys, this one is empty"),
    "only comments": ("# nothing\n", r"this one is empty"),
    "list at the top": ("- gptq: {}\n", r"a mapping of keys, this one is a list"),
    "a word": ("gptq\n", r"a mapping of keys, this one is a single value"),
    "empty calibration": (
        re.sub(r"calibration:\n(  .*\n)*", "calibration:\n", GPTQ),
        r"line 2: calibration: there is nothing in it; remove the key",
    ),
    "empty report": (re.sub(r"report:\n(  .*\n)*", "report:\n", GPTQ), r"line 10: report: there is nothing in it"),
    "empty steps": ("model: m\nsteps:\noutput: o\n", r"line 2: steps: there is nothing in it"),
    "empty model": ("model:\nsteps: [{rtn: {}}]\noutput: o\n", r"line 1: model: there is nothing in it"),
    "no steps": ("model: m\nsteps: []\noutput: o\n", r"line 2: steps: List should have at least 1 item"),
    "steps are no list": ("model: m\nsteps: {gptq: {}}\noutput: o\n", r"line 2: steps: Input should be a valid list"),
    "step without settings": ("model: m\nsteps:\n- rtn\noutput: o\n", r"line 3: steps\[0\]: write '- rtn: \{\}'"),
    "null settings": (
        "model: m\nsteps:\n- rtn:\noutput: o\n",
        r"line 3: steps\[0\]\.rtn: expected settings, found None; write \{\} for the defaults",
    ),
    "settings that are a number": (
        "model: m\nsteps:\n- rtn: 0\noutput: o\n",
        r"line 3: steps\[0\]\.rtn: expected settings, found 0",
    ),
    "section that is a list": (
        GPTQ.replace("  data: builtin:novels", "- data: x\n")
        .replace("  samples: 2\n", "")
        .replace("  length: 32\n", ""),
        r"line 2: calibration: Input should be a valid dict",
    ),
    "duplicate key": (RTN + "model: other\n", r'line 4: found duplicate key "model"'),
    "duplicate key in a step": (
        GPTQ.replace("bits: 3", "bits: 3\n      bits: 4"),
        r'line 9: found duplicate key "bits"',
    ),
    "missing model": ("steps: [{rtn: {}}]\noutput: o\n", r"model: missing"),
    "missing output": ("model: m\nsteps: [{rtn: {}}]\n", r"output: missing"),
    "missing data": (GPTQ.replace("  data: builtin:novels\n", ""), r"line 2: calibration\.data: missing"),
    "broken YAML": ("model: [a\nsteps: b\n", r"recipe\.yaml: line 2: "),
    "a tab": ("model: m\n\tsteps: []\n", r"line 2: found character '\\t'"),
    "two documents": (RTN + "---\n" + RTN, r"line 4: "),
    "a number for a name": ("model: 12\nsteps: [{rtn: {}}]\noutput: o\n", r"line 1: model: .*string \(found 12\)"),
    "a protocol's foreign setting": (
        GPTQ.replace("window: 64", "stride: 4\n  protocol: gptq-2048"),
        r"line 10: report: stride and max_tokens_per_document belong to doc-rolling",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_i3_what_is_written_wrong_is_refused_with_its_place(tmp_path, name):
    text, message = WRONG[name]
    with pytest.raises(SutureError, match=message) as refused:
        load(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_i3_two_mistakes_are_said_at_once(tmp_path):
    with pytest.raises(SutureError, match=r"line 4: calibration\.sampels.*line 12: report\.windwo"):
        load(tmp_path, GPTQ.replace("samples:", "sampels:").replace("window:", "windwo:"))


def test_i3_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"model: caf\xe9\n")
    with pytest.raises(SutureError, match=r"recipe\.yaml: not YAML: "):
        load_recipe(path)


def test_a_recipe_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SutureError, match=re.escape(f"{tmp_path}/nope.yaml: no such recipe file")):
        load_recipe(tmp_path / "nope.yaml")


# -- I5: paths ---------------------------------------------------------------------------------------------------------


def test_i5_paths_are_relative_to_the_recipe_wherever_it_is_started(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "sub" / "model").mkdir(parents=True)
    text = GPTQ.replace("builtin:tiny", "sub/model").replace("builtin:novels", "text.txt")
    text = text.replace("builtin:holmes", "../held-out.txt")
    monkeypatch.chdir(tmp_path)
    recipe = load(home, text)
    assert recipe.model == str(home / "sub" / "model")
    assert recipe.output == str(home / "out")
    assert recipe.calibration.data == str(home / "text.txt")
    assert recipe.report.data == str(tmp_path / "held-out.txt")


@pytest.mark.parametrize("model", ["./model", "../home/model", "a/b/c"])
def test_i5_a_missing_path_is_looked_for_beside_the_recipe(tmp_path, monkeypatch, model):
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    recipe = load(tmp_path / "home", RTN.replace("builtin:tiny", model))
    assert recipe.model == str(tmp_path / "home" / model.removeprefix("./").removeprefix("../home/"))
    with pytest.raises(SutureError, match=r"no such directory: .*/home/.* nothing was asked of the network"):
        make_plan(recipe)


def test_i5_a_hub_id_stays_one_and_asks_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    recipe = load(tmp_path, RTN.replace("builtin:tiny", "nobody/has-this-model"))
    assert recipe.model == "nobody/has-this-model" and not recipe.download
    with pytest.raises(SutureError, match=r"no such directory: .*and no model nobody/has-this-model in the cache"):
        make_plan(recipe)


def test_i5_a_directory_that_is_only_beside_the_shell_is_not_taken_for_the_recipes(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SutureError, match="model is a directory here, but not beside the recipe"):
        load(tmp_path / "home", RTN.replace("builtin:tiny", "model"))


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    recipe = load(tmp_path, RTN.replace("builtin:tiny", "~/model").replace("output: out", "output: ~/out"))
    assert (recipe.model, recipe.output) == ("/somewhere/model", "/somewhere/out")


# -- I9: order of steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [{"gptq": {}}, {"untie": {}}],
            r"steps\[1\]\.untie: comes after gptq, whose output is quantized; put gptq last",
        ),
        ([{"rtn": {}}, {"gptq": {}}], r"steps\[1\]\.gptq: comes after rtn"),
        ([{"gptq": {}}, {"gptq": {}}], r"steps\[1\]\.gptq: comes after gptq"),
        ([{"untie": {}}, {"rtn": {}}, {"untie": {}}], r"steps\[2\]\.untie: comes after rtn"),
    ],
)
def test_i9_nothing_may_follow_a_step_that_rounds(tmp_path, steps, message):
    with pytest.raises(SutureError, match=message):
        make_plan(make_recipe({"model": "builtin:tiny", "steps": steps, "output": str(tmp_path / "o")}))


def test_i9_untying_a_model_that_is_not_tied_is_refused(tmp_path):
    recipe = make_recipe({"model": "builtin:tiny", "steps": [{"untie": {}}], "output": str(tmp_path / "o")})
    with pytest.raises(SutureError, match="untie: this model's head is not tied"):
        make_plan(recipe)


def test_untying_twice_is_refused(tmp_path):
    model = tiny.llama(tmp_path / "tied", tied=True, layers=1)
    steps = [{"untie": {}}, {"untie": {}}]
    with pytest.raises(SutureError, match="untie: this model's head is not tied"):
        make_plan(make_recipe({"model": str(model), "steps": steps, "output": str(tmp_path / "o")}))


# -- overrides ---------------------------------------------------------------------------------------------------------


def test_set_changes_one_key_and_is_read_as_yaml(tmp_path):
    changed = load(
        tmp_path,
        GPTQ,
        steps__0__gptq__bits="2",
        steps__0__gptq__targets="[q_proj, 're:.*up_proj']",
        steps__0__gptq__symmetric="false",
        calibration__seed="7",
        report="null",
        max_shard_size="1e6",
    )
    step = only_step(changed)
    assert (step.bits, step.group_size, step.symmetric) == (2, 64, False)
    assert step.targets == ["q_proj", "re:.*up_proj"]
    assert changed.calibration.seed == 7 and changed.calibration.samples == 2
    assert changed.report is None and changed.max_shard_size == 1_000_000


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("steps.0.gptq.bitz", "3", r"steps\[0\]\.gptq\.bitz: unknown key \(did you mean 'bits'\?\)"),
        ("steps.1.gptq.bits", "3", r"--set steps\.1\.gptq\.bits: the recipe has no '1' there; there is a list, 0\.\.0"),
        ("steps.first.gptq.bits", "3", r"has no 'first' there; there is a list, 0\.\.0"),
        ("steps.0.rtn.bits", "3", r"has no 'rtn' there; there are gptq"),
        ("clibration.seed", "3", r"has no 'clibration' there; there are model, calibration"),
        ("steps.0", "{rtn: {}}", r"--set steps\.0: no key '0' can be there; there is a list, 0\.\.0"),
        ("model.name", "x", r"--set model\.name: no key 'name' can be there; there is 'builtin:tiny'"),
        ("calibration.samples.x.y", "1", r"has no 'x' there; there is 2"),
        ("calibration.samples", "many", r"calibration\.samples: .*\(found 'many'\)"),
        ("calibration.samples", "[", r"--set calibration\.samples: line 1: "),
    ],
)
def test_a_wrong_override_is_refused_by_name(tmp_path, key, value, message):
    (tmp_path / "recipe.yaml").write_text(GPTQ)
    with pytest.raises(SutureError, match=message):
        load_recipe(tmp_path / "recipe.yaml", {key: value})


# -- one recipe, written in every way ----------------------------------------------------------------------------------


def same(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes mean the same, every default written out."""
    return one.to_yaml() == other.to_yaml() and one.resolved_steps() == other.resolved_steps()


def test_printed_and_loaded_again_a_recipe_is_the_same(tmp_path):
    recipe = load(tmp_path, GPTQ, steps__0__gptq__damp="1e-4")
    again = load(tmp_path / "..", recipe.to_yaml())
    assert again.model_dump(exclude={"steps"}) == recipe.model_dump(exclude={"steps"})
    assert same(again, recipe)
    once_more = load(tmp_path, again.to_yaml())
    assert once_more == again


def test_printed_and_loaded_again_a_recipe_runs_the_same(tmp_path):
    recipe = load(tmp_path, GPTQ)
    (tmp_path / "elsewhere").mkdir()
    again = load(tmp_path / "elsewhere", recipe.to_yaml())
    plans = [make_plan(r) for r in (recipe, again)]
    assert fingerprint(plans[0], {}) == fingerprint(plans[1], {})
    assert plans[0].evaluation.windows.tokens_sha256 == plans[1].evaluation.windows.tokens_sha256
    assert plans[0].output == plans[1].output


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
ODD = st.sampled_from(
    ["null", "true", "yes", "1e4", "0x1f", "~", "- a", "a: b", "#", "'", '"', " x ", "é\u2028", "%", "|"]
)


@settings(max_examples=60, deadline=None)
@given(
    text=TEXT | ODD,
    targets=st.lists(TEXT | ODD, min_size=1, max_size=3),
    damp=st.floats(1e-300, 0.99),
    level=st.floats(0.5000001, 0.9999999),
    seed=st.integers(0, 2**63),
)
def test_any_text_and_number_survives_printing(tmp_path_factory, text, targets, damp, level, seed):
    recipe = make_recipe(
        {
            "model": "builtin:tiny",
            "calibration": {"data": "builtin:novels", "column": text, "seed": seed},
            "report": {"data": "builtin:holmes", "split": text, "level": level},
            "steps": [{"gptq": {"damp": damp, "targets": targets, "ignore": targets}}],
            "output": "/out",
        }
    )
    path = tmp_path_factory.getbasetemp() / "printed.yaml"
    path.write_bytes(recipe.to_yaml().encode())
    again = load_recipe(path)
    assert again.model_dump(exclude={"steps"}) == recipe.model_dump(exclude={"steps"})
    assert again.resolved_steps() == recipe.resolved_steps()


@pytest.fixture
def recipes_of(monkeypatch):
    """The recipe that a command line, or a call, would run."""
    seen: list[Recipe] = []
    monkeypatch.setattr(cli, "_run", lambda recipe, *rest: seen.append(recipe))
    monkeypatch.setattr(api, "_run", lambda recipe, **options: seen.append(recipe))

    def command(*args: str) -> Recipe:
        result = typer.testing.CliRunner().invoke(cli.app, args, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return seen.pop()

    def call(function, *args, **options) -> Recipe:
        function(*args, **options)
        return seen.pop()

    return command, call


def test_yaml_command_line_and_keywords_make_the_same_recipe(tmp_path, recipes_of):
    command, call = recipes_of
    out = str(tmp_path / "out")
    text = """\
model: builtin:tiny
calibration: {data: builtin:novels, samples: 8, length: 64, seed: 3}
steps: [{gptq: {bits: 3, group_size: 32, symmetric: false, targets: [q_proj, k_proj], ignore: [model.layers.0.*]}}]
report: {data: builtin:holmes}
output: out
"""
    from_file = load(tmp_path, text)
    options = "--method gptq --bits 3 --group-size 32 --asymmetric --targets q_proj --targets k_proj --ignore"
    options += " model.layers.0.* --calibration builtin:novels --samples 8 --length 64 --seed 3 --report builtin:holmes"
    calibration = {"data": "builtin:novels", "samples": 8, "length": 64, "seed": 3}
    step = {
        "bits": 3,
        "group_size": 32,
        "symmetric": False,
        "targets": ["q_proj", "k_proj"],
        "ignore": ["model.layers.0.*"],
    }
    as_mapping = {
        "model": "builtin:tiny",
        "calibration": calibration,
        "steps": [{"gptq": step}],
        "report": {"data": "builtin:holmes"},
        "output": out,
    }
    others = {
        "suture run": command("run", str(tmp_path / "recipe.yaml")),
        "suture quantize": command("quantize", "builtin:tiny", out, *options.split()),
        "suture.quantize": call(
            suture.quantize, "builtin:tiny", out, calibration=calibration, report="builtin:holmes", **step
        ),
        "suture.run(mapping)": call(suture.run, as_mapping),
        "suture.run(path)": call(suture.run, tmp_path / "recipe.yaml"),
        "suture.run(Recipe)": call(suture.run, suture.Recipe(**as_mapping)),
    }
    assert {name for name, recipe in others.items() if not same(recipe, from_file)} == set()


def test_command_line_defaults_are_the_recipes_defaults(tmp_path, recipes_of):
    command, call = recipes_of
    out = str(tmp_path / "out")
    for method in ("rtn", "gptq"):
        from_command = command("quantize", "m/m", out, "--method", method, "--calibration", "builtin:novels")
        from_call = call(suture.quantize, "m/m", out, method=method, calibration="builtin:novels")
        assert same(from_command, from_call)


def test_the_command_lines_protocols_are_those_of_recipes():
    protocol = ReportSettings.model_fields["protocol"].annotation
    assert {str(name) for name in measure.Protocol} == set(protocol.__args__)


def test_keywords_are_checked_like_a_file():
    with pytest.raises(SutureError, match=r"steps\[0\]\.gptq\.bitz: unknown key \(did you mean 'bits'\?\)"):
        suture.quantize("builtin:tiny", "/nowhere/out", bitz=4)
    with pytest.raises(SutureError, match=r"calibration\.smaples: unknown key \(did you mean 'samples'\?\)"):
        suture.quantize("builtin:tiny", "/nowhere/out", calibration={"data": "builtin:novels", "smaples": 4})
    with pytest.raises(SutureError, match=r"unknown step 'gptqq' \(did you mean 'gptq'\?\)"):
        suture.quantize("builtin:tiny", "/nowhere/out", method="gptqq")


# -- the recipes that come with suture ---------------------------------------------------------------------------------

SHIPPED = sorted(path.name for path in (files("suture") / "recipes").iterdir() if path.name.endswith(".yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_is_valid(name):
    path = Path(str(files("suture") / "recipes" / name))
    recipe = load_recipe(path)
    assert recipe.resolved_steps()
    assert "out" in Path(recipe.output).relative_to(path.parent.parent).parts  # never beside the package's files


def test_the_quickstart_is_among_them():
    assert "quickstart.yaml" in SHIPPED


def test_the_schema_describes_every_key():
    """Each field has a description: it is the reference that `suture` can print."""
    for model in (Recipe, CalibrationSettings, ReportSettings, *(kind.settings for kind in STEPS.values())):
        nested = {"calibration", "report"}
        undocumented = [n for n, f in model.model_fields.items() if f.description is None and n not in nested]
        assert not undocumented, model.__name__


def test_a_recipes_schema_accepts_what_it_prints(tmp_path):
    """The JSON Schema of the model takes the printed recipe, so editors can check recipes by it."""
    import jsonschema
    from ruamel.yaml import YAML

    printed = YAML(typ="safe").load(load(tmp_path, GPTQ).to_yaml())
    jsonschema.validate(json.loads(json.dumps(printed)), Recipe.model_json_schema())
    assert math.isclose(printed["steps"][0]["gptq"]["damp"], 0.01)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("samples: 2", "samples: true", "calibration.samples"),
        ("bits: 3", "damp: false", "steps[0].gptq.damp"),
        ("group_size: 64", "group_size: true", "steps[0].gptq.group_size"),
    ],
)
def test_i1_true_and_false_are_no_numbers(tmp_path, old, new, key):
    """Python's true is 1: `samples: true` would calibrate on one sequence."""
    assert old in GPTQ
    with pytest.raises(SutureError, match=re.escape(f"{key}: a number was expected (found {new.split()[1].title()})")):
        load(tmp_path, GPTQ.replace(old, new))
    report = [{"data": "builtin:holmes"}, {"data": "builtin:novels", "window": True}]
    with pytest.raises(SutureError, match=r"report\[1\]\.window: a number was expected"):
        make_recipe({"model": "builtin:tiny", "steps": [{"rtn": {}}], "output": "out", "report": report})
    assert load(tmp_path, GPTQ.replace("bits: 3", "symmetric: true")).resolved_steps()[0][1].symmetric is True
