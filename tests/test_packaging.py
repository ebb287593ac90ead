"""The repository root is the package `suture`: what is here must be what is installed."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, version
from importlib.resources import files
from pathlib import Path

import pytest

import suture

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUP = PROJECT["tool"]["setuptools"]
NOT_SHIPPED = {"tests", "build", "dist", "benchmarks", "examples", "out", "docs"}


def test_every_package_is_listed():
    found = {
        ".".join(("suture", *init.parent.relative_to(ROOT).parts))
        for init in [ROOT / "__init__.py", *ROOT.glob("[a-z]*/**/__init__.py")]
        if init.relative_to(ROOT).parts[0] not in NOT_SHIPPED
    }
    assert found == set(SETUP["packages"])


def test_every_folder_with_code_is_a_package():
    folders = {
        path.parent.relative_to(ROOT)
        for path in ROOT.glob("[a-z]*/**/*.py")
        if path.relative_to(ROOT).parts[0] not in NOT_SHIPPED
    }
    assert not [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()]


def test_only_two_python_files_lie_at_the_root():
    """A conftest.py there would be installed as suture/conftest.py."""
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert not (ROOT / "tests" / "__init__.py").exists()


def matching(patterns: list[str]) -> set[str]:
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}


def data_files() -> set[str]:
    """Files that the package needs and that are not Python."""
    folders = ("builtin", "recipes", "report")
    found = {str(p.relative_to(ROOT)) for f in folders for p in (ROOT / f).rglob("*") if p.is_file()}
    return {name for name in found if not name.endswith((".py", ".pyc"))} | {"py.typed"}


def test_every_data_file_is_declared():
    assert matching(SETUP["package-data"]["suture"]) >= data_files()


def test_every_data_pattern_is_of_a_package_or_the_root():
    assert set(SETUP["package-data"]) == {"suture"}
    assert matching(SETUP["package-data"]["suture"]) >= {
        "py.typed",
        "recipes/quickstart.yaml",
        "builtin/novels.jsonl",
        "builtin/holmes.jsonl",
        "builtin/tiny/config.json",
        "builtin/tiny/model.safetensors",
        "report/schema.json",
        "report/page.html.j2",
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from the files that git has or would have; no network, no isolation."""
    scratch = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (scratch / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / "source" / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w"]
    done = subprocess.run(
        [*command, str(scratch / "dist"), str(scratch / "source")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = (scratch / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(wheel):
    inside = {name for name in wheel if ".dist-info/" not in name}
    packages = [ROOT.joinpath(*name.split(".")[1:]) for name in SETUP["packages"]]
    modules = {str(path.relative_to(ROOT)) for package in packages for path in package.glob("*.py")}
    assert inside == {f"suture/{name}" for name in modules | data_files()}
    assert all(wheel[f"suture/{name}"] == (ROOT / name).read_bytes() for name in data_files())


def test_the_wheel_installs_the_command(wheel):
    (text,) = (content for name, content in wheel.items() if name.endswith("entry_points.txt"))
    assert b"suture = suture.cli.main:main" in text


def test_the_installed_package_finds_its_data():
    for name in data_files():
        assert files("suture").joinpath(*name.split("/")).is_file(), name


def test_the_version_is_the_installed_one():
    assert suture.__version__ == version("suture") == PROJECT["project"]["version"]


def test_every_public_name_resolves():
    for name in suture.__all__:
        assert getattr(suture, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        suture.nope  # noqa: B018


def test_the_command_is_declared_once():
    (command,) = [point for point in entry_points(group="console_scripts") if point.name == "suture"]
    assert command.value == "suture.cli.main:main"


def test_every_import_of_the_package_is_a_declared_dependency():
    """Third-party modules that the code imports, against the dependencies; inside a function also against users' extras,
    and in a module that only functions import."""
    import ast

    on_demand = {"gptq_kernel"}

    modules = {"ruamel.yaml": "ruamel", "huggingface_hub": "huggingface_hub"}
    declared = {re.split(r"[<>=]", d)[0] for d in PROJECT["project"]["dependencies"]}
    extras = PROJECT["project"]["optional-dependencies"]
    optional = {re.split(r"[<>=]", d)[0] for extra in set(extras) - {"dev"} for d in extras[extra]}
    known = {modules.get(name, name).replace("-", "_") for name in declared} | set(sys.stdlib_module_names) | {"suture"}
    for package in SETUP["packages"]:
        for path in ROOT.joinpath(*package.split(".")[1:]).glob("*.py"):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
                if node in tree.body and isinstance(node, ast.ImportFrom) and node.level > 0:
                    assert not {node.module, *(alias.name for alias in node.names)} & on_demand, path
                allowed = known if node in tree.body and path.stem not in on_demand else known | optional
                assert not {name.split(".")[0] for name in names} - allowed, path
