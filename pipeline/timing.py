"""Prefill and decode times of two models in one process, interleaved, as stock transformers runs them."""

from __future__ import annotations

import contextlib
import io
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..report.document import SCHEMA_VERSION
from ..report.latency import LatencyRatio, measure, summary
from .stock import cache_of, go_on, load_stock

PROMPT, NEW_TOKENS = 128, 16  # tokens


@torch.no_grad()
def time_models(
    base: Path, candidate: Path, device: torch.device, *, prompt: int = PROMPT, new: int = NEW_TOKENS, blocks: int = 20
) -> dict[str, Any]:
    """latency.json: prefill of one prompt, decoding token by token after it, and peak memory where the device has it."""
    with contextlib.redirect_stderr(io.StringIO()):  # libraries' progress bars and notices
        return _timed(base, candidate, device, prompt, new, blocks)


def _timed(base: Path, candidate: Path, device: torch.device, prompt: int, new: int, blocks: int) -> dict[str, Any]:
    models = {"base": load_stock(base, device), "candidate": load_stock(candidate, device)}
    vocabulary = int(models["base"].get_input_embeddings().num_embeddings)
    room = min(getattr(model.config, "max_position_embeddings", None) or prompt + new for model in models.values())
    new = min(new, max(1, room // 2))
    prompt = min(prompt, max(1, room - new))
    ids = torch.randint(0, vocabulary, (1, prompt), generator=torch.Generator().manual_seed(0)).to(device)
    rows = []
    for name, work, tokens in (("prefill", _prefill, prompt), ("decode", decoding, new)):
        timed = [timer(work, model, ids, new, device) for model in models.values()]
        rows.append(_row(name, measure(*timed, blocks=blocks), tokens))
    return {
        "schema_version": SCHEMA_VERSION,
        "what": f"one sequence of {prompt} tokens, then {new} decoded one by one, greedy, end of text ignored",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "dtype": {name: str(model.dtype).removeprefix("torch.") for name, model in models.items()},
        "note": "transformers' kernels: on a CPU, packed weights are made dense first, so this says nothing of fast ones",
        "measurements": rows,
        "peak_memory": _peak(models, ids, new, device)
        or _peak_of_processes({"base": base, "candidate": candidate}, prompt, new),
    }


def _prefill(model: Any, ids: torch.Tensor, new: int) -> Callable[[], None]:
    return lambda: model(ids, use_cache=True, logits_to_keep=1)


def decoding(model: Any, ids: torch.Tensor, new: int) -> Callable[[], None]:
    """`new` steps after a prefill that is not timed; the cache is cut back before each run."""
    first = model(ids, use_cache=True, logits_to_keep=1)
    cache, start = cache_of(first), first.logits[:, -1:].argmax(dim=2)

    def run() -> None:
        token = start
        for _ in range(new):
            token = go_on(model, token, cache).logits[:, -1:].argmax(dim=2)
        cache.crop(-new)

    return run


def timer(
    work: Callable[..., Callable[[], None]], model: Any, ids: torch.Tensor, new: int, device: torch.device
) -> Any:
    """`work` of one model, timed: a call gives its seconds."""
    run = work(model, ids, new)

    def timed() -> float:
        _wait(device)
        start = time.perf_counter_ns()
        run()
        _wait(device)
        return (time.perf_counter_ns() - start) / 1e9

    return timed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(name: str, found: LatencyRatio, tokens: int) -> dict[str, Any]:
    ratio, low, high = found.control
    base, candidate = summary(found.seconds_a), summary(found.seconds_b)
    return {
        "name": name,
        "tokens": tokens,
        "ratio": {"value": found.ratio, "ci": [found.low, found.high], "level": found.level},
        "control": {"value": ratio, "ci": [low, high]},
        "too_noisy": found.too_noisy,
        "blocks": found.blocks,
        "method": "median of log-ratios of A B B A blocks, percentile bootstrap over blocks",
        "base": base | {"tokens_per_second": tokens / base["median"]},
        "candidate": candidate | {"tokens_per_second": tokens / candidate["median"]},
        "warm_up": list(found.warm_up),
        "samples": {"base": found.seconds_a.tolist(), "candidate": found.seconds_b.tolist()},
    }


_ALONE = """
import sys, torch
from pathlib import Path
from suture.pipeline.stock import load_stock
from suture.pipeline.timing import decoding
model = load_stock(Path(sys.argv[1]), torch.device("cpu"))
with torch.no_grad():
    decoding(model, torch.zeros((1, int(sys.argv[2])), dtype=torch.int64), int(sys.argv[3]))()
if sys.platform == "win32":
    import psutil
    print(psutil.Process().memory_info().peak_wset)
else:
    import resource
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


def _peak_of_processes(models: Mapping[str, Path], prompt: int, new: int) -> dict[str, Any] | None:
    """Bytes resident at the peak of a process that loads one model and decodes; None where it cannot be run."""
    found: dict[str, Any] = {}
    for name, path in models.items():
        command = [sys.executable, "-c", _ALONE, str(path.absolute()), str(prompt), str(new)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode != 0:
            return None
        found[name] = int(done.stdout.split()[-1])
    return found | {
        "how": "resident in a fresh process that loads the model and decodes, Python and libraries included"
    }


def _peak(models: dict[str, Any], ids: torch.Tensor, new: int, device: torch.device) -> dict[str, Any] | None:
    """Bytes at the peak of prefill and decoding, each model's beyond what both hold; None where nothing counts them."""
    if device.type != "cuda":
        return None
    found: dict[str, Any] = {"how": "allocated on the device during prefill and decoding, weights included"}
    for name, model in models.items():
        others = torch.cuda.memory_allocated(device) - sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
        torch.cuda.reset_peak_memory_stats(device)
        decoding(model, ids, new)()
        found[name] = int(torch.cuda.max_memory_allocated(device) - others)
    return found
