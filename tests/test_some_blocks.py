"""`layers`: a trial on a few blocks of a large model; the text goes no further than the last of them."""

import json
from unittest.mock import patch

import pytest
import torch
import warm
from kit import ids_file, make, quantize, read, run

from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline import walk
from suture.pipeline.duration import Rates
from suture.pipeline.plan import make_plan
from suture.pipeline.recipe import make_recipe
from suture.quant.targets import select

BLOCKS = 4


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    directory = tmp_path_factory.mktemp("blocks")
    make("L1", directory / "model", num_hidden_layers=BLOCKS)
    return directory


@pytest.fixture(scope="module")
def ids(home):
    return ids_file(home / "ids.jsonl", rows=8, length=48)


def blocks(names):
    return sorted({int(name.split(".")[2]) for name in names})


@pytest.mark.parametrize(
    ("layers", "expected"), [(2, [0, 1]), ("2", [0, 1]), ("1-2", [1, 2]), ("3-3", [3]), (4, [0, 1, 2, 3])]
)
def test_layers_are_the_first_so_many_or_from_to(home, layers, expected):
    layout = open_skeleton(open_checkpoint(home / "model")).layout
    selection = select(layout, ["all-linear"], ["down_proj"], layers)
    assert blocks(selection.names) == expected and len(selection.chosen) == 6 * len(expected)
    for name, reason in selection.skipped.items():
        assert reason == ("listed under ignore" if "down_proj" in name else f"outside the blocks of layers: {layers}")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (0, "layers: 0 is outside"),
        (5, "outside the model's 4 blocks, 0-3"),
        ("2-1", "outside"),
        ("2-4", "outside"),
        (-1, "'-1' is not blocks"),
        ("all", "'all' is not blocks.*4-7 for these four"),
        (True, "'True' is not blocks"),
    ],
)
def test_other_layers_are_refused(home, layers, message):
    layout = open_skeleton(open_checkpoint(home / "model")).layout
    with pytest.raises(SutureError, match=message) as caught:
        select(layout, ["all-linear"], [], layers)
    assert caught.value.hint is None or "layers" not in caught.value.hint


def test_layers_without_a_target_are_refused(home, tmp_path):
    with pytest.raises(SutureError, match="no layer is left") as caught:
        quantize(home / "model", tmp_path / "out", targets=["model.layers.0.*"], layers="1-2")
    assert "layers" in str(caught.value.hint)


METHODS = {
    "rtn": {"group_size": 16},
    "gptq": {"group_size": 16},
    "learn": {"group_size": 16, "epochs": 1},
    "awq": {"group_size": 16, "search_tokens": 64},
    "smoothquant": {"search_tokens": 64},
    "nf4": {},
    "int8": {},
}


@pytest.mark.parametrize("method", METHODS)
def test_the_rest_of_the_model_stays_and_the_text_ends_where_the_blocks_do(home, ids, tmp_path, method):
    ended = []
    end = walk.BlockStreams.end_text

    def counted(streams):
        ended.append(streams.at)
        return end(streams)

    with patch.object(walk.BlockStreams, "end_text", counted):
        done = quantize(
            home / "model", tmp_path / "out", method, data=None if method in ("rtn", "nf4", "int8") else ids,
            layers="1-2", **METHODS[method]
        )  # fmt: skip
    assert blocks(done.manifest["modules"]) == [1, 2]
    before, after = read(home / "model"), read(done.output)
    for name, tensor in before.items():
        if "layers.0." in name or "layers.3." in name:
            assert torch.equal(after[name], tensor), name
    if method not in ("rtn", "nf4", "int8"):
        assert 2 in ended  # after block 2, before block 3
    assert json.loads((done.output / "config.json").read_text())["quantization_config"]


def test_what_the_named_blocks_become_does_not_depend_on_what_follows(home, ids, tmp_path):
    some = quantize(home / "model", tmp_path / "some", "gptq", data=ids, group_size=16, layers=2)
    every = quantize(home / "model", tmp_path / "all", "gptq", data=ids, group_size=16)
    few, all_ = read(some.output), read(every.output)
    packed = [name for name in few if name.endswith("weight_packed")]
    assert blocks(packed) == [0, 1]
    assert all(torch.equal(few[name], all_[name]) for name in packed)


def test_a_run_of_some_blocks_resumes_past_the_last_of_them(home, ids, tmp_path):
    whole = quantize(home / "model", tmp_path / "whole", "gptq", data=ids, group_size=16, layers=2)
    save = walk.BlockStreams.save

    def killed(streams, block, *arguments):
        save(streams, block, *arguments)
        if block == 2:
            streams.wait()
            raise KeyboardInterrupt

    recipe = {"group_size": 16, "layers": 2}
    with patch.object(walk.BlockStreams, "save", killed), pytest.raises(KeyboardInterrupt):
        quantize(home / "model", tmp_path / "killed", "gptq", data=ids, **recipe)
    content = json.loads((whole.output / "suture.json").read_text())["recipe"]
    done = run(content | {"output": str(tmp_path / "killed")}, resume=True)
    for file in whole.output.glob("*.safetensors"):
        assert file.read_bytes() == (done.output / file.name).read_bytes()


def test_a_trial_is_predicted_to_take_its_share_of_the_time(home, ids):
    """So that what a step takes in any case is not all of it, the machine is a slow one."""
    calibration = {"data": str(ids), "samples": 8, "length": 48}

    def seconds(**layers):
        steps = [{"gptq": {"group_size": 16, **layers}}]
        content = {"model": str(home / "model"), "output": str(home / "never"), "steps": steps}
        with patch("suture.pipeline.duration.measured_rates", lambda: Rates(1e6, 1e-6, 1e-6)):
            return make_plan(make_recipe(content | {"calibration": calibration})).estimate.seconds

    each = seconds(layers=2) - seconds(layers=1)
    assert each > 1 and seconds() - seconds(layers=1) == pytest.approx((BLOCKS - 1) * each, rel=1e-3)


def test_the_command_takes_layers(home, tmp_path):
    done = warm.suture("quantize", home / "model", tmp_path / "out", "--method", "rtn", "--group-size", "16", "--layers",
                       "2", "--json", cwd=tmp_path)  # fmt: skip
    assert done.code == 0, done
    manifest = json.loads((tmp_path / "out" / "suture.json").read_text())
    assert blocks(manifest["modules"]) == [0, 1]
    wrong = warm.suture("quantize", home / "model", tmp_path / "no", "--method", "rtn", "--layers", "9", cwd=tmp_path)
    assert wrong.code == 1 and "layers: 9 is outside the model's 4 blocks" in wrong.messages[0]
