"""Apply a WorkerPlan to this process and read back what the kernel really gave: the package's only effect.

    python -m affinity.bind --plan plan.json -- python train.py

binds, exports the worker's environment, verifies, and becomes the command.
"""

import argparse
import ctypes
import errno
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from affinity.cpuset import format_list, format_mask
from affinity.errors import InputError, RunError
from affinity.openmp import reconciled
from affinity.plan import WorkerPlan
from affinity.plan_file import worker_from_dict

# Where launchers say which worker of its host a process is: torchrun and ours, Intel MPI, Open MPI, srun, PALS.
LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
    "PALS_LOCAL_RANKID",
)
# Tell the command which plan it was bound by, as which of its workers.
PLAN_VARIABLE, WORKER_VARIABLE = "AFFINITY_PLAN", "AFFINITY_WORKER"

# set_mempolicy(2), get_mempolicy(2): libnuma would be one more package for two system calls.
SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
POLICIES = {"default": 0, "preferred": 1, "bind": 2, "interleave": 3}
MAX_NODES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the kernel says of this process. `memory_policy` is None where it will not say (some containers)."""

    pus: tuple[int, ...]
    memory_policy: str | None
    memory_nodes: tuple[int, ...]


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


def observe() -> Observed:
    """Read this process's affinity mask and memory policy back from the kernel."""
    mode, nodes = ctypes.c_int(-1), (ctypes.c_ulong * (MAX_NODES // 64))()
    number = SYSCALLS.get(platform.machine(), (None, None))[1]
    known = number is not None and _libc().syscall(number, ctypes.byref(mode), nodes, MAX_NODES + 1, None, 0) == 0
    name = next((name for name, value in POLICIES.items() if known and value == mode.value), None)
    mask = tuple(64 * w + b for w, word in enumerate(nodes) for b in range(64) if word >> b & 1)
    return Observed(pus=tuple(sorted(os.sched_getaffinity(0))), memory_policy=name, memory_nodes=mask)


def differences(worker: WorkerPlan, observed: Observed) -> list[str]:
    """Where the kernel's facts differ from the plan, naming both sides; empty when all is as planned."""
    found = []
    if observed.pus != worker.pus:
        found.append(
            f"PUs planned {format_list(worker.pus)} (mask {format_mask(worker.pus)}), "
            f"given {format_list(observed.pus)} (mask {format_mask(observed.pus)})"
        )
    said = (observed.memory_policy, observed.memory_nodes)
    if observed.memory_policy is not None and said != (worker.memory_policy, worker.memory_nodes):
        found.append(
            f"memory planned {worker.memory_policy} {format_list(worker.memory_nodes)}, "
            f"given {said[0]} {format_list(said[1])}"
        )
    return found


def verify(worker: WorkerPlan) -> None:
    """Raise RunError when the kernel gave this process something else than the plan says."""
    wrong = differences(worker, observe())
    if wrong:
        raise RunError(
            f"local rank {worker.local_rank}: {'; '.join(wrong)}: plan again here, or go on with --no-verify"
        )


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


def set_memory_policy(policy: str, nodes: tuple[int, ...]) -> str | None:
    """Set this process's memory policy; it survives exec. Returns the kernel's reason if it refuses."""
    number = SYSCALLS.get(platform.machine(), (None, None))[0]
    if number is None:
        return f"no set_mempolicy known on {platform.machine()}"
    words = (ctypes.c_ulong * (MAX_NODES // 64))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    mask = words if nodes else None
    if _libc().syscall(number, POLICIES[policy], mask, MAX_NODES + 1 if nodes else 0) == 0:
        return None
    code = ctypes.get_errno()
    if policy == "default" and code in (errno.ENOSYS, errno.EPERM):
        return None  # the default is what such a kernel gives
    return os.strerror(code)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def local_rank_of(env: Mapping[str, str]) -> int | None:
    """This process's place among its host's workers, from the environment of any launcher."""
    return next((int(env[name]) for name in LOCAL_RANK_VARIABLES if env.get(name, "").isdigit()), None)


def planned_worker(path: Path, local_rank: int) -> WorkerPlan:
    """Worker `local_rank` of the plan file. Raises InputError when the file or the worker is not there."""
    try:
        plan = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the plan {path}: {error}") from None
    return worker_from_dict(plan, local_rank)


def bound_worker(env: Mapping[str, str]) -> WorkerPlan | None:
    """The worker that `become` bound this process as; None when it did not."""
    if PLAN_VARIABLE not in env or WORKER_VARIABLE not in env:
        return None
    return planned_worker(Path(env[PLAN_VARIABLE]), int(env[WORKER_VARIABLE]))


def become(
    worker: WorkerPlan, plan_path: Path, command: tuple[str, ...], *, check: bool, keep_env: bool = False
) -> None:
    """Bind this process as planned, verify unless told not to, and turn into the command (never returns).

    Inherited variables that contradict the plan are reported (by the host's first worker) and overridden, or kept.
    """
    apply(worker)
    if check:
        verify(worker)
    env, clashes = reconciled(os.environ, dict(worker.env), keep=keep_env)
    if clashes and worker.local_rank == 0:
        print(f"affinity: inherited and {'kept' if keep_env else 'overridden'}: {', '.join(clashes)}", file=sys.stderr)
    env |= {PLAN_VARIABLE: str(plan_path.resolve()), WORKER_VARIABLE: str(worker.local_rank)}
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        raise InputError(f"cannot start {command[0]!r}: {error.strerror}") from None


def main(arguments: list[str]) -> int:
    """Command line of `python -m affinity.bind`."""
    parser = argparse.ArgumentParser(prog="python -m affinity.bind", description="bind as planned, then run a command")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json written by cputrain plan")
    parser.add_argument("--local-rank", type=int, help="default: from the launcher's environment")
    parser.add_argument("--no-verify", action="store_true", help="go on when the kernel gave something else")
    parser.add_argument("--keep-env", action="store_true", help="inherited variables win over the plan's")
    parser.add_argument("command", nargs="+", help="-- CMD...")
    options = parser.parse_args(arguments)
    local_rank = options.local_rank if options.local_rank is not None else local_rank_of(os.environ)
    try:
        if local_rank is None:
            raise InputError(f"no local rank: none of {', '.join(LOCAL_RANK_VARIABLES)} is set; give --local-rank")
        worker = planned_worker(options.plan, local_rank)
        command = tuple(options.command)
        become(worker, options.plan, command, check=not options.no_verify, keep_env=options.keep_env)
    except (InputError, RunError) as error:
        print(f"affinity.bind: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
