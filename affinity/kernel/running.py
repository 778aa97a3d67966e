"""Plan against fact for processes that run now: those that a plan has bound, found by what it left in their
environment, or any others by pid."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from affinity.bind import PLAN_VARIABLE, WORKER_VARIABLE, plan_path_of, planned_worker
from affinity.errors import InputError
from affinity.kernel.observe import Thread, pages_by_node, threads_of
from affinity.planner.plan import WorkerPlan
from affinity.topology.cpuset import format_list

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A process and what it was planned as (None: by no plan that can be read), its threads, its memory by node."""

    pid: int
    command: str
    worker: WorkerPlan | None
    threads: tuple[Thread, ...]
    memory_bytes: dict[int, int]

    @property
    def strays(self) -> tuple[Thread, ...]:
        """Threads that may run where the plan has nothing for this worker."""
        domain = set(self.worker.pus) if self.worker else set()
        return tuple(thread for thread in self.threads if self.worker and not set(thread.pus) <= domain)

    @property
    def remote_bytes(self) -> int:
        """Memory on other NUMA nodes than planned."""
        if self.worker is None or self.worker.memory_policy not in ("bind", "interleave"):
            return 0
        return sum(size for node, size in self.memory_bytes.items() if node not in self.worker.memory_nodes)


def planned_pids() -> tuple[int, ...]:
    """The processes of this host that a plan has bound and that this user may look into, ascending."""
    mark = f"{PLAN_VARIABLE}=".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone, or another user's
        if any(variable.startswith(mark) for variable in variables):
            found.append(int(folder.name))
    return tuple(sorted(found))


def look_at(pid: int) -> Running:
    """A process as it is now. Raises InputError when it is not there, or another user's."""
    proc = Path(f"/proc/{pid}")
    try:
        variables = variables_of(pid)
        command = (proc / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
        threads, memory = threads_of(pid), _memory(proc)
    except OSError as error:
        raise InputError(f"cannot look into process {pid}: {error.strerror}: give a pid of your own") from None
    worker = planned_worker_of(pid, variables)
    return Running(pid=pid, command=command, worker=worker, threads=threads, memory_bytes=memory)


def variables_of(pid: int) -> dict[str, str]:
    """A process's environment as it was started with. Raises OSError when it is gone, or another user's."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(variable.split("=", 1) for variable in environ if "=" in variable)


def planned_worker_of(pid: int, variables: Mapping[str, str]) -> WorkerPlan | None:
    """What a process with this environment was planned as; None where its plan is not there any more."""
    path, worker = plan_path_of(variables, pid), variables.get(WORKER_VARIABLE, "")
    try:
        there = path is not None and path.is_file()  # not a pipe, which blocks
    except OSError:  # another user's
        there = False
    return planned_worker(path, int(worker)) if path is not None and there and worker.isdecimal() else None


def _memory(proc: Path) -> dict[int, int]:
    """NUMA node -> bytes of a process's pages there; empty where the kernel does not tell."""
    try:
        pages = pages_by_node((proc / "numa_maps").read_text())
    except OSError:
        return {}
    size = os.sysconf("SC_PAGE_SIZE")
    return {node: count * size for node, count in pages.items()}


def report(processes: list[Running]) -> str:
    """A block for each process: planned, given, and a line for each difference."""
    blocks = []
    for process in processes:
        used = format_list({pu for thread in process.threads for pu in thread.pus})
        memory = ", ".join(f"{size / MIB:.0f} MiB on node {n}" for n, size in sorted(process.memory_bytes.items()))
        lines = [f"pid {process.pid}: {process.command[:90]}"]
        if process.worker is None:
            lines.append("  planned  by no plan that is here")
        else:
            nodes = format_list(process.worker.memory_nodes)
            planned = f"PUs {format_list(process.worker.pus)}, memory {process.worker.memory_policy} {nodes}".rstrip()
            lines.append(f"  planned  worker {process.worker.local_rank}: {planned}")
        lines.append(f"  given    PUs {used} to {len(process.threads)} threads" + (f"; {memory}" if memory else ""))
        for thread in process.strays:
            lines.append(f"  differs  thread {thread.tid} ({thread.name}) may run on PUs {format_list(thread.pus)}")
        if process.remote_bytes:
            lines.append(f"  differs  {process.remote_bytes / MIB:.0f} MiB lie on other nodes")
        blocks.append("\n".join(lines))
    return "\n".join(blocks)
