"""The step `mla`: attention becomes latent attention, and the checkpoint a stock dense deepseek_v3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calibrate.replay import Stream
from ..calibrate.skeleton import Skeleton, open_skeleton
from ..calibrate.statistics import SecondMoment
from ..checkpoint.errors import SutureError
from ..checkpoint.families import WRAPPERS
from ..checkpoint.layout import ModelLayout
from ..checkpoint.manifest import Account
from ..checkpoint.source import TensorSource
from ..checkpoint.writer import TensorSpec
from ..surgery.deepseek_v3 import (
    attention_shapes,
    attention_tensors,
    deepseek_config,
    residual_scale,
    rotary_config,
    source_frequencies,
)
from ..surgery.mla import (
    AttentionWeights,
    Heads,
    MLASettings,
    convert_attention,
    folds_of,
    full_rank,
    is_exact,
)
from ..surgery.partial_rope import Fold, slot_frequencies
from ..surgery.portability import portability, refuse_unrepresentable
from .step import Prepared, StepResult, StepRun
from .walk import CONVERTING, convert_blocks

_CODES = {"float32": "F32", "bfloat16": "BF16"}
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_HEAD = "lm_head.weight"
_ATTENTION = {  # parameter of the source's self_attn -> what it becomes part of
    "q_proj": ("q_proj", "q_a_proj", "q_b_proj", "q_a_layernorm"),
    "k_proj": ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
    "v_proj": ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj.bias"),
    "o_proj": ("o_proj",),
}


@dataclass(frozen=True)
class MLAPlan(Prepared):
    layout: ModelLayout
    sizes: Heads
    folds: tuple[Fold, ...]
    bias: bool
    beta: float  # scale of the residual stream
    scale: float  # on keys, for the softmax
    rotary_factor: float
    exact: bool


def prepare(source: TensorSource, settings: MLASettings) -> MLAPlan:
    """Raises SutureError for every feature that a stock MLA class cannot represent, and for sizes that cannot be."""
    model_type = str(source.config.get("model_type"))
    if model_type in WRAPPERS:
        raise SutureError(f"mla: {model_type} is a vision wrapper", "a stock deepseek_v3 is a text model only")
    skeleton = open_skeleton(source)
    layout, hf = skeleton.layout, skeleton.hf_config
    dtype = _CODES.get(settings.dtype) or _stored_dtype(source, layout)
    refuse_unrepresentable(hf, layout, dtype)
    heads = int(hf.num_attention_heads)
    dim = int(getattr(hf, "head_dim", None) or hf.hidden_size // heads)
    sizes = Heads(heads, int(hf.num_key_value_heads or heads), dim, int(hf.hidden_size))
    folds = folds_of(settings, sizes)
    bias = any(linear.bias is not None for linear in layout.linears)
    frequencies, factor = source_frequencies(hf, dim)
    slots = [frequencies[f] for f in slot_frequencies(folds)]
    rope = rotary_config(dict(hf.rope_parameters), slots, factor, dim, int(hf.max_position_embeddings))
    config = deepseek_config(hf, sizes, settings, rope, bias, _NAMES[dtype])
    beta = residual_scale(float(hf.rms_norm_eps))
    specs, accounts = _account(source, layout, sizes, settings, bias, beta, dtype)
    attention: Any = skeleton.model.get_submodule(f"{layout.block_prefix(0)}self_attn")
    return MLAPlan(
        specs=specs,
        config=config,
        accounts=accounts,
        notes=_notes(source, settings, sizes, dtype),
        n_blocks=len(layout.blocks),
        working_blocks=CONVERTING,
        portability=tuple(portability(hf, layout, config, dtype)),
        layout=layout,
        sizes=sizes,
        folds=folds,
        bias=bias,
        beta=beta,
        scale=float(attention.scaling) * (dim + settings.rope_dim) ** 0.5,
        rotary_factor=factor**2,
        exact=is_exact(settings, sizes),
    )


def _stored_dtype(source: TensorSource, layout: ModelLayout) -> str:
    """The dtype of the model's weights. Raises SutureError when they are of several, or not plain floats."""
    found = sorted({source.dtypes[place.tensor] for place in layout.places.values()})
    if len(found) != 1 or found[0] not in _NAMES:
        raise SutureError(
            f"mla: the weights are {', '.join(found)}; an output has one dtype of float32 and bfloat16",
            "set dtype: bfloat16 or float32",
        )
    return found[0]


