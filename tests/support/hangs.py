"""Stacks of a process that does not end."""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Return the child processes of this process."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            children += map(int, path.read_text().split())
    return children


def stacks_of(pid: int) -> str:
    """Return the stack of every thread of a process from a debugger, or its command line if there is no debugger."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    gdb = shutil.which("gdb")
    if gdb is None:
        return f"{pid}: {command}"
    requested = (gdb, "-p", str(pid), "-batch", "-iex", "set auto-load safe-path /", "-ex", "thread apply all bt 14")
    expected = subprocess.run(requested, capture_output=True, text=True, timeout=120, check=False).stdout
    return f"{pid}: {command}\n" + "\n".join(
        line[:300] for line in expected.splitlines() if line.startswith(("#", "Thr"))
    )
