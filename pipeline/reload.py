"""Load a checkpoint with stock transformers in a process of its own, and write down its logits.

`main` wants MODEL_DIR, IDS.pt and OUT.pt on its standard input, a line each. Until they
come it has imported what it needs and waits; it ends when its input does.

Nothing of suture reads the files here. The weights load in their stored dtype and are unpacked by the library whose
format it is; then each layer computes in float32, so that only the weights can differ.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..calibrate.memory import let_go
from ..calibrate.product import product_by_rows
from .usage import peak_memory

_STORED = 16  # tokens that are also computed in the stored dtype
_BITSANDBYTES = ("Linear4bit", "Linear8bitLt")
_PACKED = ("_parameters", "_buffers", "quantization_status")  # what unpacking changes in compressed-tensors' layers


def load_and_run(model_dir: str, ids: Tensor) -> dict[str, Any]:
    """Logits of the model in `model_dir` for token ids [B, T], and what its loader reported."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    model, info = auto.from_pretrained(  # type: ignore[misc]  # a pair, because of output_loading_info
        model_dir, dtype="auto", output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    with torch.no_grad(), contextlib.ExitStack() as undo:
        for module in model.modules():
            undo.callback(module.register_forward_hook(_let_go, always_call=True).remove)
        logits = _in_float32(model, config, ids)  # first: a forward in the stored dtype may repack bitsandbytes' layers
        stored = _as_stored(model, ids)
    return {
        "logits": logits,
        "stored_dtype_logits": stored,
        "missing": sorted(map(str, info["missing_keys"])),
        "unexpected": sorted(map(str, info["unexpected_keys"])),
        "mismatched": sorted(map(str, info["mismatched_keys"])),
        "model_class": type(model).__name__,
    }


def _let_go(module: torch.nn.Module, *_: Any) -> None:
    """What a module has read of the files need not stay in memory; the loader has mapped them."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        let_go(tensor.data)


def config_of(model: torch.nn.Module) -> dict[str, Any]:
    """The `quantization_config` that the model was loaded with, or nothing."""
    found = getattr(model.config, "quantization_config", None)  # type: ignore[union-attr]
    return found if isinstance(found, dict) else found.to_dict() if found is not None else {}


def _as_stored(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Logits in the stored dtype's arithmetic, of few tokens, since 16-bit products are slow on many CPUs."""
    with contextlib.ExitStack() as undo:
        _unpack_while_running(model, undo)
        return model(ids[:, :_STORED], use_cache=False).logits.float()


def _in_float32(model: torch.nn.Module, config: Any, ids: Tensor) -> Tensor:
    """Logits in float32's arithmetic. The model stays as it was stored: in float32 it would take twice its memory again,
    so what has few and large numbers is widened in pieces, and the rest of a block while its forward runs."""
    with contextlib.ExitStack() as undo:
        if any(buffer.dtype in (torch.bfloat16, torch.float16) for buffer in model.buffers()):
            _restore_buffers(model, config, undo)
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        apart = {embedding, *(module for module in model.modules() if isinstance(module, torch.nn.Linear))}
        _look_up_in_float32(embedding, undo)
        for module in apart - {embedding}:
            _multiply_in_float32(module, undo)
        for modules in _units(model):
            _widen_while_running(modules[0], [module for module in modules if module not in apart], undo)
        _unpack_while_running(model, undo)
        return model(ids, use_cache=False).logits.float()