def _account(
    source: TensorSource,
    layout: ModelLayout,
    sizes: Heads,
    settings: MLASettings,
    bias: bool,
    beta: float,
    dtype: str,
) -> tuple[tuple[TensorSpec, ...], dict[str, Account]]:
    """The output's tensors, and what becomes of every input."""
    new = attention_shapes(sizes, settings, bias)
    specs: list[TensorSpec] = []
    accounts = {name: Account("dropped", reason=reason) for name, reason in layout.stale.items()}
    head = layout.head or layout.head_duplicate
    if head is not None:
        accounts[head] = _kept(source, head, dtype, (_HEAD,))
    specs.append(TensorSpec(_HEAD, dtype, source.shapes[layout.embedding]))
    for name, shape in source.shapes.items():
        if name in accounts:
            continue
        block, part = _part_of(layout, name)
        if part.startswith("self_attn."):
            parents = _ATTENTION[part.split(".")[1]]
            outputs = tuple(f"{block}self_attn.{key}" for key in new if key.startswith(parents))
            if part == "self_attn.o_proj.weight":
                outputs = (name,)
                accounts[name] = _kept(source, name, dtype, outputs)
            else:
                accounts[name] = Account("changed", outputs, "latent attention")
            if part == "self_attn.q_proj.weight":
                specs += [TensorSpec(f"{block}self_attn.{key}", dtype, shape) for key, shape in new.items()]
            continue
        outputs = (name, _HEAD) if name == layout.embedding and head is None else (name,)
        scaled = beta != 1 and (name == layout.embedding or part.startswith("mlp.down_proj."))
        accounts[name] = (
            Account("changed", outputs, "scaled with the residual stream")
            if scaled
            else _kept(source, name, dtype, outputs)
        )
        used = dtype if name not in layout.unknown else source.dtypes[name]
        specs.append(TensorSpec(name, used, shape))
    return tuple(specs), accounts


def _kept(source: TensorSource, name: str, dtype: str, outputs: tuple[str, ...]) -> Account:
    if source.dtypes[name] == dtype:
        return Account("copied", outputs)
    return Account("changed", outputs, f"stored as {_NAMES[dtype]}")


def _part_of(layout: ModelLayout, name: str) -> tuple[str, str]:
    """(`model.layers.3.`, `self_attn.q_proj.weight`) for a block's tensor, else empty strings."""
    stem = f"{layout.disk_stem}{layout.family.blocks}."
    if name in layout.unknown or not name.startswith(stem):
        return "", ""
    number, _, part = name.removeprefix(stem).partition(".")
    return f"{stem}{number}.", part


def _notes(source: TensorSource, settings: MLASettings, sizes: Heads, dtype: str) -> tuple[str, ...]:
    before, after = 2 * sizes.kv_heads * sizes.dim, settings.rank + settings.rope_dim
    notes = [f"each token's cache holds {after} numbers per layer instead of {before}"]
    if after >= before and not is_exact(settings, sizes):
        notes.append(f"the cache does not get smaller: rank {settings.rank} + rope_dim {settings.rope_dim} >= {before}")
    if settings.rank % 16 and settings.rank != full_rank(settings, sizes):
        notes.append(f"rank {settings.rank} is no multiple of 16: kernels may refuse it")
    if any(source.dtypes[name] != dtype for name in source.shapes):
        notes.append(f"weights are stored as {_NAMES[dtype]}")
    return tuple(notes)


def needs_text(settings: MLASettings) -> bool:
    return settings.needs_text


def rehearsal(plan: MLAPlan, settings: MLASettings) -> tuple[str, MLASettings]:
    """The same shapes without data."""
    return "mla", settings.model_copy(update={"metric": "plain"})


