"""Opening a checkpoint: what is complete and consistent opens, every other directory is refused with its reason."""

import hashlib
import json
import os
import pickle
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from suture.checkpoint import Checkpoint, SutureError, open_checkpoint, torchbin
from suture.checkpoint.header import DTYPES
from suture.checkpoint.strict_json import strict_json

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 320,
    "tie_word_embeddings": False,
}
INDEX = "model.safetensors.index.json"


def llama_tensors(seed=0):
    torch.manual_seed(seed)
    tensors = {"model.embed_tokens.weight": torch.randn(320, 64), "lm_head.weight": torch.randn(320, 64)}
    for layer in range(2):
        for part, shape in {
            "self_attn.q_proj": (64, 64),
            "self_attn.k_proj": (16, 64),
            "mlp.down_proj": (64, 128),
            "input_layernorm": (64,),
        }.items():
            tensors[f"model.layers.{layer}.{part}.weight"] = torch.randn(shape)
    return {name: (0.3 * tensor).to(torch.bfloat16) for name, tensor in tensors.items()}


def shard_name(number, count):
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_config(directory, **changes):
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))


def edit_index(directory, edit):
    index = json.loads((directory / INDEX).read_text())
    edit(index)
    (directory / INDEX).write_text(json.dumps(index))


def single(directory, tensors=None):
    directory.mkdir(exist_ok=True)
    write_config(directory)
    save_file(tensors or llama_tensors(), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def sharded(directory, shards=3, index=True):
    """L1 in `shards` files, tensors dealt in turn."""
    directory.mkdir(exist_ok=True)
    write_config(directory)
    tensors = llama_tensors()
    weight_map = {name: shard_name(i % shards + 1, shards) for i, name in enumerate(sorted(tensors))}
    for shard in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, directory / shard)
    total = sum(tensor.nbytes for tensor in tensors.values())
    if index:
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return directory


def torch_bin(directory, state=None, name="pytorch_model.bin", **options):
    directory.mkdir(exist_ok=True)
    write_config(directory)
    torch.save(state or llama_tensors(), directory / name, **options)
    return directory


def refusal(source):
    with pytest.raises(SutureError) as caught:
        open_checkpoint(source)
    assert str(source) in str(caught.value)
    return str(caught.value)


