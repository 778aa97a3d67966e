"""The guard of the ranks that a process has started: kills them and all that they have started once it is gone.

python -I -S guard.py MARK; on its standard input the number of each rank's session, "-N" once a session has ended,
and "done" where all ranks have been ended in order. Who writes this may be killed at any time: the input's end tells.

A process of the ranks is known by its session, or by the variable MARK_VARIABLE that it has inherited, which the
children of daemons still have. This file runs by itself: it imports nothing of its package.
"""

import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "CPUTRAIN_RANKS"  # the same for all ranks of one launch on one host, and new for each launch
DONE = b"done\n"
ROUNDS, ROUND_S = 100, 0.05  # until nothing is left: what is being killed may still start processes
SESSION, STATE = 3, 0  # fields after the name in /proc/PID/stat: proc(5)


def processes_of(sessions: Collection[int], mark: str | None) -> Iterator[int]:
    """The running processes of these sessions, and those with the mark, if any, in their environment; not this one."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # has ended meanwhile, or is another user's
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if fields[STATE] in "ZX" or int(folder.name) == os.getpid():
                continue
            if int(fields[SESSION]) in sessions or (mark and wanted in (folder / "environ").read_bytes().split(b"\0")):
                yield int(folder.name)


def kill_all(sessions: Collection[int], mark: str) -> None:
    """Kill all these processes, and wait until they are gone."""
    for _ in range(ROUNDS):
        found = list(processes_of(sessions, mark))
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(ROUND_S)


def main(mark: str) -> None:
    """Wait for the end of the input, then kill what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin.buffer:
        if line == DONE:
            return
        session = int(line)
        if session > 0:
            sessions.add(session)
        else:
            sessions.discard(-session)
    kill_all(sessions, mark)


if __name__ == "__main__":
    main(sys.argv[1])