@torch.no_grad()
def run(work: StepRun, plan: MLAPlan, settings: MLASettings) -> StepResult:
    """Convert block by block, by what the source's own blocks put out: measured on SmolLM2, better than the converted ones'."""

    def convert(before: Skeleton, index: int, stream: Stream | None) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        moment = _moment(before, index, stream)
        return _convert_block(before, index, plan, settings, moment)

    return convert_blocks(
        work,
        plan,
        plan.layout,
        convert,
        calibrated=settings.needs_text,
        converted_inputs=False,
        outside=_outside(work.checkpoint, plan),
        exact=plan.exact,
    )


def _outside(source: TensorSource, plan: MLAPlan) -> dict[str, Tensor]:
    """Tensors outside the blocks that are not plain copies."""
    layout = plan.layout
    head = source.read(layout.head or layout.head_duplicate or layout.embedding)
    made = {_HEAD: head, layout.embedding: source.read(layout.embedding).double() * plan.beta}
    for name, account in plan.accounts.items():
        outside = not _part_of(layout, name)[0]
        if outside and account.action == "changed" and name not in (layout.embedding, layout.head):
            made[name] = source.read(name)
    return made


def _moment(before: Skeleton, index: int, stream: Stream | None) -> Tensor:
    """E[x̃ x̃ᵀ] of x̃ = [x, 1], x the input of block `index`'s attention, float64 [D + 1, D + 1]; white without text."""
    width = int(before.hf_config.hidden_size)
    if stream is None:
        return torch.eye(width + 1, dtype=torch.float64)
    norm = before.block(index).get_submodule(before.family.norms[0])
    moment = SecondMoment.zeros(width + 1, torch.float64, before.device)
    for hidden in stream.hidden:
        x = norm(hidden.to(before.device))
        moment.add(torch.cat([x, torch.ones_like(x[..., :1])], dim=-1))
    found = moment.hessian().cpu()
    if not bool(torch.isfinite(found).all()):
        raise SutureError(
            f"block {index}: its inputs on the calibration text hold NaN or values too large for float32",
            "a layer before it overflows: check the checkpoint",
        )
    return found


def _convert_block(
    before: Skeleton, index: int, plan: MLAPlan, settings: MLASettings, moment: Tensor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    attention = before.block(index).get_submodule("self_attn")
    parameters = {name: value.detach().cpu().double() for name, value in attention.named_parameters()}
    source = _weights(parameters, plan.sizes)
    made = convert_attention(source, moment, plan.folds, settings, scale=plan.scale, rotary_factor=plan.rotary_factor)
    prefix = f"{plan.layout.disk_stem}{plan.layout.family.blocks}.{index}."
    gain = before.block(index).get_submodule(before.family.norms[0]).get_parameter("weight").detach().cpu().double()
    bias = parameters.get("o_proj.bias", torch.zeros(plan.sizes.width, dtype=torch.float64)) if plan.bias else None
    tensors, pins = attention_tensors(source, made, gain, plan.beta, bias)
    output = {f"{prefix}self_attn.{name}": tensor for name, tensor in tensors.items()}
    for name, account in plan.accounts.items():
        if name.startswith(prefix) and account.action == "changed" and account.outputs == (name,):
            value = before.source.read(name).double()
            output.setdefault(name, value * plan.beta if ".mlp.down_proj." in name else value)
    record = {"method": f"mla {settings.method}", **made.record, "pins": pins}
    return output, {f"{prefix}self_attn": record}


def _weights(parameters: Mapping[str, Tensor], sizes: Heads) -> AttentionWeights:
    def heads(name: str, n: int) -> tuple[Tensor, Tensor]:
        bias = parameters.get(f"{name}.bias")
        bias = torch.zeros(n * sizes.dim, dtype=torch.float64) if bias is None else bias
        return parameters[f"{name}.weight"].view(n, sizes.dim, sizes.width), bias.view(n, sizes.dim)

    q, q_bias = heads("q_proj", sizes.heads)
    k, k_bias = heads("k_proj", sizes.kv_heads)
    v, v_bias = heads("v_proj", sizes.kv_heads)
    o = parameters["o_proj.weight"].view(sizes.width, sizes.heads, sizes.dim)
    return AttentionWeights(q, k, v, o, q_bias, k_bias, v_bias)
