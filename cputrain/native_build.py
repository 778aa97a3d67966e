"""Compiling C++ on its first use: by one process, into a cache, while the other processes wait."""

import logging
import os
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError, RunError

logger = logging.getLogger(__name__)

TOUCH_S, STALE_S, POLL_S = 2.0, 30.0, 0.2  # the owner of a lock touches it; others take a stale one away
QUIET_S = 2.0  # that a process waits before it logs what it waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeExtension:
    """C++ to compile. `argv` makes the command from a compiler and the output file.

    For messages: `title` names it, `requested_by` is the setting that needs it, `alternative` is how to do without it.
    """

    title: str
    requested_by: str
    alternative: str
    argv: Callable[[str, Path], tuple[str, ...]]


def compiler(env: Mapping[str, str]) -> str | None:
    """The path of a C++ compiler: $CXX, or the first that is found; None without one."""
    named = [name for name in (env.get("CXX"), "c++", "g++", "clang++") if name]
    return next((path for name in named if (path := shutil.which(name, path=env.get("PATH")))), None)


def cache_folder(env: Mapping[str, str]) -> Path:
    """CPUTRAIN_CACHE, or the user's cache folder. Raises RunError where the user has no home."""
    if "CPUTRAIN_CACHE" in env:
        return Path(env["CPUTRAIN_CACHE"])
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "cputrain"
    try:
        return Path("~/.cache/cputrain").expanduser()
    except RuntimeError:
        raise RunError(f"user {os.getuid()} has no home to compile into: set CPUTRAIN_CACHE to a folder") from None


def ensure_compiled(extension: NativeExtension, path: Path, env: Mapping[str, str]) -> Path:
    """Compile the extension into `path` where it does not exist, or wait for the process that is compiling it.

    Raises InputError where there is no compiler, RunError where the compiler fails or the cache is not writable.
    """
    lock = path.with_suffix(".lock")
    waited = 0.0
    while not path.is_file():
        if not _lock(extension, lock):
            waited = _wait(extension, path, lock, waited)
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
        with lock.open("x") as file:
            file.write(f"{socket.gethostname()} {os.getpid()}\n")
    except OSError as error:
        if isinstance(error, FileExistsError) and lock.parent.is_dir():
            return False
        raise RunError(
            f"{extension.requested_by}: {extension.title} cannot be compiled into {lock.parent}: {error.strerror}: "
            f"set CPUTRAIN_CACHE to a folder that may be written to, or {extension.alternative}"
        ) from None
    return True


def _wait(extension: NativeExtension, path: Path, lock: Path, waited: float) -> float:
    """Wait while the lock's owner touches it; remove a stale lock. Returns the seconds waited so far."""
    seen, since = _mtime(lock), time.monotonic()
    while not path.is_file() and lock.exists():
        time.sleep(POLL_S)
        if waited < QUIET_S <= waited + POLL_S:
            logger.warning("cputrain: waiting for %s to compile %s", _owner(lock), extension.title)
        waited += POLL_S
        now = _mtime(lock)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > STALE_S:
            lock.unlink(missing_ok=True)
    return waited


def _owner(lock: Path) -> str:
    try:
        return lock.read_text().strip()
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
    partial = path.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
    logger.info("cputrain: compiling %s with %s, once, into %s", extension.title, cxx, path.parent)
    finished = threading.Event()

    def keep_lock() -> None:
        while not finished.wait(TOUCH_S):
            lock.touch()

    keeper = threading.Thread(target=keep_lock, daemon=True)
    keeper.start()
    started = time.monotonic()
    try:
        argv = extension.argv(cxx, partial)
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    finally:
        finished.set()
        keeper.join()
    if done.returncode:
        log = path.with_suffix(".log")
        log.write_text(f"{shlex.join(argv)}\n{done.stdout}{done.stderr}")
        first = next((line for line in done.stderr.splitlines() if "error" in line), "it printed no error")
        raise RunError(
            f"{extension.requested_by}: {cxx} cannot compile {extension.title}: {first[:300]}; its whole output is in "
            f"{log}"
        )
    partial.rename(path)
    logger.info("cputrain: compiled in %.0f s", time.monotonic() - started)
