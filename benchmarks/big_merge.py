"""Memory and speed of lora.merge on a checkpoint of 7B shape: 13.5 GB in three shards, written here, deleted afterwards.

    python benchmarks/big_merge.py WORK [--blocks 32]

The merge is the step itself, plan and streaming, in a process of its own: every tensor read, checked for NaN, merged where
the adapter changes it (rank 16, all linear layers), written, synced. Copying is the same files read and written in
chunks, and synced. What a run adds to the step (hashes, the self-check on the probe, the reload in stock transformers)
is not in either. WORK needs 41 GB for 32 blocks.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from random_llama import shape, write_adapter, write_model


def peak_memory():
    """Kilobytes of memory that this process ever had; not its parent's, as getrusage would have it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def copy(source, target):
    """Seconds to copy the weight files and have them on disk."""
    target.mkdir()
    start = time.perf_counter()
    for file in sorted(source.glob("*.safetensors")):
        with file.open("rb") as reading, (target / file.name).open("wb") as writing:
            shutil.copyfileobj(reading, writing, 1 << 22)
            writing.flush()
            os.fsync(writing.fileno())
    return time.perf_counter() - start


def merge(model, adapter, output):
    """The step in this process: prints seconds and peak memory."""
    from suture.checkpoint.reader import open_checkpoint
    from suture.checkpoint.staging import open_staging
    from suture.checkpoint.writer import plan_shards
    from suture.lora.settings import MergeSettings
    from suture.pipeline.lora_merge import prepare, write_merged
    from suture.pipeline.progress import Silent

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    imported = peak_memory()
    start = time.perf_counter()
    checkpoint = open_checkpoint(model)
    plan = prepare(checkpoint, MergeSettings(adapter=str(adapter)))
    planned = time.perf_counter() - start
    with open_staging(output, {"benchmark": "1"}, False, False) as staging:
        records = write_merged(
            checkpoint, plan, plan_shards(plan.specs), staging.model, staging, "step-1", Silent(), "merge"
        )
        staging.commit()
    seconds = time.perf_counter() - start
    peak = peak_memory()
    print(
        json.dumps(
            {
                "seconds": round(seconds, 1),
                "of which plan": round(planned, 1),
                "peak MB": round(peak / 1024),
                "MB after imports": round(imported / 1024),
                "tensors merged": len(records),
            }
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--merge-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model, adapter = arguments.work / "model", arguments.work / "adapter"
    if arguments.merge_only:
        merge(model, adapter, arguments.work / "merged")
        return
    arguments.work.mkdir(parents=True)
    try:
        config = shape(4096, 11008, arguments.blocks, 32000, 32)
        write_model(model, config)
        write_adapter(adapter, config)
        nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        command = [sys.executable, __file__, str(arguments.work), "--merge-only"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        merged = json.loads(done.stdout)
        shutil.rmtree(arguments.work / "merged")
        copied = copy(model, arguments.work / "copied")
        print(
            json.dumps(
                {
                    "GB": round(nbytes / 1e9, 2),
                    "merge": merged,
                    "copy seconds": round(copied, 1),
                    "speed of copying": round(copied / merged["seconds"], 2),
                },
                indent=1,
            )
        )
    finally:
        shutil.rmtree(arguments.work)


if __name__ == "__main__":
    main()
