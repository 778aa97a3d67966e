"""What a file system refuses, before and while it is written to, in one line."""

import errno
import os
import tempfile
from pathlib import Path

from affinity.errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT)
NEXT = {
    **dict.fromkeys(FULL, "make room, or name another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "mend its permissions, or name another folder"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "the file system itself fails, look at its servers and disks"),
}


def refusal(error: OSError) -> str | None:
    """What was refused, why and what to do; None where the error is not of the file system's making.

    A full one names no file where writing has failed; other errors without a file are of another making.
    """
    if error.errno not in NEXT or (error.filename is None and error.errno not in FULL):
        return None
    what = f"{error.filename}: " if error.filename else ""
    return f"{what}{error.strerror}: {NEXT[error.errno]}"


def check_writable(folder: Path, option: str) -> None:
    """Raise InputError where a folder cannot be made or written to; leaves nothing there.

    Folders are made inside those that are there, never directly under /. `option` is what has named this one.
    """
    # Path.exists raises where a folder is not to be searched.
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))  # noqa: PTH110
    if not there.is_dir():
        raise InputError(f"{option} {folder}: {there} is a file: name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{option} {folder}: {there} may not be written to: mend its permissions, or name another")
    if there == folder.absolute():
        return
    if there == Path("/"):
        top = Path(*folder.absolute().parts[:2])
        raise InputError(
            f"{option} {folder}: {top} is not there: make it first if that is meant, or name another folder"
        )
    try:  # /proc, or a server that trusts no root, refuses only then
        Path(tempfile.mkdtemp(prefix=".cputrain-", dir=there)).rmdir()
    except OSError as error:
        why = f"no folder can be made in {there}: {error.strerror}"
        raise InputError(f"{option} {folder}: {why}: name another folder") from None
