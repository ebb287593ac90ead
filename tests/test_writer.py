"""What is written to disk: the shards that safetensors reads back bit for bit, the staging directory, the manifest."""

import errno
import fcntl
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from suture.checkpoint import staging as staging_module
from suture.checkpoint import writer as writer_module
from suture.checkpoint.errors import SutureError
from suture.checkpoint.header import DTYPES, code_of, read_header
from suture.checkpoint.manifest import (
    MANIFEST,
    SCHEMA,
    Account,
    account_for,
    chain_accounts,
    file_hashes,
    read_manifest,
    to_json,
)
from suture.checkpoint.staging import check_output, open_staging, partial_of, read_journal, write_whole
from suture.checkpoint.writer import ShardWriter, TensorSpec, plan_shards

INDEX = "model.safetensors.index.json"
TORCH_CODES = sorted(code for code, dtype in DTYPES.items() if dtype.torch_name and hasattr(torch, dtype.torch_name))


def tensor_of(code: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern of the dtype, NaN and infinities included; 0 and 1 for BOOL."""
    dtype = getattr(torch, DTYPES[code].torch_name)
    count = DTYPES[code].bits // 8 * torch.Size(shape).numel()
    raw = torch.randint(0, 2 if code == "BOOL" else 256, (count,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, code_of(tensor.dtype), tuple(tensor.shape))


def write_all(directory: Path, tensors: dict[str, torch.Tensor], limit: int, order=None):
    plan = plan_shards([spec_of(name, tensor) for name, tensor in tensors.items()], limit)
    with ShardWriter(directory, plan) as writer:
        for name in order or tensors:
            writer.write(name, tensors[name])
        writer.sync()
    return plan


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda n: n != "__metadata__")
MODELS = st.dictionaries(NAMES, st.tuples(st.sampled_from(TORCH_CODES), SHAPES), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(model=MODELS, limit=st.sampled_from([1, 7, 16, 64, 200, 10**9]), seed=st.integers(0, 1000))
def test_what_is_written_safetensors_reads_back(tmp_path_factory, model, limit, seed):
    directory = tmp_path_factory.mktemp("w")
    tensors = {name: tensor_of(code, shape, seed + i) for i, (name, (code, shape)) in enumerate(model.items())}
    order = random.Random(seed).sample(list(tensors), len(tensors))
    plan = write_all(directory, tensors, limit, order)

    read: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    for shard in plan.shards:
        path = directory / shard.file
        part = load_file(path)
        assert not set(part) & set(read)
        read |= part
        where |= dict.fromkeys(part, shard.file)
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        ours = read_header(path)
        assert {n: (i.dtype, i.shape) for n, i in ours.tensors.items()} == {
            n: (code_of(t.dtype), tuple(t.shape)) for n, t in part.items()
        }
        assert path.stat().st_size == shard.size
        inside = sum(t.nbytes for t in part.values())
        assert inside <= limit or len([t for t in part.values() if t.nbytes]) == 1
    assert {n: (t.dtype, t.shape, raw_bytes(t)) for n, t in read.items()} == {
        n: (t.dtype, t.shape, raw_bytes(t)) for n, t in tensors.items()
    }

    total = sum(tensor.nbytes for tensor in tensors.values())
    if len(plan.shards) == 1:
        assert sorted(p.name for p in directory.iterdir()) == ["model.safetensors"]
    else:
        index = json.loads((directory / INDEX).read_bytes())
        assert index == {"metadata": {"total_size": total}, "weight_map": where}
        n = len(plan.shards)
        names = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
        assert sorted(p.name for p in directory.iterdir()) == [*names, INDEX]
    shutil.rmtree(directory)


@pytest.mark.parametrize("code", TORCH_CODES)
def test_every_dtype_survives_bit_for_bit(tmp_path, code):
    tensors = {"t": tensor_of(code, (3, 5), 0), "scalar": tensor_of(code, (), 1), "empty": tensor_of(code, (0, 4), 2)}
    write_all(tmp_path, tensors, 10**9)
    read = load_file(tmp_path / "model.safetensors")
    assert {n: raw_bytes(t) for n, t in read.items()} == {n: raw_bytes(t) for n, t in tensors.items()}
    assert {n: (t.dtype, t.shape) for n, t in read.items()} == {n: (t.dtype, t.shape) for n, t in tensors.items()}


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2"])
def test_packed_floats_that_torch_lacks_pass_as_bytes(tmp_path, code):
    plan = plan_shards([TensorSpec("t", code, (4, 4))])
    nbytes = 16 * DTYPES[code].bits // 8
    with ShardWriter(tmp_path, plan) as writer:
        writer.write_bytes("t", bytes(range(nbytes)))
    info = read_header(tmp_path / "model.safetensors").tensors["t"]
    assert (info.dtype, info.shape, info.nbytes) == (code, (4, 4), nbytes)
    assert (tmp_path / "model.safetensors").read_bytes().endswith(bytes(range(nbytes)))


def test_views_and_transposes_are_written_as_they_look(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {"t": base.T, "columns": base[:, ::2], "expanded": base[:1].expand(3, 6), "grad": base.clone()}
    tensors["grad"].requires_grad_()
    write_all(tmp_path, tensors, 10**9)
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_the_header_is_what_the_library_would_write(tmp_path):
    tensors = {"b": torch.zeros(3, 2), "a": torch.ones(4)}  # one dtype: the library then keeps names in order
    write_all(tmp_path / "ours", dict(sorted(tensors.items())), 10**9)
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "ours/model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_a8_the_same_storage_under_two_names_is_written_twice(tmp_path):
    weight = torch.randn(4, 4)
    write_all(tmp_path, {"embed": weight, "head": weight, "rows": weight[:2]}, 10**9)
    read = load_file(tmp_path / "model.safetensors")
    assert torch.equal(read["embed"], weight) and torch.equal(read["head"], weight)
    assert torch.equal(read["rows"], weight[:2])


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.float16), r"t: planned as F32 \[2, 3\], computed as F16 \[2, 3\]"),
        (torch.zeros(3, 2), r"t: planned as F32 \[2, 3\], computed as F32 \[3, 2\]"),
        (torch.zeros(6), r"t: planned as F32 \[2, 3\], computed as F32 \[6\]"),
        (torch.zeros(2, 3, dtype=torch.int32), r"t: planned as F32 \[2, 3\], computed as I32 \[2, 3\]"),
    ],
)
def test_a_tensor_that_is_not_as_planned_is_refused(tmp_path, tensor, message):
    with ShardWriter(tmp_path, plan_shards([TensorSpec("t", "F32", (2, 3))])) as writer:
        before = (tmp_path / "model.safetensors").read_bytes()
        with pytest.raises(SutureError, match=message):
            writer.write("t", tensor)
        assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("size", [0, 23, 25, 48])
def test_bytes_of_another_size_are_refused(tmp_path, size):
    with (
        ShardWriter(tmp_path, plan_shards([TensorSpec("t", "F32", (2, 3))])) as writer,
        pytest.raises(SutureError, match=f"t: planned with 24 bytes, given {size}"),
    ):
        writer.write_bytes("t", bytes(size))


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(SutureError, match="two tensors of one name"):
        plan_shards([TensorSpec("t", "F32", (1,)), TensorSpec("t", "F32", (2,))])


def test_the_space_is_reserved_before_the_work(tmp_path):
    plan = plan_shards([TensorSpec("t", "U8", (1 << 20,))])
    with ShardWriter(tmp_path, plan):
        assert (tmp_path / "model.safetensors").stat().st_blocks * 512 >= 1 << 20


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch, call, code):
    def full(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(writer_module.os, call, full)
    plan = plan_shards([TensorSpec("t", "F32", (2, 3))])
    full_disk = pytest.raises(SutureError, match=r"the disk is full; free some space, then run again with --resume")
    with full_disk, ShardWriter(tmp_path, plan) as writer:
        writer.write("t", torch.zeros(2, 3))
        writer.sync()


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(writer_module.os, "pwrite", lambda fd, view, at: real(fd, view[:5], at))
    write_all(tmp_path, {"t": torch.arange(100)}, 10**9)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["t"], torch.arange(100))


# -- again over what is there ------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(model=MODELS, limit=st.sampled_from([16, 64, 10**9]), done=st.integers(0, 8), seed=st.integers(0, 1000))
def test_a_resumed_writer_gives_the_same_bytes(tmp_path_factory, model, limit, done, seed):
    """The first writer stops after `done` tensors, the last of them half written; the second writes what is left."""
    tensors = {name: tensor_of(code, shape, seed + i) for i, (name, (code, shape)) in enumerate(model.items())}
    plan = plan_shards([spec_of(n, t) for n, t in tensors.items()], limit)
    once, twice = tmp_path_factory.mktemp("once"), tmp_path_factory.mktemp("twice")
    write_all(once, tensors, limit)
    names = list(tensors)
    with ShardWriter(twice, plan) as writer:
        for name in names[:done]:
            writer.write(name, tensors[name])
        if names[done:] and tensors[names[done]].nbytes:
            garbage = bytes(255 - byte for byte in raw_bytes(tensors[names[done]]))
            writer.write_bytes(names[done], garbage)
    with ShardWriter(twice, plan) as writer:
        for name in reversed(names[done:]):
            writer.write(name, tensors[name])
    assert {p.name: p.read_bytes() for p in once.iterdir()} == {p.name: p.read_bytes() for p in twice.iterdir()}


# -- staging -----------------------------------------------------------------------------------------------------------

FINGERPRINT = {"recipe": "a", "model": "b"}


def staged(output: Path, overwrite=False, resume=False, fingerprint=FINGERPRINT):
    return open_staging(output, fingerprint, overwrite, resume)


def test_nothing_is_under_the_final_name_before_the_commit(tmp_path):
    output = tmp_path / "out"
    with staged(output) as staging:
        write_whole(staging.model / "config.json", b"{}")
        staging.record({"unit": "x"})
        assert not output.exists()
        staging.commit()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (output / "config.json").read_bytes() == b"{}"


def test_a_journal_is_found_again_in_order_and_with_its_keys_in_order(tmp_path):
    entries = [
        {"step": "s", "block": 0, "modules": {"b": {"z": 1, "a": 0.1 + 0.2}, "a": {}}},
        {"step": "s", "block": 0, "modules": {"c": 1e-300}},
        {"unit": "rest"},
    ]
    with staged(tmp_path / "out") as staging:
        for entry in entries:
            staging.record(entry)
        fresh = staging.done
    with staged(tmp_path / "out", resume=True) as staging:
        assert json.dumps(staging.done) == json.dumps(fresh) == json.dumps(entries)
        assert staging.find(step="s", block=0) == entries[1]  # the last
        assert staging.find(step="s", block=1) is None and staging.find(unit="rest") == entries[2]


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 400))
def test_a_journal_cut_anywhere_keeps_its_whole_lines(tmp_path_factory, cut):
    directory = tmp_path_factory.mktemp("j")
    lines = [json.dumps({"n": n, "pad": "é" * n}) + "\n" for n in range(6)]
    raw = "".join(lines).encode()[:cut]
    (directory / "journal.jsonl").write_bytes(raw)
    whole = raw[: raw.rfind(b"\n") + 1]
    assert read_journal(directory / "journal.jsonl") == [json.loads(line) for line in whole.splitlines()]
    assert (directory / "journal.jsonl").read_bytes() == whole  # and the next line is not glued to the torn one


def test_another_fingerprint_is_refused_and_says_what(tmp_path):
    with staged(tmp_path / "out"):
        pass
    with pytest.raises(SutureError, match="was begun with another model, another torch: it cannot be resumed"):
        staged(tmp_path / "out", resume=True, fingerprint={"recipe": "a", "model": "c", "torch": "1"})
    with staged(tmp_path / "out", resume=True):  # the refused one has let go of the lock
        pass


def test_overwriting_starts_from_nothing(tmp_path):
    with staged(tmp_path / "out") as staging:
        (staging.model / "old.safetensors").write_bytes(b"old")
        (staging.work / "hidden.bin").write_bytes(b"old")
        (staging.work / "first-blocks").mkdir()
        (staging.work / "first-blocks" / "link").symlink_to(tmp_path)
        staging.record({"unit": "x"})
    with staged(tmp_path / "out", overwrite=True, fingerprint={"recipe": "z"}) as staging:
        assert staging.done == [] and list(staging.model.iterdir()) == []
        assert sorted(p.name for p in staging.work.iterdir()) == ["journal.jsonl", "lock"]
    assert tmp_path.is_dir()


@pytest.mark.parametrize(("overwrite", "resume"), [(False, True), (True, False), (True, True)])
def test_a_locked_directory_is_left_alone(tmp_path, overwrite, resume):
    with staged(tmp_path / "out") as first:
        (first.model / "half.safetensors").write_bytes(b"half")
        with pytest.raises(SutureError, match="another run is writing to"):
            staged(tmp_path / "out", overwrite=overwrite, resume=resume)
        assert (first.model / "half.safetensors").read_bytes() == b"half"
        first.record({"unit": "goes on"})
    with (partial_of(tmp_path / "out") / "work" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a6_an_output_is_replaced_as_a_whole(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors", INDEX, "pytorch_model.bin"):
        (output / name).write_bytes(b"old")
    with staged(output, overwrite=True) as staging:
        write_whole(staging.model / "model.safetensors", b"new")
        staging.commit()
    assert [p.name for p in output.iterdir()] == ["model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_directory_of_the_users_called_old_is_not_touched(tmp_path):
    """An output `out` is replaced by way of a temporary place, which must not be a name that a user would choose."""
    for name in ("out.old", "out.bak", "out.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text(name)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with staged(tmp_path / "out", overwrite=True) as staging:
        staging.commit()
    assert {p.parent.name: p.read_text() for p in tmp_path.glob("*/precious")} == {
        n: n for n in ("out.old", "out.bak", "out.tmp")
    }


def test_a_write_that_fails_leaves_the_old_content_under_the_name(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_whole(path, b"old")

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(staging_module.os, "fsync", full)
    with pytest.raises(SutureError, match=r"config\.json: the disk is full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_full_disk_anywhere_inside_is_one_sentence(tmp_path):
    with pytest.raises(SutureError, match=r"out\.partial: the disk is full"), staged(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError), staged(tmp_path / "out", resume=True):
        raise FileNotFoundError("another error stays what it is")


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_an_output_that_cannot_be_made_is_one_sentence(tmp_path, place):
    (tmp_path / "file").write_text("x")
    output = tmp_path / "file" / "out" if place == "below a file" else tmp_path / "out"
    if place == "a file":
        partial_of(output).write_text("x")
    with pytest.raises(SutureError, match="nothing was put under the final name"):
        staged(output)


def model_directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def outputs(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Outputs that must be refused for the input tmp_path/in/model, by name, with the reason."""
    source = model_directory(tmp_path / "in" / "model")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "link-to-parent").symlink_to(source.parent)
    (tmp_path / "file").write_text("x")
    return {
        "itself": (source, "is the input itself"),
        "itself, by another spelling": (source / ".." / "model" / ".", "is the input itself"),
        "itself, by a link": (tmp_path / "link", "is the input itself"),
        "inside": (source / "out", "lie inside one another"),
        "inside, by a link": (tmp_path / "link" / "deep" / "out", "lie inside one another"),
        "around": (source.parent, "lie inside one another"),
        "around, by a link": (tmp_path / "link-to-parent", "lie inside one another"),
        "a file": (tmp_path / "file", "is a file"),
    }


