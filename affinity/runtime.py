"""The OpenMP runtime and the memory allocator that a Python's torch really loads, found without loading it."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError

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

    `origin` says where the OpenMP runtime comes from, empty where the machine is not at hand.
    """

    openmp: str = "libgomp"
    allocator: str = "glibc"
    preload: tuple[str, ...] = ()
    origin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The Python that will run: its prefix, and the folder of its torch's libraries if it has torch."""

    prefix: Path
    torch_lib: Path | None


def target_of(command: tuple[str, ...]) -> Target:
    """The Python that a command starts; this one, where the command starts none directly.

    Another Python is asked, which takes it some 30 ms. Raises InputError when it cannot answer.
    """
    program = shutil.which(command[0]) if command else None
    if program is None or not Path(program).name.startswith("python") or Path(program) == Path(sys.executable):
        spec = importlib.util.find_spec("torch")
        return _target(sys.prefix, spec.origin if spec and spec.origin else "")
    try:
        said = subprocess.run(
            [program, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"{program} does not say which torch it has: {error}") from None
    prefix, origin = [*said.splitlines(), "", ""][:2]
    return _target(prefix, origin)


def _target(prefix: str, origin: str) -> Target:
    return Target(prefix=Path(prefix), torch_lib=Path(origin).parent / "lib" if origin else None)


def find_runtime(
    target: Target, env: Mapping[str, str], system: tuple[Path, ...] = tuple(map(Path, SYSTEM_LIBRARIES))
) -> Runtime:
    """What the target loads: its own, what LD_PRELOAD in `env` puts before it, what a plan can preload for it.

    libiomp5 from the target's prefix or the system is preloaded over torch's libgomp, whose entry points it has too;
    so are tcmalloc or jemalloc. Nothing is preloaded that is loaded already.
    """
    preloaded = env.get("LD_PRELOAD", "").replace(" ", ":").split(":")
    places = (target.prefix / "lib", *system)

    def first(names: tuple[str, ...]) -> str | None:
        return next((str(place / name) for name in names for place in places if (place / name).is_file()), None)

    def loaded(names: tuple[str, ...]) -> str | None:
        return next((path for path in preloaded for name in names if Path(path).name.startswith(name)), None)

    preload = []
    own = _torch_s_own(target, IOMP)
    if path := loaded(IOMP):
        openmp, origin = "libiomp5", f"{path}, which LD_PRELOAD names"
    elif own:
        openmp, origin = "libiomp5", f"{own}, which torch loads"
    elif path := first(IOMP[:1]):
        openmp, origin = "libiomp5", f"{path}, preloaded"
        preload.append(path)
    elif own := _torch_s_own(target, ("libgomp",)):
        openmp, origin = "libgomp", f"{own}, which torch loads"
    else:
        openmp, origin = "libgomp", "the system's" if target.torch_lib else f"assumed: no torch in {target.prefix}"
    allocator = next((name for name, files in ALLOCATORS if loaded((f"lib{name}", *files))), None)
    if allocator is None:
        found = ((name, first(files)) for name, files in ALLOCATORS)
        allocator, library = next(((name, path) for name, path in found if path), ("glibc", None))
        preload += [library] if library else []
    return Runtime(openmp=openmp, allocator=allocator, preload=tuple(preload), origin=origin)


def _torch_s_own(target: Target, names: tuple[str, ...]) -> str | None:
    """An OpenMP runtime that lies in torch's own folder, or beside it where wheels' shared libraries are gathered."""
    if target.torch_lib is None:
        return None
    folders = (target.torch_lib, target.torch_lib.parents[1] / "torch.libs")
    found = (path for folder in folders for name in names for path in sorted(folder.glob(f"{name}*")))
    return next((str(path) for path in found), None)
