"""Several processes that carry out one recipe: what comes out is what one makes, there is one writer, and what is left when
one of them dies is a run to go on with."""

import json
import socket
from pathlib import Path

import pytest
import torch
from kit import ids_file, make, read, run
from warm import start

from suture.checkpoint.manifest import read_manifest

HEAL = {"method": "lora", "r": 8, "rate": 0.01, "tokens": 24 * 5 * 12, "batch": 5, "checkpoint": 4, "top_k": 32}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    directory = tmp_path_factory.mktemp("crew")
    ids_file(directory / "ids.jsonl", rows=24, length=70)
    ids_file(directory / "held.jsonl", rows=60, length=70, seed=1)  # three batches of windows
    ids_file(directory / "long.jsonl", rows=80, length=200, seed=2)
    for model in ("Q2", "MX", "G3"):
        make(model, directory / model)
    return directory


def recipe_of(home, output, steps, *, model="Q2", **more):
    calibration = {"data": str(home / "ids.jsonl"), "samples": 40, "length": 24}
    content = {"model": str(home / model), "output": str(home / output), "calibration": calibration, "steps": steps}
    return content | more


def crew(home, recipe, *options, size=2, **special):
    """Every process, ended, of `suture run`. special: what `warm.start` is told for one of them."""
    path = home / f"{Path(recipe['output']).name}.json"
    path.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    return launched(home, "run", path, *options, size=size, **special)


def launched(home, *command, size=2, **special):
    """Every process, ended, of a command; started as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for rank in range(size):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "RANK": str(rank)}
        more = special.get(f"process_{rank}", {})
        running.append(start(*command, cwd=home, variables=env | {"LOCAL_RANK": str(rank)}, **more))
    return [process.wait() for process in running]


def dies_at(call):
    """`original`, whose call of that number is the process's last."""
    return f"(lambda calls: lambda *a: (calls.append(1), len(calls) > {call} and os._exit(9), original(*a))[2])([])"


def test_two_processes_train_as_one_does_and_one_that_dies_leaves_a_run_to_go_on_with(home):
    steps = [{"gqa": {"kv_heads": 1, "method": "mean"}}, {"heal": HEAL}]
    alone = run(recipe_of(home, "alone", steps)).manifest["receipts"][1]
    both = recipe_of(home, "both", steps)
    dies = {"patches": {"suture.pipeline.heal_train:forward_kl": dies_at(20)}}  # trained on or judged by
    first, second = crew(home, both, process_1=dies)
    assert second.code == 9 and first.code == 1 and "Traceback" not in first.err
    assert "one of the 2 processes that work together is gone; start them again with --resume" in first.err
    assert not (home / "both").exists() and (home / "both.partial/work/step-2-training.pt").exists()
    first, second = crew(home, both, "--resume")
    assert (first.code, second.code) == (0, 0) and first.out and not second.out and not second.err
    assert not (home / "both.partial").exists()
    together = read_manifest(home / "both")["receipts"][1]
    assert [p["step"] for p in together["curve"]] == [p["step"] for p in alone["curve"]] == [0, 4, 8, 12]
    for key in ("loss", "held_out_kl"):
        values = [[p[key] for p in receipt["curve"] if key in p] for receipt in (together, alone)]
        assert values[0] == pytest.approx(values[1], rel=1e-3) and values[0] != values[0][:1] * len(values[0])
    ours, theirs = (read(home / name) for name in ("both", "alone"))
    assert all(torch.allclose(ours[name].float(), theirs[name].float(), rtol=0.02, atol=1e-3) for name in theirs)


def test_processes_share_the_scoring_and_the_files_are_those_of_one(home):
    """J: one that dies while it scores leaves the rest of the run, which any number of processes ends."""
    report = {
        "data": str(home / "held.jsonl"),
        "window": 24,
        "stride": 16,
        "fidelity": True,
    }  # windows of 24, 22, ... tokens
    recipe = recipe_of(home, "scored-alone", [{"rtn": {"group_size": 32}}], report=report)
    run(recipe)
    recipe["output"] = str(home / "scored")
    dies = {"patches": {"suture.report.score:token_fidelity": dies_at(1)}}
    first, second = crew(home, recipe, process_1=dies)
    assert (first.code, second.code) == (1, 9) and "one of the 2 processes that work together is gone" in first.err
    assert not (home / "scored").exists()
    ended = crew(home, recipe, "--resume", size=4)
    assert [process.code for process in ended] == [0] * 4 and not any(process.err for process in ended[1:])
    assert content(home / "scored") == content(home / "scored-alone")


