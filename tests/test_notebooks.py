"""The notebooks run from top to bottom on builtin:tiny, with few tokens, and show their pictures.

Outputs are reloaded in the kernel's own process: a new one per run, as a reader's has it, imports for seconds what
tests of the installed command load in a new one anyway.
"""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SMALL = {"SAMPLES": "2", "TOKENS": "32", "WINDOWS": "1", "OMP_NUM_THREADS": "1"}
RELOAD_HERE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import warm
from suture.pipeline import run as _run
_run.FreshLoader = warm.LocalLoader
"""
PICTURES = {"1-first-quantization": 8 + 4, "2-gqa-and-mla": 2, "3-adapters": 8}  # bars of budgets, and drawn ones


@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_runs_and_shows_pictures(tmp_path, monkeypatch, name):
    for key, value in SMALL.items():
        monkeypatch.setenv(key, value)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "notebooks are kept without outputs"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(RELOAD_HERE))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert sum(data.get("text/html", "").count("<svg") for data in shown) >= PICTURES[name]
    told = [data.get("text/plain", "") for data in shown]  # progress: one line per cell, its last words are kept
    assert name == "3-adapters" or any(line.startswith("score builtin:holmes") for line in told)


def test_every_notebook_is_run():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(PICTURES)
