"""Bind a process as planned, read its binding back from the kernel, and compare a plan's machine with this host.

CPUs are bound by sched_setaffinity, memory by set_mempolicy.
"""

import ctypes
import errno
import logging
import os
import platform
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path

from cputrain.affinity.errors import BindingError, PlanOfAnotherMachineError, RunError
from cputrain.affinity.planner.openmp import BINDERS
from cputrain.affinity.planner.plan import Plan, WorkerPlan
from cputrain.affinity.topology.kernel_files import read_limits
from cputrain.affinity.topology.machine import Core, Machine, NumaNode, format_list, format_mask, name_cpus, parse_list
from cputrain.affinity.topology.sysfs import isolated_pus
from cputrain.affinity.wording import GIB

SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
POLICIES = {"default": 0, "preferred": 1, "bind": 2, "interleave": 3}
MAX_NODES = 1024
WORD_BITS = 64
FORBIDDEN = (errno.ENOSYS, errno.EPERM)
PR_SET_NAME = 15
DATA_THREAD = "cputrain-data"  # name of the thread that reads the data set of `cputrain.train`'s caller

logger = logging.getLogger(__name__)

NODE_PAGES = re.compile(r" N(\d+)=(\d+)")
ANONYMOUS = re.compile(r" anon=(\d+)")
PAGE_KIB = re.compile(r" kernelpagesize_kB=(\d+)")

STACK_POLICY = re.compile(
    r"^[0-9a-f]+ ((?:weighted )?[a-z]+)( \(many\)|=[\w|]+)?(?::([\d,-]+))? (?=(?:[^\n]* )?stack(?: |$))", re.MULTILINE
)
KERNEL_NAMES = {"prefer": "preferred"}  # in numa_maps, where they differ from set_mempolicy's

# Permitted share of an allocation's pages on other nodes than planned, as some are touched before the binding.
ELSEWHERE = 0.05

OTHER_LAYOUT_VARIABLE = "AFFINITY_ALLOW_OTHER_LAYOUT"  # "1" skips check_layout under any launcher
# The share of a node's planned memory that may be missing. The kernel's own memory varies by some percent between
# boots, versions and crash-kernel sizes; a missing memory module is mostly more.
MISSING_MEMORY = 0.1
# Objects that PUs may share, with the field of a core that identifies the object.
SHARED: tuple[tuple[str, Callable[[Core], Hashable]], ...] = (
    ("a core", lambda core: core.pus),
    ("a package", lambda core: core.package),
    ("an L3 cache", lambda core: core.l3),
    ("an L2 cache", lambda core: core.l2),
)


