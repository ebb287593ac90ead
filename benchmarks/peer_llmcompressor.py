"""GPTQ with llm-compressor, run in its own virtual environment by `gptq_vs_llmcompressor.py`.

Usage: peer_llmcompressor.py MODEL IDS.json OUT_DIR BITS GROUP_SIZE DTYPE
IDS.json: a list of calibration samples, each a list of token ids. Prints one line of JSON: seconds, peak memory in MB.
"""

import json
import resource
import sys
import time
from pathlib import Path


def main(model_dir: str, ids_file: str, out: str, bits: int, group_size: int, dtype: str) -> None:
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = json.loads(Path(ids_file).read_text())
    data = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids])
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=group_size),
    )
    recipe = GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto" if dtype == "auto" else getattr(torch, dtype))
    loaded = time.perf_counter()
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        max_seq_length=len(ids[0]),
        num_calibration_samples=len(ids),
        tokenizer=AutoTokenizer.from_pretrained(model_dir),
    )
    quantized = time.perf_counter()
    model.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(out)
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {
                "seconds": round(end - start, 1),
                "load": round(loaded - start, 1),
                "quantize": round(quantized - loaded, 1),
                "save": round(end - quantized, 1),
                "peak_mb": round(peak),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
