"""Healing without gradients: W_o and down_proj fitted to the original's residual stream."""

import pytest
import torch
from kit import ids_file, make, read, run

from suture.checkpoint.errors import SutureError

MEAN = {"gqa": {"kv_heads": 1, "method": "mean"}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    directory = tmp_path_factory.mktemp("refit")
    ids_file(directory / "ids.jsonl", rows=12, length=40)
    make("Q2", directory / "Q2")
    return directory


def go(home, output, *steps, model="Q2"):
    calibration = {"data": str(home / "ids.jsonl"), "samples": 16, "length": 24}
    recipe = {"model": str(home / model), "output": str(home / output), "calibration": calibration}
    return run(recipe | {"steps": list(steps)}).manifest


def test_what_mean_pooling_lost_is_partly_won_back(home):
    lost = go(home, "mean", MEAN)
    healed = go(home, "healed", MEAN, {"refit": {}})
    assert healed["receipts"][1]["kl"] < 0.7 * lost["receipts"][0]["kl"]  # both compared with the original
    fitted = {name: record for name, record in healed["modules"].items() if record["method"] == "ridge"}
    assert len(fitted) == 4
    assert all(record["missing_after"] < record["missing_before"] for record in fitted.values())
    before, after = read(home / "mean"), read(home / "healed")
    changed = {name.split(".", 3)[3] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    alone = go(home, "alone", MEAN, {"refit": {"layers": ["o_proj"]}})
    assert healed["receipts"][1]["kl"] < alone["receipts"][1]["kl"]


def test_a_model_that_lost_nothing_is_left_alone(home):
    manifest = go(home, "same", {"refit": {}})
    assert manifest["receipts"][0]["missing_before"] == 0 and manifest["receipts"][0]["exact"]
    before, after = read(home / "Q2"), read(home / "same")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_family_with_a_norm_in_between_is_refused(home):
    make("G2", home / "G2")
    with pytest.raises(SutureError, match="refit: gemma2 does not add"):
        go(home, "never", {"refit": {}}, model="G2")
