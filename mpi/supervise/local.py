"""Run a job's workers on this host, without a launcher."""

import logging
import math
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from affinity.exit_status import ExitStatus, status_of_signal
from affinity.ranks.rank import LOOPBACK
from affinity.terminal import redraws
from affinity.wording import counted
from mpi.launchers.job import Job
from mpi.launchers.local import local_commands
from mpi.supervise.connection import TOKEN_VARIABLE, new_token
from mpi.supervise.exits import SETTLE_S, JobFailedError, describe_exit, first_cause
from mpi.supervise.ranks import RankProcess, RankSupervisor
from mpi.supervise.signals import (
    FAILURE_GRACE_S,
    PREEMPTION_SIGNAL,
    SAVE_S,
    InterruptedBySignalError,
    interrupt,
    interruptible,
    stop_signals,
    until_interrupted,
)
from mpi.supervise.stalls import (
    Stacks,
    Stall,
    StallWatch,
    able_to_show,
    describe_failure,
)

POLL_S = 0.05
# Below those of mpirun's jobs (affinity/ranks/rendezvous.py) and those that Linux gives to outgoing connections.
PORTS, PORTS_TRIED = range(10_000, 20_000), 100
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SavedStop:
    """The end of a job whose ranks save before they stop: the signal that requested it, 0 for none yet, the monotonic
    time at which the ranks are ended all the same, and whether it is still to be reported."""

    number: int = 0
    deadline: float = math.inf
    unreported: bool = False


def run_local(
    job: Job,
    env: Mapping[str, str],
    out: TextIO | None = None,
    err: TextIO | None = None,
    *,
    save_first: bool = False,
) -> int:
    """Run the job's workers on this host to their end; 0 when all succeeded, 2 when all that failed refused their
    input. `env` is the environment that they inherit.

    Output is labeled with its rank and also written to log_dir/rank-N.log; what the ranks use, to usage/ beside
    log_dir. When one rank fails, or is stopped while others run, all are ended. Raises JobFailedError naming the rank,
    its exit or signal, its log and last lines. On a stop signal the ranks get SIGTERM, or with `save_first`
    SIGUSR1, and SAVE_S to save and end; returns 128 + the signal. SIGUSR1 is passed on. No process is left behind in
    any case.
    """
    out, err = out or sys.stdout, err or sys.stderr
    port = job.master_port or free_port()
    secret = {TOKEN_VARIABLE: new_token(), **dict(job.secrets)}
    supervisor = RankSupervisor(job.log_dir, out, err, live=(redraws(out, env), redraws(err, env)))
    stop = SavedStop()
    grace_s = FAILURE_GRACE_S

    def preempt(number: int) -> None:
        stop.number, stop.deadline, stop.unreported = number, time.monotonic() + SAVE_S, True
        supervisor.preempt()

    with interruptible(supervisor.preempt, preempt if save_first else None):
        try:
            with until_interrupted():
                for rank, command in zip(job.started, local_commands(job, port), strict=True):
                    label = "" if rank == job.plain_rank else f"[{rank}] "
                    supervisor.start(rank, command.argv, {**env, **dict(command.variables), **secret}, label=label)
                # Held back so far: no rank could take it before.
                signal.pthread_sigmask(signal.SIG_UNBLOCK, (PREEMPTION_SIGNAL,))
                supervisor.sample(whole_host=True)
                status = _watch(supervisor, stop, job, 0.0 if save_first else FAILURE_GRACE_S)
            return status_of_signal(stop.number) if stop.number else status
        except InterruptedBySignalError as stopped:
            number = stopped.args[0]
            grace_s = FAILURE_GRACE_S if save_first else SAVE_S
            workers, name = counted(len(supervisor.ranks), "worker"), signal.Signals(number).name
            supervisor.say(f"\nstopping {workers} ({name}) within {grace_s:g} s; repeat the signal to stop at once")
            return status_of_signal(int(number))
        finally:
            supervisor.stop(grace_s)
            supervisor.close()


def free_port() -> int:
    """A TCP port that is free on this host's loopback now. Not one of those that the kernel gives to outgoing
    connections: seconds pass until ranks listen at it."""
    for port in random.SystemRandom().sample(PORTS, PORTS_TRIED):  # the program's own random numbers stay as they are
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _failed(supervisor: RankSupervisor, stop: SavedStop) -> list[RankProcess]:
    """The ranks that have failed; not those that a signal to end has ended as the whole job: schedulers send it to all
    processes, and ranks save before they end by it."""
    ending = [-number for number in stop_signals()] if stop.number else []
    return [rank for rank in supervisor.ranks if rank.failed and rank.process.returncode not in ending]


def _watch(supervisor: RankSupervisor, stop: SavedStop, job: Job, grace_s: float) -> int:
    """Wait for all workers, or for the first failure, after which the others have `grace_s`; the job's exit status.
    Raises InterruptedBySignalError where the workers take too long to save."""
    stalls = StallWatch(job.starting)
    together = job.instances is None  # they wait for each other: one that is stopped stops all
    while not _failed(supervisor, stop):
        if stop.unreported:  # not by the signal's handler, which may interrupt another message
            stop.unreported = False
            name, workers = signal.Signals(stop.number).name, counted(len(supervisor.ranks), "worker")
            supervisor.say(f"\n{name}: {workers} save and stop after the next step; repeat the signal to stop at once")
        if supervisor.all_exited:
            return 0
        if time.monotonic() > stop.deadline:
            interrupt(stop.number)
        if supervisor.poll(POLL_S) and together:
            stalls.check(supervisor.standings(), supervisor.clock.now(), lambda stall: _stacks(supervisor, stall))
    settled = time.monotonic() + SETTLE_S
    while time.monotonic() < settled and not supervisor.all_exited:
        supervisor.poll(POLL_S)
    failed = _failed(supervisor, stop)
    if all(rank.process.returncode == ExitStatus.WRONG_INPUT for rank in failed):  # they have printed it
        if not job.names_errors:
            supervisor.drain()
            logger.warning("cputrain: %s", describe_exit(failed[0].exit()))
        return ExitStatus.WRONG_INPUT
    standings, stall = supervisor.standings(), stalls.before(supervisor.clock.now())
    stacks = _stacks(supervisor, stall)
    supervisor.stop(grace_s)
    supervisor.drain()
    if stop.number and any(rank.process.returncode == -PREEMPTION_SIGNAL for rank in failed):
        return 0  # stopped before there was anything to save
    cause = first_cause(rank.exit() for rank in failed)
    raise JobFailedError(describe_failure(cause, standings, stall, stacks), shortage=cause.shortage, tail=cause.tail)


def _stacks(supervisor: RankSupervisor, stall: Stall | None) -> Stacks:
    """The Python stacks of the awaited ranks that can show one."""
    running = {rank.rank for rank in supervisor.ranks if rank.exited_at is None}
    return {rank: supervisor.stack(rank) for rank in (able_to_show(stall) if stall else ()) if rank in running}
