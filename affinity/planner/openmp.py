"""The environment of a worker: OpenMP runtime (KMP_*, GOMP_*), allocator, oneCCL."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from cputrain.affinity.errors import InputError, RequestError
from cputrain.affinity.planner.request import Reason
from cputrain.affinity.topology.machine import one_of

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
    """The OpenMP runtime and allocator of the Python that will run the workers.

    openmp: the OpenMP runtime.
    allocator: the memory allocator.
    preload: files for LD_PRELOAD.
    origin: the file that was found, or why none was; empty for a machine other than this host.
    missing: OpenMP runtimes and allocators in LD_PRELOAD that the loader would not find.
    """

    openmp: Annotated[str, one_of("libgomp", "libiomp5")] = "libgomp"
    allocator: Annotated[str, one_of("glibc", "tcmalloc", "jemalloc")] = "glibc"
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
    except subprocess.CalledProcessError as error:
        last = (os.fsdecode(error.stderr).strip().splitlines() or [f"status {error.returncode}"])[-1]
        raise InputError(f"cannot find out which torch {program} has: it ends with {last[:300]}: repair that") from None
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


# Activations are large and freed every step. Left alone, glibc maps and unmaps each of them, and jemalloc gives its
# pages back: page faults then cost ResNet-50 a fifth to a third of its speed.
KEEP_MEMORY = {
    "glibc": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
    "jemalloc": {"MALLOC_CONF": "background_thread:true,oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1"},
    "tcmalloc": {},
}
# Each of these places threads or processes by itself; with two of them the result is undefined.
BINDERS = (
    *("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET"),
    *("I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "I_MPI_PIN_CELL", "I_MPI_PIN_ORDER"),
)
OFF = ("0", "off", "no", "disable")  # values of I_MPI_PIN that switch MPI's own binding off


def environment(compute_pus: tuple[int, ...], runtime: Runtime, *, packed: bool, pin: bool) -> dict[str, str]:
    """Variables for one worker; with `pin` exactly one of them binds each thread to a PU, else none does.

    `packed`: see CoreRoles.
    """
    env = {"OMP_NUM_THREADS": str(len(compute_pus))}
    if runtime.openmp == "libiomp5":
        # The published setting takes first threads from the mask's first core on; where comm or loader cores come
        # first it would run into them, so the PUs are listed.
        listed = f"proclist=[{','.join(map(str, compute_pus))}],explicit"
        if pin:
            env["KMP_AFFINITY"] = f"granularity=fine,{'compact,1,0' if packed else listed}"
        env["KMP_BLOCKTIME"] = "1"
    elif pin:
        env |= {"OMP_PLACES": places(compute_pus), "OMP_PROC_BIND": "close"}
    env |= KEEP_MEMORY[runtime.allocator]
    if runtime.preload:
        env["LD_PRELOAD"] = ":".join(runtime.preload)
    return env


def places(pus: tuple[int, ...]) -> str:
    """One place for each PU, in the format of OMP_PLACES: (4, 6, 8) -> "{4}:3:2", which is {4},{6},{8}."""
    steps = {b - a for a, b in pairwise(pus)}
    if len(pus) > 2 and len(steps) == 1:
        return f"{{{pus[0]}}}:{len(pus)}:{steps.pop()}"
    return ",".join(f"{{{pu}}}" for pu in pus)


def planned_runtime(runtime: Runtime, requested: str, why: str, allocator: str) -> tuple[Runtime, tuple[str, ...]]:
    """The runtime to plan for, and warnings.

    A runtime found on this host stays as it is, whatever was requested (`why`); for another machine the request holds.
    An allocator is preloaded from where it was found, so that none can be requested for another machine.
    """
    warnings = tuple(
        f"LD_PRELOAD names {path}, which does not exist: the loader ignores it, and so does this plan"
        for path in runtime.missing
    )
    if allocator not in ("auto", runtime.allocator) and not runtime.origin:
        warnings += (
            f"planned with {runtime.allocator}, not {allocator}: it is not known where another machine has it",
        )
    if requested in ("auto", runtime.openmp):
        return runtime, warnings
    if runtime.origin:
        return runtime, (*warnings, f"planned for {runtime.openmp}, not {requested} ({why}): {INSTALL}")
    needs = f"; install it on its hosts: {INSTALL}" if requested == "libiomp5" else ""
    return replace(runtime, openmp=requested, origin=why + needs), warnings


def allocator_why(found: Runtime | None, requested: str, why: str) -> str:
    """Why the plan has its allocator: `why` it was requested, or that nothing is known of another machine's (None, or
    without an origin); "" where it is the one that was found on this host."""
    if requested == (found or Runtime()).allocator:
        return why
    return "" if found and found.origin else "what is installed on that machine is not known here"


def runtime_reasons(runtime: Runtime, *, several_threads: bool, pin: bool, allocator_why: str) -> list[Reason]:
    """Why the environment is as it is; `allocator_why`: why this allocator, "" where it is the one that was found."""
    if runtime.openmp == "libiomp5":
        omp = f"{runtime.origin or 'as installed on its hosts'}; KMP_BLOCKTIME=1 as published"
        binder = "KMP_AFFINITY binds each thread to its own CPU"
    else:
        omp = runtime.origin or "the runtime inside PyTorch's wheel"
        binder = "OMP_PLACES binds each thread to its own CPU"
    if not several_threads:
        omp += "; each worker has one thread, which the process's mask binds"
    elif pin:
        omp += f"; {binder}"
    else:
        omp += "; threads move within the worker's mask: if pinned, a script's loader processes would share one CPU"
    chosen, effect = {
        "glibc": (
            "found neither tcmalloc nor jemalloc",
            ": glibc is set to keep freed memory, not to unmap it every step",
        ),
        "jemalloc": ("found and preloaded", ", and set to keep freed memory"),
        "tcmalloc": ("found and preloaded", "; it keeps freed memory"),
    }[runtime.allocator]
    alloc = (allocator_why or chosen) + effect
    return [
        Reason(what="OpenMP runtime", value=runtime.openmp, why=omp),
        Reason(what="allocator", value=runtime.allocator, why=alloc),
    ]


def reconciled(
    inherited: Mapping[str, str], planned: Mapping[str, str], *, keep: bool
) -> tuple[dict[str, str], list[str]]:
    """The environment of a worker's command, and the inherited variables that contradict the plan.

    The plan wins, and binders that it does not use are removed, so that exactly one binds; with `keep` inherited
    variables win. LD_PRELOAD never contradicts: the user's libraries stay, behind the plan's.
    """
    env = dict(inherited)
    clashes = []
    if "I_MPI_PIN" in inherited and inherited["I_MPI_PIN"].lower() not in OFF:
        planned = {**planned, "I_MPI_PIN": "0"}  # each rank binds itself
    for name in (*planned, *(binder for binder in BINDERS if binder not in planned)):
        if name == "LD_PRELOAD":
            env[name] = ":".join(filter(None, (planned[name], inherited.get(name))))
            continue
        differs = name in inherited and inherited[name] != planned.get(name)
        if differs:
            clashes.append(f"{name}={inherited[name]} (planned: {planned.get(name, 'unset')})")
        if name in planned and not (differs and keep):
            env[name] = planned[name]
        elif differs and not keep:
            del env[name]
    return env, clashes


# Intel MPI and oneCCL spin while they wait, on cores that another worker of an oversubscribed host then cannot use.
# Measured on more ranks than cores: a small all-reduce of Intel MPI takes 12.8 ms, 0.24 ms in its wait mode.
YIELDING = {"I_MPI_WAIT_MODE": "1", "CCL_YIELD": "sched_yield"}


def ccl_environment(comm_pus: tuple[tuple[int, ...], ...], most: int | None, *, shared_cores: bool) -> dict[str, str]:
    """CCL_WORKER_COUNT and CCL_WORKER_AFFINITY for a host whose workers have these comm PUs; none where one has none.
    `shared_cores` adds the variables that make waiting ranks yield their core.

    `most` limits the threads of a worker. The list has exactly workers x count entries, by local rank, the same on
    every worker: oneCCL throws on any other length.
    """
    count = min(map(len, comm_pus))
    count = count if most is None else min(count, most)
    waiting = YIELDING if shared_cores else {}
    if not count:
        return waiting
    affinity = ",".join(str(pu) for pus in comm_pus for pu in pus[:count])
    return {"CCL_WORKER_COUNT": str(count), "CCL_WORKER_AFFINITY": affinity, **waiting}
