"""Bind a process: CPU masks by sched_setaffinity, memory by set_mempolicy."""

import ctypes
import errno
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cputrain.affinity.errors import RunError
from cputrain.affinity.planner.plan import WorkerPlan
from cputrain.affinity.topology.cgroup import read_limits
from cputrain.affinity.topology.machine import format_list
from cputrain.affinity.topology.sysfs import isolated_pus

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
