"""Run the command `suture` in processes that start in milliseconds, and kill them at a chosen moment.

A server process imports torch, transformers and suture once; each command then runs in a fork of it: a process of its
own, with its own exit code, output and memory. What this leaves out is the console script itself, which `installed`
runs.

`kill_at=n` sends SIGKILL at the n-th *event*: a write, a sync or a rename that suture is about to do. A write is first
done by half, as when the power goes.
"""

import atexit
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

COMMAND = Path(sys.executable).with_name("suture")
EVENTS = ("pwrite", "fsync", "rename", "replace")  # of module os


@dataclass
class Task:
    """One run of `suture ARGS`."""

    args: list[str]
    cwd: str
    kill_at: int = 0  # the event at which the process dies; 0: none
    kill_after: str = ""  # unit of the journal after which the process dies, at the second event of the next one
    stop_at: int = 0  # the event at which the process waits until it is told to go on; 0: none
    patches: dict[str, str] = field(default_factory=dict)  # "module:name" -> expression, which may use `original`
    variables: dict[str, str] = field(default_factory=dict)  # of its environment, besides ours
    quick_verify: bool = True  # reload the output in the same process instead of a new one


@dataclass
class Done:
    """How a process ended."""

    code: int  # as a shell shows it: 137 after SIGKILL
    out: str
    err: str
    events: int
    temporary: list[str]  # left in TMPDIR, which each task has for itself

    @property
    def messages(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("suture:")]


def unit_name(entry: dict) -> str:
    """A line of the journal in short: `begun`, `step-1 rest`, `step-1 block 0`, ..."""
    kind = next((kind for kind in ("block", "group") if kind in entry), None)
    what = f"{kind} {entry[kind]}" if kind is not None else entry.get("unit", "fingerprint")
    return f"{entry['step']} {what}" if "step" in entry else what


class Running:
    """A process that was started; `wait` for it."""

    def __init__(self, pid: int, place: Path) -> None:
        self.pid, self.place = pid, place

    def wait_until_stopped(self) -> None:
        end = time.monotonic() + 120
        while not (self.place / "stopped").exists():
            assert time.monotonic() < end, "not reached in time"
            assert not (self.place / "ended").exists(), (self.place / "err").read_text()
            time.sleep(0.002)

    def go(self) -> None:
        (self.place / "go").touch()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Done:
        code = os.waitstatus_to_exitcode(int(_server().ask({"wait": self.pid})))
        events = self.place / "events"
        return Done(
            128 - code if code < 0 else code,
            (self.place / "out").read_text(),
            (self.place / "err").read_text(),
            int(events.read_text()) if events.exists() else 0,
            sorted(path.name for path in (self.place / "tmp").iterdir()),
        )


def start(*args, cwd, **options) -> Running:
    """Start `suture ARGS` in the directory `cwd`; what it prints goes to files in a hidden place there."""
    place = Path(cwd) / f".task-{len(list(Path(cwd).glob('.task-*')))}"
    (place / "tmp").mkdir(parents=True)
    task = Task([str(a) for a in args], str(cwd), **options)
    return Running(int(_server().ask({"task": asdict(task), "place": str(place)})), place)


def suture(*args, cwd, **options) -> Done:
    return start(*args, cwd=cwd, **options).wait()


def installed(*args, cwd, **options) -> subprocess.CompletedProcess:
    """The console script, started anew."""
    command = [COMMAND, *map(str, args)]
    variables = {k: v for k, v in environment().items() if k != "TRANSFORMERS_VERBOSITY"}  # suture's own business
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=variables, **options)


def environment() -> dict[str, str]:
    """One thread: small products are faster, and bytes can be compared between processes of either kind."""
    return os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}


class _Server:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        atexit.register(self.close)

    def ask(self, request: dict) -> str:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


@cache
def _server() -> _Server:
    return _Server()


# -- in the server and its forks ---------------------------------------------------------------------------------------


def _serve() -> None:
    _import_all()
    gc.collect()
    gc.freeze()
    assert len(list(Path("/proc/self/task").iterdir())) == 1  # a fork has only one thread, and would wait for others
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(status, flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _child(Task(**request["task"]), Path(request["place"]))
        print(pid, flush=True)


def _import_all() -> None:
    """Whatever a run imports, by a run."""
    import tiny
    import tqdm

    import suture.cli.main
    import suture.cli.tables
    import suture.pipeline.check
    import suture.pipeline.inspect  # noqa: F401
    from suture.pipeline import run
    from suture.pipeline.api import quantize

    tqdm.tqdm.monitor_interval = 0  # it would be a thread
    real, run.FreshLoader = run.FreshLoader, LocalLoader
    with tempfile.TemporaryDirectory() as scratch:
        text = str(tiny.ids_file(Path(scratch) / "text.jsonl"))
        quantize(
            str(tiny.llama(Path(scratch) / "model", layers=1)),
            f"{scratch}/out",
            group_size=32,
            calibration={"data": text, "samples": 2, "length": 8},
            report={"data": text, "window": 8, "max_windows": 8},
        )
    run.FreshLoader = real


class LocalLoader:
    """In place of `verify.FreshLoader`: reloads in this process."""

    peak_memory = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def load(self, directory, work, probe):
        from suture.pipeline import verify

        return verify.reload_here(directory, probe)


def _child(task: Task, place: Path) -> None:
    """Carry out a task. Never returns."""
    code, count = 70, None
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(task.cwd)
        os.environ["TMPDIR"], tempfile.tempdir = str(place / "tmp"), None
        os.environ.update(task.variables)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _patch(task)
        count = _watch_events(task, place)
        sys.argv = ["suture", *task.args]
        from suture.cli.main import main

        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        if count is not None:
            (place / "events").write_text(str(count()))
        (place / "ended").touch()
        os._exit(code)


def _patch(task: Task) -> None:
    from importlib import import_module

    if task.quick_verify:
        import_module("suture.pipeline.run").FreshLoader = LocalLoader
    for where, expression in task.patches.items():
        module, _, path = where.partition(":")
        *owners, name = path.split(".")
        at = import_module(module)
        for owner in owners:
            at = getattr(at, owner)
        setattr(at, name, eval(expression, {"original": getattr(at, name), "os": os, "signal": signal}))


def _watch_events(task: Task, place: Path) -> Callable[[], int]:
    """Put the events under watch; a function that says how many there were."""
    count, kill_at = 0, task.kill_at
    staging = sys.modules["suture.checkpoint.staging"].Staging
    record = staging.record

    def recorded(self, entry):
        nonlocal kill_at
        record(self, entry)
        if unit_name(entry) == task.kill_after and "preflight" not in self.work.parts:
            kill_at = count + 2

    staging.record = recorded

    def watched(name: str, real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == kill_at:
                if name == "pwrite":
                    fd, view, offset = args
                    real(fd, view[: len(view) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            if count == task.stop_at:
                (place / "stopped").touch()
                while not (place / "go").exists():
                    time.sleep(0.002)
            return real(*args, **kwargs)

        return call

    for name in EVENTS:
        setattr(os, name, watched(name, getattr(os, name)))
    return lambda: count


if __name__ == "__main__":
    _serve()
