"""What healing wins back of the log-perplexity that a conversion lost: one `suture run` a row, scored with paired intervals.

    python benchmarks/heal.py                                   builtin:tiny, 8 -> 2 KV heads by mean and pca, MLA at half cache
    python benchmarks/heal.py --only 'mean' --only 'mean, blocks'
    python benchmarks/heal.py --model SMOLLM2_DIR --calibration wikitext2-valid.txt --test wikitext2-test.txt \\
        --row 'pca 1=[{"gqa": {"kv_heads": 1}}]' --row 'pca 1, refit=[{"gqa": {"kv_heads": 1}}, {"refit": {}}]'

A row's name up to the first comma is the conversion it is set beside, which must come before it. `--beside 2` quantizes to
2 bits (GPTQ, groups of 64) and heals from beside the result, by EoRA and by a trained adapter of the same rank.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

import suture
from suture.calibrate.skeleton import Skeleton
from suture.checkpoint.reader import open_checkpoint
from suture.lora.adapter import open_adapter
from suture.pipeline import adapters
from suture.pipeline.heal_train import hook_factors
from suture.pipeline.recipe import SetSettings
from suture.pipeline.texts import evaluation_text, text_model
from suture.quant.decode import open_decoded
from suture.report.clusters import paired
from suture.report.score import score

STARTS = {
    "mean": [{"gqa": {"kv_heads": 2, "method": "mean"}}],
    "pca": [{"gqa": {"kv_heads": 2, "method": "pca"}}],
    "mla": [{"mla": {"rank": 224, "rope_dim": 32}}],  # 256 of 512 numbers per token and layer
}
HEALING = {
    "refit": [{"refit": {}}],
    "blocks": [{"heal": {}}],
    "lora": [{"heal": {"method": "lora"}}],
    "full": [{"heal": {"method": "full"}}],
    "blocks and full": [{"heal": {}}, {"heal": {"method": "full"}}],
}


def main() -> None:
    options = _options()
    work = Path(options.work or tempfile.mkdtemp(prefix="suture-heal-"))
    if options.beside:
        beside(options, work)
    else:
        conversions(options, work)


def conversions(options: argparse.Namespace, work: Path) -> None:
    rows = {} if options.row else _rows()
    rows |= {name: json.loads(steps) for name, steps in (row.split("=", 1) for row in options.row or ())}
    lost: dict[str, float] = {}
    print(f"{'':24}{'perplexity':>11}{'ratio to the original':>28}{'won back':>10}{'seconds':>9}  kept")
    for name in options.only or rows:
        started = time.perf_counter()
        run = suture.run(
            {
                "model": options.model,
                "calibration": {
                    "data": options.calibration,
                    "samples": options.samples,
                    "length": options.length,
                },
                "steps": rows[name],
                "output": str(work / name.replace(" ", "-").replace(",", "")),
            },
            overwrite=True,
        )
        seconds = time.perf_counter() - started
        split = {"split": options.split} if options.split else {}
        found = suture.compare(
            options.model,
            run.output,
            options.test,
            window=options.length,
            max_tokens_per_document=options.length,
            fidelity=False,
            **split,
        ).perplexity
        start = name.split(",")[0]
        if name == start:
            lost[start] = found.log.mean
        won = f"{1 - found.log.mean / lost[start]:9.1%}" if start in lost and name != start else ""
        interval = f"{found.ratio:.4f} [{found.low or math.nan:.4f}, {found.high or math.nan:.4f}]"
        kept = ", ".join(r["kept"] for r in run.manifest["receipts"] if "kept" in r)
        print(f"{name:24}{found.new.ppl:11.2f}{interval:>28}{won:>10}{seconds:9.0f}  {kept}", flush=True)


def beside(options: argparse.Namespace, work: Path) -> None:
    """A quantized model, and adapters beside it; each scored as the pair."""
    text = {"data": options.calibration, "samples": options.samples, "length": options.length}
    quantized = work / f"w{options.beside}"
    settings = {"bits": options.beside, "group_size": 64}
    suture.quantize(options.model, quantized, "gptq", calibration=text, overwrite=True, **settings)
    original = open_checkpoint(options.model)
    base = open_decoded(original)
    rows, length = base.source.shapes[base.layout.embedding][0], base.hf_config.max_position_embeddings
    held = {"window": options.length, "max_tokens_per_document": options.length}
    told = SetSettings(data=options.test, split=options.split, **held)
    windows = evaluation_text(told, text_model(original, rows, length)).windows

    def nll(skeleton: Skeleton) -> list:
        return windows.by_document(score(skeleton, windows, lambda items, total, label: iter(items), "score"))

    def pair(adapter: Path) -> Skeleton:
        skeleton, opened = open_decoded(open_checkpoint(quantized)), open_adapter(adapter)
        for part in opened.parts:
            factors = {part.path: (opened.read(part.keys["A"]), opened.read(part.keys["B"]))}
            hook_factors(skeleton, factors, opened.config.scale(part.path))
        return skeleton

    r, common = options.rank, {"r": options.rank, "calibration": text, "overwrite": True}
    wanted, lost = nll(base), 0.0
    for name in (f"w{options.beside}", "EoRA", "trained"):
        started = time.perf_counter()
        output = work / f"w{options.beside}-{name}"
        if name == "EoRA":
            adapters.attach(quantized, output, init="eora", original=options.model, alpha=float(r), **common)
        elif name == "trained":
            adapters.heal(quantized, output, teacher=options.model, tokens=options.tokens, **common)
        seconds = time.perf_counter() - started
        is_adapter = name in ("EoRA", "trained")
        found = paired(wanted, nll(pair(output) if is_adapter else open_decoded(open_checkpoint(quantized))))
        lost = lost or found.log.mean
        interval = f"{found.ratio:.4f} [{found.low or math.nan:.4f}, {found.high or math.nan:.4f}]"
        won = f"{1 - found.log.mean / lost:9.1%}" if is_adapter else ""
        print(f"{name:24}{found.new.ppl:11.2f}{interval:>28}{won:>10}{seconds:9.0f}", flush=True)


def _rows() -> dict[str, list[dict]]:
    rows = {}
    for start, steps in STARTS.items():
        rows[start] = steps
        rows |= {f"{start}, {name}": [*steps, *more] for name, more in HEALING.items()}
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--calibration", default="builtin:novels")
    parser.add_argument("--test", default="builtin:holmes")
    parser.add_argument("--split", help="regular expression that begins a document of the test text")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--work", help="directory for outputs; default: a temporary one")
    parser.add_argument("--beside", type=int, metavar="BITS", help="adapters beside a quantized model instead")
    parser.add_argument("--rank", type=int, default=32, help="of those")
    parser.add_argument("--tokens", type=int, default=500_000, help="that the trained one sees")
    parser.add_argument("--only", action="append", help="a row's name; may be given again")
    parser.add_argument("--row", action="append", metavar="NAME=STEPS", help="a row of your own, steps as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
