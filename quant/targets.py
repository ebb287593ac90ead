"""Which linear layers a step is for.

A pattern is `all-linear`, a layer's name or the end of it by whole components (`down_proj`, `mlp.down_proj`), a glob
(`model.layers.0.*`), or `re:` and a regular expression for the whole name. Every pattern must match something: a pattern
that matches nothing is a typo.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..checkpoint.errors import SutureError, did_you_mean
from ..checkpoint.layout import Linear, ModelLayout
from .scheme import Scheme
from .settings import RTNSettings

ALL = "all-linear"


@dataclass(frozen=True)
class Selection:
    """Layers to change, and why the others stay as they are."""

    chosen: tuple[Linear, ...]
    skipped: dict[str, str]  # name -> reason

    @property
    def names(self) -> frozenset[str]:
        return frozenset(linear.name for linear in self.chosen)


def select(
    layout: ModelLayout, targets: Sequence[str], ignore: Sequence[str], layers: int | str | None = None
) -> Selection:
    """Resolve patterns against a model's linear layers. `layers`: blocks, as in `blocks_named`; None: all. Raises
    SutureError when a pattern, or all together, match nothing."""
    head = (layout.head or "").removesuffix(".weight")
    for pattern in targets:
        if (pattern != ALL and _matches(pattern, layout.family.head)) or pattern == head:
            raise SutureError(_head_refusal(layout, pattern), "remove it from targets")
    named = _match_all(layout, [pattern for pattern in targets if pattern != ALL], "targets")
    wanted = {linear.name for linear in layout.linears} if ALL in targets else named
    unwanted = _match_all(layout, [p for p in ignore if not _is_head_alone(layout, p)], "ignore")
    kept = _kept(layout) - named
    elsewhere = _outside(layout, layers)
    skipped: dict[str, str] = {}
    for linear in layout.linears:
        if linear.name in unwanted:
            skipped[linear.name] = "listed under ignore"
        elif linear.name not in wanted:
            skipped[linear.name] = "matches no target"
        elif linear.name in elsewhere:
            skipped[linear.name] = f"outside the blocks of layers: {layers}"
        elif linear.name in kept:
            skipped[linear.name] = f"kept by default: {layout.family.keep_reason}"
    chosen = tuple(linear for linear in layout.linears if linear.name not in skipped)
    if not chosen:
        limits = "targets or ignore" if layers is None else "targets, ignore or layers"
        raise SutureError("targets: no layer is left to quantize", f"loosen {limits}")
    return Selection(chosen, skipped)


def blocks_named(layers: int | str, n: int) -> range:
    """Blocks of a model with `n`: the first so many, or `FROM-TO` counted from 0. Raises SutureError for others."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(layers).replace(" ", ""))
    if found is None:
        raise SutureError(f"layers: '{layers}' is not blocks", "write 2 for the first two, 4-7 for these four")
    first, last = (0, int(found[1]) - 1) if found[2] is None else (int(found[1]), int(found[2]))
    if not first <= last < n:
        raise SutureError(f"layers: {layers} is outside the model's {n} blocks, 0-{n - 1}", f"at most {n} or 0-{n - 1}")
    return range(first, last + 1)


def _outside(layout: ModelLayout, layers: int | str | None) -> set[str]:
    """Layers that are in none of the blocks asked for."""
    if layers is None:
        return set()
    named = blocks_named(layers, len(layout.blocks))
    inside = {linear.name for index in named for group in layout.blocks[index] for linear in group}
    return {linear.name for linear in layout.linears} - inside


def ruled_schemes(layout: ModelLayout, selection: Selection, settings: RTNSettings) -> dict[str, Scheme]:
    """Layer -> format, of those that a rule is for: the first that matches a layer. A rule that gets no layer is an error."""
    schemes: dict[str, Scheme] = {}
    for i, rule in enumerate(settings.rules):
        key = f"rules[{i}].match"
        matched = _match_all(layout, [rule.match], key) & selection.names
        if not matched:
            raise SutureError(f"{key}: '{rule.match}' matches no layer that is quantized", "see targets and ignore")
        if matched <= schemes.keys():
            raise SutureError(
                f"{key}: all that '{rule.match}' matches has a rule before it", "put the narrower rule first"
            )
        schemes |= dict.fromkeys(matched - schemes.keys(), settings.ruled(rule))
    return schemes


def _kept(layout: ModelLayout) -> set[str]:
    return {linear.name for linear in layout.linears if linear.role in layout.family.keep}


def _is_head_alone(layout: ModelLayout, pattern: str) -> bool:
    """Whether the pattern is for the head, which stays as it is anyway, and for no layer besides."""
    names = {layout.family.head, layout.family.head_on_disk, (layout.head or "").removesuffix(".weight")}
    return any(_matches(pattern, name) for name in names if name) and not any(
        _matches(pattern, linear.name) for linear in layout.linears
    )


def _head_refusal(layout: ModelLayout, pattern: str) -> str:
    if layout.head is None:
        return (
            f"targets: '{pattern}' is the head, which this model ties to its embedding; quantizing it would damage both"
        )
    return f"targets: '{pattern}' is the head, which stays in full precision"


def _match_all(layout: ModelLayout, patterns: Sequence[str], key: str) -> set[str]:
    found: set[str] = set()
    by_part = _fused_parts(layout)
    parts_named: dict[str, set[str]] = {}
    for pattern in patterns:
        names = {linear.name for linear in layout.linears if pattern == ALL or _matches(pattern, linear.name)}
        fused = by_part.get(pattern.rsplit(".", 1)[-1])
        if not names and fused is not None:
            parts_named.setdefault(fused, set()).add(pattern.rsplit(".", 1)[-1])
            continue
        if not names:
            ends = {linear.name.rsplit(".", 1)[-1] for linear in layout.linears} | set(by_part)
            raise SutureError(
                f"{key}: '{pattern}' matches no linear layer{did_you_mean(pattern, ends)}",
                f"this model has {', '.join(sorted({linear.name.rsplit('.', 1)[-1] for linear in layout.linears}))}",
            )
        found |= names
    for role, named in parts_named.items():
        absent = sorted(part for part, owner in by_part.items() if owner == role and part not in named)
        if absent:
            raise SutureError(
                f"{key}: {', '.join(sorted(named))} lie in one matrix, {role}, together with {', '.join(absent)}",
                f"name all of them or {role.rsplit('.', 1)[-1]}: a matrix has one format",
            )
        found |= {linear.name for linear in layout.linears if linear.role == role}
    return found


def _fused_parts(layout: ModelLayout) -> dict[str, str]:
    """`q_proj` -> `self_attn.qkv_proj` for families that store several projections in one matrix."""
    return {f"{part}_proj": fused.linear for fused in layout.family.fused for part in fused.parts}


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern.removeprefix("re:"), name) is not None
        except re.error as error:
            raise SutureError(f"'{pattern}' is not a regular expression: {error}", "correct the pattern") from error
    if any(letter in pattern for letter in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return name == pattern or name.endswith("." + pattern)
