"""QLoRA's memory beside that of training every weight in float32, and what comes of the adapter.

    python benchmarks/qlora.py SMOLLM2_DIR WORK --calibration wikitext2-valid.txt --test wikitext2-test.txt

The base is written in NF4; `suture lora heal` trains an adapter beside it, in a process of its own. Beside it stock
transformers trains all weights of the original with AdamW on the same number of tokens per step, sequence by sequence, for a
few steps: more do not take more memory. Then PEFT loads the pair, and `lora.merge` merges the adapter into what NF4 makes of
the original.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from measured import measured

import suture
from suture.calibrate.tokens import load_tokenizer
from suture.checkpoint.manifest import read_manifest


def main() -> None:
    options = _options()
    work, model = options.work.absolute(), str(Path(options.model).absolute())
    if options.plain:
        train_all(model, options)
        return
    work.mkdir(parents=True, exist_ok=True)
    base, adapter, merged = work / "nf4", work / "adapter", work / "merged"
    suture.quantize(model, base, "nf4", overwrite=True)
    settings = {
        "tokens": options.steps * options.batch * options.length,
        "batch": options.batch,
        "next_token": options.next_token,
    }
    text = ["--data", options.calibration, "--samples", str(options.samples), "--length", str(options.length)]
    told = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    heal = ["-m", "suture", "lora", "heal", str(base), str(adapter), "--teacher", model, *text, *told, "--overwrite"]
    idle = measured([sys.executable, "-c", "import torch, transformers.models.llama.modeling_llama"])
    qlora = measured([sys.executable, *heal])
    plain = measured([sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--plain"])
    receipt = read_manifest(adapter)["receipts"][0]
    curve = [{key: round(value, 4) for key, value in point.items()} for point in receipt["curve"]]
    print(json.dumps({"steps": receipt["steps"], "tokens": receipt["tokens"], "curve": curve}))
    print(json.dumps({"held out": receipt["held_out"]}))
    memory = {
        "qlora": qlora,
        "all weights in float32": plain,
        "imports alone": idle,
        "times less": round(plain["peak_mb"] / qlora["peak_mb"], 2),
        "times less, of what is beyond the imports": round(
            (plain["peak_mb"] - idle["peak_mb"]) / (qlora["peak_mb"] - idle["peak_mb"]), 2
        ),
    }
    print(json.dumps(memory))
    suture.apply(model, merged, {"lora.merge": {"adapter": str(adapter), "base": "dequantized"}}, overwrite=True)
    found = {"nf4": base, "PEFT, the pair": (base, adapter), "merged": merged}
    print(json.dumps({name: round(_perplexity(what, options), 3) for name, what in found.items()}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("work", type=Path)
    parser.add_argument("--calibration", required=True, help="plain text to train on")
    parser.add_argument("--test", required=True, help="plain text")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--next-token", type=float, default=0.0)
    parser.add_argument("--windows", type=int, default=8, help="of LENGTH tokens of the test text, that are scored")
    parser.add_argument("--plain", action="store_true", help="train all weights, a few steps; called by the rest")
    return parser.parse_args()


def train_all(model: str, options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM

    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    adam = torch.optim.AdamW(student.parameters(), lr=1e-5)
    rows = _rows(model, options.calibration, 3 * options.batch, options.length)
    for batch in rows.split(options.batch):
        adam.zero_grad(set_to_none=True)
        for row in batch:
            (student(row[None], labels=row[None], use_cache=False).loss / len(batch)).backward()
        adam.step()


@torch.no_grad()
def _perplexity(what: Path | tuple[Path, Path], options: argparse.Namespace) -> float:
    """Through stock transformers, and PEFT when an adapter lies beside the base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, adapter = what if isinstance(what, tuple) else (what, None)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    rows = _rows(str(base), options.test, options.windows, options.length)
    return math.exp(sum(float(model(row[None], labels=row[None]).loss) for row in rows) / len(rows))


def _rows(model: str, text: str, rows: int, length: int) -> torch.Tensor:
    ids = load_tokenizer(model)(Path(text).read_text()[: 12 * rows * length], verbose=False)["input_ids"]
    return torch.tensor(ids[: rows * length]).view(rows, length)


if __name__ == "__main__":
    main()
