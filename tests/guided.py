"""Coverage-guided attack on one kind of file, for `test_attacked.py`: python guided.py KIND DIRECTORY RUNS."""

import random
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent))

with atheris.instrument_imports(
    include=["suture.checkpoint", "suture.lora", "suture.pipeline.recipe", "suture.calibrate"]
):
    import test_attacked as attacked

kind, root, runs = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
where, opener = attacked.KINDS[kind]
file = attacked.write_valid(root / "valid") / where
corpus = root / "corpus"
corpus.mkdir()
(corpus / "valid").write_bytes(file.read_bytes())


def mutate(raw: bytes, most: int, seed: int) -> bytes:
    return attacked.mutated_file(bytes(raw), file.suffix, random.Random(seed))[:most]


def attack(raw: bytes) -> None:
    file.write_bytes(raw)
    attacked.one(opener, file.parent, kind)


given = [sys.argv[0], f"-runs={runs}", "-seed=1", "-max_len=100000", f"-artifact_prefix={root}/", str(corpus)]
atheris.Setup(given, attack, custom_mutator=mutate)
atheris.Fuzz()