OUTPUTS = [
    "itself",
    "itself, by another spelling",
    "itself, by a link",
    "inside",
    "inside, by a link",
    "around",
    "around, by a link",
    "a file",
]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_a7_an_output_that_would_harm_the_input_is_refused(tmp_path, name, overwrite):
    output, reason = outputs(tmp_path)[name]
    with pytest.raises(SutureError, match=reason):
        check_output(output, tmp_path / "in" / "model", overwrite=overwrite, resume=False)


def test_a7_an_output_whose_working_directory_would_be_the_input_is_refused(tmp_path):
    for source in (model_directory(tmp_path / "out.partial"), model_directory(tmp_path / "out.partial" / "model")):
        with pytest.raises(SutureError, match="where the input is"):
            check_output(tmp_path / "out", source, overwrite=True, resume=False)


def test_a6_a_directory_that_is_not_empty_is_refused_without_overwrite(tmp_path):
    source = model_directory(tmp_path / "model")
    old = model_directory(tmp_path / "old")
    with pytest.raises(SutureError, match=r"is not empty .*--overwrite replaces it as a whole"):
        check_output(old, source, overwrite=False, resume=False)
    check_output(old, source, overwrite=True, resume=False)
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", source, overwrite=False, resume=False)


def test_a_directory_of_other_things_is_never_replaced(tmp_path):
    source = model_directory(tmp_path / "model")
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "me.jpg").write_text("x")
    with pytest.raises(SutureError, match=r"holds no model: --overwrite would remove files that are not suture's"):
        check_output(photos, source, overwrite=True, resume=False)


