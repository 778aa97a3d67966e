"""The plan that a process was bound by, as its environment names it: a file, or a plan kept in memory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from affinity.planner.plan import Plan, WorkerPlan
from affinity.planner.plan_file import PLAN_FILE, plan_of_this_host, plan_to_json, read_json, worker_from_dict

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


def planned_worker(path: Path, local_rank: int) -> WorkerPlan:
    """Worker `local_rank` of this host in a plan file. Raises InputError when the file or the worker does not exist."""
    return worker_from_dict(read_host_plan(path), local_rank)


def read_host_plan(path: Path) -> Any:
    """This host's plan in a plan file, as JSON data. Raises InputError when there is none."""
    return plan_of_this_host(read_json(path))


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
    return None if path is None or WORKER_VARIABLE not in env else planned_worker(path, int(env[WORKER_VARIABLE]))
