"""Bits under a budget: the knapsack against brute force, and the step to files that stock transformers loads."""

import itertools
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from kit import LENGTH, ids_file, quantize, run

from suture.checkpoint.errors import SutureError
from suture.pipeline import allocate as step
from suture.quant.allocate import allocate


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    return ids_file(tmp_path_factory.mktemp("ids") / "ids.jsonl", rows=12, length=70)


def test_the_choice_is_the_best_of_all_that_fit():
    rng = np.random.default_rng(0)
    for _ in range(30):
        units, choices = int(rng.integers(1, 6)), int(rng.integers(2, 5))
        costs = np.sort(rng.integers(1, 60, (units, choices)), axis=1).tolist()
        losses = (-np.sort(-rng.random((units, choices)), axis=1)).tolist()
        least = sum(min(row) for row in costs)
        budget = least + int(rng.integers(0, 80))
        every = list(itertools.product(range(choices), repeat=units))
        fits = [c for c in every if sum(costs[u][i] for u, i in enumerate(c)) <= budget]
        best = min(sum(losses[u][i] for u, i in enumerate(c)) for c in fits)
        found = allocate(costs, losses, budget)
        assert sum(costs[u][i] for u, i in enumerate(found)) <= budget
        assert sum(losses[u][i] for u, i in enumerate(found)) == pytest.approx(best)
    with pytest.raises(SutureError, match="the fewest bits need 5 bits of storage, the budget is 4"):
        allocate([[2, 3], [3, 4]], [[1, 0], [1, 0]], 4)


def test_a_budget_far_larger_than_the_quanta_is_kept_and_spent():
    rng = np.random.default_rng(1)
    costs = [[n * b for b in (2, 3, 4, 8)] for n in rng.integers(10**7, 10**8, 100).tolist()]
    losses = [[s * 4.0**-b for b in (2, 3, 4, 8)] for s in rng.random(100)]
    budget = sum(row[1] for row in costs)
    spent = sum(costs[u][c] for u, c in enumerate(allocate(costs, losses, budget)))
    assert 0.998 * budget < spent <= budget


def test_the_step_keeps_the_budget_records_why_and_loads_in_stock_transformers(shelf, ids, tmp_path):
    settings = {"average_bits": 6.0, "group_size": 16, "rules": [{"match": "v_proj", "bits": 5}]}
    done = quantize(shelf("L1"), tmp_path / "out", "allocate", data=ids, **settings)
    found = done.manifest["verification"]
    assert found["missing"] == 0 and found["max_difference"] <= 1e-5 * found["largest_logit"]
    modules = done.manifest["modules"]
    (receipt,) = done.manifest["receipts"]
    weights = {name: r["shape"][0] * r["shape"][1] for name, r in modules.items()}
    stored = sum(weights[name] * (r["bits"] + 16 / 16) for name, r in modules.items())
    assert receipt["average_bits"] == pytest.approx(stored / sum(weights.values()), abs=1e-4)
    assert 5.5 < receipt["average_bits"] <= 6.0
    assert len({r["bits"] for name, r in modules.items() if "v_proj" not in name}) > 1
    assert all(r["bits"] == 5 and r["method"] == "gptq" for name, r in modules.items() if "v_proj" in name)
    for row in receipt["allocation"]:
        assert {modules[name]["bits"] for name in row["layers"]} == {row["bits"]}
        errors = [row["block_errors"][b] for b in ("2", "3", "4", "6", "8")]
        assert errors[0] > errors[2] > errors[4] > 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) == len({r["bits"] for r in modules.values()})
    q, k = (modules[f"model.layers.0.self_attn.{p}_proj"]["bits"] for p in "qk")
    assert q == k


def test_what_was_chosen_can_be_given_back(shelf, ids, tmp_path):
    """The settled recipe of the manifest measures nothing and writes the same weights."""
    first = quantize(shelf("L1"), tmp_path / "a", "allocate", data=ids, average_bits=5.0, group_size=16)
    settled = first.manifest["recipe"]["steps"][0]["allocate"]
    assert settled["chosen"] and settled["average_bits"] == 5.0
    with patch.object(step, "_measure", lambda *_: pytest.fail("measured again")):
        quantize(shelf("L1"), tmp_path / "b", "allocate", data=ids, **settled)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    with pytest.raises(SutureError, match="is not in both"):
        quantize(shelf("L0"), tmp_path / "c", "allocate", data=ids, **settled | {"chosen": {"model.x": 3}})


def test_j1_a_run_killed_while_measuring_resumes_to_the_same_bytes(shelf, ids, tmp_path):
    recipe = {
        "model": str(shelf("L1")),
        "calibration": {"data": str(ids), "samples": 8, "length": LENGTH},
        "steps": [{"allocate": {"average_bits": 5.0, "group_size": 16}}],
        "output": str(tmp_path / "whole"),
    }
    run(recipe)
    recipe["output"] = str(tmp_path / "killed")
    real, calls = step._measure_block, []

    def dies(work, skeleton, index, *args):
        calls.append(index)
        if index == 1 and len(calls) == 2:
            raise KeyboardInterrupt
        return real(work, skeleton, index, *args)

    with patch.object(step, "_measure_block", dies):
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
        run(recipe, resume=True)
    assert calls == [0, 1, 1]
    for file in ("model.safetensors", "suture.json"):
        a, b = (Path(recipe["output"]).with_name(n) / file for n in ("whole", "killed"))
        assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("L1", {"average_bits": 2.5}, r"average_bits: 2.5 is below what 2 bits need with their scales, 3.000"),
        ("L1", {"average_bits": 4, "fewest": 8}, r"fewest \(8\) must be below bits \(8\)"),
        ("L1", {"average_bits": 5, "symmetric": False}, "several widths need symmetric: true"),
        ("L1", {"average_bits": 5, "rules": [{"match": "all-linear", "bits": 4}]}, "nothing is left to choose"),
        ("MX", {"average_bits": 5}, "reads one format only of mixtral layers"),
        ("GP", {"average_bits": 5}, "reads one format only of gpt2 layers"),
        ("L1", {}, "average_bits: missing"),
    ],
)
def test_i7_what_cannot_be_allocated_is_refused_before_any_work(shelf, ids, tmp_path, name, settings, message):
    with pytest.raises(SutureError, match=message):
        quantize(shelf(name), tmp_path / "out", "allocate", data=ids, **{"group_size": 16} | settings)
    assert not list(tmp_path.iterdir())
