"""Which parameter of the model each tensor of an adapter changes.

An adapter speaks of modules as its trainer saw them, a checkpoint names tensors in its own way, and both changed over
the years: `transformer.` is missing from GPT-2's shards, Mixtral's experts were `block_sparse_moe.experts.3.w1` and are
`mlp.experts`, a text model inside a vision wrapper has moved twice. Every known name of a module leads to the same
parameter here; what leads nowhere is an error, and so is a target of the config that has no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError, did_you_mean
from ..checkpoint.layout import Linear, ModelLayout
from .adapter import EXPERTS, Adapter, Part
from .config import matches, unmatched_patterns
from .delta import Delta, olora, pissa

ExpertLayout = Literal["peft", "expert-major"]
# What PEFT writes for every model of an architecture that can have experts, also for one without any.
_ADDED_PATTERNS = (r".*\.gate_up_proj",)
_ADDED_PARAMETERS = ("gate_up_proj", "down_proj", "gate.weight")


@dataclass(frozen=True, eq=False)
class LowRank:
    """B A of one adapter for one weight."""

    adapter: Adapter
    share: float  # the adapter's weight among several
    part: Part
    stored: Literal["linear", "transposed", "embedding"]
    scale: float
    cut: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None  # (A, B) of all experts -> of this one
    residual: str = "plain"  # pissa | olora: the base that B A was trained beside lacks B0 A0

    def factors(self) -> tuple[Tensor, Tensor]:
        """(A [r, in], B [out, r]) in float32, without the scale."""
        ends = ("embedding A", "embedding B") if self.stored == "embedding" else ("A", "B")
        A, B = (self.adapter.read(self.part.keys[kind]) for kind in ends)
        return self.cut(A, B) if self.cut else (A, B)

    def delta(self, W: Tensor) -> Delta:
        """The change of the stored weight W."""
        A, B = self.factors()
        L, R = (self.scale * B, A) if self.stored == "linear" else (self.scale * A.T, B.T)
        if self.residual != "plain":
            straight = W.float() if self.stored == "linear" else W.float().T
            r = A.shape[0]
            L0, R0 = pissa(straight, r) if self.residual == "pissa" else olora(straight, r, self.scale)
            if self.stored != "linear":
                L0, R0 = R0.T, L0.T
            L, R = torch.cat([L, -L0], 1), torch.cat([R, R0])
        key = self.part.keys.get("magnitude")
        magnitude = self.adapter.read(key).reshape(-1) if key else None
        return Delta(L.contiguous(), R.contiguous(), magnitude, 0 if self.stored == "linear" else 1, self.share)


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of an adapter that stands in the file as it is meant: a whole parameter, rows of it, or an addend."""

    adapter: Adapter
    share: float
    key: str
    rows: tuple[int, ...] = ()
    scale: float = 1.0
    expert: tuple[int, tuple[int, int]] | None = None  # its number and rows, of a tensor that holds all experts

    def read(self) -> Tensor:
        if self.expert is None:
            return self.adapter.read(self.key)
        number, (first, last) = self.expert
        return self.adapter.read(self.key, number)[first:last]


@dataclass(eq=False)
class Change:
    """Everything that becomes of one parameter, in the order in which it is applied."""

    parameter: str  # in the transformers model, experts apart: `model.layers.0.mlp.experts.3.up_proj.weight`
    replaced: list[Stored] = field(default_factory=list)  # the parameter as it was trained in full, or grown
    low_rank: list[LowRank] = field(default_factory=list)
    added: list[Stored] = field(default_factory=list)  # scale * lora_B.bias
    rows: list[Stored] = field(default_factory=list)  # trained tokens

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape that a replacement gives it."""
        if not self.replaced:
            return None
        first = self.replaced[0]
        shape = first.adapter.shape(first.key)
        return shape if first.expert is None else (first.expert[1][1] - first.expert[1][0], shape[-1])


@dataclass(frozen=True, eq=False)
class Matched:
    """An adapter's tensors, each with the parameter that it changes."""

    changes: dict[str, Change]
    keys: dict[str, dict[str, str]]  # adapter's source -> key -> what became of it
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Weighted:
    """An adapter and its weight in the sum."""

    adapter: Adapter
    share: float = 1.0