def same_bits(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def assert_equals_llama(checkpoint):
    tensors = llama_tensors()
    assert checkpoint.tensors.keys() == tensors.keys()
    assert all(same_bits(checkpoint.read(name), tensor) for name, tensor in tensors.items())


# ---- reading


@pytest.mark.parametrize("code", [code for code, dtype in DTYPES.items() if dtype.torch_name])
def test_a17_read_is_bit_exact_for_every_dtype(tmp_path, code):
    dtype = getattr(torch, DTYPES[code].torch_name)
    patterns = torch.arange(256, dtype=torch.uint8).repeat(2)
    if dtype == torch.bool:
        patterns = patterns % 2
    matrix = patterns.view(dtype).reshape(16, -1)
    tensors = {"m": matrix, "scalar": matrix[3, 1].clone(), "empty": torch.empty((0, 5), dtype=dtype)}
    path = single(tmp_path / "x", tensors) / "model.safetensors"
    checkpoint = open_checkpoint(tmp_path / "x")
    for name, expected in load_file(path).items():
        found = checkpoint.read(name)
        assert same_bits(found, expected)
        assert checkpoint.tensors[name].dtype == code
        assert checkpoint.read_bytes(name) == expected.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert same_bits(checkpoint.read_rows("m", [5, 0, 5]), matrix[[5, 0, 5]])


def test_a17_unknown_bits_pass_through_as_bytes(tmp_path):
    single(tmp_path)
    header = json.dumps({"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"abc")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read_bytes("w") == b"abc"
    with pytest.raises(SutureError, match="tensor 'w' has dtype F4"):
        checkpoint.read("w")


def test_what_is_read_is_its_own_memory(tmp_path):
    checkpoint = open_checkpoint(single(tmp_path))
    before = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).digest()
    first = checkpoint.read("lm_head.weight")
    first.zero_()
    assert checkpoint.read("lm_head.weight").any()
    assert hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).digest() == before


def test_read_rows_equals_indexing_and_reads_only_those(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(single(tmp_path))
    whole = checkpoint.read("model.embed_tokens.weight")
    asked = []
    original = sys.modules["suture.checkpoint.reader"].read_ranges
    monkeypatch.setattr(
        "suture.checkpoint.reader.read_ranges", lambda f, ranges: asked.extend(ranges) or original(f, ranges)
    )
    rows = [7, 5, 6, 300, 5, 319, 0]
    assert torch.equal(checkpoint.read_rows("model.embed_tokens.weight", rows), whole[rows])
    assert [nbytes // 128 for _, nbytes in asked] == [1, 3, 1, 1]  # 0 │ 5 6 7 │ 300 │ 319
    assert torch.equal(checkpoint.read_rows("model.embed_tokens.weight", torch.tensor(rows)), whole[rows])
    assert checkpoint.read_rows("model.embed_tokens.weight", []).shape == (0, 64)


@pytest.mark.parametrize("row", [-1, 320])
def test_read_rows_refuses_rows_that_are_not_there(tmp_path, row):
    checkpoint = open_checkpoint(single(tmp_path))
    with pytest.raises(SutureError, match=f"rows 0 to 319, row {row}"):
        checkpoint.read_rows("lm_head.weight", [0, row])
    with pytest.raises(SutureError, match="a matrix was expected"):
        checkpoint.read_rows("model.layers.0.input_layernorm.weight", [0])


def test_a_mistyped_tensor_name_gets_the_nearest(tmp_path):
    checkpoint = open_checkpoint(single(tmp_path))
    for read in (checkpoint.read, checkpoint.read_bytes, lambda name: checkpoint.read_rows(name, [0])):
        with pytest.raises(SutureError, match=r"did you mean 'lm_head\.weight'"):
            read("lm_heads.weight")


def test_a_file_cut_after_opening_is_noticed(tmp_path):
    checkpoint = open_checkpoint(single(tmp_path))
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(SutureError, match="truncated or changed"):
        for name in checkpoint.tensors:
            checkpoint.read(name)


def test_single_file_and_shards_hold_the_same(tmp_path):
    one, three = open_checkpoint(single(tmp_path / "one")), open_checkpoint(sharded(tmp_path / "three"))
    assert_equals_llama(one)
    assert_equals_llama(three)
    assert one.nbytes == three.nbytes == sum(tensor.nbytes for tensor in llama_tensors().values())
    assert [path.name for path in three.weight_files] == [shard_name(i, 3) for i in (1, 2, 3)]
    assert one.notes == three.notes == ()
    assert one.shapes["lm_head.weight"] == (320, 64)
    assert "12 tensors" not in repr(one) and "10 tensors" in repr(one) and "llama" in repr(one)


# ---- the index


def test_a1_index_names_a_tensor_its_shard_lacks(tmp_path):
    sharded(tmp_path, 2)
    shard = tmp_path / shard_name(2, 2)
    tensors = load_file(shard)
    gone = sorted(tensors)[0]
    del tensors[gone]
    save_file(tensors, shard)
    message = refusal(tmp_path)
    assert repr(gone) in message and shard.name in message
    assert "lists 5 tensors" in message and "holds 4" in message


def test_a1_shard_holds_a_tensor_that_the_index_lacks(tmp_path):
    sharded(tmp_path)
    edit_index(tmp_path, lambda index: index["weight_map"].pop("lm_head.weight"))
    message = refusal(tmp_path)
    assert "'lm_head.weight'" in message and "does not place in it" in message


def test_a1_index_places_a_tensor_in_the_wrong_shard(tmp_path):
    sharded(tmp_path)
    edit_index(tmp_path, lambda index: index["weight_map"].update({"lm_head.weight": shard_name(2, 3)}))
    assert "'lm_head.weight'" in refusal(tmp_path)


def test_a2_missing_shard_is_named(tmp_path):
    sharded(tmp_path)
    (tmp_path / shard_name(2, 3)).unlink()
    message = refusal(tmp_path)
    assert shard_name(2, 3) in message and "1 of 3 files" in message and "incomplete download?" in message


ESCAPES = [
    *(
        "../other/model.safetensors",
        "/abs/x.safetensors",
        "a/../../x.safetensors",
        "a\\x.safetensors",
        "C:x.safetensors",
    ),
    *(
        "//host/x.safetensors",
        "",
        ".",
        "..",
        "./x.safetensors",
        "a//x.safetensors",
        "con.safetensors",
        "a/NUL/x.safetensors",
    ),
    *("x\0.safetensors", "x\n.safetensors", "config.json", "x.bin", "y" * 300 + ".safetensors", "x.safetensors "),
]


@pytest.mark.parametrize("entry", ESCAPES)
def test_a4_index_entries_that_leave_the_directory_open_nothing(tmp_path, monkeypatch, entry):
    single(tmp_path / "other")
    model = sharded(tmp_path / "model")
    edit_index(model, lambda index: index["weight_map"].update({"lm_head.weight": entry}))
    monkeypatch.setattr("suture.checkpoint.index.read_header", lambda path: pytest.fail(f"opened {path}"))
    assert "weight_map names the file" in refusal(model)


def test_a4_symlinks_out_of_the_directory_are_refused(tmp_path, monkeypatch):
    other = single(tmp_path / "other")
    monkeypatch.setattr("suture.checkpoint.index.read_header", lambda path: pytest.fail(f"opened {path}"))
    model = sharded(tmp_path / "shards")
    (model / shard_name(1, 3)).unlink()
    (model / shard_name(1, 3)).symlink_to(other / "model.safetensors")
    assert "leads out of its directory" in refusal(model)
    alone = single(tmp_path / "alone")
    (alone / "model.safetensors").unlink()
    (alone / "model.safetensors").symlink_to(other / "model.safetensors")
    assert "leads out of its directory" in refusal(alone)


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.json"])
def test_a4_linked_json_and_side_files_out_of_the_directory_are_refused(tmp_path, name):
    model = sharded(tmp_path / "model")
    secret = tmp_path / "secret"
    secret.write_text(json.dumps(CONFIG))
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(secret)
    assert "leads out of its directory" in refusal(model)


def test_a4_a_symlinked_folder_or_a_loop_does_not_help(tmp_path):
    single(tmp_path / "other")
    model = sharded(tmp_path / "model")
    (model / "sub").symlink_to(tmp_path / "other")
    edit_index(model, lambda index: index["weight_map"].update({"lm_head.weight": "sub/model.safetensors"}))
    assert "leads out of its directory" in refusal(model)
    loop = single(tmp_path / "loop")
    (loop / "model.safetensors").unlink()
    (loop / "model.safetensors").symlink_to("model.safetensors")
    refusal(loop)


def test_a4_links_inside_the_directory_and_a_linked_directory_work(tmp_path):
    model = sharded(tmp_path / "model")
    (model / "store").mkdir()
    shutil.move(model / shard_name(1, 3), model / "store" / "data")
    (model / shard_name(1, 3)).symlink_to(Path("store", "data"))
    (tmp_path / "link").symlink_to(model)
    assert_equals_llama(open_checkpoint(tmp_path / "link"))


def test_a4_hugging_face_cache_links_work_but_only_into_its_blobs(tmp_path):
    repo = tmp_path / "models--org--tiny"
    model = repo / "snapshots" / "abc"
    model.mkdir(parents=True)
    (repo / "blobs").mkdir()
    sharded(model)
    for path in list(model.iterdir()):
        shutil.move(path, repo / "blobs" / f"blob-{path.name}")
        path.symlink_to(Path("..", "..", "blobs", f"blob-{path.name}"))
    checkpoint = open_checkpoint(model)
    assert_equals_llama(checkpoint)
    assert checkpoint.weight_files[0].name == shard_name(1, 3)
    (repo / "refs").mkdir()
    shutil.move(repo / "blobs" / "blob-config.json", repo / "refs" / "config")
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(Path("..", "..", "refs", "config"))
    assert "leads out of its directory" in refusal(model)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_in_a_subfolder_open(tmp_path, suffix):
    write_config(tmp_path)
    (tmp_path / "sub").mkdir()
    tensors, index = llama_tensors(), {".safetensors": INDEX, ".bin": "pytorch_model.bin.index.json"}[suffix]
    (save_file if suffix == ".safetensors" else torch.save)(tensors, tmp_path / "sub" / f"x{suffix}")
    (tmp_path / index).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, f"sub/x{suffix}")}))
    checkpoint = open_checkpoint(tmp_path)
    assert_equals_llama(checkpoint)
    assert checkpoint.notes == checkpoint.side_files == ()


