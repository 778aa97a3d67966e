"""Bind this process to a worker's PUs and memory nodes, and move threads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from affinity.errors import RunError
from affinity.kernel.mempolicy import set_memory_policy
from affinity.planner.plan import WorkerPlan
from affinity.topology.cgroup import read_limits
from affinity.topology.cpuset import format_list
from affinity.topology.sysfs import isolated_pus


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
