"""J3, J4: memory is bounded by a block, not by the model; what was predicted is what was taken."""

import json
import mmap
import os
import sys

import numpy as np
import pytest
import tiny
import torch
import warm
from compressed_tensors import compressors
from compressed_tensors.quantization import QuantizationStatus

from suture.calibrate.memory import let_go
from suture.calibrate.replay import Stream
from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline import reload
from suture.pipeline.verify import FreshLoader
from suture.pipeline.walk import probe_logits
from suture.quant.decode import dense_view

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 2048,
}
BLOCK = 4 * (4 * 512 * 512 + 3 * 512 * 1408)  # bytes in float32
FEW, MANY = 2, 16  # blocks: the larger model has 180 MB more in float32
STEPS = {
    "gptq": [{"gptq": {"bits": 4, "group_size": 64, "search": False}}],
    "surgery": [{"permute": {"heads": "random", "neurons": "random"}}, {"cast": {"dtype": "float16"}}],
}
PATCHES = {
    "suture.pipeline.estimate:_verify_blocks": "lambda *given: 1",  # the reload is in the same process here
    "suture.report.score:_fits": "lambda skeleton, budget: False",  # as for a model larger than memory
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("memory")
    for layers in (FEW, MANY):
        tiny.llama(root / f"model-{layers}", layers=layers, shard="30MB", **SHAPE)
    tiny.ids_file(root / "calibration.jsonl")
    tiny.ids_file(root / "evaluation.jsonl", seed=1)
    return root


def facts(models, directory, layers, kind):
    content = {
        "model": str(models / f"model-{layers}"),
        "steps": STEPS[kind],
        "output": "out",
        "report": {"data": str(models / "evaluation.jsonl"), "window": 16, "max_windows": 2},
    }
    if kind == "gptq":
        content["calibration"] = {"data": str(models / "calibration.jsonl"), "samples": 8, "length": 16}
    recipe = tiny.recipe(directory / f"{kind}-{layers}.yaml", content)
    done = warm.suture("run", recipe, "--output", directory / f"out-{layers}", "--json", cwd=directory, patches=PATCHES)
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("kind", STEPS)
def test_j4_eight_times_the_blocks_take_no_more_memory(models, tmp_path, kind):
    """Steps, perplexity and KL. A run that held the model, even as stored, would take 90 MB more."""
    small, large = (facts(models, tmp_path, layers, kind) for layers in (FEW, MANY))
    for part in ("preflight", "steps", "report"):
        grown = large["memory"][part] - small["memory"][part]
        assert grown < (MANY - FEW) * BLOCK / 2 * 0.85, f"{part}: {grown >> 20} MB more"
    for run in (small, large):
        for part in ("preflight", "steps"):
            found, guess = run["memory"][part], run["predicted"]["memory"][part]
            assert guess == pytest.approx(found, rel=0.25), f"{part}: {guess >> 20} MB predicted, {found >> 20} taken"
        assert run["predicted"]["disk"] == pytest.approx(run["disk"], rel=0.25)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux")
def test_j4_the_reload_holds_a_layer_and_not_the_model(models, tmp_path):
    """Its weights are mapped, and what a layer has read of them is given back when it has run."""
    ids = torch.arange(8)[None]
    peaks = {}
    for layers in (FEW, MANY):
        work = tmp_path / f"work-{layers}"
        work.mkdir()
        with FreshLoader() as loader:
            found = loader.load(models / f"model-{layers}", work, ids)
        peaks[layers] = loader.peak_memory
        skeleton = open_skeleton(open_checkpoint(models / f"model-{layers}"))
        torch.testing.assert_close(found["logits"], probe_logits(skeleton, ids, layers), rtol=0, atol=1e-4)
    grown = peaks[MANY] - peaks[FEW]
    assert grown < (MANY - FEW) * BLOCK / 2 * 0.4, f"{grown >> 20} MB more for {MANY - FEW} blocks"


def test_j4_packed_layers_are_unpacked_one_at_a_time(tmp_path, monkeypatch):
    """And packed again: the second forward, in the stored dtype, unpacks them once more."""
    model = tiny.llama(tmp_path / "model", layers=3, **SHAPE)
    recipe = {"model": str(model), "steps": [{"rtn": {"bits": 3, "group_size": 64}}], "output": str(tmp_path / "out")}
    assert warm.suture("run", tiny.recipe(tmp_path / "r.yaml", recipe), cwd=tmp_path).code == 0
    unpacked, most, real = [], [], compressors.decompress_module

    def counted(module):
        real(module)
        unpacked.append(module)
        most.append(sum(one.quantization_status == QuantizationStatus.DECOMPRESSED for one in set(unpacked)))

    monkeypatch.setattr(compressors, "decompress_module", counted)
    ids = torch.arange(8)[None]
    found = reload.load_and_run(str(tmp_path / "out"), ids)
    assert len(unpacked) == 2 * 3 * 7 and set(most) == {1}
    ours = probe_logits(open_skeleton(dense_view(open_checkpoint(tmp_path / "out"))), ids, 3)
    torch.testing.assert_close(found["logits"], ours, rtol=0, atol=1e-4)


def test_j4_weights_that_are_read_when_they_multiply_are_the_same_weights(models):
    skeleton = open_skeleton(open_checkpoint(models / f"model-{FEW}"))
    hidden = skeleton.embed(torch.arange(8)[None])
    skeleton.load_block(0)
    whole = skeleton.run_block(0, hidden)
    held = sum(p.nbytes for p in skeleton.block(0).parameters() if not p.is_meta)
    skeleton.free_block(0)
    with skeleton.reading_as_needed():
        skeleton.load_block(0)
        torch.testing.assert_close(skeleton.run_block(0, hidden), whole, rtol=0, atol=1e-5)
        assert sum(p.nbytes for p in skeleton.block(0).parameters() if not p.is_meta) < held / 100
        skeleton.free_block(0)
    skeleton.load_block(0)
    assert torch.equal(skeleton.run_block(0, hidden), whole)


def test_what_is_let_go_keeps_its_values(tmp_path):
    values = torch.arange(1 << 18, dtype=torch.float32)
    with (tmp_path / "file").open("wb+") as file:
        file.write(values.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())  # pages that are not yet on the disk are kept
        mapped = torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.float32))
    own = values.clone()
    assert torch.equal(mapped, values)
    for tensor in (mapped, own, own.view(512, 512).T, own[:0]):
        let_go(tensor)
    if sys.platform == "linux":
        assert _resident_of(tmp_path / "file") < mapped.nbytes / 4
    assert torch.equal(mapped, values) and torch.equal(own, values)


