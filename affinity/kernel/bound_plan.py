"""The plan of a process: handed over in its environment, applied before its program starts, found again while it runs.

Plans that leave the cores of running processes free are made here, too.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from cputrain.affinity.errors import InputError
from cputrain.affinity.kernel.binding import (
    Thread,
    anonymous_bytes,
    bind_process,
    launcher_differences,
    refuse,
    threads_of,
    verify,
)
from cputrain.affinity.planner.openmp import reconciled, with_libiomp5
from cputrain.affinity.planner.plan import Plan, Request, WorkerPlan
from cputrain.affinity.planner.plan_file import (
    PLAN_FILE,
    plan_from_dict,
    plan_of_this_host,
    plan_to_json,
    read_json,
    worker_of,
)
from cputrain.affinity.planner.records import plan_this_machine
from cputrain.affinity.ranks.rank import ENV, LAUNCHER_VARIABLES, Rank, with_rank
from cputrain.affinity.terminal import printable
from cputrain.affinity.topology.machine import format_list
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import MIB, first_named

# They name the plan that a command was bound by, and its worker in that plan.
PLAN_VARIABLE, WORKER_VARIABLE = "AFFINITY_PLAN", "AFFINITY_WORKER"
DESCRIPTORS = "/proc/self/fd/"  # a plan in memory has a path in this folder
MEMORY_FILE = PLAN_FILE


def plan_in_memory(plan: Plan) -> Path:
    """A file of the plan that exists as long as this process, or the command that it becomes, and no other can read."""
    descriptor = os.memfd_create(MEMORY_FILE, 0)  # no close-on-exec: the command inherits it
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(plan_to_json(plan).encode())
    return Path(f"{DESCRIPTORS}{descriptor}")


def read_host_plan(path: Path) -> Plan:
    """This host's plan in a plan file. Raises InputError when there is none."""
    return plan_from_dict(plan_of_this_host(read_json(path)))


def plan_path_of(env: Mapping[str, str], pid: int | str = "self") -> Path | None:
    """The plan file that a process's environment names; None where it names none, or one in memory that is gone.

    A process started by a bound one inherits the variable, but mostly not the descriptor. Its number may then belong
    to any other file, such as a pipe, which blocks its reader.
    """
    named = env.get(PLAN_VARIABLE)
    if named is None or not named.startswith(DESCRIPTORS):
        return None if named is None else Path(f"/proc/{pid}/cwd") / named
    path = Path(f"/proc/{pid}/fd/{named.removeprefix(DESCRIPTORS)}")
    try:
        return path if str(path.readlink()).startswith(f"/memfd:{MEMORY_FILE}") else None
    except OSError:
        return None


def bound_worker(env: Mapping[str, str]) -> WorkerPlan | None:
    """The worker that this process was bound as; None where no plan has bound it, or the plan cannot be read."""
    path = plan_path_of(env)
    if path is None or WORKER_VARIABLE not in env:
        return None
    return worker_of(read_host_plan(path), int(env[WORKER_VARIABLE]))


# Names of a rank that a binding by a plan sets, all alike, and a launcher changes.
NAMES_OF_A_PLAN = (
    ENV.rank_names,
    *(each.rank_names for each in LAUNCHER_VARIABLES if each.for_scripts and each.names_suffice),
)


def plan_for_rank(request: Request, rank: Rank, command: tuple[str, ...], env: Mapping[str, str]) -> tuple[Plan, int]:
    """A plan of this host for the ranks that a launcher has started on it, and the index of this rank's worker.

    A binding by the launcher or by an earlier plan is kept: the planner then takes its cores for the whole host.
    """
    machine = this_machine()
    bound = _bound_as(rank, env) or set(machine.allowed_pus) < os.sched_getaffinity(os.getppid())
    ppn, index = (1, 0) if bound else (rank.local_world_size, rank.local_rank)
    full = replace(request, ppn=ppn, nodes=rank.world_size // rank.local_world_size)
    return plan_this_machine(full, env, command, machine=machine), index


def _bound_as(rank: Rank, env: Mapping[str, str]) -> bool:
    """Whether a plan has bound this process, or its parent, as this very rank: all names of the rank then agree, while
    a launcher that a bound process has started changes some of them."""
    ranks = {env.get(names[0]) for names in NAMES_OF_A_PLAN}
    sizes = {env.get(names[1]) for names in NAMES_OF_A_PLAN}
    return PLAN_VARIABLE in env and ranks == {str(rank.rank)} and sizes == {str(rank.world_size)}


logger = logging.getLogger(__name__)


def exec_bound(
    worker: WorkerPlan,
    plan_path: Path,
    command: tuple[str, ...],
    env: Mapping[str, str],
    *,
    rank: Rank | None,
    check: bool,
    keep_env: bool = False,
    bound: bool = False,
) -> NoReturn:
    """Bind this process as planned, with `check` verify it, and execute the command in its place (never returns).

    `env` is the environment to start from, `rank` this process's rank in its job, for the command to find; None where
    no launcher has set one. `bound`: the launcher has bound this process to whole cores; the plan only narrows that to
    its PUs of them. Inherited variables that contradict the plan are overridden, or with `keep_env` kept. Warnings are
    logged, most of them by the host's first worker only.
    """
    if bound and check:
        refuse(worker, launcher_differences(worker, tuple(os.sched_getaffinity(0))))
    if problem := bind_process(worker):
        logger.warning(problem)
    if check:
        verify(worker)
    full, warnings = command_environment(worker, plan_path, command, env, rank=rank, keep_env=keep_env)
    for warning in warnings if worker.local_rank == 0 else ():
        logger.warning(warning)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, full)
    except OSError as error:
        raise InputError(f"cannot start {command[0]!r}: {error.strerror}") from None


