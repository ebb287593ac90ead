"""Run a command: its seconds, and the most memory that the largest of its processes had.

`measured` starts this file as a small process of its own, which starts the command: what a process begins with, before it
becomes another program, counts as its memory, and that is its parent's.
"""

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
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    code = process.returncode = os.waitstatus_to_exitcode(status)
    Path(result).write_text(json.dumps({"seconds": round(seconds, 1), "peak_mb": round(usage.ru_maxrss / 1024)}))
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