def test_a5_stray_weight_file_beside_the_index_is_noted_and_not_merged(tmp_path):
    sharded(tmp_path)
    save_file({"stray": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert_equals_llama(checkpoint)
    assert checkpoint.notes == (f"model.safetensors: not referenced by {INDEX}, ignored",)
    assert all(path.name != "model.safetensors" for path in (*checkpoint.weight_files, *checkpoint.side_files))


def test_a6_a_dead_index_beside_a_single_file_is_refused(tmp_path):
    sharded(tmp_path)
    for number in (1, 2, 3):
        (tmp_path / shard_name(number, 3)).unlink()
    single(tmp_path)
    assert "if model.safetensors is the model, remove the index" in refusal(tmp_path)


@pytest.mark.parametrize(
    "metadata", ["absent", None, {}, {"total_size": None, "extra": [1]}, "odd", {"total_size": 1.5}]
)
def test_a11_total_size_is_recomputed(tmp_path, metadata):
    sharded(tmp_path)
    edit_index(
        tmp_path, lambda index: index.pop("metadata") if metadata == "absent" else index.update(metadata=metadata)
    )
    checkpoint = open_checkpoint(tmp_path)
    assert_equals_llama(checkpoint)
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in llama_tensors().values())
    assert bool(checkpoint.notes) == (metadata == {"total_size": 1.5})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": null}', "{", "\ufeff{}"),
        '{"weight_map": {}}',
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        '{"metadata": {"total_size": NaN}, "weight_map": {}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_index_is_refused(tmp_path, text):
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(text)
    refusal(tmp_path)


def test_of_several_indexes_the_usual_one_wins_or_none(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model.fp16.safetensors.index.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert_equals_llama(checkpoint)
    assert "model.fp16" in checkpoint.notes[0]
    (tmp_path / INDEX).rename(tmp_path / "other.safetensors.index.json")
    message = refusal(tmp_path)
    assert "other.safetensors.index.json" in message and "model.fp16.safetensors.index.json" in message


# ---- without an index


def test_complete_shards_open_without_an_index(tmp_path):
    assert_equals_llama(open_checkpoint(sharded(tmp_path, index=False)))


def test_shards_numbered_from_zero_open_without_an_index(tmp_path):
    sharded(tmp_path, index=False)
    for number in (1, 2, 3):
        (tmp_path / shard_name(number, 3)).rename(tmp_path / shard_name(number - 1, 3))
    assert_equals_llama(open_checkpoint(tmp_path))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a2_a_gap_in_numbered_shards_without_an_index(tmp_path, number):
    sharded(tmp_path, index=False)
    (tmp_path / shard_name(number, 3)).unlink()
    message = refusal(tmp_path)
    assert "2 of 3 shards" in message and "incomplete download?" in message and f"number {number:05d}" in message


def test_a2_an_absurd_shard_count_costs_nothing(tmp_path):
    single(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-99999999999999999999.safetensors")
    assert "number 00002, 00003, 00004, 00005, 00006, ..." in refusal(tmp_path)


def test_a6_shards_of_two_saves_are_refused(tmp_path):
    sharded(tmp_path, 3, index=False)
    sharded(tmp_path, 2, index=False)
    assert "two different saves" in refusal(tmp_path)


def test_a6_single_file_and_shards_without_an_index_are_refused(tmp_path):
    sharded(tmp_path, index=False)
    single(tmp_path)
    assert "both model.safetensors and numbered shards" in refusal(tmp_path)


def test_files_of_other_names_open_when_their_tensors_differ(tmp_path):
    tensors = llama_tensors()
    write_config(tmp_path)
    save_file({n: t for n, t in tensors.items() if "layers" in n}, tmp_path / "merged_layers.safetensors")
    save_file({n: t for n, t in tensors.items() if "layers" not in n}, tmp_path / "merged_rest.safetensors")
    assert_equals_llama(open_checkpoint(tmp_path))
    save_file({"lm_head.weight": tensors["lm_head.weight"]}, tmp_path / "third.safetensors")
    message = refusal(tmp_path)
    assert "'lm_head.weight'" in message and "merged_rest.safetensors" in message and "third.safetensors" in message


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "adapter_model.safetensors", "optimizer.safetensors", "mtp.safetensors"]
)
def test_a5_other_weight_files_beside_model_safetensors_are_noted(tmp_path, name):
    single(tmp_path)
    save_file({"other": torch.ones(2)}, tmp_path / name)
    checkpoint = open_checkpoint(tmp_path)
    assert_equals_llama(checkpoint)
    assert len(checkpoint.notes) == 1 and name in checkpoint.notes[0]
    assert checkpoint.side_files == ()


def test_a_lora_adapter_is_not_a_model(tmp_path):
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is a LoRA adapter" in refusal(tmp_path)
    write_config(tmp_path)
    assert "is a LoRA adapter" in refusal(tmp_path)


def test_no_weights_lists_what_was_found(tmp_path):
    write_config(tmp_path)
    (tmp_path / "model.gguf").touch()
    single(tmp_path / "checkpoint-500")
    message = refusal(tmp_path)
    assert "config.json, model.gguf" in message and "checkpoint-500" in message
    (tmp_path / "checkpoint-500" / "model.safetensors").unlink()
    save_file({}, tmp_path / "model.safetensors")
    assert "no tensors" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [-100, 30, 0])
def test_a13_truncated_weights_name_the_file(tmp_path, keep):
    path = sharded(tmp_path) / shard_name(2, 3)
    path.write_bytes(path.read_bytes()[:keep])
    message = refusal(tmp_path)
    assert path.name in message and ("truncated" in message or "empty" in message)


# ---- config and side files


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", "null", "{}", '{"model_type": null}', '{"model_type": 3}', '{"model_type": ""}'),
        '{"model_type": "llama", "model_type": "llama"}',
        '{"model_type": "llama", "rope_theta": NaN}',
        '{"model_type": "llama", "rope_theta": -Infinity}',
        '{"model_type": "llama", "rope_theta": 1e400}',
        '{"model_type": "llama", "x": ' + "[" * 100_000,
        "version https://git-lfs.github.com/spec/v1\n",
    ],
)
def test_a_damaged_config_is_refused(tmp_path, text):
    single(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert str(tmp_path / "config.json") in refusal(tmp_path)


def test_a_missing_or_foreign_config_is_refused(tmp_path):
    single(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    assert "UTF-8" in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").mkdir()
    refusal(tmp_path)


def test_json_beyond_its_limit_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('"' + "x" * 100 + '"')
    assert strict_json(path, 102) == "x" * 100
    with pytest.raises(SutureError, match="102 bytes, at most 101"):
        strict_json(path, 101)


def test_a22_every_side_file_travels_and_the_rest_is_noted(tmp_path):
    sharded(tmp_path)
    side = [
        *("generation_config.json", "chat_template.jinja", "chat_template.json", "preprocessor_config.json"),
        *("tokenizer.model", "merges.txt", "modeling_x.py", "LICENSE", ".gitattributes"),
    ]
    left = ["training_args.bin", "optimizer.pt", "model.gguf", "suture.json", ".DS_Store", "flax_model.msgpack"]
    for name in side + left:
        (tmp_path / name).write_text("x")
    (tmp_path / "onnx").mkdir()
    (tmp_path / ".cache").mkdir()
    checkpoint = open_checkpoint(tmp_path)
    assert {path.name for path in checkpoint.side_files} == set(side)
    notes = "\n".join(checkpoint.notes)
    assert all(name in notes for name in ("training_args.bin", "optimizer.pt", "model.gguf", "onnx"))
    assert ".cache" not in notes and INDEX not in notes


def test_a21_an_invalid_generation_config_is_carried_not_judged(tmp_path):
    single(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.9, "do_sample": false, oops')
    assert [path.name for path in open_checkpoint(tmp_path).side_files] == ["generation_config.json"]


# ---- .bin weights


def test_a20_bin_weights_are_read(tmp_path):
    tensors = llama_tensors() | {
        "f8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "columns": torch.randn(5, 3).t(),
        "scalar": torch.tensor(2.0),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    checkpoint = open_checkpoint(torch_bin(tmp_path, tensors))
    assert [path.name for path in checkpoint.weight_files] == ["pytorch_model.bin"]
    assert checkpoint.side_files == ()
    for name, tensor in tensors.items():
        found = checkpoint.read(name)
        assert same_bits(found, tensor.detach()) and found.is_contiguous()
        assert checkpoint.tensors[name].start == -1 and checkpoint.tensors[name].nbytes == tensor.nbytes
        assert checkpoint.read_bytes(name) == found.reshape(-1).view(torch.uint8).numpy().tobytes()
        found.detach().view(-1).view(torch.uint8).zero_()
        assert same_bits(checkpoint.read(name), tensor.detach())
    assert same_bits(checkpoint.read_rows("f8", [2, 0]), tensors["f8"][[2, 0]])
    assert same_bits(checkpoint.read_rows("columns", [2, 2]), tensors["columns"][[2, 2]])


def test_a20_safetensors_is_preferred_and_that_is_said(tmp_path):
    torch_bin(tmp_path, {"other": torch.ones(1)})
    checkpoint = open_checkpoint(single(tmp_path))
    assert_equals_llama(checkpoint)
    assert any("pytorch_model.bin" in note and "safetensors is preferred" in note for note in checkpoint.notes)
    assert checkpoint.side_files == ()


def test_a20_a_pickle_with_code_is_refused_and_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/pwned",))

    torch_bin(tmp_path, {"w": Evil()})
    message = refusal(tmp_path)
    assert "posix.system" in message or "nt.system" in message
    assert "nothing of it was run" in message
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("version", ["2.5.1", "1.13.0+cu117", "unknown"])
def test_a20_old_torch_is_refused(tmp_path, monkeypatch, version):
    torch_bin(tmp_path)
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(SutureError, match="CVE-2025-32434") as caught:
        open_checkpoint(tmp_path)
    assert version in str(caught.value)


def legacy(path):
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def compressed(path):
    torch.save({"w": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


def cut(path):
    torch.save({"w": torch.ones(2)}, path)
    path.write_bytes(path.read_bytes()[:-40])


def foreign_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "x")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (legacy, "zip format"),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "zip format"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (compressed, "compressed"),
        (cut, "damaged or truncated"),
        (foreign_zip, "cannot be loaded"),
        (lambda path: torch.save([torch.ones(1)], path), "holds a list"),
        (lambda path: torch.save({"state_dict": {"w": torch.ones(1)}}, path), "'state_dict' holds a dict"),
        (lambda path: torch.save({1: torch.ones(1)}, path), "a tensor was expected"),
        (lambda path: torch.save({"w": torch.ones(2, 2).to_sparse()}, path), "not a plain dense tensor"),
        (lambda path: torch.save({"w": torch.ones(2, device="meta")}, path), "not a plain dense tensor"),
        (lambda path: torch.save({"w": torch.ones(1).expand(10**12)}, path), "more elements than are stored"),
        (lambda path: torch.save({"w": torch.ones(1, dtype=torch.complex128)}, path), "'w'"),
        (lambda path: torch.save({}, path), "no tensors"),
    ],
)
def test_a20_other_bin_files_are_refused_with_the_reason(tmp_path, make, reason):
    torch_bin(tmp_path)
    make(tmp_path / "pytorch_model.bin")
    assert reason in refusal(tmp_path)


def sharded_bin(directory):
    tensors = llama_tensors()
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:]), 1):
        torch_bin(directory, {name: tensors[name] for name in part}, f"pytorch_model-{number:05d}-of-00002.bin")
    return {name: f"pytorch_model-{1 + (name in names[5:]):05d}-of-00002.bin" for name in names}