def test_processes_share_a_report_of_its_own_and_what_the_first_refuses_only_the_first_says(home):
    run(recipe_of(home, "rounded", [{"rtn": {"group_size": 32}}]))
    asked = ["report", home / "Q2", home / "rounded", "--window", "24", "--data"]
    for size in (1, 2):
        first, *others = launched(home, *asked, home / "held.jsonl", "--output", home / f"report-{size}", size=size)
        assert first.code == 0 and first.out, first.err
        assert all(other.code == 0 and not other.out for other in others)
    one, two = (content(home / f"report-{size}") for size in (1, 2))
    assert one == two and "report.json" in one
    first, other = launched(home, *asked, home / "nowhere.jsonl")
    assert first.code == 1 and "nowhere.jsonl" in first.err and not other.err


GPTAQ = {"gptq": {"bits": 3, "group_size": 32, "asymmetric": "gptaq"}}
EXPERTS = {"gptq": {"bits": 4, "group_size": 32, "actorder": "group"}}
QRONOS = {"gptq": {"bits": 4, "group_size": 16, "asymmetric": "qronos", "hessian": "float64"}}


@pytest.mark.parametrize(
    ("model", "step", "size", "dies", "again"),
    [
        ("Q2", GPTAQ, 2, {"process_1": ("suture.quant.block:gptq", 6)}, 2),  # in block 1
        ("MX", EXPERTS, 2, {"process_1": ("suture.calibrate.replay:Stream.save", 1)}, 3),  # after block 1
        pytest.param("MX", EXPERTS, 4, {"process_2": ("suture.quant.block:gptq", 5)}, 1, marks=pytest.mark.slow),
        pytest.param("G3", QRONOS, 4, {"process_0": ("suture.quant.block:gptq", 6)}, 4, marks=pytest.mark.slow),
        pytest.param("Q2", GPTAQ, 3, {"process_1": ("suture.quant.block:relay", 2)}, 2, marks=pytest.mark.slow),
    ],
)
def test_processes_share_gptq_and_the_files_are_those_of_one(home, model, step, size, dies, again):
    """J: one that is killed leaves a run that goes on with any number of processes. Seven batches, of 2040 tokens: no chunk
    of a sum ends with a process's part."""
    recipe = recipe_of(home, "alone", [step], model=model)
    recipe["calibration"] = {"data": str(home / "long.jsonl"), "samples": 320, "length": 40}
    run(recipe, overwrite=True)
    recipe["output"] = str(home / f"{model}-{size}-{again}")
    (victim, (where, call)), *_ = dies.items()
    ended = crew(home, recipe, size=size, **{victim: {"patches": {where: killed_at(call)}}})
    codes = {f"process_{rank}": process.code for rank, process in enumerate(ended)}
    assert codes.pop(victim) == 137 and set(codes.values()) == {1}
    left = [process.messages for process in ended if process.code == 1]
    assert all(f"one of the {size} processes that work together is gone; start them again" in one[0] for one in left)
    assert not (home / recipe["output"]).exists() and not any("Traceback" in process.err for process in ended)
    ended = crew(home, recipe, "--resume", size=again)
    assert [process.code for process in ended] == [0] * again and not any(process.err for process in ended[1:])
    assert content(Path(recipe["output"])) == content(home / "alone")


def killed_at(call):
    """`original`, in whose call of that number the process is killed."""
    kills = f"len(calls) > {call} and os.kill(os.getpid(), signal.SIGKILL)"
    return f"(lambda calls: lambda *a, **k: (calls.append(1), {kills}, original(*a, **k))[2])([])"


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}
