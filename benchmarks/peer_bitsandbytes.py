"""NF4 with bitsandbytes through transformers, for `quality.py`.

Usage: peer_bitsandbytes.py MODEL IDS.json OUT_DIR BITS GROUP_SIZE DTYPE; what it has no use for is ignored.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig


def main(model_dir: str, ids_file: str, out: str, bits: str, group_size: str, dtype: str) -> None:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=config, dtype="auto")
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
