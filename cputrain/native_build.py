"""Compiling C++ on its first use: by one process, into a cache, while the other processes wait."""

import logging
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from affinity.errors import InputError, RunError
from affinity.ranks.rank import local_rank_of
from affinity.wording import counted

logger = logging.getLogger(__name__)

TOUCH_S, STALE_S, POLL_S = 2.0, 30.0, 0.2  # the owner of a lock touches it; others take a stale one away
QUIET_S, PROGRESS_S = 2.0, 10.0  # before the first word about what takes time, and between two


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeExtension:
    """C++ to compile. `argv` makes the command from a compiler and the output file; `parts` those that run side by side
    before it, each into `object_file(output, NUMBER)`.

    For messages: `title` names it, `requested_by` is the setting that needs it, `alternative` is how to do without it.
    """

    title: str
    requested_by: str
    alternative: str
    argv: Callable[[str, Path], tuple[str, ...]]
    parts: Callable[[str, Path], tuple[tuple[str, ...], ...]] = lambda _cxx, _output: ()


def object_file(output: Path, number: int) -> Path:
    """What the part of this number writes."""
    return output.with_name(f"{output.name}.{number}.o")


def compiler(env: Mapping[str, str]) -> str | None:
    """The path of a C++ compiler: $CXX, or the first that is found; None without one."""
    named = [name for name in (env.get("CXX"), "c++", "g++", "clang++") if name]
    return next((path for name in named if (path := shutil.which(name, path=env.get("PATH")))), None)


def ensure_compiled(extension: NativeExtension, path: Path, env: Mapping[str, str]) -> Path:
    """Compile the extension into `path` where it does not exist, or wait for the process that is compiling it.

    Raises InputError where there is no compiler, RunError where the compiler fails or the cache is not writable.
    """
    lock = path.with_suffix(".lock")
    waited = 0.0
    while not path.is_file():
        if not _lock(extension, lock):
            waited = _wait(extension, path, lock, waited, env)
            continue
        try:
            if not path.is_file():
                _compile(extension, path, lock, env)
        finally:
            lock.unlink(missing_ok=True)
    return path


def _lock(extension: NativeExtension, lock: Path) -> bool:
    """Take the lock; False where another process has it."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        # Exclusive creation holds on network file systems too, where flock may not.
        with lock.open("x", encoding="utf-8") as file:
            file.write(f"{socket.gethostname()} {os.getpid()}\n")
    except OSError as error:
        if isinstance(error, FileExistsError) and lock.parent.is_dir():
            return False
        raise RunError(
            f"{extension.requested_by}: {extension.title} cannot be compiled into {lock.parent}: {error.strerror}: "
            f"set CPUTRAIN_CACHE to a folder that may be written to, or {extension.alternative}"
        ) from None
    return True


def _wait(extension: NativeExtension, path: Path, lock: Path, waited: float, env: Mapping[str, str]) -> float:
    """Wait while the lock's owner touches it; remove a stale lock. Returns the seconds waited so far."""
    seen, since = _mtime(lock), time.monotonic()
    while not path.is_file() and lock.exists():
        time.sleep(POLL_S)
        if waited < QUIET_S <= waited + POLL_S:
            log_line = logger.warning if _tells(env) else logger.debug
            log_line("cputrain: waiting for %s to compile %s", _owner(lock), extension.title)
        waited += POLL_S
        now = _mtime(lock)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > STALE_S:
            lock.unlink(missing_ok=True)
    return waited


def _owner(lock: Path) -> str:
    try:
        return lock.read_text(encoding="utf-8").strip()
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
    output = path.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
    parts, last = extension.parts(cxx, output), extension.argv(cxx, output)
    log_line = logger.warning if _tells(env) else logger.debug
    log_line("cputrain: compiling %s with %s, once, into %s", extension.title, cxx, path.parent)
    started = time.monotonic()
    try:
        with tempfile.TemporaryFile() as printed:
            failed = _run(parts, printed, lock, log_line) or _run((last,), printed, lock, log_line)
            printed.seek(0)
            messages = printed.read().decode(errors="replace")
    finally:
        for number in range(len(parts)):
            object_file(output, number).unlink(missing_ok=True)
    if failed:
        log = path.with_suffix(".log")
        log.write_text(f"{shlex.join(failed)}\n{messages}", encoding="utf-8", errors="surrogateescape")
        first = next((line for line in messages.splitlines() if "error" in line), "it printed no error")
        raise RunError(
            f"{extension.requested_by}: {cxx} cannot compile {extension.title}: {first[:300]}; its whole output is in "
            f"{log}"
        )
    output.rename(path)
    log_line("cputrain: compiled in %.0f s", time.monotonic() - started)


def _tells(env: Mapping[str, str]) -> bool:
    """Whether this process is the one of its host's ranks that tells what all wait for."""
    return local_rank_of(env) in (None, 0)


def _run(
    commands: tuple[tuple[str, ...], ...], printed: IO[bytes], lock: Path, log_line: Callable[..., None]
) -> tuple[str, ...]:
    """Run commands side by side, and touch the lock meanwhile; the first one that fails, none where all succeed."""
    with ExitStack() as stack:
        running = []
        for argv in commands:
            process = stack.enter_context(
                subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed)
            )
            stack.callback(process.kill)
            running.append(process)
        started = touched = spoken = time.monotonic()
        while None in (statuses := [process.poll() for process in running]) and not any(statuses):
            time.sleep(POLL_S / 4)
            now = time.monotonic()
            if now - touched > TOUCH_S:
                lock.touch()
                touched = now
            if now - spoken > PROGRESS_S:
                left = counted(statuses.count(None), "part")
                log_line("cputrain: has been compiling for %.0f s: %s of %d to go", now - started, left, len(commands))
                spoken = now
    return next((argv for argv, status in zip(commands, statuses, strict=True) if status), ())
