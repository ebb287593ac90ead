"""A process of suture's own in a container: as many threads as it may use processors."""

import os
import subprocess
import sys

import pytest

from suture.pipeline.process import processor_quota


def groups(root, lines, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for name, content in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n", "cpu.max": "max 100000\n"}, 2.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("3:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "150000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 1.5),
        ("3:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, None),
        ("3:memory:/x\n", {"memory/x/cpu.max": "100000 100000"}, None),
        ("0::/a\n", {"a/cpu.max": "nonsense"}, None),
        ("0::/a\n", {}, None),
        ("nonsense\n\n", {}, None),
    ],
)
def test_the_quota_is_the_least_of_all_groups_around(tmp_path, lines, files, expected):
    groups(tmp_path, lines, files)
    assert processor_quota(tmp_path) == expected


def test_a_system_without_control_groups_has_no_quota(tmp_path):
    assert processor_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "processors", "given", "expected"),
    [(1.9, 8, None, "1"), (0.3, 8, None, "1"), (1.9, 8, "7", "7"), (None, 8, None, ""), (7.9, 2, None, "")],
)
def test_threads_follow_the_quota_unless_the_user_chose(quota, processors, given, expected):
    code = (
        "import os, suture.pipeline.process as process\n"
        f"process.processor_quota, process._processors = lambda: {quota}, lambda: {processors}\n"
        "process.own_process(); print(os.environ.get('OMP_NUM_THREADS', ''))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | (
        {"OMP_NUM_THREADS": given} if given else {}
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
