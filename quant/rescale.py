"""Choose the factors that AWQ and SmoothQuant move, for one loaded block: the shell around their formulas.

A block is first run over the calibration tokens as it is. What its layers are given is noted: ranges over all tokens,
and for a sample the whole call of each module where an error will be measured. Then candidates are tried place by
place: the consumers' weights are replaced by what rounding would leave of them, the module is called again, and its
output compared. Places do not feel one another: dividing a matrix's rows changes nothing about how it is rounded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..calibrate.activations import ChannelRanges, static_scale, through_integers
from ..calibrate.replay import Stream
from ..calibrate.skeleton import Skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear
from .awq import scale_candidates, weight_share
from .fold import Fold
from .rtn import rtn
from .scheme import Activations, Scheme
from .smoothquant import ALPHAS, W8, smoothing

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class BlockInputs:
    """What a block's modules are given. Keys are module names."""

    first: dict[str, str]  # linear -> the first that shares its inputs, under whose name they are kept
    ranges: dict[str, ChannelRanges] = field(default_factory=dict)  # of first linears' inputs, and of norms' outputs
    calls: dict[str, list[Call]] = field(default_factory=dict)  # on the sample

    def sample(self, linear: str) -> Tensor:
        """Inputs [tokens, in] of a linear layer on the sample."""
        given = [args[0] for args, _ in self.calls[self.first[linear]]]
        return torch.cat([x.reshape(-1, x.shape[-1]) for x in given])

    def range_of(self, linear: str) -> ChannelRanges:
        return self.ranges[self.first[linear]]


@torch.no_grad()
def observe_block(
    skeleton: Skeleton, index: int, stream: Stream, folds: Sequence[Fold], chosen: Sequence[Linear], sample_tokens: int
) -> BlockInputs:
    """Run the loaded block over the stream, which keeps its hidden states."""
    first: dict[str, str] = {}
    groups: dict[tuple[int, int | None], str] = {}
    number = {linear.module: g for g, group in enumerate(skeleton.layout.blocks[index]) for linear in group}
    for linear in chosen:
        first[linear.module] = groups.setdefault((number[linear.module], linear.expert), linear.module)
    seen = BlockInputs(first)
    watched = [_place(fold) for fold in folds] + list(first.values())
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(watched):
            seen.calls[name] = []
            stack.enter_context(_removed(_note_calls(skeleton, name, seen.calls[name])))
        for hidden, positions in _sample(stream, sample_tokens):
            skeleton.run_block(index, hidden.to(skeleton.device), positions)
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys([*first.values(), *(fold.producer for fold in folds if fold.norm)]):
            stack.enter_context(_removed(_note_ranges(skeleton, name, seen.ranges, output=name not in first)))
        for batch in range(len(stream.hidden)):
            stream.through(skeleton, index, batch)
    for name, ranges in seen.ranges.items():
        if not bool(torch.isfinite(ranges.total).all()):
            raise SutureError(
                f"{name}: what goes through it on the calibration text holds NaN or values too large for float32",
                "a layer before it overflows: check the checkpoint",
            )
    return seen


def _place(fold: Fold) -> str:
    """The module whose output is compared: the parent, or a single consumer, whose output is the parent's."""
    return fold.parent if fold.norm else fold.consumers[0]


