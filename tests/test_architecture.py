"""The import graph is the architecture, and the wheel holds every package."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
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
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc", "manager"}


def _sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_lies_below_them(package: str) -> None:
    wrong = []
    for path in _sources(package):
        depth = len(path.relative_to(ROOT).parts)  # level that reaches the root package
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == depth and node.module:
                target = node.module.split(".")[0]
                if target != package and target not in MAY_IMPORT[package]:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} imports {target}")
            if isinstance(node, ast.Import):
                wrong += [f"{path}:{node.lineno}" for alias in node.names if alias.name.split(".")[0] == "suture"]
    assert not wrong


def test_every_package_has_a_row_here() -> None:
    found = {init.parent.name for init in ROOT.glob("[a-z]*/__init__.py")} - {"tests", "build", "dist"}
    assert found == set(MAY_IMPORT)


def test_no_file_is_named_after_nothing() -> None:
    names = [path for package in MAY_IMPORT for path in _sources(package) if path.stem in EMPTY_NAMES]
    assert not names


def test_only_the_two_root_modules_are_python_files_at_the_root() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == {"suture", *(f"suture.{package}" for package in MAY_IMPORT)}


def test_the_wheel_holds_the_packages_and_their_data(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: building leaves files behind
    left_out = shutil.ignore_patterns(".git", ".venv", "build", "out", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=left_out)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    wanted = {f"suture/{path.relative_to(ROOT)}" for package in MAY_IMPORT for path in _sources(package)}
    wanted |= {f"suture/{path.relative_to(ROOT)}" for path in (ROOT / "builtin").rglob("*") if path.is_file()}
    wanted |= {f"suture/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    wanted |= {"suture/py.typed", "suture/report/schema.json", "suture/__init__.py", "suture/__main__.py"}
    assert not wanted - names
    assert not [name for name in names if name.startswith("suture/tests")]


def test_importing_suture_and_its_command_line_does_not_import_torch() -> None:
    code = "import sys, suture, suture.cli.main; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
