"""A process's plan: passed in its environment, applied before its program starts, and read from running processes.

Also plans that avoid the cores of running processes.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from cputrain.affinity.binding import (
    Thread,
    anonymous_bytes,
    bind_process,
    forbids_policies,
    launcher_differences,
    policy_in,
    raise_binding_error,
    threads_of,
    verify_binding,
)
from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import PLAN_FILE
from cputrain.affinity.planner.openmp import reconciled_environment, with_libiomp5
from cputrain.affinity.planner.plan import Compare, Plan, Request, WorkerPlan, plan_machine
from cputrain.affinity.planner.plan_file import plan_from_dict, plan_of_this_host, plan_to_json, read_json, worker_of
from cputrain.affinity.planner.records import plan_this_machine
from cputrain.affinity.rank import ENV, LAUNCHER_VARIABLES, SET_FOR_RANKS, Rank, rank_from_env, with_rank
from cputrain.affinity.terminal import printable
from cputrain.affinity.topology.machine import format_list, name_cpus
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import MIB, first_named, plural

logger = logging.getLogger(__name__)


# The path of the plan that a command was bound by, and the local rank of its worker in that plan.
PLAN_VARIABLE, WORKER_VARIABLE = "AFFINITY_PLAN", "AFFINITY_WORKER"
DESCRIPTORS = "/proc/self/fd/"  # folder of the path of a plan in memory
MEMORY_FILE = PLAN_FILE

# Rank variables that binding by a plan sets consistently; a nested launcher overwrites some of them.
BOUND_RANK_VARIABLES = (
    ENV.rank_names,
    *(variables.rank_names for variables in LAUNCHER_VARIABLES if variables.for_scripts and variables.names_suffice),
)

# Variables with the same values for all ranks of a job on a host, and their children. All plans in memory have the
# same path, and two jobs may use the same plan file, but only ranks of one job share a rendezvous address.
JOB_VARIABLES = (PLAN_VARIABLE, "MASTER_ADDR", "MASTER_PORT")
NOT_SHARED = "{share=true} inspects the processes of this host only: remove it for another machine or several hosts"


def plan_in_memory(plan: Plan) -> Path:
    """Write a plan to a memory file that exists as long as this process, or the command that it execs."""
    descriptor = os.memfd_create(MEMORY_FILE, 0)  # no close-on-exec: the command inherits it
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(plan_to_json(plan).encode())
    return Path(f"{DESCRIPTORS}{descriptor}")


def read_host_plan(path: Path) -> Plan:
    """Read this host's plan from a plan file. Raises InputError if there is none."""
    return plan_from_dict(plan_of_this_host(read_json(path)))


def plan_path_of(env: Mapping[str, str], pid: int | str = "self") -> Path | None:
    """Return the plan file in a process's environment; None if there is none, or its memory file no longer exists.

    A child of a bound process inherits the variable, but mostly not the descriptor, whose number may then belong to any
    other file, such as a pipe that blocks its reader.
    """
    plan_path = env.get(PLAN_VARIABLE)
    if plan_path is None or not plan_path.startswith(DESCRIPTORS):
        return None if plan_path is None else Path(f"/proc/{pid}/cwd") / plan_path
    path = Path(f"/proc/{pid}/fd/{plan_path.removeprefix(DESCRIPTORS)}")
    try:
        return path if str(path.readlink()).startswith(f"/memfd:{MEMORY_FILE}") else None
    except OSError:
        return None


def bound_worker(env: Mapping[str, str]) -> WorkerPlan | None:
    """Return the worker that this process was bound as; None if it is not bound by a plan, or the plan is gone."""
    path = plan_path_of(env)
    if path is None or WORKER_VARIABLE not in env:
        return None
    return worker_of(read_host_plan(path), int(env[WORKER_VARIABLE]))


