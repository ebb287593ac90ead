"""Peak memory, disk and time of runs beside what `suture plan` predicts, on a Llama of any shape with random weights.

    python benchmarks/bigger_than_memory.py WORK --layers 4 --hidden 1024 --inner 2816 --heads 16
    python benchmarks/bigger_than_memory.py WORK                     # 7B: 32 layers of 4096, 13.5 GB; needs 45 GB of disk
    python benchmarks/bigger_than_memory.py WORK --what gptq --tokens 8x256

Each run is `suture run`, whole: plan, hashes, preflight, step, verification (the reload by stock transformers is in a
process of its own), report. A second figure of the peak is the kernel's own when the processes have ended. What is written is
removed afterwards.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np
from measured import measured
from random_llama import add_shape_options, asked_shape, write_adapter, write_model

RECIPES = {
    "rtn": [{"rtn": {"bits": 4, "group_size": 128}}],
    "nf4": [{"nf4": {}}],
    "merge": [{"lora.merge": {"adapter": "adapter"}}],
    "cast": [{"cast": {"dtype": "float16"}}],
    "reshard": [{"reshard": {"max_shard_size": 1_000_000_000}}],
    "gptq": [{"gptq": {"bits": 4, "group_size": 128, "layers": 2}}],
    "gqa": [{"gqa": {"kv_heads": 0, "method": "mean"}}],  # half of them
    "perplexity": [{"rtn": {"bits": 4, "group_size": 128}}],
}
TEXTS = ("gptq", "gqa")


def ids_file(path, vocabulary, documents, length):
    drawn = np.random.default_rng(0).integers(0, vocabulary, (documents, length))
    path.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in drawn))


def recipe(work, what, config, tokens, window, max_shard_size):
    steps = json.loads(json.dumps(RECIPES[what]))
    if what == "gqa":
        steps[0]["gqa"]["kv_heads"] = config["num_key_value_heads"] // 2
    content = {"model": "model", "steps": steps, "output": f"out-{what}", "max_shard_size": max_shard_size}
    if what in TEXTS:
        samples, length = map(int, tokens.split("x"))
        content["calibration"] = {"data": "text.jsonl", "samples": samples, "length": length}
    if what == "perplexity":
        content["report"] = {"data": "text.jsonl", "window": window, "max_windows": 2}
    path = work / f"{what}.yaml"
    path.write_text(json.dumps(content))
    return path


def facts_of(work, what, path):
    """`suture run --json`: its facts, and what the kernel says of it."""
    command = [sys.executable, "-m", "suture", "run", str(path), "--json", "--overwrite"]
    with (work / "facts.json").open("w") as out, (work / "messages").open("w+") as err:
        usage = measured(command, stdout=out, stderr=err)
    facts = json.loads((work / "facts.json").read_text())
    shutil.rmtree(work / f"out-{what}")
    return facts, usage


def show(what, facts, usage):
    print(
        f"== {what}: {usage['seconds']:.1f} s, the largest process by the kernel {usage['peak_mb'] * 1.048576:,.0f} MB"
    )
    for part in facts["memory"]:
        lap = facts["seconds"].get(part)
        predicted = facts["predicted"]["memory"].get(part)
        guess = f", predicted {predicted / 1e6:,.0f} ({predicted / facts['memory'][part]:.2f})" if predicted else ""
        print(f"   {part:10} {facts['memory'][part] / 1e6:8,.0f} MB{guess}{f', {lap:.1f} s' if lap else ''}")
    print(f"   disk {facts['disk'] / 1e6:,.0f} MB, predicted {facts['predicted']['disk'] / 1e6:,.0f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    add_shape_options(parser, layers=32, hidden=4096, inner=11008, heads=32, vocabulary=32000)
    parser.add_argument("--tokens", default="8x256", help="calibration text")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--shard", type=int, default=5_000_000_000)
    parser.add_argument("--what", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    arguments = parser.parse_args()
    config = asked_shape(arguments)
    arguments.work.mkdir(parents=True)
    try:
        nbytes = write_model(arguments.work / "model", config)
        if "merge" in arguments.what:
            write_adapter(arguments.work / "adapter", config)
        documents, length = map(int, arguments.tokens.split("x"))
        length = max(length, arguments.window + 1)
        ids_file(arguments.work / "text.jsonl", arguments.vocabulary, 2 * documents, length)
        print(f"{nbytes / 1e9:.2f} GB of weights, {arguments.layers} blocks")
        for what in arguments.what:
            path = recipe(arguments.work, what, config, arguments.tokens, arguments.window, arguments.shard)
            show(what, *facts_of(arguments.work, what, path))
    finally:
        shutil.rmtree(arguments.work)


if __name__ == "__main__":
    main()
