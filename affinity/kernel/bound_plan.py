"""The plan of a rank: handed over in its environment, found again in the rank, applied before its program starts."""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from cputrain.affinity.errors import InputError
from cputrain.affinity.kernel.binding import bind_process
from cputrain.affinity.kernel.observe import launcher_differences, refuse, verify
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
from cputrain.affinity.ranks.launcher_variables import ENV, LAUNCHER_VARIABLES
from cputrain.affinity.ranks.rank import Rank, with_rank
from cputrain.affinity.topology.sysfs import this_machine

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
