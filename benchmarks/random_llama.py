"""A Llama of any shape with random bfloat16 weights, and a LoRA adapter for it, written shard by shard.

Its numbers come from one pool that is read at changing places: what counts is how many bytes there are.
"""

import json

import torch
from safetensors.torch import save_file


def shape(hidden, inner, layers, vocabulary, heads, kv_heads=None):
    """A config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def add_shape_options(parser, **defaults):
    """--layers, --hidden, ... with these defaults; `asked_shape` reads them."""
    for name in ("layers", "hidden", "inner", "heads", "kv_heads", "vocabulary"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=defaults.get(name))


def asked_shape(arguments):
    """The config.json that the options ask for."""
    asked = vars(arguments)
    return shape(*(asked[name] for name in ("hidden", "inner", "layers", "vocabulary", "heads", "kv_heads")))


def linears(config):
    """Path in a block -> (out, in)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    attention = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {f"self_attn.{k}": v for k, v in attention.items()} | {f"mlp.{k}": v for k, v in mlp.items()}


def write_model(directory, config, shard_bytes=5_000_000_000):
    """Returns the bytes of all weights."""
    from suture.checkpoint.writer import ShardWriter, TensorSpec, plan_shards

    hidden, rows = config["hidden_size"], config["vocab_size"]
    specs = [TensorSpec("model.embed_tokens.weight", "BF16", (rows, hidden))]
    for block in range(config["num_hidden_layers"]):
        for name, size in linears(config).items():
            specs.append(TensorSpec(f"model.layers.{block}.{name}.weight", "BF16", size))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            specs.append(TensorSpec(f"model.layers.{block}.{norm}.weight", "BF16", (hidden,)))
    specs += [
        TensorSpec("model.norm.weight", "BF16", (hidden,)),
        TensorSpec("lm_head.weight", "BF16", (rows, hidden)),
    ]
    largest = max(torch.Size(spec.shape).numel() for spec in specs)
    pool = (0.02 * torch.randn(largest + 999_983, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    with ShardWriter(directory, plan_shards(specs, shard_bytes)) as writer:
        for number, spec in enumerate(specs):
            size = torch.Size(spec.shape).numel()
            start = (number * 104_729) % (pool.numel() - size + 1)
            norm = spec.name.endswith("norm.weight")
            values = pool[start : start + size].reshape(spec.shape)
            writer.write(spec.name, values + 1 if norm else values)
        writer.sync()
    (directory / "config.json").write_text(json.dumps(config))
    return sum(spec.nbytes for spec in specs)


def write_adapter(directory, config, r=16):
    """Rank r on all linear layers."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for block in range(config["num_hidden_layers"]):
        for name, (out, inner) in linears(config).items():
            path = f"base_model.model.model.layers.{block}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(r, inner, generator=generator) / inner**0.5
            tensors[f"{path}.lora_B.weight"] = 0.01 * torch.randn(out, r, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted(name.rpartition(".")[2] for name in linears(config))
    described = {"peft_type": "LORA", "r": r, "lora_alpha": 2 * r, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(described))
