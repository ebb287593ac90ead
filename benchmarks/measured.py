"""Run a command: its seconds, and the most memory that the largest of its processes had.

`measured` starts this file as a small process of its own, which starts the command: what a process begins with, before it
becomes another program, counts as its memory, and that is its parent's. A process may set its own peak back (suture's do,
to tell the parts of a run apart), so it is looked at while the command runs as well.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def measured(command, cwd=None, stdout=None, stderr=subprocess.STDOUT, ok=(0,)):
    """{"seconds", "peak_mb"}. Ends this program with the command's last words when its exit code is not in `ok`; they are
    those in `stderr`, a file, if one is given."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile("w+") as log:
        result = Path(scratch) / "result.json"
        small = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(result), *command]
        done = subprocess.run(small, stdout=stdout or log, stderr=stderr if stdout else log, cwd=cwd, check=False)
        if done.returncode not in ok:
            words = log if stderr == subprocess.STDOUT else stderr
            words.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{words.read()[-3000:]}")
        return json.loads(result.read_text())


def main():
    result, *command = sys.argv[1:]
    start = time.perf_counter()
    process = subprocess.Popen(command)
    most, found = 0, 0
    while not found:
        most = max([most, *map(_peak, _family(process.pid))])
        time.sleep(0.02)
        found, status, usage = os.wait4(process.pid, os.WNOHANG)
    seconds = time.perf_counter() - start
    most = max(most, usage.ru_maxrss)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    Path(result).write_text(json.dumps({"seconds": round(seconds, 1), "peak_mb": round(most / 1024)}))
    sys.exit(code if code >= 0 else 128 - code)


def _family(pid):
    """A process and its descendants, as far as they can be seen (Linux)."""
    family = [pid]
    for one in family:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                family += map(int, task.read_text().split())
    return family


def _peak(pid):
    """Kilobytes that a process has had at most since it last set that back; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    main()
