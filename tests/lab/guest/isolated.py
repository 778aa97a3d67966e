"""Run in a guest with isolated CPUs: where the kernel runs threads there, and what a plan makes of these CPUs.

python -m tests.lab.guest.isolated FILE writes JSON: the CPUs used by threads that may run on all isolated ones and by
threads bound as loaders are, the plans with and without --cores, the isolated CPUs of a cpuset partition.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cputrain.affinity.binding import bind_thread
from cputrain.affinity.planner.plan import Request, plan_machine
from cputrain.affinity.topology.sysfs import read_machine, this_machine

GROUP = Path("/sys/fs/cgroup/alone")
BUSY_S = 3.0


def used(pus: tuple[int, ...], bind: Callable[[int], None]) -> list[int]:
    """The CPUs on which as many busy threads as PUs ran last."""
    found: list[int] = []

    def busy(number: int) -> None:
        bind(number)
        until = time.monotonic() + BUSY_S
        while time.monotonic() < until:
            sum(range(10_000))
        stat = Path(f"/proc/self/task/{threading.get_native_id()}/stat").read_text(encoding="utf-8")
        found.append(int(stat.rpartition(")")[2].split()[36]))

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(len(pus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(set(found))


def inherited(pus: tuple[int, ...]) -> list[int]:
    """The CPUs on which threads run that have the mask of the thread that starts them, as loader processes have."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, pus)
    try:
        return used(pus, lambda _: None)
    finally:
        os.sched_setaffinity(0, before)


def planned(request: Request) -> dict[str, object]:
    """The PUs of the workers of a plan of this guest, what it leaves out and its warnings."""
    plan = plan_machine(this_machine(), request)
    pinned = ["OMP_PLACES" in dict(worker.env) or len(worker.pus) == 1 for worker in plan.workers]
    return {"pus": [worker.pus for worker in plan.workers], "pinned": pinned, "warnings": plan.warnings}


def in_a_partition() -> list[int]:
    """The isolated PUs that a process finds in a cpuset partition that isolates CPU 1."""
    Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+cpuset", encoding="utf-8")
    GROUP.mkdir()
    (GROUP / "cpuset.cpus").write_text("1", encoding="utf-8")
    (GROUP / "cpuset.cpus.partition").write_text("isolated", encoding="utf-8")
    (GROUP / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
    return list(read_machine(Path("/")).isolated_pus)


def main(file: str) -> None:
    isolated = read_machine(Path("/")).isolated_pus
    by_default = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # as a container's runtime does
    everything = this_machine().allowed_pus
    results = {
        "isolated": isolated,
        "by_default": by_default,
        "free": inherited(isolated),
        "alone": used(isolated, lambda number: bind_thread(isolated, number)),
        "all": planned(Request(local_batch=None)),
        "requested": planned(Request(cores=isolated, ppn=1, pin_threads=False)),
        "everything": everything,
    }
    results["partition"] = in_a_partition()
    Path(file).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
