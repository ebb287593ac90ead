"""Apply an adapter's changes to stored tensors, and run the model with the same changes left unmerged.

`merge_tensor` is what writes: every change of a tensor in float32, one rounding. `Live` is what it is checked against:
the base's own weights with x -> s B (A x) added by hooks as PEFT adds it, on the same float32 arithmetic. A merge that
puts a delta on the wrong weight, transposes it or scales it wrongly gives other logits than the model it claims to be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..calibrate.skeleton import Skeleton, cut
from ..checkpoint.layout import ModelLayout, Place
from ..checkpoint.source import TensorSource, side_file
from .delta import Delta, Rounding, factor, merge_into, merged, norms_by_expansion, rounding, slabs
from .match import Change, Stored


@dataclass(frozen=True, eq=False)
class Piece:
    """A change of a tensor, or of one expert's rows in it."""

    place: Place
    change: Change


def pieces_by_tensor(changes: Mapping[str, Change], layout: ModelLayout) -> dict[str, list[Piece]]:
    """Disk tensor -> what becomes of it. A tied head's change goes to the embedding's tensor once."""
    found: dict[str, list[Piece]] = {}
    tied_head = f"{layout.family.head}.weight" if layout.head is None else None
    embedding = f"{layout.family.stem}{layout.family.embedding}.weight"
    for parameter, change in changes.items():
        if parameter == tied_head and embedding in changes:
            continue  # the same change, or the head would have been untied
        place = layout.places[parameter]
        found.setdefault(place.tensor, []).append(Piece(place, change))
    return found


def deltas_of(change: Change, W: Tensor) -> list[Delta]:
    """The low-rank changes of the stored weight W."""
    return [low.delta(W) for low in change.low_rank]


def replacement(change: Change, W: Tensor) -> Tensor:
    """The parameter before low-rank changes, float32: W, or what replaces it or rows of it, or W + sum of shares of the
    differences. A LoRA beside trained rows (a tied head's) is PEFT's LoRA of the table with those rows."""
    whole, rows = change.replaced, change.rows
    if not whole and not rows:
        return W.float()
    start = _grown(W.float(), change.shape) if change.shape else W.float()
    if len(whole) == 1 and whole[0].share == 1:
        total = whole[0].read()
    else:
        total = start.clone()
        for stored in whole:
            total += stored.share * (stored.read() - start)
    for stored in rows:
        index, new = torch.tensor(stored.rows), stored.read()
        alone = len(rows) == 1 and stored.share == 1
        total[index] = new if alone else total[index] + stored.share * (new - start[index])
    return total


def _grown(W: Tensor, shape: tuple[int, ...]) -> Tensor:
    """W with rows of zeros added."""
    return W if W.shape == shape else torch.cat([W, W.new_zeros(shape[0] - W.shape[0], *W.shape[1:])])


def finish(change: Change, W: Tensor) -> Tensor:
    """Addends, which come after everything else; W float32, changed in place."""
    for stored in change.added:
        W += stored.share * stored.scale * stored.read()
    return W


def merged_parameter(change: Change, W: Tensor) -> Tensor:
    """The changed parameter, float32, of the stored one W."""
    exact = _own(replacement(change, W), W)
    if change.low_rank:
        deltas = deltas_of(change, exact)
        factors = [factor(exact, delta) for delta in deltas]
        for start, stop in slabs(exact.shape):
            exact[start:stop] = merged(exact[start:stop], deltas, (start, stop), factors)
    return finish(change, exact)


def _own(tensor: Tensor, of: Tensor) -> Tensor:
    """The tensor in memory of its own, which `of` does not share."""
    return tensor.clone() if tensor.data_ptr() == of.data_ptr() else tensor


def merge_tensor(stored: Tensor, pieces: Sequence[Piece]) -> tuple[Tensor, dict[str, Rounding]]:
    """The disk tensor after all its changes, rounded once to its dtype, and what became of each.

    `stored` may be changed in place. Memory beside it: a slab for low-rank changes, one more copy otherwise.
    """
    records: dict[str, Rounding] = {}
    for piece in pieces:
        part = cut(stored, piece.place)
        change = piece.change
        plain = not (change.replaced or change.rows or change.added) and part.is_contiguous()
        if plain:
            records[change.parameter] = merge_into(part, deltas_of(change, part))
            continue
        exact = merged_parameter(change, part)
        new = exact.to(stored.dtype)
        records[change.parameter] = _rounding(part, exact, new)
        if piece.place.expert is None:
            stored = new
        else:
            part.copy_(new)
    return stored, records


def _rounding(before: Tensor, exact: Tensor, new: Tensor) -> Rounding:
    n = before.shape[0]
    old, change = before.float(), exact[:n] - before.float()
    error = new[:n].float() - exact[:n]
    same = float((new[:n] == before).sum()) / max(before.numel(), 1)
    sums = (float(old.square().sum()), float(change.square().sum()), float((change * error).sum()))
    return rounding(*sums, float(error.square().sum()), same)


# -- the model with its adapter unmerged -------------------------------------------------------------------------------


