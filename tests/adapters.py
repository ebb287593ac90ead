"""PEFT adapters on kit models, as PEFT itself writes them, and the logits of the unmerged model that they make.

Nothing is at its identity: r != alpha, every A, B, magnitude, bias and trained row is drawn, so that a scale, a transpose
or a tensor that is left out shows in the logits.
"""

import json
import zlib
from pathlib import Path

import torch
from kit import some_ids, stock
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "L0": LLAMA_TARGETS,
    "L1": LLAMA_TARGETS,
    "L2": LLAMA_TARGETS,
    "Q2": LLAMA_TARGETS,
    "G3": LLAMA_TARGETS,
    "GP": ["c_attn", "c_proj", "c_fc"],
    "P3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "NX": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "FA-new": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "MX": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


def trained(model_dir, out, seed=0, std=0.08, prepare=None, **settings):
    """Make an adapter with PEFT as if it had been trained, save it at `out`, and return that directory."""
    model = stock(model_dir)
    if prepare is not None:
        prepare(model)
    config = LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 10} | settings)
    peft = get_peft_model(model, config)
    kept = settings.get("init_lora_weights", True)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if not parameter.requires_grad:
                continue
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            noise = std * torch.randn(parameter.shape, generator=generator)
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
            elif "lora_" in name and isinstance(kept, bool):
                parameter.copy_(noise)
            else:
                parameter.add_(noise)
    peft.save_pretrained(out)
    return Path(out)


def live(model_dir, adapter, ids=None, prepare=None):
    """Logits [B, T, vocab] of PEFT's unmerged model, in float32."""
    model = stock(model_dir)
    if prepare is not None:
        prepare(model)
    with torch.no_grad():
        return PeftModel.from_pretrained(model, adapter).eval()(some_ids() if ids is None else ids).logits


def peft_merged(model_dir, adapter, ids=None):
    """Logits after PEFT's own merge."""
    with torch.no_grad():
        merged = PeftModel.from_pretrained(stock(model_dir), adapter).eval().merge_and_unload()
        return merged(some_ids() if ids is None else ids).logits


def logits(model_dir, ids=None):
    with torch.no_grad():
        return stock(model_dir)(some_ids() if ids is None else ids).logits


def edit_adapter(directory, tensors=None, **config):
    """Change an adapter in place: its tensors by a function, keys of its config."""
    directory = Path(directory)
    file = directory / "adapter_model.safetensors"
    if tensors is not None:
        save_file({k: t.contiguous() for k, t in tensors(load_file(file)).items()}, file, metadata={"format": "pt"})
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory
