"""Shared memory that ranks which were killed have left behind: removed before new ranks need the room."""

import fcntl
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

SHM = Path("/dev/shm")
BY_PROCESS = re.compile(r"(\d+):\d+:\d+")  # libfabric's shm provider: PID:UID:INDEX
# Intel MPI, and native/ledger.cpp, remove the name once all ranks have mapped it.
BY_NOBODY = re.compile(r"Intel_MPI_\w{6}|cputrain_[0-9a-f]{32}")
SETTLED_S = 120.0  # after which an unmapped segment is nobody's: its ranks have mapped it long ago, or are gone


def sweep_segments(folder: Path = SHM) -> int:
    """Remove this user's segments whose owner is dead; the bytes of memory that this gave back."""
    found = [path for path in folder.glob("*") if BY_PROCESS.fullmatch(path.name) or BY_NOBODY.fullmatch(path.name)]
    freed = 0
    for path in found:
        with suppress(OSError):  # another rank of this host sweeps too
            status = path.stat()
            if status.st_uid == os.getuid() and not _in_use(path, status.st_mtime):
                path.unlink()
                freed += status.st_blocks * 512
    return freed


def _in_use(path: Path, changed: float) -> bool:
    owner = BY_PROCESS.fullmatch(path.name)
    settled = not Path("/proc", owner[1]).is_dir() if owner else time.time() - changed >= SETTLED_S
    return not settled or _is_open(path)


def _is_open(path: Path) -> bool:
    """Whether a process has a file open or mapped, maybe in a container that shares the folder: its number means
    nothing here. The kernel gives a lease on a file that nobody else has opened (fcntl(2))."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored: who opens it meanwhile takes the lease away
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
