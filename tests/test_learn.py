"""Training a block's rounding: the core on small problems, the step on real files."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from kit import LENGTH, ids_file, quantize, read, run

from suture.calibrate.replay import Stream, run_block
from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline.plan import make_plan
from suture.pipeline.recipe import make_recipe
from suture.quant.decode import dense_view
from suture.quant.gptq import GPTQOptions, gptq
from suture.quant.learn import LearnOptions, Start, learn, relative_error
from suture.quant.scheme import Scheme
from suture.quant.settings import LearnSettings

GROUP = 8


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    return ids_file(tmp_path_factory.mktemp("ids") / "ids.jsonl", rows=24, length=70)


# ---- the core


def two_layers(scheme, seed=0, windows=16):
    """y = B tanh(A x): starts from GPTQ on each, the windows, and the forward."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    A, B = 0.2 * draw(32, 32), 0.3 * draw(32, 32)
    mix = draw(32, 32) / 4
    xs = [draw(1, 40, 32) @ mix for _ in range(windows)]

    def forward(weights, x):
        return torch.tanh(x @ weights["A"].T) @ weights["B"].T

    original = {"A": A, "B": B}
    ys = [forward(original, x) for x in xs]
    starts = {}
    for name, x in (("A", torch.cat(xs)), ("B", torch.cat([torch.tanh(x @ A.T) for x in xs]))):
        flat = x.reshape(-1, 32)
        found = gptq(original[name], flat.T @ flat / len(flat), GPTQOptions(scheme), torch.bfloat16)
        starts[name] = Start(original[name], found.quantized)
    return forward, starts, xs, ys


def loss(forward, quantized, xs, ys):
    dense = {name: q.dequantize().float() for name, q in quantized.items()}
    return sum(float(relative_error(forward(dense, x), y)) for x, y in zip(xs, ys, strict=True)) / len(xs)


@pytest.mark.parametrize("scheme", [Scheme(2, 8, symmetric=False), Scheme(2, 8), Scheme(3, -1)], ids=str)
def test_training_lowers_the_error_that_it_reports_on_windows_it_never_saw(scheme):
    forward, starts, xs, ys = two_layers(scheme)
    found = learn(forward, starts, xs, ys, LearnOptions(epochs=6))
    held = slice(14, 16)  # an eighth, the last
    start = {name: s.quantized for name, s in starts.items()}
    assert found.before == pytest.approx(loss(forward, start, xs[held], ys[held]), rel=1e-5)
    assert found.after == pytest.approx(loss(forward, found.quantized, xs[held], ys[held]), rel=1e-5)
    assert found.after < 0.95 * found.before
    assert 0 < found.moved < 0.5 and 1 <= found.epoch <= 6
    for name, quantized in found.quantized.items():
        assert quantized.scheme == scheme and quantized.scale.dtype == torch.bfloat16
        assert int(quantized.codes.max()) <= scheme.levels
        assert (quantized.zero is None) == scheme.symmetric
        if quantized.zero is not None:
            assert torch.equal(quantized.zero, start[name].zero)


def test_training_that_does_harm_is_thrown_away():
    forward, starts, xs, ys = two_layers(Scheme(3, 8))
    found = learn(forward, starts, xs, ys, LearnOptions(epochs=2, rate=3.0, scale_rate=2.0))
    assert (found.epoch, found.moved) == (0, 0.0) and found.after == found.before
    for name, start in starts.items():
        assert torch.equal(found.quantized[name].codes, start.quantized.codes)
        assert torch.equal(found.quantized[name].scale, start.quantized.scale)


def test_a_seed_fixes_the_result_and_the_held_out_windows_do_not_train():
    forward, starts, xs, ys = two_layers(Scheme(2, 8))
    options = LearnOptions(epochs=3)
    one, two = (learn(forward, starts, xs, ys, options) for _ in range(2))
    other = learn(forward, starts, xs, ys, LearnOptions(epochs=3, seed=1))
    assert all(torch.equal(one.quantized[n].codes, two.quantized[n].codes) for n in starts)
    assert any(not torch.equal(one.quantized[n].codes, other.quantized[n].codes) for n in starts)
    doubled = [*ys[:14], 2 * ys[14], 2 * ys[15]]
    moved = learn(forward, starts, xs, doubled, options)
    assert moved.before != one.before and one.epoch > 0
    if moved.epoch == one.epoch:
        assert all(torch.equal(one.quantized[n].codes, moved.quantized[n].codes) for n in starts)


def test_c1_one_sequence_is_refused():
    forward, starts, xs, ys = two_layers(Scheme(2, 8))
    with pytest.raises(SutureError, match="1 calibration sequences, of which 1 are held out, leave none"):
        learn(forward, starts, xs[:1], ys[:1], LearnOptions())


def test_two_bits_get_twice_the_epochs_unless_told():
    passes = {bits: LearnSettings(bits=bits).passes for bits in (2, 3, 4)}
    assert passes == {2: 8, 3: 4, 4: 4} and LearnSettings(bits=2, epochs=3).passes == 3


