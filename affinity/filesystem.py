"""Files and /proc: errors of file systems in one line, atomic writes, the cache folder, shipped data files, installed
package versions, and a process's /proc/PID/stat and status (proc(5))."""

import errno
import mmap
import os
import pwd
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cputrain.affinity.errors import InputError, RunError

FULL = (errno.ENOSPC, errno.EDQUOT)
REMEDIES = {
    **dict.fromkeys(FULL, "free some space, or name another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions, or name another folder"),
    **dict.fromkeys((errno.EEXIST, errno.EISDIR, errno.ENOTDIR), "move the existing file, or name another folder"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "the file system itself failed; check its servers and disks"),
}
OCTAL = re.compile(r"\\([0-7]{3})")
TRIED_BYTES = 1 << 16
TARBALLS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
NO_TEMPORARY = "No usable temporary directory"  # tempfile's message, which does not give the reason for each directory

PLAN_FILE = "plan.json"  # in the folder of a job or run
PROC = Path("/proc")
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def filesystem_refusal(error: OSError) -> str | None:
    """Return a one-line message for a file system's error, with what to do; None for any other OSError.

    A failed write to a full file system names no file; any other error without a file name has another origin.
    """
    if error.errno == errno.ENOENT and error.filename is None and str(error.strerror).startswith(NO_TEMPORARY):
        return f"{error.strerror}: free some space there, or set TMPDIR to a writable folder"
    if error.errno not in REMEDIES or (error.filename is None and error.errno not in FULL):
        return None
    file = f"{error.filename}: " if error.filename else ""
    return f"{file}{error.strerror}: {REMEDIES[error.errno]}"


def check_writable(folder: Path, option: str) -> None:
    """Raise InputError if a folder cannot be created or written to; nothing is left there.

    New folders may be created in existing ones, but not directly under /. `option` is the setting that names it.
    """
    # os.path.exists, as Path.exists raises if a parent folder may not be searched.
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))  # noqa: PTH110
    if not existing.is_dir():
        raise InputError(f"{option} {folder}: {existing} is a file; name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(
            f"{option} {folder}: {existing} is not writable; change its permissions, or name another folder"
        )
    if existing == Path("/") and folder.absolute() != existing:
        top = Path(*folder.absolute().parts[:2])
        raise InputError(f"{option} {folder}: {top} does not exist; create it first, or name another folder")
    try:  # /proc, and file servers that squash root, refuse only at a write
        with tempfile.TemporaryDirectory(prefix=".cputrain-", dir=existing) as scratch:
            (Path(scratch) / "trial").write_bytes(bytes(4096))
    except OSError as error:
        why = f"cannot create a folder in {existing} ({error.strerror})"
        raise InputError(f"{option} {folder}: {why}; name another folder") from None


def check_execution(file: Path) -> None:
    """Raise PermissionError, naming the mount, if the code in a file may not be executed or loaded (noexec)."""
    with file.open("rb") as opened:
        try:
            mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
        except PermissionError:
            why = f"the mount {mount_of(file)} does not allow execution (noexec)"
            raise PermissionError(errno.EPERM, why) from None


def write_failure(error: OSError, path: Path) -> str:
    """Return why a path cannot be written to, with the mount if the file system is full or read-only."""
    return f"{error.strerror} (mount {mount_of(path)})" if error.errno in (*FULL, errno.EROFS) else str(error.strerror)


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Add this file's name to an OSError inside the block: failed writes to an open file name none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_with(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically (temporary file, fsync, rename), so that readers see the old or the complete new file,
    also after a crash. Raises OSError with the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with errors_name(path):
        try:
            with partial.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except BaseException:
            with suppress(OSError):  # on a read-only file system even removing a missing file fails
                partial.unlink(missing_ok=True)
            raise


def write_bytes(path: Path, data: bytes) -> None:
    """Write bytes with `write_with`."""
    write_with(path, lambda file: file.write(data))


def mount_of(path: Path) -> Path:
    """Return the mount point of a path's file system (proc_pid_mountinfo(5))."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    points = (Path(OCTAL.sub(lambda match: chr(int(match[1], 8)), line.split(" ")[4])) for line in lines)
    above = [point for point in points if path.resolve().is_relative_to(point)]
    return max(above, key=lambda point: len(point.parts), default=Path("/"))  # the mount of a chroot is not listed


def try_cache(folder: Path, size: int = TRIED_BYTES) -> None:
    """Try what a cache folder needs: create it, write a file of `size` bytes, execute code, remove the file.

    Raises OSError with the reason. Leaves only the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".cputrain-try-{os.uname().nodename}-{os.getpid()}"
    try:
        with file.open("xb") as opened:
            opened.write(bytes(size))
        check_execution(file)
    finally:
        file.unlink(missing_ok=True)


def cache_folder(env: Mapping[str, str]) -> Path:
    """Return CPUTRAIN_CACHE, or the user's cache folder by the XDG Base Directory Specification.

    Empty variables count as unset, and so does a relative XDG_CACHE_HOME. ~/ is expanded here, too, as no shell expands
    it in a container's ENV. Raises RunError if the user has no home directory.
    """
    configured = env.get("CPUTRAIN_CACHE", "")
    if configured and not configured.startswith("~/"):
        return Path(configured)
    if not configured and env.get("XDG_CACHE_HOME", "").startswith("/"):
        return Path(env["XDG_CACHE_HOME"]) / "cputrain"
    home = env.get("HOME") or _home_of_account()
    if home is None:
        raise RunError(f"user {os.getuid()} has no home directory for the cache: set CPUTRAIN_CACHE to a folder")
    return Path(home) / (configured.removeprefix("~/") or ".cache/cputrain")


def _home_of_account() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None


def is_tarball(name: str) -> bool:
    """Whether the name ends like a tarball's."""
    return name.endswith(TARBALLS)


def shipped_folder(name: str) -> Path:
    """Return a folder of shipped data files: inside the package if installed, under configs/ in a checkout."""
    package = Path(__file__).parents[1]  # cputrain/
    inside = package / name
    return inside if inside.is_dir() else package.parent / "configs" / name


def read_yaml(path: Path) -> Any:
    """Read a shipped YAML file, with libyaml if PyYAML has it, as it is ten times as fast."""
    import yaml

    return yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    from importlib import metadata  # slow to import, and most commands need no version

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """State (one letter), parent and CPU seconds of a process, ended children included, and its start time.

    `started` is in clock ticks since boot; PID and start time together identify a process.
    """

    state: str
    parent: int
    cpu_s: float
    started: int


def read_stat(pid: int) -> ProcessStat:
    """Read /proc/PID/stat. Raises OSError if the process does not exist."""
    # The command name before the last ")" may contain anything.
    fields = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return ProcessStat(
        state=fields[0],
        parent=int(fields[1]),
        cpu_s=sum(map(int, fields[11:15])) * TICK_S,
        started=int(fields[19]),
    )


def handles_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False if it does not exist."""
    return _has(pid, number, "SigCgt")


def survives_signal(pid: int, number: int) -> bool:
    """Whether a process handles, blocks or ignores a signal whose default action would end it."""
    return _has(pid, number, "SigCgt", "SigBlk", "SigIgn")


def delays_signal(thread: int, number: int) -> bool:
    """Whether a thread has not taken a signal yet, or blocks it, as while a handler of it runs."""
    return _has(thread, number, "SigPnd", "SigBlk")


def _has(pid: int, number: int, *masks: str) -> bool:
    try:
        text = (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return any(int(fields.get(mask, "0"), 16) >> (number - 1) & 1 for mask in masks)