class Names:
    """Every name under which an adapter may know a module, leading to the module's name in transformers today."""

    def __init__(self, layout: ModelLayout) -> None:
        self.layout = layout
        family = layout.family
        self.modules: dict[str, str] = {}  # any name -> module
        self.linears: dict[str, Linear] = {linear.module: linear for linear in layout.linears}
        wrapped = layout.disk_stem not in (family.stem, "")
        stems = {family.stem, "", *(family.disk_stems if wrapped else ())}
        for parameter, place in layout.places.items():
            module = parameter.rpartition(".")[0]
            if module == family.head:
                outer = [f"{stem.removesuffix('model.')}{family.head}" for stem in stems if stem.endswith("model.")]
                names = [family.head, family.head_on_disk, *outer]
            else:
                local = module.removeprefix(family.stem)
                disk = place.tensor.rpartition(".")[0]
                names = [*(stem + local for stem in stems)]
                names += [disk] if place.expert is None else []
                names += self._renamed(local, stems)
            for name in names:
                self.modules.setdefault(name, module)
        for linear in layout.linears:
            self.modules.setdefault(linear.name, linear.module)
        self.experts = self._expert_modules(stems)

    def _renamed(self, local: str, stems: set[str]) -> list[str]:
        """Names of the older module tree (`block_sparse_moe.gate`), which some families' checkpoints still have."""
        experts = self.layout.family.experts
        if experts is None:
            return []
        *block, rest = local.split(".", 2)
        for new, old in experts.renames:
            if rest == new:
                return [f"{stem}{'.'.join(block)}.{old}" for stem in stems]
        return []

    def _expert_modules(self, stems: set[str]) -> dict[str, tuple[int, str]]:
        """Any name of a block's experts -> (block, the module's name)."""
        family = self.layout.family
        if family.experts is None:
            return {}
        found: dict[str, tuple[int, str]] = {}
        older = family.experts.disk.partition(".{e}")[0]
        for index in {linear.block for linear in self.layout.linears if linear.expert is not None}:
            module = f"{self.layout.block_prefix(index)}{family.experts.module}"
            for stem in stems:
                block = f"{stem}{family.blocks}.{index}."
                found |= {f"{block}{family.experts.module}": (index, module), f"{block}{older}": (index, module)}
        return found

    def suggestion(self, path: str) -> str:
        """` (did you mean ...?)` for a module name that leads nowhere."""
        own = sorted({f"{name}" for name in self.modules.values()})
        return did_you_mean(path, own) or did_you_mean(re.sub(r"^.*?(?=layers\.|h\.)", "model.", path), own)


def match(
    adapters: list[Weighted],
    layout: ModelLayout,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    expert_layout: ExpertLayout = "peft",
    base_is_residual: bool = False,
    blocks: int | None = None,
) -> Matched:
    """Give every tensor of every adapter its parameter.

    `shapes`: of the module's parameters. `blocks`: for a rehearsal, leave out what belongs to blocks from this number on.
    Raises SutureError for keys that match nothing, shapes that do not fit, and targets that have no tensors.
    """
    names = Names(layout)
    changes: dict[str, Change] = {}
    keys: dict[str, dict[str, str]] = {}
    notes: list[str] = []
    for weighted in adapters:
        one = _One(weighted, names, shapes, expert_layout, base_is_residual, blocks)
        one.run()
        for parameter, change in one.changes.items():
            whole = changes.setdefault(parameter, Change(parameter))
            for kind in ("replaced", "low_rank", "added", "rows"):
                getattr(whole, kind).extend(getattr(change, kind))
        keys[weighted.adapter.source] = one.keys | weighted.adapter.ignored
        notes += [*weighted.adapter.notes, *one.notes]
    for change in changes.values():
        _check_sum(change)
    return Matched(changes, keys, tuple(notes))