# ---- the step


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("L1", {"bits": 2, "symmetric": False}),
        ("G2", {"bits": 3}),
        ("GP", {"bits": 3}),
        ("QM", {"bits": 3, "asymmetric": "gptaq"}),
        ("L2", {"bits": 3, "rules": [{"match": "down_proj", "bits": 4}]}),
    ],
)
def test_the_step_beats_gptq_on_every_blocks_outputs_and_reloads(shelf, ids, tmp_path, name, settings):
    settings = {"group_size": GROUP, "epochs": 3} | settings
    done = quantize(shelf(name), tmp_path / "out", "learn", data=ids, calibration={"samples": 16}, **settings)
    found = done.manifest["verification"]
    assert found["missing"] == 0 and found["max_difference"] <= 1e-5 * found["largest_logit"]
    for record in done.manifest["modules"].values():
        assert record["method"] == "learn" or record["fallback"]
        before, after = record["block_error"]
        assert 0 < after <= before
    assert any(r["block_error"][1] < r["block_error"][0] for r in done.manifest["modules"].values())


def test_the_recorded_block_errors_are_those_of_the_written_model(shelf, ids, tmp_path):
    """Inputs from the quantized blocks before, targets from the original model: recomputed from the two checkpoints."""
    settings = {"bits": 2, "group_size": GROUP, "epochs": 2}
    done = quantize(shelf("L1"), tmp_path / "out", "learn", data=ids, calibration={"samples": 16}, **settings)
    tokens = torch.from_numpy(done.plan.calibration.blocks.ids)
    models = [open_skeleton(open_checkpoint(shelf("L1"))), open_skeleton(dense_view(open_checkpoint(tmp_path / "out")))]
    streams = [Stream.start(model, list(tokens.split(4))) for model in models]
    for index in range(2):
        for model, stream in zip(models, streams, strict=True):
            model.load_block(index)
            run_block(model, index, stream)
            model.free_block(index)
        original, trained = (torch.cat(stream.hidden)[14:] for stream in streams)
        after = done.manifest["modules"][f"model.layers.{index}.mlp.up_proj"]["block_error"][1]
        assert float(relative_error(trained, original)) == pytest.approx(after, rel=1e-4)


@pytest.mark.parametrize("settings", [{"epochs": 1}, {"asymmetric": "qronos"}])
def test_j1_a_run_killed_between_blocks_resumes_to_the_same_bytes(shelf, ids, tmp_path, settings):
    method = "learn" if "epochs" in settings else "gptq"
    recipe = {
        "model": str(shelf("L1")),
        "calibration": {"data": str(ids), "samples": 8, "length": LENGTH},
        "steps": [{method: {"bits": 3, "group_size": GROUP, **settings}}],
        "output": str(tmp_path / "whole"),
    }
    run(recipe)
    recipe["output"] = str(tmp_path / "killed")
    with patch("suture.pipeline.quantize.gptq_block", dies_at_block(1)), pytest.raises(KeyboardInterrupt):
        run(recipe)
    run(recipe, resume=True)
    for file in ("model.safetensors", "suture.json"):
        a, b = (Path(recipe["output"]).with_name(n) / file for n in ("whole", "killed"))
        assert a.read_bytes() == b.read_bytes()


def dies_at_block(n):
    from suture.quant.block import gptq_block

    def block(skeleton, index, *args, **options):
        if index == n:
            raise KeyboardInterrupt
        return gptq_block(skeleton, index, *args, **options)

    return block


@pytest.mark.parametrize(
    ("samples", "settings", "decided"),
    [
        (47, {}, "none"),
        (48, {}, "gptaq"),
        (16, {"targets": ["q_proj"]}, "gptaq"),
        (48, {"asymmetric": "qronos"}, "qronos"),
        (48, {"asymmetric": "none"}, "none"),
    ],
)
def test_two_models_are_compared_by_themselves_where_text_is_plenty(tmp_path, samples, settings, decided):
    """32 tokens per input: 512 a sample, 768 inputs of down_proj, 256 of q_proj."""
    plan = make_plan(
        make_recipe(
            {
                "model": "builtin:tiny",
                "calibration": {"data": "builtin:novels", "samples": samples, "length": 512},
                "steps": [{"gptq": {"group_size": 64, **settings}}],
                "output": str(tmp_path / "out"),
            }
        )
    )
    assert plan.steps[0].settings.asymmetric == decided
    assert plan.steps[0].prepared.streams == (1 if decided == "none" else 2)


def test_asymmetric_calibration_sees_both_models_and_costs_less(shelf, ids, tmp_path):
    """The second block's outputs are nearer the original's than GPTQ's, and recorded codes differ."""
    errors, codes = {}, {}
    for asymmetric in ("none", "gptaq", "qronos"):
        out = tmp_path / asymmetric
        done = quantize(
            shelf("L1"),
            out,
            "gptq",
            data=ids,
            calibration={"samples": 48},
            bits=3,
            group_size=GROUP,
            asymmetric=asymmetric,
        )
        assert not done.fallbacks
        codes[asymmetric] = read(out)["model.layers.1.mlp.down_proj.weight_packed"]
        tokens = torch.from_numpy(done.plan.calibration.blocks.ids)
        models = [open_skeleton(open_checkpoint(shelf("L1"))), open_skeleton(dense_view(open_checkpoint(out)))]
        streams = [Stream.start(model, list(tokens.split(8))) for model in models]
        for index in range(2):
            for model, stream in zip(models, streams, strict=True):
                model.load_block(index)
                run_block(model, index, stream)
        errors[asymmetric] = float(relative_error(torch.cat(streams[1].hidden), torch.cat(streams[0].hidden)))
    assert errors["gptaq"] < errors["none"] and errors["qronos"] < errors["none"]
    assert not torch.equal(codes["gptaq"], codes["none"]) and not torch.equal(codes["qronos"], codes["gptaq"])
    assert json.loads((tmp_path / "qronos" / "suture.json").read_text())["recipe"]
