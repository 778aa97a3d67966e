"""Kills for lack of memory: the kernel's counters under a root, and a real kill in a control group."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cputrain.mpi.supervise.processes import KillCounter, OutOfMemory, RankExit, describe_exit
from tests.support.control_group import inside, memory_group

GIB = 1 << 30
V2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
    "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/job/memory.events": "low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill {}\noom_group_kill 0\n",
}
V1 = {
    "proc/self/cgroup": "5:cpu:/\n4:memory:/job\n",
    "proc/mounts": "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
}
HOST = {"proc/meminfo": "MemTotal:       8388608 kB\n", "proc/vmstat": "pgfault 7\noom_kill {}\n"}


def write(root: Path, files: dict[str, str], kills: int) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.format(kills))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (V2, "out of memory: 3.0 GiB of the 4.0 GiB of its control group"),
        (V1, "out of memory: 3.0 GiB of the 4.0 GiB of its control group"),
        ({}, "out of memory: 3.0 GiB of the 8.0 GiB of its host"),
    ],
    ids=["v2", "v1", "none"],
)
def test_a_kill_is_told_from_the_kernel_s_counters(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    write(tmp_path, {**HOST, **files}, 2)
    counter = KillCounter(tmp_path)
    assert counter.shortage(3 * GIB) is None
    write(tmp_path, {**HOST, **files}, 3)
    assert str(counter.shortage(3 * GIB)) == expected
    counter.read()
    assert str(counter.shortage(3 * GIB)) == expected, "the exit is noticed later than the kill is counted"
    counter.read()
    assert counter.shortage(3 * GIB) is None, "long ago"


def test_kills_of_others_do_not_count_where_the_control_group_does(tmp_path: Path) -> None:
    write(tmp_path, {**HOST, **V2}, 0)
    counter = KillCounter(tmp_path)
    write(tmp_path, HOST, 1)
    assert counter.shortage(GIB) is None


def test_an_exit_says_what_was_short() -> None:
    shortage = OutOfMemory(used_bytes=3 * GIB, limit_bytes=4 * GIB, whole="control group")
    fields = {"rank": 1, "host": "h1", "time": 0.0, "log": "l", "tail": (), "shortage": shortage}
    told = "out of memory: 3.0 GiB of the 4.0 GiB of its control group; log l; it printed nothing"
    assert describe_exit(RankExit(status=-signal.SIGKILL, **fields)) == f"rank 1 on h1 was ended by SIGKILL, {told}"
    assert describe_exit(RankExit(status=1, **fields)) == (
        f"rank 1 on h1 exited with status 1 after the kernel had killed a process, {told}"
    )


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of 256 MiB."""
    with memory_group(GIB // 4) as made:
        yield made


@pytest.mark.parametrize("child", [False, True], ids=["rank", "child"])
def test_a_launch_says_that_memory_was_short(group: Path, tmp_path: Path, child: bool) -> None:
    """The rank itself is killed, or a process that it has started and waits for."""
    eats = "x = bytearray(1 << 29)"
    code = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {eats!r}]).returncode != 0)"
    argv = (sys.executable, "-m", "cputrain", "launch", "--ppn", "1", "--output", "out", "--", sys.executable, "-c")
    words = inside(group, *argv, code if child else eats)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    how = "exited with status 1 after the kernel had killed a process" if child else "was ended by SIGKILL"
    assert f"{how}, out of memory: 0." in done.stderr and "GiB of the 0.2 GiB of its control group" in done.stderr
