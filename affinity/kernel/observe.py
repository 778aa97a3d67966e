"""What the kernel really gave a process: PUs, memory, the place of each thread; and where that differs from a plan."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from affinity.errors import RunError
from affinity.kernel.mempolicy import get_memory_policy, set_memory_policy
from affinity.planner.openmp import BINDERS
from affinity.planner.plan import WorkerPlan
from affinity.topology.cpuset import format_list, format_mask, parse_list

# Of the pages of an allocation bound to a worker's nodes, those that may lie elsewhere: first touched before.
ELSEWHERE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the kernel says of a process. `memory_policy` is None where it will not say (some containers).

    `allowed_nodes` are the NUMA nodes that its cpuset leaves it, whatever its policy.
    """

    pus: tuple[int, ...]
    memory_policy: str | None
    memory_nodes: tuple[int, ...]
    allowed_nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """A thread of a process: its kernel id, its name, the PUs that it may run on."""

    tid: int
    name: str
    pus: tuple[int, ...]


def observe() -> Observed:
    """Read this process's affinity mask, memory nodes and memory policy back from the kernel."""
    policy, nodes = get_memory_policy()
    allowed = _status(Path("/proc/self/status")).get("Mems_allowed_list", "")
    return Observed(
        pus=tuple(sorted(os.sched_getaffinity(0))),
        memory_policy=policy,
        memory_nodes=nodes,
        allowed_nodes=parse_list(allowed),
    )


def differences(worker: WorkerPlan, observed: Observed) -> list[str]:
    """Where the kernel's facts differ from the plan, naming both sides; empty when all is as planned."""
    found = []
    if observed.pus != worker.pus:
        found.append(
            f"PUs planned {format_list(worker.pus)} (mask {format_mask(worker.pus)}), "
            f"given {format_list(observed.pus)} (mask {format_mask(observed.pus)})"
        )
    said = (observed.memory_policy, observed.memory_nodes)
    if observed.memory_policy is not None and said != (worker.memory_policy, worker.memory_nodes):
        found.append(
            f"memory planned {worker.memory_policy} {format_list(worker.memory_nodes)}, "
            f"given {said[0]} {format_list(said[1])}"
        )
    if not set(worker.memory_nodes) <= set(observed.allowed_nodes):
        found.append(
            f"memory planned on nodes {format_list(worker.memory_nodes)}, "
            f"this process may use {format_list(observed.allowed_nodes)}"
        )
    return found


def launcher_differences(worker: WorkerPlan, given: tuple[int, ...]) -> list[str]:
    """Where a launcher has bound a process to other PUs than planned. It may give more of the same cores (those idle
    by plan), so a mask is right that holds the worker's PUs and at most their cores' other threads."""
    missing = sorted({*worker.pus} - {*given})
    foreign = sorted(pu for pu in {*given} - {*worker.pus} if not {*siblings(pu)} & {*worker.pus})
    if not missing and not foreign:
        return []
    return [
        f"the launcher bound PUs {format_list(given)} (mask {format_mask(given)}), "
        f"planned {format_list(worker.pus)} (mask {format_mask(worker.pus)})"
    ]


def siblings(pu: int) -> tuple[int, ...]:
    """The PUs of a PU's core on this host; itself alone where the kernel does not tell."""
    path = Path(f"/sys/devices/system/cpu/cpu{pu}/topology/thread_siblings_list")
    return parse_list(path.read_text()) if path.is_file() else (pu,)


def verify(worker: WorkerPlan) -> None:
    """Raise RunError when the kernel gave this process something else than the plan says.

    A memory policy that the kernel forbids to set is no difference: `affinity.bind` has said that it is lost.
    """
    observed = observe()
    if observed.memory_policy == "default" and set_memory_policy(worker.memory_policy, worker.memory_nodes):
        observed = replace(observed, memory_policy=None)
    refuse(worker, differences(worker, observed))


def refuse(worker: WorkerPlan, wrong: list[str]) -> None:
    """Raise RunError where something is wrong."""
    if wrong:
        raise RunError(
            f"local rank {worker.local_rank}: {'; '.join(wrong)}: plan again here, or go on with --no-verify"
        )


def threads_of(pid: int) -> tuple[Thread, ...]:
    """The threads of a process, by id; those that end meanwhile are left out. Raises OSError when it is gone."""
    found = []
    for folder in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
        try:
            status = _status(folder / "status")
        except (FileNotFoundError, ProcessLookupError):
            continue
        pus = parse_list(status["Cpus_allowed_list"])
        found.append(Thread(tid=int(folder.name), name=status["Name"], pus=pus))
    return tuple(found)


def team_of(parallel_region: Callable[[], None]) -> tuple[Thread, ...]:
    """The threads that OpenMP starts for this process's first parallel region, and the calling thread first.

    Called before any other parallel region: a team that is there already is not told from other threads.
    """
    before = {thread.tid for thread in threads_of(os.getpid())}
    parallel_region()
    own = os.getpid()  # the id of a process's first thread, too
    after = threads_of(own)
    first = tuple(thread for thread in after if thread.tid == own)
    return first + tuple(thread for thread in after if thread.tid not in before)


def misplaced(worker: WorkerPlan, team: tuple[Thread, ...]) -> list[str]:
    """Where an OpenMP team differs from the plan: each thread on a compute PU of its own if bound, else all inside."""
    given = [thread.pus for thread in team]
    if not any(name in dict(worker.env) for name in BINDERS):
        outside = [pus for pus in given if not set(pus) <= set(worker.pus)]
        return [f"{len(outside)} OpenMP threads may leave PUs {format_list(worker.pus)}"] if outside else []
    if sorted(given) == sorted((pu,) for pu in worker.compute_pus):
        return []
    said = " ".join(format_list(pus) for pus in given)
    return [f"OpenMP threads planned on PUs {format_list(worker.compute_pus)} one each, given {said}"]


def memory_share(address: int) -> dict[int, float]:
    """NUMA node -> share of the pages in memory of this process's mapping at an address; empty where none is told."""
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except OSError:  # kernels without NUMA have no such file
        return {}
    at = max((line for line in lines if int(line.split()[0], 16) <= address), key=_start, default="")
    pages = pages_by_node(at)
    return {node: count / sum(pages.values()) for node, count in pages.items()}


def pages_by_node(numa_maps: str) -> dict[int, int]:
    """NUMA node -> pages in memory, added up over lines of a numa_maps file."""
    pages: dict[int, int] = {}
    for node, count in re.findall(r" N(\d+)=(\d+)", numa_maps):
        pages[int(node)] = pages.get(int(node), 0) + int(count)
    return pages


def misallocated(worker: WorkerPlan, share: dict[int, float]) -> list[str]:
    """Where memory that is bound to nodes lies elsewhere."""
    elsewhere = sum(part for node, part in share.items() if node not in worker.memory_nodes)
    if worker.memory_policy not in ("bind", "interleave") or elsewhere <= ELSEWHERE:
        return []
    given = ", ".join(f"{part:.0%} on node {node}" for node, part in sorted(share.items()))
    return [f"memory planned on nodes {format_list(worker.memory_nodes)}, its pages lie {given}"]


def _start(line: str) -> int:
    return int(line.split()[0], 16)


def _status(path: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return {key: value.strip() for key, _, value in lines}
