"""Ends every process that this one has started, directly or not: launchers put theirs into groups of their own."""

import ctypes
import os
import signal
import time

from affinity.process_stat import PROC, read_stat

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05


def adopt_orphans() -> None:
    """From now on a process whose parent ends becomes a child of this process, if it descends from it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> tuple[int, ...]:
    """The processes below this one that still run, parents before children.

    All of the host are looked at: the kernel's own lists of children, which activity.py reads, may miss some of a
    process that is just starting more.
    """
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            stat = read_stat(int(folder.name))
        except OSError:
            continue  # gone meanwhile
        if stat.state != "Z":
            children.setdefault(stat.parent, []).append(int(folder.name))
    found: list[int] = []
    layer = [pid]
    while layer:
        layer = [child for parent in layer for child in children.get(parent, ())]
        found += layer
    return tuple(found)


def end_descendants(grace_s: float) -> None:
    """End all processes below this one by SIGTERM, after grace_s by SIGKILL, and reap them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):  # has ended meanwhile, or is another user's (sudo)
                continue
        deadline = time.monotonic() + grace_s
        while descendants(os.getpid()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if not descendants(os.getpid()):
            break
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return  # no child is left
