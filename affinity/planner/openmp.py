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
from cputrain.affinity.planner.workload import CUDA_BYTES, PROCESS_BYTES, Workload
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
# LLVM's and Intel's runtimes share their code: both read KMP_ variables.
IOMP = ("libiomp5.so", "libomp.so")
CUDA_LIBRARY = "libtorch_cuda.so"  # in the lib folder of torch's CUDA builds only
LOADER_CACHE = Path("/etc/ld.so.cache")
INSTALL = "pip install intel-openmp, or export LD_PRELOAD=/path/to/libiomp5.so"
PROBE = """
import importlib.util, sys
spec = importlib.util.find_spec("torch")
print(sys.prefix)
print(spec.origin if spec else "")
"""
PROBE_TIMEOUT_S = 20.0

# Activations are large and freed every step. By default glibc maps and unmaps each of them, and jemalloc returns their
# pages to the kernel: the page faults cost ResNet-50 a fifth to a third of its speed.
KEEP_MEMORY = {
    "glibc": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
    "jemalloc": {"MALLOC_CONF": "background_thread:true,oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1"},
    "tcmalloc": {},
}
# Each of these binds threads or processes; with two of them the result is undefined.
BINDERS = (
    *("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET"),
    *("I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "I_MPI_PIN_CELL", "I_MPI_PIN_ORDER"),
)
OFF = ("0", "off", "no", "disable")  # values of I_MPI_PIN that disable MPI's binding

# Waiting ranks of Intel MPI and oneCCL spin, and on an oversubscribed host block a core for other workers. Measured
# with more ranks than cores: a small all-reduce of Intel MPI takes 12.8 ms by spinning, 0.24 ms in wait mode.
YIELDING = {"I_MPI_WAIT_MODE": "1", "CCL_YIELD": "sched_yield"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The OpenMP runtime and allocator of the Python that will run the workers.

    openmp: the OpenMP runtime.
    allocator: the memory allocator.
    preload: files for LD_PRELOAD.
    origin: path of the OpenMP runtime, or why it was not found; empty for a machine other than this host.
    missing: OpenMP runtimes and allocators in LD_PRELOAD that the dynamic loader does not find.
    cuda: whether its torch is a CUDA build, whose libraries take memory.
    """

    openmp: Annotated[str, one_of("libgomp", "libiomp5")] = "libgomp"
    allocator: Annotated[str, one_of("glibc", "tcmalloc", "jemalloc")] = "glibc"
    preload: tuple[str, ...] = ()
    origin: str = ""
    missing: tuple[str, ...] = ()
    cuda: bool = False

    def holds(self, workload: Workload) -> Workload:
        """Return a workload with the memory that its process takes here."""
        return replace(workload, process_bytes=PROCESS_BYTES + CUDA_BYTES) if self.cuda else workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPython:
    """The Python that will run: its prefix, and the folder of torch's libraries if torch is installed."""

    prefix: Path
    torch_lib: Path | None


def target_of(command: tuple[str, ...]) -> TargetPython:
    """Return the Python that a command starts; this Python if the command is not a Python.

    Another Python is run to find its torch, which takes about 30 ms. Raises InputError if that fails.
    """
    program = shutil.which(command[0]) if command else None
    if program is None or not Path(program).name.startswith("python") or Path(program) == Path(sys.executable):
        spec = importlib.util.find_spec("torch")
        return _target(sys.prefix, spec.origin if spec and spec.origin else "")
    try:
        output = subprocess.run([program, "-c", PROBE], capture_output=True, timeout=PROBE_TIMEOUT_S, check=True).stdout
    except subprocess.CalledProcessError as error:
        last = (os.fsdecode(error.stderr).strip().splitlines() or [f"status {error.returncode}"])[-1]
        raise InputError(f"cannot find the torch of {program}, which fails with {last[:300]}: repair that") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"cannot find the torch of {program}: {error}") from None
    prefix, origin = [*os.fsdecode(output).splitlines(), "", ""][:2]
    return _target(prefix, origin)


def _target(prefix: str, origin: str) -> TargetPython:
    return TargetPython(prefix=Path(prefix), torch_lib=Path(origin).parent / "lib" if origin else None)


def find_runtime(
    target: TargetPython,
    env: Mapping[str, str],
    system: tuple[Path, ...] = tuple(map(Path, SYSTEM_LIBRARIES)),
    *,
    openmp: str = "auto",
    allocator: str = "auto",
) -> Runtime:
    """Find the OpenMP runtime and allocator of a target: its own, in `env`'s LD_PRELOAD, or preloaded by the plan.

    libiomp5 from the target's prefix or the system is preloaded to replace torch's libgomp, whose entry points it also
    provides; so are tcmalloc or jemalloc. Libraries that are already loaded are not preloaded. Raises RequestError if
    the requested runtime or allocator is not available.
    """
    preload_paths = [path for path in env.get("LD_PRELOAD", "").replace(" ", ":").split(":") if path]
    preloaded = [path for path in preload_paths if _is_found(path, env, system)]
    folders = (target.prefix / "lib", *system)
    runtime, origin, preload = _openmp(target, preloaded, folders, openmp)
    allocator, libraries = _allocator(preloaded, folders, allocator)
    names = (*IOMP, *(f"lib{name}" for name, _ in ALLOCATORS))
    missing = tuple(path for path in preload_paths if path not in preloaded and _named([path], names))
    return Runtime(
        openmp=runtime,
        allocator=allocator,
        preload=preload + libraries,
        origin=origin,
        missing=missing,
        cuda=target.torch_lib is not None and (target.torch_lib / CUDA_LIBRARY).is_file(),
    )


def installed_allocators(target: TargetPython) -> list[str]:
    """List the allocators that are available to a target: glibc and the installed ones."""
    folders = (target.prefix / "lib", *map(Path, SYSTEM_LIBRARIES))
    return ["glibc", *(name for name, files in ALLOCATORS if _first(files, folders))]


def with_libiomp5(env: Mapping[str, str], command: tuple[str, ...]) -> dict[str, str]:
    """Return the environment in which a command's Python loads libiomp5, for a plan that was made on another host and
    has no path of it. Raises InputError if the Python has no libiomp5."""
    preload = find_runtime(target_of(command), env, openmp="libiomp5").preload
    library = next((path for path in preload if _named([path], IOMP)), None)
    if library is None:
        return {**env}
    return {**env, "LD_PRELOAD": ":".join(filter(None, (library, env.get("LD_PRELOAD"))))}


def _openmp(
    target: TargetPython, preloaded: list[str], folders: tuple[Path, ...], requested: str
) -> tuple[str, str, tuple[str, ...]]:
    """Return the OpenMP runtime, its origin, and the libraries to preload."""
    preloaded_path, bundled = _named(preloaded, IOMP), _bundled_with_torch(target, IOMP)
    if preloaded_path or bundled:
        origin = f"{preloaded_path}, from LD_PRELOAD" if preloaded_path else f"{bundled}, loaded by torch"
        if requested == "libgomp":
            remedy = "remove it from LD_PRELOAD" if preloaded_path else "remove {openmp}"
            raise RequestError(f"{{openmp=libgomp}}, but the OpenMP runtime here is {origin}: {remedy}")
        return "libiomp5", origin, ()
    if requested != "libgomp" and (path := _first(IOMP[:1], folders)):
        return "libiomp5", f"{path}, preloaded", (path,)
    if bundled := _bundled_with_torch(target, ("libgomp",)):
        origin = f"{bundled}, loaded by torch"
    else:
        origin = "the system's" if target.torch_lib else f"assumed: no torch in {target.prefix}"
    if requested == "libiomp5":
        raise RequestError(
            f"{{openmp=libiomp5}}, but the Python in {target.prefix} loads libgomp: {INSTALL}, or plan with "
            "{openmp=libgomp}"
        )
    return "libgomp", origin, ()


def _allocator(preloaded: list[str], folders: tuple[Path, ...], requested: str) -> tuple[str, tuple[str, ...]]:
    """Return the memory allocator, and the libraries to preload."""
    preloaded_name = next((name for name, files in ALLOCATORS if _named(preloaded, (f"lib{name}", *files))), None)
    if preloaded_name and requested not in ("auto", preloaded_name):
        raise RequestError(f"{{allocator={requested}}}, but {preloaded_name} is in LD_PRELOAD: remove it there")
    if preloaded_name or requested == "glibc":
        return preloaded_name or requested, ()
    for name, files in ALLOCATORS:
        if requested in ("auto", name) and (path := _first(files, folders)):
            return name, (path,)
    if requested != "auto":
        raise RequestError(f"{{allocator={requested}}} is not installed here: install it, or remove {{allocator}}")
    return "glibc", ()


def _named(paths: list[str], names: tuple[str, ...]) -> str | None:
    """Return the first path whose file name begins with one of the names."""
    return next((path for path in paths if Path(path).name.startswith(names)), None)


def _first(names: tuple[str, ...], folders: tuple[Path, ...]) -> str | None:
    return next((str(folder / name) for name in names for folder in folders if (folder / name).is_file()), None)


def _is_found(path: str, env: Mapping[str, str], system: tuple[Path, ...]) -> bool:
    """Whether the dynamic loader finds a library in LD_PRELOAD (ld.so(8)): by its path, or a bare name in
    LD_LIBRARY_PATH, the loader's cache and the system's folders. Paths with $LIB and the like are assumed to exist."""
    if "$" in path:
        return True
    if "/" in path:
        return Path(path).is_file()
    folders = (*map(Path, filter(None, env.get("LD_LIBRARY_PATH", "").split(":"))), *system)
    cached = LOADER_CACHE.is_file() and f"/{path}\0".encode() in LOADER_CACHE.read_bytes()
    return cached or any((folder / path).is_file() for folder in folders)


def _bundled_with_torch(target: TargetPython, names: tuple[str, ...]) -> str | None:
    """Find an OpenMP runtime in torch/lib, or in torch.libs, where wheels bundle shared libraries."""
    if target.torch_lib is None:
        return None
    folders = (target.torch_lib, target.torch_lib.parents[1] / "torch.libs")
    paths = (path for folder in folders for name in names for path in sorted(folder.glob(f"{name}*")))
    return next((str(path) for path in paths), None)


def worker_environment(compute_pus: tuple[int, ...], runtime: Runtime, *, packed: bool, pin: bool) -> dict[str, str]:
    """Return one worker's variables; with `pin` exactly one of them binds each thread to a PU, else none does.

    `packed`: see CoreRoles.
    """
    env = {"OMP_NUM_THREADS": str(len(compute_pus))}
    if runtime.openmp == "libiomp5":
        # The published setting binds threads from the mask's first core on. If comm or loader cores come first, threads
        # would be bound to them, so the PUs are listed instead.
        listed = f"proclist=[{','.join(map(str, compute_pus))}],explicit"
        if pin:
            env["KMP_AFFINITY"] = f"granularity=fine,{'compact,1,0' if packed else listed}"
        env["KMP_BLOCKTIME"] = "1"
    elif pin:
        env |= {"OMP_PLACES": omp_places(compute_pus), "OMP_PROC_BIND": "close"}
    env |= KEEP_MEMORY[runtime.allocator]
    if runtime.preload:
        env["LD_PRELOAD"] = ":".join(runtime.preload)
    return env


def omp_places(pus: tuple[int, ...]) -> str:
    """Write one place per PU in the format of OMP_PLACES: (4, 6, 8) -> "{4}:3:2", which means {4},{6},{8}."""
    steps = {b - a for a, b in pairwise(pus)}
    if len(pus) > 2 and len(steps) == 1:
        return f"{{{pus[0]}}}:{len(pus)}:{steps.pop()}"
    return ",".join(f"{{{pu}}}" for pu in pus)


def planned_runtime(runtime: Runtime, requested: str, why: str, allocator: str) -> tuple[Runtime, tuple[str, ...]]:
    """Return the runtime to plan for, and warnings.

    A runtime found on this host is used whatever was requested (for the reason `why`), for another machine the
    requested one. An allocator cannot be requested for another machine, as the plan preloads it by its path.
    """
    warnings = tuple(
        f"{path} in LD_PRELOAD does not exist: the loader ignores it, and so does this plan" for path in runtime.missing
    )
    if allocator not in ("auto", runtime.allocator) and not runtime.origin:
        warnings += (f"planned with {runtime.allocator}, not {allocator}, whose path on another machine is unknown",)
    if requested in ("auto", runtime.openmp):
        return runtime, warnings
    if runtime.origin:
        return runtime, (*warnings, f"planned for {runtime.openmp}, not {requested} ({why}): {INSTALL}")
    needs = f"; the hosts need it ({INSTALL})" if requested == "libiomp5" else ""
    return replace(runtime, openmp=requested, origin=why + needs), warnings


def allocator_why(runtime: Runtime | None, requested: str, why: str) -> str:
    """Return the reason for the plan's allocator; "" if it is the one that was found on this host.

    `why` if it was requested; otherwise the allocators of another machine (`runtime` None or without origin) are
    unknown.
    """
    if requested == (runtime or Runtime()).allocator:
        return why
    return "" if runtime and runtime.origin else "the allocators on that machine are unknown"


def runtime_reasons(runtime: Runtime, *, several_threads: bool, pin: bool, allocator_why: str) -> list[Reason]:
    """Explain the OpenMP runtime and the allocator; `allocator_why` as returned by the function of that name."""
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
        omp += "; threads move within the worker's mask, as a pinned script's data loaders would share one CPU"
    chosen, effect = {
        "glibc": (
            "neither tcmalloc nor jemalloc found",
            "; glibc is set to keep freed memory instead of unmapping it every step",
        ),
        "jemalloc": ("found and preloaded", "; it is set to keep freed memory"),
        "tcmalloc": ("found and preloaded", "; it keeps freed memory"),
    }[runtime.allocator]
    alloc = (allocator_why or chosen) + effect
    return [
        Reason(what="OpenMP runtime", value=runtime.openmp, why=omp),
        Reason(what="allocator", value=runtime.allocator, why=alloc),
    ]


def reconciled_environment(
    inherited: Mapping[str, str], planned: Mapping[str, str], *, keep: bool
) -> tuple[dict[str, str], list[str]]:
    """Merge inherited and planned variables, and list the inherited ones that contradict the plan.

    Planned variables take precedence, and other binding variables are removed, so that exactly one binds; with `keep`
    inherited variables take precedence. LD_PRELOAD is joined: the plan's libraries, then the user's.
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


def ccl_environment(comm_pus: tuple[tuple[int, ...], ...], limit: int | None, *, shared_cores: bool) -> dict[str, str]:
    """Return CCL_WORKER_COUNT and CCL_WORKER_AFFINITY for the workers' comm PUs, unless a worker has none.

    `limit` limits the threads per worker. The affinity list has exactly workers x count entries, by local rank, and is
    the same for all workers: oneCCL throws on any other length. `shared_cores` adds the variables that make waiting
    ranks yield their core.
    """
    count = min(map(len, comm_pus))
    count = count if limit is None else min(count, limit)
    waiting = YIELDING if shared_cores else {}
    if not count:
        return waiting
    affinity = ",".join(str(pu) for pus in comm_pus for pu in pus[:count])
    return {"CCL_WORKER_COUNT": str(count), "CCL_WORKER_AFFINITY": affinity, **waiting}
