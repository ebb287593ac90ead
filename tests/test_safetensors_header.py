"""Safetensors headers: what is accepted agrees with the safetensors library, what is not is named."""

import json
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from suture.checkpoint import SutureError
from suture.checkpoint.header import DTYPES, TensorInfo, code_of, read_header, read_range, read_ranges, torch_dtype_of


def safetensors_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write(directory, header, data=b""):
    path = directory / "x.safetensors"
    path.write_bytes(safetensors_bytes(header, data))
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refusal(path):
    with pytest.raises(SutureError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_every_tensor_is_where_the_library_reads_it(tmp_path):
    path = tmp_path / "m.safetensors"
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert {n: i.shape for n, i in header.tensors.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    for name, tensor in load_file(path).items():
        info = header.tensors[name]
        assert info.numel == tensor.numel()
        assert read_range(info.file, info.start, info.nbytes) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_dtype_code_and_its_torch_dtype_are_inverse():
    for code, dtype in DTYPES.items():
        if dtype.torch_name:
            assert code_of(getattr(torch, dtype.torch_name)) == code
            assert getattr(torch, dtype.torch_name).itemsize * 8 == dtype.bits
    with pytest.raises(SutureError, match="complex128"):
        code_of(torch.complex128)


@pytest.mark.parametrize("metadata", ["absent", {}, None, {"format": "pt", "note": "é"}])
def test_a12_metadata_absent_or_empty(tmp_path, metadata):
    header = {"x": entry()} if metadata == "absent" else {"__metadata__": metadata, "x": entry()}
    parsed = read_header(write(tmp_path, header, b"abcd"))
    assert parsed.metadata == (metadata if isinstance(metadata, dict) else {})
    assert list(parsed.tensors) == ["x"]


def test_a13_truncated_data_names_expected_and_actual_size(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(100)}, path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(path)
    assert "truncated" in message and f"{size:,}" in message and f"{size - 100:,}" in message and "again" in message


@pytest.mark.parametrize("keep", [1, 7, 8, 9, 40])
def test_a13_cut_inside_the_header(tmp_path, keep):
    path = write(tmp_path, {"x": entry()}, b"abcd")
    path.write_bytes(path.read_bytes()[:keep])
    assert "truncated inside its header" in refusal(path)


def test_a13_empty_file(tmp_path):
    path = tmp_path / "m.safetensors"
    path.touch()
    assert "is empty" in refusal(path)


def test_a13_git_lfs_pointer(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    assert "git lfs pull" in refusal(path)


@pytest.mark.parametrize(
    "content", [b"<!DOCTYPE html><html>", b"PK\x03\x04" + bytes(80), b"version 1.0 of something else"]
)
def test_a13_another_kind_of_file(tmp_path, content):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    refusal(path)


def test_a15_trailing_bytes(tmp_path):
    path = write(tmp_path, {"x": entry()}, b"abcde")
    assert "1 bytes after its last tensor" in refusal(path)


def test_a17_unknown_dtype_names_dtype_and_tensor(tmp_path):
    message = refusal(write(tmp_path, {"w.q": entry("F8_E4M4")}, b"abcd"))
    assert "'F8_E4M4'" in message and "'w.q'" in message and "did you mean 'F8_E4M3'" in message


def test_a17_packed_four_bit_floats_are_bytes_only(tmp_path):
    path = write(tmp_path, {"w": entry("F4", (3, 2), (0, 3))}, b"abc")
    info = read_header(path).tensors["w"]
    assert (info.nbytes, info.numel) == (3, 6)
    assert read_range(path, info.start, info.nbytes) == b"abc"
    with pytest.raises(SutureError, match="F4"):
        torch_dtype_of(info)
    assert "whole bytes" in refusal(write(tmp_path, {"w": entry("F4", (3,), (0, 1))}, b"a"))


HUGE = 2**62
REFUSED = {
    "not an object": b"[]",
    "not JSON": b"{,}",
    "not UTF-8": b'{"\xff":1}',
    "half a surrogate": b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    "deeply nested": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many digits": b'{"x":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}',
    "duplicate tensor": b"{" + b",".join([b'"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'] * 2) + b"}",
    "duplicate inner key": b'{"x":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    "NaN": b'{"x":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}',
    "Infinity": b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,Infinity]}}',
    "1e999": b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1e999]}}',
    "metadata not texts": {"__metadata__": {"a": 1}},
    "metadata not an object": {"__metadata__": []},
    "entry not an object": {"x": [1]},
    "no shape": {"x": {"dtype": "U8", "data_offsets": [0, 1]}},
    "unknown field": {"x": {**entry("U8", (1,), (0, 1)), "strides": [1]}},
    "dtype not a text": {"x": {**entry(), "dtype": ["F32"]}},
    "negative shape": {"x": entry("F32", (-1, -1), (0, 4))},
    "true as size": {"x": entry("F32", (True,), (0, 4))},
    "fraction as size": {"x": entry("F32", (1.0,), (0, 4))},
    "shape not a list": {"x": {**entry(), "shape": 1}},
    "huge shape": {"x": entry("F32", (HUGE, HUGE), (0, 4))},
    "huge and empty shape": {"x": entry("F32", (HUGE, HUGE, 0), (0, 0))},
    "shape wraps to 4 bytes": {"x": entry("U8", (2**32, 2**32 + 1), (0, 4))},
    "huge offset": {"x": entry("U8", (2**61,), (0, 2**61))},
    "three offsets": {"x": entry("F32", (1,), (0, 2, 4))},
    "negative offset": {"x": entry("F32", (1,), (-4, 0))},
    "end before begin": {"x": entry("F32", (0,), (4, 0))},
    "offsets do not fit the shape": {"x": entry("F32", (2,), (0, 4))},
    "hole at the start": {"x": entry("U8", (2,), (2, 4))},
    "hole between": {"x": entry("U8", (1,), (0, 1)), "y": entry("U8", (2,), (2, 4))},
    "overlap": {"x": entry("U8", (3,), (0, 3)), "y": entry("U8", (2,), (2, 4))},
    "same place": {"x": entry("F32"), "y": entry("F32")},
}


