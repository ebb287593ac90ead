"""What steps share that go through a model block by block: the hidden states between blocks, and the walk itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibrate.crew import ALONE, Crew
from ..calibrate.memory import release_memory
from ..calibrate.replay import Stream, overflowing_layer, run_block
from ..calibrate.skeleton import Skeleton, finite, open_skeleton
from ..calibrate.tokens import TokenBlocks
from ..checkpoint.errors import SutureError
from ..checkpoint.layout import Linear, ModelLayout
from ..checkpoint.source import OverlaySource, PlannedSource, TensorSource
from ..checkpoint.writer import ShardWriter
from ..quant.scheme import STORAGE
from .step import Prepared, StepResult, StepRun, planned_output

CONVERTING = 2  # `working_blocks` of a step that `convert_blocks` carries out: the block as it becomes, and unrounded
CALIBRATION = "calibration"  # name of the stream of calibration tokens
TEACHER = "teacher"  # the same tokens through the original blocks, where the other goes through the converted ones
ORIGINAL, UNROUNDED = "original", "unrounded"  # the probe through the input, and through the output in float32
_ROWS = 16  # tokens whose distributions are compared at once, in float64
_LAST_BITS = 8  # what sums in another order may make of the last bits of every weight
_NEVER = 0.01  # of the largest logit: more is not taken for rounding whatever the model amplifies
EXACT = 1e-4  # of the largest logit: float32 rounding of another order of the same sums, over all blocks

Convert = Callable[[Skeleton, int, Stream | None], tuple[Mapping[str, Tensor], dict[str, Any]]]
"""(the input's skeleton with the block loaded, index, calibration stream at the block's inputs) ->
(the block's changed tensors by the output's disk names, records of its modules). The stream must not be changed."""

Refine = Callable[[Skeleton, Skeleton, int, Stream, Stream], tuple[Mapping[str, Tensor], dict[str, Any]]]
"""(the input's skeleton and the output's, both with the block loaded, index, the calibration tokens at the block's inputs
in the original model and in the converted one) -> (further changed tensors, records to add to those of `convert`). Takes
both streams through the block, the converted one with the tensors that it returns."""


def planned_source(work: StepRun, plan: Prepared) -> PlannedSource:
    """The step's output as names and shapes."""
    return planned_output(f"{work.checkpoint.source} in {work.label}", plan, work.checkpoint)


