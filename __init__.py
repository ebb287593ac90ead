"""suture: operations on Hugging Face LLM checkpoints, with a report whose every number has an error bar."""

from importlib.metadata import version as _version

__version__ = _version("suture")
