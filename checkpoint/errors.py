"""The one exception that a user sees, and the did-you-mean that goes with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SutureError(Exception):
    """A refusal or failure that the user can act on.

    `problem` names the file, tensor, shape or recipe key and what was expected; `hint` says what to do next.
    The command line prints it as one message and exits 1, without a traceback.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        self.problem = " ".join(problem.split())  # libraries' messages, quoted in it, may have lines
        self.hint = hint
        super().__init__(f"{self.problem}; {hint}" if hint else self.problem)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """` (did you mean 'group_size'?)` for the choice nearest to `word`, or an empty string when none is near."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""
