"""Where a checkpoint's name leads: a directory, a builtin, a cached Hub id; never to the network unasked."""

import json
import socket
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file

from suture.checkpoint import SutureError, open_checkpoint
from suture.checkpoint.resolve import resolve_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD_COMMIT = "f" * 40


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A Hugging Face cache with org/tiny at two commits, as huggingface_hub lays it out."""
    hub = tmp_path / "hub"
    repo = hub / "models--org--tiny"
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for commit, value in ((COMMIT, 1.0), (OLD_COMMIT, 2.0)):
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        save_file({"w": torch.full((2,), value)}, repo / "blobs" / f"w{commit}")
        (repo / "blobs" / f"c{commit}").write_text(json.dumps({"model_type": "llama"}))
        for name, blob in (("model.safetensors", "w"), ("config.json", "c"), ("generation_config.json", "c")):
            (snapshot / name).symlink_to(Path("..", "..", "blobs", blob + commit))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    return hub


def refusal(*args, **kwargs):
    with pytest.raises(SutureError) as caught:
        resolve_source(*args, **kwargs)
    return str(caught.value)


def test_a_directory_is_itself(tmp_path, monkeypatch):
    assert resolve_source(tmp_path).path == tmp_path
    assert resolve_source(str(tmp_path)).source == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert resolve_source("org/tiny").path.resolve() == tmp_path / "org" / "tiny"  # before any cache
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_source("~/org").path == tmp_path / "org"


def test_builtin_tiny_opens():
    checkpoint = open_checkpoint("builtin:tiny")
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.source == "builtin:tiny"
    assert checkpoint.read("lm_head.weight").shape == (
        checkpoint.config["vocab_size"],
        checkpoint.config["hidden_size"],
    )


@pytest.mark.parametrize("name", ["builtin:tinny", "builtin:", "builtin:../tiny", "builtin:novels.jsonl"])
def test_an_unknown_builtin_is_refused_with_the_names(name):
    assert "there is: tiny" in refusal(name)
    assert "did you mean 'tiny'" in refusal("builtin:tinny")


@pytest.mark.parametrize(
    "text",
    ["/no/such", "./no/such", "../no", "~/no/such/model", "a/b/c", "no\\such", "out/", "m.safetensors", "x.gguf"],
)
def test_i5_a_missing_path_is_never_a_hub_id(text, cache, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the Hub"))
    message = refusal(text, download=True)
    assert "no such directory" in message and "network" in message


def test_i5_a_path_object_is_never_a_hub_id(cache):
    assert "no such directory" in refusal(Path("org/tiny"))


def test_i5_a_mistyped_path_names_its_neighbour(tmp_path):
    (tmp_path / "checkpoint-10").mkdir()
    assert "did you mean 'checkpoint-10'" in refusal(str(tmp_path / "chekpoint-10" / "model"))


def test_a_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    assert "is not a directory" in refusal(path)


@pytest.mark.parametrize("text", ["", "  ", "a\0b", "hf:org/name", "org/na me", "-x", "x" * 5000, "~nobodyhere/x"])
def test_nonsense_is_refused_with_the_possible_forms(text):
    assert "builtin:tiny" in refusal(text)


def test_an_address_is_answered_with_its_id():
    assert "give the id alone: org/name" in refusal("https://huggingface.co/org/name")


def test_i5_a_cached_model_opens_offline(cache):
    checkpoint = open_checkpoint("org/tiny")
    assert checkpoint.revision == COMMIT
    assert checkpoint.read("w").tolist() == [1.0, 1.0]
    assert [path.name for path in checkpoint.side_files] == ["generation_config.json"]
    assert open_checkpoint("org/tiny", revision=OLD_COMMIT).read("w").tolist() == [2.0, 2.0]


def test_i5_not_cached_says_what_was_tried_and_how_to_allow_the_network(cache):
    message = refusal("org/other")
    assert "no such directory" in message and str(cache) in message and "--download" in message
    assert "at revision v2" in refusal("org/tiny", revision="v2")
    assert "no model gpt2" in refusal("gpt2")


def test_a2_a_cached_snapshot_without_config_is_incomplete(cache):
    (cache / "models--org--tiny" / "snapshots" / COMMIT / "config.json").unlink()
    assert "without config.json" in refusal("org/tiny")


def test_a2_a_blob_missing_from_the_cache_is_named(cache):
    (cache / "models--org--tiny" / "blobs" / f"w{COMMIT}").unlink()
    with pytest.raises(SutureError, match=r"model\.safetensors is a broken link"):
        open_checkpoint("org/tiny")


def test_download_asks_for_safetensors_first_and_bin_only_without_them(cache, monkeypatch):
    calls = []

    def fake(repo_id, **kwargs):
        calls.append(kwargs)
        return str(cache / "models--org--tiny" / "snapshots" / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert resolve_source("org/tiny", download=True, revision="main").revision == COMMIT
    assert len(calls) == 1 and calls[0]["revision"] == "main" and "local_files_only" not in calls[0]
    assert not any("bin" in pattern for pattern in calls[0]["allow_patterns"])
    (cache / "models--org--tiny" / "snapshots" / COMMIT / "model.safetensors").unlink()
    resolve_source("org/tiny", download=True)
    assert calls[-1]["revision"] == COMMIT and "pytorch_model.bin" in calls[-1]["allow_patterns"]


def test_a_failing_download_is_one_clear_error(cache, monkeypatch):
    def fail(repo_id, **kwargs):
        raise ConnectionError("host is\nunreachable")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = refusal("org/other", download=True)
    assert "org/other could not be downloaded: ConnectionError: host is unreachable" in message


def test_a_revision_of_a_directory_is_refused(tmp_path):
    assert "revision 'v1'" in refusal(tmp_path, revision="v1")
