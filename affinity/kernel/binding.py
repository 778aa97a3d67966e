"""Bind a process by its plan, read back what the kernel gave it, and compare a plan with the host that it runs on.

CPU masks by sched_setaffinity, memory by set_mempolicy.
"""

import ctypes
import errno
import os
import platform
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from cputrain.affinity.errors import BindingError, PlanOfAnotherMachineError, RunError
from cputrain.affinity.planner.openmp import BINDERS
from cputrain.affinity.planner.plan import Plan, WorkerPlan
from cputrain.affinity.topology.kernel_files import read_limits
from cputrain.affinity.topology.machine import Core, Machine, NumaNode, format_list, format_mask, parse_list
from cputrain.affinity.topology.sysfs import isolated_pus
from cputrain.affinity.wording import GIB

SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
POLICIES = {"default": 0, "preferred": 1, "bind": 2, "interleave": 3}
MAX_NODES = 1024
WORD_BITS = 64
FORBIDDEN = (errno.ENOSYS, errno.EPERM)


def set_memory_policy(policy: str, nodes: tuple[int, ...]) -> str | None:
    """Set this process's memory policy, which survives exec. Returns the kernel's reason where it refuses."""
    number = SYSCALLS.get(platform.machine(), (None, None))[0]
    if number is None:
        return f"no set_mempolicy known on {platform.machine()}"
    if any(node >= MAX_NODES for node in nodes):
        return os.strerror(errno.EINVAL)  # more than any kernel has
    words = (ctypes.c_ulong * (MAX_NODES // WORD_BITS))()
    for node in nodes:
        words[node // WORD_BITS] |= 1 << node % WORD_BITS
    mask = words if nodes else None
    if _libc().syscall(number, POLICIES[policy], mask, MAX_NODES + 1 if nodes else 0) == 0:
        return None
    code = ctypes.get_errno()
    if policy == "default" and code in FORBIDDEN:
        return None  # a kernel without policies has the default one
    return os.strerror(code)


def forbids_default_policy() -> bool:
    """Whether the kernel refuses to set a memory policy. To find out this sets the default one: call it only where the
    process has that already, so that nothing changes."""
    number = SYSCALLS.get(platform.machine(), (None, None))[0]
    return number is None or _libc().syscall(number, POLICIES["default"], None, 0) != 0


def get_memory_policy() -> tuple[str | None, tuple[int, ...]]:
    """This process's memory policy and its nodes; None where the kernel forbids to ask (some containers)."""
    mode, words = ctypes.c_int(-1), (ctypes.c_ulong * (MAX_NODES // WORD_BITS))()
    number = SYSCALLS.get(platform.machine(), (None, None))[1]
    known = number is not None and _libc().syscall(number, ctypes.byref(mode), words, MAX_NODES + 1, None, 0) == 0
    name = next((name for name, value in POLICIES.items() if known and value == mode.value), None)
    return name, tuple(WORD_BITS * w + b for w, word in enumerate(words) for b in range(WORD_BITS) if word >> b & 1)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


NODE_PAGES = re.compile(r" N(\d+)=(\d+)")
ANONYMOUS = re.compile(r" anon=(\d+)")
PAGE_KIB = re.compile(r" kernelpagesize_kB=(\d+)")


def pages_by_node(mapping: str) -> dict[int, int]:
    """NUMA node -> resident pages of one mapping, in its own page size."""
    return {int(node): int(count) for node, count in NODE_PAGES.findall(mapping)}


def anonymous_bytes(numa_maps: str) -> dict[int, int]:
    """NUMA node -> bytes of anonymous memory, in pages of any size: that is the memory that a policy places.

    Pages of files lie where they were first read, by whichever process, and shared memory where its first user touched
    it. A private mapping of a file may have both written pages and pages of the file; the kernel does not tell which of
    them lie on which node, so such a mapping does not count.
    """
    found: dict[int, int] = {}
    for mapping in numa_maps.splitlines():
        pages, anonymous, size = pages_by_node(mapping), ANONYMOUS.search(mapping), PAGE_KIB.search(mapping)
        if anonymous and size and int(anonymous[1]) >= sum(pages.values()):
            for node, count in pages.items():
                found[node] = found.get(node, 0) + count * int(size[1]) * 1024
    return found


def bind_process(worker: WorkerPlan) -> str | None:
    """Bind this process, and everything that it starts, to the worker's PUs and memory nodes.

    Returns a line about the memory policy where the kernel refused it (containers without SYS_NICE), else None:
    on its own cores a process touches local memory first even without it. Raises RunError when the process may use
    none of the PUs.
    """
    try:
        os.sched_setaffinity(0, worker.pus)
    except OSError as error:
        allowed = format_list(os.sched_getaffinity(0))
        raise RunError(
            f"cannot bind to CPUs {format_list(worker.pus)}: {error.strerror}; this process may use CPUs {allowed}: "
            "plan inside the same job or container"
        ) from None
    problem = set_memory_policy(worker.memory_policy, worker.memory_nodes)
    return None if problem is None else f"memory policy {worker.memory_policy} not applied: {problem}"


def bind_thread(pus: tuple[int, ...], number: int = 0) -> None:
    """Bind the calling thread, the number-th of those that share these PUs, to all of them; where some are isolated, to
    one of its own, as the scheduler moves no thread between isolated PUs."""
    root = Path("/")
    alone = not isolated_pus(root, read_limits(root)).isdisjoint(pus)
    os.sched_setaffinity(0, pus[number % len(pus) :][:1] if alone else pus)


@contextmanager
def running_on(pus: tuple[int, ...]) -> Iterator[None]:
    """Move this thread to these PUs inside the block; threads started there stay there. () changes nothing."""
    before = os.sched_getaffinity(0)
    if pus:
        os.sched_setaffinity(0, pus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# The share of an allocation's pages that may lie on other nodes than planned: those touched before the binding.
ELSEWHERE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A process as the kernel has it. `memory_policy` is None where the kernel forbids to ask (some containers).

    `allowed_nodes` are the NUMA nodes of its cpuset, whatever its policy.
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
    """The differences between plan and kernel, naming both sides; empty when all is as planned."""
    found = []
    if observed.pus != worker.pus:
        found.append(
            f"CPUs planned {format_list(worker.pus)} (mask {format_mask(worker.pus)}), "
            f"actual {format_list(observed.pus)} (mask {format_mask(observed.pus)})"
        )
    given = (observed.memory_policy, observed.memory_nodes)
    if observed.memory_policy is not None and given != (worker.memory_policy, worker.memory_nodes):
        found.append(
            f"memory planned {worker.memory_policy} {format_list(worker.memory_nodes)}, "
            f"actual {given[0]} {format_list(given[1])}"
        )
    if not set(worker.memory_nodes) <= set(observed.allowed_nodes):
        found.append(
            f"memory planned on nodes {format_list(worker.memory_nodes)}, "
            f"this process may use {format_list(observed.allowed_nodes)}"
        )
    return found


def launcher_differences(worker: WorkerPlan, given: tuple[int, ...]) -> list[str]:
    """Where a launcher has bound a process to other PUs than planned. It may add idle PUs of the same cores: a mask is
    right that has all of the worker's PUs and no PU of another core."""
    missing = sorted({*worker.pus} - {*given})
    foreign = sorted(pu for pu in {*given} - {*worker.pus} if not {*siblings(pu)} & {*worker.pus})
    if not missing and not foreign:
        return []
    return [
        f"the launcher bound CPUs {format_list(given)} (mask {format_mask(given)}), "
        f"planned {format_list(worker.pus)} (mask {format_mask(worker.pus)})"
    ]


def siblings(pu: int) -> tuple[int, ...]:
    """The PUs of a PU's core on this host; only itself where the kernel does not list them."""
    path = Path(f"/sys/devices/system/cpu/cpu{pu}/topology/thread_siblings_list")
    return parse_list(path.read_text(encoding="utf-8")) if path.is_file() else (pu,)


def verify(worker: WorkerPlan) -> None:
    """Raise BindingError when the kernel gave this process something else than planned.

    A memory policy that the kernel forbids to set is no difference: `bind_process` has reported it.
    """
    observed = observe()
    if observed.memory_policy == "default" and forbids_default_policy():
        observed = replace(observed, memory_policy=None)
    refuse(worker, differences(worker, observed))


def refuse(worker: WorkerPlan, problems: list[str]) -> None:
    """Raise BindingError where there are problems."""
    if problems:
        raise BindingError(
            f"local rank {worker.local_rank}: {'; '.join(problems)}: plan again on this host, or continue with "
            "{verify=false}"
        )


def threads_of(pid: int) -> tuple[Thread, ...]:
    """The threads of a process, by id, without those that end meanwhile. Raises OSError when the process is gone."""
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

    Call it before any other parallel region: an existing team cannot be told from other threads.
    """
    before = {thread.tid for thread in threads_of(os.getpid())}
    parallel_region()
    own = os.getpid()  # the id of a process's first thread, too
    after = threads_of(own)
    first = tuple(thread for thread in after if thread.tid == own)
    return first + tuple(thread for thread in after if thread.tid not in before)


def misplaced(worker: WorkerPlan, team: tuple[Thread, ...]) -> list[str]:
    """Where an OpenMP team differs from the plan: bound, each thread has a compute PU of its own, else all are inside
    the domain."""
    given = [thread.pus for thread in team]
    if not any(name in worker.env for name in BINDERS):
        outside = [pus for pus in given if not set(pus) <= set(worker.pus)]
        return [f"{len(outside)} OpenMP threads may leave CPUs {format_list(worker.pus)}"] if outside else []
    if sorted(given) == sorted((pu,) for pu in worker.compute_pus):
        return []
    found = " ".join(format_list(pus) for pus in given)
    return [f"OpenMP threads planned on CPUs {format_list(worker.compute_pus)}, one each, actual {found}"]


def memory_share(address: int) -> dict[int, float]:
    """NUMA node -> share of the resident pages of this process's mapping at an address; empty without NUMA."""
    try:
        lines = Path("/proc/self/numa_maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # kernels without NUMA have no such file
        return {}
    at = max((line for line in lines if int(line.split()[0], 16) <= address), key=_start, default="")
    pages = pages_by_node(at)
    return {node: count / sum(pages.values()) for node, count in pages.items()}


def misallocated(worker: WorkerPlan, share: dict[int, float]) -> list[str]:
    """Where memory that is bound to nodes lies on other nodes."""
    elsewhere = sum(part for node, part in share.items() if node not in worker.memory_nodes)
    if worker.memory_policy not in ("bind", "interleave") or elsewhere <= ELSEWHERE:
        return []
    given = ", ".join(f"{part:.0%} on node {node}" for node, part in sorted(share.items()))
    return [f"memory planned on nodes {format_list(worker.memory_nodes)}, its pages are {given}"]


def _start(line: str) -> int:
    return int(line.split()[0], 16)


def _status(path: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in path.read_text(encoding="utf-8").splitlines())
    return {key: value.strip() for key, _, value in lines}


OTHER_LAYOUT_VARIABLE = "AFFINITY_ALLOW_OTHER_LAYOUT"  # "1" allows what check_layout refuses, whatever the launcher
# The part of a node's planned memory that may be missing. What a kernel keeps for itself changes by some percent
# between boots, versions and crash-kernel sizes; a memory module less is mostly more than that.
MISSING_MEMORY = 0.1
# What PUs may share, by the field of a core that tells whether they do.
SHARED: tuple[tuple[str, Callable[[Core], Hashable]], ...] = (
    ("a core", lambda core: core.pus),
    ("a package", lambda core: core.package),
    ("an L3 cache", lambda core: core.l3),
    ("an L2 cache", lambda core: core.l2),
)


def check_layout(plan: Plan, host: Machine) -> None:
    """Raise PlanOfAnotherMachineError, with the first difference, where a plan's bindings mean something else here."""
    if difference := layout_difference(plan, host):
        raise PlanOfAnotherMachineError(
            f"the plan is of another machine ({plan.machine.name}, {plan.machine.model}): {difference}: plan again on "
            "this host, or continue with {allow_other_layout=true}"
        )


def layout_difference(plan: Plan, host: Machine) -> str | None:
    """The first difference between a plan's machine and this host; None where they are laid out alike.

    Only the PUs and nodes that both have are compared: a container, a control group or an offline CPU may hide others.
    The nodes of the plan's workers must exist. What one side does not know is no difference: caches of a synthetic
    machine, say, or memory of a catalog machine, whose size is a usual one. Neither is more memory than planned.
    """
    planned = plan.machine
    common = frozenset(planned.pus) & frozenset(host.pus)
    if not common:
        return f"it has CPUs {format_list(planned.pus)}, this host has CPUs {format_list(host.pus)}"
    return next(chain(_on_nodes(planned, host, common), _sharing(planned, host, common), _memory(plan, host)), None)


def _on_nodes(planned: Machine, host: Machine, common: frozenset[int]) -> Iterator[str]:
    """PUs on other NUMA nodes than planned."""
    there, here = ({pu: core.numa_node for core in machine.cores for pu in core.pus} for machine in (planned, host))
    for pu in sorted(common):
        if there[pu] is not None and here[pu] is not None and there[pu] != here[pu]:
            yield f"CPU {pu} is on NUMA node {there[pu]} in the plan, on node {here[pu]} here"


def _sharing(planned: Machine, host: Machine, common: frozenset[int]) -> Iterator[str]:
    """PUs that share a core, a package or a cache with other PUs than planned."""
    for what, shared in SHARED:
        there, here = (_together(machine, shared, common) for machine in (planned, host))
        for pu in sorted({*there} & {*here}):
            if there[pu] != here[pu]:
                with_there, with_here = (format_list(group - {pu}) or "none" for group in (there[pu], here[pu]))
                yield f"CPU {pu} shares {what} with CPUs {with_there} in the plan, with {with_here} here"


def _together(
    machine: Machine, shared: Callable[[Core], Hashable], common: frozenset[int]
) -> dict[int, frozenset[int]]:
    """PU -> the PUs in common that share the object with it; without those whose object is unknown."""
    groups: dict[Hashable, set[int]] = {}
    for core in machine.cores:
        if shared(core) is not None:
            groups.setdefault(shared(core), set()).update(common & {*core.pus})
    return {pu: frozenset(pus) for pus in groups.values() for pu in pus}


def _memory(plan: Plan, host: Machine) -> Iterator[str]:
    """Nodes that workers use and that are missing or of another kind, and nodes with less memory than planned."""
    here = {node.id: node for node in host.numa_nodes}
    used = {node for worker in plan.workers for node in worker.memory_nodes}
    for planned in plan.machine.numa_nodes:
        node = here.get(planned.id)
        if node is None:
            if planned.id in used:
                yield f"it uses NUMA node {planned.id}, this host has nodes {format_list(here)}"
        elif planned.id in used and _other_kind(planned, node):
            yield f"NUMA node {node.id} is {planned.kind} in the plan, {node.kind} here"
        elif planned.id in used and _elsewhere(planned, node):
            owners = f"{format_list(planned.near)} in the plan, to node {format_list(node.near)} here"
            yield f"NUMA node {node.id} is next to node {owners}"
        elif not planned.memory_assumed and node.memory_bytes < (1 - MISSING_MEMORY) * planned.memory_bytes:
            sizes = f"{planned.memory_bytes / GIB:.1f} GiB in the plan, {node.memory_bytes / GIB:.1f} GiB here"
            yield f"NUMA node {node.id} has {sizes}"


def _elsewhere(planned: NumaNode, here: NumaNode) -> bool:
    """Whether memory without PUs is next to other PUs than planned; a description may leave out some of several."""
    known = planned.near and here.near and not planned.pus and not here.pus
    return bool(known) and {*planned.near}.isdisjoint(here.near)


def _other_kind(planned: NumaNode, here: NumaNode) -> bool:
    """Whether both sides know a node's kind and differ: no kernel tells it of memory next to PUs (Xeon Max without DRAM
    is "dram" to it), and of other memory only where firmware has figures, which a description may have from elsewhere.
    """
    known = "unknown" not in (planned.kind, here.kind) and not planned.pus and not here.pus
    return known and planned.kind != here.kind
