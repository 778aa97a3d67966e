"""What the kernel says of a process in /proc/PID/stat and status: proc(5)."""

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """A process's state (one letter), its parent, its CPU seconds with those of ended children, and when it started, in
    clock ticks after boot, which with its PID tells it from any other process."""

    state: str
    parent: int
    cpu_s: float
    started: int


def read_stat(pid: int) -> ProcessStat:
    """A process of this host. Raises OSError where there is none."""
    # The name before the last ")" may contain anything.
    fields = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return ProcessStat(
        state=fields[0],
        parent=int(fields[1]),
        cpu_s=sum(map(int, fields[11:15])) * TICK_S,
        started=int(fields[19]),
    )


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False where there is no such process."""
    return _has(pid, number, "SigCgt")


def outlives(pid: int, number: int) -> bool:
    """Whether a process handles, blocks or ignores a signal that would end it otherwise."""
    return _has(pid, number, "SigCgt", "SigBlk", "SigIgn")


def _has(pid: int, number: int, *masks: str) -> bool:
    try:
        text = (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return any(int(fields.get(mask, "0"), 16) >> (number - 1) & 1 for mask in masks)
