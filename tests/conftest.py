"""Fixtures that many files share."""

import pytest
from kit import Shelf, run


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """shelf("L1", "float32") -> the kit's model of that name, made once per file."""
    return Shelf(tmp_path_factory.mktemp("kit"))


@pytest.fixture
def apply(shelf, tmp_path):
    """apply("L1", {step: settings}, ...) -> (input directory, finished run); the kit's model in float32."""

    def go(name, *steps, model=None, **recipe):
        source = model or shelf(name, "float32")
        output = tmp_path / f"out-{name}-{len(list(tmp_path.iterdir()))}"
        return source, run({"model": str(source), "output": str(output), "steps": list(steps), **recipe})

    return go
