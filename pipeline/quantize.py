"""The steps `rtn` and `gptq`: plan the output's tensors, then quantize block by block and write each as it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..calibrate.crew import ALONE, Crew
from ..calibrate.replay import Stream, run_block
from ..calibrate.skeleton import Skeleton, open_layout, open_skeleton
from ..calibrate.statistics import CHUNK
from ..calibrate.tokens import TokenBlocks
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear, ModelLayout
from ..checkpoint.manifest import Account
from ..checkpoint.reader import open_checkpoint
from ..checkpoint.source import TensorSource
from ..checkpoint.writer import TensorSpec
from ..quant.block import QuantizedLayer, gptq_block, learned_block, rtn_block
from ..quant.compressed_tensors import Spec
from ..quant.decode import with_dtype
from ..quant.export import FORMATS, check_divisible, ranks_that_divide, scheme_groups, undivided
from ..quant.scheme import STORAGE, Scheme
from ..quant.settings import GPTQSettings, LearnSettings, RTNSettings, Rule
from ..quant.targets import Selection, ruled_schemes, select
from .step import Prepared, StepResult, StepRun
from .walk import CALIBRATION, BlockStreams, Made, round_blocks, states_file, text_stream

REFERENCE = "reference"  # the calibration text through the original model
INPUTS = "inputs"  # a block's inputs while it is trained


@dataclass(frozen=True)
class QuantizePlan(Prepared):
    """What a quantization step will write, and of which layers."""

    layout: ModelLayout
    selection: Selection
    schemes: dict[str, Scheme]  # of the chosen layers
    ruled: frozenset[str]  # those of them that a rule is for

    @property
    def last_block(self) -> int:
        """The last one with a chosen layer: what the text becomes after it, nothing needs to know."""
        return _last_block(self.layout, self.selection)


def prepare(source: TensorSource, settings: RTNSettings, schemes: Mapping[str, Scheme] | None = None) -> QuantizePlan:
    """Plan the step from names and shapes alone. Raises SutureError for everything that could fail later.

    `schemes`: layer -> format, where something other than the settings decided it.
    """
    layout = open_layout(source)
    selection = select(layout, settings.targets, settings.ignore, settings.layers)
    ruled = ruled_schemes(layout, selection, settings)
    if schemes is None:
        schemes = {linear.name: ruled.get(linear.name, settings.scheme) for linear in selection.chosen}
    groups = scheme_groups(selection, schemes)
    check_divisible(groups)
    form = FORMATS[settings.format]
    form.check(layout, groups)
    _no_expert_left_behind(layout, selection)

    def specs_of(linear: Linear, dtype: str) -> list[Spec]:
        return form.specs(linear, schemes[linear.name], form.scale_dtype or dtype)

    def how(linears: Sequence[Linear]) -> str:
        bits = sorted({schemes[linear.name].bits for linear in linears})
        return f"quantized to {' and '.join(map(str, bits))} bits"

    specs, accounts = planned_tensors(source, layout, selection, specs_of, how)
    config = {**source.config, "quantization_config": form.config(layout, selection, groups)}
    if form.scale_dtype is not None:  # its kernels compute in the scales' dtype
        config = with_dtype(config, form.scale_dtype)
    return QuantizePlan(
        specs=specs,
        config=config,
        accounts=accounts,
        notes=(*_notes(layout, selection, settings), *undivided(groups, settings.format)),
        not_stock=form.not_stock,
        n_blocks=len(layout.blocks),
        skipped=selection.skipped,
        layout=layout,
        streams=len((*_streams(settings), *_scratch(settings))) or 1,
        forwards=_forwards(settings),
        reached=(1 + _last_block(layout, selection)) / len(layout.blocks),
        working_blocks=6 if isinstance(settings, LearnSettings) else int(_two_models(settings)),
        working=_working(layout, selection, settings),
        weight_passes=_passes(settings) * sum(linear.numel for linear in selection.chosen),
        selection=selection,
        schemes=dict(schemes),
        ruled=frozenset(ruled),
    )


def decide(source: TensorSource, settings: GPTQSettings, tokens: int) -> GPTQSettings:
    """The settings with `asymmetric: auto` decided by how much text there is."""
    selection = select(open_layout(source), settings.targets, settings.ignore, settings.layers)
    compared = [linear.in_features for linear in selection.chosen if linear.expert is None]
    return settings.decided(tokens, max(compared, default=0))


def planned_tensors(
    source: TensorSource,
    layout: ModelLayout,
    selection: Selection,
    specs_of: Callable[[Linear, str], list[Spec]],
    how: Callable[[Sequence[Linear]], str],
) -> tuple[tuple[TensorSpec, ...], dict[str, Account]]:
    """The output's tensors and every input tensor's account, when each chosen layer becomes `specs_of(layer, dtype)`."""
    by_tensor = _by_tensor(selection)
    for name in by_tensor:
        if source.dtypes[name] not in STORAGE:
            raise SutureError(
                f"{source.source}: {name} is {source.dtypes[name]}; only {', '.join(STORAGE)} weights can be quantized",
                "give the unquantized checkpoint",
            )
    specs: list[TensorSpec] = []
    accounts: dict[str, Account] = {}
    for name, shape in source.shapes.items():
        linears = by_tensor.get(name, [])
        if name in layout.stale:
            accounts[name] = Account("dropped", reason=layout.stale[name])
        elif linears:
            new = [TensorSpec(*spec) for linear in linears for spec in specs_of(linear, source.dtypes[name])]
            specs += new
            accounts[name] = Account("changed", tuple(spec.name for spec in new), how(linears))
        else:
            specs.append(TensorSpec(name, source.dtypes[name], shape))
            accounts[name] = Account("copied", (name,))
    return tuple(specs), accounts


def _by_tensor(selection: Selection) -> dict[str, list[Linear]]:
    by_tensor: dict[str, list[Linear]] = {}
    for linear in selection.chosen:
        by_tensor.setdefault(linear.place.tensor, []).append(linear)
    return by_tensor


def _no_expert_left_behind(layout: ModelLayout, selection: Selection) -> None:
    """Experts fused in one tensor are quantized all or none; one left out would have no tensor of its own."""
    for tensor, linears in _by_tensor(selection).items():
        sharing = [linear for linear in layout.linears if linear.place.tensor == tensor]
        if len(sharing) != len(linears):
            raise SutureError(
                f"{tensor} holds {len(sharing)} experts' matrices, of which only {len(linears)} are selected",
                "select all or none of them",
            )
    experts = [linear for linear in layout.linears if linear.expert is not None]
    chosen = [linear for linear in experts if linear.name in selection.names]
    fused = all(linear.place.expert is not None for linear in experts)
    if len(chosen) != len(experts) and (chosen or not fused):  # a loader that fuses them expects packed ones
        raise SutureError(
            f"targets: {len(chosen)} of {len(experts)} expert matrices are selected; loaders read all experts in one format",
            "select all or none of them" if fused else "select all of them",
        )


def notes_of(layout: ModelLayout, selection: Selection) -> tuple[str, ...]:
    """What the user should know of the layers and tensors that stay."""
    notes = [f"{name} dropped: {reason}" for name, reason in layout.stale.items()]
    if layout.unknown:
        notes.append(f"{len(layout.unknown)} tensors outside the text model are copied, first {layout.unknown[0]}")
    if selection.skipped:
        first, reason = next(iter(selection.skipped.items()))
        notes.append(f"{len(selection.skipped)} linear layers stay as they are, first {first} ({reason})")
    return tuple(notes)


def _notes(layout: ModelLayout, selection: Selection, settings: RTNSettings) -> tuple[str, ...]:
    notes = [*notes_of(layout, selection)]
    experts = sum(linear.expert is not None for linear in selection.chosen)
    if experts and _two_streams(settings):
        notes.append(
            f"{experts} expert matrices are calibrated symmetrically: the two models send different tokens to them"
        )
    return tuple(notes)


def run(work: StepRun, plan: QuantizePlan, settings: RTNSettings) -> StepResult:
    """Quantize, write and journal one block after another; GPTQ together with the other processes."""
    original = open_skeleton(work.checkpoint, device=work.device) if _two_models(settings) else None
    form = FORMATS[settings.format]
    crew = work.crew if isinstance(settings, GPTQSettings) and not isinstance(settings, LearnSettings) else ALONE

    def make(skeleton: Skeleton, index: int, streams: BlockStreams) -> Iterator[Made]:
        given = (settings, plan, work.paused, crew)
        for x in _quantize_block(work.checkpoint, skeleton, original, index, streams, *given):
            yield Made(x.linear, form.tensors(x.linear, x.quantized), _record(x, settings.format))
            del x  # and its codes

    blocks = range(plan.last_block + 1)
    first = next((index for index in blocks if work.staging.find(step=work.key, block=index) is None), None)
    if crew.size > 1 and first is not None:
        assert work.text is not None and isinstance(settings, GPTQSettings)
        given = (work.batch, work.budget, work.paused, work.device.type, work.staging.work, work.key)
        crew.share(RoundingJob(work.checkpoint.path, plan, settings, work.text, first, *given))
    texts = {"names": _streams(settings), "scratch": _scratch(settings), "last": plan.last_block}
    return round_blocks(work, plan, plan.layout, make, **texts, crew=crew if first is not None else ALONE)


@dataclass(frozen=True)
class RoundingJob:
    """What another process needs to know to take its part in a step's GPTQ: of the text, and of each layer's rows."""

    model: Path  # the step's input
    plan: QuantizePlan
    settings: GPTQSettings
    text: TokenBlocks
    first: int  # block to be done
    batch: int
    budget: int
    paused: bool
    device: str
    files: Path  # directory of the hidden states that are saved
    key: str

    @torch.no_grad()
    def help(self, crew: Crew) -> None:
        """As `round_blocks` goes, without the probe and the output."""
        source = open_checkpoint(str(self.model))
        skeleton = open_skeleton(source, device=self.device)
        original = open_skeleton(source, device=self.device) if _two_models(self.settings) else None
        names = _streams(self.settings)
        streams: dict[str, Stream] = {}
        for name in names:
            spill = self.files / f"{self.key}-{name}-hidden.bin"
            stream = text_stream(skeleton, self.text, self.batch, self.budget // len(names), spill, crew)
            if self.first > 0:
                stream.restore(states_file(self.files, self.key, name, self.first - 1))
            else:
                stream.embed(skeleton)
            streams[name] = stream
        for index in range(self.first, self.plan.last_block + 1):
            skeleton.load_block(index)
            given = (self.settings, self.plan, self.paused, crew)
            list(_quantize_block(source, skeleton, original, index, streams, *given))
            skeleton.free_block(index)
            if index > self.first:
                crew.meet()
            for name, stream in streams.items():
                stream.save(states_file(self.files, self.key, name, index))
        crew.meet()


def _two_models(settings: RTNSettings) -> bool:
    """Whether the original model runs beside the quantized one."""
    return isinstance(settings, LearnSettings) or _two_streams(settings)


def _two_streams(settings: RTNSettings) -> bool:
    """Whether GPTQ sees the original model's inputs beside the quantized one's."""
    return isinstance(settings, GPTQSettings) and settings.asymmetric not in ("auto", "none")


def _streams(settings: RTNSettings) -> tuple[str, ...]:
    if not isinstance(settings, GPTQSettings):
        return ()
    return (CALIBRATION, REFERENCE) if _two_models(settings) else (CALIBRATION,)


def _scratch(settings: RTNSettings) -> tuple[str, ...]:
    return (INPUTS,) if isinstance(settings, LearnSettings) else ()


def _forwards(settings: RTNSettings) -> float:
    if isinstance(settings, LearnSettings):
        return 3 + 3 * settings.passes
    return 2 if _two_models(settings) else 1


def _last_block(layout: ModelLayout, selection: Selection) -> int:
    names = selection.names
    blocks = enumerate(layout.blocks)
    return max(index for index, groups in blocks if any(x.name in names for group in groups for x in group))


def _working(layout: ModelLayout, selection: Selection, settings: RTNSettings) -> int:
    """Bytes held at most while a layer is rounded, beside the block: its codes and dense values (plain rounding) or copies
    of its weights and of H (GPTQ), and what the block has become so far (packed, or codes)."""
    most = 0
    for block in layout.blocks:
        codes = sum(linear.numel for group in block for linear in group if linear.name in selection.names)
        for group in block:
            chosen = [linear for linear in group if linear.name in selection.names]
            if not chosen:
                continue
            together = [x.numel for x in chosen] if chosen[0].expert is None else [max(x.numel for x in chosen)]
            if isinstance(settings, GPTQSettings):
                sides = (2 if _two_streams(settings) else 0) + 3.75
                inputs = chosen[0].in_features
                held = int(_hessian_bytes(settings) * inputs * (sides * inputs + CHUNK)) + 4 * 5 * sum(together)
            else:
                held = 4 * max(together)
            made = codes * 3 // 2 if isinstance(settings, GPTQSettings) else 0
            most = max(most, held + made)
    return most


def _passes(settings: RTNSettings) -> int:
    """Over each weight: rounding, packing and errors; the search for ranges; GPTQ's columns, which change 32 at a time."""
    return 280 + 150 * (settings.range_search is not None) + 320 * isinstance(settings, GPTQSettings)


