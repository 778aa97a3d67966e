"""Apply a WorkerPlan to this process and read back what the kernel really gave: the package's only effect.

    python -m affinity.bind --plan plan.json -- python train.py

binds, verifies, exports the worker's environment and torch.distributed's env://, and becomes the command.
"""

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from affinity.errors import InputError, RunError
from affinity.exit_status import exit_status
from affinity.kernel.mempolicy import set_memory_policy
from affinity.kernel.observe import launcher_differences, refuse, verify
from affinity.planner.openmp import reconciled
from affinity.planner.plan import Plan, Request, WorkerPlan
from affinity.planner.plan_file import plan_of_host, plan_to_json, read_json, request_from_json, worker_from_dict
from affinity.planner.runtime import with_libiomp5
from affinity.planner.this_machine import plan_this_machine
from affinity.ranks.rank import LOCAL_RANK_VARIABLES, Rank, discover, local_rank_of
from affinity.ranks.rendezvous import with_rank
from affinity.topology.cpuset import format_list
from affinity.topology.sysfs import this_machine

# Tell the command which plan it was bound by, as which of its workers.
PLAN_VARIABLE, WORKER_VARIABLE = "AFFINITY_PLAN", "AFFINITY_WORKER"
DESCRIPTORS = "/proc/self/fd/"  # where a process finds a plan that is kept in memory, as a file of this name
MEMORY_FILE = "plan.json"


def apply(worker: WorkerPlan) -> None:
    """Bind this process and everything it starts to the worker's PUs and memory nodes.

    Raises RunError when none of the PUs may be used. A kernel that forbids memory policies (containers without
    SYS_NICE) is reported and gone along with: bound to its cores, a process touches local memory first anyway.
    """
    try:
        os.sched_setaffinity(0, worker.pus)
    except OSError as error:
        allowed = format_list(os.sched_getaffinity(0))
        raise RunError(
            f"cannot bind to PUs {format_list(worker.pus)}: {error.strerror}; this process may use {allowed}: "
            "make the plan inside the same job or container"
        ) from None
    problem = set_memory_policy(worker.memory_policy, worker.memory_nodes)
    if problem:
        print(f"affinity: memory policy {worker.memory_policy} not applied: {problem}", file=sys.stderr)


