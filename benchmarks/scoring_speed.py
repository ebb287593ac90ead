"""Tokens per second of scoring against a bare transformers forward at the same batch, and what KL divergence adds.

usage: python benchmarks/scoring_speed.py MODEL [--candidate MODEL] [--windows 4] [--length 512] [--rounds 2] [--threads 1]

All in one process, taking turns: a forward of stock transformers in float32 with nothing done to its logits; `score`,
which also reduces the logits to losses; `score` of two models; `compare_tokens` of the same two, which adds divergences,
agreement and flips. Reading the weights is not counted for any of them. The candidate should be another model, such as a
quantized output of the first: of a model and itself every divergence is 0, which is a little less work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from suture.calibrate.skeleton import Skeleton
from suture.checkpoint.reader import open_checkpoint
from suture.quant.decode import open_decoded
from suture.report.score import compare_tokens, score
from suture.report.windows import rolling_windows

reading = 0.0  # seconds spent on weights


def without_reading(work: Callable[[], Any]) -> float:
    """Seconds of `work` without those of reading weights."""
    before, start = reading, time.perf_counter()
    work()
    return time.perf_counter() - start - (reading - before)


def timed(load: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        global reading
        start = time.perf_counter()
        try:
            return load(*given)
        finally:
            reading += time.perf_counter() - start

    return run


def untracked(items: Sequence[Any], total: int, label: str) -> Iterator[Any]:
    return iter(items)


def main() -> None:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--candidate")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    checkpoint = open_checkpoint(given.model)
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint.path), dtype=torch.float32).eval()
    device = torch.device("cpu")
    first, second = (open_decoded(c, device) for c in (checkpoint, open_checkpoint(given.candidate or given.model)))
    drawn = np.random.default_rng(0).integers(0, model.config.vocab_size, (given.windows, given.length))
    plan = rolling_windows(drawn.tolist(), window=given.length)
    ids = torch.from_numpy(drawn)
    batch = given.windows * given.length
    for name in ("load_block", "load_head"):
        setattr(Skeleton, name, timed(getattr(Skeleton, name)))

    @torch.no_grad()
    def bare() -> None:
        model(ids, use_cache=False)

    def scored() -> None:
        score(first, plan, untracked, "", batch_tokens=batch)

    def twice() -> None:
        scored()
        score(second, plan, untracked, "", batch_tokens=batch)

    def compared() -> None:
        compare_tokens(first, second, plan, untracked, "", batch_tokens=batch)

    kinds = {"bare forward": bare, "score": scored, "score twice": twice, "with KL": compared}
    bare()
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(given.rounds):
        for name in kinds if number % 2 == 0 else reversed(kinds):
            seconds[name].append(without_reading(kinds[name]))
    middle = {name: median(found) for name, found in seconds.items()}
    for name, found in seconds.items():
        print(f"{name:13} {batch / middle[name]:8.1f} tokens/s  {' '.join(f'{s:.2f}' for s in found)} s")
    print(f"score / bare forward: {middle['bare forward'] / middle['score']:.3f} of the tokens per second")
    print(f"KL adds {100 * (middle['with KL'] / middle['score twice'] - 1):.1f} % to the time of scoring both")


if __name__ == "__main__":
    main()
