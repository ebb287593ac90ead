"""Load a checkpoint with stock transformers in a process of its own, and write down its logits.

`main` wants MODEL_DIR, IDS.pt and OUT.pt on its standard input, a line each. Until they
come it has imported what it needs and waits; it ends when its input does.

Nothing of suture reads the files here. The weights load in their stored dtype (packed ones are decompressed by the first
forward, as for any user), then each block computes in float32, so that only the weights can differ.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .usage import peak_memory


def load_and_run(model_dir: str, ids: Tensor) -> dict[str, Any]:
    """Logits of the model in `model_dir` for token ids [B, T], and what its loader reported."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    model, info = auto.from_pretrained(  # type: ignore[misc]  # a pair, because of output_loading_info
        model_dir, dtype="auto", output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    with torch.no_grad():
        # the first forward makes packed weights dense; few tokens, since 16-bit products are slow on many CPUs
        stored = model(ids[:, :16], use_cache=False).logits.float()
        if config_of(model).get("quant_method") == "bitsandbytes":
            model = _dequantized(auto, model_dir)
        rounded = any(buffer.dtype in (torch.bfloat16, torch.float16) for buffer in model.buffers())
        if rounded:
            _restore_buffers(model, config)
        _compute_in_float32(model)
        logits = model(ids, use_cache=False).logits.float()
    return {
        "logits": logits,
        "stored_dtype_logits": stored,
        "missing": sorted(map(str, info["missing_keys"])),
        "unexpected": sorted(map(str, info["unexpected_keys"])),
        "mismatched": sorted(map(str, info["mismatched_keys"])),
        "model_class": type(model).__name__,
    }


def config_of(model: torch.nn.Module) -> dict[str, Any]:
    """The `quantization_config` that the model was loaded with, or nothing."""
    found = getattr(model.config, "quantization_config", None)  # type: ignore[union-attr]
    return found if isinstance(found, dict) else found.to_dict() if found is not None else {}


def _dequantized(auto: Any, model_dir: str) -> torch.nn.Module:
    """Loaded again, since a forward may repack the weights, and its layers made dense by transformers' own call.

    bitsandbytes' layers compute in their own way (int8 ones round their inputs); this leaves the weights alone to differ.
    """
    model = auto.from_pretrained(model_dir, dtype="auto", local_files_only=True, trust_remote_code=False)
    return model.dequantize(dtype=torch.float32)


def _compute_in_float32(model: torch.nn.Module) -> None:
    """From now on each block, and each layer outside them, is in float32 while its forward runs, and as it was stored
    otherwise: in float32 the whole model would take twice the memory again."""
    for modules in _units(model):
        stored: list[tuple[torch.nn.Module, str, Any]] = []

        def widen(*_: Any, modules: Any = modules, stored: Any = stored) -> None:
            for module in modules:
                for table in ("_parameters", "_buffers"):
                    held = module.__dict__[table]
                    stored.append((module, table, held))
                    # a new dict: compressed-tensors leaves a cache in its place, which keeps each entry's first dtype
                    module.__dict__[table] = {name: _wide(value) for name, value in held.items()}

        def narrow(*_: Any, stored: Any = stored) -> None:
            while stored:
                module, table, held = stored.pop()
                module.__dict__[table] = held

        modules[0].register_forward_pre_hook(widen, prepend=True)
        modules[0].register_forward_hook(narrow, always_call=True)


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


def _restore_buffers(model: torch.nn.Module, config: Any) -> None:
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
