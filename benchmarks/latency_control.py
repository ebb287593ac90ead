"""How often does timing find a difference between a model and itself? A against A, loaded twice, many times over.

    python benchmarks/latency_control.py [MODEL] [--trials 100] [--new 4]

Each trial is what `suture report --latency` does with two models: blocks of A B B A, the median of their log-ratios and its
95 % interval. Both are the same checkpoint, so at least 93 of 100 intervals should contain 1. Beside it stands what timing
first all of one and then all of the other, with the standard error of the mean, would have said of the same runs.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch

from suture.checkpoint.reader import open_checkpoint
from suture.pipeline.stock import load_stock
from suture.pipeline.timing import decoding, timer
from suture.report.latency import BLOCKS, interleave, median_ratio, warm_up


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="builtin:tiny")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--new", type=int, default=4, help="tokens decoded in one run")
    parser.add_argument("--prompt", type=int, default=32)
    options = parser.parse_args()
    path = Path(open_checkpoint(options.model).path)
    cpu = torch.device("cpu")
    models = [load_stock(path, cpu) for _ in range(2)]
    ids = torch.arange(options.prompt)[None]
    runs = [timer(decoding, model, ids, options.new, cpu) for model in models]
    for run in runs:
        warm_up(run)
    covered, in_turn, widths = 0, 0, []
    for trial in range(options.trials):
        a, b = interleave(*runs, BLOCKS)
        _, low, high = median_ratio(a, b, seed=trial)
        covered += low <= 1 <= high
        widths.append(high - low)
        one, other = (np.array([run() for _ in range(2 * BLOCKS)]) for run in runs)  # all of one, then all of the other
        se = np.hypot(one.std(ddof=1), other.std(ddof=1)) / np.sqrt(2 * BLOCKS)
        in_turn += bool(abs(other.mean() - one.mean()) <= 1.96 * se)
    result = {
        "trials": options.trials,
        "blocks": BLOCKS,
        "interval_covers_1": int(covered),
        "median_width": float(np.median(widths)),
        "one_after_the_other_covers_1": in_turn,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
