"""C++ that is compiled on first use: once into a cache, by one process, while the others wait."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError, RunError

TOUCH_S, STALE_S, POLL_S = 2.0, 30.0, 0.2
TELL_S = 2.0  # silence that a waiting process bears before it says what it waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is compiled: `title` for messages, `asked` what wants it, `otherwise` how to do without.

    `argv` makes the command from a compiler and the file to write.
    """

    title: str
    asked: str
    otherwise: str
    argv: Callable[[str, Path], tuple[str, ...]]


def compiler(env: Mapping[str, str]) -> str | None:
    """The C++ compiler, if there is one."""
    named = [name for name in (env.get("CXX"), "c++", "g++", "clang++") if name]
    return next((path for name in named if (path := shutil.which(name, path=env.get("PATH")))), None)


def cache_folder(env: Mapping[str, str]) -> Path:
    """CPUTRAIN_CACHE, or the user's own cache. Raises RunError where the user has no home."""
    if "CPUTRAIN_CACHE" in env:
        return Path(env["CPUTRAIN_CACHE"])
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "cputrain"
    try:
        return Path("~/.cache/cputrain").expanduser()
    except RuntimeError:
        raise RunError(f"user {os.getuid()} has no home to compile into: set CPUTRAIN_CACHE to a folder") from None


def ensure_compiled(part: Part, path: Path, env: Mapping[str, str]) -> Path:
    """The compiled part, `path`: built here, or awaited from the process that is building it.

    Raises InputError where there is no compiler, RunError with its first error where it fails, and where the cache may
    not be written to.
    """
    lock = path.with_suffix(".lock")
    waited = 0.0
    while not path.is_file():
        if not _lock(part, lock):
            waited = _wait(part, path, lock, waited)
            continue
        try:
            if not path.is_file():
                _compile(part, path, lock, env)
        finally:
            lock.unlink(missing_ok=True)
    return path


def _lock(part: Part, lock: Path) -> bool:
    """Whether the lock is this process's now, and not another's."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        # Exclusive creation holds on network file systems too, where flock may not.
        with lock.open("x") as file:
            file.write(f"{socket.gethostname()} {os.getpid()}\n")
    except OSError as error:
        if isinstance(error, FileExistsError) and lock.parent.is_dir():
            return False
        raise RunError(
            f"{part.asked}: {part.title} cannot be compiled into {lock.parent}: {error.strerror}: "
            f"set CPUTRAIN_CACHE to a folder that may be written to, or {part.otherwise}"
        ) from None
    return True


def _wait(part: Part, path: Path, lock: Path, waited: float) -> float:
    """Wait while the lock's owner shows signs of life; take the lock of one that is dead away."""
    seen, since = _mtime(lock), time.monotonic()
    while not path.is_file() and lock.exists():
        time.sleep(POLL_S)
        if waited < TELL_S <= waited + POLL_S:
            print(f"cputrain: waiting for {_owner(lock)} to compile {part.title}", file=sys.stderr)
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


def _compile(part: Part, path: Path, lock: Path, env: Mapping[str, str]) -> None:
    cxx = compiler(env)
    if cxx is None:
        raise InputError(f"{part.asked}: no C++ compiler on PATH: install g++, or {part.otherwise}")
    beside = path.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
    print(f"cputrain: compiling {part.title} with {cxx}, once, into {path.parent}", file=sys.stderr)
    over = threading.Event()

    def show_life() -> None:
        while not over.wait(TOUCH_S):
            lock.touch()

    life = threading.Thread(target=show_life, daemon=True)
    life.start()
    started = time.monotonic()
    try:
        argv = part.argv(cxx, beside)
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    finally:
        over.set()
        life.join()
    if done.returncode:
        log = path.with_suffix(".log")
        log.write_text(f"{shlex.join(argv)}\n{done.stdout}{done.stderr}")
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no word from it")
        raise RunError(f"{part.asked}: {cxx} cannot compile {part.title}: {first[:300]}; all of it in {log}")
    beside.rename(path)
    print(f"cputrain: compiled in {time.monotonic() - started:.0f} s", file=sys.stderr)