def _hessian_bytes(settings: GPTQSettings) -> int:
    return 8 if settings.hessian == "float64" else 4


def _quantize_block(
    source: TensorSource,
    skeleton: Skeleton,
    original: Skeleton | None,
    index: int,
    streams: BlockStreams | Mapping[str, Stream],
    settings: RTNSettings,
    plan: QuantizePlan,
    paused: bool,
    crew: Crew,
) -> Iterable[QuantizedLayer]:
    names = plan.selection.names
    mine = [linear for group in skeleton.layout.blocks[index] for linear in group if linear.name in names]
    if index > plan.last_block:
        return []
    own = source.dtypes[(mine or plan.selection.chosen)[0].place.tensor]
    storage = STORAGE[FORMATS[settings.format].scale_dtype or own]
    if not isinstance(settings, GPTQSettings):
        return rtn_block(skeleton, mine, settings, storage, plan.schemes)
    stream = streams[CALIBRATION]
    if original is None:
        return gptq_block(skeleton, index, stream, mine, settings, storage, paused, plan.schemes, None, crew)
    original.load_block(index)
    reference = (original, streams[REFERENCE])
    training = settings if isinstance(settings, LearnSettings) and mine else None
    if training is not None:
        streams[INPUTS].buffer.copy_(stream.buffer)
    beside = reference if _two_streams(settings) else None
    layers = gptq_block(skeleton, index, stream, mine, settings, storage, paused, plan.schemes, beside, crew)
    if beside is None:
        run_block(original, index, streams[REFERENCE])
    if training is not None:
        inputs, targets = streams[INPUTS], streams[REFERENCE]
        layers = learned_block(skeleton, index, layers, original, inputs, targets, training)
        for batch in range(len(inputs.hidden)):
            stream.replace(batch, inputs.through(skeleton, index, batch))
    original.free_block(index)
    return layers


