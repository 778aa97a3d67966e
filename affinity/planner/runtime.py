"""The OpenMP runtime and the memory allocator that a Python's torch really loads, found without loading it."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError, RequestError

SYSTEM_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)
ALLOCATORS = (
    ("tcmalloc", ("libtcmalloc.so.4", "libtcmalloc_minimal.so.4")),
    ("jemalloc", ("libjemalloc.so.2",)),
)
# LLVM's runtime and Intel's are one: both read KMP_ variables.
IOMP = ("libiomp5.so", "libomp.so")
LOADER_CACHE = Path("/etc/ld.so.cache")
INSTALL = "pip install intel-openmp, or export LD_PRELOAD=/path/to/libiomp5.so"
PROBE = """
import importlib.util, sys
spec = importlib.util.find_spec("torch")
print(sys.prefix)
print(spec.origin if spec else "")
"""
PROBE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The OpenMP runtime (libgomp or libiomp5) and allocator in use, and the files to preload for them.

    `origin` is the source of the OpenMP runtime; empty for a machine other than this host. `missing` are OpenMP
    runtimes and allocators that LD_PRELOAD names and the loader would not find.
    """

    openmp: str = "libgomp"
    allocator: str = "glibc"
    preload: tuple[str, ...] = ()
    origin: str = ""
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The Python that will run: its prefix, and the folder of its torch's libraries if it has torch."""

    prefix: Path
    torch_lib: Path | None


def target_of(command: tuple[str, ...]) -> Target:
    """The Python that a command starts; this one, where the command starts none directly.

    Another Python is run to find its torch, which takes about 30 ms. Raises InputError when that fails.
    """
    program = shutil.which(command[0]) if command else None
    if program is None or not Path(program).name.startswith("python") or Path(program) == Path(sys.executable):
        spec = importlib.util.find_spec("torch")
        return _target(sys.prefix, spec.origin if spec and spec.origin else "")
    try:
        output = subprocess.run([program, "-c", PROBE], capture_output=True, timeout=PROBE_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"cannot find out which torch {program} has: {error}") from None
    prefix, origin = [*os.fsdecode(output).splitlines(), "", ""][:2]
    return _target(prefix, origin)


def _target(prefix: str, origin: str) -> Target:
    return Target(prefix=Path(prefix), torch_lib=Path(origin).parent / "lib" if origin else None)


def find_runtime(
    target: Target,
    env: Mapping[str, str],
    system: tuple[Path, ...] = tuple(map(Path, SYSTEM_LIBRARIES)),
    *,
    openmp: str = "auto",
    allocator: str = "auto",
) -> Runtime:
    """What the target loads: its own libraries, those that LD_PRELOAD in `env` names, those that a plan can preload.

    libiomp5 from the target's prefix or the system is preloaded over torch's libgomp, whose entry points it has too;
    so are tcmalloc or jemalloc. Nothing is preloaded that is loaded already. Raises RequestError where the target
    does not load the runtime or the allocator that is requested.
    """
    named = [path for path in env.get("LD_PRELOAD", "").replace(" ", ":").split(":") if path]
    preloaded = [path for path in named if _is_found(path, env, system)]
    places = (target.prefix / "lib", *system)
    runtime, origin, preload = _openmp(target, preloaded, places, openmp)
    allocator, libraries = _allocator(preloaded, places, allocator)
    known = (*IOMP, *(f"lib{name}" for name, _ in ALLOCATORS))
    missing = tuple(path for path in named if path not in preloaded and _named([path], known))
    return Runtime(openmp=runtime, allocator=allocator, preload=preload + libraries, origin=origin, missing=missing)


def installed_allocators(target: Target, system: tuple[Path, ...] = tuple(map(Path, SYSTEM_LIBRARIES))) -> list[str]:
    """The allocators that a plan can request of a target: glibc and those that are found."""
    places = (target.prefix / "lib", *system)
    return ["glibc", *(name for name, files in ALLOCATORS if _first(files, places))]