@contextmanager
def running_on(pus: tuple[int, ...]) -> Iterator[None]:
    """Move this thread to these PUs for a while; threads that it starts meanwhile stay there. () changes nothing."""
    before = os.sched_getaffinity(0)
    if pus:
        os.sched_setaffinity(0, pus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def planned_worker(path: Path, local_rank: int) -> WorkerPlan:
    """Worker `local_rank` of the plan file. Raises InputError when the file or the worker is not there."""
    return worker_from_dict(plan_of_host(read_json(path), socket.gethostname()), local_rank)


def plan_path_of(env: Mapping[str, str], pid: int | str = "self") -> Path | None:
    """The plan file that a process's environment names; None where it names none, or one in memory that is not there.

    A process that a bound one has started inherits the variable, but most often not the descriptor, whose number may
    then be any other file's: a pipe's, which blocks whoever reads it.
    """
    told = env.get(PLAN_VARIABLE)
    if told is None or not told.startswith(DESCRIPTORS):
        return None if told is None else Path(f"/proc/{pid}/cwd") / told
    path = Path(f"/proc/{pid}/fd/{told.removeprefix(DESCRIPTORS)}")
    try:
        return path if str(path.readlink()).startswith(f"/memfd:{MEMORY_FILE}") else None
    except OSError:
        return None


def bound_worker(env: Mapping[str, str]) -> WorkerPlan | None:
    """The worker that `become` bound this process as; None when it did not, or when its plan is out of reach."""
    path = plan_path_of(env)
    return None if path is None or WORKER_VARIABLE not in env else planned_worker(path, int(env[WORKER_VARIABLE]))


def _bound_as(rank: Rank, env: Mapping[str, str]) -> bool:
    """Whether a plan has bound this process, or the one that started it, as this very rank: then all names of the rank
    agree, while a launcher that was started by a bound process has changed some of them."""
    ranks = {env.get(name) for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")}
    sizes = {env.get(name) for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")}
    return PLAN_VARIABLE in env and ranks == {str(rank.rank)} and sizes == {str(rank.world_size)}


def become(
    worker: WorkerPlan,
    plan_path: Path,
    command: tuple[str, ...],
    *,
    rank: Rank | None,
    check: bool,
    keep_env: bool = False,
    bound: bool = False,
) -> NoReturn:
    """Bind this process as planned, verify unless told not to, and turn into the command (never returns).

    `rank`: which of its job this process is, for the command to find; None where no launcher has told.
    `bound`: the launcher has bound this process to whole cores; it is then only narrowed to the plan's PUs of them.
    Inherited variables that contradict the plan are reported (by the host's first worker) and overridden, or kept.
    """
    if bound and check:
        refuse(worker, launcher_differences(worker, tuple(os.sched_getaffinity(0))))
    apply(worker)
    if check:
        verify(worker)
    env, clashes = reconciled(os.environ, dict(worker.env), keep=keep_env)
    if clashes and worker.local_rank == 0:
        print(f"affinity: inherited and {'kept' if keep_env else 'overridden'}: {', '.join(clashes)}", file=sys.stderr)
    env = env if rank is None else with_rank(rank, env)
    if "KMP_BLOCKTIME" in dict(worker.env):
        try:
            env = with_libiomp5(env, command)
        except InputError as error:
            if worker.local_rank == 0:
                print(f"affinity: nothing reads the plan's KMP_ variables: {error}", file=sys.stderr)
    env |= {PLAN_VARIABLE: str(plan_path.absolute()), WORKER_VARIABLE: str(worker.local_rank)}
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        raise InputError(f"cannot start {command[0]!r}: {error.strerror}") from None


def plan_here(request: Request, command: tuple[str, ...], env: Mapping[str, str]) -> Path:
    """Plan this host and keep the plan in memory. Every worker of a host makes the same plan: planning is pure."""
    return in_memory(plan_this_machine(request, env, command))


def in_memory(plan: Plan) -> Path:
    """A file of the plan that this process and what it becomes can read, and that ends with them."""
    kept = os.memfd_create(MEMORY_FILE, 0)  # no close-on-exec: the command inherits it
    with os.fdopen(kept, "wb", closefd=False) as file:
        file.write(plan_to_json(plan).encode())
    return Path(f"{DESCRIPTORS}{kept}")


def plan_of_rank(request: Request, rank: Rank, command: tuple[str, ...]) -> tuple[Plan, int]:
    """A plan of this host for the ranks that a launcher has started on it, and which of its workers this rank is.

    A launcher's own binding is kept, and so is that of an earlier plan: to the planner it is then the whole host.
    """
    machine = this_machine()
    bound = _bound_as(rank, os.environ) or set(machine.allowed_pus) < os.sched_getaffinity(os.getppid())
    ppn, index = (1, 0) if bound else (rank.local_world_size, rank.local_rank)
    asked = replace(request, ppn=ppn, nodes=rank.world_size // rank.local_world_size)
    return plan_this_machine(asked, os.environ, command, machine=machine), index


def main(arguments: list[str]) -> int:
    """Command line of `python -m affinity.bind`."""
    parser = argparse.ArgumentParser(prog="python -m affinity.bind", description="bind as planned, then run a command")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--plan", type=Path, help="plan.json written by cputrain plan")
    which.add_argument("--plan-here", metavar="JSON", help="plan this host: what is asked of the plan, ppn included")
    parser.add_argument("--local-rank", type=int, help="default: from the launcher's environment")
    parser.add_argument("--bound", action="store_true", help="the launcher has bound this process: check that it has")
    parser.add_argument("--no-verify", action="store_true", help="go on when the kernel gave something else")
    parser.add_argument("--keep-env", action="store_true", help="inherited variables win over the plan's")
    parser.add_argument("command", nargs="+", help="-- CMD...")
    options = parser.parse_args(arguments)
    try:
        rank = discover(os.environ)
        local_rank = options.local_rank
        if local_rank is None:
            local_rank = rank.local_rank if rank else local_rank_of(os.environ)
        if local_rank is None:
            raise InputError(f"no local rank: none of {', '.join(LOCAL_RANK_VARIABLES)} is set; give --local-rank")
        command = tuple(options.command)
        path = options.plan or plan_here(request_from_json(options.plan_here), command, os.environ)
        become(
            planned_worker(path, local_rank),
            path,
            command,
            rank=rank,
            check=not options.no_verify,
            keep_env=options.keep_env,
            bound=options.bound,
        )
    except Exception as error:  # noqa: BLE001  bugs are raised again
        return exit_status(error, "affinity.bind")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
