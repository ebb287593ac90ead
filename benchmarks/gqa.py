"""Fewer key-value heads by each method, without training: perplexity with paired intervals, seconds and memory.

    python benchmarks/gqa.py WORK                                                      builtin:tiny, 8 to 4, 2 and 1
    python benchmarks/gqa.py WORK --model SMOLLM2 --kv-heads 1 --calibration wikitext2-valid.txt --samples 12 \
        --test wikitext2-test.txt --protocol gptq-2048 --window 1024 --windows 4
    ... --split '^ = [^=].*[^=] = $'                          documents instead of windows, which intervals need

Each output is made by `suture.apply` and kept in WORK; rows are `method` or `method+refit`, for example `pca+stream`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import suture


def main() -> None:
    options = _options()
    report: dict[str, Any] = {"data": options.test, "fidelity": False, "window": options.window}
    for key in ("protocol", "split", "max_tokens_per_document"):
        if getattr(options, key) is not None:
            report[key] = getattr(options, key)
    if options.windows is not None:
        report["max_windows"] = options.windows
    calibration = {"data": options.calibration, "samples": options.samples, "length": options.length}
    if options.protocol is not None:
        calibration["order"] = "sequential"  # the first tokens, as the prototypes took them
    rows = []
    for kv_heads in options.kv_heads:
        for row in options.rows:
            method, _, refit = row.partition("+")
            step = {"gqa": {"kv_heads": kv_heads, "method": method, "refit": refit or "none"}}
            output = options.work / f"kv{kv_heads}-{row.replace('+', '-')}"
            start = time.perf_counter()
            done = suture.apply(options.model, output, step, calibration=calibration, report=report, overwrite=True)
            assert done.report is not None
            found = done.report.perplexity
            rows.append(
                {
                    "kv_heads": kv_heads,
                    "row": row,
                    "base": round(found.base.ppl, 2),
                    "perplexity": round(found.new.ppl, 2),
                    "ratio": [None if x is None else round(x, 4) for x in (found.ratio, found.low, found.high)],
                    "steps_seconds": round(done.seconds["steps"], 1),
                    "seconds": round(time.perf_counter() - start, 1),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"report": report, "calibration": calibration, "rows": rows}, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--rows", nargs="+", default=["mean", "procrustes", "pca"])
    parser.add_argument("--calibration", default="builtin:novels")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--test", default="builtin:holmes")
    parser.add_argument("--protocol", choices=["doc-rolling", "gptq-2048"])
    parser.add_argument("--split", help="regular expression of the lines that begin a document")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, help="the first so many")
    parser.add_argument("--max-tokens-per-document", type=int, default=512)
    options = parser.parse_args()
    if options.protocol == "gptq-2048":
        options.max_tokens_per_document = None
    return options


if __name__ == "__main__":
    main()
