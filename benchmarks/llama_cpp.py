"""A GGUF file in llama.cpp: the same tokens, the same logits and the same perplexity as the checkpoint beside it?

    python benchmarks/llama_cpp.py --output DIR --text wikitext2-test.txt --peer-venv /tmp/llamacpp

DIR was written by a recipe that ends in the step `gguf`. llama.cpp comes prebuilt with xllamacpp, in an environment of its own
that the first run makes. Both compute on the CPU; llama.cpp rounds activations to 8 bits in its 4- and 8-bit products, so
Q4_0 and Q8_0 files differ by that, while F32 and F16 files show whether names, rows, norms and rotary settings are right.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import venv
from pathlib import Path

import numpy as np
import torch

from suture.calibrate.skeleton import open_skeleton
from suture.calibrate.tokens import load_tokenizer
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline.walk import probe_logits
from suture.quant.decode import dense_view


def main() -> None:
    options = _options()
    directory = Path(options.output)
    text = Path(options.text).read_text()[: options.characters]
    tokenizer = load_tokenizer(directory)
    skeleton = open_skeleton(dense_view(open_checkpoint(directory)))
    vocabulary = skeleton.source.shapes[skeleton.layout.embedding][0]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    windows = [ids[i * options.window : (i + 1) * options.window] for i in range(options.windows)]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        (work / "ids.json").write_text(json.dumps(windows))
        (work / "text").write_text(text)
        script = Path(__file__).with_name("peer_llama_cpp.py")
        command = [_python(Path(options.peer_venv)), script, directory / "model.gguf", work / "ids.json", work / "text"]
        subprocess.run([*map(str, command), str(work / "out.npz"), str(vocabulary)], check=True)
        theirs = np.load(work / "out.npz")
        found, tokens = torch.from_numpy(theirs["logprobs"]), theirs["tokens"].tolist()
    ours = torch.cat([probe_logits(skeleton, torch.tensor([w]), skeleton.n_blocks) for w in windows]).log_softmax(-1)
    likely = ours > -12  # llama.cpp leaves out tokens of probability 0
    targets = torch.tensor(windows)
    result = {
        "tokens": len(windows) * options.window,
        "same_tokens": tokens == ids,
        "perplexity_suture": _perplexity(ours, targets),
        "perplexity_llama_cpp": _perplexity(found, targets),
        "max_logprob_difference": float((ours - found)[likely].abs().max()),
        "mean_logprob_difference": float((ours - found)[likely].abs().mean()),
        "kl": float((ours.exp() * (ours - found))[likely].sum() / likely.any(-1).sum()),
        "top_1_agreement": float((ours.argmax(-1) == found.argmax(-1)).float().mean()),
    }
    print(json.dumps(result, indent=1))


def _perplexity(logprobs: torch.Tensor, targets: torch.Tensor) -> float:
    return float((-logprobs[:, :-1].gather(2, targets[:, 1:, None]).double().mean()).exp())


def _python(directory: Path) -> Path:
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "xllamacpp", "numpy"], check=True)
    return python


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="directory with model.gguf beside the checkpoint")
    parser.add_argument("--text", required=True, help="plain text")
    parser.add_argument("--peer-venv", required=True, help="environment of xllamacpp; made when absent")
    parser.add_argument("--window", type=int, default=96)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--characters", type=int, default=20_000, help="of the text")
    return parser.parse_args()


if __name__ == "__main__":
    main()