def with_libiomp5(env: Mapping[str, str], command: tuple[str, ...]) -> dict[str, str]:
    """The environment in which a command's Python loads libiomp5: a plan made on another host does not know its path
    here. Raises InputError where this Python has none."""
    preload = find_runtime(target_of(command), env, openmp="libiomp5").preload
    library = next((path for path in preload if _named([path], IOMP)), None)
    if library is None:
        return {**env}
    return {**env, "LD_PRELOAD": ":".join(filter(None, (library, env.get("LD_PRELOAD"))))}


def _openmp(
    target: Target, preloaded: list[str], places: tuple[Path, ...], requested: str
) -> tuple[str, str, tuple[str, ...]]:
    """The OpenMP runtime, where it comes from, and what to preload for it."""
    named, own = _named(preloaded, IOMP), _bundled_with_torch(target, IOMP)
    if named or own:
        origin = f"{named}, which LD_PRELOAD names" if named else f"{own}, which torch loads"
        if requested == "libgomp":
            remedy = "remove it from LD_PRELOAD" if named else "remove {openmp}"
            raise RequestError(f"{{openmp=libgomp}}, but the OpenMP runtime here is {origin}: {remedy}")
        return "libiomp5", origin, ()
    if requested != "libgomp" and (path := _first(IOMP[:1], places)):
        return "libiomp5", f"{path}, preloaded", (path,)
    if own := _bundled_with_torch(target, ("libgomp",)):
        origin = f"{own}, which torch loads"
    else:
        origin = "the system's" if target.torch_lib else f"assumed: no torch in {target.prefix}"
    if requested == "libiomp5":
        raise RequestError(
            f"{{openmp=libiomp5}}, but the Python in {target.prefix} loads libgomp: {INSTALL}, or plan with "
            "{openmp=libgomp}"
        )
    return "libgomp", origin, ()


def _allocator(preloaded: list[str], places: tuple[Path, ...], requested: str) -> tuple[str, tuple[str, ...]]:
    """The memory allocator, and what to preload for it."""
    named = next((name for name, files in ALLOCATORS if _named(preloaded, (f"lib{name}", *files))), None)
    if named and requested not in ("auto", named):
        raise RequestError(f"{{allocator={requested}}}, but LD_PRELOAD names {named}: remove it from LD_PRELOAD")
    if named or requested == "glibc":
        return named or requested, ()
    for name, files in ALLOCATORS:
        if requested in ("auto", name) and (path := _first(files, places)):
            return name, (path,)
    if requested != "auto":
        raise RequestError(
            f"{{allocator={requested}}}, but it is not installed here: install it, or remove {{allocator}}"
        )
    return "glibc", ()


def _named(paths: list[str], names: tuple[str, ...]) -> str | None:
    """The first path to a file whose name begins with one of the names."""
    return next((path for path in paths if Path(path).name.startswith(names)), None)


def _first(names: tuple[str, ...], places: tuple[Path, ...]) -> str | None:
    return next((str(place / name) for name in names for place in places if (place / name).is_file()), None)


def _is_found(path: str, env: Mapping[str, str], system: tuple[Path, ...]) -> bool:
    """Whether the dynamic loader finds what LD_PRELOAD names (ld.so(8)): a path as it stands, a bare name in
    LD_LIBRARY_PATH, its cache and the system's folders. Paths with $LIB and the like are assumed to exist."""
    if "$" in path:
        return True
    if "/" in path:
        return Path(path).is_file()
    folders = (*map(Path, filter(None, env.get("LD_LIBRARY_PATH", "").split(":"))), *system)
    cached = LOADER_CACHE.is_file() and f"/{path}\0".encode() in LOADER_CACHE.read_bytes()
    return cached or any((folder / path).is_file() for folder in folders)


def _bundled_with_torch(target: Target, names: tuple[str, ...]) -> str | None:
    """An OpenMP runtime in torch's own folder, or in the one beside it with the wheel's shared libraries."""
    if target.torch_lib is None:
        return None
    folders = (target.torch_lib, target.torch_lib.parents[1] / "torch.libs")
    found = (path for folder in folders for name in names for path in sorted(folder.glob(f"{name}*")))
    return next((str(path) for path in found), None)
