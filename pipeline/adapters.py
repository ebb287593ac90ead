"""Commands whose output is an adapter, not a model: attach, extract, combine, transport; and inspect, which writes nothing.

Each refuses what it can before it reads weights, holds one layer at a time, and writes a directory that PEFT loads, as a
whole or not at all, with a manifest that says what it was made of.
"""

from __future__ import annotations

from .adapter_attach import attach
from .adapter_combine import combine
from .adapter_extract import extract, extraction_curve
from .adapter_files import Written
from .adapter_heal import heal
from .adapter_inspect import inspect_adapter
from .adapter_transport import transport

__all__ = ["Written", "attach", "combine", "extract", "extraction_curve", "heal", "inspect_adapter", "transport"]
