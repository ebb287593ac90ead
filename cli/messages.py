"""How a command ends: a result, one sentence and exit code 1, or advice after an interrupt; never a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


class _Terminated(BaseException):
    """SIGTERM, which ends a command as Ctrl-C does: with a message, and with nothing half done."""


@contextmanager
def messages(advice: str = "") -> Iterator[None]:
    """Users' mistakes end in one sentence and exit code 1; an interrupt says how to go on (`advice`)."""
    from ..checkpoint.errors import SutureError

    _quiet_libraries()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except SutureError as error:
        raise _end(str(error), 1) from None
    except BrokenPipeError:  # `suture ... | head`: typer ends it quietly
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        raise _end(f"{where}{error.strerror or error}", 1) from None
    except KeyboardInterrupt:
        raise _end(f"interrupted{advice}", 128 + signal.SIGINT) from None
    except _Terminated:
        raise _end(f"terminated{advice}", 128 + signal.SIGTERM) from None


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


def _end(message: str, code: int) -> typer.Exit:
    """Say one line on stderr; the exception that ends the command."""
    print(f"suture: {' '.join(message.split())}", file=sys.stderr)
    return typer.Exit(code)


def _quiet_libraries() -> None:
    """Progress bars and advice of libraries would drown what suture says."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
