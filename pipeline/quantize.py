"""The steps `rtn` and `gptq`: plan the output's tensors, then quantize block by block and write each as it is done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..calibrate.replay import Stream, overflowing_layer, release_memory, run_block
from ..calibrate.skeleton import Skeleton, finite, open_skeleton
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear, ModelLayout
from ..checkpoint.manifest import Account
from ..checkpoint.source import TensorSource
from ..checkpoint.writer import ShardWriter, TensorSpec
from ..quant.block import QuantizedLayer, gptq_block, rtn_block
from ..quant.compressed_tensors import tensor_specs, tensors
from ..quant.export import check_divisible, check_format, config_entry
from ..quant.scheme import STORAGE
from ..quant.settings import GPTQSettings, RTNSettings
from ..quant.targets import Selection, select
from .step import Prepared, StepResult, StepRun


@dataclass(frozen=True)
class QuantizePlan(Prepared):
    """What a quantization step will write, and of which layers."""

    layout: ModelLayout
    selection: Selection


def prepare(source: TensorSource, settings: RTNSettings) -> QuantizePlan:
    """Plan the step from names and shapes alone. Raises SutureError for everything that could fail later."""
    layout = open_skeleton(source).layout
    selection = select(layout, settings.targets, settings.ignore)
    check_divisible(selection, settings.scheme)
    check_format(layout, settings.scheme)
    by_tensor: dict[str, list[Linear]] = {}
    for linear in selection.chosen:
        dtype = source.dtypes[linear.place.tensor]
        if dtype not in STORAGE:
            raise SutureError(
                f"{source.source}: {linear.place.tensor} is {dtype}; only {', '.join(STORAGE)} weights can be quantized",
                "give the unquantized checkpoint",
            )
        by_tensor.setdefault(linear.place.tensor, []).append(linear)
    _no_expert_left_behind(layout, selection, by_tensor)
    specs: list[TensorSpec] = []
    accounts: dict[str, Account] = {}
    how = f"quantized to {settings.bits} bits"
    for name, shape in source.shapes.items():
        if name in layout.stale:
            accounts[name] = Account("dropped", reason=layout.stale[name])
            continue
        new = [
            TensorSpec(*spec)
            for linear in by_tensor.get(name, ())
            for spec in tensor_specs(linear, settings.scheme, source.dtypes[name])
        ]
        specs += new or [TensorSpec(name, source.dtypes[name], shape)]
        accounts[name] = (
            Account("changed", tuple(spec.name for spec in new), how) if new else Account("copied", (name,))
        )
    config = {**source.config, "quantization_config": config_entry(layout, selection, settings.scheme)}
    return QuantizePlan(
        specs=tuple(specs),
        config=config,
        accounts=accounts,
        notes=_notes(layout, selection),
        n_blocks=len(layout.blocks),
        skipped=selection.skipped,
        layout=layout,
        selection=selection,
    )


def _no_expert_left_behind(layout: ModelLayout, selection: Selection, by_tensor: Mapping[str, list[Linear]]) -> None:
    """Experts fused in one tensor are quantized all or none; one left out would have no tensor of its own."""
    for tensor, linears in by_tensor.items():
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


def _notes(layout: ModelLayout, selection: Selection) -> tuple[str, ...]:
    notes = [f"{name} dropped: {reason}" for name, reason in layout.stale.items()]
    if layout.unknown:
        notes.append(f"{len(layout.unknown)} tensors outside the text model are copied, first {layout.unknown[0]}")
    if selection.skipped:
        first, reason = next(iter(selection.skipped.items()))
        notes.append(f"{len(selection.skipped)} linear layers stay as they are, first {first} ({reason})")
    return tuple(notes)


@torch.no_grad()
def run(work: StepRun, plan: QuantizePlan, settings: RTNSettings) -> StepResult:
    """Quantize, write and journal one block after another."""
    skeleton = open_skeleton(work.checkpoint, device=work.device)
    chosen = {linear.name for linear in plan.selection.chosen}
    streams = _Streams(work, skeleton, isinstance(settings, GPTQSettings))
    modules: dict[str, Any] = {}
    with ShardWriter(work.directory, work.shards) as writer:
        _copy_rest(work, plan, writer)
        for index in work.progress.track(range(skeleton.n_blocks), skeleton.n_blocks, work.label):
            entry = work.staging.find(step=work.key, block=index)
            if entry is not None:
                modules |= entry["modules"]
                continue
            streams.resume_after(index - 1)
            skeleton.load_block(index)
            layers = _quantize_block(work, skeleton, index, streams, chosen, settings, plan)
            _advance_probe(skeleton, index, streams.probe)
            records = _write_block(work, skeleton, index, layers, writer)
            skeleton.free_block(index)
            streams.save(index, writer, {"step": work.key, "block": index, "modules": records})
            modules |= records
        streams.wait()
    return StepResult(modules, streams.expected(plan.n_blocks))


def _advance_probe(skeleton: Skeleton, index: int, probe: Stream) -> None:
    before = probe.hidden[0].clone()
    run_block(skeleton, index, probe)
    if not bool(torch.isfinite(probe.buffer).all()):
        where = overflowing_layer(skeleton, index, before.to(skeleton.device))
        raise SutureError(
            f"{where} on the probe text hold NaN or values too large for float32",
            "a layer before it overflows: check the checkpoint",
        )


def _quantize_block(
    work: StepRun,
    skeleton: Skeleton,
    index: int,
    streams: _Streams,
    chosen: set[str],
    settings: RTNSettings,
    plan: QuantizePlan,
) -> list[QuantizedLayer]:
    mine = [linear for group in skeleton.layout.blocks[index] for linear in group if linear.name in chosen]
    storage = STORAGE[work.checkpoint.dtypes[(mine or plan.selection.chosen)[0].place.tensor]]
    if isinstance(settings, GPTQSettings):
        assert streams.calibration is not None
        return gptq_block(skeleton, index, streams.calibration, mine, settings, storage, work.paused)
    return rtn_block(skeleton, mine, settings, storage)


def _write_block(
    work: StepRun, skeleton: Skeleton, index: int, layers: list[QuantizedLayer], writer: ShardWriter
) -> dict[str, Any]:
    for layer in layers:
        for name, tensor in tensors(layer.linear.name, layer.quantized, layer.linear.conv1d).items():
            writer.write(name, tensor)
    changed = {layer.linear.place.tensor for layer in layers}
    for name in dict.fromkeys(place.tensor for place in skeleton.layout.block_tensors(index).values()):
        if name not in changed:
            writer.write_bytes(name, work.checkpoint.read_bytes(name))
    return {layer.linear.name: _record(layer) for layer in layers}


def _record(layer: QuantizedLayer) -> dict[str, Any]:
    scheme = layer.quantized.scheme
    record = {"bits": scheme.bits, "group_size": scheme.group_size, "symmetric": scheme.symmetric}
    return {**asdict(layer.record), **record, "shape": [layer.linear.out_features, layer.linear.in_features]}


def _copy_rest(work: StepRun, plan: QuantizePlan, writer: ShardWriter) -> None:
    """Tensors outside the blocks."""
    if work.staging.find(step=work.key, unit="rest") is not None:
        return
    blocks = range(len(plan.layout.blocks))
    inside = {place.tensor for index in blocks for place in plan.layout.block_tensors(index).values()}
    for name, account in plan.accounts.items():
        if account.action == "copied" and name not in inside:
            if work.checkpoint.dtypes[name] in STORAGE:
                finite(work.checkpoint.read(name), name, work.checkpoint.source)
            writer.write_bytes(name, work.checkpoint.read_bytes(name))
    writer.sync()
    work.staging.record({"step": work.key, "unit": "rest"})


class _Streams:
    """Hidden states between blocks: the calibration batches and the probe, saved so that a killed run goes on."""

    def __init__(self, work: StepRun, skeleton: Skeleton, calibrated: bool) -> None:
        self.work, self.skeleton = work, skeleton
        self.at = -1  # block whose outputs the streams hold; -1: embeddings
        self._started = False
        self._saver = ThreadPoolExecutor(1, "suture-save")
        self._saving: Future[None] | None = None
        self.calibration: Stream | None = None
        if calibrated:
            assert work.text is not None
            ids = torch.from_numpy(work.text.ids).split(work.batch)
            self.calibration = Stream.empty(skeleton, ids, work.budget, work.staging.work / f"{work.key}-hidden.bin")
        self.probe = Stream.empty(skeleton, [work.probe])

    def _all(self) -> Iterator[tuple[str, Stream]]:
        yield "probe", self.probe
        if self.calibration is not None:
            yield "calibration", self.calibration

    def resume_after(self, block: int) -> None:
        """Make the streams hold block `block`'s outputs: they do, they are embedded, or they are read back."""
        if self._started and self.at == block:
            return
        for name, stream in self._all():
            if block < 0:
                for ids, hidden in zip(stream.ids, stream.hidden, strict=True):
                    hidden.copy_(self.skeleton.embed(ids))
            else:
                stream.restore(self._file(name, block))
        self._started, self.at = True, block

    def save(self, block: int, writer: ShardWriter, entry: dict[str, Any]) -> None:
        """Put what block `block` left on disk and journal it, while the next block computes."""
        self.wait()
        self.at = block
        self._saving = self._saver.submit(self._save, block, writer, entry)
        for _, stream in self._all():
            stream.saving = self._saving

    def _save(self, block: int, writer: ShardWriter, entry: dict[str, Any]) -> None:
        for name, stream in self._all():
            stream.save(self._file(name, block))
        writer.sync()
        self.work.staging.record(entry)
        self._forget(block - 1)

    def wait(self) -> None:
        """Return once everything saved so far is on disk and in the journal."""
        if self._saving is not None:
            self._saving.result()

    def _forget(self, block: int) -> None:
        for name, _ in self._all():
            if block != self.work.verify_blocks - 1 or name != "probe":
                with contextlib.suppress(FileNotFoundError):
                    self._file(name, block).unlink()

    def expected(self, n_blocks: int) -> Tensor:
        """Logits [B, T, vocab] of the probe after `verify_blocks` blocks, computed from the weights in memory."""
        verified = min(self.work.verify_blocks, n_blocks)
        self.probe.restore(self._file("probe", verified - 1))
        self.calibration = None  # nothing of it is needed any more
        release_memory()
        self.skeleton.load_head()
        hidden = self.probe.hidden[0].to(self.skeleton.device)
        logits = self.skeleton.logits(hidden, torch.arange(hidden.shape[1])).cpu()
        self.skeleton.free_head()
        return logits

    def _file(self, name: str, block: int) -> Any:
        return self.work.staging.work / f"{self.work.key}-{name}-{block}.bin"