@torch.no_grad()
def convert_blocks(
    work: StepRun,
    plan: Prepared,
    layout: ModelLayout,
    convert: Convert,
    *,
    calibrated: bool,
    converted_inputs: bool = True,
    outside: Mapping[str, Tensor] | None = None,
    exact: bool = False,
    measured: bool = False,
    refine: Refine | None = None,
    teacher: TensorSource | None = None,
) -> StepResult:
    """Change a model block by block, and write each as it is done; resumes after a kill.

    `layout`: of the input. `outside`: changed tensors outside the blocks, by the output's disk names. What `convert`
    returns is rounded to its planned dtype before anything is computed from it, so what follows sees what a loader
    will. With `converted_inputs` a block is shown what the converted blocks before it put out, else what the original
    ones did. The number of blocks and their order must stay.

    `exact`: the change is claimed to leave every float32 logit what it was. The claim is checked on the probe with the
    changed tensors as they are before they are rounded to their stored dtype; SutureError when it does not hold, and
    the receipt holds the largest difference and the KL divergence when it does. `measured`: nothing is claimed; the same
    receipt says what was found.

    `refine` is called on each converted block, to fit it to what the original one puts out. Its tensors too are rounded
    before they are stored; it rounds what it puts into the module itself. `teacher`: what is the original to it, and what
    the receipt compares with, when that is not the step's input.
    """
    before = open_skeleton(teacher or work.checkpoint, device=work.device)
    overlay = OverlaySource(planned_source(work, plan), work.checkpoint)
    outside = outside or {}
    overlay.put(_stored(overlay, outside))
    after = open_skeleton(overlay, device=work.device)
    through_original = refine is not None or (calibrated and not converted_inputs)
    through_converted = refine is not None or (calibrated and converted_inputs)
    names = ((CALIBRATION,) if through_converted else ()) + ((TEACHER,) if through_original else ())
    proved = exact or measured
    streams = BlockStreams(work, after, names, (ORIGINAL, UNROUNDED) if proved else ())
    streams.embedder |= {ORIGINAL: before, TEACHER: before}
    unrounded = open_skeleton(_unrounded(overlay, outside), device=work.device) if proved else None
    if unrounded is not None:
        streams.embedder[UNROUNDED] = unrounded
    modules: dict[str, Any] = {}
    with ShardWriter(work.directory, work.shards) as writer:
        copy_rest(work, plan, layout, writer, overlay, tuple(outside or ()))
        for index in work.progress.track(range(after.n_blocks), after.n_blocks, work.label):
            entry = work.staging.find(step=work.key, block=index)
            if entry is not None:
                modules |= entry["modules"]
                continue
            streams.resume_after(index - 1)
            before.load_block(index)
            seen = streams[CALIBRATION if converted_inputs else TEACHER] if calibrated else None
            made, records = convert(before, index, seen)
            if refine is not None:
                overlay.put(_stored(overlay, made))
                after.load_block(index)
                more, notes = refine(before, after, index, streams[TEACHER], streams[CALIBRATION])
                made, records = {**made, **more}, _joined(records, notes)
            elif through_original:
                run_block(before, index, streams[TEACHER])
            if unrounded is not None:
                run_block(before, index, streams[ORIGINAL])
                _run_unrounded(unrounded, index, made, streams[UNROUNDED])
            before.free_block(index)
            overlay.put(_stored(overlay, made))
            after.load_block(index)
            if refine is None and through_converted:
                run_block(after, index, streams[CALIBRATION])
            advance_probe(after, index, streams.probe)
            after.free_block(index)
            for name in dict.fromkeys(place.tensor for place in after.layout.block_tensors(index).values()):
                if name in made:
                    writer.write(name, overlay.read(name))
                else:
                    _check_copied(plan, name, work.label)
                    writer.write_bytes(name, work.checkpoint.read_bytes(name))
            overlay.forget(made)
            streams.save(index, writer, {"step": work.key, "block": index, "modules": records})
            modules |= records
        streams.wait()
    receipt: dict[str, Any] = {}
    if unrounded is not None:
        verified = min(work.verify_blocks, plan.n_blocks)
        logits = streams.logits(ORIGINAL, before, verified), streams.logits(UNROUNDED, unrounded, verified)
        receipt = check_exact(work.label, *logits) if exact else compare_logits(*logits)
    return StepResult(modules, streams.expected(plan.n_blocks), receipt)


def copy_blocks(work: StepRun, plan: Prepared, layout: ModelLayout) -> StepResult:
    """The input as it is: what a step does in the preflight that only text could tell how to change tensors."""

    def convert(skeleton: Skeleton, index: int, stream: Stream | None) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        names = {place.tensor for place in layout.block_tensors(index).values()}
        return {name: work.checkpoint.read(name) for name in names if plan.accounts[name].action == "changed"}, {}

    return convert_blocks(work, plan, layout, convert, calibrated=False)


@dataclass(frozen=True)
class Made:
    """What became of one layer."""

    linear: Linear
    tensors: dict[str, Tensor]  # by the output's disk names
    record: dict[str, Any]  # for the manifest


@torch.no_grad()
def round_blocks(
    work: StepRun,
    plan: Prepared,
    layout: ModelLayout,
    make: Callable[[Skeleton, int, BlockStreams], Iterable[Made]],
    *,
    names: tuple[str, ...] = (),
    scratch: tuple[str, ...] = (),
    last: int | None = None,
    crew: Crew = ALONE,
) -> StepResult:
    """Put layers into another format block by block, and write each as it is done; resumes after a kill.

    `make`: (skeleton with the block loaded, index, streams) -> its changed layers, each written before the next is asked
    for; at the end the modules hold the dequantized weights, and the streams `names` over the calibration tokens the
    block's outputs. `scratch`: as in `BlockStreams`.
    `last`: the block after which no stream of text is needed. `crew`: the processes that have their parts of the text's
    streams and, up to `last`, do the same: `make`, `Crew.meet` for the block before unless it is the first to be done, and
    saving; and `Crew.meet` at the end.
    """
    skeleton = open_skeleton(work.checkpoint, device=work.device)
    streams = BlockStreams(work, skeleton, names, scratch=scratch, crew=crew)
    modules: dict[str, Any] = {}
    with ShardWriter(work.directory, work.shards) as writer:
        copy_rest(work, plan, layout, writer)
        for index in work.progress.track(range(skeleton.n_blocks), skeleton.n_blocks, work.label):
            entry = work.staging.find(step=work.key, block=index)
            if entry is not None:
                modules |= entry["modules"]
                continue
            if last is not None and index > last:
                streams.end_text()
            streams.resume_after(index - 1)
            skeleton.load_block(index)
            records = write_block(work, skeleton, index, make(skeleton, index, streams), writer)
            advance_probe(skeleton, index, streams.probe)
            skeleton.free_block(index)
            streams.save(index, writer, {"step": work.key, "block": index, "modules": records})
            modules |= records
        streams.wait()
    return StepResult(modules, streams.expected(plan.n_blocks))


