"""Resolve a family's row against the tensors that a checkpoint really holds.

`resolve_layout` maps every parameter of the transformers module to where it lies on disk, checks every shape, and lists
each block's linear layers in forward order. What no parameter wants is either a known stale buffer (dropped, with a
reason) or unknown (copied). Nothing here reads weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import SutureError
from .families import Experts, Family, stale_buffer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a module's parameter lies on disk: a whole tensor, or one expert's rows of a fused 3-D one."""

    tensor: str
    expert: int | None = None
    rows: tuple[int, int] | None = None  # rows within the expert's matrix


@dataclass(frozen=True)
class Linear:
    """One matrix that can be quantized, merged or converted."""

    name: str  # on disk, without `.weight`; what recipes, manifests and configs call it
    module: str  # in the transformers model
    role: str  # path under the block, module-space, experts' numbers included
    block: int
    out_features: int
    in_features: int
    place: Place
    bias: str | None = None  # disk name
    conv1d: bool = False  # stored [in, out]
    expert: int | None = None

    @property
    def numel(self) -> int:
        return self.out_features * self.in_features


@dataclass(frozen=True)
class ModelLayout:
    """A checkpoint's tensors by role. All names are disk names unless said otherwise."""

    family: Family
    disk_stem: str
    places: dict[str, Place]  # module parameter -> disk
    blocks: tuple[tuple[tuple[Linear, ...], ...], ...]  # block -> groups in forward order -> linears sharing an input
    embedding: str
    head: str | None  # None: tied to the embedding
    stale: dict[str, str]  # dropped buffers -> why
    unknown: tuple[str, ...]  # not the text model's: copied untouched
    head_duplicate: str | None = None  # a head stored although the config ties it
    head_bias: str | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return tuple(linear for block in self.blocks for group in block for linear in group)

    def block_prefix(self, index: int) -> str:
        """Module-space prefix of block `index`, with a trailing dot."""
        return f"{self.family.stem}{self.family.blocks}.{index}."

    def block_tensors(self, index: int) -> dict[str, Place]:
        """Module parameter name -> place, for one block."""
        prefix = self.block_prefix(index)
        return {name: place for name, place in self.places.items() if name.startswith(prefix)}


def resolve_layout(
    family: Family,
    source: str,
    disk: Mapping[str, Shape],
    module: Mapping[str, Shape],
    tied: bool,
    n_blocks: int,
) -> ModelLayout:
    """Match module parameters (name -> shape, experts unfused) with disk tensors (name -> shape).

    Raises SutureError naming the first tensors that are missing or have another shape than the config implies.
    """
    stem = _disk_stem(family, source, disk)
    stored_head = _head_on_disk(family, stem, disk)
    head = None if tied else stored_head
    of_head = {
        f"{family.head}.weight": head or f"{stem}{family.embedding}.weight",
        f"{family.head}.bias": f"{stored_head.removesuffix('weight')}bias",  # Phi; its own even where the head is tied
    }
    places = {
        name: Place(of_head[name]) if name in of_head else _place(family, stem, name, disk, shape)
        for name, shape in module.items()
    }
    for tensor, shape in _stored_shapes(places, module).items():
        if disk.get(tensor, shape) != shape:
            raise SutureError(
                f"{source}: {tensor} has shape {list(disk[tensor])}, but config.json implies {list(shape)}",
                "the config does not describe these weights: was num_key_value_heads, head_dim or vocab_size edited?",
            )
    missing = [place.tensor for place in places.values() if place.tensor not in disk]
    if missing:
        raise SutureError(
            f"{source}: {len(missing)} tensors that the {family.model_type} config asks for are not in the checkpoint, "
            f"first {', '.join(missing[:3])}",
            "transformers would fill them with random values; download the checkpoint again or correct config.json",
        )
    used = {place.tensor for place in places.values()}
    rest = sorted(name for name in disk if name not in used)
    duplicate = stored_head if tied else None
    duplicate = duplicate if duplicate in disk else None
    inside = [name for name in rest if name.startswith(stem)]  # a vision tower's tensors are not ours to judge
    stale = {name: reason for name in inside if (reason := stale_buffer(name)) is not None}
    return ModelLayout(
        family=family,
        disk_stem=stem,
        places=places,
        blocks=tuple(_block_linears(family, index, module, places) for index in range(n_blocks)),
        embedding=f"{stem}{family.embedding}.weight",
        head=head,
        stale=stale,
        unknown=tuple(name for name in rest if name not in stale and name != duplicate),
        head_duplicate=duplicate,
        head_bias=of_head[f"{family.head}.bias"] if f"{family.head}.bias" in module else None,
    )


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a raw config that describes the text model: itself, or a vision wrapper's `text_config`."""
    from .families import WRAPPERS

    model_type = config.get("model_type", "")
    if model_type not in WRAPPERS:
        return dict(config)
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        raise SutureError(f"config.json: a {model_type} wrapper without a text_config object", "correct config.json")
    text = {"model_type": WRAPPERS[model_type], **inner}
    if config.get("tie_word_embeddings") is False:  # the wrapper's own key is what loaders go by
        text["tie_word_embeddings"] = False
    return text


