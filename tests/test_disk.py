"""What other systems lack is taken away here: files come out the same. And text is UTF-8 wherever it is opened."""

import ast
import errno
import os
import subprocess
import sys
from pathlib import Path

import kit
import pytest
import tiny
import warm

from suture.checkpoint import disk

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("builtin", "calibrate", "checkpoint", "cli", "docs", "lora", "pipeline", "quant", "report", "surgery")


@pytest.mark.parametrize("missing", [("posix_fallocate",), ("posix_fallocate", "pwrite", "symlink")])
def test_a_run_without_calls_that_linux_has_writes_the_same_bytes(tmp_path, monkeypatch, missing):
    """macOS has no posix_fallocate; Windows no pwrite either, and links are refused to most users there."""
    model = tiny.llama(tmp_path / "model", layers=2, shard="40KB")
    kit.quantize(model, tmp_path / "here", group_size=32)
    for name in missing:
        if name == "symlink":
            monkeypatch.setattr(os, name, refuse)
        else:
            monkeypatch.delattr(os, name)
    kit.quantize(model, tmp_path / "there", group_size=32)
    assert tiny.contents(tmp_path / "here") == tiny.contents(tmp_path / "there")


def refuse(*_):
    raise OSError(errno.EPERM, "a privilege is not held by the client")


def test_room_is_looked_at_where_it_cannot_be_reserved(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    fd = disk.open_for_writing(tmp_path / "file")
    try:
        with pytest.raises(OSError, match="space") as caught:
            disk.reserve(fd, 1 << 60, tmp_path)
        assert caught.value.errno == errno.ENOSPC and os.fstat(fd).st_size == 0
    finally:
        os.close(fd)


def test_a_second_name_is_a_link_or_the_same_bytes(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"a\nb")
    disk.link_or_copy(tmp_path / "file", tmp_path / "soft")
    monkeypatch.setattr(os, "symlink", refuse)
    disk.link_or_copy(tmp_path / "file", tmp_path / "hard")
    monkeypatch.setattr(os, "link", refuse)
    disk.link_or_copy(tmp_path / "file", tmp_path / "copy")
    kinds = {name: (tmp_path / name) for name in ("soft", "hard", "copy")}
    assert all(path.read_bytes() == b"a\nb" for path in kinds.values())
    assert kinds["soft"].is_symlink() and kinds["hard"].samefile(tmp_path / "file")
    assert not kinds["copy"].samefile(tmp_path / "file")


def text_without_encoding(tree):
    """Lines of calls that open text, or a process's, in whatever encoding the system has."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if "encoding" in given or None in given:
            continue
        constants = [one.value for one in (*call.args, given.get("mode")) if isinstance(one, ast.Constant)]
        modes = [one for one in constants if isinstance(one, str) and one and set(one) <= set("rwxabt+")]
        owner = getattr(getattr(call.func, "value", None), "id", "")
        opens = name in ("open", "TemporaryFile", "NamedTemporaryFile") and owner not in ("os", "Image")
        binary = any("b" in mode for mode in modes) or (name != "open" and not modes)  # temporary files are binary
        if (opens and not binary) or name in ("read_text", "write_text"):
            yield call.lineno
        if any(getattr(given.get(key), "value", None) is True for key in ("text", "universal_newlines")):
            yield call.lineno


def test_every_text_is_opened_with_its_encoding():
    assert (
        list(text_without_encoding(ast.parse("open(f, 'w'); p.open('rb'); p.read_text(); run(c, text=True)")))
        == [1] * 3
    )
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in PACKAGES
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in text_without_encoding(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


def test_what_is_redirected_is_utf8_whatever_the_locale(tmp_path):
    """As on Windows, whose pipes have the system's code page."""
    environment = {k: v for k, v in warm.environment().items() if k not in ("PYTHONIOENCODING", "PYTHONUTF8")}
    code = "import sys; sys.stdout.reconfigure(encoding='cp1252'); from suture.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "steps", "heal"], capture_output=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "┃" in done.stdout.decode("utf-8") or "│" in done.stdout.decode("utf-8")
