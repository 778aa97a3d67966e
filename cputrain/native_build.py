"""Compile C++ on first use: one process compiles into a cache while the others wait."""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import FULL, cache_folder, check_execution, write_failure
from cputrain.affinity.rank import local_rank_of
from cputrain.affinity.wording import plural

logger = logging.getLogger(__name__)

COMPILING = ("/native_build.py:", "/cpp_extension.py:", "/torch/_inductor/")
"""Marks in a line of a Python stack of a process that is compiling cputrain's or torch's code."""
TOUCH_S, STALE_S, POLL_S = 2.0, 30.0, 0.2  # the lock's owner touches it; other processes remove a stale lock
QUIET_S, PROGRESS_S = 2.0, 10.0  # seconds before the first progress message, and between two


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeExtension:
    """C++ code to compile. `argv` makes the command from compiler and output file; the commands of `parts` run in
    parallel before it, each writing to `object_file(output, NUMBER)`.

    For messages: `title` names the code, `requested_by` is the setting that needs it, `alternative` how to do without.
    """

    title: str
    requested_by: str
    alternative: str
    argv: Callable[[str, Path], tuple[str, ...]]
    parts: Callable[[str, Path], tuple[tuple[str, ...], ...]] = lambda _cxx, _output: ()


def library_path(name: str, parts: Iterable[str], env: Mapping[str, str], *, file: str | None = None) -> Path:
    """Return the path of a compiled library (`file` or `name`, with .so); its folder has a hash of `parts`, which are
    texts of everything that the library depends on."""
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder(env) / f"{name}-{platform.machine()}-{key}" / f"{file or name}.so"


def object_file(output: Path, number: int) -> Path:
    """Return the output file of the part with this number."""
    return output.with_name(f"{output.name}.{number}.o")


def compiler(env: Mapping[str, str]) -> str | None:
    """Return the path of a C++ compiler: $CXX, or the first one found on PATH; None if there is none."""
    named = [name for name in (env.get("CXX"), "c++", "g++", "clang++") if name]
    return next((path for name in named if (path := shutil.which(name, path=env.get("PATH")))), None)


def ensure_compiled(extension: NativeExtension, path: Path, env: Mapping[str, str]) -> Path:
    """Compile the extension to `path` if the file is missing or damaged, or wait for the process that does so.

    Raises InputError if there is no compiler, RunError if compilation fails or the cache cannot be used.
    """
    try:
        while not is_intact(path):
            _compile_or_wait(extension, path, env)
        _check_execution(extension, path)
    except OSError as error:
        room = " with free space" if error.errno in FULL else ""
        raise RunError(
            f"{extension.requested_by}: cannot compile {extension.title} into {path.parent}: "
            f"{write_failure(error, path.parent)}; set CPUTRAIN_CACHE to a writable folder{room}, or "
            f"{extension.alternative}"
        ) from None
    return path


def is_intact(path: Path) -> bool:
    """Whether a compiled file exists and is complete: loading a truncated one kills the process."""
    try:
        return checksum_file(path).read_bytes() == _checksum(path).encode()  # may be damaged itself
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_usable(path: Path) -> bool:
    """Whether a compiled file exists, is complete, and may be loaded."""
    try:
        if not is_intact(path):
            return False
        check_execution(path)
    except OSError:
        return False
    return True


def checksum_file(path: Path) -> Path:
    """Return the path of a compiled file's checksum."""
    return path.with_suffix(".sha256")


@contextmanager
def loading(path: Path, requested_by: str, alternative: str) -> Iterator[None]:
    """Convert an error of the dynamic linker to a RunError; see NativeExtension for the other arguments."""
    try:
        yield
    except (OSError, ImportError) as error:
        raise RunError(f"{requested_by}: cannot load {path} ({error}); remove it, or {alternative}") from None


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _check_execution(extension: NativeExtension, path: Path) -> None:
    """Raise RunError if the file system does not allow files to be executed."""
    try:
        check_execution(path)
    except PermissionError as error:
        raise RunError(
            f"{extension.requested_by}: cannot load {extension.title} from {path.parent}: {error.strerror}; set "
            f"CPUTRAIN_CACHE to a folder on another file system, or {extension.alternative}"
        ) from None


def _compile_or_wait(extension: NativeExtension, path: Path, env: Mapping[str, str]) -> None:
    lock = path.with_suffix(".lock")
    waited = 0.0
    while not _lock(lock):
        waited = _wait(extension, path, lock, waited, env)
        if is_intact(path):
            return
    try:
        _check_execution(extension, lock)
        if not is_intact(path):
            if path.exists() and checksum_file(path).exists():
                logger.warning("cputrain: %s is damaged and is compiled again", path)
            _compile(extension, path, lock, env)
    finally:
        lock.unlink(missing_ok=True)


