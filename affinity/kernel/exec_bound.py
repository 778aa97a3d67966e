"""Bind this process and replace it by a command: the last step of every launch."""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from affinity.errors import InputError
from affinity.kernel.binding import bind_process
from affinity.kernel.bound_plan import PLAN_VARIABLE, WORKER_VARIABLE
from affinity.kernel.observe import launcher_differences, refuse, verify
from affinity.planner.openmp import reconciled
from affinity.planner.plan import WorkerPlan
from affinity.planner.runtime import with_libiomp5
from affinity.ranks.rank import Rank
from affinity.ranks.rendezvous import with_rank

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
    planned = dict(worker.env)
    full, clashes = reconciled(env, planned, keep=keep_env)
    warnings = [f"inherited and {'kept' if keep_env else 'overridden'}: {', '.join(clashes)}"] if clashes else []
    full = full if rank is None else with_rank(rank, full)
    if "KMP_BLOCKTIME" in planned:
        try:
            full = with_libiomp5(full, command)
        except InputError as error:
            warnings.append(f"the plan's KMP_ variables have no effect: {error}")
    return full | {PLAN_VARIABLE: str(plan_path.absolute()), WORKER_VARIABLE: str(worker.local_rank)}, warnings
