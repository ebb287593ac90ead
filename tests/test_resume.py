"""J1: a run that dies goes on where it was, and writes what an uninterrupted run writes, byte for byte.

Processes are killed with SIGKILL, before a write, a sync or a rename (the write done by half), at moments drawn from a
seed; one test kills the installed command while it works.
"""

import json
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import tiny
import torch
import warm
from safetensors.torch import save_file

_FULL = {"method": "full", "tokens": 16 * 2 * 5, "batch": 2, "checkpoint": 1, "rate": 0.05}
STEPS = {
    "rtn": [{"rtn": {"bits": 4, "group_size": 32}}],
    "gptq": [{"gptq": {"bits": 4, "group_size": 32}}],
    "chain": [{"untie": {}}, {"gptq": {"bits": 3, "group_size": 32}}],
    "surgery": [
        {"fold_norms": {}},
        {"layers": {"drop_least": 1}},
        {"permute": {"heads": "importance", "neurons": "random"}},
        {"cast": {"dtype": "float16"}},
    ],
    "heal blocks": [{"gqa": {"kv_heads": 1, "method": "mean"}}, {"heal": {"epochs": 1}}],
    "heal whole": [{"gqa": {"kv_heads": 1, "method": "mean"}}, {"heal": _FULL}],
    "awq": [{"awq": {"bits": 4, "group_size": 32, "grid": 4}}],
    "smoothquant": [{"smoothquant": {"activations": "static", "rounding": "gptq"}}],
    "nf4": [{"nf4": {}}],
    "merge": [{"lora.merge": {"adapter": "adapter"}}],
    "mla": [{"mla": {"rank": 28, "rope_dim": 4}}],
}
WITHOUT_TEXT = ("rtn", "nf4", "merge")


def write_recipe(directory: Path, kind: str) -> Path:
    content = {
        "model": "tied" if kind == "chain" else "model",
        "steps": STEPS[kind],
        "report": {"data": "evaluation.jsonl", "window": 16, "max_windows": 12},
        "output": "not-here",
        "max_shard_size": 60_000,
    }
    if kind not in WITHOUT_TEXT:
        samples = 12 if kind.startswith("heal") else 6
        content["calibration"] = {"data": "calibration.jsonl", "samples": samples, "length": 16}
    return tiny.recipe(directory / f"{kind}.yaml", content)


def adapter(directory: Path) -> None:
    """Rank 4 on the queries of all three blocks."""
    directory.mkdir()
    tensors, generator = {}, torch.Generator().manual_seed(3)
    for block in range(3):
        prefix = f"base_model.model.model.layers.{block}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, 64, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = 0.1 * torch.randn(64, 4, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Models, text and recipes. A run's output goes elsewhere, so nothing here may ever change."""
    directory = tmp_path_factory.mktemp("home")
    tiny.llama(directory / "model", shard="150KB")
    tiny.llama(directory / "tied", tied=True, seed=1)
    tiny.ids_file(directory / "calibration.jsonl")
    tiny.ids_file(directory / "evaluation.jsonl", seed=1)
    adapter(directory / "adapter")
    for kind in STEPS:
        write_recipe(directory, kind)
    before = tiny.contents(directory)
    yield directory
    assert tiny.contents(directory) == before


@pytest.fixture(scope="module")
def uninterrupted(home, tmp_path_factory):
    """Hashes of what a run without interruption writes, and its number of events."""
    known: dict[tuple, tuple[dict[str, str], int]] = {}

    def of(kind: str, *args: str, **options) -> tuple[dict[str, str], int]:
        key = (kind, args, str(options))
        if key not in known:
            directory = tmp_path_factory.mktemp("uninterrupted")
            done = run(home, kind, directory, *args, **options)
            assert done.code == code_of(kind), done.err
            known[key] = tiny.contents(directory / "out"), done.events
        return known[key]

    return of


def run(home: Path, kind: str, directory: Path, *args: str, **options) -> warm.Done:
    return start(home, kind, directory, *args, **options).wait()


def start(home: Path, kind: str, directory: Path, *args: str, **options) -> warm.Running:
    return warm.start("run", home / f"{kind}.yaml", "--output", directory / "out", *args, cwd=directory, **options)


def code_of(kind: str) -> int:
    """Healing random weights on so little text is thrown away, which is a fallback."""
    return 3 if kind.startswith("heal") else 0