def test_a20_bin_shards_open_with_and_without_an_index(tmp_path):
    weight_map = sharded_bin(tmp_path)
    assert_equals_llama(open_checkpoint(tmp_path))
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_equals_llama(open_checkpoint(tmp_path))
    index.write_text(json.dumps({"weight_map": weight_map | {"absent": "pytorch_model-00002-of-00002.bin"}}))
    assert "lacks tensor 'absent'" in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {"absent": "../pytorch_model.bin"}}))
    assert "weight_map names the file" in refusal(tmp_path)
    index.unlink()
    torch_bin(tmp_path)
    assert "both pytorch_model.bin and numbered shards" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "pytorch_model-00001-of-00002.bin").unlink()
    assert "1 of 2 shards" in refusal(tmp_path)


def test_a4_a_bin_linked_from_elsewhere_is_not_opened(tmp_path, monkeypatch):
    torch_bin(tmp_path / "other")
    model = torch_bin(tmp_path / "model")
    (model / "pytorch_model.bin").unlink()
    (model / "pytorch_model.bin").symlink_to(tmp_path / "other" / "pytorch_model.bin")
    monkeypatch.setattr(torchbin, "load_bin", lambda path: pytest.fail(f"opened {path}"))
    assert "leads out of its directory" in refusal(model)