def with_text_config(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The raw config with another text model's part: `text` itself, or a wrapper around it."""
    from .families import WRAPPERS

    if config.get("model_type", "") not in WRAPPERS:
        return dict(text)
    inner = dict(text)
    if "tie_word_embeddings" not in config.get("text_config", {}):
        inner.pop("tie_word_embeddings", None)  # `text_config` took it from the wrapper
    if "model_type" not in config.get("text_config", {}):
        inner.pop("model_type", None)
    return {**config, "text_config": inner}


def _disk_stem(family: Family, source: str, disk: Mapping[str, Shape]) -> str:
    wanted = [f"{stem}{family.embedding}.weight" for stem in family.disk_stems]
    for stem, name in zip(family.disk_stems, wanted, strict=True):
        if name in disk:
            return stem
    raise SutureError(
        f"{source}: no token embedding found for family {family.model_type}; looked for {', '.join(wanted)}",
        f"the checkpoint's tensors begin with {', '.join(sorted(disk)[:3])}",
    )


def _head_on_disk(family: Family, stem: str, disk: Mapping[str, Shape]) -> str:
    outer = stem.removesuffix("model.") if stem.endswith(".model.") else ""
    names = [f"{outer}{name}.weight" for name in dict.fromkeys((family.head_on_disk, family.head))]
    return next((name for name in names if name in disk), names[0])


def _place(family: Family, stem: str, name: str, disk: Mapping[str, Shape], shape: Shape) -> Place:
    rest = name.removeprefix(family.stem)
    direct = stem + rest
    experts = family.experts
    if experts is None or direct in disk:
        return Place(direct)
    parts = rest.split(".")  # layers.3.mlp.experts.0.gate_proj.weight
    block, local = ".".join(parts[:2]), ".".join(parts[2:])
    if local.startswith(experts.module + "."):
        return _expert_place(experts, f"{stem}{block}.", local, disk, shape)
    for module_prefix, disk_prefix in experts.renames:
        if local.startswith(module_prefix + "."):
            return Place(f"{stem}{block}.{disk_prefix}{local.removeprefix(module_prefix)}")
    return Place(direct)


def _stored_shapes(places: Mapping[str, Place], module: Mapping[str, Shape]) -> dict[str, Shape]:
    """Tensor on disk -> the shape that the config implies; for fused experts, of all their matrices together."""
    shapes: dict[str, Shape] = {}
    for name, place in places.items():
        if place.expert is None or place.rows is None:
            shapes[place.tensor] = module[name]
        else:
            experts, rows, _ = shapes.get(place.tensor, (0, 0, 0))
            shapes[place.tensor] = (max(experts, place.expert + 1), max(rows, place.rows[1]), module[name][1])
    return shapes


def _expert_place(experts: Experts, prefix: str, local: str, disk: Mapping[str, Shape], shape: Shape) -> Place:
    number, projection, _ = local.removeprefix(experts.module + ".").split(".")
    index = ("gate_proj", "up_proj", "down_proj").index(projection)
    apart = f"{prefix}{experts.disk.format(e=number, p=experts.projections[index])}.weight"
    fused = f"{prefix}{experts.module}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"
    if apart in disk or fused not in disk:
        return Place(apart)
    rows = (shape[0], 2 * shape[0]) if projection == "up_proj" else (0, shape[0])
    return Place(fused, expert=int(number), rows=rows)


def _block_linears(
    family: Family, index: int, module: Mapping[str, Shape], places: Mapping[str, Place]
) -> tuple[tuple[Linear, ...], ...]:
    prefix = f"{family.stem}{family.blocks}.{index}."
    groups = [
        tuple(_linear(family, index, role, module, places) for role in group if f"{prefix}{role}.weight" in module)
        for group in family.groups
    ]
    if family.experts is not None:
        first = f"{prefix}{family.experts.module}."
        numbers = sorted({int(name.removeprefix(first).split(".")[0]) for name in module if name.startswith(first)})
        for projections in (("gate_proj", "up_proj"), ("down_proj",)):
            groups.append(
                tuple(
                    _linear(family, index, f"{family.experts.module}.{e}.{p}", module, places, expert=e)
                    for e in numbers
                    for p in projections
                )
            )
    return tuple(group for group in groups if group)


def _linear(
    family: Family,
    index: int,
    role: str,
    module: Mapping[str, Shape],
    places: Mapping[str, Place],
    expert: int | None = None,
) -> Linear:
    path = f"{family.stem}{family.blocks}.{index}.{role}"
    place = places[f"{path}.weight"]
    shape = module[f"{path}.weight"]
    bias = places.get(f"{path}.bias")
    name = place.tensor.removesuffix(".weight")
    if place.expert is not None and family.experts is not None:
        projection = family.experts.projections[("gate_proj", "up_proj", "down_proj").index(role.rsplit(".", 1)[1])]
        block = place.tensor.removesuffix(f"{family.experts.module}.{place.tensor.rsplit('.', 1)[1]}")
        name = block + family.experts.disk.format(e=expert, p=projection)
    return Linear(
        name=name,
        module=path,
        role=role,
        block=index,
        out_features=shape[1] if family.conv1d else shape[0],
        in_features=shape[0] if family.conv1d else shape[1],
        place=place,
        bias=bias.tensor if bias else None,
        conv1d=family.conv1d,
        expert=expert,
    )
