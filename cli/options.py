"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer


class DeviceName(StrEnum):
    """Where to compute; auto: CUDA when it is there."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def _told(level: str) -> Callable[[bool], None]:
    """The callback of an option that says how much is told."""

    def chosen(value: bool) -> None:
        if value:
            from .console import Level, set_level

            set_level(Level[level])

    return chosen


Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", callback=_told("quiet"), help="No progress and no notes, the result alone.")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", callback=_told("verbose"), help="Every unit of work, and every layer's record."),
]
Device = Annotated[DeviceName, typer.Option(help="Where to compute; auto: CUDA when it is there.")]
Json = Annotated[bool, typer.Option("--json", help="Print plain data instead of a table.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output as a whole.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")]
Download = Annotated[bool, typer.Option("--download", help="Allow the network for a hub id that is not cached.")]