# ---- quantized input


@pytest.mark.parametrize("nest", [None, "text_config", "llm_config"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_i8_quantization_is_taken_from_the_config(tmp_path, nest, key):
    single(tmp_path)
    declared = {"quant_method": "gptq", "bits": 4}
    write_config(tmp_path, **({nest: {key: declared}} if nest else {key: declared}))
    assert open_checkpoint(tmp_path).quantization == declared


@pytest.mark.parametrize(
    ("names", "method"),
    [
        (("q_proj.qweight", "q_proj.qzeros", "q_proj.scales", "q_proj.g_idx"), "gptq"),
        (("q_proj.qweight", "q_proj.qzeros", "q_proj.scales"), "awq"),
        (("q_proj.weight_packed", "q_proj.weight_scale"), "compressed-tensors"),
        (("q_proj.weight", "q_proj.weight.absmax", "q_proj.weight.quant_state.bitsandbytes__nf4"), "bitsandbytes"),
        (("q_proj.weight.quant_state.bitsandbytes__nf4",), "bitsandbytes"),
        (("q_proj.weight", "q_proj.weight_scale_inv"), "fp8"),
        (("mlp.experts.gate_up_proj_blocks", "mlp.experts.gate_up_proj_scales"), "mxfp4"),
    ],
)
def test_i8_quantization_is_detected_from_tensors(tmp_path, names, method):
    tensors = llama_tensors() | {f"model.layers.0.self_attn.{name}": torch.ones(2, 2) for name in names}
    checkpoint = open_checkpoint(single(tmp_path, tensors))
    assert checkpoint.quantization == {"quant_method": method, "detected": "tensors"}


def test_i8_integer_or_float8_weights_count_as_quantized(tmp_path):
    tensors = llama_tensors() | {"lm_head.weight": torch.ones(320, 64).to(torch.float8_e4m3fn)}
    assert open_checkpoint(single(tmp_path, tensors)).quantization["quant_method"] == "F8_E4M3 weights"


def test_i8_a_plain_model_is_not_quantized(tmp_path):
    tensors = llama_tensors() | {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8)}
    single(tmp_path, tensors)
    write_config(tmp_path, quantization_config=None)
    assert open_checkpoint(tmp_path).quantization is None


# ---- anything else


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory):
    """A minimal sharded checkpoint, as its files' bytes."""
    directory = tmp_path_factory.mktemp("two")
    (directory / "config.json").write_text('{"model_type": "llama"}')
    weight_map = {}
    for number in (1, 2):
        tensors = {f"w{number}": torch.ones(2, 3), f"b{number}": torch.ones(2, dtype=torch.bfloat16)}
        save_file(tensors, directory / shard_name(number, 2))
        weight_map |= dict.fromkeys(tensors, shard_name(number, 2))
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 56}, "weight_map": weight_map}))
    return {path.name: path.read_bytes() for path in directory.iterdir()}


