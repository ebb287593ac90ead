"""Bringing the next block while one computes: the order of things, and the same numbers as without."""

import threading

import kit
import pytest
import torch

from suture.calibrate.replay import Stream, run_block
from suture.calibrate.skeleton import open_skeleton
from suture.calibrate.upload import Upload
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.checkpoint.source import OverlaySource, Settled
from suture.pipeline.walk import probe_logits
from suture.quant.decode import dense_view


class Copier:
    """Stands for the way to a device: copies, and notes in which thread."""

    def __init__(self):
        self.threads = []

    def start(self, host):
        self.threads.append(threading.current_thread())
        return host.clone()

    def finish(self, moving):
        return moving


def test_what_is_expected_comes_from_the_thread_and_nothing_else():
    tensors = {name: torch.tensor([float(i)]) for i, name in enumerate("abcd")}
    mover = Copier()
    upload = Upload(tensors.__getitem__, mover)
    assert upload.take("a") is None
    upload.expect(["a", "b", "a"])
    assert float(upload.take("b")) == 1 and float(upload.take("a")) == 0 and upload.take("a") is None
    upload.expect(["c"])
    upload.expect(["d"])  # c was never taken
    assert upload.take("c") is None and float(upload.take("d")) == 3
    assert threading.current_thread() not in mover.threads
    upload.expect(["missing"])
    with pytest.raises(KeyError):
        upload.take("missing")


@pytest.mark.parametrize("name", ["L1", "MX", "GP", "packed"])
def test_blocks_that_are_brought_are_the_same(shelf, tmp_path, name):
    """Every block but the first comes that way, packed ones too, and experts that share a tensor."""
    path = shelf("L1" if name == "packed" else name)
    if name == "packed":
        path = kit.quantize(path, tmp_path / "out", "rtn", bits=4, group_size=16).output
    source = dense_view(open_checkpoint(path))
    assert isinstance(source, Settled) and source.settled
    plain, brought = open_skeleton(source), open_skeleton(source)
    assert plain.upload is None  # there is no way to go to
    mover = Copier()
    brought.upload = Upload(source.read, mover)
    ids = kit.some_ids()
    streams = [Stream.start(model, [ids]) for model in (plain, brought)]
    for index in range(plain.n_blocks):
        before = len(mover.threads)
        for model, stream in zip((plain, brought), streams, strict=True):
            model.load_block(index)
            run_block(model, index, stream)
            model.free_block(index)
        assert index > 0 or before == 0
    expected = {place.tensor for i in range(1, plain.n_blocks) for place in plain.layout.block_tensors(i).values()}
    assert len(mover.threads) == len(expected)
    assert torch.equal(streams[0].hidden[0], streams[1].hidden[0])
    assert torch.equal(*(probe_logits(model, ids, model.n_blocks) for model in (plain, brought)))


def test_what_a_step_is_still_writing_is_not_read_ahead(shelf):
    source = open_checkpoint(shelf("L1"))
    assert not isinstance(OverlaySource(source, source), Settled)


def test_a_block_that_is_damaged_is_named_when_it_is_loaded(shelf, tmp_path):
    def damage(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
        return tensors

    path = kit.edit(kit.make("L1", tmp_path / "m"), damage)
    model = open_skeleton(open_checkpoint(path))
    model.upload = Upload(model.source.read, Copier())
    model.load_block(0)
    with pytest.raises(SutureError, match=r"layers\.1\.mlp\.up_proj\.weight holds 1 NaN"):
        model.load_block(1)
