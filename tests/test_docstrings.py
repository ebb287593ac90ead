"""Examples in docstrings do what they show."""

import doctest
import importlib
import pkgutil
from unittest.mock import patch

import pytest
import warm

import suture


def with_examples():
    """Names of suture's modules whose docstrings hold an example."""
    found = []
    for info in pkgutil.walk_packages(suture.__path__, "suture."):
        if info.name.startswith(("suture.tests", "suture.benchmarks")) or info.ispkg or info.name == "suture.__main__":
            continue
        if ">>> " in (importlib.util.find_spec(info.name).loader.get_source(info.name) or ""):
            found.append(info.name)
    return found


@pytest.mark.parametrize("name", with_examples())
def test_examples_of_a_module(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    with patch("suture.pipeline.run.FreshLoader", warm.LocalLoader):
        failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried and not failed


def test_every_function_of_the_python_interface_has_an_example():
    for name in ("run", "apply", "quantize", "compare", "inspect"):
        assert ">>> " in getattr(suture, name).__doc__, name