def units(directory: Path) -> list[str]:
    """The journal in short, without the fingerprint."""
    path = directory / "out.partial/work/journal.jsonl"
    return [warm.unit_name(json.loads(line)) for line in path.read_text().splitlines()][1:] if path.exists() else []


def killed_after(home: Path, kind: str, directory: Path, unit: str) -> None:
    """A run that was killed while it works on what follows `unit`."""
    assert run(home, kind, directory, kill_after=unit).code == 137
    assert units(directory)[-1] == unit


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("rtn", 0),
        ("gptq", 1),
        ("gptq", 2),
        ("chain", 3),
        ("chain", 4),
        ("surgery", 5),
        ("heal blocks", 6),
        ("heal whole", 7),
    ],
)
def test_j1_killed_at_random_moments_and_resumed_gives_the_same_bytes(home, tmp_path, uninterrupted, kind, seed):
    expected, events = uninterrupted(kind)
    draw = random.Random(f"{kind} {seed}")
    kills = 0
    while (done := run(home, kind, tmp_path, "--resume", kill_at=draw.randint(1, events // 2))).code == 137:
        kills += 1
        assert set(tiny.visible(tmp_path)) <= {"out.partial"} and not done.temporary
    assert done.code == code_of(kind), done.err
    assert kills >= 2
    assert tiny.contents(tmp_path / "out") == expected
    assert tiny.visible(tmp_path) == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
def test_j1_fifty_kills_across_every_kind_of_step(home, tmp_path, uninterrupted, number):
    kind = sorted(STEPS)[number % len(STEPS)]
    expected, events = uninterrupted(kind)
    at = random.Random(f"fifty {number}").randint(1, events)
    killed = run(home, kind, tmp_path, kill_at=at)
    assert killed.code == 137 and not killed.temporary
    assert (tmp_path / "out").exists() == (at == events)  # the last event is the one after the rename
    done = run(home, kind, tmp_path, "--resume")
    assert done.code == (1 if at == events else code_of(kind)), done.err
    assert tiny.contents(tmp_path / "out") == expected
    assert tiny.visible(tmp_path) == ["out"]


@pytest.mark.parametrize(("kind", "number"), [("rtn", 9), ("gptq", 23), ("merge", 16)])
def test_a_shard_that_cannot_be_read_in_the_middle_of_the_work(home, tmp_path, uninterrupted, kind, number):
    """The disk fails at the n-th opening of a weight file; once it works again the run goes on."""
    fails = (
        "(lambda seen: lambda self, *args, **options: (_ for _ in ()).throw(OSError(5, 'Input/output error')) "
        f"if self.suffix == '.safetensors' and (seen.append(1) or len(seen) == {number}) "
        "else original(self, *args, **options))([])"
    )
    done = run(home, kind, tmp_path, patches={"pathlib:Path.open": fails})
    assert done.code == 1 and len(done.messages) == 1 and "Input/output error" in done.messages[0], done.err
    assert ".safetensors" in done.messages[0] and "Traceback" not in done.err
    assert not (tmp_path / "out").exists()
    resumed = run(home, kind, tmp_path, "--resume")
    assert resumed.code == 0, resumed.err
    assert tiny.contents(tmp_path / "out") == uninterrupted(kind)[0]


@pytest.mark.parametrize("unit", ["begun", "step-1 done", "step-2 rest", "step-2 block 1"])
def test_j1_a_chain_killed_in_each_of_its_steps_resumes(home, tmp_path, uninterrupted, unit):
    killed_after(home, "chain", tmp_path, unit)
    done = run(home, "chain", tmp_path, "--resume")
    assert done.code == 0, done.err
    assert tiny.contents(tmp_path / "out") == uninterrupted("chain")[0]


@pytest.mark.parametrize("unit", ["step-2 settled", "step-2 group 1", "step-3 block 0", "step-4 group 0"])
def test_j1_what_data_decided_and_tensors_written_one_by_one_resume(home, tmp_path, uninterrupted, unit):
    killed_after(home, "surgery", tmp_path, unit)
    done = run(home, "surgery", tmp_path, "--resume")
    assert done.code == 0, done.err
    assert tiny.contents(tmp_path / "out") == uninterrupted("surgery")[0]


@pytest.mark.parametrize(("kind", "unit"), [("awq", "step-1 block 0"), ("smoothquant", "step-1 block 1")])
def test_j1_a_step_that_scales_and_rounds_resumes(home, tmp_path, uninterrupted, kind, unit):
    killed_after(home, kind, tmp_path, unit)
    done = run(home, kind, tmp_path, "--resume")
    assert done.code == 0, done.err
    assert tiny.contents(tmp_path / "out") == uninterrupted(kind)[0]


def test_j1_the_installed_command_killed_three_times_while_it_works(home, tmp_path, uninterrupted):
    draw = random.Random(5)
    command = [warm.COMMAND, "run", home / "gptq.yaml", "--output", tmp_path / "out", "--resume"]
    lines = 1
    for _ in range(3):
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=warm.environment()
        )
        while process.poll() is None and len(units(tmp_path)) < lines:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.wait()
        lines = len(units(tmp_path)) + draw.randint(1, 2)
        assert not (tmp_path / "out").exists()
    done = run(home, "gptq", tmp_path, "--resume")
    assert done.code == 0, done.err
    assert tiny.contents(tmp_path / "out") == uninterrupted("gptq")[0]
    assert tiny.visible(tmp_path) == ["out"]


def test_killed_as_the_final_name_is_given_the_output_is_whole_or_absent(home, tmp_path, uninterrupted):
    expected, events = uninterrupted("rtn")
    assert run(home, "rtn", tmp_path, kill_at=events - 1).code == 137  # before the rename
    assert not (tmp_path / "out").exists()
    assert run(home, "rtn", tmp_path, "--resume", kill_at=1 << 30).code == 0
    shutil.rmtree(tmp_path / "out")
    assert run(home, "rtn", tmp_path, kill_at=events).code == 137  # after it
    assert tiny.contents(tmp_path / "out") == expected
    again = run(home, "rtn", tmp_path, "--resume")
    assert again.code == 1 and "it is finished: nothing to resume" in again.messages[0]
    assert tiny.contents(tmp_path / "out") == expected
    assert tiny.visible(tmp_path) == ["out"]  # what the first had no time to remove is gone


def test_killed_between_taking_the_old_output_away_and_naming_the_new_one(home, tmp_path, uninterrupted):
    expected, events = uninterrupted("rtn")
    assert run(home, "rtn", tmp_path, "--set", "steps.0.rtn.bits=3").code == 0
    older = tiny.contents(tmp_path / "out")
    assert run(home, "rtn", tmp_path, "--overwrite", kill_at=events).code == 137  # one event more: the old one's rename
    assert not (tmp_path / "out").exists()
    assert tiny.contents(tmp_path / "out.partial/replaced") == older
    assert run(home, "rtn", tmp_path, "--resume").code == 0
    assert tiny.contents(tmp_path / "out") == expected
    assert tiny.visible(tmp_path) == ["out"]


def test_a_torn_last_line_of_the_journal_is_cut_off(home, tmp_path, uninterrupted):
    killed_after(home, "gptq", tmp_path, "step-1 block 0")
    path = tmp_path / "out.partial/work/journal.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": "step-1", "block": 1, "modu')
    assert run(home, "gptq", tmp_path, "--resume").code == 0
    assert tiny.contents(tmp_path / "out") == uninterrupted("gptq")[0]


@pytest.mark.parametrize("line", [b"\0\0\0\0\n", b"[1, 2]\n", b"7\n"])
def test_a_damaged_line_within_the_journal_is_refused(home, tmp_path, line):
    killed_after(home, "rtn", tmp_path, "begun")
    path = tmp_path / "out.partial/work/journal.jsonl"
    path.write_bytes(path.read_bytes() + line)
    done = run(home, "rtn", tmp_path, "--resume")
    assert done.code == 1 and len(done.messages) == 1 and "damaged journal" in done.err


def test_a_directory_whose_journal_is_gone_starts_anew(home, tmp_path, uninterrupted):
    killed_after(home, "rtn", tmp_path, "step-1 block 1")
    (tmp_path / "out.partial/work/journal.jsonl").unlink()
    (tmp_path / "out.partial/model/model-00009-of-00009.safetensors").write_bytes(b"of another run")
    assert run(home, "rtn", tmp_path, "--resume").code == 0
    assert tiny.contents(tmp_path / "out") == uninterrupted("rtn")[0]


# -- what must be equal to resume --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(home, tmp_path_factory):
    """A copy of the models and text, and beside it a gptq run that was killed after block 0."""
    directory = tmp_path_factory.mktemp("begun")
    shutil.copytree(home, directory / "home", ignore=shutil.ignore_patterns(".task-*"))
    killed_after(directory / "home", "gptq", directory, "step-1 block 0")
    return directory


def flip_low_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1  # of a bfloat16's mantissa
    path.write_bytes(raw)


def other_text(path: Path) -> None:
    rows = path.read_text().splitlines()
    ids = json.loads(rows[0])["input_ids"]
    rows[0] = json.dumps({"input_ids": [(i + 1) % tiny.VOCABULARY for i in ids]})
    path.write_text("\n".join(rows) + "\n")


def other_config(path: Path) -> None:
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


CHANGES = {
    "another recipe": {"args": ["--set", "steps.0.gptq.bits=3"]},
    "another recipe ": {"args": ["--set", "max_shard_size=50000"]},
    "another calibration text": {"file": "calibration.jsonl", "edit": other_text},
    "another calibration text, another recipe": {"args": ["--set", "calibration.seed=7"]},
    "another model": {"file": "model/model-00001-of-00002.safetensors", "edit": flip_low_bit},
    "another model ": {"file": "model/config.json", "edit": other_config},
    "another torch": {"patches": {"torch:__version__": "'9.9.9'"}},
    "another transformers": {
        "patches": {"suture.pipeline.run:version": "lambda name: '9' if name == 'transformers' else original(name)"}
    },
    "another suture": {"patches": {"suture.pipeline.run:__version__": "'9.9.9'"}},
}


@pytest.mark.parametrize("changed", CHANGES)
def test_j1_a_resume_with_anything_changed_is_refused_by_name(begun, changed):
    change = CHANGES[changed]
    path = begun / "home" / change.get("file", "gptq.yaml")
    original = path.read_bytes()
    before = tiny.contents(begun / "out.partial")
    if "file" in change:
        change["edit"](path)
        assert path.read_bytes() != original
    done = run(begun / "home", "gptq", begun, "--resume", *change.get("args", []), patches=change.get("patches", {}))
    path.write_bytes(original)
    assert done.code == 1 and len(done.messages) == 1, done.err
    assert f"was begun with {changed.strip()}: it cannot be resumed" in done.err
    assert tiny.contents(begun / "out.partial") == before
    assert not (begun / "out").exists()


def test_after_all_refusals_the_run_still_resumes(begun):
    assert run(begun / "home", "gptq", begun, "--resume").code == 0
    assert run(begun / "home", "gptq", begun, "--overwrite").code == 0  # and runs from the start as well


@pytest.mark.parametrize("kind", ["rtn", "gptq"])
@pytest.mark.parametrize(
    "args",
    [("--set", "report.window=8"), ("--set", "report.data=calibration.jsonl"), ("--set", "report=null")],
    ids=["window", "data", "none"],
)
def test_another_report_is_no_reason_to_start_again(home, tmp_path, uninterrupted, kind, args):
    expected, _ = uninterrupted(kind, *args)
    events = uninterrupted(kind)[1]
    assert run(home, kind, tmp_path, kill_at=events - 12).code == 137  # with its own report written
    assert any(name.startswith("report") for name in tiny.contents(tmp_path / "out.partial/model"))
    done = run(home, kind, tmp_path, "--resume", *args)
    assert done.code == 0, done.err
    assert tiny.contents(tmp_path / "out") == expected


def test_less_free_memory_on_resuming_changes_nothing(home, tmp_path, uninterrupted):
    one = {"suture.pipeline.estimate:_verify_blocks": "lambda *given: 1"}
    events = uninterrupted("gptq")[1]
    assert run(home, "gptq", tmp_path, kill_at=events // 2, patches=one).code == 137
    done = run(home, "gptq", tmp_path, "--resume")
    assert done.code == 0, done.err
    assert tiny.contents(tmp_path / "out") == uninterrupted("gptq", patches=one)[0]


# -- two at once -------------------------------------------------------------------------------------------------------


def test_a_second_run_into_the_same_output_is_refused_and_harms_nothing(home, tmp_path, uninterrupted):
    expected, events = uninterrupted("gptq")
    first = start(home, "gptq", tmp_path, stop_at=events // 2)
    first.wait_until_stopped()
    for option, reason in (
        ("--resume", "another run is writing"),
        ("--overwrite", "another run is writing"),
        (None, "holds an unfinished run"),
    ):
        second = run(home, "gptq", tmp_path, *filter(None, [option]))
        assert second.code == 1 and len(second.messages) == 1 and reason in second.err, option
    first.go()
    done = first.wait()
    assert done.code == 0, done.err
    assert tiny.contents(tmp_path / "out") == expected