# -- manifest ----------------------------------------------------------------------------------------------------------


@st.composite
def chains(draw):
    """A few steps: each drops, keeps, changes or splits its input tensors; names are never reused for others."""
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True))
    steps, present = [], names
    for number in range(draw(st.integers(1, 4))):
        accounts: dict[str, Account] = {}
        following: list[str] = []
        for name in present:
            kind = draw(st.sampled_from(["copied", "changed", "split", "dropped"]))
            if kind == "dropped":
                accounts[name] = Account("dropped", reason=f"drop{number}")
            elif kind == "copied":
                accounts[name] = Account("copied", (name,))
            else:
                parts = tuple(f"{name}.{number}{i}" for i in range(2 if kind == "split" else 1))
                accounts[name] = Account("changed", parts, f"change{number}")
            following += accounts[name].outputs
        steps.append(accounts)
        present = following
    return names, steps, present


@settings(max_examples=200, deadline=None)
@given(chains())
def test_a_chain_accounts_for_every_first_input_and_every_last_output(chain):
    names, steps, outputs_left = chain
    total = chain_accounts(steps)
    account_for(names, outputs_left, total)
    assert set(total) == set(names)
    assert sorted(o for account in total.values() for o in account.outputs) == sorted(outputs_left)
    for name, account in total.items():
        assert (account.action == "dropped") == (not account.outputs)
        if account.action == "copied":
            assert account.outputs == (name,) and not account.reason
        else:
            assert account.reason


