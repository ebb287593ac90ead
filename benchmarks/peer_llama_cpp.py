"""Runs inside llama.cpp's environment (xllamacpp: llama.cpp with its server, prebuilt): log-probabilities of every token after
each beginning of given windows, and how llama.cpp cuts a text.

    python peer_llama_cpp.py MODEL.gguf IDS.json TEXT OUT.npz
"""

import json
import sys
import urllib.request
from pathlib import Path

import numpy as np
import xllamacpp as xlc


def main(model, ids_file, text_file, out):
    windows = json.loads(Path(ids_file).read_text())
    params = xlc.CommonParams()
    params.model.path = model
    params.n_ctx = max(map(len, windows)) + 8
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xlc.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xlc.ggml_type.GGML_TYPE_F32
    server = xlc.Server(params)
    text = Path(text_file).read_text()
    tokens = ask(server, "tokenize", {"content": text, "add_special": False, "parse_special": False})["tokens"]
    vocabulary = int(sys.argv[5])
    rows = np.full((len(windows), len(windows[0]), vocabulary), -np.inf, dtype=np.float32)
    for w, window in enumerate(windows):
        for t in range(len(window)):
            asked = {"prompt": window[: t + 1], "n_predict": 1, "n_probs": vocabulary, "cache_prompt": True}
            answer = ask(server, "completion", asked)
            for entry in answer["completion_probabilities"][0]["top_logprobs"]:
                rows[w, t, entry["id"]] = entry["logprob"]
    np.savez(out, logprobs=rows, tokens=np.array(tokens))


def ask(server, what, content):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.listening_address}/{what}", json.dumps(content).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    main(*sys.argv[1:5])
