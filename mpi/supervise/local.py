"""Run a job's workers on this host, without a launcher."""

import math
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from affinity.errors import RunError
from affinity.ranks.rank import LOOPBACK
from affinity.wording import counted
from mpi.launchers.job import Job
from mpi.launchers.local import local_commands
from mpi.supervise.connection import TOKEN_VARIABLE, new_token
from mpi.supervise.exits import SETTLE_S, describe_exit, first_cause
from mpi.supervise.ranks import RankSupervisor
from mpi.supervise.signals import (
    PREEMPTION_SIGNAL,
    InterruptedBySignalError,
    ignore_stop_signals,
    interrupt,
    interruptible,
)

POLL_S = 0.05
GRACE_S = 5.0  # between SIGTERM and SIGKILL
REAP_S = 2.0


@dataclass(slots=True)
class SavedStop:
    """The end of a job whose ranks save before they stop: the signal that asked for it, 0 for none yet, and the
    monotonic time at which the ranks are ended all the same."""

    number: int = 0
    deadline: float = math.inf


def run_local(
    job: Job,
    env: Mapping[str, str],
    out: TextIO | None = None,
    err: TextIO | None = None,
    *,
    save_s: float | None = None,
) -> int:
    """Run the job's workers on this host to their end; 0 when all succeeded, 2 when all that failed refused their
    input. `env` is the environment that they inherit.

    Output is labeled with its rank and also written to log_dir/rank-N.log; what the ranks use, to usage/ beside
    log_dir. When one rank fails the others are stopped. Raises RunError naming the rank, its exit or signal, its log
    and last lines; on SIGINT or SIGTERM stops everything and returns 128 + the signal; SIGUSR1 is passed on. With
    `save_s`, the first SIGINT or SIGTERM is passed on as SIGUSR1 too, and the ranks have that many seconds to save and
    end. No process is left behind in any case.
    """
    out, err = out or sys.stdout, err or sys.stderr
    port = job.master_port or free_port()
    secret = {TOKEN_VARIABLE: new_token()}
    supervisor = RankSupervisor(job.log_dir, out, err)
    stop = SavedStop()

    def save_first(number: int) -> None:
        stop.number, stop.deadline = number, time.monotonic() + (save_s or 0)
        name, workers = signal.Signals(number).name, counted(len(supervisor.ranks), "worker")
        print(f"\n{name}: {workers} save and stop after the next step (once more: at once)", file=err)
        supervisor.signal(PREEMPTION_SIGNAL)

    with interruptible(lambda: supervisor.signal(PREEMPTION_SIGNAL), save_first if save_s is not None else None):
        try:
            for rank, command in enumerate(local_commands(job, port)):
                label = "" if rank == job.plain_rank else f"[{rank}] "
                supervisor.start(rank, command.argv, {**env, **dict(command.variables), **secret}, label=label)
            supervisor.sample(whole_host=True)
            status = _watch(supervisor, stop)
            return 128 + stop.number if stop.number else status
        except InterruptedBySignalError as stopped:
            number = stopped.args[0]
            print(f"\nstopping {counted(len(supervisor.ranks), 'worker')} ({signal.Signals(number).name})", file=err)
            return 128 + int(number)
        finally:
            supervisor.stop(GRACE_S, REAP_S)
            ignore_stop_signals()
            supervisor.close()


def free_port() -> int:
    """A TCP port that is free on this host's loopback now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _watch(supervisor: RankSupervisor, stop: SavedStop) -> int:
    """Wait for all workers, or for the first failure; the exit status of the job. Raises InterruptedBySignalError where
    the workers take too long to save."""
    while not any(rank.failed for rank in supervisor.ranks):
        if supervisor.all_exited:
            return 0
        if time.monotonic() > stop.deadline:
            interrupt(stop.number)
        supervisor.poll(POLL_S)
    settled = time.monotonic() + SETTLE_S
    while time.monotonic() < settled and not supervisor.all_exited:
        supervisor.poll(POLL_S)
    failed = [rank for rank in supervisor.ranks if rank.failed]
    if all(rank.process.returncode == 2 for rank in failed):
        return 2  # the ranks have printed what is wrong with their input
    supervisor.stop(GRACE_S, REAP_S)
    supervisor.drain()
    if stop.number and any(rank.process.returncode == -PREEMPTION_SIGNAL for rank in failed):
        return 0  # stopped before there was anything to save
    raise RunError(describe_exit(first_cause(rank.exit() for rank in failed)))
