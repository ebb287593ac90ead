"""Two processes that train one model: the curve of one, one writer, and what is left when one of them dies."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from kit import ids_file, make, read, run

from suture.checkpoint.manifest import read_manifest

HEAL = {"method": "lora", "r": 8, "rate": 0.01, "tokens": 24 * 5 * 12, "batch": 5, "checkpoint": 4, "top_k": 32}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    directory = tmp_path_factory.mktemp("crew")
    ids_file(directory / "ids.jsonl", rows=24, length=70)
    make("Q2", directory / "Q2")
    return directory


def recipe_of(home, output):
    calibration = {"data": str(home / "ids.jsonl"), "samples": 40, "length": 24}
    steps = [{"gqa": {"kv_heads": 1, "method": "mean"}}, {"heal": HEAL}]
    return {"model": str(home / "Q2"), "output": str(home / output), "calibration": calibration, "steps": steps}


def crew(home, output, *options, dies=""):
    """Both processes' (exit code, standard output, standard error), started as torchrun starts them."""
    path = home / f"{output}.json"
    path.write_text(json.dumps(recipe_of(home, output)), encoding="utf-8")  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"{dies}\nfrom suture.cli.main import app\napp()"
    running = []
    for rank in range(2):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", command, "run", str(path), *options],
                env={**os.environ, **env, "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    found = [process.communicate(timeout=240) for process in running]
    return [(process.returncode, *texts) for process, texts in zip(running, found, strict=True)]


# In process 1, the 20th sequence that it trains on or judges by is its last.
DIES = """
import os
from suture.pipeline import heal_train
real, calls = heal_train.forward_kl, []
def dying(*args):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) > 20:
        os._exit(9)
    return real(*args)
heal_train.forward_kl = dying
"""


def test_two_processes_train_as_one_does_and_one_that_dies_leaves_a_run_to_go_on_with(home):
    alone = run(recipe_of(home, "alone")).manifest["receipts"][1]
    first, second = crew(home, "both", dies=DIES)
    assert second[0] == 9 and first[0] == 1 and "Traceback" not in first[2]
    assert "one of the 2 processes that train together is gone; start them again with --resume" in first[2]
    assert not (home / "both").exists() and (home / "both.partial/work/step-2-training.pt").exists()
    (code, said, _), (other, silent, errors) = crew(home, "both", "--resume")
    assert (code, other) == (0, 0) and said and not silent and not errors
    assert not (home / "both.partial").exists()
    together = read_manifest(home / "both")["receipts"][1]
    assert [p["step"] for p in together["curve"]] == [p["step"] for p in alone["curve"]] == [0, 4, 8, 12]
    for key in ("loss", "held_out_kl"):
        values = [[p[key] for p in receipt["curve"] if key in p] for receipt in (together, alone)]
        assert values[0] == pytest.approx(values[1], rel=1e-3) and values[0] != values[0][:1] * len(values[0])
    ours, theirs = (read(home / name) for name in ("both", "alone"))
    assert all(torch.allclose(ours[name].float(), theirs[name].float(), rtol=0.02, atol=1e-3) for name in theirs)