@settings(max_examples=100, deadline=None)
@given(chains(), st.integers(1, 3))
def test_following_a_chain_in_parts_is_following_it_whole(chain, cut):
    _, steps, _ = chain
    cut = min(cut, len(steps))
    assert chain_accounts([chain_accounts(steps[:cut]), *steps[cut:]]) == chain_accounts(steps)


def test_a_tied_embedding_that_is_copied_twice_has_two_outputs():
    untie = {"embed": Account("copied", ("embed", "head")), "w": Account("copied", ("w",))}
    quantize = {
        "embed": Account("copied", ("embed",)),
        "head": Account("copied", ("head",)),
        "w": Account("changed", ("w.packed", "w.scale"), "quantized to 4 bits"),
    }
    assert chain_accounts([untie, quantize]) == {
        "embed": Account("copied", ("embed", "head")),
        "w": Account("changed", ("w.packed", "w.scale"), "quantized to 4 bits"),
    }


@pytest.mark.parametrize(
    ("inputs", "outputs_", "accounts", "message"),
    [
        (["a", "b"], ["a"], {"a": Account("copied", ("a",))}, "1 tensors not accounted for, first b"),
        (["a"], ["a", "z"], {"a": Account("copied", ("a",))}, "1 tensors of no origin, first z"),
        (["a"], [], {"a": Account("copied", ("a",))}, "1 tensors promised but not written, first a"),
    ],
)
def test_b14_a_tensor_that_is_lost_or_appears_is_an_error(inputs, outputs_, accounts, message):
    with pytest.raises(SutureError, match=message):
        account_for(inputs, outputs_, accounts)


