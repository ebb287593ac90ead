"""GPTQ by suture and by llm-compressor: the same model, calibration tokens and machine, in one run.

Each tool runs as a process of its own, from start to written checkpoint, and is given the same token ids; suture's time
includes its preflight and its reload in stock transformers. Both outputs are then scored by suture against the base on
the same tokens.

    python benchmarks/gptq_vs_llmcompressor.py --model SMOLLM2_DIR --calibration wikitext2-valid.txt \
        --test wikitext2-test.txt --peer-venv /tmp/llmcompressor

The peer's environment is made on the first run (torch 2.13.0, llmcompressor 0.14). The texts are WikiText-2's validation
and test splits as plain text files (for example from pytorch/examples, word_language_model/data/wikitext-2).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measured import measured

import suture
from suture.calibrate.tokens import load_tokenizer


def main() -> None:
    options = _options()
    work = Path(options.work or tempfile.mkdtemp(prefix="suture-benchmark-"))
    work.mkdir(parents=True, exist_ok=True)
    peer = _peer_python(Path(options.peer_venv))
    _write_calibration(options, work)
    results = {}
    for round_ in range(options.rounds):
        for tool, command in (
            ("suture", _suture_command(options, work)),
            ("llm-compressor", _peer_command(options, work, peer)),
        ):
            print(f"round {round_ + 1}: {tool} ...", file=sys.stderr, flush=True)
            results.setdefault(tool, []).append(measured(command, cwd=tempfile.gettempdir()))
    figures = {tool: _median_run(runs) for tool, runs in results.items()}
    for tool in figures:
        report = suture.compare(
            options.model,
            work / tool,
            options.test,
            protocol="gptq-2048",
            window=options.window,
            max_windows=options.windows,
            fidelity=False,
        )
        compared = report.perplexity
        figures[tool] |= {
            "base": round(compared.base.ppl, 4),
            "perplexity": round(compared.new.ppl, 4),
            "excess": round(compared.log.mean, 5),
            "excess_ci": None
            if compared.log.low is None
            else [round(compared.log.low, 5), round(compared.log.high, 5)],
        }
    ours, theirs = figures["suture"], figures["llm-compressor"]
    figures["suture / llm-compressor"] = {
        key: round(ours[key] / theirs[key], 3) for key in ("seconds", "peak_mb", "excess")
    }
    print(json.dumps(figures, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--peer-venv", required=True, help="directory of the peer's virtual environment")
    parser.add_argument("--work", help="directory for outputs; default: a temporary one")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--peer-dtype", default="float32", help="float32 is its faster one on CPUs without bf16 products"
    )
    return parser.parse_args()


def _peer_python(venv: Path) -> Path:
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        for packages in (["torch==2.13.0"], ["llmcompressor==0.14.*"]):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
    return python


def _write_calibration(options: argparse.Namespace, work: Path) -> None:
    """The token ids, in either tool's form."""
    text = Path(options.calibration).read_text()
    ids = load_tokenizer(options.model)(text, verbose=False)["input_ids"]
    rows = [ids[i * options.length : (i + 1) * options.length] for i in range(options.samples)]
    (work / "ids.json").write_text(json.dumps(rows))
    (work / "ids.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))


def _suture_command(options: argparse.Namespace, work: Path) -> list[str]:
    recipe = work / "recipe.yaml"
    content = {
        "model": str(Path(options.model).resolve()),
        "calibration": {
            "data": str(work / "ids.jsonl"),
            "samples": options.samples,
            "length": options.length,
            "order": "sequential",
        },
        # the same work as the peer's: one model, one stream
        "steps": [{"gptq": {"bits": options.bits, "group_size": options.group_size, "asymmetric": "none"}}],
        "output": str(work / "suture"),
    }
    recipe.write_text(json.dumps(content))  # JSON is YAML
    return [sys.executable, "-m", "suture", "run", str(recipe), "--overwrite"]


def _peer_command(options: argparse.Namespace, work: Path, python: Path) -> list[str]:
    out = work / "llm-compressor"
    shutil.rmtree(out, ignore_errors=True)
    script = str(Path(__file__).with_name("peer_llmcompressor.py"))
    arguments = [options.model, str(work / "ids.json"), str(out), str(options.bits), str(options.group_size)]
    return [str(python), script, *arguments, options.peer_dtype]


def _median_run(runs: list[dict[str, float]]) -> dict[str, float]:
    return sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2] | {"runs": [run["seconds"] for run in runs]}


if __name__ == "__main__":
    main()
