"""What each way of quantizing costs: suture's and its peers', same calibration tokens, same evaluation tokens, one table.

    python benchmarks/quality.py WORK --model SMOLLM2_DIR --calibration wikitext2-valid.txt --test wikitext2-test.txt
    python benchmarks/quality.py WORK                                        # builtin:tiny on its own texts
    ... --bits 4 3 2 8 --only gptq learn --peers llm-compressor=/tmp/llmc hqq=/tmp/hqq bitsandbytes

Every output is made by a process of its own (whole time and peak memory beside the figure), kept in WORK and not made
again when it is there. Scores are token by token on identical tokens; each row has the excess log-perplexity over the
model as it was, and the paired ratio to the best peer of its bits, with 95 % intervals over documents (over windows
where the text is one document). A peer's environment is made in the directory given for it when that is empty.
Texts: WikiText-2 as plain files, for example from pytorch/examples, word_language_model/data/wikitext-2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from measured import measured

from suture.calibrate.skeleton import Skeleton, open_skeleton
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline.recipe import CalibrationSettings, ReportSettings
from suture.pipeline.texts import calibration_text, evaluation_text, text_model
from suture.quant.decode import dense_view
from suture.report.clusters import paired
from suture.report.score import score

HERE = Path(__file__).parent


def w(bits: int, **more: Any) -> dict[str, Any]:
    return {"bits": bits, "group_size": 64, "symmetric": bits > 2, **more}


def ours(bits: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of suture: name -> steps. At 2 bits all have zero points; 8 bits are inputs and weights."""
    if bits == 8:
        plain = {"alpha": "none"}
        return {
            "w8a8 dynamic": [{"smoothquant": {"activations": "dynamic", "rounding": "gptq"}}],
            "w8a8 static": [{"smoothquant": {"activations": "static", "rounding": "gptq"}}],
            "w8a8 dynamic, unsmoothed": [{"smoothquant": {"activations": "dynamic", **plain}}],
            "w8a8 static, unsmoothed": [{"smoothquant": {"activations": "static", **plain}}],
        }
    return {
        "rtn": [{"rtn": w(bits)}],
        "awq": [{"awq": w(bits)}],
        "gptq": [{"gptq": w(bits, asymmetric="none")}],
        "gptaq": [{"gptq": w(bits, asymmetric="gptaq")}],
        "qronos": [{"gptq": w(bits, asymmetric="qronos")}],
        "awq + gptq": [{"awq": w(bits, rounding="gptq")}],
        "rotate + gptaq": [{"rotate": {}}, {"gptq": w(bits, asymmetric="gptaq")}],
        "learn": [{"learn": w(bits)}],
        "rotate + learn": [{"rotate": {}}, {"learn": w(bits)}],
    }


PEERS: dict[str, tuple[str, list[str]]] = {  # name -> (script, what its environment needs beside torch)
    "llm-compressor": ("peer_llmcompressor.py", ["llmcompressor==0.14.*"]),
    "auto-round": ("peer_autoround.py", ["auto-round==0.16.*"]),
    "hqq": ("peer_hqq.py", ["hqq", "transformers>=5.15", "accelerate"]),
    "bitsandbytes": ("peer_bitsandbytes.py", []),  # in this environment
}


