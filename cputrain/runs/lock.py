"""One training at a time in a run's folder: a lock that the kernel frees when the process that holds it ends."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from affinity.errors import InputError
from cputrain.runs.removal import mark

LOCK = ".cputrain-lock"


@contextmanager
def locked(folder: Path, *, restarted: bool = False, job: str = "") -> Iterator[None]:
    """Keep other trainings out of a run's folder, which is made where it is not there. `job` is the name of the job
    that this one belongs to.

    Raises InputError where another training is in it; not with `restarted` where that one is of the same job: who has
    started this one knows that the one before has ended, and a file server may keep the lock of a crashed host.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark(folder)
    with (folder / LOCK).open("ab") as file:
        _take(file, folder, restarted=restarted, job=job)
        with suppress(OSError):  # a full disk: the lock holds all the same
            (folder / LOCK).write_text(
                json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": job}), encoding="utf-8"
            )
        yield


def check_unlocked(folder: Path, *, restarted: bool = False, job: str = "") -> None:
    """Raise InputError where `locked` would; changes nothing."""
    if (folder / LOCK).is_file():
        with (folder / LOCK).open("ab") as file:
            _take(file, folder, restarted=restarted, job=job)


def _take(file: IO[bytes], folder: Path, *, restarted: bool, job: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not restarted or _holder(folder).get("job", job) != job:
            raise InputError(_in_use(folder)) from None
    except OSError:
        return  # a file system without locks


def _in_use(folder: Path) -> str:
    holder = _holder(folder)
    who = f"process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= holder.keys() else "another process"
    return (
        f"output {folder} is in use: {who} trains there: wait for its end, or set output to another folder; "
        f"if that host has crashed, remove {folder / LOCK}"
    )


def _holder(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / LOCK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