def write_block(
    work: StepRun, skeleton: Skeleton, index: int, layers: Iterable[Made], writer: ShardWriter
) -> dict[str, Any]:
    """Write a block's changed layers as they come and copy its other tensors. Records by layer."""
    changed, records = set(), {}
    for layer in layers:
        for name, tensor in layer.tensors.items():
            writer.write(name, tensor)
        changed.add(layer.linear.place.tensor)
        records[layer.linear.name] = layer.record
        del layer  # before the next is made
    for name in dict.fromkeys(place.tensor for place in skeleton.layout.block_tensors(index).values()):
        if name not in changed:
            writer.write_bytes(name, work.checkpoint.read_bytes(name))
    return records


def check_exact(
    what: str, original: Tensor, changed: Tensor, nudged: Callable[[], Tensor] | None = None
) -> dict[str, Any]:
    """Receipt of a change that must preserve the function. Raises SutureError when logits [B, T, vocab] differ by more
    than float32 rounding.

    `nudged`: logits of the changed weights moved in their last bits. A model may amplify that beyond EXACT (large
    weights do, block by block); it is asked for then, and how far it moves the logits is what rounding can explain.
    """
    receipt = compare_logits(original, changed)
    if not receipt["exact"] and nudged is not None:
        noise = distance(changed, nudged())["max_logit_difference"]
        most = min(_LAST_BITS * noise, _NEVER * receipt["largest_logit"])
        receipt |= {
            "exact": receipt["max_logit_difference"] <= most,
            "last_bits_move_logits": noise,
        }
    if not receipt["exact"]:
        raise SutureError(
            f"{what}: should leave the model's function as it is, but float32 logits up to "
            f"{receipt['largest_logit']:.3g} move by {receipt['max_logit_difference']:.3g}",
            "nothing was written; please report this",
        )
    return receipt


def compare_logits(original: Tensor, changed: Tensor) -> dict[str, Any]:
    """`distance`, and whether it is float32 rounding (`exact`)."""
    found = distance(original, changed)
    return {"exact": found["max_logit_difference"] <= EXACT * found["largest_logit"], **found}


def distance(original: Tensor, changed: Tensor) -> dict[str, Any]:
    """How far logits [B, T, vocab] are apart: their largest difference, and the mean KL divergence of `changed`."""
    parts = []
    for p, q in zip(original.flatten(0, 1).split(_ROWS), changed.flatten(0, 1).split(_ROWS), strict=True):
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        total = (log_p.exp() * (log_p - log_q)).sum()
        parts.append(torch.stack([(p - q).abs().max().double(), p.abs().max().double(), total]))
    found = torch.stack(parts)  # Tensor.max and sum keep a NaN, Python's max would not
    difference, scale = (float(value) for value in found[:, :2].amax(0))
    kl = float(found[:, 2].sum()) / (original.shape[0] * original.shape[1])
    return {
        "max_logit_difference": float(f"{difference:.3g}"),
        "largest_logit": float(f"{scale:.3g}"),
        "kl": float(f"{max(kl, 0.0):.3g}"),
        "tokens": original.shape[0] * original.shape[1],
    }


def _check_copied(plan: Prepared, name: str, what: str) -> None:
    """A tensor that was to be changed and was not made must not pass for its old self."""
    if plan.accounts[name].action != "copied":
        raise SutureError(f"{what}: {name} was to be {plan.accounts[name].action}, but nothing was made of it")


def _joined(records: dict[str, Any], notes: dict[str, Any]) -> dict[str, Any]:
    """Both records of each module in one."""
    return {name: {**records.get(name, {}), **notes.get(name, {})} for name in {**records, **notes}}


def _unrounded(overlay: OverlaySource, outside: Mapping[str, Tensor]) -> OverlaySource:
    """The same plan, for tensors that are not rounded to their stored dtype."""
    source = OverlaySource(overlay.planned, overlay.base)
    source.put({name: tensor.cpu() for name, tensor in outside.items()})
    return source


