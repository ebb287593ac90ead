"""Files from strangers: whatever is wrong with them, the answer is one sentence, and nothing else happens.

Every file kind is mutated from a valid one: bytes flipped, cut, repeated or spliced, JSON values replaced by what
attackers and broken writers put there. Each mutated input must open, or end in a SutureError; no other exception, no
file opened outside the given directory, no memory out of proportion, nothing run. `-m fuzz` runs 20,000 of each kind,
and where atheris is installed lets it choose what to mutate on by the code that was reached.
"""

import json
import random
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file

from suture.calibrate.skeleton import open_skeleton
from suture.calibrate.tokens import load_tokenizer
from suture.checkpoint.errors import SutureError
from suture.checkpoint.manifest import read_manifest
from suture.checkpoint.reader import open_checkpoint
from suture.lora.adapter import open_adapter
from suture.pipeline.recipe import load_recipe

BUILTIN_TINY = files("suture") / "builtin/tiny"
FEW, MANY, GUIDED = 60, 20_000, 2_000
MEGABYTES = 64  # for inputs of some kilobytes
VALUES = (
    *("NaN", "Infinity", "-Infinity", "-1", "0", "1e400", "18446744073709551616", "9223372036854775807", "1.5", "true"),
    *('"x"', '""', "null", "[]", "{}", "[[[[[[[[]]]]]]]]", '"../../../etc/passwd"', '"/etc/passwd"', '"C:\\\\Windows"'),
    *(
        '"\\u0000"',
        '"a/../../b.safetensors"',
        '"NUL"',
        '"model.safetensors\\n"',
        '"\\ud800"',
        "[4294967296, 4294967296]",
    ),
    *(
        '"llama"',
        '"float64"',
        '"F8_E4M3"',
        "1000000000",
        '{"__class__": "os.system"}',
        '"!!python/object/apply:os.system"',
    ),
)


class Watch:
    """What files are opened while it looks, by Python's audit events."""

    def __init__(self):
        self.allowed, self.outside = None, []
        sys.addaudithook(self._see)

    def _see(self, event, arguments):
        if self.allowed is None:
            return
        if event in ("open", "os.remove", "os.rename", "os.mkdir", "os.symlink", "shutil.rmtree"):
            path = arguments[0]
            if isinstance(path, (str, bytes)):
                found = str(Path(path.decode() if isinstance(path, bytes) else path).resolve())
                if not found.startswith(self.allowed):
                    self.outside.append((event, found))
        elif event in ("subprocess.Popen", "os.system", "os.exec", "socket.connect"):
            self.outside.append((event, str(arguments)[:200]))


WATCH = Watch()
LIBRARIES = tuple(str(Path(p).resolve()) for p in {sys.prefix, sys.base_prefix, *map(str, map(Path, sys.path))} if p)
SYSTEM = ("/proc/", "/sys/", "/dev/null", "/usr/share/zoneinfo", str(Path(__file__).resolve().parents[1]))


