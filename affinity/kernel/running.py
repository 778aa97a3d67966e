"""Running processes compared with their plans. Processes that a plan has bound are found by their environment."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from affinity.errors import InputError
from affinity.kernel.bound_plan import PLAN_VARIABLE, WORKER_VARIABLE, plan_path_of, planned_worker
from affinity.kernel.numa_memory import anonymous_bytes
from affinity.kernel.observe import Thread, threads_of
from affinity.planner.plan import WorkerPlan
from affinity.terminal_text import printable
from affinity.topology.cpuset import format_list
from affinity.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A process, its worker in a plan, its threads, anonymous memory by NUMA node.

    Where no plan can be read, `worker` is None, and `reason` says why.
    """

    pid: int
    command: str
    worker: WorkerPlan | None
    threads: tuple[Thread, ...]
    memory_bytes: dict[int, int]
    reason: str = "no plan found"

    @property
    def misplaced_threads(self) -> tuple[Thread, ...]:
        """Threads that may run outside the worker's domain."""
        domain = set(self.worker.pus) if self.worker else set()
        return tuple(thread for thread in self.threads if self.worker and not set(thread.pus) <= domain)

    @property
    def differs(self) -> bool:
        """Whether threads or memory are elsewhere than planned."""
        return bool(self.misplaced_threads or self.remote_bytes)

    @property
    def remote_bytes(self) -> int:
        """Memory on other NUMA nodes than planned."""
        if self.worker is None or self.worker.memory_policy not in ("bind", "interleave"):
            return 0
        return sum(size for node, size in self.memory_bytes.items() if node not in self.worker.memory_nodes)


def planned_pids() -> tuple[int, ...]:
    """The processes of this host that a plan has bound and that this user may inspect, ascending."""
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


def inspect_process(pid: int) -> Running:
    """A process as it is now. Raises InputError when it does not exist, or belongs to another user."""
    proc = Path(f"/proc/{pid}")
    try:
        variables = variables_of(pid)
        command = (proc / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
        threads, memory = threads_of(pid), _memory(proc)
    except OSError as error:
        raise InputError(
            f"cannot inspect process {pid}: {error.strerror}: name a running process of your own"
        ) from None
    found = Running(pid=pid, command=command, worker=None, threads=threads, memory_bytes=memory)
    try:
        return replace(found, worker=planned_worker_of(pid, variables))
    except InputError as error:  # the plan of another version, say: the other processes are compared all the same
        return replace(found, reason=f"{error}")


def variables_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with. Raises OSError when it is gone, or another user's."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(variable.split("=", 1) for variable in environ if "=" in variable)


def planned_worker_of(pid: int, variables: Mapping[str, str]) -> WorkerPlan | None:
    """The planned worker of a process with this environment; None where its plan no longer exists."""
    path, worker = plan_path_of(variables, pid), variables.get(WORKER_VARIABLE, "")
    try:
        exists = path is not None and path.is_file()  # not a pipe, which blocks
    except OSError:  # another user's
        exists = False
    return planned_worker(path, int(worker)) if path is not None and exists and worker.isdecimal() else None


def _memory(proc: Path) -> dict[int, int]:
    """NUMA node -> bytes of a process's anonymous memory; empty where the kernel does not list it."""
    try:
        return anonymous_bytes((proc / "numa_maps").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def running_processes(pids: tuple[int, ...]) -> tuple[Running, ...]:
    """These processes, or for () all that a plan has bound. Raises InputError where there is none."""
    if pids:
        return tuple(map(inspect_process, pids))
    found = bound_processes()
    if not found:
        raise InputError(
            "no process of yours is bound by a plan on this host: start one with a plan, or name a process"
        )
    return found


def bound_processes() -> tuple[Running, ...]:
    """The processes of this host that a plan has bound and that this user may inspect."""
    found = []
    for pid in planned_pids():
        with suppress(InputError):  # it has ended meanwhile, as children do that a bound process starts all the time
            found.append(inspect_process(pid))
    return tuple(found)


def comparison(processes: Sequence[Running]) -> str:
    """A block for each process: planned, given, and a line for each difference."""
    blocks = []
    for process in processes:
        used = format_list({pu for thread in process.threads for pu in thread.pus})
        memory = ", ".join(f"{size / MIB:.0f} MiB on node {n}" for n, size in sorted(process.memory_bytes.items()))
        lines = [f"pid {process.pid}: {printable(process.command)[:90]}"]
        if process.worker is None:
            lines.append(f"  planned  {process.reason}")
        else:
            nodes = format_list(process.worker.memory_nodes)
            planned = f"CPUs {format_list(process.worker.pus)}, memory {process.worker.memory_policy} {nodes}".rstrip()
            lines.append(f"  planned  worker {process.worker.local_rank}: {planned}")
        lines.append(f"  actual   CPUs {used} to {len(process.threads)} threads" + (f"; {memory}" if memory else ""))
        for thread in process.misplaced_threads:
            name, pus = printable(thread.name), format_list(thread.pus)
            lines.append(f"  differs  thread {thread.tid} ({name}) may run on CPUs {pus}")
        if process.remote_bytes:
            lines.append(f"  differs  {process.remote_bytes / MIB:.0f} MiB are on other nodes")
        blocks.append("\n".join(lines))
    return "\n".join(blocks)
