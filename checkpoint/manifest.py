"""The account that an output keeps of itself: `suture.json` beside the weights.

For every input tensor: copied, changed (by which step) or dropped (why). For every output tensor: what it came from.
Every file with its hash. Nothing in it depends on when or where the run happened, so the same recipe writes the same
bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import SutureError
from .strict_json import strict_json

MANIFEST = "suture.json"
SCHEMA = 1
_LIMIT = 256_000_000
_KEYS = ("suture", "recipe", "source", "history", "inputs", "outputs", "modules", "fallbacks", "files")


@dataclass(frozen=True)
class Account:
    """What became of one input tensor in one step."""

    action: Literal["copied", "changed", "dropped"]
    outputs: tuple[str, ...] = ()  # names in the step's output
    reason: str = ""  # for dropped, and for changed: how


def chain_accounts(steps: Iterable[Mapping[str, Account]]) -> dict[str, Account]:
    """Follow each tensor of the first step's input through all steps."""
    chained: dict[str, Account] | None = None
    for accounts in steps:
        if chained is None:
            chained = dict(accounts)
            continue
        chained = {name: _then(account, accounts) for name, account in chained.items()}
    return chained or {}


def _then(account: Account, later: Mapping[str, Account]) -> Account:
    nexts = [later[name] for name in account.outputs]
    if not nexts:
        return account
    outputs = tuple(name for follow in nexts for name in follow.outputs)
    reasons = [text for text in dict.fromkeys([account.reason, *(follow.reason for follow in nexts)]) if text]
    actions = {account.action, *(follow.action for follow in nexts)}
    action = "dropped" if not outputs else "changed" if actions != {"copied"} else "copied"
    return Account(action, outputs, "; ".join(reasons))


def account_for(inputs: Iterable[str], outputs: Iterable[str], accounts: Mapping[str, Account]) -> None:
    """Check that every input is accounted for and every output has an origin. Raises SutureError (a bug if it does)."""
    lost = sorted(set(inputs) - set(accounts))
    produced = {name for account in accounts.values() for name in account.outputs}
    strangers = sorted(set(outputs) - produced)
    absent = sorted(produced - set(outputs))
    for names, what in ((lost, "not accounted for"), (strangers, "of no origin"), (absent, "promised but not written")):
        if names:
            raise SutureError(f"{len(names)} tensors {what}, first {', '.join(names[:3])}", "please report this")


def file_hashes(directory: Path) -> dict[str, dict[str, Any]]:
    """SHA-256 and size of every file but the manifest itself."""
    return {
        path.relative_to(directory).as_posix(): {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def to_json(content: Any) -> bytes:
    """The same bytes for the same content; NaN is refused."""
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a suture output. Raises SutureError when there is none, or of a newer schema."""
    path = directory / MANIFEST
    if not path.is_file():
        raise SutureError(f"{directory}: no {MANIFEST}: not an output of suture", "give a directory that suture wrote")
    manifest = strict_json(path, _LIMIT)
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise SutureError(f"{path}: not a manifest of schema {SCHEMA}", "read it with the suture that wrote it")
    absent = sorted(set(_KEYS) - set(manifest))
    if absent:
        raise SutureError(f"{path}: damaged: no {', '.join(absent)} in it", "restore the file, or run the recipe again")
    return manifest
