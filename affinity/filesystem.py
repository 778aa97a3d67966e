"""The cache folder, our data files, what file systems refuse, the installed versions of packages, and what the kernel
says of a process in /proc/PID/stat and status: proc(5)."""

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
    **dict.fromkeys((errno.EEXIST, errno.EISDIR, errno.ENOTDIR), "move away what is there, or name another folder"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "the file system itself failed: check its servers and disks"),
}
OCTAL = re.compile(r"\\([0-7]{3})")
TRIED_BYTES = 1 << 16
NO_TEMPORARY = "No usable temporary directory"  # of tempfile, which does not tell what each of them refused


def refusal(error: OSError) -> str | None:
    """What was refused, why, and what to do; None where the error does not come from a file system.

    A full file system names no file when a write fails; any other error without a file has another origin.
    """
    if error.errno == errno.ENOENT and error.filename is None and str(error.strerror).startswith(NO_TEMPORARY):
        return f"{error.strerror}: free some space there, or set TMPDIR to a folder that may be written to"
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
    if existing == Path("/") and folder.absolute() != existing:
        top = Path(*folder.absolute().parts[:2])
        raise InputError(f"{option} {folder}: {top} does not exist: create it first, or name another folder")
    try:  # /proc, or a server that does not trust root, refuses only now
        with tempfile.TemporaryDirectory(prefix=".cputrain-", dir=existing) as made:
            (Path(made) / "trial").write_bytes(bytes(4096))
    except OSError as error:
        why = f"cannot make a folder in {existing}: {error.strerror}"
        raise InputError(f"{option} {folder}: {why}: name another folder") from None


def check_execution(file: Path) -> None:
    """Raise PermissionError, which names the mount, where the code in a file may not be executed or loaded."""
    with file.open("rb") as opened:
        try:
            mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
        except PermissionError:
            why = f"the mount {mount_of(file)} does not allow execution (noexec)"
            raise PermissionError(errno.EPERM, why) from None


def cause(error: OSError, path: Path) -> str:
    """Why a path cannot be written to, with the mount where that is what refuses it."""
    return f"{error.strerror} (mount {mount_of(path)})" if error.errno in (*FULL, errno.EROFS) else str(error.strerror)


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """An OSError inside names this file: that of a write to an open file, as to a full disk, names none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_with(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write to a temporary file, sync, rename: readers see the old or the complete new file, also after a crash. Raises
    OSError that names the file."""
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
            with suppress(OSError):  # on a read-only file system there is nothing to remove
                partial.unlink(missing_ok=True)
            raise


def mount_of(path: Path) -> Path:
    """The mount point of the file system that a path lies in (proc_pid_mountinfo(5))."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    points = (Path(OCTAL.sub(lambda match: chr(int(match[1], 8)), line.split(" ")[4])) for line in lines)
    above = [point for point in points if path.resolve().is_relative_to(point)]
    return max(above, key=lambda point: len(point.parts), default=Path("/"))  # a chroot's own is not listed


def try_cache(folder: Path, size: int = TRIED_BYTES) -> None:
    """Do in a folder what a cache needs: write a file of so many bytes, lock, execute code, remove.

    Raises OSError that says what fails. Leaves nothing there but the folder.
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
    """CPUTRAIN_CACHE, or the user's cache folder; empty variables count as unset, and a relative XDG_CACHE_HOME, too,
    as the XDG Base Directory Specification has it. Raises RunError where the user has no home.

    ~/ is the home folder also where no shell has read it, as in a container's ENV.
    """
    given = env.get("CPUTRAIN_CACHE", "")
    if given and not given.startswith("~/"):
        return Path(given)
    if not given and env.get("XDG_CACHE_HOME", "").startswith("/"):
        return Path(env["XDG_CACHE_HOME"]) / "cputrain"
    home = env.get("HOME") or _home_of_account()
    if home is None:
        raise RunError(f"user {os.getuid()} has no home folder for the cache: set CPUTRAIN_CACHE to a folder")
    return Path(home) / (given.removeprefix("~/") or ".cache/cputrain")


def _home_of_account() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None


def shipped(name: str) -> Path:
    """Folder of our data files: inside the package once installed, in configs/ in a checkout."""
    package = Path(__file__).parents[1]  # cputrain/
    inside = package / name
    return inside if inside.is_dir() else package.parent / "configs" / name


def read_yaml(path: Path) -> Any:
    """What one of our data files has, by libyaml where PyYAML has it, which takes a tenth of the time."""
    import yaml

    return yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def installed_version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    from importlib import metadata  # slow to import, and most commands need no version

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
