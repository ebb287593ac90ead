"""What is left of a trained adapter, by the order of merging and quantizing: a table with paired perplexities.

    python benchmarks/lora.py MODEL WORK [--steps 300] [--train TEXT.jsonl] [--test TEXT.jsonl]

Trains an adapter on MODEL with PEFT (kept in WORK/adapter, and not trained again when it is there), then scores on held-out
text, each on identical tokens and with intervals over documents:

    base                         the model as it is
    base + adapter               unmerged sum in float32: what training was for
    merged, then rounded         merged once into the model's dtype: what lora.merge writes
    NF4 base                     bitsandbytes' 4 bits, blocks of 64, of every linear layer
    NF4 base + adapter           QLoRA inference
    merged, then NF4             lora.merge followed by quantization: the recipe
    merged into NF4              dequantize, add, requantize: what merging into a 4-bit model does

and for each how much of the change survives: <W' - W0, dW> / <dW, dW> over all layers, where W0 is the same model without
the adapter. Needs peft and bitsandbytes.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.reader import Checkpoint, open_checkpoint
from suture.lora.adapter import open_adapter
from suture.lora.arrange import arrange
from suture.lora.match import Weighted
from suture.lora.merge import merged_parameter
from suture.pipeline.recipe import CalibrationSettings, ReportSettings
from suture.pipeline.texts import calibration_text, evaluation_text, text_model
from suture.report.clusters import paired
from suture.report.score import score
from suture.surgery.untie import head_to_add, untied_config


def train(model_dir, out, ids, steps, r, seed=0):
    """A LoRA on every linear layer, by PEFT; two rows of `ids` [n, 256] a step."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    peft = get_peft_model(model, LoraConfig(r=r, lora_alpha=2 * r, target_modules="all-linear", task_type="CAUSAL_LM"))
    parameters = [p for p in peft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=4e-4, weight_decay=0)
    peft.train()
    start, losses = time.time(), []
    for step in range(steps):
        batch = ids[[(2 * step) % len(ids), (2 * step + 1) % len(ids)]]
        loss = peft(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 4e-4 * min(1, (step + 1) / 10) * (1 - step / (steps + 1))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if step % 20 == 19:
            print(f"step {step + 1}: loss {np.mean(losses[-20:]):.3f}, {time.time() - start:.0f} s", flush=True)
    peft.save_pretrained(out)


def nf4(W):
    """W through bitsandbytes' NF4 with blocks of 64 and back, in W's dtype."""
    codes, state = bnb.quantize_4bit(W.contiguous(), blocksize=64, quant_type="nf4")
    return bnb.dequantize_4bit(codes, state).to(W.dtype).reshape(W.shape)


class Variant:
    """The model with its linear layers replaced by a function of (W, W + dW), seen as a checkpoint."""

    def __init__(self, base: Checkpoint, arrangement, linears, layer: Callable):
        self.base, self.arrangement, self.linears, self.layer = base, arrangement, linears, layer
        self.source, self.config, self.shapes, self.dtypes = base.source, base.config, base.shapes, base.dtypes
        self.read_rows, self.side = base.read_rows, base.side

    def read(self, name):
        W = self.base.read(name)
        if name not in self.linears:
            return W
        change = self.arrangement.changes.get(name)
        return self.layer(W, W.float() if change is None else merged_parameter(change, W))


VARIANTS = {  # name -> (layer, the same without the adapter)
    "base": (lambda W, M: W, None),
    "base + adapter": (lambda W, M: M, lambda W: W),
    "merged, then rounded": (lambda W, M: M.to(W.dtype), lambda W: W),
    "NF4 base": (lambda W, M: nf4(W), None),
    "NF4 base + adapter": (lambda W, M: nf4(W).float() + (M - W.float()), nf4),
    "merged, then NF4": (lambda W, M: nf4(M.to(W.dtype)), nf4),
    "merged into NF4": (lambda W, M: nf4((nf4(W).float() + (M - W.float())).to(W.dtype)), nf4),
}


def surviving(base, arrangement, linears, layer, without):
    """(<W' - W0, dW> / <dW, dW>, ||dW|| / ||W||) over all changed layers."""
    along = delta2 = weight2 = 0.0
    for name in linears:
        change = arrangement.changes.get(name)
        if change is None:
            continue
        W = base.read(name)
        M = merged_parameter(change, W)
        delta = M - W.float()
        along += float(((layer(W, M).float() - without(W).float()) * delta).sum())
        delta2 += float(delta.square().sum())
        weight2 += float(W.float().square().sum())
    return along / delta2, (delta2 / weight2) ** 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--train", default="builtin:novels")
    parser.add_argument("--test", default="builtin:holmes")
    parser.add_argument("--tokens", type=int, default=384, help="of each test document")
    parser.add_argument("--only-train", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base = open_checkpoint(arguments.model)
    skeleton = open_skeleton(base)
    text = text_model(base, base.shapes[skeleton.layout.embedding][0], 2048)
    adapter = arguments.work / "adapter"
    if not (adapter / "adapter_config.json").exists():
        blocks = calibration_text(
            CalibrationSettings(data=arguments.train, samples=2 * arguments.steps, length=256), text
        )
        train(str(base.path), adapter, torch.from_numpy(blocks.blocks.ids), arguments.steps, arguments.rank)
    if arguments.only_train:
        return
    wanted = ReportSettings(data=arguments.test, window=arguments.tokens, max_tokens_per_document=arguments.tokens)
    windows = evaluation_text(wanted, text).windows
    opened = [Weighted(open_adapter(adapter))]
    arrangement = arrange(base, opened, head_name=head_to_add, untied_config=untied_config)
    linears = {linear.place.tensor for linear in skeleton.layout.linears}
    nll, rows = {}, []
    for name, (layer, without) in VARIANTS.items():
        start = time.time()
        model = open_skeleton(Variant(base, arrangement, linears, layer))
        nll[name] = score(model, windows, lambda items, total, label: items, name)
        share, relative = (None, None) if without is None else surviving(base, arrangement, linears, layer, without)
        reference = "base" if not name.startswith(("NF4", "merged, then NF4", "merged into")) else "NF4 base"
        compared = paired(windows.by_document(nll[reference]), windows.by_document(nll[name]))
        row = {
            "variant": name,
            "perplexity": round(compared.new.ppl, 3),
            "against": reference,
            "ratio": [round(x, 4) if x is not None else None for x in (compared.ratio, compared.low, compared.high)],
            "share of the change that survives": None if share is None else round(share, 4),
            "relative size of the change": None if relative is None else round(relative, 5),
            "seconds": round(time.time() - start, 1),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    (arguments.work / "table.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
