"""suture: operations on Hugging Face LLM checkpoints, with a report whose every number has an error bar.

import suture
run = suture.run("recipes/quickstart.yaml")
run = suture.quantize("builtin:tiny", "out", method="gptq", bits=4, group_size=64, calibration="builtin:novels")
run = suture.apply("builtin:tiny", "out", {"untie": {}, "rtn": {"bits": 4, "group_size": 64}})
report = suture.compare("builtin:tiny", "out", data="builtin:holmes")
suture.inspect("builtin:tiny", "out")  # two models as budgets, side by side; config.json alone is enough
checkpoint = suture.open_checkpoint("builtin:tiny")
"""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from .checkpoint import Checkpoint, SutureError, open_checkpoint
    from .pipeline.api import apply, compare, compare_all, quantize, run
    from .pipeline.inspect import Inspection, inspect
    from .pipeline.recipe import Recipe

__version__ = _version("suture")
__all__ = [
    "Checkpoint",
    "Inspection",
    "Recipe",
    "SutureError",
    "__version__",
    "apply",
    "compare",
    "compare_all",
    "inspect",
    "open_checkpoint",
    "quantize",
    "run",
]

# Imported when first used, so that `import suture` and `suture --help` do not wait for torch.
_HOME = {
    "Checkpoint": "checkpoint",
    "SutureError": "checkpoint",
    "open_checkpoint": "checkpoint",
    "apply": "pipeline.api",
    "compare": "pipeline.api",
    "compare_all": "pipeline.api",
    "quantize": "pipeline.api",
    "run": "pipeline.api",
    "Inspection": "pipeline.inspect",
    "inspect": "pipeline.inspect",
    "Recipe": "pipeline.recipe",
}


def __getattr__(name: str) -> _Any:
    if name not in _HOME:
        raise AttributeError(f"module 'suture' has no attribute {name!r}")
    return getattr(_import_module(f".{_HOME[name]}", __name__), name)