def test_j3_hidden_states_beyond_the_budget_are_in_a_file_and_not_in_memory(tmp_path):
    """The same numbers, saved and restored, while the process holds pages of one batch at most."""
    skeleton = open_skeleton(open_checkpoint(tiny.llama(tmp_path / "model", layers=1)))
    ids = torch.arange(64).repeat(512, 4).split(32)
    inside = Stream.start(skeleton, ids)
    spilled = Stream.start(skeleton, ids, budget=1 << 20, spill=tmp_path / "hidden.bin")
    assert inside.mapped is None and spilled.mapped is not None
    for batch, hidden in enumerate(inside.hidden):
        assert torch.equal(spilled.hidden[batch], hidden)
    spilled.save(tmp_path / "saved.bin")
    spilled.replace(3, inside.hidden[4])
    assert torch.equal(spilled.hidden[3], inside.hidden[4])
    spilled.restore(tmp_path / "saved.bin")
    assert torch.equal(spilled.buffer, inside.buffer)
    spilled.let_go()
    if sys.platform == "linux":
        assert _resident_of(tmp_path / "hidden.bin") == 0
        assert torch.equal(spilled.hidden[0], inside.hidden[0])
        assert 0 < _resident_of(tmp_path / "hidden.bin") < spilled.buffer.nbytes


def _resident_of(file):
    """Bytes of a mapped file that this process has in memory."""
    lines = open("/proc/self/smaps").read().splitlines()  # noqa: SIM115, PTH123
    at = next(i for i, line in enumerate(lines) if line.endswith(str(file)))
    return int(next(line for line in lines[at:] if line.startswith("Rss")).split()[1]) * 1024