def set_memory_policy(policy: str, nodes: tuple[int, ...]) -> str | None:
    """Set this process's memory policy, which survives exec. Returns the kernel's error, or None on success."""
    number = SYSCALLS.get(platform.machine(), (None, None))[0]
    if number is None:
        return f"no set_mempolicy known on {platform.machine()}"
    if any(node >= MAX_NODES for node in nodes):
        return os.strerror(errno.EINVAL)  # no kernel supports as many nodes
    words = (ctypes.c_ulong * (MAX_NODES // WORD_BITS))()
    for node in nodes:
        words[node // WORD_BITS] |= 1 << node % WORD_BITS
    mask = words if nodes else None
    if _libc().syscall(number, POLICIES[policy], mask, MAX_NODES + 1 if nodes else 0) == 0:
        return None
    code = ctypes.get_errno()
    if policy == "default" and code in FORBIDDEN:
        return None  # a kernel without policies uses the default one
    return os.strerror(code)


def forbids_default_policy() -> bool:
    """Whether the kernel refuses to set a memory policy.

    Tries to set the default policy; to be called only if the process already has it, so that nothing changes.
    """
    number = SYSCALLS.get(platform.machine(), (None, None))[0]
    return number is None or _libc().syscall(number, POLICIES["default"], None, 0) != 0


def get_memory_policy() -> tuple[str | None, tuple[int, ...]]:
    """Return this process's memory policy and its nodes; policy None if the kernel forbids the query, as in some
    containers."""
    mode, words = ctypes.c_int(-1), (ctypes.c_ulong * (MAX_NODES // WORD_BITS))()
    number = SYSCALLS.get(platform.machine(), (None, None))[1]
    answered = number is not None and _libc().syscall(number, ctypes.byref(mode), words, MAX_NODES + 1, None, 0) == 0
    name = next((name for name, value in POLICIES.items() if answered and value == mode.value), None)
    return name, tuple(WORD_BITS * w + b for w, word in enumerate(words) for b in range(WORD_BITS) if word >> b & 1)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def pages_by_node(mapping: str) -> dict[int, int]:
    """Map NUMA nodes to the resident pages of one mapping, in its page size."""
    return {int(node): int(count) for node, count in NODE_PAGES.findall(mapping)}


def anonymous_bytes(numa_maps: str) -> dict[int, int]:
    """Map NUMA nodes to bytes of anonymous memory, in pages of any size: the memory that a policy places.

    File pages are on the node where any process first read them, shared memory where its first user touched it. A
    private file mapping may have both written pages and file pages, but the kernel does not report their nodes
    separately, so such a mapping is not counted.
    """
    largest: dict[int, int] = {}
    for mapping in numa_maps.splitlines():
        pages, anonymous, size = pages_by_node(mapping), ANONYMOUS.search(mapping), PAGE_KIB.search(mapping)
        if anonymous and size and int(anonymous[1]) >= sum(pages.values()):
            for node, count in pages.items():
                largest[node] = largest.get(node, 0) + count * int(size[1]) * 1024
    return largest


def policy_in(numa_maps: str) -> tuple[str | None, tuple[int, ...]]:
    """Return a process's memory policy and its nodes by its stack, which no library places; None if not listed."""
    match = STACK_POLICY.search(numa_maps)
    if match is None:
        return None, ()
    return KERNEL_NAMES.get(match[1], match[1]) + (match[2] or ""), parse_list(match[3] or "")


def bind_process(worker: WorkerPlan) -> str | None:
    """Bind this process, and all processes and threads that it starts, to the worker's PUs and memory nodes.

    Returns a warning if the kernel refused the memory policy (containers without SYS_NICE), else None: by first touch,
    a bound process's memory is mostly local without a policy, too. Raises RunError if the process may use none of the
    PUs.
    """
    try:
        os.sched_setaffinity(0, worker.pus)
    except OSError as error:
        allowed = name_cpus(os.sched_getaffinity(0))
        raise RunError(
            f"cannot bind to {name_cpus(worker.pus)} ({error.strerror}), as this process may use "
            f"{allowed}: plan inside the same job or container"
        ) from None
    problem = set_memory_policy(worker.memory_policy, worker.memory_nodes)
    return None if problem is None else f"memory policy {worker.memory_policy} not applied: {problem}"


def bind_thread(pus: tuple[int, ...], number: int = 0) -> None:
    """Bind the calling thread, number `number` of the threads that share these PUs, to all of them.

    If some of them are isolated, bind it to a single PU, as the scheduler moves no thread between isolated PUs. If this
    process may use none of them, as its cpuset was rewritten since the start, a warning says where the thread stays.
    """
    root = Path("/")
    alone = not isolated_pus(root, read_limits(root)).isdisjoint(pus)
    try:
        os.sched_setaffinity(0, pus[number % len(pus) :][:1] if alone else pus)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _warn_of_lost(pus, tuple(sorted(os.sched_getaffinity(0))))


def name_thread(name: str) -> None:
    """Name the calling thread for /proc/PID/task/TID/comm, at most 15 bytes; before Python 3.14 threading does not."""
    _libc().prctl(PR_SET_NAME, name.encode())


@cache
def _warn_of_lost(pus: tuple[int, ...], remaining: tuple[int, ...]) -> None:
    """Warn once of threads that cannot run on their PUs."""
    text = "cputrain: threads for CPUs %s stay on CPUs %s, as this process's cpuset lacks the former"
    logger.warning(text, format_list(pus), format_list(remaining))


@contextmanager
def running_on(pus: tuple[int, ...]) -> Iterator[None]:
    """Run the block on these PUs; threads started in it stay there. () changes nothing."""
    before = os.sched_getaffinity(0)
    if pus:
        os.sched_setaffinity(0, pus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A process's binding as the kernel reports it.

    `memory_policy` is None if the kernel forbids the query (some containers). `allowed_nodes` are the NUMA nodes of its
    cpuset.
    """

    pus: tuple[int, ...]
    memory_policy: str | None
    memory_nodes: tuple[int, ...]
    allowed_nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """A thread of a process: its id, its name, and the PUs that it may run on."""

    tid: int
    name: str
    pus: tuple[int, ...]


def observe_binding() -> Observed:
    """Read this process's affinity mask, memory nodes and memory policy from the kernel."""
    policy, nodes = get_memory_policy()
    allowed = _status(Path("/proc/self/status")).get("Mems_allowed_list", "")
    return Observed(
        pus=tuple(sorted(os.sched_getaffinity(0))),
        memory_policy=policy,
        memory_nodes=nodes,
        allowed_nodes=parse_list(allowed),
    )


def binding_differences(worker: WorkerPlan, observed: Observed) -> list[str]:
    """List the differences between plan and kernel, with both values; empty if all is as planned."""
    problems = []
    if observed.pus != worker.pus:
        problems.append(
            f"CPUs planned {format_list(worker.pus)} (mask {format_mask(worker.pus)}), "
            f"actual {format_list(observed.pus)} (mask {format_mask(observed.pus)})"
        )
    actual = (observed.memory_policy, observed.memory_nodes)
    if observed.memory_policy is not None and actual != (worker.memory_policy, worker.memory_nodes):
        problems.append(
            f"memory planned {worker.memory_policy} {format_list(worker.memory_nodes)}, "
            f"actual {actual[0]} {format_list(actual[1])}"
        )
    if not set(worker.memory_nodes) <= set(observed.allowed_nodes):
        problems.append(
            f"memory planned on nodes {format_list(worker.memory_nodes)}, "
            f"this process may use nodes {format_list(observed.allowed_nodes)}"
        )
    return problems


def launcher_differences(worker: WorkerPlan, actual: tuple[int, ...]) -> list[str]:
    """List the difference if a launcher has bound a process to other PUs than planned.

    The mask must have all of the worker's PUs and no PU of other cores; idle PUs of the same cores are permitted.
    """
    missing = sorted({*worker.pus} - {*actual})
    foreign = sorted(pu for pu in {*actual} - {*worker.pus} if not {*siblings(pu)} & {*worker.pus})
    if not missing and not foreign:
        return []
    return [
        f"the launcher bound {name_cpus(actual)} (mask {format_mask(actual)}), "
        f"planned {format_list(worker.pus)} (mask {format_mask(worker.pus)})"
    ]


def siblings(pu: int) -> tuple[int, ...]:
    """Return all PUs of a PU's core on this host; only the PU itself if the kernel does not list its siblings."""
    path = Path(f"/sys/devices/system/cpu/cpu{pu}/topology/thread_siblings_list")
    return parse_list(path.read_text(encoding="utf-8")) if path.is_file() else (pu,)


def verify_binding(worker: WorkerPlan) -> None:
    """Raise BindingError if this process's binding differs from the plan.

    A memory policy that the kernel does not let the process set is not a difference: `bind_process` has reported it.
    """
    observed = observe_binding()
    if observed.memory_policy == "default" and forbids_policies():
        observed = replace(observed, memory_policy=None)
    raise_binding_error(worker, binding_differences(worker, observed))


def forbids_policies() -> bool:
    """Whether the kernel refuses this process a memory policy, as in containers without SYS_NICE."""
    return get_memory_policy()[0] in (None, "default") and forbids_default_policy()


def raise_binding_error(worker: WorkerPlan, problems: list[str]) -> None:
    """Raise BindingError if there are problems."""
    if problems:
        raise BindingError(
            f"local rank {worker.local_rank}: {'; '.join(problems)}; plan again on this host, or continue with "
            "{verify=false}"
        )


def threads_of(pid: int) -> tuple[Thread, ...]:
    """List the threads of a process by id, except threads that end meanwhile. Raises OSError if the process is gone."""
    threads = []
    for folder in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
        try:
            status = _status(folder / "status")
        except (FileNotFoundError, ProcessLookupError):
            continue
        pus = parse_list(status["Cpus_allowed_list"])
        threads.append(Thread(tid=int(folder.name), name=status["Name"], pus=pus))
    return tuple(threads)


def team_of(parallel_region: Callable[[], None]) -> tuple[Thread, ...]:
    """Run this process's first parallel region and return its OpenMP team, the calling thread first.

    To be called before any other parallel region: an existing team cannot be distinguished from other threads.
    """
    before = {thread.tid for thread in threads_of(os.getpid())}
    parallel_region()
    pid = os.getpid()  # also the id of the main thread
    after = threads_of(pid)
    first = tuple(thread for thread in after if thread.tid == pid)
    return first + tuple(thread for thread in after if thread.tid not in before)


def misplaced_threads(worker: WorkerPlan, team: tuple[Thread, ...]) -> list[str]:
    """List the difference if an OpenMP team is not bound as planned.

    If the plan binds threads, each has its own compute PU; otherwise all are inside the domain.
    """
    actual = [thread.pus for thread in team]
    if not any(name in worker.env for name in BINDERS):
        outside = [pus for pus in actual if not set(pus) <= set(worker.pus)]
        return [f"{len(outside)} OpenMP threads may leave {name_cpus(worker.pus)}"] if outside else []
    if sorted(actual) == sorted((pu,) for pu in worker.compute_pus):
        return []
    bound = " ".join(format_list(pus) for pus in actual)
    return [f"OpenMP threads planned on {name_cpus(worker.compute_pus)}, one each, actual {bound}"]


def memory_share(address: int) -> dict[int, float]:
    """Map NUMA nodes to their share of the resident pages of the mapping at an address; empty without NUMA."""
    try:
        lines = Path("/proc/self/numa_maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # kernels without NUMA have no such file
        return {}
    at = max((line for line in lines if int(line.split()[0], 16) <= address), key=_start, default="")
    pages = pages_by_node(at)
    return {node: count / sum(pages.values()) for node, count in pages.items()}


def misallocated_memory(worker: WorkerPlan, fractions: dict[int, float]) -> list[str]:
    """List the difference if memory that is bound to nodes is on other nodes."""
    elsewhere = sum(part for node, part in fractions.items() if node not in worker.memory_nodes)
    if worker.memory_policy not in ("bind", "interleave") or elsewhere <= ELSEWHERE:
        return []
    actual = ", ".join(f"{part:.0%} on node {node}" for node, part in sorted(fractions.items()))
    return [f"memory planned on nodes {format_list(worker.memory_nodes)}, its pages are {actual}"]


def _start(line: str) -> int:
    return int(line.split()[0], 16)


def _status(path: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in path.read_text(encoding="utf-8").splitlines())
    return {key: value.strip() for key, _, value in lines}


def check_layout(plan: Plan, host: Machine) -> None:
    """Raise PlanOfAnotherMachineError, with the first difference, if the plan's machine is laid out differently."""
    if difference := layout_difference(plan, host):
        raise PlanOfAnotherMachineError(
            f"the plan is for another machine ({plan.machine.name}, {plan.machine.model}): {difference}; plan again on "
            "this host, or continue with {allow_other_layout=true}"
        )


def layout_difference(plan: Plan, host: Machine) -> str | None:
    """Return the first difference between the layouts of a plan's machine and this host; None if they are equal.

    Only common PUs and nodes are compared, as containers, control groups or offline CPUs may hide others; but the nodes
    of the plan's workers must exist. Unknown values (caches of a synthetic machine, for example, or the typical memory
    size of a catalog machine) and more memory than planned are not differences.
    """
    planned = plan.machine
    common = frozenset(planned.pus) & frozenset(host.pus)
    if not common:
        return f"it has {name_cpus(planned.pus)}, this host has {name_cpus(host.pus)}"
    return next(chain(_on_nodes(planned, host, common), _sharing(planned, host, common), _memory(plan, host)), None)


def _on_nodes(planned: Machine, host: Machine, common: frozenset[int]) -> Iterator[str]:
    """Find PUs on other NUMA nodes than planned."""
    planned_nodes, host_nodes = (
        {pu: core.numa_node for core in machine.cores for pu in core.pus} for machine in (planned, host)
    )
    for pu in sorted(common):
        if planned_nodes[pu] is not None and host_nodes[pu] is not None and planned_nodes[pu] != host_nodes[pu]:
            yield f"CPU {pu} is on NUMA node {planned_nodes[pu]} in the plan, on node {host_nodes[pu]} here"


def _sharing(planned: Machine, host: Machine, common: frozenset[int]) -> Iterator[str]:
    """Find PUs that share a core, a package or a cache with other PUs than planned."""
    for what, shared in SHARED:
        planned_groups, host_groups = (_together(machine, shared, common) for machine in (planned, host))
        for pu in sorted({*planned_groups} & {*host_groups}):
            if planned_groups[pu] != host_groups[pu]:
                with_there, with_here = (
                    format_list(group - {pu}) or "none" for group in (planned_groups[pu], host_groups[pu])
                )
                yield f"CPU {pu} shares {what} with CPUs {with_there} in the plan, with {with_here} here"


def _together(
    machine: Machine, shared: Callable[[Core], Hashable], common: frozenset[int]
) -> dict[int, frozenset[int]]:
    """Map PUs to the common PUs that share an object with them, except PUs whose object is unknown."""
    groups: dict[Hashable, set[int]] = {}
    for core in machine.cores:
        if shared(core) is not None:
            groups.setdefault(shared(core), set()).update(common & {*core.pus})
    return {pu: frozenset(pus) for pus in groups.values() for pu in pus}


def _memory(plan: Plan, host: Machine) -> Iterator[str]:
    """Find nodes of the workers that are missing, of another kind or next to other PUs, and nodes with less memory."""
    host_nodes = {node.id: node for node in host.numa_nodes}
    used = {node for worker in plan.workers for node in worker.memory_nodes}
    for planned in plan.machine.numa_nodes:
        node = host_nodes.get(planned.id)
        if node is None:
            if planned.id in used:
                yield f"it uses NUMA node {planned.id}, this host has nodes {format_list(host_nodes)}"
        elif planned.id in used and _other_kind(planned, node):
            yield f"NUMA node {node.id} is {planned.kind} in the plan, {node.kind} here"
        elif planned.id in used and _elsewhere(planned, node):
            owners = f"{format_list(planned.near)} in the plan, to node {format_list(node.near)} here"
            yield f"NUMA node {node.id} is next to node {owners}"
        elif not planned.memory_assumed and node.memory_bytes < (1 - MISSING_MEMORY) * planned.memory_bytes:
            sizes = f"{planned.memory_bytes / GIB:.1f} GiB in the plan, {node.memory_bytes / GIB:.1f} GiB here"
            yield f"NUMA node {node.id} has {sizes}"


def _elsewhere(planned: NumaNode, actual: NumaNode) -> bool:
    """Whether memory without PUs is next to other PUs than planned; one common node suffices, as descriptions may leave
    out some of several."""
    comparable = planned.near and actual.near and not planned.pus and not actual.pus
    return bool(comparable) and {*planned.near}.isdisjoint(actual.near)


def _other_kind(planned: NumaNode, actual: NumaNode) -> bool:
    """Whether a node's kind is known on both sides and differs.

    Nodes with PUs are not compared: the kernel does not report their kind (HBM of a Xeon Max without DRAM is "dram").
    Kinds of other memory are known only if the firmware or the description has them.
    """
    comparable = "unknown" not in (planned.kind, actual.kind) and not planned.pus and not actual.pus
    return comparable and planned.kind != actual.kind
