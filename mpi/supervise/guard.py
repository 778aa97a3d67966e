"""Guard of the ranks that a process has started: when that process is gone, kill them and all their descendants.

python -I -S guard.py MARK reads from its standard input the number of each rank's session, "-N" once session N has
ended, and "done" once all ranks have ended normally. If the writer is killed, the input ends without "done".

A process belongs to the ranks by its session, or by the environment variable MARK_VARIABLE, which even the children of
daemons inherit. This file runs alone and imports nothing from its package.
"""

import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "CPUTRAIN_RANKS"  # one value for all ranks of a launch on a host, new for each launch
DONE = b"done\n"
ROUNDS, ROUND_S = 100, 0.05  # repeated until none is left: a process may start others before it is killed
SESSION, STATE = 3, 0  # fields after the name in /proc/PID/stat (proc(5))


def processes_of(sessions: Collection[int], mark: str | None) -> Iterator[int]:
    """Yield other running processes in these sessions, or with the mark, if given, in their environment."""
    marked = f"{MARK_VARIABLE}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or belongs to another user
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if fields[STATE] in "ZX" or int(folder.name) == os.getpid():
                continue
            if int(fields[SESSION]) in sessions or (mark and marked in (folder / "environ").read_bytes().split(b"\0")):
                yield int(folder.name)


def kill_all(sessions: Collection[int], mark: str) -> None:
    """Kill all these processes and wait until they are gone."""
    for _ in range(ROUNDS):
        pids = list(processes_of(sessions, mark))
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(ROUND_S)


def main(mark: str) -> None:
    """Wait for the end of the input, then kill what is left unless it ended with "done"."""
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