def command_environment(
    worker: WorkerPlan,
    plan_path: Path,
    command: tuple[str, ...],
    env: Mapping[str, str],
    *,
    rank: Rank | None,
    keep_env: bool,
) -> tuple[dict[str, str], list[str]]:
    """The command's environment: the worker's variables, the rank's, the plan's path; and warnings."""
    full, clashes = reconciled(env, worker.env, keep=keep_env)
    warnings = [f"inherited and {'kept' if keep_env else 'overridden'}: {', '.join(clashes)}"] if clashes else []
    full = full if rank is None else with_rank(rank, full)
    if "KMP_BLOCKTIME" in worker.env:
        try:
            full = with_libiomp5(full, command)
        except InputError as error:
            warnings.append(f"the plan's KMP_ variables have no effect: {error}")
    return full | {PLAN_VARIABLE: str(plan_path.absolute()), WORKER_VARIABLE: str(worker.local_rank)}, warnings


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
    if path is None or not exists or not worker.isdecimal():
        return None
    return worker_of(read_host_plan(path), int(worker))


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


# Equal for the ranks of a job on a host, and for the processes that they start. All plans in memory have the same
# path, and two jobs may be bound by the same plan, but only ranks of one job share a rendezvous address.
JOB_VARIABLES = (PLAN_VARIABLE, "MASTER_ADDR", "MASTER_PORT")
NOT_SHARED = "{share=true} looks at the processes of this host only: remove it for another machine or several hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbor:
    """A process that another plan has bound, and its PUs."""

    pid: int
    pus: tuple[int, ...]


def plan_beside(request: Request, env: Mapping[str, str], command: tuple[str, ...] = (), *, share: bool) -> Plan:
    """Plan this host. With `share` other plans' running processes keep their cores; without, a plan that takes them
    warns. `env` is this process's environment. Raises InputError where the request does not fit, or no core is left."""
    neighbors = find_neighbors(env)
    if share:
        occupied = tuple(sorted({pu for neighbor in neighbors for pu in neighbor.pus}))
        return plan_this_machine(replace(request, occupied=occupied), env, command)
    plan = plan_this_machine(request, env, command)
    return replace(plan, warnings=plan.warnings + contention(plan, neighbors))


def find_neighbors(env: Mapping[str, str]) -> tuple[Neighbor, ...]:
    """The processes of this user (of all users, for root) that other plans have bound, ascending by pid; `env` is
    this process's own environment: processes of its own plan do not count."""
    own, found = _job(env), []
    for pid in planned_pids():
        try:
            variables, mask = variables_of(pid), tuple(sorted(os.sched_getaffinity(pid)))
        except OSError:
            continue  # it has ended
        try:
            worker = planned_worker_of(pid, variables)
        except InputError:  # the plan of another version, say
            worker = None
        pus = worker.pus if worker else mask
        if PLAN_VARIABLE not in env or _job(variables) != own:
            found.append(Neighbor(pid=pid, pus=pus))
    return tuple(found)


def _job(variables: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(variables.get(name) for name in JOB_VARIABLES)


def contention(plan: Plan, neighbors: tuple[Neighbor, ...]) -> tuple[str, ...]:
    """A warning that names the neighbors on the plan's cores, their PUs, and the setting in braces that avoids them; ()
    where there are none."""
    used = {pu for worker in plan.workers for pu in worker.pus}
    cores = {pu for core in plan.machine.cores if not used.isdisjoint(core.pus) for pu in core.pus}
    found = [neighbor for neighbor in neighbors if not cores.isdisjoint(neighbor.pus)]
    if not found:
        return ()
    named = first_named([f"{neighbor.pid} (CPUs {format_list(neighbor.pus)})" for neighbor in found])
    return (
        f"cores of this plan are in use by processes {named}, which another plan has bound: {{share=true}} avoids them",
    )
