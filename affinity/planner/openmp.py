"""A worker's compute PUs -> environment of the OpenMP runtime and memory allocator that its Python really loads."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from affinity.planner.reasons import Reason
from affinity.planner.runtime import INSTALL, Runtime

# Activations are large and freed every step. Left alone, glibc maps and unmaps each of them, and jemalloc gives its
# pages back: page faults then cost ResNet-50 a fifth to a third of its speed.
KEEP_MEMORY = {
    "glibc": (("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", str(1 << 40))),
    "jemalloc": (("MALLOC_CONF", "background_thread:true,oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1"),),
    "tcmalloc": (),
}
# Each of these places threads or processes by itself; with two of them the result is undefined.
BINDERS = (
    *("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET"),
    *("I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST", "I_MPI_PIN_CELL", "I_MPI_PIN_ORDER"),
)
OFF = ("0", "off", "no", "disable")  # values of I_MPI_PIN that switch MPI's own binding off


def environment(
    compute_pus: tuple[int, ...], runtime: Runtime, *, packed: bool, pin: bool
) -> tuple[tuple[str, str], ...]:
    """Variables for one worker; with `pin` exactly one of them binds each thread to a PU, else none does.

    `packed`: see CoreRoles.
    """
    pairs = [("OMP_NUM_THREADS", str(len(compute_pus)))]
    if runtime.openmp == "libiomp5":
        # The published setting takes first threads from the mask's first core on; where comm or loader cores come
        # first it would run into them, so the PUs are listed.
        listed = f"proclist=[{','.join(map(str, compute_pus))}],explicit"
        if pin:
            pairs.append(("KMP_AFFINITY", f"granularity=fine,{'compact,1,0' if packed else listed}"))
        pairs.append(("KMP_BLOCKTIME", "1"))
    elif pin:
        pairs.append(("OMP_PLACES", places(compute_pus)))
        pairs.append(("OMP_PROC_BIND", "close"))
    pairs += KEEP_MEMORY[runtime.allocator]
    if runtime.preload:
        pairs.append(("LD_PRELOAD", ":".join(runtime.preload)))
    return tuple(pairs)


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