def _look_up_in_float32(embedding: Any, undo: contextlib.ExitStack) -> None:
    """Give the embedding's forward the rows that it needs, and only those, in float32."""
    held, padding = embedding.__dict__["_parameters"], embedding.padding_idx

    def narrowed(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, ids = arguments[0].unique(return_inverse=True)
        embedding.__dict__["_parameters"] = {**held, "weight": _wide(held["weight"].detach()[rows])}
        embedding.padding_idx = None
        return (ids, *arguments[1:])

    def restored(*_: Any) -> None:
        embedding.__dict__["_parameters"] = held
        embedding.padding_idx = padding

    undo.callback(embedding.register_forward_pre_hook(narrowed, prepend=True).remove)
    undo.callback(embedding.register_forward_hook(restored, always_call=True).remove)


def _multiply_in_float32(linear: Any, undo: contextlib.ExitStack) -> None:
    """Let a linear layer multiply by some of its rows at a time, widened. One with a forward of its own is widened whole
    while that runs."""
    packed = type(linear).__name__ in _BITSANDBYTES
    if "forward" in vars(linear) or not (packed or type(linear) is torch.nn.Linear):
        _widen_while_running(linear, [linear], undo)
        return

    def forward(input: Tensor) -> Tensor:
        weight = _dense(linear) if packed else linear.weight
        return product_by_rows(input.float(), weight, None if linear.bias is None else linear.bias.float())

    linear.forward = forward
    undo.callback(vars(linear).pop, "forward")


def _dense(linear: Any) -> Tensor:
    """A layer of bitsandbytes by the call with which transformers makes it dense."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    return dequantize_bnb_weight(linear.weight, getattr(linear, "state", None))


def _unpack_while_running(model: torch.nn.Module, undo: contextlib.ExitStack) -> None:
    """Let compressed-tensors make each of its layers dense when it runs, and only so long; its own hook makes all of them
    dense before the first. To be called last: a layer is unpacked before, and packed again after, all else is done to it.
    """
    whole = getattr(model, "ct_decompress_hook", None)
    if whole is None:
        return
    from compressed_tensors.compressors import decompress_module

    packed: dict[torch.nn.Module, dict[str, Any]] = {}

    def unpack(module: Any, *_: Any) -> None:
        packed[module] = {name: module.__dict__[name] for name in _PACKED}
        for table in ("_parameters", "_buffers"):
            module.__dict__[table] = dict(module.__dict__[table])
        decompress_module(module)

    def restore(module: torch.nn.Module, *_: Any) -> None:
        module.__dict__.update(packed.pop(module))
        _let_go(module)

    whole.remove()
    for module in model.modules():
        if all(name in module.__dict__ for name in _PACKED):
            undo.callback(module.register_forward_pre_hook(unpack, prepend=True).remove)
            undo.callback(module.register_forward_hook(restore, always_call=True).remove)


def _widen_while_running(runs: torch.nn.Module, modules: list[torch.nn.Module], undo: contextlib.ExitStack) -> None:
    """Have `modules` in float32 while the forward of `runs` does."""
    stored: list[tuple[torch.nn.Module, str, Any]] = []

    def widen(*_: Any) -> None:
        for module in modules:
            for table in ("_parameters", "_buffers"):
                held = module.__dict__[table]
                stored.append((module, table, held))
                # a new dict: compressed-tensors leaves a cache in its place, which keeps each entry's first dtype
                module.__dict__[table] = {name: _wide(value) for name, value in held.items()}

    def narrow(*_: Any) -> None:
        while stored:
            module, table, held = stored.pop()
            module.__dict__[table] = held

    undo.callback(runs.register_forward_pre_hook(widen, prepend=True).remove)
    undo.callback(runs.register_forward_hook(narrow, always_call=True).remove)


def _wide(value: Any) -> Any:
    if value is None or not value.is_floating_point() or value.dtype == torch.float32:
        return value
    wide = value.detach().float()
    return torch.nn.Parameter(wide, requires_grad=False) if isinstance(value, torch.nn.Parameter) else wide


def _units(module: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """Blocks (members of a list) with all that is in them, and the other modules that hold something, each by itself."""
    if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
        yield [module]
    for child in module.children():
        if isinstance(module, torch.nn.ModuleList):
            yield list(child.modules())
        else:
            yield from _units(child)


def _restore_buffers(model: torch.nn.Module, config: Any, undo: contextlib.ExitStack) -> None:
    """Constants that loading in a short dtype had rounded (Gemma's embedding scale), as a float32 model has them."""
    from accelerate import init_empty_weights

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with init_empty_weights(include_buffers=False):
        exact = type(model)._from_config(config, dtype=torch.float32)  # type: ignore[attr-defined]
    kept = set(model.state_dict())
    for name, buffer in exact.named_buffers():
        if name not in kept and buffer.is_floating_point():
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            # a new dict: compressed-tensors leaves a cache in its place, which keeps each entry's first dtype
            undo.callback(owner.__dict__.__setitem__, "_buffers", owner._buffers)
            owner.__dict__["_buffers"] = {**dict(owner._buffers.items()), leaf: buffer}


def main() -> None:
    _import_early()
    asked = sys.stdin.read().splitlines()
    if asked:
        model_dir, ids_file, out_file = asked
        found = load_and_run(model_dir, torch.load(ids_file, weights_only=True))
        torch.save(found | {"peak_memory": peak_memory()}, out_file)


def _import_early() -> None:
    """What nearly every model needs; transformers itself imports a module when it is first asked for."""
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto  # noqa: F401

    with contextlib.suppress(ImportError):
        import compressed_tensors  # noqa: F401