def plan_for_rank(
    request: Request, rank: Rank, command: tuple[str, ...], env: Mapping[str, str], *, compare: Compare | None = None
) -> tuple[Plan, int]:
    """Plan this host for the ranks that a launcher has started on it, and return the plan and this rank's worker index.

    A binding by the launcher or by an earlier plan is kept: its cores are then planned as if they were the whole host.
    `compare` as in `plan_machine`.
    """
    machine = this_machine()
    bound = _bound_as(rank, env) or set(machine.allowed_pus) < os.sched_getaffinity(os.getppid())
    ppn, index = (1, 0) if bound else (rank.local_world_size, rank.local_rank)
    full = replace(request, ppn=ppn, nodes=rank.world_size // rank.local_world_size)
    return plan_this_machine(full, env, command, machine=machine, compare=compare), index


def _bound_as(rank: Rank, env: Mapping[str, str]) -> bool:
    """Whether a plan has bound this process, or its parent, as this rank.

    All rank variables then agree; a launcher that was started by a bound process changes some of them.
    """
    ranks = {env.get(names[0]) for names in BOUND_RANK_VARIABLES}
    sizes = {env.get(names[1]) for names in BOUND_RANK_VARIABLES}
    return PLAN_VARIABLE in env and ranks == {str(rank.rank)} and sizes == {str(rank.world_size)}


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
    """Bind this process as planned, verify it with `check`, and exec the command (never returns).

    `env` is the inherited environment, `rank` this process's rank in its job, which the command finds in its
    environment; None without a launcher. `bound`: the launcher has bound this process to whole cores, and the plan
    narrows that to its PUs. Inherited variables that contradict the plan are overridden, or with `keep_env` kept.
    Warnings are logged, most of them only by the host's first worker.
    """
    if bound and check:
        raise_binding_error(worker, launcher_differences(worker, tuple(os.sched_getaffinity(0))))
    if problem := bind_process(worker):
        logger.warning(problem)
    if check:
        verify_binding(worker)
    full, warnings = command_environment(worker, plan_path, command, env, rank=rank, keep_env=keep_env)
    for warning in warnings if worker.local_rank == 0 else ():
        logger.warning(warning)
    sys.stdout.flush()
    names = {*worker.env, *(SET_FOR_RANKS if rank else ())}
    variables = {name: value for name, value in full.items() if name in names or value != env.get(name)}
    command = through_sudo(command, variables)
    try:
        os.execvpe(command[0], command, full)
    except OSError as error:
        raise InputError(f"cannot start {command[0]!r}: {error.strerror}") from None


def through_sudo(command: tuple[str, ...], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Give variables to sudo as arguments, NAME=value before its options, if it starts the program.

    It removes all variables from the environment, with -E those of the loader (LD_PRELOAD).
    """
    if Path(command[0]).name != "sudo":
        return command
    return (command[0], *(f"{name}={value}" for name, value in variables.items()), *command[1:])


def command_environment(
    worker: WorkerPlan,
    plan_path: Path,
    command: tuple[str, ...],
    env: Mapping[str, str],
    *,
    rank: Rank | None,
    keep_env: bool,
) -> tuple[dict[str, str], list[str]]:
    """Return the command's environment (variables of worker and rank, path of the plan), and warnings."""
    full, clashes = reconciled_environment(env, worker.env, keep=keep_env)
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
    """A running process: its worker in a plan, its threads, its memory policy, its anonymous memory by NUMA node.

    If the plan cannot be read, `worker` is None and `reason` is the cause; with `foreign` the plan has been read, and
    the process is none of its workers. `memory_policy` is None if the kernel does not list it.
    """

    pid: int
    command: str
    worker: WorkerPlan | None
    threads: tuple[Thread, ...]
    memory_bytes: dict[int, int]
    memory_policy: str | None = None
    policy_nodes: tuple[int, ...] = ()
    reason: str = "no plan found"
    foreign: bool = False

    @property
    def misplaced_threads(self) -> tuple[Thread, ...]:
        """The threads that may run outside the worker's domain."""
        domain = set(self.worker.pus) if self.worker else set()
        return tuple(thread for thread in self.threads if self.worker and not set(thread.pus) <= domain)

    @property
    def differs(self) -> bool:
        """Whether threads or memory are not where planned."""
        return bool(self.differences)

    @property
    def differences(self) -> tuple[str, ...]:
        """A line for each difference between plan and process."""
        problems = [self.reason] if self.foreign else []
        for thread in self.misplaced_threads:
            problems.append(f"thread {thread.tid} ({printable(thread.name)}) may run on {name_cpus(thread.pus)}")
        if self.worker and self.memory_policy is not None:
            planned = _policy_text(self.worker.memory_policy, self.worker.memory_nodes)
            actual = _policy_text(self.memory_policy, self.policy_nodes)
            if actual != planned:
                problems.append(f"memory policy is {actual}")
        if self.remote_bytes:
            problems.append(f"{self.remote_bytes / MIB:.0f} MiB are on other nodes")
        return tuple(problems)

    @property
    def remote_bytes(self) -> int:
        """Bytes on other NUMA nodes than planned."""
        if self.worker is None or self.worker.memory_policy not in ("bind", "interleave"):
            return 0
        return sum(size for node, size in self.memory_bytes.items() if node not in self.worker.memory_nodes)


def _policy_text(policy: str, nodes: tuple[int, ...]) -> str:
    return f"{policy} {format_list(nodes)}".rstrip()


def planned_environments() -> dict[int, dict[str, str]]:
    """Return the environments of this host's processes that a plan has bound and that this user may inspect.

    By process id, ascending. Each is read once: while a process replaces its program, its environment reads as empty.
    """
    processes = {}
    for pid in sorted(int(folder.name) for folder in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):  # the process has ended, or belongs to another user
            variables = variables_of(pid)
            if PLAN_VARIABLE in variables:
                processes[pid] = variables
    return processes


def inspect_process(pid: int, plan: Plan | None = None) -> Running:
    """Read a running process's binding, and its worker in `plan`, or in the plan by which it was bound.

    Raises InputError if it does not exist or belongs to another user.
    """
    proc = Path(f"/proc/{pid}")
    try:
        variables = variables_of(pid)
        command = (proc / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
        threads, numa_maps = threads_of(pid), _numa_maps(proc)
    except OSError as error:
        raise InputError(
            f"cannot inspect process {pid} ({error.strerror}): name one of your running processes"
        ) from None
    policy, nodes = policy_in(numa_maps)
    running = Running(
        pid=pid,
        command=command,
        worker=None,
        threads=threads,
        memory_bytes=anonymous_bytes(numa_maps),
        memory_policy=None if policy == "default" and forbids_policies() else policy,
        policy_nodes=nodes,
    )
    try:
        worker = planned_worker_of(pid, variables) if plan is None else _worker_in(plan, variables, threads)
        return replace(running, worker=worker)
    except InputError as error:  # a plan of another version, for example; other processes can still be compared
        return replace(running, reason=f"{error}", foreign=plan is not None)


def _worker_in(plan: Plan, variables: Mapping[str, str], threads: tuple[Thread, ...]) -> WorkerPlan:
    """Return a process's worker in a plan, by its rank's variables or else by the CPUs of its threads.

    Raises InputError if there is none.
    """
    if WORKER_VARIABLE in variables and variables[WORKER_VARIABLE].isdecimal():
        return worker_of(plan, int(variables[WORKER_VARIABLE]))
    rank = rank_from_env(variables)
    if rank is not None:
        return worker_of(plan, rank.local_rank)
    used = {pu for thread in threads for pu in thread.pus}
    owners = [worker for worker in plan.workers if used <= {*worker.pus}]
    if len(owners) != 1:
        raise InputError(f"no worker of the plan: no rank variable, and CPUs {format_list(used)} are no worker's")
    return owners[0]


def variables_of(pid: int) -> dict[str, str]:
    """Read the environment that a process was started with. Raises OSError if it has ended or is another user's."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(variable.split("=", 1) for variable in environ if "=" in variable)


def planned_worker_of(pid: int, variables: Mapping[str, str]) -> WorkerPlan | None:
    """Return the planned worker of a process with this environment; None if its plan no longer exists."""
    path, worker = plan_path_of(variables, pid), variables.get(WORKER_VARIABLE, "")
    try:
        exists = path is not None and path.is_file()  # reading a pipe would block
    except OSError:  # the file is another user's
        exists = False
    if path is None or not exists or not worker.isdecimal():
        return None
    return worker_of(read_host_plan(path), int(worker))


def _numa_maps(proc: Path) -> str:
    """Return a process's mappings with their NUMA nodes; "" if the kernel does not list them."""
    try:
        return (proc / "numa_maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def running_processes(pids: tuple[int, ...], plan: Plan | None = None) -> tuple[Running, ...]:
    """Read these processes, for () all that a plan has bound, each with its own plan or with `plan`.

    Raises InputError if there is none.
    """
    if pids:
        return tuple(inspect_process(pid, plan) for pid in pids)
    processes = bound_processes()
    if not processes:
        raise InputError(
            "none of your processes on this host is bound by a plan: start one with a plan, or name a process"
        )
    return processes


def bound_processes() -> tuple[Running, ...]:
    """Read all processes of this host that a plan has bound and that this user may inspect."""
    running = []
    for pid in planned_environments():
        with suppress(InputError):  # it has ended meanwhile, as short-lived children of bound processes do
            running.append(inspect_process(pid))
    return tuple(running)


def binding_report(processes: Sequence[Running]) -> str:
    """Write a block for each process: planned and actual binding, a line for each difference.

    If its threads may run on different CPUs, the ids of the threads by CPUs.
    """
    blocks = []
    for process in processes:
        by_cpus: dict[tuple[int, ...], list[int]] = {}
        for thread in process.threads:
            by_cpus.setdefault(thread.pus, []).append(thread.tid)
        lines = [f"pid {process.pid}: {printable(process.command)[:90]}"]
        if process.worker is None:
            lines.append(f"  planned  {'not at all' if process.foreign else process.reason}")
        else:
            worker = process.worker
            memory = _policy_text(worker.memory_policy, worker.memory_nodes)
            lines.append(f"  planned  worker {worker.local_rank}: {name_cpus(worker.pus)}, memory {memory}")
        policy = process.memory_policy and f", memory {_policy_text(process.memory_policy, process.policy_nodes)}"
        sizes = ", ".join(f"{size / MIB:.0f} MiB on node {n}" for n, size in sorted(process.memory_bytes.items()))
        used = f"{name_cpus({pu for pus in by_cpus for pu in pus})} to {plural(len(process.threads), 'thread')}"
        lines.append(f"  actual   {used}{policy or ''}" + (f"; {sizes}" if sizes else ""))
        if len(by_cpus) > 1:
            lines += [f"  threads  {name_cpus(pus)}: {format_list(ids)}" for pus, ids in by_cpus.items()]
        lines += [f"  differs  {difference}" for difference in process.differences]
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbor:
    """A process bound by another plan, and its PUs."""

    pid: int
    pus: tuple[int, ...]


def plan_beside(
    request: Request,
    env: Mapping[str, str],
    command: tuple[str, ...] = (),
    *,
    share: bool,
    compare: Compare | None = None,
) -> Plan:
    """Plan this host beside running processes of other plans: with `share` avoid their cores, otherwise warn.

    `env` is this process's environment; `compare` as in `plan_machine`. Raises InputError if the request does not fit,
    or no core is left.
    """
    neighbors = find_neighbors(env)
    if share:
        occupied = tuple(sorted({pu for neighbor in neighbors for pu in neighbor.pus}))
        return plan_this_machine(replace(request, occupied=occupied), env, command, compare=compare)
    plan = plan_this_machine(request, env, command, compare=compare)
    return replace(plan, warnings=plan.warnings + contention_warnings(plan, neighbors))


def find_neighbors(env: Mapping[str, str]) -> tuple[Neighbor, ...]:
    """List this user's processes (for root, all users') that other plans have bound, by process id.

    `env` is this process's environment: processes of its own plan are left out.
    """
    this_job, neighbors = _job(env), []
    for pid, variables in planned_environments().items():
        try:
            mask = tuple(sorted(os.sched_getaffinity(pid)))
        except OSError:
            continue  # it has ended
        try:
            worker = planned_worker_of(pid, variables)
        except InputError:  # a plan of another version, for example
            worker = None
        pus = worker.pus if worker else mask
        if PLAN_VARIABLE not in env or _job(variables) != this_job:
            neighbors.append(Neighbor(pid=pid, pus=pus))
    return tuple(neighbors)


def _job(variables: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(variables.get(name) for name in JOB_VARIABLES)


def contention_warnings(plan: Plan, neighbors: tuple[Neighbor, ...]) -> tuple[str, ...]:
    """Return a warning that lists the neighbors on the plan's cores, with the setting that avoids them if other cores
    are enough; () if none."""
    used = {pu for worker in plan.workers for pu in worker.pus}
    cores = {pu for core in plan.machine.cores if not used.isdisjoint(core.pus) for pu in core.pus}
    overlapping = [neighbor for neighbor in neighbors if not cores.isdisjoint(neighbor.pus)]
    if not overlapping:
        return ()
    process, them, end = ("process", "it", "it ends") if len(overlapping) == 1 else ("processes", "them", "they end")
    described = first_named([f"{neighbor.pid} ({name_cpus(neighbor.pus)})" for neighbor in overlapping])
    occupied = tuple(sorted({pu for neighbor in neighbors for pu in neighbor.pus}))
    try:
        plan_machine(plan.machine, replace(plan.request, occupied=occupied), plan.runtime, plan.measured)
        remedy = f"{{share=true}} avoids {them}"
    except InputError:
        remedy = f"wait until {end}, as too few cores are free of {them}"
    return (f"cores of this plan are in use by {process} {described} of another plan: {remedy}",)
