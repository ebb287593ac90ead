"""The import graph is the architecture, and a file's name says what is in it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT: dict[str, set[str]] = {
    "checkpoint": set(),
    "calibrate": {"checkpoint"},
    "surgery": {"checkpoint", "calibrate"},
    "quant": {"checkpoint", "calibrate"},
    "lora": {"checkpoint", "calibrate"},
    "report": {"checkpoint", "calibrate"},
    "pipeline": {"checkpoint", "calibrate", "surgery", "quant", "lora", "report"},
    "cli": {"checkpoint", "pipeline", "report", "quant"},
}
SAYS_NOTHING = {"utils", "util", "helpers", "helper", "common", "base", "misc", "core", "tools", "manager"}
FILES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))
RELATIVE = [str(path.relative_to(ROOT)) for path in FILES]


def imported_packages(tree: ast.Module, depth: int) -> list[tuple[int, str]]:
    """(line, package) of every import of another of our packages, also in functions and under TYPE_CHECKING.

    depth: folders between the file and the root; `from ..checkpoint.x import y` in quant/gptq.py has level 2 = depth + 1.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == depth + 1:
            first = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            found += [(node.lineno, name) for name in first]
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module else []
        found += [(node.lineno, f"absolute import of {name}") for name in names if name.split(".")[0] == "suture"]
        assert not isinstance(node, ast.ImportFrom) or node.level <= depth + 1
    return found


@pytest.mark.parametrize("name", RELATIVE)
def test_a_package_imports_only_what_comes_before_it(name):
    path = ROOT / name
    package, depth = Path(name).parts[0], len(Path(name).parts) - 1
    tree = ast.parse(path.read_text())
    # `from .. import __version__` asks the root for a name, not for a package
    allowed = MAY_IMPORT[package] | {package, "__version__"}
    wrong = [f"{name}:{line} imports {found}" for line, found in imported_packages(tree, depth) if found not in allowed]
    assert not wrong


def test_the_root_only_imports_when_asked():
    """`import suture` costs nothing: what it gives away lives elsewhere and is imported on first use."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    eager = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]
    assert not eager


def test_every_package_has_its_row():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(MAY_IMPORT)


@pytest.mark.parametrize("name", RELATIVE)
def test_a_files_name_says_what_is_in_it(name):
    assert Path(name).stem not in SAYS_NOTHING
    assert not set(Path(name).parts[:-1]) & SAYS_NOTHING


@pytest.mark.parametrize("name", [name for name in RELATIVE if not name.endswith("__init__.py")])
def test_every_file_begins_with_what_it_is_for(name):
    assert ast.get_docstring(ast.parse((ROOT / name).read_text()))


@pytest.mark.parametrize("name", RELATIVE)
def test_no_function_changes_a_global(name):
    tree = ast.parse((ROOT / name).read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]


LIGHT = """
import sys
{action}
heavy = {{"torch", "transformers", "numpy", "scipy", "safetensors", "pydantic", "huggingface_hub"}} & set(sys.modules)
assert not heavy, sorted(heavy)
"""


@pytest.mark.parametrize(
    "action",
    [
        "import suture",
        "import suture; suture.__version__; dir(suture)",
        "import suture.cli.main",
        "import suture.checkpoint",
    ],
)
def test_i6_importing_loads_neither_torch_nor_transformers(action):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(action=action)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
