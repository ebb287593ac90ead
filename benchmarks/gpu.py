"""GPTQ W4g128 of an 8B-shaped Llama on a GPU: seconds and memory per block, beside a plain forward over the same tokens.

    python benchmarks/gpu.py                              # Llama-3-8B's shape, 128 x 2048 tokens, 2 of 32 blocks measured
    python benchmarks/gpu.py --blocks 32                  # all of them
    python benchmarks/gpu.py --device cpu --hidden 256 --inner 768 --heads 8 --kv-heads 2 --samples 8 --length 64

Weights are drawn on the device when a block is loaded: nothing is read from a disk, and no checkpoint is needed. A block is
measured as a run does it: hidden states of all tokens through the block once, its Hessians, GPTQ of its seven layers, and
the quantized block's outputs. The floor is the same block's forward over the same hidden states, float32 as in the run. What
a run adds (reading, packing, writing) is not in it: `bigger_than_memory.py` measures whole runs.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass, field

import torch
from random_llama import add_shape_options, asked_shape, linears

from suture.calibrate.replay import Stream, run_block
from suture.calibrate.skeleton import open_skeleton
from suture.quant.block import gptq_block
from suture.quant.settings import GPTQSettings


@dataclass
class Drawn:
    """A checkpoint whose tensors are drawn when they are read, the same ones each time."""

    config: dict
    device: str
    source: str = "random weights"
    shapes: dict = field(default_factory=dict)

    def __post_init__(self):
        hidden, rows = self.config["hidden_size"], self.config["vocab_size"]
        self.shapes = {"model.embed_tokens.weight": (rows, hidden)}
        for block in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{block}"
            self.shapes |= {f"{prefix}.{name}.weight": size for name, size in linears(self.config).items()}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.shapes[f"{prefix}.{norm}.weight"] = (hidden,)
        self.shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (rows, hidden)}

    @property
    def dtypes(self):
        return dict.fromkeys(self.shapes, "BF16")

    def read(self, name):
        size = self.shapes[name]
        generator = torch.Generator(self.device).manual_seed(list(self.shapes).index(name))
        drawn = torch.randn(size, generator=generator, device=self.device, dtype=torch.float32)
        return (1 + 0.1 * drawn if len(size) == 1 else drawn / math.sqrt(size[-1])).to(torch.bfloat16)

    def read_rows(self, name, rows):
        return self.read(name)[list(rows)]


def timed(device, work):
    """(seconds, bytes of the device's memory at most, what `work` gave); bytes are 0 on a CPU."""
    cuda = device != "cpu"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() if cuda else 0, found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    add_shape_options(parser, layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, vocabulary=128256)
    parser.add_argument("--blocks", type=int, default=2, help="of the layers, to be measured")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1, help="sequences per forward")
    parser.add_argument("--paused", action="store_true", help="forwards wait at each stage: one per block, more memory")
    arguments = parser.parse_args()
    device = arguments.device
    config = asked_shape(arguments)
    skeleton = open_skeleton(Drawn(config, device), device=device)
    ids = torch.randint(
        0, arguments.vocabulary, (arguments.samples, arguments.length), generator=torch.Generator().manual_seed(0)
    ).split(arguments.batch)
    stream, floor = Stream.start(skeleton, ids), Stream.empty(skeleton, ids)
    settings = GPTQSettings(bits=4, group_size=128 if arguments.hidden % 128 == 0 else 32, asymmetric="none")
    rows = []
    for index in range(min(arguments.blocks, arguments.layers)):
        skeleton.load_block(index)
        floor.buffer.copy_(stream.buffer)
        forward, _, _ = timed(device, lambda index=index: run_block(skeleton, index, floor))
        chosen = [linear for group in skeleton.layout.blocks[index] for linear in group]
        seconds, peak, layers = timed(
            device,
            lambda index=index, chosen=chosen: gptq_block(
                skeleton, index, stream, chosen, settings, torch.bfloat16, arguments.paused
            ),
        )
        skeleton.free_block(index)
        fallbacks = sum(layer.record.fallback is not None for layer in layers)
        rows.append({"gptq s": seconds, "forward s": forward, "peak GB": peak / 1e9, "fallbacks": fallbacks})
        print(json.dumps({"block": index, **{key: round(value, 3) for key, value in rows[-1].items()}}), flush=True)
    mean = {key: sum(row[key] for row in rows) / len(rows) for key in ("gptq s", "forward s")}
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
                "tokens": arguments.samples * arguments.length,
                "seconds per block": round(mean["gptq s"], 3),
                "times a forward": round(mean["gptq s"] / mean["forward s"], 2),
                f"seconds of {arguments.layers} blocks at that rate": round(arguments.layers * mean["gptq s"], 1),
                "peak GB": round(max(row["peak GB"] for row in rows), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