def _record(layer: QuantizedLayer, form: str) -> dict[str, Any]:
    scheme = layer.quantized.scheme
    record = {"bits": scheme.bits, "group_size": scheme.group_size, "symmetric": scheme.symmetric}
    record["tensor_parallel"] = ranks_that_divide(layer.linear, scheme, form)
    return {**asdict(layer.record), **record, "shape": [layer.linear.out_features, layer.linear.in_features]}


def rehearsal(plan: QuantizePlan, settings: RTNSettings) -> tuple[str, RTNSettings]:
    """Plain rounding of the first block's layers to the same formats."""
    block = [linear for group in plan.layout.blocks[0] for linear in group]
    chosen = [linear for linear in block if linear.name in plan.schemes]
    first = chosen or [linear for linear in block if settings.scheme.divides(linear.in_features)]
    rules = [Rule(match=linear.name, **asdict(plan.schemes[linear.name])) for linear in chosen]
    one = len({plan.schemes[linear.name] for linear in chosen}) < 2
    fields = {key: getattr(settings, key) for key in RTNSettings.model_fields}
    fields |= asdict(plan.schemes[chosen[0].name]) if chosen else {}
    changed = {"search": False, "targets": [x.name for x in first], "ignore": [], "layers": None}
    changed |= {"rules": [] if one else rules}
    return "rtn", RTNSettings(**fields | changed)