def mutated(raw: bytes, draw: random.Random) -> bytes:
    """One to three changes."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(raw)) if raw else 0
        kind = draw.randrange(7)
        if kind == 0:
            raw = raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :]
        elif kind == 1:
            raw = raw[:at] + raw[at + draw.randint(1, 40) :]
        elif kind == 2:
            raw = raw[:at]
        elif kind == 3:
            piece = raw[at : at + draw.randint(1, 200)]
            raw = raw[:at] + piece * draw.randint(2, 5) + raw[at:]
        elif kind == 4:
            raw = raw[:at] + draw.choice(VALUES).encode() + raw[at:]
        else:
            raw = _value_replaced(raw, draw)
    return raw


def _value_replaced(raw: bytes, draw: random.Random) -> bytes:
    """A value or a key of JSON-like text for another."""
    places = list(re.finditer(rb'"[^"]{0,60}"|-?\d+(?:\.\d+)?|true|false|null', raw))
    if not places:
        return raw
    place = draw.choice(places)
    return raw[: place.start()] + draw.choice(VALUES).encode() + raw[place.end() :]


def with_header(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def split_header(raw: bytes) -> tuple[bytes, bytes]:
    size = struct.unpack("<Q", raw[:8])[0]
    return raw[8 : 8 + size], raw[8 + size :]


def open_and_read(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    for name in list(checkpoint.tensors)[:4]:
        checkpoint.read(name)
    open_skeleton(checkpoint)


def tokenized(directory: Path) -> None:
    load_tokenizer(directory).encode("a b")


def opened_adapter(directory: Path) -> None:
    adapter = open_adapter(directory)
    for part in adapter.parts[:4]:
        adapter.config.scale(part.path)


KINDS = {
    "header": ("one/model.safetensors", open_and_read),
    "config": ("one/config.json", open_and_read),
    "index": ("many/model.safetensors.index.json", open_and_read),
    "adapter config": ("adapter/adapter_config.json", opened_adapter),
    "adapter header": ("adapter/adapter_model.safetensors", opened_adapter),
    "recipe": ("recipe/recipe.yaml", lambda directory: load_recipe(directory / "recipe.yaml")),
    "manifest": ("output/suture.json", read_manifest),
    "tokenizer": ("tokenizer/tokenizer.json", tokenized),
    "tokenizer config": ("tokenizer/tokenizer_config.json", tokenized),
}


def write_valid(root: Path) -> Path:
    """A valid input of every kind."""
    tiny.llama(root / "one", layers=1)
    tiny.llama(root / "many", layers=1, shard="20KB")
    (root / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"]}
    config |= {"task_type": "CAUSAL_LM", "bias": "none", "rank_pattern": {"q_proj": 2}, "use_rslora": False}
    (root / "adapter/adapter_config.json").write_text(json.dumps(config, indent=1))
    tensors = {}
    for module, r in (("q_proj", 2), ("v_proj", 4)):
        prefix = f"base_model.model.model.layers.0.self_attn.{module}"
        tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = torch.ones(r, 64), torch.ones(64, r)
    save_file(tensors, root / "adapter/adapter_model.safetensors", metadata={"format": "pt"})
    (root / "recipe").mkdir()
    (root / "recipe/recipe.yaml").write_text(
        "model: builtin:tiny\ncalibration: {data: builtin:novels, samples: 4, length: 64}\nsteps:\n"
        "  - gqa: {kv_heads: 4}\n  - gptq: {bits: 4, group_size: 64, rules: [{match: down_proj, bits: 8}]}\n"
        "report: {data: builtin:holmes, window: 512}\noutput: out\n"
    )
    shutil.copytree(BUILTIN_TINY, root / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    _without_merges(root / "tokenizer/tokenizer.json")
    (root / "output").mkdir()
    manifest = {"suture": "1", "tensors": {"a": {"action": "copied", "to": ["a"]}}, "modules": {}, "files": {}}
    (root / "output/suture.json").write_text(json.dumps(manifest))
    return root


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    return write_valid(tmp_path_factory.mktemp("attacked"))


def _without_merges(file: Path) -> None:
    """Only a few of the vocabulary's merges: mutations then hit everything else as well, and loading is quick."""
    content = json.loads(file.read_text())
    kept = content["model"]["merges"][:40]
    made = {"".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in kept}
    letters = {token for token in content["model"]["vocab"] if len(token) == 1}
    added = {entry["content"] for entry in content["added_tokens"]}
    vocabulary = [token for token in content["model"]["vocab"] if token in made | letters | added]
    content["model"] |= {"merges": kept, "vocab": {token: i for i, token in enumerate(vocabulary)}}
    for entry in content["added_tokens"]:
        entry["id"] = content["model"]["vocab"].get(entry["content"], len(vocabulary))
    file.write_text(json.dumps(content))


def mutated_file(original: bytes, suffix: str, draw: random.Random) -> bytes:
    """A mutated file; of one with a header mostly the header, whose length then fits."""
    if suffix != ".safetensors" or len(original) < 8 or draw.random() >= 0.8:
        return mutated(original, draw)
    header, data = split_header(original)
    return with_header(mutated(header, draw), data)


