"""A model as MLA by several methods: perplexity, live cache, seconds and memory of each, through stock transformers.

Each row is one `suture run` in a process of its own (calibration: the first tokens of the text), loaded back with
AutoModelForCausalLM in float32 and scored on the first windows of the test text. The defaults are for SmolLM2-135M
(3 KV heads of 64: 384 cached numbers per token and layer) and WikiText-2's validation and test texts.

    python benchmarks/mla.py --model SMOLLM2_DIR --calibration wikitext2-valid.txt --test wikitext2-test.txt
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import torch
from measured import measured

ROWS = {
    "partial RoPE alone": {"rank": 320, "rope_dim": 64},
    "complex 64 + 128": {"rank": 128, "rope_dim": 64},
    "transmla 64 + 128": {"rank": 128, "rope_dim": 64, "method": "transmla"},
    "mha2mla 48 + 144": {"rank": 144, "rope_dim": 48, "method": "mha2mla"},
    "complex 32 + 160": {"rank": 160, "rope_dim": 32},
    "transmla 32 + 160": {"rank": 160, "rope_dim": 32, "method": "transmla"},
}


def main() -> None:
    options = _options()
    work = Path(options.work or tempfile.mkdtemp(prefix="suture-mla-"))
    work.mkdir(parents=True, exist_ok=True)
    rows = ROWS | {name: json.loads(settings) for name, settings in (row.split("=", 1) for row in options.row or ())}
    chosen = options.only or ["base", *rows]
    for name in chosen:
        if name == "base":
            print(json.dumps({"row": "base", **_scored(Path(options.model), options, torch.float32)}), flush=True)
            continue
        output = work / name.replace(" ", "")
        record = _converted(output, rows[name], options)
        record |= _scored(output, options, torch.float32)
        if options.bfloat16:
            record["perplexity_bfloat16"] = _scored(output, options, torch.bfloat16)["perplexity"]
        print(json.dumps({"row": name, **record}), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True, help="plain text")
    parser.add_argument("--test", required=True, help="plain text")
    parser.add_argument("--work", help="directory for outputs; default: a temporary one")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--only", action="append", help="a row's name, or base; may be given again")
    parser.add_argument("--row", action="append", metavar="NAME=JSON", help="a further row: settings of the step mla")
    parser.add_argument("--bfloat16", action="store_true", help="score in bfloat16 as well")
    return parser.parse_args()


def _converted(output: Path, settings: dict, options: argparse.Namespace) -> dict:
    recipe = {
        "model": str(Path(options.model).absolute()),
        "calibration": {
            "data": str(Path(options.calibration).absolute()),
            "samples": options.samples,
            "length": options.length,
            "order": "sequential",
        },
        "steps": [{"mla": settings}],
        "output": str(output.absolute()),
    }
    path = output.with_suffix(".json")
    path.write_text(json.dumps(recipe))
    return {"settings": settings, **measured([sys.executable, "-m", "suture", "run", str(path), "--overwrite"])}


@torch.no_grad()
def _scored(directory: Path, options: argparse.Namespace, dtype: torch.dtype) -> dict:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    model.eval()
    text = Path(options.test).read_text()
    ids = AutoTokenizer.from_pretrained(directory)(text[: 12 * options.windows * options.window], return_tensors="pt")
    windows = ids.input_ids[0][: options.windows * options.window].view(options.windows, options.window)
    loss = sum(float(model(row[None], labels=row[None]).loss) for row in windows) / options.windows
    layer = model(windows[:1, :8], use_cache=True).past_key_values.layers[0]
    numbers = (layer.keys.numel() + layer.values.numel()) // 8
    return {
        "perplexity": round(math.exp(loss), 3),
        "cached_numbers_per_token_and_layer": numbers,
        "missing": len(info["missing_keys"]),
        "unexpected": len(info["unexpected_keys"]),
        "loaded_as": type(model).__name__,
    }


if __name__ == "__main__":
    main()
