"""auto-round's signed gradient descent on the rounding, for `quality.py`; the dense weights it stands for are saved.

Usage: peer_autoround.py MODEL IDS.json OUT_DIR BITS GROUP_SIZE DTYPE, or with a seventh argument: its number of
iterations per block (default: 200, its own). DTYPE is ignored: it trains in what it chooses itself.
"""

import json
import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(model_dir: str, ids_file: str, out: str, bits: str, group_size: str, dtype: str, iters: str = "200") -> None:
    rows = json.loads(Path(ids_file).read_text())
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    rounder = AutoRound(
        model,
        tokenizer,
        bits=int(bits),
        group_size=int(group_size),
        sym=int(bits) > 2,  # as suture's rows
        dataset=[torch.tensor([row]) for row in rows],
        nsamples=len(rows),
        seqlen=len(rows[0]),
        iters=int(iters),
        device_map="cpu",
    )
    rounded, _ = rounder.quantize()
    kind = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    kind.load_state_dict({name: tensor for name, tensor in rounded.state_dict().items() if name in kind.state_dict()})
    kind.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