def _check_sum(change: Change) -> None:
    """Several replacements of one parameter must at least have one shape."""
    found = {stored.adapter.shape(stored.key) for stored in change.replaced}
    if len(found) > 1:
        raise SutureError(
            f"{change.parameter}: the adapters replace it with shapes {' and '.join(str(list(s)) for s in found)}",
            "merge them one after the other, into one vocabulary",
        )


class _One:
    """The matching of one adapter."""

    def __init__(
        self,
        weighted: Weighted,
        names: Names,
        shapes: Mapping[str, tuple[int, ...]],
        expert_layout: ExpertLayout,
        base_is_residual: bool,
        blocks: int | None,
    ) -> None:
        self.adapter, self.share = weighted.adapter, weighted.share
        self.config = weighted.adapter.config
        self.names, self.shapes, self.blocks = names, shapes, blocks
        self.expert_layout: ExpertLayout = expert_layout
        self.residual = "plain" if base_is_residual else self.config.init
        self.changes: dict[str, Change] = {}
        self.keys: dict[str, str] = {}
        self.notes: list[str] = []
        self.paths: list[str] = []  # modules and parameters that have a low-rank change, as PEFT names them
        self.style: str | None = None  # what stands before `layers.0...` in this adapter's names

    def run(self) -> None:
        unmatched = [part for part in self.adapter.parts if not self._match(part)]
        if unmatched:
            part = unmatched[0]
            what = f"{sum(len(p.keys) for p in unmatched)} keys of the adapter match nothing in the model"
            first, n = next(iter(part.keys.values())), len(self.names.layout.blocks)
            block = _block_number(part.path)
            near = self.names.suggestion(part.path) if block is None or block < n else f" (the model has {n} blocks)"
            raise SutureError(f"{self.adapter.file}: {what}, first {first}{near}", self._why_unmatched())
        if self.blocks is None:
            self._check_patterns()
            self._check_complete()
            self._check_targeted()
            self._check_trained_beside()
        if all(not change.low_rank or self._is_zero(change) for change in self.changes.values()) and self.paths:
            self.notes.append(f"{self.adapter.source}: every lora_B is zero: it changes nothing but what it replaces")

    def _why_unmatched(self) -> str:
        question = "was it trained on another model or another architecture? Give the base it was trained on"
        layout = self.names.layout
        if layout.disk_stem in (layout.family.stem, ""):
            return question
        return f"suture merges into the text model alone, not into the vision part around it; if it is not that: {question}"

    def _change(self, parameter: str) -> Change:
        return self.changes.setdefault(parameter, Change(parameter))

    def _is_zero(self, change: Change) -> bool:
        return all(float(low.factors()[1].abs().max()) == 0 for low in change.low_rank)

    # -- one module's tensors ------------------------------------------------------------------------------------------

    def _match(self, part: Part) -> bool:
        block = _block_number(part.path)
        if part.path in self.names.experts and (part.low_rank or set(part.keys) <= set(EXPERTS)):
            if not self._left_out(part, block):
                self._match_experts(part) if part.low_rank else self._replace_experts(part)
            return True
        module = self.names.modules.get(part.path)
        if module is None or part.level:
            return self.blocks is not None and self._left_out(part, block)
        if self._left_out(part, block):
            return True
        if self.style is None and block is not None and module.startswith(self.names.layout.family.stem):
            local = module.removeprefix(self.names.layout.family.stem)
            self.style = part.path.removesuffix(local) if part.path.endswith(local) else None
        self._match_module(part, module)
        return True

    def _left_out(self, part: Part, block: int | None) -> bool:
        if self.blocks is None or block is None or block < self.blocks:
            return False
        self.keys |= dict.fromkeys(part.keys.values(), "not in this rehearsal")
        return True

    def _match_module(self, part: Part, module: str) -> None:
        weight, bias = f"{module}.weight", f"{module}.bias"
        for kind, key in part.keys.items():
            if kind in ("weight", "base weight"):
                self._replace(weight, key, kind)
            elif kind in ("bias", "base bias"):
                self._replace(bias, key, kind)
            elif kind == "B bias":
                scale = self.config.scale(part.path)
                length = self._outputs(module)
                self._expect(key, (length,), f"outputs of {module}")
                self._change(bias).added.append(Stored(self.adapter, self.share, key, scale=scale))
                self.keys[key] = f"{bias}: added, times {scale:g}"
            elif kind == "tokens":
                self._rows(part, module, key)
        if part.low_rank:
            self._low_rank(part, module)

    def _outputs(self, module: str) -> int:
        linear = self.names.linears.get(module)
        shape = self.shapes[f"{module}.weight"]
        return linear.out_features if linear else shape[0]

    def _replace(self, parameter: str, key: str, kind: str) -> None:
        if parameter not in self.shapes:
            raise SutureError(
                f"{self.adapter.file}: {key} is a {parameter.rpartition('.')[2]}, but {parameter} is not in the model",
                "give the base that the adapter was trained on",
            )
        shape, found = self.shapes[parameter], self.adapter.shape(key)
        if found != shape and not (self._has_vocabulary(parameter) and found[1:] == shape[1:] and found[0] > shape[0]):
            raise self._wrong_base(key, found, f"{parameter} is {list(shape)}")
        self._change(parameter).replaced.append(Stored(self.adapter, self.share, key))
        how = "grown" if found != shape else "the base's own copy" if kind == "base weight" else "replaced"
        self.keys[key] = f"{parameter}: {how}"

    def _has_vocabulary(self, parameter: str) -> bool:
        return parameter in (f"{self._embedding()}.weight", f"{self.names.layout.family.head}.weight")

    def _rows(self, part: Part, module: str, key: str) -> None:
        indices = self.config.token_indices
        last = part.path.rpartition(".")[2]
        rows = next((r for name, r in indices.items() if name and (name == last or part.path.endswith(f".{name}"))), ())
        rows = rows or indices.get("", ())
        count, width = self.adapter.shape(key)[0], self.shapes[f"{module}.weight"][1]
        if len(rows) != count:
            raise SutureError(
                f"{self.adapter.file}: {key} holds {count} rows, trainable_token_indices names {len(rows)}",
                "the config is not of this file",
            )
        self._expect(key, (count, width), f"rows of {module}")
        self._change(f"{module}.weight").rows.append(Stored(self.adapter, self.share, key, rows=rows))
        self.keys[key] = f"{module}.weight: {count} rows replaced"

    def _low_rank(self, part: Part, module: str) -> None:
        weight = f"{module}.weight"
        shape = self.shapes[weight]
        linear = self.names.linears.get(module)
        embedding = "embedding A" in part.keys
        as_parameter = self.config.is_parameter(part.path)  # B A is then added to what is stored, transposed or not
        conv1d = linear is not None and linear.conv1d and not as_parameter
        stored = "embedding" if embedding else "transposed" if conv1d else "linear"
        grown = self.adapter.shape(part.keys["base weight"]) if "base weight" in part.keys else shape
        rows = grown[0]
        wanted = (rows, shape[1]) if stored != "linear" else (shape[1], rows)  # (in of A, out of B)
        A, B = (part.keys[k] for k in (("embedding A", "embedding B") if embedding else ("A", "B")))
        if len(shape) != 2:
            raise SutureError(f"{self.adapter.file}: {A}: {weight} of shape {list(shape)} is not a matrix")
        if (self.adapter.shape(A)[1], self.adapter.shape(B)[0]) != wanted:
            found = f"A {list(self.adapter.shape(A))} and B {list(self.adapter.shape(B))}"
            raise self._wrong_base(A, found, f"{weight} is {list(shape)}")
        path = f"{part.path}.weight" if as_parameter else part.path
        self._check_rank(path, self.adapter.shape(A)[0], A)
        # PEFT begins an embedding plainly, and a base that is stored with its LoRA is the one that training left
        residual = "plain" if embedding or "base weight" in part.keys else self.residual
        if residual != "plain" and as_parameter:
            raise SutureError(
                f"{self.adapter.file}: {A}: init_lora_weights '{residual}' on a parameter is not supported"
            )
        if residual == "olora" and stored != "linear":
            raise SutureError(f"{self.adapter.file}: {A}: PEFT's OLoRA is not defined for a layer stored transposed")
        key = part.keys.get("magnitude")
        if key is not None:
            length = shape[1] if stored != "linear" else rows
            if torch.Size(self.adapter.shape(key)).numel() != length:
                raise self._wrong_base(key, self.adapter.shape(key), f"{module} has {length} outputs")
        low = LowRank(self.adapter, self.share, part, stored, self.config.scale(path), None, residual)
        self._change(weight).low_rank.append(low)
        self.paths.append(path)
        used = [k for kind, k in part.keys.items() if kind in ("A", "B", "embedding A", "embedding B", "magnitude")]
        self.keys |= dict.fromkeys(used, f"{weight}: merged with scale {low.scale:g}")

    def _check_rank(self, path: str, found: int, key: str) -> None:
        if found != self.config.rank(path):
            raise SutureError(
                f"{self.adapter.file}: {key} has rank {found}, but adapter_config.json gives {path} rank "
                f"{self.config.rank(path)}, and the scale depends on it",
                "correct r or rank_pattern",
            )

    def _expect(self, key: str, shape: tuple[int, ...], what: str) -> None:
        if self.adapter.shape(key) != shape:
            raise self._wrong_base(key, self.adapter.shape(key), f"{what}: {list(shape)}")

    def _wrong_base(self, key: str, found: object, model: str) -> SutureError:
        shown = list(found) if isinstance(found, tuple) else found
        trained = f" ({self.config.base})" if self.config.base else ""
        return SutureError(
            f"{self.adapter.file}: {key} is {shown}, but in the model {model}",
            f"give the base that the adapter was trained on{trained}",
        )

    # -- experts in one parameter ------------------------------------------------------------------------------------------

    def _match_experts(self, part: Part) -> None:
        """A [E r, in] and B [out, E r] for the parameter gate_up_proj [E, 2I, H] or down_proj [E, H, I]."""
        block, module = self.names.experts[part.path]
        A, B = self.adapter.shape(part.keys["A"]), self.adapter.shape(part.keys["B"])
        mine = [x for x in self.names.layout.linears if x.block == block and x.expert is not None]
        n = 1 + max(x.expert or 0 for x in mine)
        hidden, inner = (next(x for x in mine if x.role.endswith("up_proj")).in_features, mine[0].out_features)
        wanted = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}  # (in, out)
        fits = [name for name, sizes in wanted.items() if sizes == (A[1], B[0])]
        if not fits:
            flipped = [name for name, (i, o) in wanted.items() if (o, i) == (A[1], B[0])]
            if flipped:
                raise SutureError(
                    f"{self.adapter.file}: {part.keys['A']} is for experts stored [in, out], this model's are [out, in]",
                    "it was trained on another implementation of the model",
                )
            raise self._wrong_base(part.keys["A"], A, f"experts map {hidden} to {2 * inner} and {inner} to {hidden}")
        parameter = fits[0]
        path = f"{part.path}.{parameter}"
        if A[0] % n:
            raise SutureError(f"{self.adapter.file}: {part.keys['A']} is {list(A)}: not a multiple of {n} experts")
        self._check_rank(path, A[0] // n, part.keys["A"])
        scale = self.config.scale(path)
        self.paths.append(path)
        if self.residual != "plain":
            raise SutureError(f"{self.adapter.file}: init_lora_weights '{self.residual}' on experts is not supported")
        for linear in mine:
            projection = linear.role.rpartition(".")[2]
            if (projection == "down_proj") != (parameter == "down_proj"):
                continue
            rows = (inner, 2 * inner) if projection == "up_proj" else (0, linear.out_features)
            cut = _expert_cut(linear.expert or 0, n, rows, self.expert_layout)
            low = LowRank(self.adapter, self.share, part, "linear", scale, cut)
            self._change(f"{linear.module}.weight").low_rank.append(low)
        self.keys |= dict.fromkeys(part.keys.values(), f"{module}.{parameter}: merged with scale {scale:g}")
        if n > 1 and self.expert_layout == "peft" and not any("lora_B" in note for note in self.notes):
            self.notes.append(
                f"{self.adapter.source}: experts' lora_B is read with the expert fastest, as PEFT writes it; for one "
                "trained elsewhere (Unsloth before 2026-09) set expert_layout: expert-major"
            )

    def _replace_experts(self, part: Part) -> None:
        """gate_up_proj [E, 2I, H] and down_proj [E, H, I], trained in full."""
        block, module = self.names.experts[part.path]
        mine = [x for x in self.names.layout.linears if x.block == block and x.expert is not None]
        for projection, key in part.keys.items():
            found = self.adapter.shape(key)
            for linear in mine:
                name = linear.role.rpartition(".")[2]
                if (name == "down_proj") != (projection == "down_proj"):
                    continue
                rows, stacked = linear.out_features, 1 if projection == "down_proj" else 2
                wanted = (1 + max(x.expert or 0 for x in mine), stacked * rows, linear.in_features)
                if found != wanted:
                    raise self._wrong_base(key, found, f"{module}.{projection} is {list(wanted)}")
                first = rows if name == "up_proj" else 0
                stored = Stored(self.adapter, self.share, key, expert=(linear.expert or 0, (first, first + rows)))
                self._change(f"{linear.module}.weight").replaced.append(stored)
            self.keys[key] = f"{module}.{projection}: replaced"

    # -- what the config promises ----------------------------------------------------------------------------------------

    def _check_patterns(self) -> None:
        lost = [
            p for p in unmatched_patterns(self.config, self.paths) if self.names.experts or p not in _ADDED_PATTERNS
        ]
        if lost:
            ends = {path.rpartition(".")[2] for path in self.paths}
            raise SutureError(
                f"{self.adapter.source}: rank_pattern or alpha_pattern '{lost[0]}' matches no module of the adapter"
                f"{did_you_mean(lost[0], ends)}",
                "PEFT matches a pattern to the end of a module's name: a leading ^ matches nothing; correct the config",
            )

    def _check_complete(self) -> None:
        """Every module that the config targets must have its tensors, and every name must target something."""
        config = self.config
        have = {change.parameter.removesuffix(".weight") for change in self.changes.values() if change.low_rank}
        saved = {change.parameter.removesuffix(".weight") for change in self.changes.values() if change.replaced}
        if isinstance(config.target_modules, tuple):
            for name in config.target_modules:
                if not any(matches((name,), path) for path in self.paths) and not self._left_to_none(name):
                    ends = {path.rpartition(".")[2] for path in self.paths}
                    raise SutureError(
                        f"{self.adapter.source}: target_modules names '{name}'{did_you_mean(name, ends)}, for which "
                        "the file holds no tensors",
                        "the adapter is incomplete, or the name is wrong: then remove it from adapter_config.json",
                    )
        for name in config.target_parameters:
            added = not self.names.experts and name in _ADDED_PARAMETERS
            if not added and not any(matches((name,), path) for path in self.paths):
                raise SutureError(
                    f"{self.adapter.source}: target_parameters names '{name}', for which the file holds no tensors",
                    "the adapter is incomplete, or its config is of another one",
                )
        expected = [
            linear.module
            for linear in self.names.layout.linears
            if linear.expert is None
            and any(config.targets(path, linear.block) for path in self._paths_of(linear))
            and linear.module not in saved
        ]
        lost = [module for module in expected if module not in have]
        if lost:
            raise SutureError(
                f"{self.adapter.source}: its config targets {len(expected)} linear layers, {len(lost)} of them have no "
                f"tensors in the file, first {lost[0]}",
                "the adapter is incomplete: save or download it again, or list these under exclude_modules",
            )
        for name in config.modules_to_save:
            if any(f".{name}." in f".{module}." for module in self._replaced_modules()):
                continue
            if not any(f".{name}." in f".{module}." for module in self.names.modules):
                self.notes.append(
                    f"{self.adapter.source}: modules_to_save names '{name}', which the model does not have"
                )
            else:
                raise SutureError(
                    f"{self.adapter.source}: modules_to_save names '{name}', for which the file holds no tensors",
                    "the adapter is incomplete: a part that was trained would be lost",
                )

    def _check_targeted(self) -> None:
        """PEFT would not load tensors for modules that the config does not target."""
        config = self.config
        if config.target_modules is None:
            return
        for part in self.adapter.parts:
            module = self.names.modules.get(part.path)
            if not part.low_rank or module is None or config.is_parameter(part.path):
                continue
            if config.tied and module in (self.names.layout.family.head, self._embedding()):
                continue  # the other end of one that is targeted
            if not any(config.targets(path, _block_number(path)) for path in {part.path, module}):
                raise SutureError(
                    f"{self.adapter.file}: it holds a LoRA of {part.path}, which adapter_config.json does not target",
                    "correct target_modules, exclude_modules or layers_to_transform there",
                )

    def _check_trained_beside(self) -> None:
        """Rows of tokens and biases that were trained must be there."""
        have = {change.parameter for change in self.changes.values() if change.replaced}
        keys = [stored.key for change in self.changes.values() for stored in change.rows]
        lost = [name for name in self.config.token_indices if not any(name in key for key in keys)]
        if lost and not (keys and self.names.layout.head is None):  # a tied head's rows are stored once
            raise SutureError(
                f"{self.adapter.file}: trainable_token_indices names tokens{f' of {lost[0]}' if lost[0] else ''}, for which "
                "the file holds no rows",
                "the adapter is incomplete: a part that was trained would be lost",
            )
        if self.config.bias == "none":
            return
        trained = {change.parameter for change in self.changes.values() if change.low_rank}
        biases = [p for p in self.shapes if p.endswith(".bias")]
        if self.config.bias == "lora_only":
            biases = [p for p in biases if f"{p.removesuffix('bias')}weight" in trained]
        missing = [bias for bias in biases if bias not in have]
        if missing:
            raise SutureError(
                f"{self.adapter.file}: bias is '{self.config.bias}', but {len(missing)} of {len(biases)} biases are not in "
                f"the file, first {missing[0]}",
                "the adapter is incomplete; bias: none in adapter_config.json merges it without them",
            )

    def _embedding(self) -> str:
        return f"{self.names.layout.family.stem}{self.names.layout.family.embedding}"

    def _left_to_none(self, name: str) -> bool:
        """Whether all modules that a target names are excluded, trained in full, or in layers that are not transformed."""
        named = [path for path in self._all_paths() if matches((name,), path)]
        return bool(named) and not any(self.config.targets(path, _block_number(path)) for path in named)

    def _all_paths(self) -> list[str]:
        """Every module's name, in this adapter's style inside of blocks."""
        stem = self.names.layout.family.stem
        inside = {m for m in self.names.modules.values() if _block_number(m) is not None}
        styled = [(self.style or stem) + m.removeprefix(stem) for m in inside]
        return [*styled, *(m for m in self.names.modules.values() if m not in inside)]

    def _replaced_modules(self) -> set[str]:
        paths = {part.path for part in self.adapter.parts if {"weight", "bias"} & set(part.keys)}
        return paths | {change.parameter.rpartition(".")[0] for change in self.changes.values() if change.replaced}

    def _paths_of(self, linear: Linear) -> list[str]:
        """The module's name in this adapter's style, or in transformers' when no style was seen."""
        if self.style is None:
            return [linear.module]
        return [self.style + linear.module.removeprefix(self.names.layout.family.stem)]


def _expert_cut(
    expert: int, n: int, rows: tuple[int, int], layout: ExpertLayout
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def cut(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        r = A.shape[0] // n
        one = B.reshape(-1, r, n)[:, :, expert] if layout == "peft" else B.reshape(-1, n, r)[:, expert]
        return A.reshape(n, r, -1)[expert].contiguous(), one[rows[0] : rows[1]].contiguous()

    return cut


def _block_number(path: str) -> int | None:
    found = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)", path)
    return int(found[1]) if found else None