def _run_unrounded(skeleton: Skeleton, index: int, made: Mapping[str, Tensor], stream: Stream) -> None:
    source = skeleton.source
    assert isinstance(source, OverlaySource)
    source.put({name: tensor.cpu() for name, tensor in made.items()})
    skeleton.load_block(index)
    run_block(skeleton, index, stream)
    skeleton.free_block(index)
    source.forget(made)


def _stored(overlay: OverlaySource, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the dtypes that were planned for them."""
    return {name: tensor.to(STORAGE[overlay.dtypes[name]]).contiguous().cpu() for name, tensor in tensors.items()}


@torch.no_grad()
def probe_logits(skeleton: Skeleton, ids: Tensor, n_blocks: int) -> Tensor:
    """Logits [B, T, vocab] of the first `n_blocks` blocks and the head, read one layer after another."""
    stream = Stream.start(skeleton, [ids])
    with skeleton.reading_as_needed():
        for index in range(min(n_blocks, skeleton.n_blocks)):
            skeleton.load_block(index)
            advance_probe(skeleton, index, stream)
            skeleton.free_block(index)
    return head_logits(skeleton, stream.hidden[0])


def head_logits(skeleton: Skeleton, hidden: Tensor) -> Tensor:
    """Logits [B, T, vocab] on the CPU of hidden states [B, T, hidden] behind the last block, by a head that is read for it."""
    with skeleton.reading_as_needed():
        skeleton.load_head()
        logits = skeleton.logits(hidden.to(skeleton.device), torch.arange(hidden.shape[1])).cpu()
        skeleton.free_head()
    return logits


def advance_probe(skeleton: Skeleton, index: int, probe: Stream) -> None:
    """Run block `index` over the probe. Raises SutureError naming the first layer that overflows."""
    before = probe.hidden[0].clone()
    run_block(skeleton, index, probe)
    if not bool(torch.isfinite(probe.buffer).all()):
        where = overflowing_layer(skeleton, index, before.to(skeleton.device))
        raise SutureError(
            f"{where} on the probe text hold NaN or values too large for float32",
            "a layer before it overflows: check the checkpoint",
        )


def copy_rest(
    work: StepRun,
    plan: Prepared,
    layout: ModelLayout,
    writer: ShardWriter,
    overlay: OverlaySource | None = None,
    changed: tuple[str, ...] = (),
) -> None:
    """Write the tensors outside the blocks: copies, and from `overlay` those named in `changed`."""
    if work.staging.find(step=work.key, unit="rest") is not None:
        return
    blocks = range(len(layout.blocks))
    inside = {place.tensor for index in blocks for place in layout.block_tensors(index).values()}
    for name in changed:
        assert overlay is not None
        writer.write(name, finite(overlay.read(name), name, work.checkpoint.source))
    for name, account in plan.accounts.items():
        if account.action == "copied" and name not in inside and name not in changed:
            if work.checkpoint.dtypes[name] in STORAGE:
                finite(work.checkpoint.read(name), name, work.checkpoint.source)
            writer.write_bytes(name, work.checkpoint.read_bytes(name))
    writer.sync()
    work.staging.record({"step": work.key, "unit": "rest"})


class BlockStreams:
    """Hidden states between blocks: the probe and any streams over the calibration tokens, saved so that a killed run
    goes on.

    `skeleton` embeds them, unless `embedder` names another for a stream, and gives the probe's logits at the end.
    """

    def __init__(
        self,
        work: StepRun,
        skeleton: Skeleton,
        names: tuple[str, ...] = (),
        probes: tuple[str, ...] = (),
        scratch: tuple[str, ...] = (),
        crew: Crew = ALONE,
    ) -> None:
        """`names`: streams over the calibration text. `probes`: further ones over the probe. `scratch`: room for hidden
        states of the calibration text within a block; not embedded, not saved. `crew`: the processes that hold parts of
        the text; a block is in the journal once all have saved theirs."""
        self.work, self.skeleton, self.crew = work, skeleton, crew
        self._unrecorded: tuple[int, dict[str, Any]] | None = None  # saved here; elsewhere, that is to be asked
        self.at = -1  # block whose outputs the streams hold; -1: embeddings
        self.embedder: dict[str, Skeleton] = {}
        self._started = False
        self._saver = ThreadPoolExecutor(1, "suture-save")
        self._saving: Future[None] | None = None
        self.probe = Stream.empty(skeleton, [work.probe])
        self._probes = {name: Stream.empty(skeleton, [work.probe]) for name in probes}
        self._calibrated: dict[str, Stream] = {}
        self._scratch: dict[str, Stream] = {}
        for name in (*names, *scratch):
            assert work.text is not None
            budget = work.budget // len((*names, *scratch))
            spill = work.staging.work / f"{work.key}-{name}-hidden.bin"
            stream = text_stream(skeleton, work.text, work.batch, budget, spill, crew)
            (self._calibrated if name in names else self._scratch)[name] = stream

    def __getitem__(self, name: str) -> Stream:
        return (self._calibrated | self._scratch | self._probes)[name]

    def _all(self) -> Iterator[tuple[str, Stream]]:
        yield "probe", self.probe
        yield from self._probes.items()
        yield from self._calibrated.items()

    def resume_after(self, block: int) -> None:
        """Make the streams hold block `block`'s outputs: they do, they are embedded, or they are read back."""
        if self._started and self.at == block:
            return
        for name, stream in self._all():
            if block < 0:
                stream.embed(self.embedder.get(name, self.skeleton))
            else:
                stream.restore(self._file(name, block))
        self._started, self.at = True, block

    def save(self, block: int, writer: ShardWriter | None, entry: dict[str, Any]) -> None:
        """Put what block `block` left, and `writer` wrote, on disk and journal it, while the next block computes."""
        self.wait()
        self.at = block
        self._saving = self._saver.submit(self._save, block, writer, entry)
        for _, stream in self._all():
            stream.saving = self._saving

    def _save(self, block: int, writer: ShardWriter | None, entry: dict[str, Any]) -> None:
        for name, stream in self._all():
            stream.save(self._file(name, block))
        if writer is not None:
            writer.sync()
        if self.crew.size > 1 and self._calibrated:
            self._unrecorded = (block, entry)
        else:
            self._record(block, entry)

    def _record(self, block: int, entry: dict[str, Any]) -> None:
        self.work.staging.record(entry)
        self._forget(block - 1)

    def wait(self) -> None:
        """Return once everything saved so far is on disk and in the journal."""
        if self._saving is not None:
            self._saving.result()
        if self._unrecorded is not None:
            self.crew.meet()
            self._record(*self._unrecorded)
            self._unrecorded = None

    def _forget(self, block: int) -> None:
        for name, _ in self._all():
            if block != self.work.verify_blocks - 1 or name in self._calibrated:
                with contextlib.suppress(FileNotFoundError):
                    self._file(name, block).unlink()

    def end_text(self) -> int:
        """Let the calibration text's hidden states go, which nothing needs any more; how many bytes they held."""
        self.wait()
        held = sum(stream.buffer.nbytes for stream in (*self._calibrated.values(), *self._scratch.values()))
        self._calibrated.clear()
        self._scratch.clear()
        return held

    def expected(self, n_blocks: int) -> Tensor:
        """Logits [B, T, vocab] of the probe after `verify_blocks` blocks, computed from the weights in memory."""
        release_memory(self.end_text() + self.work.shards.nbytes)
        return self.logits("probe", self.skeleton, min(self.work.verify_blocks, n_blocks))

    def logits(self, name: str, skeleton: Skeleton, n_blocks: int) -> Tensor:
        """Logits [B, T, vocab] by `skeleton`'s head of the stream `name` over the probe, after `n_blocks` blocks."""
        stream = self.probe if name == "probe" else self._probes[name]
        stream.restore(self._file(name, n_blocks - 1))
        return head_logits(skeleton, stream.hidden[0])

    def _file(self, name: str, block: int) -> Path:
        return states_file(self.work.staging.work, self.work.key, name, block)


def text_stream(
    skeleton: Skeleton, text: TokenBlocks, batch: int, budget: int, spill: Path, crew: Crew = ALONE
) -> Stream:
    """Room for the hidden states of this process's part of the text. budget: bytes in memory, of all processes."""
    ids, positions = text.batches(batch)
    return Stream.empty(skeleton, ids, budget // crew.size, crew.own(spill), positions, crew.part(len(ids)))


def states_file(directory: Path, key: str, name: str, block: int) -> Path:
    """Where the step `key` saves what the stream `name` holds after a block."""
    return directory / f"{key}-{name}-{block}.bin"
