"""The C++ part of the backend: compiled once into a cache, by one process, for this torch, Python and oneCCL."""

import hashlib
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch

from affinity.errors import InputError, RunError
from cputrain.comm.ccl.libraries import Libraries

NAME = "cputrain_ccl"
SOURCES = ("engine.hpp", "engine.cpp", "backend.cpp")
HERE = Path(__file__).parent
TOUCH_S, STALE_S, POLL_S = 2.0, 30.0, 0.2
TELL_S = 2.0  # silence that a waiting process bears before it says what it waits for


def compiler(env: Mapping[str, str]) -> str:
    """The C++ compiler. Raises InputError where there is none."""
    named = [name for name in (env.get("CXX"), "c++", "g++", "clang++") if name]
    found = next((path for name in named if (path := shutil.which(name, path=env.get("PATH")))), None)
    if found is None:
        raise InputError("comm.backend=ccl: no C++ compiler on PATH: install g++, or set comm.backend=gloo")
    return found


def command_line(cxx: str, libraries: Libraries, output: Path) -> tuple[str, ...]:
    """The tokens that compile and link the extension."""
    torch_root = Path(torch.__file__).parent
    # Searched before LD_LIBRARY_PATH: beside the CPU build lies oneCCL's GPU build of the same name.
    rpath = tuple(f"-Wl,-rpath,{folder}" for folder in (libraries.ccl.parent, torch_root / "lib"))
    return (
        *(cxx, "-std=c++20", "-O2", "-fPIC", "-shared", "-Wl,--disable-new-dtags"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *_pybind11_flags(),
        *(f"-I{libraries.include}", f"-I{sysconfig.get_path('include')}", f"-I{torch_root}/include"),
        f"-I{torch_root}/include/torch/csrc/api/include",
        *(str(HERE / name) for name in SOURCES if name.endswith(".cpp")),
        *("-o", str(output), f"-L{torch_root}/lib", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
        *(f"-L{libraries.ccl.parent}", f"-l:{libraries.ccl.name}", *rpath),
    )


def _pybind11_flags() -> tuple[str, ...]:
    """What pybind11 before version 3 compares to know torch's classes in ours: the names that torch was built with."""
    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    had = ((name, getattr(torch._C, f"_PYBIND11_{name}", None)) for name in names)
    return tuple(f'-DPYBIND11_{name}="{value}"' for name, value in had if value is not None)


def cache_folder(env: Mapping[str, str]) -> Path:
    """CPUTRAIN_CACHE, or the user's own cache."""
    if "CPUTRAIN_CACHE" in env:
        return Path(env["CPUTRAIN_CACHE"])
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cputrain"


def built_path(libraries: Libraries, env: Mapping[str, str]) -> Path:
    """Where the compiled extension lies: a name made of all that it depends on."""
    source = "".join((HERE / name).read_text() for name in SOURCES)
    parts = (source, torch.__version__, sys.version, platform.machine(), *command_line("c++", libraries, Path(NAME)))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder(env) / f"ccl-torch{torch.__version__}-{platform.machine()}-{key}" / f"{NAME}.so"


def ensure_built(libraries: Libraries, env: Mapping[str, str]) -> Path:
    """The compiled extension, built here or awaited from the process that is building it.

    Raises InputError where there is no compiler, RunError with its first error where it fails.
    """
    path = built_path(libraries, env)
    lock = path.with_suffix(".lock")
    waited = 0.0
    while not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Exclusive creation holds on network file systems too, where flock may not.
            with lock.open("x") as file:
                file.write(f"{socket.gethostname()} {os.getpid()}\n")
        except FileExistsError:
            waited = _wait(path, lock, waited)
            continue
        try:
            if not path.is_file():
                _build(libraries, path, lock, env)
        finally:
            lock.unlink(missing_ok=True)
    return path


def _wait(path: Path, lock: Path, waited: float) -> float:
    """Wait while the lock's owner shows signs of life; take the lock of one that is dead away."""
    seen, since = _mtime(lock), time.monotonic()
    while not path.is_file() and lock.exists():
        time.sleep(POLL_S)
        if waited < TELL_S <= waited + POLL_S:
            owner = lock.read_text().strip() if lock.exists() else "another process"
            print(f"cputrain: waiting for {owner} to compile the oneCCL backend", file=sys.stderr)
        waited += POLL_S
        now = _mtime(lock)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > STALE_S:
            lock.unlink(missing_ok=True)
    return waited


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _build(libraries: Libraries, path: Path, lock: Path, env: Mapping[str, str]) -> None:
    cxx = compiler(env)
    beside = path.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
    print(
        f"cputrain: compiling the oneCCL backend for torch {torch.__version__} with {cxx}, once, into {path.parent}",
        file=sys.stderr,
    )
    over = threading.Event()

    def show_life() -> None:
        while not over.wait(TOUCH_S):
            lock.touch()

    life = threading.Thread(target=show_life, daemon=True)
    life.start()
    started = time.monotonic()
    try:
        argv = command_line(cxx, libraries, beside)
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    finally:
        over.set()
        life.join()
    if done.returncode:
        log = path.with_suffix(".log")
        log.write_text(f"{shlex.join(argv)}\n{done.stdout}{done.stderr}")
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no word from it")
        raise RunError(f"comm.backend=ccl: {cxx} cannot compile the backend: {first[:300]}; all of it in {log}")
    beside.rename(path)
    print(f"cputrain: compiled in {time.monotonic() - started:.0f} s", file=sys.stderr)


def load(path: Path) -> ModuleType:
    """Import the compiled extension. Raises RunError where it does not load."""
    spec = spec_from_file_location(NAME, path, loader=ExtensionFileLoader(NAME, str(path)))
    assert spec is not None and spec.loader is not None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise RunError(
            f"comm.backend=ccl: {path} does not load: {error}: remove it, or set comm.backend=gloo"
        ) from None
    return module