def _sample(stream: Stream, tokens: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Whole sequences from the beginning of the stream with their positions, at least `tokens` tokens of them."""
    for hidden, positions in zip(stream.hidden, stream.positions, strict=True):
        if tokens <= 0:
            return
        part = hidden[: -(-tokens // hidden.shape[1])]
        tokens -= part.shape[0] * part.shape[1]
        yield part, None if positions is None else positions[: part.shape[0]]


def _note_calls(skeleton: Skeleton, name: str, calls: list[Call]) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    return skeleton.model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)


def _note_ranges(skeleton: Skeleton, name: str, found: dict[str, ChannelRanges], output: bool) -> Any:
    def note(x: Tensor) -> None:
        if name not in found:
            found[name] = ChannelRanges.zeros(x.shape[-1], x.device)
        found[name].add(x)

    module = skeleton.model.get_submodule(name)
    if output:

        def note_output(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            note(out)

        return module.register_forward_hook(note_output)
    return module.register_forward_pre_hook(lambda module, args: note(args[0]))


@contextlib.contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


# -- candidates --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The factors chosen for a place, and the relative error of the module's output on the sample."""

    fold: Fold
    label: str
    s: Tensor  # [channels]
    error: float | None  # None: not measured
    unscaled_error: float | None

    @property
    def record(self) -> dict[str, Any]:
        low, high = float(self.s.min()), float(self.s.max())
        return {
            "scaled": self.label,
            "factors": [_rounded(low), _rounded(high)],
            "error": _rounded(self.error),
            "error_unscaled": _rounded(self.unscaled_error),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def choose_awq(
    skeleton: Skeleton,
    folds: Sequence[Fold],
    seen: BlockInputs,
    schemes: Mapping[str, Scheme],
    storage: torch.dtype,
    steps: int,
) -> list[Choice]:
    """The factors that cost least at each place, weights rounded to nearest. `schemes`: of the modules quantized."""
    choices = []
    for fold in folds:
        weights = {name: _matrix(skeleton, name) for name in fold.consumers if name in schemes}
        a = fold.per_channel(_range_into(fold, seen).mean, "mean")
        u = fold.per_channel(weight_share([(W, schemes[name]) for name, W in weights.items()]), "mean")

        def attempt(s: Tensor, fold: Fold = fold, weights: Mapping[str, Tensor] = weights) -> _Attempt:
            columns = fold.columns(s)
            rounded = {
                name: rtn(W * columns, schemes[name], storage).dequantize().float() for name, W in weights.items()
            }
            return _Attempt({name: W / columns for name, W in rounded.items()}, None)

        choices.append(_best(skeleton, fold, seen, scale_candidates(a, u, steps), attempt))
    return choices


def choose_smoothing(
    skeleton: Skeleton,
    folds: Sequence[Fold],
    seen: BlockInputs,
    chosen: Mapping[str, Scheme],
    inputs: Activations,
    storage: torch.dtype,
    alpha: float | None,
) -> list[Choice]:
    """The smoothing of each place: with `alpha`, or None: the value that costs least, weights and inputs rounded."""
    choices = []
    for fold in folds:
        weights = {name: _matrix(skeleton, name) for name in fold.consumers if name in chosen}
        into = _range_into(fold, seen).largest
        largest = fold.per_channel(into, "max")
        widest = fold.per_channel(torch.stack([W.abs().amax(0) for W in weights.values()]).amax(0), "max")
        if alpha is not None:
            choices.append(Choice(fold, f"alpha {alpha:.3g}", smoothing(largest, widest, alpha), None, None))
            continue

        def attempt(
            s: Tensor, fold: Fold = fold, weights: Mapping[str, Tensor] = weights, into: Tensor = into
        ) -> _Attempt:
            columns = fold.columns(s)
            rounded = {name: rtn(W * columns, W8, storage).dequantize().float() for name, W in weights.items()}
            scale = None if inputs.dynamic else static_scale(float((into / columns).max()), storage).to(columns.device)
            return _Attempt(
                {name: W / columns for name, W in rounded.items()},
                lambda x: through_integers(x / columns, scale) * columns,
            )

        tried = [("none", torch.ones_like(largest))]
        tried += [(f"alpha {value:.3g}", smoothing(largest, widest, value)) for value in ALPHAS]
        choices.append(_best(skeleton, fold, seen, tried, attempt))
    return choices


def _range_into(fold: Fold, seen: BlockInputs) -> ChannelRanges:
    return seen.ranges[fold.producer] if fold.norm else seen.range_of(fold.consumers[0])


@dataclass(frozen=True)
class _Attempt:
    """What the consumers would be: weights [out, in] for the inputs as they are, and what becomes of the inputs."""

    weights: dict[str, Tensor]
    inputs: Callable[[Tensor], Tensor] | None


def _best(
    skeleton: Skeleton,
    fold: Fold,
    seen: BlockInputs,
    tried: Sequence[tuple[str, Tensor]],
    attempt: Callable[[Tensor], _Attempt],
) -> Choice:
    """The candidate of least error; the first of `tried`, which is no scaling, among equals."""
    module, calls = skeleton.model.get_submodule(_place(fold)), seen.calls[_place(fold)]
    wanted = [_output(module, call) for call in calls]
    size = sum(float(torch.linalg.vector_norm(out, dtype=torch.float64)) ** 2 for out in wanted)
    errors = []
    for _, s in tried:
        made = attempt(s)
        with _replaced(skeleton, made):
            cost = 0.0
            for call, out in zip(calls, wanted, strict=True):
                cost += float(torch.linalg.vector_norm(_output(module, call) - out, dtype=torch.float64)) ** 2
        errors.append(cost if math.isfinite(cost) else math.inf)
    best = min(range(len(tried)), key=lambda i: errors[i])
    if not math.isfinite(errors[best]):
        raise SutureError(
            f"{fold.name}: no way to scale it gives finite outputs on the calibration text", "check the checkpoint"
        )
    label, s = tried[best]
    scale = math.sqrt(size) if size > 0 else 1.0
    return Choice(fold, label, s, math.sqrt(errors[best]) / scale, math.sqrt(errors[0]) / scale)


def _output(module: nn.Module, call: Call) -> Tensor:
    args, kwargs = call
    out = module(*args, **kwargs)
    return out[0] if isinstance(out, tuple) else out


@contextlib.contextmanager
def _replaced(skeleton: Skeleton, made: _Attempt) -> Iterator[None]:
    """The consumers as in an attempt, while inside."""
    kept: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for name, weight in made.weights.items():
            module = skeleton.model.get_submodule(name)
            parameter = module.get_parameter("weight")
            kept[name] = parameter.data
            parameter.data = weight.T.contiguous() if skeleton.family.conv1d else weight
            if made.inputs is not None:
                stack.enter_context(_removed(_change_inputs(module, made.inputs)))
        try:
            yield
        finally:
            for name, weight in kept.items():
                skeleton.model.get_submodule(name).get_parameter("weight").data = weight


def _change_inputs(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Any:
    return module.register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))


def _matrix(skeleton: Skeleton, name: str) -> Tensor:
    """A linear layer's weight [out, in] float32."""
    weight = skeleton.model.get_submodule(name).get_parameter("weight").detach()
    return weight.T.contiguous() if skeleton.family.conv1d else weight