def attack(valid: Path, kind: str, count: int, seed: int = 0) -> None:
    where, opener = KINDS[kind]
    file = valid / where
    original = file.read_bytes()
    for number in range(count):
        draw = random.Random(f"{kind} {seed} {number}")
        file.write_bytes(mutated_file(original, file.suffix, draw))
        try:
            one(opener, file.parent, f"{kind} {seed} {number}")
        finally:
            file.write_bytes(original)


def one(opener, directory: Path, label: str) -> None:
    WATCH.allowed = (str(directory.resolve()), *LIBRARIES, *SYSTEM)
    WATCH.outside.clear()
    tracemalloc.start()
    try:
        opener(directory)
    except SutureError as error:
        assert str(error).strip() and "\n" not in str(error), f"{label}: {error!r}"
    except Exception as error:
        raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error
    finally:
        WATCH.allowed = None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert not WATCH.outside, f"{label}: {WATCH.outside[:3]}"
    assert peak < MEGABYTES << 20, f"{label}: {peak >> 20} MB"


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_opens_or_is_refused_in_one_sentence(valid, kind):
    attack(valid, kind, FEW)


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_thousand_mutated_files(valid, kind):
    attack(valid, kind, MANY, seed=1)


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
def test_mutations_that_reach_new_code_are_mutated_on(kind, tmp_path):
    """Coverage-guided, by atheris, in a process of its own, which ends at the first input that breaks a promise."""
    pytest.importorskip("atheris", reason="needs atheris: pip install atheris")
    command = [sys.executable, str(Path(__file__).with_name("guided.py")), kind, str(tmp_path), str(GUIDED)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    assert done.returncode == 0 and f"Done {GUIDED} runs" in done.stderr, done.stderr[-3000:]


def test_the_watch_sees_what_it_must(tmp_path):
    """Otherwise the tests above could not fail."""
    (tmp_path / "in").mkdir()
    secret = tmp_path / "secret"
    secret.write_text("x")
    with pytest.raises(AssertionError, match="secret"):
        one(lambda directory: (directory / "../secret").read_text(), tmp_path / "in", "read outside")
    with pytest.raises(AssertionError, match="KeyError"):
        one(lambda directory: {}["x"], tmp_path / "in", "crash")
    with pytest.raises(AssertionError, match="MB"):
        one(lambda directory: bytearray(MEGABYTES + 1 << 20), tmp_path / "in", "bomb")


BOMBS = {
    "aliases of aliases": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)),
    "an alias inside itself": "steps: &a [{rtn: {targets: *a}}]\n",
    "brackets in brackets": f"model: {'[' * 50_000}\n",
    "a long file": f"model: {'x' * 2_000_000}\n",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_recipe_that_unfolds_is_refused_at_once(tmp_path, name):
    """A few lines that stand for 10 ** 12 values, or that take a parser's time or stack."""
    (tmp_path / "recipe.yaml").write_text(BOMBS[name])

    def load(directory):
        with pytest.raises(SutureError):
            load_recipe(directory / "recipe.yaml")

    one(load, tmp_path, name)


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path):
    """256 MB of zeros in a file of 260 kB: .bin files are zip archives, whose entries torch stores plainly."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    entries = {"model/data.pkl": b"", "model/data/0": bytes(256 << 20)}
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    del entries

    def load(directory):
        with pytest.raises(SutureError, match="compressed"):
            open_checkpoint(directory)

    one(load, tmp_path, "zip bomb")


def test_a_config_with_absurd_sizes_is_refused_before_anything_is_built(valid, tmp_path):
    for key, value in (("num_hidden_layers", 10**9), ("hidden_size", 10**12), ("vocab_size", 10**15)):
        model = tmp_path / key
        shutil.copytree(valid / "one", model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(SutureError, match=key):
            open_skeleton(open_checkpoint(model))
