"""How a process of suture's own (a command, the loader that verifies) starts and ends; a notebook's is not touched."""

from __future__ import annotations

import atexit
import gc

_USUAL = gc.get_threshold()
_IMPORTING = (50_000, 20, 100)


def own_process() -> None:
    """To be called before torch is imported.

    torch and transformers make 400,000 objects that stay. Looking through them again and again takes a fifth of the time
    of their imports, and once more two seconds when the interpreter ends.
    """
    gc.set_threshold(*_IMPORTING)
    atexit.register(gc.freeze)


def imports_done() -> None:
    """Collect as Python usually does from here on: what refers to itself may hold a block's weights."""
    if gc.get_threshold() == _IMPORTING:
        gc.set_threshold(*_USUAL)
