"""The tiny model kit: every supported family, and the variants in which families go wrong, as real checkpoints.

Weights have std 0.3, so that logits are far from flat; no norm and no bias is left at its identity; heads, head sizes
and key-value heads differ from what careless code would compute (hidden != heads * head_dim, heads / kv != kv).
Two layers, 320 tokens, and sequences longer than the sliding windows. A parameter's values depend on its name alone.
There is no tokenizer: calibration and scoring take token ids.
"""

import json
import re
import zlib
from pathlib import Path
from unittest.mock import patch

import jsonschema
import numpy as np
import referencing
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import logging
from warm import LocalLoader

import suture

logging.disable_progress_bar()
logging.set_verbosity_error()
torch.set_num_threads(1)  # threads wait for one another longer than matrices of this size take

VOCABULARY = 320
LENGTH = 24  # tokens of a test sequence: three sliding windows
WINDOW = 8

_COMMON = {
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "max_position_embeddings": 128,
}
_LLAMA = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128}
_GEMMA = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
}
_DEEPSEEK = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "first_k_dense_replace": 2,  # every layer is dense
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_ROPE_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_ROPE_GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
_ROPE_PHI3_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,  # a test sequence is longer
}

# name -> model_type, what differs from `_COMMON`
MODELS: dict[str, tuple[str, dict]] = {
    "L0": ("llama", {**_LLAMA, "num_key_value_heads": 8}),
    "L1": ("llama", _LLAMA),
    "L2": ("llama", {**_LLAMA, "tie_word_embeddings": True}),
    "L-llama3": (
        "llama",
        {**_LLAMA, "head_dim": 12, "attention_bias": True, "mlp_bias": True, "rope_parameters": _ROPE_LLAMA3},
    ),
    "L-yarn": ("llama", {**_LLAMA, "rope_parameters": _ROPE_YARN}),
    "MI": ("mistral", {**_LLAMA, "head_dim": 12, "sliding_window": WINDOW}),
    "Q2": ("qwen2", {**_LLAMA, "tie_word_embeddings": True}),
    "Q3": ("qwen3", {**_GEMMA, "hidden_size": 40, "query_pre_attn_scalar": None, "sliding_window": None}),
    "G1": ("gemma", {**_GEMMA, "query_pre_attn_scalar": None, "sliding_window": None}),
    "G2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "G3": (
        "gemma3_text",
        {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": _ROPE_GEMMA3},
    ),
    "P3": ("phi3", _LLAMA),
    "P3-partial": (
        "phi3",
        {**_LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "P3-longrope": (
        "phi3",
        {**_LLAMA, "original_max_position_embeddings": 16, "rope_parameters": _ROPE_PHI3_LONG},
    ),
    "GP": (
        "gpt2",
        {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64, "num_hidden_layers": None, "pad_token_id": None}
        | {"max_position_embeddings": None},
    ),
    "NX": (
        "gpt_neox",
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 160,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "PH": (
        "phi",
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 160,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "FA": (
        "falcon",  # as Falcon 7B: one key-value head, one norm
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "ffn_hidden_size": 160,
            "num_kv_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    "FA-new": (
        "falcon",  # as Falcon 40B: groups of heads, two norms; tied as published
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_kv_heads": 2,
            "ffn_hidden_size": 160,
            "new_decoder_architecture": True,
            "bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "MX": (
        "mixtral",
        {**_LLAMA, "head_dim": 12, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "QM": (
        "qwen3_moe",
        {
            **_LLAMA,
            "head_dim": 16,
            "intermediate_size": 96,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],  # block 0 is dense
        },
    ),
    "DS": ("deepseek_v3", {**_DEEPSEEK, "q_lora_rank": None}),
    "DS-q-lora": ("deepseek_v3", {**_DEEPSEEK, "q_lora_rank": 32, "rope_parameters": {**_ROPE_YARN, "mscale": 0.8}}),
}
WRAPPERS: dict[str, tuple[str, str]] = {  # name -> model_type, prefix of the text model's tensors
    "W-gemma3": ("gemma3", "language_model.model."),
    "W-gemma3-new": ("gemma3", "model.language_model."),
    "W-mistral3": ("mistral3", "language_model.model."),
}
NAMES = (*MODELS, *WRAPPERS)

_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}


def make(name, directory, dtype="bfloat16", **changes):
    """Write the kit's model `name` (a key of MODELS or WRAPPERS); `changes` are keys of the text model's config."""
    directory = Path(directory)
    if name in WRAPPERS:
        return _make_wrapper(name, directory, dtype, changes)
    model_type, settings = MODELS[name]
    wanted = {k: v for k, v in ({**_COMMON, **settings} | changes).items() if v is not None or k == "q_lora_rank"}
    config = transformers.AutoConfig.for_model(model_type, **wanted)
    model = transformers.AutoModelForCausalLM.from_config(config)
    fill(model)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return directory


def _make_wrapper(name, directory, dtype, changes):
    """A vision model around a text model; its head is its own (`language_model.lm_head`) under the older prefix."""
    model_type, prefix = WRAPPERS[name]
    inner_type, settings = MODELS["G3" if model_type == "gemma3" else "MI"]
    tied = changes.get("tie_word_embeddings", prefix.startswith("model."))
    text = {**_COMMON, **settings, "model_type": inner_type, "tie_word_embeddings": tied} | changes
    vision = {**_VISION, "model_type": "siglip_vision_model" if model_type == "gemma3" else "pixtral"}
    extra = {"mm_tokens_per_image": 4, "boi_token_index": 301, "eoi_token_index": 302} if model_type == "gemma3" else {}
    config = transformers.AutoConfig.for_model(
        model_type, text_config=text, vision_config=vision, image_token_index=300, tie_word_embeddings=tied, **extra
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    fill(model)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    edit(directory, lambda tensors: {_renamed(key, prefix): tensor for key, tensor in tensors.items()})
    return directory


def _renamed(name, prefix):
    """A wrapper's tensor as transformers 5 saves it, under the prefixes that go with `prefix`."""
    outer = prefix.removesuffix("language_model.") if prefix.startswith("model.") else ""
    if name.startswith("language_model.model."):
        return prefix + name.removeprefix("language_model.model.")
    return name if name.startswith("language_model.") else outer + name


@torch.no_grad()
def fill(model):
    """Every parameter from a generator seeded by its name."""
    for path, module in model.named_modules():
        norm = type(module).__name__
        for leaf, parameter in module.named_parameters(recurse=False):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{path}.{leaf}".encode()))
            if "Norm" in norm and leaf == "weight" and not norm.startswith("Gemma"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                std = 1.0 if leaf == "bias" and path.endswith(("q_proj", "k_proj", "v_proj")) else 0.3
                parameter.normal_(0.0, std, generator=generator)


def read(directory):
    """All tensors of a checkpoint."""
    found = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def edit(directory, tensors=None, **config):
    """Change a checkpoint in place: its tensors by a function, keys of its config.json (None removes one)."""
    directory = Path(directory)
    if tensors is not None:
        content = tensors(read(directory))
        for file in directory.glob("*.safetensors*"):
            file.unlink()
        save_file({name: t.contiguous() for name, t in content.items()}, directory / "model.safetensors")
    if config:
        path = directory / "config.json"
        changed = json.loads(path.read_text()) | config
        path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    return directory


def fuse_experts(tensors):
    """Experts' matrices of a mixtral or qwen3_moe checkpoint as the two 3-D tensors that transformers 5 has in memory."""
    result, experts = {}, {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(model\.layers\.\d+)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight", name)
        if found:
            experts.setdefault(found[1], {})[int(found[2]), _EXPERT_PARTS.get(found[3], found[3])] = tensor
        else:
            result[name.replace("block_sparse_moe.gate", "mlp.gate")] = tensor
    for block, parts in experts.items():
        n = max(e for e, _ in parts) + 1
        both = [torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in range(n)]
        result[f"{block}.mlp.experts.gate_up_proj"] = torch.stack(both)
        result[f"{block}.mlp.experts.down_proj"] = torch.stack([parts[e, "down_proj"] for e in range(n)])
    return result


_EXPERT_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def ids_file(path, rows=4, length=48, seed=0):
    """A JSON Lines file of random token ids, column input_ids."""
    rng = np.random.default_rng(seed)
    lines = [json.dumps({"input_ids": rng.integers(0, 256, length).tolist()}) for _ in range(rows)]
    Path(path).write_text("\n".join(lines) + "\n")
    return Path(path)


def some_ids(batch=2, length=LENGTH, seed=0):
    """Token ids [batch, length]."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def stock(directory, dtype=torch.float32):
    """The checkpoint as stock transformers loads it; every parameter must be in the files."""
    config = transformers.AutoConfig.from_pretrained(directory)
    wrapped = config.model_type in ("gemma3", "mistral3")
    auto = transformers.AutoModelForImageTextToText if wrapped else transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    return model.eval()


class Shelf:
    """Kit models made once under a directory: `shelf("L1")`."""

    def __init__(self, root):
        self.root = Path(root)

    def __call__(self, name, dtype="bfloat16"):
        directory = self.root / f"{name}-{dtype}"
        return directory if directory.exists() else make(name, directory, dtype)


def validator(name):
    """Of a file that a report writes: `report`, `comparison`, `latency`, or one line of `samples`."""
    home = Path(suture.__file__).parent / "report"
    file = "schema.json" if name == "report" else f"{name}.schema.json"
    schemas = {path.name: json.loads(path.read_text()) for path in home.glob("*schema.json")}
    registry = referencing.Registry().with_resources(
        (key, referencing.Resource.from_contents(schema)) for key, schema in schemas.items()
    )
    return jsonschema.Draft202012Validator(schemas[file], registry=registry)


def run(recipe, **options):
    """`suture.run`, with the output reloaded in this process instead of a new one."""
    with patch("suture.pipeline.run.FreshLoader", LocalLoader):
        return suture.run(recipe, **options)


def quantize(model, output, method="rtn", *, data=None, calibration=None, **settings):
    """One step of quantization; `data` is a file of token ids, of which `calibration` says how much is taken."""
    recipe = {"model": str(model), "output": str(output), "steps": [{method: settings}]}
    if data is not None:
        recipe["calibration"] = {"data": str(data), "samples": 8, "length": LENGTH} | (calibration or {})
    return run(recipe)