def main() -> None:
    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    base = open_checkpoint(options.model)
    skeleton = open_skeleton(base)
    text = text_model(base, base.shapes[skeleton.layout.embedding][0], skeleton.hf_config.max_position_embeddings)
    calibration = {"data": options.calibration, "samples": options.samples, "length": options.length}
    calibration["order"] = "sequential"
    blocks = calibration_text(CalibrationSettings.model_validate(calibration), text).blocks
    ids = options.work / "ids.json"
    ids.write_text(json.dumps(blocks.ids.tolist()))
    report: dict[str, Any] = {"data": options.test, "window": options.window, "max_windows": options.windows}
    if options.test.startswith("builtin:"):
        report["max_tokens_per_document"] = options.window
    else:
        report["protocol"] = "gptq-2048"
    windows = evaluation_text(ReportSettings.model_validate(report), text).windows
    print(f"{options.test}: {windows.n_scored} scored tokens, window {options.window}", file=sys.stderr)

    def nll_of(name: str, directory: Path | None) -> Any:
        kept = options.work / f"{name}.npy"
        if not kept.exists():
            found = skeleton if directory is None else _opened(directory)
            np.save(kept, score(found, windows, lambda items, total, label: items, name))
        return windows.by_document(np.load(kept))

    reference = nll_of("base", None)
    rows: list[dict[str, Any]] = []
    for bits in options.bits:
        nll = {}
        for name, made in _outputs(options, bits, calibration, ids).items():
            nll[name] = nll_of(made["directory"].name, made["directory"])
            against = paired(reference, nll[name])
            rows.append(
                {
                    "bits": bits,
                    "method": name,
                    "perplexity": round(against.new.ppl, 3),
                    "base": round(against.base.ppl, 3),
                    "excess": _interval(against.log.mean, against.log.low, against.log.high),
                    "ratio": _interval(against.ratio, against.low, against.high),
                    "seconds": made["seconds"],
                    "peak_mb": made["peak_mb"],
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        _against_best_peer([row for row in rows if row["bits"] == bits], nll)
    (options.work / "table.json").write_text(json.dumps({"protocol": report, "calibration": calibration, "rows": rows}))
    print(_table(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--calibration", default="builtin:novels")
    parser.add_argument("--test", default="builtin:holmes")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2, 8], choices=[2, 3, 4, 8])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--window", type=int, help="default: 2048, or what the model has")
    parser.add_argument("--windows", type=int, default=8, help="the first so many")
    parser.add_argument("--only", nargs="+", help="these rows of suture")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME[=ENVIRONMENT]")
    options = parser.parse_args()
    if options.window is None:
        options.window = 512 if options.model == "builtin:tiny" else 2048
    if options.model == "builtin:tiny":
        options.windows = None
    return options


def _opened(directory: Path) -> Skeleton:
    return open_skeleton(dense_view(open_checkpoint(directory)))


def _outputs(
    options: argparse.Namespace, bits: int, calibration: dict[str, Any], ids: Path
) -> dict[str, dict[str, Any]]:
    """Every row's output, made when it is not there: its directory, seconds and peak memory."""
    made = {}
    for name, steps in ours(bits).items():
        if options.only is None or name in options.only:
            directory = options.work / f"w{bits}-{name.replace(' ', '').replace('+', '-').replace(',', '-')}"
            recipe = options.work / f"{directory.name}.yaml"
            content = {"model": str(options.model), "calibration": dict(calibration), "steps": steps}
            recipe.write_text(json.dumps(_absolute(content | {"output": str(directory.resolve())})))
            command = [sys.executable, "-m", "suture", "run", str(recipe.resolve()), "--overwrite"]
            made[name] = _made(directory, command, ok=(0, 3))
    model = str(open_checkpoint(options.model).path)
    for peer in options.peers if bits != 8 else ():
        name, _, environment = peer.partition("=")
        script, packages = PEERS[name]
        if name == "bitsandbytes" and bits != 4:
            continue
        directory = options.work / f"w{bits}-peer-{name}"
        python = _python(Path(environment), packages) if environment else sys.executable
        arguments = [model, str(ids.resolve()), str(directory.resolve()), str(bits), "64", "float32"]
        made[f"peer: {name}"] = _made(directory, [python, str(HERE / script), *arguments])
    return made


def _absolute(content: dict[str, Any]) -> dict[str, Any]:
    for holder, key in ((content, "model"), (content["calibration"], "data")):
        if not holder[key].startswith(("builtin:", "hf:")):
            holder[key] = str(Path(holder[key]).resolve())
    return content


def _python(environment: Path, packages: list[str]) -> str:
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        for wanted in (["torch==2.13.0"], packages):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], check=True)
    return str(python)


def _made(directory: Path, command: list[str], ok: tuple[int, ...] = (0,)) -> dict[str, Any]:
    record = directory.parent / f"{directory.name}.json"
    if not (record.exists() and directory.exists()):
        print(f"making {directory.name} ...", file=sys.stderr, flush=True)
        record.write_text(json.dumps(measured(command, cwd=tempfile.gettempdir(), ok=ok)))
    return {"directory": directory, **json.loads(record.read_text())}


def _against_best_peer(rows: list[dict[str, Any]], nll: dict[str, Any]) -> None:
    """Add each row's paired ratio to the peer of least perplexity."""
    peers = [row for row in rows if row["method"].startswith("peer")]
    if peers:
        best = min(peers, key=lambda row: row["perplexity"])["method"]
        for row in rows:
            found = paired(nll[best], nll[row["method"]])
            row["best_peer"], row["ratio_to_best_peer"] = best, _interval(found.ratio, found.low, found.high)


def _interval(value: float, low: float | None, high: float | None) -> list[float | None]:
    return [None if x is None else round(x, 4) for x in (value, low, high)]


def _table(rows: list[dict[str, Any]]) -> str:
    def shown(value: list[float | None] | None) -> str:
        if value is None:
            return ""
        return f"{value[0]:.4f}" + ("" if value[1] is None else f" [{value[1]:.4f}, {value[2]:.4f}]")

    lines = [
        "| bits | method | perplexity | excess log-perplexity | ratio to the best peer | s | MB |",
        "|---" * 7 + "|",
    ]
    lines += [
        f"| {row['bits']} | {row['method']} | {row['perplexity']:.2f} | {shown(row['excess'])} | "
        f"{shown(row.get('ratio_to_best_peer'))} | {row['seconds']:.0f} | {row['peak_mb']:,} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