def test_file_hashes_cover_every_file_but_the_manifest(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a.bin", "sub/b.bin", MANIFEST):
        (tmp_path / name).write_text(name)
    hashes = file_hashes(tmp_path)
    assert sorted(hashes) == ["a.bin", "sub/b.bin"]
    assert hashes["a.bin"]["bytes"] == 5


def test_json_of_the_same_content_is_the_same_and_nan_is_refused():
    content = {"b": [1, 0.1 + 0.2, "é"], "a": None}
    assert to_json(content) == to_json(json.loads(to_json(content)))
    with pytest.raises(ValueError, match="JSON compliant"):
        to_json({"x": float("nan")})


MANIFEST_CONTENT = {
    "suture": "0",
    "schema": SCHEMA,
    **{key: {} for key in ("recipe", "source", "inputs", "outputs", "modules", "fallbacks", "files")},
    "history": [],
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no suture.json: not an output of suture"),
        (b"", "is empty, JSON was expected"),
        (b"[]", f"not a manifest of schema {SCHEMA}"),
        (b'{"schema": 999}', f"not a manifest of schema {SCHEMA}"),
        (b'{"schema": 1, "schema": 1}', "key 'schema' is there twice"),
        (b'{"schema": 1}', "damaged: no fallbacks, files, history, inputs, modules, outputs, recipe, source, suture"),
        (json.dumps(MANIFEST_CONTENT).encode()[:-9], "not valid JSON"),
    ],
)
def test_a_manifest_that_is_not_one_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(SutureError, match=message):
        read_manifest(tmp_path)


def test_a_manifest_is_read_back(tmp_path):
    write_whole(tmp_path / MANIFEST, to_json(MANIFEST_CONTENT))
    assert read_manifest(tmp_path) == MANIFEST_CONTENT
