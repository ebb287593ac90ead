"""A transformers model without its weights, filled one block at a time.

The model is built from the config on torch's `meta` device, so it costs nothing; buffers (rotary frequencies, embedding
scales) are real. Its own forward is what runs, so every family's masks, soft caps, rotary variants and scales are right
by construction:

- `embed(ids)` runs the real forward with the decoder blocks replaced by recorders, which note the hidden states that
  reach block 0 and the arguments (mask, rotary embedding, ...) that each block is given;
- `run_block(i, ...)` calls block `i` with those arguments;
- `logits(hidden)` runs the real forward with one block in place of all, which returns `hidden`: final norm, head and
  soft cap are the model's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..checkpoint.errors import SutureError
from ..checkpoint.families import Family, family_of
from ..checkpoint.layout import ModelLayout, Place, resolve_layout, text_config
from ..checkpoint.source import ReadsAhead, Settled, TensorSource
from .experts import UnfusedExperts
from .memory import trim_memory
from .product import ProductAsRead
from .upload import CudaMover, Upload


@dataclass(frozen=True)
class BlockArguments:
    """What the model's forward gave one block beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _CapturedError(Exception):
    """Ends a forward once every block's arguments are known."""


class _StandIn(nn.Module):
    """In a block's place; looks like it to code that reads its attributes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["_block"] = block  # not a child: its parameters stay out of this module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"], name)


class _Recorder(_StandIn):
    """Notes what a block is given and passes the hidden states on."""

    def __init__(self, block: nn.Module, seen: list[tuple[Tensor, BlockArguments]], last: bool, tuples: bool) -> None:
        super().__init__(block)
        self._seen, self._last, self._tuples = seen, last, tuples

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        self._seen.append((hidden_states, BlockArguments(args, kwargs)))
        if self._last:
            raise _CapturedError
        return (hidden_states,) if self._tuples else hidden_states


class _Injector(_StandIn):
    """Stands for all blocks and returns given hidden states."""

    def __init__(self, hidden: Tensor, block: nn.Module, tuples: bool) -> None:
        super().__init__(block)
        self.hidden, self._tuples = hidden, tuples

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        return (self.hidden,) if self._tuples else self.hidden


@dataclass
class Skeleton:
    """A model on `meta` and the checkpoint that fills it. Computes in `dtype` on `device`."""

    source: TensorSource
    model: nn.Module
    layout: ModelLayout
    hf_config: Any
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _arguments: dict[tuple[Any, ...], list[BlockArguments]] = field(default_factory=dict)
    _needed: dict[str, Place] = field(default_factory=dict)  # weights that are read when they multiply
    upload: Upload | None = None  # brings the next block to the device while this one computes

    @property
    def family(self) -> Family:
        return self.layout.family

    @property
    def n_blocks(self) -> int:
        return len(self.layout.blocks)

    @property
    def backbone(self) -> nn.Module:
        return self.model.get_submodule(self.family.stem.removesuffix("."))

    def block(self, index: int) -> nn.Module:
        return self.model.get_submodule(self.layout.block_prefix(index).removesuffix("."))

    # -- weights in and out ------------------------------------------------------------------------------------------

    def load_block(self, index: int) -> nn.Module:
        """Read block `index` from the source. Raises SutureError naming a tensor that holds NaN or inf.

        The system is told that the next block will be read: it does so while this one computes. To a GPU it is brought
        meanwhile.
        """
        self._fill(self.layout.block_tensors(index))
        if isinstance(self.source, ReadsAhead) and index + 1 < self.n_blocks:
            following = self.layout.block_tensors(index + 1)
            self.source.expect(place.tensor for place in following.values())
            if self.upload is not None:
                self.upload.expect(place.tensor for name, place in following.items() if name not in self._needed)
        return self.block(index)

    def free_block(self, index: int) -> None:
        freed = sum(parameter.nbytes for parameter in self.block(index).parameters() if not parameter.is_meta)
        for name in self.layout.block_tensors(index):
            self._put(name, None)
        trim_memory(freed)

    def block_parameters(self, index: int) -> dict[str, Tensor]:
        """The loaded block's parameters by module name."""
        return {name: self.model.get_parameter(name).data for name in self.layout.block_tensors(index)}

    def on_disk(self, index: int, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Changed parameters of the loaded block `index` (module names) as whole tensors by disk name: experts that
        share a tensor come together, the unchanged ones as they are loaded."""
        users: dict[str, list[tuple[str, Place]]] = {}
        for name, place in self.layout.block_tensors(index).items():
            users.setdefault(place.tensor, []).append((name, place))
        tensors: dict[str, Tensor] = {}
        for tensor, sharing in users.items():
            mine = [name for name, _ in sharing if name in changed]
            if not mine:
                continue
            if sharing[0][1].expert is None:
                tensors[tensor] = changed[mine[0]]
                continue
            whole = torch.empty(self.source.shapes[tensor], dtype=self.dtype, device=self.device)
            for name, place in sharing:
                cut(whole, place).copy_(changed[name] if name in changed else self.model.get_parameter(name))
            tensors[tensor] = whole
        strangers = set(changed) - set(self.layout.block_tensors(index))
        if strangers:
            raise SutureError(f"{sorted(strangers)[0]}: not a parameter of block {index}")
        return tensors

    def load_head(self) -> None:
        """Final norm and head (the embedding when tied), and learned positions, which the forward adds on its way."""
        self._fill(self._head_places())

    def free_head(self) -> None:
        for name in self._head_places():
            self._put(name, None)

    def head_parameters(self) -> dict[str, Tensor]:
        """Final norm and head, loaded, by module name."""
        return {name: self.model.get_parameter(name).data for name in self._head_places()}

    def _head_places(self) -> dict[str, Place]:
        family = self.family
        own = [f"{family.stem}{family.final_norm}.", f"{family.head}."]
        if family.positions:
            own.append(f"{family.stem}{family.positions}.")
        return {name: place for name, place in self.layout.places.items() if name.startswith(tuple(own))}

    @contextlib.contextmanager
    def reading_as_needed(self) -> Iterator[None]:
        """For few forwards, or little memory: while inside, what is loaded leaves out the weights of linear layers. Each is
        read when its forward runs, and when its gradient is taken, and stays in its stored dtype but for some rows at a
        time. Experts are loaded as ever: they may share a tensor, which would be read for each."""
        names = [
            f"{path}.weight"
            for path, module in self.model.named_modules()
            if type(module) is nn.Linear and f"{path}.weight" in self.layout.places
        ]
        self._needed = {name: place for name in names if (place := self.layout.places[name]).expert is None}
        modules = [self.model.get_submodule(name.removesuffix(".weight")) for name in self._needed]
        for module, place in zip(modules, self._needed.values(), strict=True):
            module.forward = _reading(self.source, place.tensor, module)  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            self._needed = {}
            for module in modules:
                del module.forward

    def _fill(self, places: Mapping[str, Place]) -> None:
        by_tensor: dict[str, list[tuple[str, Place]]] = {}
        for name, place in places.items():
            if name in self._needed:
                continue
            by_tensor.setdefault(place.tensor, []).append((name, place))
        for tensor_name, users in by_tensor.items():
            tensor = self.upload.take(tensor_name) if self.upload is not None else None
            tensor = self.source.read(tensor_name) if tensor is None else tensor
            for name, place in users:
                self._put(name, finite(cut(tensor, place), tensor_name, self.source.source))

    def _put(self, name: str, value: Tensor | None) -> None:
        path, _, leaf = name.rpartition(".")
        owner = self.model.get_submodule(path)
        if value is None:
            value = torch.empty_like(owner.get_parameter(leaf), device="meta")
        else:
            value = value.to(device=self.device, dtype=self.dtype)
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)

    # -- the forward in pieces ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, hidden] that reach block 0, for token ids [B, T] (int64).

        `positions` [B, T] (int64), here and below: where they start again a piece of its own begins, which neither sees
        the others nor is seen by them. None: every sequence is one piece.
        """
        return self._record(ids, positions)[0][0]

    def arguments(self, index: int, batch: int, length: int, positions: Tensor | None = None) -> BlockArguments:
        """What block `index` is given besides hidden states [batch, length, hidden]; the same for all tokens."""
        key = (batch, length) if positions is None else (batch, length, positions.numpy().tobytes())
        if key not in self._arguments:
            if len(self._arguments) >= _KEPT_ARGUMENTS:
                self._arguments.pop(next(iter(self._arguments)))
            probe = torch.zeros(batch, length, dtype=torch.int64)
            self._arguments[key] = [arguments for _, arguments in self._record(probe, positions)]
        return self._arguments[key][index]

    @torch.no_grad()
    def run_block(self, index: int, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        """Output [B, T, hidden] of block `index`."""
        return self.block_forward(index, hidden, positions=positions)

    def block_forward(
        self,
        index: int,
        hidden: Tensor,
        weights: Mapping[str, Tensor] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """`run_block`, differentiable, with `weights` (names under the block) in the place of the block's own."""
        given = self.arguments(index, hidden.shape[0], hidden.shape[1], positions)
        block = self.block(index)
        if weights is None:
            out = block(hidden, *given.args, **given.kwargs)
        else:
            out = functional_call(block, dict(weights), (hidden, *given.args), dict(given.kwargs))
        return out[0] if isinstance(out, tuple) else out

    @torch.no_grad()
    def logits(self, hidden: Tensor, keep: Tensor) -> Tensor:
        """Logits [B, len(keep), vocab] in float32 at positions `keep`; the head must be loaded."""
        return self.head_forward(hidden, keep)

    def head_forward(self, hidden: Tensor, keep: Tensor) -> Tensor:
        """`logits`, differentiable."""
        with self._blocks_replaced([_Injector(hidden, self.block(0), self.family.tuples)]):
            out = self.model(inputs_embeds=hidden, use_cache=False, logits_to_keep=keep.to(self.device))
        return out.logits.float()

    def _record(self, ids: Tensor, positions: Tensor | None = None) -> list[tuple[Tensor, BlockArguments]]:
        seen: list[tuple[Tensor, BlockArguments]] = []
        given = {} if positions is None else {"position_ids": positions.to(self.device)}
        if positions is not None:
            self._refuse_lengths_that_count()
        blocks = [self.block(i) for i in range(self.n_blocks)]
        recorders: list[nn.Module] = [
            _Recorder(block, seen, i == len(blocks) - 1, self.family.tuples) for i, block in enumerate(blocks)
        ]
        with self._embeddings_of(ids) as small, self._blocks_replaced(recorders), contextlib.suppress(_CapturedError):
            self.backbone(input_ids=small, use_cache=False, **given)
        if len(seen) != self.n_blocks:
            raise SutureError(f"{self.source.source}: the forward reached {len(seen)} of {self.n_blocks} blocks")
        return seen

    def _refuse_lengths_that_count(self) -> None:
        rope = getattr(self.hf_config, "rope_parameters", None) or {}
        kinds = {rope.get("rope_type"), *(one.get("rope_type") for one in rope.values() if isinstance(one, dict))}
        if kinds & {"dynamic", "longrope"}:
            raise SutureError(
                f"{self.source.source}: its rotary frequencies depend on the longest piece of a batch (rope_type "
                f"{', '.join(sorted(kinds & {'dynamic', 'longrope'}))}), so pieces cannot be isolated",
                "use packing: joined",
            )

    @contextlib.contextmanager
    def _embeddings_of(self, ids: Tensor) -> Iterator[Tensor]:
        """Embeddings hold just the rows in use while inside; yields the ids renumbered to those rows."""
        rows, small = torch.unique(ids, return_inverse=True)
        name = f"{self.family.stem}{self.family.embedding}"
        table = self.model.get_submodule(name)
        vocabulary = self.source.shapes[self.layout.embedding][0]
        if int(rows[-1]) >= vocabulary:
            raise SutureError(f"token id {int(rows[-1])} is outside the model's vocabulary of {vocabulary}")
        weight = self.source.read_rows(self.layout.embedding, rows.tolist())
        finite(weight, self.layout.embedding, self.source.source)
        padding, before = getattr(table, "padding_idx", None), dict(table._parameters)
        table.__dict__["padding_idx"] = None  # its row number means another token now
        self._put(f"{name}.weight", weight)
        positions = f"{self.family.stem}{self.family.positions}.weight" if self.family.positions else None
        missing = positions is not None and self.model.get_parameter(positions).is_meta
        if positions and missing:
            self._fill({positions: self.layout.places[positions]})
        try:
            yield small.to(self.device)
        finally:
            table.__dict__["padding_idx"] = padding
            table._parameters.update(before)
            if positions and missing:
                self._put(positions, None)

    @contextlib.contextmanager
    def _blocks_replaced(self, blocks: list[nn.Module]) -> Iterator[None]:
        backbone = self.backbone
        real = backbone._modules[self.family.blocks]
        backbone._modules[self.family.blocks] = nn.ModuleList(blocks)
        try:
            yield
        finally:
            backbone._modules[self.family.blocks] = real


_KEPT_ARGUMENTS = 32  # a mask of isolated pieces is as large as the square of its length


def _reading(source: TensorSource, tensor: str, module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A linear layer's forward that reads its weight first, and is differentiable in its input."""
    checked = False

    def read() -> Tensor:
        nonlocal checked
        weight = source.read(tensor)
        if not checked:
            finite(weight, tensor, source.source)
            checked = True
        return weight

    def forward(input: Tensor) -> Tensor:
        return ProductAsRead.apply(input, read, module._parameters.get("bias"))

    return forward


def cut(tensor: Tensor, place: Place) -> Tensor:
    """One expert's rows out of a fused tensor, or the tensor itself."""
    if place.expert is None:
        return tensor
    part = tensor[place.expert]
    return part if place.rows is None else part[place.rows[0] : place.rows[1]]


def finite(tensor: Tensor, name: str, source: str) -> Tensor:
    """The tensor, or SutureError when it holds NaN or inf."""
    if tensor.is_floating_point() and not _sums_up(tensor):
        bad = int((~torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)).sum())
        if bad:
            raise SutureError(
                f"{source}: {name} holds {bad} NaN or infinite values of {tensor.numel()}",
                "the checkpoint is damaged: download it again, or find the step that wrote it",
            )
    return tensor


def _sums_up(tensor: Tensor) -> bool:
    """Whether sums are finite, as all values then are: much faster than looking at each."""
    flat = tensor.reshape(-1)
    memory = torch.empty(min(flat.numel(), 1 << 18), dtype=torch.float32, device=flat.device)  # once, not for each part
    return all(bool(memory[: len(part)].copy_(part).sum().isfinite()) for part in flat.split(1 << 18))


def open_skeleton(
    source: TensorSource, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Skeleton:
    """Build the model of `source.config` on meta and match it with the tensors. Raises SutureError on a mismatch."""
    family, hf_config = _described(source)
    model = meta_model(hf_config, family, torch.device(device))
    layout = _matched(source, family, hf_config, _shapes_of(model, family))
    upload = None
    if torch.device(device).type == "cuda" and isinstance(source, Settled) and source.settled:
        upload = Upload(source.read, CudaMover(torch.device(device)))
    return Skeleton(source, model, layout, hf_config, dtype, torch.device(device), upload=upload)


def open_layout(source: TensorSource) -> ModelLayout:
    """The layout that `open_skeleton` would find, without its model. Raises SutureError on a mismatch."""
    family, hf_config = _described(source)
    key = hf_config.to_json_string(use_diff=False)
    if key not in _SHAPES:
        while len(_SHAPES) >= _KEPT:
            _SHAPES.pop(next(iter(_SHAPES)))
        _SHAPES[key] = _shapes_of(meta_model(hf_config, family, torch.device("meta")), family)
    return _matched(source, family, hf_config, _SHAPES[key])


@dataclass(frozen=True)
class _Shapes:
    """Of a model's parameters, by module name; and its number of blocks."""

    parameters: dict[str, tuple[int, ...]]
    n_blocks: int


_KEPT = 8
_SHAPES: dict[str, _Shapes] = {}  # by config: every step of a recipe asks for its input's a few times


def _described(source: TensorSource) -> tuple[Family, Any]:
    """The family and transformers' config of a checkpoint."""
    text = {key: value for key, value in text_config(source.config).items() if key != "quantization_config"}
    family = family_of(str(text["model_type"]))
    hf_config = hf_text_config(text, source.source)
    _refuse_absurd_sizes(hf_config, source)
    return family, hf_config


def _shapes_of(model: nn.Module, family: Family) -> _Shapes:
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    n_blocks = len(model.get_submodule(f"{family.stem}{family.blocks}"))  # type: ignore[arg-type]
    return _Shapes(parameters, n_blocks)


def _matched(source: TensorSource, family: Family, hf_config: Any, shapes: _Shapes) -> ModelLayout:
    tied = bool(getattr(hf_config, "tie_word_embeddings", False))
    layout = resolve_layout(family, source.source, source.shapes, shapes.parameters, tied, shapes.n_blocks)
    if layout.head_duplicate and not torch.equal(source.read(layout.head_duplicate), source.read(layout.embedding)):
        raise SutureError(
            f"{source.source}: config.json ties the head to the embedding, but {layout.head_duplicate} holds other "
            "values: loaders would disagree on which one counts",
            'set "tie_word_embeddings": false in config.json if the stored head is meant',
        )
    return layout


def transformers_config(text: Mapping[str, Any], source: str) -> Any:
    """transformers' config object of any model that it knows. Raises SutureError for a config that it refuses."""
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(text["model_type"], **{k: v for k, v in text.items() if k != "model_type"})
    except Exception as error:
        raise SutureError(
            f"{source}: transformers refuses config.json: {error}", "correct the config, or update transformers"
        ) from error


def hf_text_config(text: Mapping[str, Any], source: str) -> Any:
    """transformers' config object, which knows every spelling of RoPE's and others' settings; only what replay can run."""
    config = transformers_config(text, source)
    if text["model_type"] == "deepseek_v3" and config.first_k_dense_replace < config.num_hidden_layers:
        raise SutureError(
            f"{source}: deepseek_v3 with expert layers (first_k_dense_replace {config.first_k_dense_replace} of "
            f"{config.num_hidden_layers} layers) is not supported",
            "only dense deepseek_v3 checkpoints are",
        )
    if text["model_type"] == "falcon":
        one_after_the_other = not (config.new_decoder_architecture or config.parallel_attn)
        if config.alibi or one_after_the_other or (config.new_decoder_architecture and not config.parallel_attn):
            raise SutureError(
                f"{source}: a falcon with ALiBi positions (alibi {config.alibi}), or whose MLP reads what attention has "
                f"added (parallel_attn {config.parallel_attn}), is not supported",
                "Falcon 7B, 11B, 40B and 180B, with rotary positions and both side by side, are",
            )
    return config


_SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_local_experts", "num_experts")


def _refuse_absurd_sizes(hf_config: Any, source: TensorSource) -> None:
    """Refuse a config that promises far more than the tensors hold, before a module is made for each of a billion layers;
    what is merely wrong is named by tensor later."""
    longest = max((size for shape in source.shapes.values() for size in shape), default=0)
    limits = {"num_hidden_layers": len(source.shapes)} | dict.fromkeys(_SIZES, 64 * longest)
    for key, limit in limits.items():
        value = getattr(hf_config, key, None)
        if isinstance(value, int) and value > limit:
            raise SutureError(
                f"{source.source}: config.json says {key} {value:,}, but its {len(source.shapes):,} tensors are at most "
                f"{longest:,} long",
                "the config belongs to another model, or is damaged",
            )


def meta_model(hf_config: Any, family: Family, device: torch.device) -> nn.Module:
    """The transformers model with parameters on meta, buffers real, experts unfused, in eval mode."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
        if family.experts is not None:
            for name, module in list(model.named_modules()):
                if name.endswith(f".{family.experts.module}"):
                    model.set_submodule(name, UnfusedExperts.like(module))
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
    return model.eval()
