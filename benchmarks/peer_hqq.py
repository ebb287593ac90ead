"""HQQ's calibration-free rounding, for `quality.py`; the dense weights it stands for are saved.

Usage: peer_hqq.py MODEL IDS.json OUT_DIR BITS GROUP_SIZE DTYPE; the calibration tokens and the dtype are ignored.
"""

import sys

import torch
from hqq.core.quantize import Quantizer
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(model_dir: str, ids_file: str, out: str, bits: str, group_size: str, dtype: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            options = {"nbits": int(bits), "group_size": int(group_size), "axis": 1, "optimize": True}
            codes, meta = Quantizer.quantize(module.weight.data.float(), **options, device="cpu")
            module.weight.data.copy_(Quantizer.dequantize(codes, meta))
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