FILES = ["config.json", INDEX, shard_name(1, 2), shard_name(2, 2)]
JSON_WORDS = [
    b"null",
    b"-1",
    b"[]",
    b"{}",
    b"NaN",
    b"1e999",
    b'"w1"',
    b"99999999999999999999",
    b"true",
    b'"F8_E4M3"',
    b"\xff",
]
edits = st.tuples(
    st.sampled_from(FILES),
    st.sampled_from(["flip", "cut", "insert", "replace", "remove", "swap"]),
    st.integers(0, 400),
    st.integers(1, 255),
    st.sampled_from([*JSON_WORDS, b"x", b"../", b"safetensors", b" "]),
)


def mutate(content, kind, at, value, word):
    at %= max(len(content), 1)
    if kind == "flip" and content:
        return content[:at] + bytes([content[at] ^ value]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + word + content[at:]
    end = next((i for i in range(at, len(content)) if content[i] in b",:]}"), len(content))
    start = next((i for i in range(at, -1, -1) if i < len(content) and content[i] in b",:[{"), -1) + 1
    return content[:start] + word + content[end:]


@given(edits=st.lists(edits, min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_any_mutated_checkpoint_is_refused_or_valid(tmp_path_factory, two_shards, edits):
    directory = tmp_path_factory.getbasetemp() / "mutated"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    files = dict(two_shards)
    for name, kind, at, value, word in edits:
        if name not in files:
            continue
        if kind == "remove":
            del files[name]
        elif kind == "swap":
            files[name] = files.get(FILES[at % len(FILES)], b"")
        else:
            files[name] = mutate(files[name], kind, at, value, word)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    try:
        checkpoint = open_checkpoint(directory)
    except SutureError:
        return
    assert isinstance(checkpoint, Checkpoint)
    for name, info in checkpoint.tensors.items():
        tensor = checkpoint.read(name)
        assert tuple(tensor.shape) == info.shape and tensor.nbytes == info.nbytes