@pytest.mark.parametrize("header", REFUSED.values(), ids=REFUSED)
def test_inconsistent_headers_are_refused(tmp_path, header):
    refusal(write(tmp_path, header, b"abcd"))


def test_a_header_length_beyond_the_file_allocates_nothing(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert "not a safetensors file" in refusal(path)
    path.write_bytes(struct.pack("<Q", 99_000_000) + b"{}")
    assert "truncated" in refusal(path)


def test_a_directory_and_a_missing_file(tmp_path):
    assert "is a directory" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "none.safetensors")
    link = tmp_path / "link.safetensors"
    link.symlink_to(tmp_path / "none")
    assert "broken link" in refusal(link)


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path):
    path = write(tmp_path, {"x": entry()}, b"abcd")
    info = read_header(path).tensors["x"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SutureError, match="truncated or changed") as caught:
        read_range(info.file, info.start, info.nbytes)
    assert str(path) in str(caught.value)


def test_ranges_come_one_after_the_other(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(100)))
    assert read_ranges(path, [(90, 3), (5, 0), (10, 2)]) == bytearray([90, 91, 92, 10, 11])
    assert read_ranges(path, []) == bytearray()


json_values = (
    st.none()
    | st.booleans()
    | st.sampled_from(
        [-1, 0, 3, 2**31, 2**63, 2**70, 0.5, 1.0, "F32", "x", "é", [], [1], [-1], [True], {}, {"a": "b"}, {"a": 1}]
    )
)


@st.composite
def layouts(draw):
    """A consistent header and its data, then at most two things changed: a field, a name, or the data's length."""
    header, position = {}, 0
    for name in draw(st.permutations(["a", "b", "c", ""]))[: draw(st.integers(0, 4))]:
        code = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3)) + [2] * (DTYPES[code].bits == 4)
        nbytes = math.prod(shape) * DTYPES[code].bits // 8
        header[name] = entry(code, shape, (position, position + nbytes))
        position += nbytes
    data = bytes(position)
    for change in draw(st.lists(st.sampled_from(["dtype", "shape", "data_offsets", "metadata", "data"]), max_size=2)):
        if change == "data":
            data = data[: draw(st.integers(0, position))] + draw(st.binary(max_size=2))
        elif change == "metadata":
            header["__metadata__"] = draw(json_values)
        elif header:
            name = draw(st.sampled_from(sorted(header)))
            if isinstance(header[name], dict) and "dtype" in header[name]:
                header[name][change] = draw(json_values)
    return header, data


@given(layout=layouts(), flip=st.none() | st.tuples(st.integers(0, 200), st.integers(1, 255)))
@settings(max_examples=200, deadline=None)
def test_any_header_is_refused_or_accepted_as_the_library_does(tmp_path_factory, layout, flip):
    content = bytearray(safetensors_bytes(*layout))
    if flip and flip[0] < len(content):
        content[flip[0]] ^= flip[1]
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    path.write_bytes(content)
    try:
        found = read_header(path).tensors
    except SutureError:
        return
    assert all(isinstance(info, TensorInfo) for info in found.values())
    with safe_open(path, "pt") as theirs:
        assert {name: tuple(theirs.get_slice(name).get_shape()) for name in theirs.keys()} == {  # noqa: SIM118
            name: info.shape for name, info in found.items()
        }
