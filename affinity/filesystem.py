"""Where to write: the cache folder, and file systems that refuse, checked beforehand or explained afterwards."""

import errno
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from affinity.errors import InputError, RunError

FULL = (errno.ENOSPC, errno.EDQUOT)
REMEDIES = {
    **dict.fromkeys(FULL, "free some space, or name another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions, or name another folder"),
    **dict.fromkeys((errno.EEXIST, errno.EISDIR, errno.ENOTDIR), "move away what is there, or name another folder"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "the file system itself failed: check its servers and disks"),
}


def refusal(error: OSError) -> str | None:
    """What was refused, why, and what to do; None where the error does not come from a file system.

    A full file system names no file when a write fails; any other error without a file has another origin.
    """
    if error.errno not in REMEDIES or (error.filename is None and error.errno not in FULL):
        return None
    file = f"{error.filename}: " if error.filename else ""
    return f"{file}{error.strerror}: {REMEDIES[error.errno]}"


def check_writable(folder: Path, option: str) -> None:
    """Raise InputError where a folder cannot be made or written to; leaves nothing there.

    New folders are made inside existing ones, never directly under /. `option` is the setting that names the folder.
    """
    # Path.exists raises where a folder may not be searched.
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))  # noqa: PTH110
    if not existing.is_dir():
        raise InputError(f"{option} {folder}: {existing} is a file: name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(
            f"{option} {folder}: {existing} is not writable: change its permissions, or name another folder"
        )
    if existing == folder.absolute():
        return
    if existing == Path("/"):
        top = Path(*folder.absolute().parts[:2])
        raise InputError(f"{option} {folder}: {top} does not exist: create it first, or name another folder")
    try:  # /proc, or a server that does not trust root, refuses only now
        Path(tempfile.mkdtemp(prefix=".cputrain-", dir=existing)).rmdir()
    except OSError as error:
        why = f"cannot make a folder in {existing}: {error.strerror}"
        raise InputError(f"{option} {folder}: {why}: name another folder") from None


def cache_folder(env: Mapping[str, str]) -> Path:
    """CPUTRAIN_CACHE, or the user's cache folder. Raises RunError where the user has no home."""
    if "CPUTRAIN_CACHE" in env:
        return Path(env["CPUTRAIN_CACHE"])
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "cputrain"
    try:
        return Path("~/.cache/cputrain").expanduser()
    except RuntimeError:
        raise RunError(f"user {os.getuid()} has no home folder for the cache: set CPUTRAIN_CACHE to a folder") from None