@dataclass(eq=False)
class Live:
    """The model before merging, as a source for a skeleton, and hooks that add what its adapters add.

    Replaced parameters and looked-up rows are read as the adapter has them; products with B A are left to the hooks.
    """

    arranged: TensorSource  # the base, arranged
    config: dict[str, Any]  # of the output
    layout: ModelLayout
    changes: Mapping[str, Change]
    shapes: Mapping[str, tuple[int, ...]]  # of the output
    dtypes: Mapping[str, str]
    merged: bool = False  # read every parameter merged instead, unrounded
    _pieces: dict[str, list[Piece]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pieces = pieces_by_tensor(self.changes, self.layout)

    @property
    def source(self) -> str:
        return self.arranged.source

    def side(self, name: str) -> bytes | None:
        return side_file(self.arranged, name)

    def read(self, name: str) -> Tensor:
        tensor = self.arranged.read(name)
        for piece in self._pieces.get(name, ()):
            part = cut(tensor, piece.place)
            change = piece.change
            hooked = bool(change.low_rank) and not self.merged
            exact = finish(change, _own(replacement(change, part), part)) if hooked else merged_parameter(change, part)
            if piece.place.expert is None:
                tensor = exact
            else:
                tensor = tensor.float() if tensor.dtype != torch.float32 else tensor
                cut(tensor, piece.place).copy_(exact)
        return tensor

    def read_rows(self, name: str, rows: Sequence[int]) -> Tensor:
        pieces = self._pieces.get(name)
        if not pieces:
            return self.arranged.read_rows(name, rows)
        if self.merged:
            return self.read(name)[list(rows)]
        (piece,) = pieces
        W = self.read(name)
        looked_up = W[list(rows)]
        for low in piece.change.low_rank:
            delta = low.delta(W)
            added = delta.L[list(rows)] @ delta.R
            if delta.magnitude is None:
                looked_up = looked_up + delta.share * added
            else:
                ratio = (delta.magnitude / norms_by_expansion(W, delta))[None, :]
                looked_up = looked_up + delta.share * (ratio * (W[list(rows)] + added) - W[list(rows)])
        return looked_up


@contextlib.contextmanager
def hooked(skeleton: Skeleton, live: Live, parameters: Sequence[str]) -> Iterator[None]:
    """While inside, the loaded modules of `parameters` add their adapters' products to their outputs."""
    handles = []
    embedding = f"{live.layout.family.stem}{live.layout.family.embedding}.weight"
    head = f"{live.layout.family.head}.weight"
    for parameter in parameters:
        change = live.changes.get(parameter)
        if parameter == head and live.layout.head is None:
            change = live.changes.get(embedding, change)
        if change is None or not change.low_rank or parameter == embedding:
            continue
        module = skeleton.model.get_submodule(parameter.removesuffix(".weight"))
        if type(module).__name__ not in ("Linear", "Conv1D"):  # a router: its weight is read by other code
            W = module.get_parameter("weight")
            W.data = merged(W.data, [low.delta(W.data) for low in change.low_rank])
            continue
        handles.append(module.register_forward_hook(_adding(module, change)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adding(module: nn.Module, change: Change) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
    """A hook: out + sum of shares times what each adapter adds to x W."""
    W = module.get_parameter("weight")
    bias = module._parameters.get("bias")
    terms = []
    transposed = type(module).__name__ == "Conv1D"
    for low in change.low_rank:
        delta = low.delta(W.data.cpu())
        ratio = None if delta.magnitude is None else delta.magnitude / norms_by_expansion(W.data.cpu(), delta)
        down, up = (delta.L, delta.R) if transposed else (delta.R.T, delta.L.T)
        device = [t if t is None else t.to(W.device) for t in (down, up, ratio)]
        terms.append((delta.share, *device))

    def add(module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        x = inputs[0]
        plain = out if bias is None else out - bias
        for share, down, up, ratio in terms:
            product = (x @ down) @ up
            out = out + share * (product if ratio is None else ratio * (plain + product) - plain)
        return out

    return add


def same_change(one: Change | None, other: Change | None) -> bool:
    """Whether embedding and head, in one tensor, are changed alike."""
    if one is None or other is None:
        return one is other
    if [s.share for s in one.replaced] != [s.share for s in other.replaced]:
        return False
    if not all(_equal(a, b) for a, b in zip(one.replaced, other.replaced, strict=True)):
        return False
    if len(one.low_rank) != len(other.low_rank) or [s.rows for s in one.rows] != [s.rows for s in other.rows]:
        return False
    if not all(_equal(a, b) for a, b in zip(one.rows, other.rows, strict=True)):
        return False
    empty = torch.empty(0, 0)
    for a, b in zip(one.low_rank, other.low_rank, strict=True):
        if a.residual != "plain" or (a.scale, a.share) != (b.scale, b.share):
            return False
        x, y = a.delta(empty), b.delta(empty)
        if not (torch.equal(x.L, y.L) and torch.equal(x.R, y.R)) or x.magnitude is not None or y.magnitude is not None:
            return False
    return True


def _equal(one: Stored, other: Stored) -> bool:
    return one.adapter.shape(one.key) == other.adapter.shape(other.key) and torch.equal(one.read(), other.read())