def _lock(lock: Path) -> bool:
    """Take the lock; return False if another process holds it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Exclusive creation also works on network file systems, unlike flock.
        file = lock.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(f"{socket.gethostname()} {os.getpid()}\n")
    except OSError:
        lock.unlink(missing_ok=True)  # on a full disk only the name was created
        raise
    return True


def _wait(extension: NativeExtension, path: Path, lock: Path, waited: float, env: Mapping[str, str]) -> float:
    """Wait while the lock's owner touches it, and remove a stale lock. Returns the seconds waited so far.

    Seconds are counted by polls: if the host was suspended or very busy, its owner could not touch the lock either.
    """
    seen, untouched_s = _mtime(lock), 0.0
    while not is_intact(path) and lock.exists():
        time.sleep(POLL_S)
        if waited < QUIET_S <= waited + POLL_S:
            log_line = logger.warning if _reports(env) else logger.debug
            log_line("cputrain: waiting for %s to compile %s", _owner(lock), extension.title)
        waited += POLL_S
        now = _mtime(lock)
        untouched_s = untouched_s + POLL_S if now == seen else 0.0
        seen = now
        if untouched_s > STALE_S:
            lock.unlink(missing_ok=True)
    return waited


def _owner(lock: Path) -> str:
    try:
        return lock.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return "another process"


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _compile(extension: NativeExtension, path: Path, lock: Path, env: Mapping[str, str]) -> None:
    cxx = compiler(env)
    if cxx is None:
        raise InputError(f"{extension.requested_by}: no C++ compiler on PATH: install g++, or {extension.alternative}")
    log_line = logger.warning if _reports(env) else logger.debug
    log_line("cputrain: compiling %s with %s, once, into %s", extension.title, cxx, path.parent)
    started = time.monotonic()
    # The compiler's temporary files are written there as well, as TMPDIR may be full.
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}.", dir=path.parent) as folder:
        output = Path(folder, path.name)
        parts, last = extension.parts(cxx, output), extension.argv(cxx, output)
        variables = {**env, "TMPDIR": folder}
        with os.fdopen(os.memfd_create("compiler"), "w+b") as printed:  # in memory, as the disk may be full
            failed = _run(parts, printed, lock, log_line, variables) or _run(
                (last,), printed, lock, log_line, variables
            )
            printed.seek(0)
            messages = printed.read().decode(errors="replace")
        if failed:
            raise _failure(extension, path, failed, messages)
        checksum = Path(folder, "checksum")
        checksum.write_text(_checksum(output), encoding="ascii")
        checksum.rename(checksum_file(path))
        output.rename(path)
    log_line("cputrain: compiled in %.0f s", time.monotonic() - started)


def _failure(extension: NativeExtension, path: Path, command: tuple[str, ...], messages: str) -> Exception:
    """Return the error of a failed compiler, after saving its whole output."""
    full = next((number for number in FULL if os.strerror(number) in messages), None)
    if full is not None:
        return OSError(full, os.strerror(full))
    log = path.with_suffix(".log")
    log.write_text(f"{shlex.join(command)}\n{messages}", encoding="utf-8", errors="surrogateescape")
    first = next((line for line in messages.splitlines() if "error" in line), "it printed no error")
    return RunError(
        f"{extension.requested_by}: {command[0]} cannot compile {extension.title} ({first[:300]}); see its output in "
        f"{log}"
    )


def _reports(env: Mapping[str, str]) -> bool:
    """Whether this process is the rank of its host that reports progress."""
    return local_rank_of(env) in (None, 0)


def _run(
    commands: tuple[tuple[str, ...], ...],
    printed: IO[bytes],
    lock: Path,
    log_line: Callable[..., None],
    env: Mapping[str, str],
) -> tuple[str, ...]:
    """Run commands in parallel while touching the lock; return the first one that fails, () if all succeed."""
    with ExitStack() as stack:
        running = []
        for argv in commands:
            process = stack.enter_context(
                subprocess.Popen(argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=printed, stderr=printed)
            )
            stack.callback(process.kill)
            running.append(process)
        started = touched = reported = time.monotonic()
        while None in (statuses := [process.poll() for process in running]) and not any(statuses):
            time.sleep(POLL_S / 4)
            now = time.monotonic()
            if now - touched > TOUCH_S:
                lock.touch()
                touched = now
            if now - reported > PROGRESS_S:
                left = plural(statuses.count(None), "part")
                log_line("cputrain: has been compiling for %.0f s, %s of %d left", now - started, left, len(commands))
                reported = now
    return next((argv for argv, status in zip(commands, statuses, strict=True) if status), ())
